"""`Trainer`: what the algorithms share. State, optimiser step, phases, events, checkpoint; the loop is in `loop.py`.

An algorithm says how rows become a batch and which loss that has:

    class MyAlgorithm(Trainer):
        Config = MyConfig                                    # a TrainerConfig
        def step_on(self, rows): return self.update([lambda: loss_of(part) for part in self.micro_batches(rows, lengths)])
        def train_step(self, rows): return self.run_step(lambda: self.step_on(rows))
"""

import codecs
import contextlib
import inspect
import locale
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch

from strop._processes import refuse_several_processes
from strop.algorithms import loop
from strop.algorithms.inputs import check_tokenizer
from strop.algorithms.memory import explained
from strop.algorithms.metrics import on_host
from strop.algorithms.optim import MakeOptimizer, can_skip, learning_rate_at, make_optimizer
from strop.algorithms.state import History, Phases, TrainState
from strop.callbacks import Callback
from strop.config import TrainerConfig, option_names, unknown_option
from strop.data.batching import split

Row = TypeVar("Row")
LEAN_TOKENS = 4  # times micro_batch_tokens, where a token takes a fraction of the memory: see `models.layers`
USERS_PHASES = ("reward",)  # functions of the user's run in them, with all of torch's threads


class Trainer:
    """The base of SFT, DPO, GRPO and OnlineDPO.

    model       a causal LM of transformers (also with peft adapters), strop's MoE, a module that returns logits, or a name
    ref_model   the frozen reference; a copy of the model (or the base below its adapters) if not given
    device      "cpu", "cuda", "cuda:1"; None loads a name onto CUDA where there is one, and leaves a module where it is
    config      the algorithm's Config; **options change single fields of it, flat: learning_rate=1e-4
    logger      one logger or several        callbacks   one object of strop.callbacks or several
    optimizer   makes an optimiser of parameter groups, in place of AdamW
    """

    Config: ClassVar[type[TrainerConfig]] = TrainerConfig

    def __init__(
        self,
        *,
        model: Any,
        ref_model: Any = None,
        tokenizer: Any = None,
        device: torch.device | str | None = None,
        config: Any = None,
        logger: Any = None,
        callbacks: Callback | Iterable[Callback] | None = None,
        optimizer: MakeOptimizer | None = None,
        **options: Any,
    ):
        from strop.models import as_policy, load_model

        refuse_several_processes()
        self.config = self._make_config(config, options)
        check_tokenizer(tokenizer)
        if isinstance(model, (str, Path)):
            # in float32, whatever the files hold: bfloat16 weights lose small updates; below an adapter they may stay
            dtype = None if self.config.lora is not None else torch.float32
            model, loaded = load_model(model, dtype=dtype, device=device)
            tokenizer = loaded if tokenizer is None else tokenizer
        given = as_policy(model)
        if device is not None:
            given.to(device)
        self.policy = as_policy(self._prepared_model(given), tokenizer)
        self.tokenizer = self.policy.tokenizer
        _warn_of_half_precision(self.module)
        self.optimizer = make_optimizer(self.module.named_parameters(), self.config.optim, optimizer)
        self.loggers = _as_list(logger)
        self.callbacks: list[Callback] = _as_list(callbacks)
        self._check_listeners()
        self.state = TrainState()
        self.samples: list[dict[str, Any]] = []  # of the last step: {"prompt", "completion", "reward", …}
        self.stop_reason: str | None = None
        self.output_dir: Path | None = None
        self.reference: Any = None
        self.goes_on = False  # whether train() continues a run: after from_checkpoint, or an interruption
        self.history = History()
        self._phases = Phases(self.policy.device)
        self._step_tokens = 0
        self._unfit: list[torch.Tensor] = []  # of the step's updates: 1 from the one on whose numbers are not finite
        self.setup(ref_model)

    # ---- for subclasses ----

    def setup(self, ref_model: Any) -> None:
        """Called last by the constructor: `self.reference = self.policy.reference(ref_model)`, or as here none."""
        if ref_model is not None:
            raise ValueError(
                f"ref_model must be None, found a {type(ref_model).__name__}: {self.name} has no reference"
            )

    def prepare(self, rows: Sequence[Any], name: str = "dataset") -> Sequence[Any]:
        """Check a dataset's rows and bring them into the form `step_on` takes. Called once by train(), before step 1."""
        return rows

    def step_on(self, rows: list[Any]) -> dict[str, float]:
        """Train on these rows of the dataset; returns the metrics."""
        raise NotImplementedError(f"{self.name} has no step_on")

    def evaluate_on(self, rows: list[Any]) -> dict[str, float]:
        """Metrics of these rows, without training."""
        raise NotImplementedError(f"{self.name} has no evaluate_on")

    def extra_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """An algorithm's own state for the checkpoint: tensors by name, and plain JSON values."""
        return {}, {}

    def load_extra_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        """Take back what `extra_state` gave."""

    def update(self, losses: Iterable[Callable[[], torch.Tensor]]) -> dict[str, Any]:
        """One optimiser step on the sum of the losses, each made by its function just before its backward.

        What is not finite never reaches the weights. On a GPU the optimiser is told so there, and the step's end, which
        waits for the device anyway, raises; until then loss and norm are tensors.
        """
        self.optimizer.zero_grad(set_to_none=True)
        parts = []
        for loss_of in losses:
            with self.phase("forward"), self.autocast():
                loss = loss_of()
            with self.phase("backward"):
                if loss.requires_grad:  # else nothing of this part counts, as when every token is masked
                    loss.backward()
            parts.append(loss.detach())
        with self.phase("update"):
            params = [param for group in self.optimizer.param_groups for param in group["params"]]
            limit = self.config.optim.max_grad_norm or float("inf")
            grad_norm = torch.nn.utils.clip_grad_norm_(params, limit)
            total = sum(parts, torch.zeros((), device=self.policy.device))
            found: dict[str, Any] = {"loss": total, "grad_norm": grad_norm}
            if can_skip(self.optimizer):
                unfit = (~(total + grad_norm).isfinite()).float()
                self._unfit.append(torch.maximum(self._unfit[-1], unfit) if self._unfit else unfit)
                self.optimizer.found_inf = self._unfit[-1]  # type: ignore[attr-defined]
            else:
                found = dict(zip(found, on_host(list(found.values())), strict=True))
                if not all(abs(value) < float("inf") for value in found.values()):
                    raise self._not_finite(found)
            learning_rate = self._set_learning_rate()
            self.state.updates += 1  # before it: one that fails halfway has changed weights
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)  # a rollout that follows has their memory
        return {**found, "learning_rate": learning_rate}

    def _on_host(self, metrics: dict[str, Any]) -> dict[str, float]:
        """The metrics as numbers, in the one wait for the device that a step has; raises where an update was skipped."""
        tensors = {name: value for name, value in metrics.items() if isinstance(value, torch.Tensor)}
        values = on_host([*tensors.values(), *self._unfit])
        skipped, self._unfit = values[len(tensors) :], []
        metrics = {**metrics, **dict(zip(tensors, values, strict=False))}
        if any(skipped):
            self.state.updates -= int(sum(skipped))
            raise self._not_finite(metrics)
        return metrics

    def _not_finite(self, found: dict[str, Any]) -> FloatingPointError:
        return FloatingPointError(
            f"loss {found.get('loss')} and gradient norm {found.get('grad_norm')} must be finite; the weights are those of "
            f"step {self.state.step}, before this update"
        )

    def run_step(self, work: Callable[[], dict[str, Any]]) -> dict[str, float]:
        """Do `work` as one training step: events, phase times, tokens per second, loggers."""
        start = time.perf_counter()
        self._phases, self._step_tokens, self._unfit = Phases(self.policy.device), 0, []
        self.fire("on_step_begin")
        self.policy.model.train()
        with explained(self):
            metrics = self._on_host(work())
        times = self._phases.metrics()
        seconds = time.perf_counter() - start
        self.state.step += 1
        self.state.seconds += seconds
        self.state.num_tokens += self._step_tokens
        if self._step_tokens:
            metrics["tokens_per_second"] = self._step_tokens / seconds
        metrics |= times
        metrics["time/step"] = seconds
        if self.policy.device.type == "cuda":
            metrics["memory"] = float(torch.cuda.max_memory_allocated(self.policy.device))
        if self.config.run.log_every and self.state.step % self.config.run.log_every == 0:
            self.log(metrics)
        self.fire("on_step_end", metrics)
        return metrics

    @property
    def failed_phase(self) -> str | None:
        """The phase an error of this step came from."""
        return self._phases.failed

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the seconds within as the metric time/<name>."""
        from strop.models import one_thread

        alone = self.policy.kind == "moe" and name not in USERS_PHASES
        with self._phases.phase(name), one_thread() if alone else contextlib.nullcontext():
            yield

    def count_tokens(self, num_tokens: int) -> None:
        """So many more tokens in this step; gives tokens_per_second."""
        self._step_tokens += int(num_tokens)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.config.run.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.policy.device.type, torch.bfloat16)

    def micro_batches(self, rows: Sequence[Row], lengths: Sequence[int], *, lean: bool = False) -> list[list[Row]]:
        """The rows in parts of at most micro_batch_size rows and micro_batch_tokens tokens.

        lengths   tokens of each row; of a pair those of both its completions
        lean      nothing is kept for a backward, so that more tokens have room
        """
        run = self.config.run
        num_tokens = run.micro_batch_tokens * (LEAN_TOKENS if lean or self.policy.fuses else 1)
        return split(rows, lengths, run.micro_batch_size, num_tokens, padded=self.policy.pads)

    def eval_batches(self, rows: Sequence[Row], lengths: Sequence[int]) -> list[list[Row]]:
        """The rows of a dataset, however many, in parts no larger than training has them."""
        run = self.config.run
        size = run.micro_batch_size or run.batch_size
        return split(rows, lengths, size, run.micro_batch_tokens, padded=self.policy.pads)

    # ---- for users ----

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def model(self) -> torch.nn.Module:
        return self.policy.model

    @property
    def module(self) -> torch.nn.Module:
        """The model itself, without what torch.compile put around it."""
        return getattr(self.policy.model, "_orig_mod", self.policy.model)

    @property
    def reference_model(self) -> torch.nn.Module | None:
        """The reference's own weights; None without a reference, or where it is the base below the adapter."""
        return None if self.reference is None else self.reference.model

    def train(
        self,
        dataset: Any,
        *,
        eval_dataset: Any = None,
        num_steps: int | None = None,
        num_epochs: int | None = None,
        output_dir: str | Path | None = None,
        resume: bool = False,
        progress: bool | None = None,
    ) -> History:
        """Train on the dataset: rows as dicts (list, datasets.Dataset) or a JSONL file.

        A run that begins sets the global random generators by config.run.seed. After from_checkpoint, or after an
        interruption, it goes on where it was. Ctrl-C and SIGTERM end it after the step, with a checkpoint.

        num_steps, num_epochs   where to end, in place of the config's
        output_dir              the run folder: metrics, samples, checkpoints, and at the end the model
        resume                  go on from the newest checkpoint of output_dir, or begin if there is none
        progress                a progress bar and tables of samples; None is "on a terminal"
        """
        return loop.train(self, dataset, eval_dataset, num_steps, num_epochs, output_dir, resume, progress)

    def prepared(self, dataset: Any, name: str = "dataset") -> Sequence[Any]:
        """A dataset's rows, loaded, checked and tokenised: train() and evaluate() take them without doing so again."""
        return loop.prepared(self, dataset, name)

    def evaluate(self, dataset: Any) -> dict[str, float]:
        """Metrics of a dataset as eval/<metric>; leaves weights and random numbers as they are."""
        return loop.evaluate(self, dataset)

    def save(self, path: str | Path) -> None:
        """Write everything needed to go on into one file, atomically."""
        from strop import checkpoint

        checkpoint.save(self, path)
        self.fire("on_save", str(path))

    @classmethod
    def from_checkpoint(cls, path: str | Path, model: Any = None, ref_model: Any = None, **arguments: Any) -> Self:
        """The trainer as it was saved. A plain module and functions (reward_fn, logger, …) are passed in again."""
        from strop import checkpoint

        return checkpoint.restore(cls, path, model, ref_model, arguments)  # type: ignore[return-value]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write model and tokenizer as `AutoModelForCausalLM.from_pretrained` reads them; adapters are merged in."""
        from strop import checkpoint

        checkpoint.save_pretrained(self, folder)

    def log(self, metrics: dict[str, float]) -> None:
        """Give metrics to every logger. A logger that fails stops the run."""
        timed = {"time": self.state.seconds, **metrics}
        for logger in self.loggers:
            logger.log(timed, step=self.state.step)

    def fire(self, event: str, *arguments: Any) -> None:
        for callback in list(self.callbacks):
            getattr(callback, event)(self, *arguments)

    def stop(self, reason: str) -> None:
        """End train() after the present step."""
        self.stop_reason = reason

    # ---- inside ----

    def _make_config(self, config: Any, options: dict[str, Any]) -> Any:
        if config is not None and not isinstance(config, self.Config):
            raise TypeError(f"config must be a {self.Config.__name__}, found {type(config).__name__}")
        makers = [cls.__init__ for cls in type(self).__mro__ if cls is not object]  # type: ignore[misc]
        arguments = [
            p.name for make in makers for p in inspect.signature(make).parameters.values() if p.kind == p.KEYWORD_ONLY
        ]
        known = option_names(self.Config)
        for option in options:
            if option not in known and "." not in option:
                raise ValueError(unknown_option(option, [*known, *arguments], f" of {self.name}", self.Config))
        return (config if config is not None else self.Config()).changed(options)

    def _check_listeners(self) -> None:
        for logger in self.loggers:
            if not callable(getattr(logger, "log", None)):
                raise TypeError(f"logger must have log(metrics, step), found a {type(logger).__name__}")
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(f"callbacks must be of strop.callbacks.Callback, found {type(callback).__name__}")

    def _prepared_model(self, policy: Any) -> torch.nn.Module:
        """The model with what the config asks of it: adapters, no dropout, gradient checkpointing, compilation."""
        run, model = self.config.run, policy.model
        if self.config.lora is not None:
            if policy.kind != "hf":
                raise ValueError(f"lora must be None but for Hugging Face models, found a {type(model).__name__}")
            model = with_lora(model, self.config.lora, run.seed)
        if policy.kind == "moe" and (run.autocast or run.compile):
            warnings.warn(
                "autocast and compile have no effect on the MoE: its engine computes in float32", stacklevel=4
            )
            return model
        if not run.dropout:
            turn_dropout_off(model)
        if run.gradient_checkpointing:
            if not hasattr(model, "gradient_checkpointing_enable"):
                raise ValueError(
                    f"gradient_checkpointing must be False: {type(model).__name__} has no gradient_checkpointing_enable"
                )
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return _compiled(model) if run.compile else model

    def _set_learning_rate(self) -> float:
        state = self.state
        total_steps = (state.total_steps or self.config.run.num_steps) - state.first_step
        learning_rate = learning_rate_at(state.step - state.first_step, total_steps, self.config.optim)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        return learning_rate


def _as_list(given: Any) -> list[Any]:
    """None, one or several as a list."""
    return [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]


def _warn_of_half_precision(model: torch.nn.Module) -> None:
    for name, param in model.named_parameters():
        if param.requires_grad and param.dtype in (torch.bfloat16, torch.float16):
            warnings.warn(
                f"{name} is trained in {param.dtype}, which loses updates below about 1/256 of a weight; "
                f'load the model in float32 and use autocast="bf16"',
                stacklevel=4,
            )
            return


def turn_dropout_off(model: torch.nn.Module) -> None:
    """Set every dropout probability of the model to 0, also those that modules keep as numbers.

    attention_dropout of most of transformers; dropout and layerdrop of OPT and its kin
    """
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("dropout" in name or name == "layerdrop"):
                setattr(module, name, 0.0)


def _compiled(model: torch.nn.Module) -> torch.nn.Module:
    encoding = locale.getencoding()
    if codecs.lookup(encoding).name == "ascii":  # torch opens its own templates in it, and would say UnicodeDecodeError
        raise ValueError(
            f"compile must be False where the locale knows ASCII alone, found {encoding}; set PYTHONUTF8=1"
        )
    return torch.compile(model)  # type: ignore[return-value]


def with_lora(model: Any, config: Any, seed: int) -> Any:
    """The model with the adapter of a LoRAConfig on it."""
    try:
        import peft
    except ImportError:
        raise ImportError('lora needs peft: pip install "strop[train]"') from None
    if isinstance(model, peft.PeftModel):
        raise ValueError("lora must be None: the model has peft adapters already")
    targets = config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules)
    lora = peft.LoraConfig(r=config.r, lora_alpha=config.alpha, target_modules=targets, task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return peft.get_peft_model(model, lora)
