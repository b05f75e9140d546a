"""`TrainingRun`: train(), the loop around a trainer's steps, with its callbacks, folder and signals."""

import signal
import sys
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop._checks import check_count
from strop._contexts import Settings
from strop._types import Json
from strop.config import RunConfig
from strop.data.ahead import NUM_ROWS_AHEAD
from strop.data.digest import digest_rows
from strop.data.formats import PreparedRows
from strop.process_failures import is_lost_process, raise_if_failed
from strop.rollout import client
from strop.training.callbacks import Callback, EvaluationCallback, ProgressBar, SampleTable
from strop.training.folder import RunFolder, Sources, sources_of
from strop.training.state import (
    History,
    TrainState,
    difficulty_of,
    epoch_order,
    get_rng,
    seed_everything,
    set_rng,
)

if TYPE_CHECKING:
    from strop.training.trainer import Trainer


WITHOUT_SIGNAL = "reward/zero_std_fraction"  # metric: the fraction of groups whose rewards are all equal


class TrainingRun:
    """What `Trainer.train` does around the steps.

    about      extra entries for run.json; the command line adds its job
    num_rows   number of rows of the current train()'s dataset
    num_runs   runs that were begun, not continued
    sources    hashes of the user's functions and rows of the current train()
    """

    def __init__(self) -> None:
        self.about: Json = {}
        self.num_rows = self.num_runs = 0
        self.sources: Sources = {}
        self._rows: PreparedRows | None = None  # the dataset of train(), while it runs
        self._difficulty: Sequence[float] | None = None  # of each row, with a curriculum
        self._latest_order: tuple[int, Sequence[int]] = -1, ()  # an epoch and the order of its rows

    def train(
        self,
        trainer: "Trainer",
        rows: PreparedRows,
        eval_rows: dict[str, PreparedRows] | None,
        num_steps: int | None,
        num_epochs: int | None,
        output_dir: Path | None,
        resume: bool,
        allow_changes: bool,
        progress: bool | None,
    ) -> History:
        """Train on a dataset and return the history; see `Trainer.train`."""
        config, world = trainer.config.run, trainer.world
        if config.batch_size > len(rows):
            raise ValueError(f"batch_size must be at most the number of rows, {len(rows)}, found {config.batch_size}")
        folder = None if output_dir is None else RunFolder(output_dir, config.save_every, config.keep_checkpoints)
        self.num_rows = len(rows)
        if folder is not None or world.size > 1:
            self.sources = sources_of(trainer, digest_rows(rows))
            held_out = {name: digest_rows(found) for name, found in (eval_rows or {}).items()}
            world.check_same({**self.sources, "eval_dataset": held_out})
        trainer.history, trainer.stop_reason = History(), None
        loggers, callbacks = trainer.loggers, trainer.callbacks
        # without eval_every it evaluates before the first step and after the last
        every, evaluation = config.eval_every or sys.maxsize, None
        if eval_rows is not None:
            evaluation = EvaluationCallback(eval_rows, every, at_start=True)
        before, after = _own_callbacks(config, evaluation, folder, progress)
        trainer.callbacks = before + callbacks + after
        trainer.settings = Settings.of_a_run()
        try:
            if folder is not None:
                folder.open(trainer, resume, allow_changes)
            self._begin(trainer, num_steps, num_epochs)
            if folder is not None:
                folder.describe(trainer)
            self._steps(trainer, rows, evaluation, folder)
            return trainer.history
        finally:
            if folder is not None:
                folder.shut()
            trainer.loggers, trainer.callbacks, trainer.settings = loggers, callbacks, Settings()

    def _begin(self, trainer: "Trainer", num_steps: int | None, num_epochs: int | None) -> None:
        """Set the run's first and last step. A run that continues keeps its first step, row order and generators."""
        state, config, num_rows = trainer.state, trainer.config.run, self.num_rows
        steps = config.num_steps if num_steps is None else num_steps
        epochs = config.num_epochs if num_epochs is None else num_epochs
        check_count(steps, "num_steps")
        check_count(epochs, "num_epochs")
        if trainer.goes_on and num_rows != (state.num_rows or num_rows):
            raise ValueError(
                f"dataset must have {state.num_rows} rows as when the run began, found {num_rows}; "
                f"trainer.goes_on = False begins a new run with the weights as they are"
            )
        if not trainer.goes_on:
            state.first_step, state.epoch, state.position = state.step, 0, 0
            self.num_runs += 1
            seed_everything(config.seed, trainer.world.rank)
        state.num_rows = num_rows
        if num_steps is None and num_epochs is not None:
            steps = 0
        if not steps and not epochs:
            raise ValueError("num_steps or num_epochs must be above 0, found 0 of both")
        state.total_steps = state.first_step + (steps or epochs * -(-num_rows // config.batch_size))
        if state.step >= state.total_steps and trainer.world.is_first:
            print(f"{trainer.name} is at step {state.step} of {state.total_steps}: nothing left to do", file=sys.stderr)

    def _steps(
        self,
        trainer: "Trainer",
        rows: PreparedRows,
        evaluation: EvaluationCallback | None,
        folder: RunFolder | None,
    ) -> None:
        history, state, is_first = trainer.history, trainer.state, trainer.world.is_first
        with Interruption(is_first) as interruption:
            trainer.goes_on = True
            trainer.fire("on_train_begin")
            try:
                self._rows, self._latest_order = rows, (-1, ())
                self._difficulty = difficulty_of(rows, trainer.config.run.curriculum)
                while state.step < state.total_steps and not self._ends(trainer, interruption):
                    metrics = self._next_step(trainer, folder)
                    history.steps.append({"step": state.step, **metrics})
                history.interrupted = interruption.signal is not None and state.step < state.total_steps
                history.signal, history.stop_reason = interruption.signal, trainer.stop_reason
                if is_first and (why := _without_signal(history.steps)):
                    print(f"{trainer.name}: warning: {why}", file=sys.stderr)
                if evaluation is not None and not history.interrupted:
                    evaluation.evaluate(trainer)
            finally:
                self._rows = None
                trainer.fire("on_train_end", history)
            if folder is not None:
                history.checkpoint = str(folder.close(trainer, history.interrupted))
        trainer.goes_on = history.interrupted
        if history.interrupted and is_first:
            where = f"checkpoint {history.checkpoint}" if history.checkpoint else "no output_dir, so no checkpoint"
            print(
                f"{trainer.name} interrupted after step {state.step} of {state.total_steps}; {where}", file=sys.stderr
            )

    def _next_step(self, trainer: "Trainer", folder: RunFolder | None) -> dict[str, float]:
        """Do a step on the next batch and return the metrics. If it fails, save the earlier steps and raise the error.

        A failed step that changed no weights is undone: data position and random generators are restored. Then a
        checkpoint is written. None is written if weights may have changed, or with several processes, which would all
        have to write it. The error gets a note that names the checkpoint to resume from.
        """
        state, rng = trainer.state, get_rng()
        step, updates, epoch, position = state.step, state.updates, state.epoch, state.position
        try:
            config = trainer.config.run
            batch = self.take(state, config, config.batch_size)  # inside the try: it advances the position in `state`
            return trainer.run_step(trainer.step_on, batch)
        except Exception as error:  # not KeyboardInterrupt: a second Ctrl-C ends the run at once
            state = trainer.state
            halfway = state.step == step and state.updates != updates
            if state.step == step and not halfway:
                state.epoch, state.position = epoch, position
                set_rng(*rng)
            if folder is not None and state.step:  # before the end of the first step there is nothing to save
                folder.note_failure(trainer, error, halfway)
            raise

    def _ends(self, trainer: "Trainer", interruption: "Interruption") -> bool:
        """Return whether any process has a stop reason or a signal to end the run."""
        if trainer.world.size > 1:
            wishes = trainer.world.gathered((trainer.stop_reason, interruption.signal))
            trainer.stop_reason = next((reason for reason, _ in wishes if reason), None)
            interruption.signal = next((number for _, number in wishes if number), None)
        return bool(trainer.stop_reason or interruption.signal)

    def take(self, state: TrainState, config: RunConfig, most: int) -> list[Any]:
        """Return the next rows of the epoch and move the position behind them; [] outside train().

        At the end of an epoch they are fewer than `most`.
        """
        rows = self._rows
        if rows is None:
            return []
        if state.position >= len(rows):
            state.epoch, state.position = state.epoch + 1, 0
        order, end = self._order(config, state.epoch), state.position + most
        following = order[end : end + max(NUM_ROWS_AHEAD, 2 * config.batch_size)]  # of at least two steps
        batch = rows.take(order[state.position : end], following)
        state.position += len(batch)
        return batch

    def _order(self, config: RunConfig, epoch: int) -> Sequence[int]:
        """Return the order of an epoch's rows, which depends only on the rows, the seed and the epoch."""
        assert self._rows is not None
        if self._latest_order[0] != epoch:
            order = epoch_order(len(self._rows), config.seed, epoch, config.shuffle)
            if self._difficulty is not None:
                order = array("q", sorted(order, key=self._difficulty.__getitem__))
            self._latest_order = epoch, order
        return self._latest_order[1]

    @property
    def has_rows(self) -> bool:
        """True inside train()."""
        return self._rows is not None

    def number(self, state: TrainState, config: RunConfig) -> int:
        """Return the number of the batch that `take` returned last: the step it is for, if all steps are train()'s."""
        return state.first_step + state.epoch * self._num_batches(config) + -(-state.position // config.batch_size) - 1

    def rows_of(self, number: int, state: TrainState, config: RunConfig) -> list[Any]:
        """Return the rows of the batch with this number, for work ahead of its step."""
        assert self._rows is not None
        epoch, batch = divmod(number - state.first_step, self._num_batches(config))
        return self._rows.take(self._order(config, epoch)[batch * config.batch_size :][: config.batch_size])

    def _num_batches(self, config: RunConfig) -> int:
        """Return the number of batches of an epoch."""
        return -(-self.num_rows // config.batch_size)


def _own_callbacks(
    config: RunConfig, evaluation: EvaluationCallback | None, folder: RunFolder | None, progress: bool | None
) -> tuple[list[Callback], list[Callback]]:
    """Return train()'s own callbacks, those to call before and those to call after the user's.

    The checkpoint comes last, so that it has the states of all callbacks at the end of the step.
    """
    before: list[Callback] = [] if progress is False else [ProgressBar(show=progress)]
    after: list[Callback] = [] if evaluation is None else [evaluation]
    if config.samples_every and (folder is not None or progress is not False):
        path = None if folder is None else folder.path / "samples.jsonl"
        after.append(SampleTable(config.samples_every, 8, path=path, show=progress))
    if folder is not None:
        after.append(folder.checkpoints)
    return before, after


def _without_signal(steps: list[dict[str, object]]) -> str:
    """Return a warning if the run cannot have learned anything, else ""."""
    if not steps:
        return ""
    same = all(metrics.get(WITHOUT_SIGNAL) == 1 for metrics in steps)
    why = "all completions of a prompt had the same reward, so that every advantage was 0" if same else ""
    if all(metrics.get("grad_norm") == 0 for metrics in steps):
        return f"nothing was learned: the gradient was 0 in every step{why and ', for '}{why}"
    return why and f"nothing was learned from rewards: in every step {why}"


def checked_loggers(given: object) -> list[Any]:
    """Return the loggers as a list, given none, one or several."""
    loggers = _as_list(given)
    for logger in loggers:
        if not callable(getattr(logger, "log", None)):
            raise TypeError(f"logger must have log(metrics, step), found a {type(logger).__name__}")
    return loggers


def checked_callbacks(given: object) -> list[Any]:
    callbacks = _as_list(given)
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise TypeError(f"callbacks must be of strop.callbacks.Callback, found {type(callback).__name__}")
    return callbacks


def _as_list(given: object) -> list[object]:
    return [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]


class Interruption:
    """A context that stores SIGINT and SIGTERM in `signal`, so that the loop can end after its step.

    A second signal acts at once, as it would without this context. In a thread other than the main one nothing changes,
    because Python handles signals in the main thread only. torchrun also sends SIGTERM when another process has failed;
    this process then ends at once.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, is_told: bool = True) -> None:
        self.signal: int | None = None
        self.is_told = is_told  # whether to print a message at the first signal
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._remember) for number in self.SIGNALS}
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        is_main = bool(self._before)
        self._restore()
        if error is not None and is_lost_process(error) and is_main:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun will send one; print the error first

    def _remember(self, number: int, frame: object) -> None:
        raise_if_failed()
        self.signal = number
        self._restore()
        if client.is_stuck():
            signal.raise_signal(number)  # no step ends while every rollout server fails
            return
        if self.is_told:
            print("\nfinishing the step; once more to stop at once", file=sys.stderr)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
