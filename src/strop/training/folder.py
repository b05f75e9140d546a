"""The folder of a run: run.json, metrics.jsonl, samples.jsonl, checkpoints/, final/."""

import errno
import json
import os
import platform
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from strop.distributed import class_of
from strop.models import base_model
from strop.rewards import described
from strop.training import checkpoint
from strop.training.callbacks import CheckpointCallback
from strop.training.card import write_card
from strop.training.logging import JSONLLogger, drop_after
from strop.training.state import get_rng, set_rng

if TYPE_CHECKING:
    from strop.training.trainer import Trainer

# what may differ when a run is resumed: where it ends, and how it goes about it, but not what it computes
MAY_CHANGE = (
    "num_steps", "num_epochs", "micro_batch_size", "micro_batch_tokens", "log_every", "eval_every", "save_every",
    "keep_checkpoints", "samples_every", "gradient_checkpointing", "compile", "merge", "shard",
)  # fmt: skip

PACKAGES = ("numpy", "transformers", "peft", "triton", "datasets")  # whose versions run.json has, where they are in use
FILES = ("metrics.jsonl", "samples.jsonl", "report.html", "checkpoints", "final", "tensorboard")  # besides run.json


class RunFolder:
    """Where a run writes, and from where it goes on."""

    def __init__(self, path: Path, save_every: int, keep: int):
        self.path = path
        self.logger: JSONLLogger | None = None  # once it is open
        self.checkpoints = CheckpointCallback(path / "checkpoints", save_every or sys.maxsize, keep)

    def open(self, trainer: "Trainer", resume: bool) -> None:
        """A new run, or with `resume` the one that is there, from its newest checkpoint.

        Of several processes the first looks and writes, and the others are told.
        """
        run, world = trainer.run, trainer.world
        world.from_first(lambda: self._make(resume))
        newest = checkpoint.newest_good(self.path / "checkpoints", type(trainer), world) if resume else None
        if newest is not None:
            _check_same_run(trainer, newest)
            newest.put(trainer)
            if world.is_first:
                print(f"{trainer.name} resumed from step {run.state.step}, {newest.path}", file=sys.stderr)
        elif resume and world.is_first:
            print(f"no checkpoint in {self.path} yet: beginning at step {run.state.step}", file=sys.stderr)
        kept = world.from_first(lambda: self._cut_back(run.state.step if newest else -1))
        for entry in kept:
            evaluated = any(name.startswith("eval/") for name in entry)
            (run.history.evaluations if evaluated else run.history.steps).append(entry)
        if world.is_first:
            self.logger = JSONLLogger(self.path / "metrics.jsonl")
            run.loggers = [*run.loggers, self.logger]

    def _make(self, resume: bool) -> None:
        if not resume and (self.path / "run.json").exists():
            raise ValueError(
                f"output_dir must not hold a run, found one in {self.path}; resume=True goes on with it, "
                f"overwrite=True removes it"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        checkpoint.remove_unfinished(self.path)

    def _cut_back(self, step: int) -> list[dict[str, Any]]:
        """Metrics and samples to those up to this step; the metrics."""
        kept = drop_after(self.path / "metrics.jsonl", step)
        drop_after(self.path / "samples.jsonl", step)
        return kept

    def describe(self, trainer: "Trainer") -> None:
        """Write run.json, in the first process."""
        from strop import __version__

        if not trainer.world.is_first:
            return
        path = self.path / "run.json"
        before = _read_about(path) if path.exists() else {}
        versions = {"strop": __version__, "torch": torch.__version__, "python": platform.python_version()}
        versions |= {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules}
        about = {
            **trainer.run.about,
            "algorithm": trainer.name,
            "command": shlex.join(sys.argv),
            "rewards": [described(function) for function in trainer.functions],
            "config": trainer.config.to_dict(),
            "model": {
                "name": str(getattr(getattr(base_model(trainer.module), "config", None), "_name_or_path", "")),
                "class": class_of(trainer.module).__name__,
                "num_parameters": sum(param.numel() for param in trainer.module.parameters()),
                "num_trained": sum(param.numel() for param in trainer.module.parameters() if param.requires_grad),
                "device": str(trainer.policy.device),
            },
            "num_processes": trainer.world.size,
            "num_rows": trainer.run.state.num_rows,
            "total_steps": trainer.run.state.total_steps,
            "versions": versions,
            "started": before.get("started") or time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        unfinished = self.path / ".run.json.tmp"
        unfinished.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(path)

    def close(self, trainer: "Trainer", interrupted: bool) -> Path:
        """A last checkpoint, and the model where the run came to its end."""
        path = self.checkpoints.save(trainer)
        if not interrupted:
            checkpoint.save_final(trainer, self.path / "final")
            trainer.world.from_first(lambda: write_card(trainer, _read_about(self.path / "run.json"), self.path))
        return path


def remove_run(folder: Path) -> None:
    """Delete the files of a run, and nothing else in its folder; where there is no run, nothing at all."""
    if not (folder / "run.json").exists():
        return
    for name in (*FILES, "run.json"):  # run.json last: a folder that was half removed still is a run's
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


class Rescue:
    """Around a step: one that fails, by a reward function or a logger say, costs the run nothing that was done before.

    A checkpoint is written if the state is that of a whole step: either this one is done, or it has changed no weight
    and data position and random numbers are put back. The error goes on, with a note of where the checkpoint is: this
    one, or where the step may have changed weights, or other processes would have to write too, the newest there is.
    """

    def __init__(self, trainer: "Trainer", folder: RunFolder | None):
        self.trainer, self.folder, self.state = trainer, folder, trainer.run.state

    def __enter__(self) -> None:
        state = self.state
        self.before = state.step, state.updates, state.epoch, state.position
        self.rng = get_rng()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if not isinstance(error, Exception):  # not for Ctrl-C: a second one means at once
            return
        state = self.state
        step, updates, epoch, position = self.before
        halfway = state.step == step and state.updates != updates
        if state.step == step and not halfway:
            state.epoch, state.position = epoch, position
            set_rng(*self.rng)
        if self.folder is None:
            return
        if halfway:
            error.add_note(self._of_newest("the step may have changed weights, so it has no checkpoint"))
            return
        if self.trainer.world.size > 1:
            error.add_note(self._of_newest("this step has no checkpoint, which all processes would have to write"))
            return
        try:
            path = self.folder.checkpoints.save(self.trainer)
        except Exception as second:  # the first error is the one to tell; a full disk's would be the same again
            why = "" if _is_same(error, second) else f": {second}"
            error.add_note(self._of_newest(f"no checkpoint of this step could be written{why}"))
        else:
            error.add_note(f"the run up to step {state.step} is in {path}; resume=True goes on from there")

    def _of_newest(self, why: str) -> str:
        assert self.folder is not None
        found = checkpoint.all_in(self.folder.path / "checkpoints")
        if not found:
            return f"{why}, and there is no earlier one: see save_every"
        return f"{why}; resume=True goes on from the newest, {found[-1]}"


def _is_same(one: Exception, other: Exception) -> bool:
    """Whether both say the same: in the same words, or of a full disk in those of Python and of safetensors."""
    full = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT)]
    return str(one) == str(other) or any(words in str(one) and words in str(other) for words in full)


def _read_about(path: Path) -> dict[str, Any]:
    """run.json of a run that goes on."""
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is broken: {error}; delete it, and it is written anew") from None
    if not isinstance(about, dict) or not isinstance(about.get("started", ""), str):
        raise ValueError(f"{path} must hold an object with a text 'started'; delete it, and it is written anew")
    return about


def _check_same_run(trainer: "Trainer", saved: "checkpoint.Saved") -> None:
    """The options of the run that is resumed must be those it began with, but for where it ends and what it reports."""
    before, now = flat(saved.config.to_dict()), flat(trainer.config.to_dict())
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old != new and name.rpartition(".")[2] not in MAY_CHANGE:
            raise ValueError(f"{name} must be {old!r} as in the run of {saved.path}, found {new!r}")


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a tree by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found
