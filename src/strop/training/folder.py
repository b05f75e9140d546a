"""The folder of a run: run.json, metrics.jsonl, samples.jsonl, checkpoints/, final/."""

import contextlib
import errno
import hashlib
import json
import os
import platform
import shlex
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import strop
from strop._types import Json
from strop.config.base import flat
from strop.distributed import class_of
from strop.models import base_model
from strop.models.quantized import num_weights
from strop.rewards import described
from strop.training import checkpoint
from strop.training.callbacks import CheckpointCallback, EvaluationCallback
from strop.training.card import write_card
from strop.training.lock import locked
from strop.training.logging import JSONLLogger, drop_after, is_evaluation
from strop.user_code import load_function

if TYPE_CHECKING:
    from strop.training.trainer import Trainer

# options that may differ when a run is resumed: they do not change what a step computes
MAY_CHANGE = (
    "num_steps", "num_epochs", "micro_batch_size", "micro_batch_tokens", "log_every", "eval_every", "save_every",
    "keep_checkpoints", "samples_every", "gradient_checkpointing", "compile", "share_prefixes", "merge", "shard",
)  # fmt: skip

PACKAGES = ("numpy", "transformers", "peft", "triton", "datasets")  # run.json has their versions if they are imported
FILES = ("metrics.jsonl", "samples.jsonl", "report.html", "checkpoints", "final", "tensorboard")  # besides run.json


PACKAGE = Path(strop.__file__).parent
Sources = dict[str, str]  # description → hash, or "" if it has no file


class RunFolder:
    """The folder that a run writes to and resumes from."""

    def __init__(self, path: Path, save_every: int, keep: int):
        self.path = path
        self.logger: JSONLLogger | None = None  # set by `open` in the first process
        self._open = contextlib.ExitStack()  # holds the lock until `shut`
        self.checkpoints = CheckpointCallback(path / "checkpoints", save_every or sys.maxsize, keep)

    def open(self, trainer: "Trainer", resume: bool, allow_changes: bool = False) -> None:
        """Lock the folder and begin a new run in it, or with `resume` continue its run from the newest checkpoint.

        With several processes the first one reads and writes the folder and sends the results to the others.
        """
        run, world = trainer.run, trainer.world
        world.from_first(lambda: self._make(resume))
        newest = checkpoint.newest_good(self.path / "checkpoints", type(trainer), world) if resume else None
        if newest is not None:
            _check_same_run(trainer, newest)
            if newest.header["state"]["num_rows"] == run.num_rows:  # else `TrainingRun._begin` raises
                world.from_first(lambda: self._check_sources(run.sources, allow_changes))
            newest.put(trainer)
            if world.is_first:
                print(f"{trainer.name} resumed from step {trainer.state.step}, {newest.path}", file=sys.stderr)
        elif resume and world.is_first:
            print(f"no checkpoint in {self.path} yet: beginning at step {trainer.state.step}", file=sys.stderr)
        evaluated_until = max(
            (one.last_step for one in trainer.callbacks if isinstance(one, EvaluationCallback)), default=-1
        )
        kept = world.from_first(lambda: self._cut_back(trainer.state.step if newest else -1, evaluated_until))
        if newest is not None and world.is_first:
            self._warn_of_missing(kept, trainer.state.step, trainer.config.run.log_every)
        for entry in kept:
            (trainer.history.evaluations if is_evaluation(entry) else trainer.history.steps).append(entry)
        if world.is_first:
            self.logger = JSONLLogger(self.path / "metrics.jsonl")
            trainer.loggers = [*trainer.loggers, self.logger]

    def _make(self, resume: bool) -> None:
        if not resume and (self.path / "run.json").exists():
            raise ValueError(
                f"output_dir must not hold a run, found one in {self.path}; resume=True goes on with it, "
                f"overwrite=True removes it"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self._open.enter_context(locked(self.path))
        if not resume and (self.path / "run.json").exists():  # another process has just begun one
            raise ValueError(f"output_dir must not hold a run, found one in {self.path}")
        checkpoint.remove_unfinished(self.path)

    def note_failure(self, trainer: "Trainer", error: Exception, halfway: bool) -> None:
        """Write a checkpoint after a failed step if possible, and add a note to the error that names the newest one.

        halfway   the step may have changed weights, so no checkpoint is written
        """
        if halfway:
            error.add_note(self._newest("the step may have changed weights, so it has no checkpoint"))
            return
        if trainer.world.size > 1:
            error.add_note(self._newest("this step has no checkpoint, which all processes would have to write"))
            return
        try:
            path = self.checkpoints.save(trainer)
        except Exception as second:  # the first error is raised; leave out this one if it is the same
            why = "" if _is_same(error, second) else f": {second}"
            error.add_note(self._newest(f"no checkpoint of this step could be written{why}"))
        else:
            error.add_note(f"the run up to step {trainer.state.step} is in {path}; resume=True goes on from there")

    def _newest(self, why: str) -> str:
        """Return a note with the reason and the newest checkpoint."""
        found = checkpoint.all_in(self.path / "checkpoints")
        if not found:
            return f"{why}, and there is no earlier one: see save_every"
        return f"{why}; resume=True goes on from the newest, {found[-1]}"

    def shut(self) -> None:
        """Close the logger and release the lock."""
        if self.logger is not None:
            self.logger.close()
        self._open.close()

    def _check_sources(self, now: Sources, allow_changes: bool) -> None:
        path = self.path / "run.json"
        before = _read_about(path).get("sources") if path.exists() else None
        changed = changed_sources(before, now) if isinstance(before, dict) else []
        if changed and not allow_changes:
            raise ValueError(
                f"{self.path} was begun with another {', another '.join(changed)} (hashes in its run.json); "
                f"allow_changes=True goes on with what is here now"
            )

    def _cut_back(self, step: int, evaluated_until: int) -> list[Json]:
        """Remove metrics and samples after this step; return the remaining metrics.

        evaluated_until   last step that the checkpoint knows as evaluated; later evaluations will be repeated
        """
        drop_after(self.path / "samples.jsonl", step)
        until = step if evaluated_until < 0 else evaluated_until
        return drop_after(self.path / "metrics.jsonl", step, until)

    def _warn_of_missing(self, kept: list[Json], step: int, log_every: int) -> None:
        last = max((entry["step"] for entry in kept if not is_evaluation(entry)), default=0)
        if log_every and last < step - step % log_every:
            found = f"end at step {last}" if last else "have no step"
            warnings.warn(
                f"{self.path / 'metrics.jsonl'} must have the steps up to {step}, which the checkpoint is of, but they "
                f"{found}: reports will lack the others",
                stacklevel=2,
            )

    def describe(self, trainer: "Trainer") -> None:
        """Write run.json, in the first process."""
        from strop import __version__

        if not trainer.world.is_first:
            return
        path = self.path / "run.json"
        before, sources = _read_about(path) if path.exists() else {}, trainer.run.sources
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
                "num_parameters": num_weights(trainer.module),
                "num_trained": sum(param.numel() for param in trainer.module.parameters() if param.requires_grad),
                "device": str(trainer.policy.device),
            },
            "num_processes": trainer.world.size,
            "sources": sources,
            "num_rows": trainer.state.num_rows,
            "total_steps": trainer.state.total_steps,
            "versions": versions,
            "started": before.get("started") or time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        earlier = [*before.get("earlier_sources", ())]
        if before.get("sources", sources) != sources:
            earlier.append({"until_step": trainer.state.step, **before["sources"]})
        if earlier:
            about["earlier_sources"] = earlier
        unfinished = self.path / ".run.json.tmp"
        unfinished.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(path)

    def close(self, trainer: "Trainer", interrupted: bool) -> Path:
        """Write a last checkpoint and return its path; write the final model too unless the run was interrupted."""
        path = self.checkpoints.save(trainer)
        if not interrupted:
            checkpoint.save_final(trainer, self.path / "final")
            trainer.world.from_first(lambda: write_card(trainer, _read_about(self.path / "run.json"), self.path))
        return path


def check_usable(folder: Path) -> None:
    """Raise an OSError if this folder cannot be written to, and a ValueError if another process writes to it.

    A folder that does not exist is created for the check and removed again.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            pass
    except OSError as error:
        raise OSError(f"output must be a folder that can be written to, found {folder}: {error.strerror}") from None
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def remove_run(folder: Path) -> None:
    """Delete the files of a run and nothing else in its folder. Do nothing if the folder holds no run."""
    if not (folder / "run.json").exists():
        return
    with locked(folder):
        for name in (*FILES, "run.json"):  # run.json last: a partly removed run still counts as one
            checkpoint.remove(folder / name)


# ---- sources: hashes of a run's inputs besides its options (user functions, chat template, rows) ----


def sources_of(trainer: "Trainer", rows: str) -> Sources:
    """Return the hashes of the trainer's functions, environment, tools and chat template, and the digest of its rows."""
    found, curriculum = {}, trainer.config.run.curriculum
    ordering = [load_function(curriculum, "curriculum")] if curriculum is not None and ":" in curriculum else []
    functions_of = {"function": trainer.functions, "environment or tool": trainer.environments, "curriculum": ordering}
    for kind, functions in functions_of.items():
        for about in map(described, functions):
            own = Path(about.get("file", "")).is_relative_to(PACKAGE)  # a new strop is no change
            found[f"{kind} {about['name']}"] = "" if own else about.get("sha256", "")
    template = json.dumps(getattr(trainer.tokenizer, "chat_template", None), sort_keys=True, default=str)
    return found | {"chat template": hashlib.sha256(template.encode()).hexdigest(), "dataset": rows}


def changed_sources(before: Mapping[str, object], now: Sources) -> list[str]:
    """Return the names of the sources that have changed. A source without a hash before or now is not compared."""
    names = before.keys() | now.keys() if before else set()
    return sorted(
        name for name in names if before.get(name, "gone") != now.get(name, "gone") and _is_known(name, before, now)
    )


def _is_known(name: str, *all_sources: Mapping[str, object]) -> bool:
    return all(sources.get(name) != "" for sources in all_sources)


# ---- small things ----


def _is_same(one: Exception, other: Exception) -> bool:
    """Return whether both errors say the same, or both report a full disk (in Python's or safetensors' words)."""
    full = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT)]
    return str(one) == str(other) or any(words in str(one) and words in str(other) for words in full)


def _read_about(path: Path) -> Json:
    """Return the content of the run.json of an existing run."""
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is broken: {error}; delete it, and it is written anew") from None
    if not isinstance(about, dict) or not isinstance(about.get("started", ""), str):
        raise ValueError(f"{path} must hold an object with a text 'started'; delete it, and it is written anew")
    return about


def _check_same_run(trainer: "Trainer", saved: "checkpoint.Saved") -> None:
    """Raise unless the resumed run has the options it began with. Those in MAY_CHANGE may differ."""
    before, now = flat(saved.config.to_dict()), flat(trainer.config.to_dict())
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old != new and name.rpartition(".")[2] not in MAY_CHANGE:
            raise ValueError(f"{name} must be {old!r} as in the run of {saved.path}, found {new!r}")


def final_model(folder: Path) -> Path:
    """Return the folder of a run's final model: the full model, or the adapter if there is no full model."""
    final, adapter = folder / "final", folder / "final" / "adapter"
    return final if (final / "config.json").exists() or not adapter.exists() else adapter
