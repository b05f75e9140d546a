"""`TrainingRun`: a run's state, its loggers and callbacks, and train(), the loop around a trainer's steps."""

import contextlib
import signal
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from strop._checks import check_count
from strop._contained import Settings, contained
from strop._types import Json
from strop.config import RunConfig
from strop.data.ahead import NUM_ROWS_AHEAD
from strop.data.digest import digest_rows
from strop.data.formats import PreparedRows
from strop.distributed import ALONE, World
from strop.process_failures import is_lost_process, raise_if_failed
from strop.rollout import client
from strop.training.callbacks import Callback, EvaluationCallback, ProgressBar, SampleTable
from strop.training.folder import RunFolder, Sources, sources_of
from strop.training.memory import LACKS, raise_explained
from strop.training.state import History, TrainState, difficulty_of, epoch_order, get_rng, seed_everything, set_rng

if TYPE_CHECKING:
    from strop.training.trainer import Trainer


WITHOUT_SIGNAL = "reward/zero_std_fraction"  # metric: the fraction of groups whose rewards are all equal


class TrainingRun:
    """The run of a trainer, made with the trainer. Steps by train_step() count in it as those of train() do.

    state         the run's position: steps, epochs, rows
    history       the measured metrics
    callbacks, loggers   callbacks are called in every process, loggers in the first
    stop_reason   why train() should end after the current step; None to continue
    about         extra entries for run.json; the command line adds its job
    goes_on       True if the next train() continues the run: after from_checkpoint, or an interruption
    """

    def __init__(self, loggers: object = None, callbacks: object = None, world: World = ALONE):
        self.world = world
        self.loggers, self.callbacks = checked_loggers(loggers), checked_callbacks(callbacks)
        self.state = TrainState()
        self.history = History()
        self.stop_reason: str | None = None
        self.about: Json = {}
        self.goes_on = False
        self.settings = Settings()  # torch's settings, applied at every step
        self.sources: Sources = {}  # of the current train()
        self.num_rows = 0  # of the current train()
        self._rows: PreparedRows | None = None  # the dataset of train(), while it runs
        self._difficulty: Sequence[float] | None = None  # of each row, with a curriculum
        self._latest_order: tuple[int, Sequence[int]] = -1, ()  # an epoch and the order of its rows

    # ---- a step ----

    def step(self, trainer: "Trainer", work: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Run `work` as one training step and return the metrics; see `Trainer.run_step`."""
        start = time.perf_counter()
        state, phases = self.state, trainer.phases.anew()
        trainer.phases = phases
        self.fire(trainer, "on_step_begin")
        trainer.policy.model.train()
        try:
            with contained():
                self.settings.apply()
                metrics = self._on_host(work(), trainer)
        except LACKS as error:
            raise_explained(error, trainer)
        times = phases.metrics()
        seconds = time.perf_counter() - start
        state.step += 1
        state.seconds += seconds
        num_tokens = int(metrics.pop("num_tokens"))
        state.num_tokens += num_tokens
        if num_tokens:
            metrics["tokens_per_second"] = num_tokens / seconds
        metrics |= times
        metrics["time/step"] = seconds
        log_every = trainer.config.run.log_every
        if log_every and state.step % log_every == 0:
            self.log(metrics)
        self.fire(trainer, "on_step_end", metrics)
        return metrics

    def _on_host(self, metrics: "Metrics", trainer: "Trainer") -> dict[str, float]:
        """Return the metrics as numbers; raise if an update was skipped. The only wait for the device in a step."""
        phases = trainer.phases
        metrics, skipped = gather_metrics(
            {**metrics, "num_tokens": Sum(phases.num_tokens)}, phases.unfit, trainer.world
        )
        if any(skipped):
            self.state.updates -= int(sum(skipped))
            is_zero = phases.wanted_norm is not None and not phases.wanted_norm
            raise no_gradient(self.state.step) if is_zero else not_finite(metrics, self.state.step)
        return metrics

    def log(self, metrics: dict[str, float]) -> None:
        timed = {"time": self.state.seconds, **metrics}
        with contained():
            for logger in self.loggers if self.world.rank == 0 else ():
                logger.log(timed, step=self.state.step)

    def fire(self, trainer: "Trainer", event: str, *arguments: object) -> None:
        for callback in list(self.callbacks):
            with contained():
                getattr(callback, event)(trainer, *arguments)

    # ---- many steps ----

    def train(
        self,
        trainer: "Trainer",
        dataset: object,
        eval_dataset: object,
        num_steps: int | None,
        num_epochs: int | None,
        output_dir: Path | None,
        resume: bool,
        allow_changes: bool,
        progress: bool | None,
    ) -> History:
        """Train on a dataset and return the history; see `Trainer.train`."""
        config = trainer.config.run
        if resume and output_dir is None:
            raise ValueError(
                "output_dir must be given with resume=True: its newest checkpoint is where the run goes on"
            )
        rows = trainer.prepared(dataset)
        if config.batch_size > len(rows):
            raise ValueError(f"batch_size must be at most the number of rows, {len(rows)}, found {config.batch_size}")
        eval_rows = None if eval_dataset is None else trainer.prepared_sets(eval_dataset)
        folder = None if output_dir is None else RunFolder(output_dir, config.save_every, config.keep_checkpoints)
        self.num_rows = len(rows)
        if folder is not None or self.world.size > 1:
            self.sources = sources_of(trainer, digest_rows(rows))
            held_out = {name: digest_rows(found) for name, found in (eval_rows or {}).items()}
            self.world.check_same({**self.sources, "eval_dataset": held_out})
        self.history, self.stop_reason = History(), None
        loggers, callbacks = self.loggers, self.callbacks
        # without eval_every it evaluates before the first step and after the last
        every, evaluation = config.eval_every or sys.maxsize, None
        if eval_rows is not None:
            evaluation = EvaluationCallback(eval_rows, every, at_start=True)
        before, after = _own_callbacks(config, evaluation, folder, progress)
        self.callbacks = before + callbacks + after
        self.settings = Settings.of_a_run()
        try:
            if folder is not None:
                folder.open(trainer, resume, allow_changes)
            self._begin(trainer.name, config, len(rows), num_steps, num_epochs)
            if folder is not None:
                folder.describe(trainer)
            self._steps(trainer, rows, evaluation, folder)
            return self.history
        finally:
            if folder is not None:
                folder.shut()
            self.loggers, self.callbacks, self.settings = loggers, callbacks, Settings()

    def _begin(
        self, name: str, config: RunConfig, num_rows: int, num_steps: int | None, num_epochs: int | None
    ) -> None:
        """Set the run's first and last step. A run that continues keeps its first step, row order and generators."""
        state = self.state
        steps = config.num_steps if num_steps is None else num_steps
        epochs = config.num_epochs if num_epochs is None else num_epochs
        check_count(steps, "num_steps")
        check_count(epochs, "num_epochs")
        if self.goes_on and num_rows != (state.num_rows or num_rows):
            raise ValueError(
                f"dataset must have {state.num_rows} rows as when the run began, found {num_rows}; "
                f"trainer.goes_on = False begins a new run with the weights as they are"
            )
        if not self.goes_on:
            state.first_step, state.epoch, state.position = state.step, 0, 0
            seed_everything(config.seed, self.world.rank)
        state.num_rows = num_rows
        if num_steps is None and num_epochs is not None:
            steps = 0
        if not steps and not epochs:
            raise ValueError("num_steps or num_epochs must be above 0, found 0 of both")
        state.total_steps = state.first_step + (steps or epochs * -(-num_rows // config.batch_size))
        if state.step >= state.total_steps and self.world.is_first:
            print(f"{name} is at step {state.step} of {state.total_steps}: nothing left to do", file=sys.stderr)

    def _steps(
        self,
        trainer: "Trainer",
        rows: PreparedRows,
        evaluation: EvaluationCallback | None,
        folder: RunFolder | None,
    ) -> None:
        history, state = self.history, self.state
        with Interruption(self.world.is_first) as interruption:
            self.goes_on = True
            self.fire(trainer, "on_train_begin")
            try:
                self._rows, self._latest_order = rows, (-1, ())
                self._difficulty = difficulty_of(rows, trainer.config.run.curriculum)
                while state.step < state.total_steps and not self._ends(interruption):
                    metrics = self._next_step(trainer, folder)
                    history.steps.append({"step": state.step, **metrics})
                history.interrupted = interruption.signal is not None and state.step < state.total_steps
                history.signal, history.stop_reason = interruption.signal, self.stop_reason
                if self.world.is_first and (why := _without_signal(history.steps)):
                    print(f"{trainer.name}: warning: {why}", file=sys.stderr)
                if evaluation is not None and not history.interrupted:
                    evaluation.evaluate(trainer)
            finally:
                self._rows = None
                self.fire(trainer, "on_train_end", history)
            if folder is not None:
                history.checkpoint = str(folder.close(trainer, history.interrupted))
        self.goes_on = history.interrupted
        if history.interrupted and self.world.is_first:
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
        state, rng = self.state, get_rng()
        step, updates, epoch, position = state.step, state.updates, state.epoch, state.position
        try:
            config = trainer.config.run
            batch = self.take(config, config.batch_size)  # inside the try: it advances the position in `state`
            return self.step(trainer, lambda: trainer.step_on(batch))
        except Exception as error:  # not KeyboardInterrupt: a second Ctrl-C ends the run at once
            state = self.state
            halfway = state.step == step and state.updates != updates
            if state.step == step and not halfway:
                state.epoch, state.position = epoch, position
                set_rng(*rng)
            if folder is not None and state.step:  # before the end of the first step there is nothing to save
                folder.note_failure(trainer, error, halfway)
            raise

    def _ends(self, interruption: "Interruption") -> bool:
        """Return whether any process has a stop reason or a signal to end the run."""
        if self.world.size > 1:
            wishes = self.world.gathered((self.stop_reason, interruption.signal))
            self.stop_reason = next((reason for reason, _ in wishes if reason), None)
            interruption.signal = next((number for _, number in wishes if number), None)
        return bool(self.stop_reason or interruption.signal)

    def take(self, config: RunConfig, most: int) -> list[Any]:
        """Return the next rows of the epoch and move the position behind them; [] outside train().

        At the end of an epoch they are fewer than `most`.
        """
        state, rows = self.state, self._rows
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

    def upcoming(self, config: RunConfig) -> list[Any]:
        """Return the rows of the next step; [] outside train() and in its last step."""
        state, rows = self.state, self._rows
        if rows is None or state.step + 1 >= state.total_steps:
            return []
        ended = state.position >= len(rows)
        epoch, position = (state.epoch + 1, 0) if ended else (state.epoch, state.position)
        order = self._order(config, epoch)
        return rows.take(order[position : position + config.batch_size])


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


# ---- a step's phases ----


class Phases:
    """The times of a step's phases, by name. Time in a nested phase counts for the inner phase only.

    On a GPU, times are measured with events in its stream, without waiting: a phase lasts from the end of the GPU work
    before it to the end of its own. Host work counts only as far as it keeps the GPU idle, so the phases add up to the
    step.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.failed: str | None = None  # the innermost phase an error came from
        self.num_tokens = 0  # number of tokens in the step
        self.wanted_norm: torch.Tensor | None = None  # norm of a gradient that must not be 0
        self.num_draws = 0  # number of times dropout was seeded
        self.unfit: list[torch.Tensor] = []  # one per update: 1 if it or an earlier one is not finite, else 0
        self._gpu = device if device is not None and device.type == "cuda" else None
        self._spans: list[tuple[str, str | None, Any, Any]] = []  # name, the phase around it, begin, end
        self._open: list[str] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time of this context, and restore torch's settings at its end."""
        around = self._open[-1] if self._open else None
        self._open.append(name)
        begin = self._mark()
        try:
            with contained():
                yield
        except BaseException:
            self.failed = self.failed or name
            raise
        finally:
            self._open.pop()
            self._spans.append((name, around, begin, self._mark()))

    @property
    def now(self) -> str:
        """The name of the current innermost phase; "" between phases."""
        return self._open[-1] if self._open else ""

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each phase, by name. Reading it waits for the GPU."""
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)
        found: dict[str, float] = {}
        for name, around, begin, end in self._spans:
            taken = end - begin if self._gpu is None else begin.elapsed_time(end) / 1e3
            found[name] = found.get(name, 0.0) + taken
            if around is not None:
                found[around] = found.get(around, 0.0) - taken
        return found

    def metrics(self) -> dict[str, float]:
        """Return time/<name> for every phase, and on a GPU the peak memory as `memory`."""
        found = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        return found if self._gpu is None else found | {"memory": float(torch.cuda.max_memory_allocated(self._gpu))}

    def note_unfit(self, value: torch.Tensor) -> torch.Tensor:
        """Append to `unfit`, and return, 1 if this value or an earlier one in this step is not finite, else 0.

        The result stays on the device.
        """
        unfit = (~value.isfinite()).float()
        self.unfit.append(torch.maximum(self.unfit[-1], unfit) if self.unfit else unfit)
        return self.unfit[-1]

    def anew(self) -> "Phases":
        """Return empty phases for the next step, on the same device."""
        return Phases(self._gpu)

    def _mark(self) -> Any:
        if self._gpu is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._gpu))
        return event


def not_finite(found: "Metrics", step: int) -> FloatingPointError:
    return FloatingPointError(
        f"loss {found.get('loss')} and gradient norm {found.get('grad_norm')} must be finite; the weights are those of "
        f"step {step}, before this update"
    )


def no_gradient(step: int) -> RuntimeError:
    """Return the error for a gradient of exactly 0 although an advantage is not 0."""
    return RuntimeError(
        "the gradient must not be exactly 0 for all parameters while an advantage is not 0: the model's forward may run "
        "without gradients (no_grad, detach), or give every token it sampled the probability 1; the weights are those of "
        f"step {step}, before this update"
    )


# ---- metrics of several processes ----

Metrics: TypeAlias = Json  # by name: numbers, tensors, and the classes below, which `gather_metrics` reduces to numbers


class Mean(NamedTuple):
    """A mean over the processes: Σ total / Σ number; left out if Σ number is 0."""

    total: Any
    number: float


class Sum(NamedTuple):
    value: Any


class Largest(NamedTuple):
    value: Any


KINDS = (Mean, Sum, Largest)


def on_host(values: Sequence[torch.Tensor]) -> list[float]:
    """Return one-element tensors as floats, with a single wait for the device."""
    if not values:
        return []
    return torch.cat([value.detach().reshape(1).to(values[0].device) for value in values]).tolist()


def gather_metrics(
    metrics: Mapping[str, object], extra: list[torch.Tensor], world: World
) -> tuple[dict[str, float], list[float]]:
    """Return the metrics of all processes as numbers, and `extra` as floats, with a single wait for the device.

    A plain number or tensor is the same in every process. It is ignored if another process has a Mean, Sum or Largest
    of that name.
    """
    flat = {(name, i): value for name, metric in metrics.items() for i, value in enumerate(_values(metric))}
    tensors = {key: value for key, value in flat.items() if isinstance(value, torch.Tensor)}
    values = on_host([*tensors.values(), *extra])
    flat |= zip(tensors, values, strict=False)
    here = {
        name: type(metric)(*(flat[name, i] for i in range(len(metric)))) if isinstance(metric, KINDS) else flat[name, 0]
        for name, metric in metrics.items()
    }
    everywhere = world.gathered(here) if world.size > 1 else [here]
    names = dict.fromkeys(name for one in everywhere for name in one)
    found = {name: _combined([one[name] for one in everywhere if name in one]) for name in names}
    return {name: value for name, value in found.items() if value is not None}, values[len(tensors) :]


def _values(metric: object) -> tuple[Any, ...]:
    return metric if isinstance(metric, KINDS) else (metric,)


def _combined(parts: list[Any]) -> Any:
    parts = [part for part in parts if isinstance(part, KINDS)] or parts
    if isinstance(parts[0], Largest):
        return max(part.value for part in parts)
    if isinstance(parts[0], Sum):
        return sum(part.value for part in parts)
    if not isinstance(parts[0], Mean):
        return parts[0]
    number = sum(part.number for part in parts)
    return sum(part.total for part in parts) / number if number else None
