"""Out-of-memory errors: a message with the phase, the size of the failed allocation, and the options to lower."""

import re
import traceback
from typing import TYPE_CHECKING, NoReturn

import torch

from strop.config.base import option_names

if TYPE_CHECKING:
    from strop.training.trainer import Trainer

# phase: what it does, and the options that bound its memory
PHASES = {
    "generate": ("sampling completions", ("batch_size", "group_size", "max_new_tokens")),
    "reward": ("the reward functions", ("batch_size", "group_size")),
    "score": ("scoring", ("micro_batch_tokens", "micro_batch_size")),
    "forward": ("the forward of an update", ("micro_batch_tokens", "micro_batch_size")),
    "backward": ("the backward of an update", ("micro_batch_tokens", "micro_batch_size")),
    "update": ("the optimiser's step", ()),
    "evaluate": ("evaluation", ("batch_size", "micro_batch_tokens", "max_new_tokens")),
}


LACKS = (RuntimeError, MemoryError)  # the types an out-of-memory error can have; other errors have them too


def raise_explained(error: BaseException, trainer: "Trainer", phase: str | None = None) -> NoReturn:
    """Raise an out-of-memory error again as one line that says what to lower; raise any other error unchanged.

    The step's memory is freed first.
    phase   the phase to name; None is the one in which the error occurred
    """
    if not _lack_of_memory(error):
        raise error
    message = _message(trainer, phase or trainer.phases.failed or "step", str(error))
    traceback.clear_frames(error.__traceback__)  # they hold the step's activations
    trainer.optimizer.zero_grad(set_to_none=True)
    if trainer.policy.device.type == "cuda":
        torch.cuda.empty_cache()
    raise torch.OutOfMemoryError(message) from None


def _lack_of_memory(error: BaseException) -> bool:
    """Return whether this is an out-of-memory error. torch on a CPU raises a plain RuntimeError for it."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator: " in str(error)


def _message(trainer: "Trainer", phase: str, told: str) -> str:
    doing, names = PHASES.get(phase, (f"the phase {phase!r}", ("batch_size", "micro_batch_tokens")))
    where = doing if phase == "evaluate" else f"{doing}, step {trainer.state.step + 1}"
    return f"out of memory in {where} (time/{phase}): {_asked(told)}; {_advice(trainer, phase, names)}"


def _asked(told: str) -> str:
    """Return the requested and the available memory, read from torch's or NumPy's message."""
    asked = re.search(r"(?:[Tt]ried|Unable) to allocate ([\d.]+ \w+)", told)
    if asked is None:
        return next(iter(told.strip().splitlines()), "") or "nothing tells how much was asked for"
    total = re.search(r"total capacity of ([\d.]+ \w+)", told)
    free = re.search(r"of which ([\d.]+ \w+) is free", told)
    of = "".join([f" of {total[1]}" if total else "", f", {free[1]} free" if free else ""])
    return f"{asked[1]} asked for{of}"


def _advice(trainer: "Trainer", phase: str, names: tuple[str, ...]) -> str:
    config, known = trainer.config, option_names(type(trainer.config))
    values = {name: _value(trainer, name) for name in names if name in known}
    lower = [f"{name}={value}" for name, value in values.items() if value]
    advice = [f"lower {' or '.join(lower)}"] if lower else []
    advice += [f"set {name}" for name, value in values.items() if not value]  # 0 is no limit
    if phase in ("forward", "backward") and not config.run.gradient_checkpointing and trainer.policy.kind == "hf":
        advice.append("set gradient_checkpointing=True")
    if phase in ("forward", "backward", "update") and config.lora is None and trainer.policy.kind == "hf":
        advice.append("train adapters: lora={'r': 16}")
    return ", or ".join(advice) or "a smaller model, or a larger device, is needed"


def _value(trainer: "Trainer", name: str) -> object:
    config = trainer.config
    parts = (config, *(getattr(config, part, None) for part in ("run", "sampling")))
    return next(getattr(part, name) for part in parts if hasattr(part, name))
