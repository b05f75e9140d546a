"""train(): batches in a fixed order, interruption, the run folder."""

import errno
import json
import os
import platform
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from strop import checkpoint
from strop._checks import check_count
from strop.algorithms.memory import explained
from strop.algorithms.state import History, get_rng, rng_kept, seed_everything, set_rng
from strop.callbacks import Callback, CheckpointCallback, EvaluationCallback, ProgressBar, SampleTable
from strop.logging import JSONLLogger, drop_after

if TYPE_CHECKING:
    from strop.algorithms.trainer import Trainer

# what may differ when a run is resumed: where it ends, and how it goes about it, but not what it computes
MAY_CHANGE = (
    "num_steps", "num_epochs", "micro_batch_size", "micro_batch_tokens", "log_every", "eval_every", "save_every",
    "keep_checkpoints", "samples_every", "gradient_checkpointing", "compile",
)  # fmt: skip


def train(
    trainer: "Trainer",
    dataset: Any,
    eval_dataset: Any,
    num_steps: int | None,
    num_epochs: int | None,
    output_dir: str | Path | None,
    resume: bool,
    progress: bool | None,
) -> History:
    """See `Trainer.train`."""
    rows = prepared(trainer, dataset, "dataset")
    batch_size = trainer.config.run.batch_size
    if batch_size > len(rows):
        raise ValueError(f"batch_size must be at most the number of rows, {len(rows)}, found {batch_size}")
    eval_rows = None if eval_dataset is None else prepared(trainer, eval_dataset, "eval_dataset")
    if resume and output_dir is None:
        raise ValueError("output_dir must be given with resume=True: its newest checkpoint is where the run goes on")
    trainer.history, trainer.stop_reason = History(), None
    folder = None if output_dir is None else RunFolder(Path(output_dir))
    own = _callbacks(trainer, eval_rows, folder, progress)
    loggers, callbacks = list(trainer.loggers), list(trainer.callbacks)
    trainer.callbacks = own["before"] + callbacks + own["after"]
    try:
        if folder is not None:
            folder.open(trainer, resume)
        _begin(trainer, len(rows), num_steps, num_epochs)
        if folder is not None:
            folder.describe(trainer, len(rows))
        _run(trainer, rows, eval_rows, folder)
        return trainer.history
    finally:
        for logger in trainer.loggers:
            if logger not in loggers:
                logger.close()
        trainer.loggers, trainer.callbacks = loggers, callbacks


def _begin(trainer: "Trainer", num_rows: int, num_steps: int | None, num_epochs: int | None) -> None:
    """Set where the run begins and ends. One that goes on keeps its beginning, its data's order and its random numbers."""
    state, run = trainer.state, trainer.config.run
    steps = run.num_steps if num_steps is None else num_steps
    epochs = run.num_epochs if num_epochs is None else num_epochs
    check_count(steps, "num_steps")
    check_count(epochs, "num_epochs")
    if trainer.goes_on and num_rows != (state.num_rows or num_rows):
        raise ValueError(
            f"dataset must have {state.num_rows} rows as when the run began, found {num_rows}; trainer.goes_on = False "
            f"begins a new run with the weights as they are"
        )
    if not trainer.goes_on:
        state.first_step, state.epoch, state.position = state.step, 0, 0
        seed_everything(run.seed)
    state.num_rows = num_rows
    if num_steps is None and num_epochs is not None:
        steps = 0
    if not steps and not epochs:
        raise ValueError("num_steps or num_epochs must be above 0, found 0 of both")
    state.total_steps = state.first_step + (steps or epochs * -(-num_rows // run.batch_size))
    if state.step >= state.total_steps:
        print(f"{trainer.name} is at step {state.step} of {state.total_steps}: nothing left to do", file=sys.stderr)


def _run(trainer: "Trainer", rows: Sequence[Any], eval_rows: "Prepared | None", folder: "RunFolder | None") -> None:
    history, state = trainer.history, trainer.state
    with Interruption() as interruption:
        trainer.goes_on = True
        trainer.fire("on_train_begin")
        try:
            stream = batches(trainer, rows)
            while state.step < state.total_steps and not trainer.stop_reason and not interruption.signal:
                with Rescue(trainer, folder):
                    batch = next(stream)  # only now: a batch that was taken counts as used in a checkpoint
                    metrics = trainer.run_step(lambda batch=batch: trainer.step_on(batch))  # type: ignore[misc]
                history.steps.append({"step": state.step, **metrics})
            history.interrupted = interruption.signal is not None and state.step < state.total_steps
            history.signal, history.stop_reason = interruption.signal, trainer.stop_reason
            if eval_rows is not None and not history.interrupted:
                next(c for c in trainer.callbacks if getattr(c, "dataset", None) is eval_rows).evaluate(trainer)  # type: ignore[attr-defined]
        finally:
            trainer.fire("on_train_end", history)
        if folder is not None:
            history.checkpoint = str(folder.close(trainer))
    trainer.goes_on = history.interrupted
    if history.interrupted:
        where = f"checkpoint {history.checkpoint}" if history.checkpoint else "no output_dir, so no checkpoint"
        print(f"{trainer.name} interrupted after step {state.step} of {state.total_steps}; {where}", file=sys.stderr)


def _callbacks(
    trainer: "Trainer", eval_rows: "Prepared | None", folder: "RunFolder | None", progress: bool | None
) -> dict[str, list[Callback]]:
    """train()'s own: the bar first, the checkpoint last, when every other callback's state is that of the step's end."""
    run = trainer.config.run
    before: list[Callback] = [ProgressBar(show=progress)]
    after: list[Callback] = []
    if eval_rows is not None:
        # without eval_every: at the beginning and at the end
        after.append(EvaluationCallback(eval_rows, run.eval_every or sys.maxsize, at_start=True))
    if run.samples_every:
        path = None if folder is None else folder.path / "samples.jsonl"
        after.append(SampleTable(run.samples_every, 8, path=path, show=progress))
    if folder is not None:
        folder.checkpoints = CheckpointCallback(
            folder.path / "checkpoints", run.save_every or sys.maxsize, run.keep_checkpoints
        )
        after.append(folder.checkpoints)
    return {"before": before, "after": after}


# ---- data ----


class Prepared(list):
    """Rows that went through the algorithm's `prepare` already."""


def prepared(trainer: "Trainer", dataset: Any, name: str) -> Prepared:
    """The dataset's rows as `step_on` takes them; what went through here already stays as it is."""
    if isinstance(dataset, Prepared):
        return dataset
    if not isinstance(dataset, (str, Path)) and hasattr(dataset, "__len__") and not len(dataset):
        raise ValueError(f"{name} must have rows, found none")
    from strop.data.formats import load_rows

    return Prepared(trainer.prepare(load_rows(dataset), name))


def batches(trainer: "Trainer", rows: Sequence[Any]) -> Iterator[list[Any]]:
    """Batches without end, from where the state stands. An epoch's order comes from (seed, epoch) alone."""
    state, run = trainer.state, trainer.config.run
    while True:
        order = epoch_order(len(rows), run.seed, state.epoch, run.shuffle)
        while state.position < len(rows):
            batch = [rows[index] for index in order[state.position : state.position + run.batch_size]]
            state.position += len(batch)
            yield batch
        state.epoch, state.position = state.epoch + 1, 0


def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    order = list(range(num_rows))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def evaluate(trainer: "Trainer", dataset: Any) -> dict[str, float]:
    """See `Trainer.evaluate`."""
    from strop.models import evaluating

    rows = list(prepared(trainer, dataset, "eval_dataset"))
    with explained(trainer, "evaluate"), evaluating(trainer.policy.model), torch.no_grad(), rng_kept():
        metrics = trainer.evaluate_on(rows)
    return {f"eval/{name}": float(value) for name, value in metrics.items()}


# ---- Ctrl-C and SIGTERM ----


class Interruption:
    """While open, SIGINT and SIGTERM are remembered in `signal`, for the loop to end after its step.

    A second one acts at once, as it would have without this. In a thread, where Python takes no signals, nothing changes.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._remember) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: Any) -> None:
        self._restore()

    def _remember(self, number: int, frame: Any) -> None:
        self.signal = number
        self._restore()
        print("\nfinishing the step; once more to stop at once", file=sys.stderr)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


# ---- the run folder ----


class Rescue:
    """Around a step: one that fails, by a reward function or a logger say, costs the run nothing that was done before.

    A checkpoint is written if the state is that of a whole step: either this one is done, or it has changed no weight
    and data position and random numbers are put back. The error goes on, with a note of where the checkpoint is: this
    one, or where the step may have changed weights the newest there is.
    """

    def __init__(self, trainer: "Trainer", folder: "RunFolder | None"):
        self.trainer, self.folder = trainer, folder

    def __enter__(self) -> None:
        state = self.trainer.state
        self.before = state.step, state.updates, state.epoch, state.position
        self.rng = get_rng()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if not isinstance(error, Exception) or self.folder is None:  # not for Ctrl-C: a second one means at once
            return
        state = self.trainer.state
        step, updates, epoch, position = self.before
        if state.step == step:
            if state.updates != updates:
                error.add_note(self._of_newest("the step may have changed weights, so it has no checkpoint"))
                return
            state.epoch, state.position = epoch, position
            set_rng(*self.rng)
        assert self.folder.checkpoints is not None
        try:
            path = self.folder.checkpoints.save(self.trainer)
        except Exception as second:  # the first error is the one to tell; a full disk's would be the same again
            why = "" if _is_same(error, second) else f": {second}"
            error.add_note(self._of_newest(f"no checkpoint of this step could be written{why}"))
        else:
            error.add_note(f"the run up to step {state.step} is in {path}; resume=True goes on from there")

    def _of_newest(self, why: str) -> str:
        assert self.folder is not None
        newest = max((self.folder.path / "checkpoints").glob("step-*.safetensors"), default=None)
        if newest is None:
            return f"{why}, and there is no earlier one: see save_every"
        return f"{why}; resume=True goes on from the newest, {newest}"


def _is_same(one: Exception, other: Exception) -> bool:
    """Whether both say the same: in the same words, or of a full disk in those of Python and of safetensors."""
    full = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT)]
    return str(one) == str(other) or any(words in str(one) and words in str(other) for words in full)


class RunFolder:
    """run.json, metrics.jsonl, samples.jsonl, checkpoints/, final/."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints: CheckpointCallback | None = None

    def open(self, trainer: "Trainer", resume: bool) -> None:
        """A new run, or with `resume` the one that is there, from its newest checkpoint."""
        metrics, samples = self.path / "metrics.jsonl", self.path / "samples.jsonl"
        if not resume and (self.path / "run.json").exists():
            raise ValueError(f"output_dir must not hold a run, found one in {self.path}; resume=True goes on with it")
        trainer.output_dir = self.path
        self.path.mkdir(parents=True, exist_ok=True)
        checkpoint.remove_unfinished(self.path)
        newest = checkpoint.newest_good(self.path / "checkpoints") if resume else None
        if newest is not None:
            path, header, tensors = newest
            _check_same_run(trainer, header, path)
            checkpoint.put(trainer, header, tensors, path)
        elif resume:
            print(f"no checkpoint in {self.path} yet: beginning at step {trainer.state.step}", file=sys.stderr)
        kept = drop_after(metrics, trainer.state.step if newest else -1)
        drop_after(samples, trainer.state.step if newest else -1)
        for entry in kept:
            evaluated = any(name.startswith("eval/") for name in entry)
            (trainer.history.evaluations if evaluated else trainer.history.steps).append(entry)
        trainer.loggers = [*trainer.loggers, JSONLLogger(metrics)]

    def describe(self, trainer: "Trainer", num_rows: int) -> None:
        """Write run.json."""
        from strop import __version__

        path = self.path / "run.json"
        before = _read_about(path) if path.exists() else {}
        versions = {"strop": __version__, "torch": torch.__version__, "python": platform.python_version()}
        about = {
            "algorithm": trainer.name,
            "config": trainer.config.to_dict(),
            "model": {
                "class": type(trainer.module).__name__,
                "num_parameters": sum(param.numel() for param in trainer.module.parameters()),
            },
            "num_rows": num_rows,
            "total_steps": trainer.state.total_steps,
            "versions": versions,
            "started": before.get("started") or time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        unfinished = self.path / ".run.json.tmp"
        unfinished.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(path)

    def close(self, trainer: "Trainer") -> Path:
        """A last checkpoint, and the model where the run came to its end."""
        assert self.checkpoints is not None
        path = self.checkpoints.save(trainer)
        if not trainer.history.interrupted:
            trainer.save_pretrained(self.path / "final")
        return path


def _read_about(path: Path) -> dict[str, Any]:
    """run.json of a run that goes on."""
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is broken: {error}; delete it, and it is written anew") from None
    if not isinstance(about, dict) or not isinstance(about.get("started", ""), str):
        raise ValueError(f"{path} must hold an object with a text 'started'; delete it, and it is written anew")
    return about


def _check_same_run(trainer: "Trainer", header: dict[str, Any], path: Path) -> None:
    """The options of the run that is resumed must be those it began with, but for where it ends and what it reports."""
    saved = checkpoint.config_of(type(trainer), header, path)
    before, now = _flat(saved.to_dict()), _flat(trainer.config.to_dict())
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old != new and name.rpartition(".")[2] not in MAY_CHANGE:
            raise ValueError(f"{name} must be {old!r} as in the run of {path}, found {new!r}")


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
