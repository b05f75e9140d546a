"""Callbacks: actions at events of training. `Trainer` fires the events, so a callback works with every algorithm.

Under torchrun every process fires them, so that all processes decide alike. The callbacks in this file print and write
files in the first process only.

on_train_begin(trainer)            train() starts, everything is set up
on_step_begin(trainer)             before each step, of train() or train_step()
on_step_end(trainer, metrics)      after each step; trainer.state.step includes it already
on_evaluate(trainer, metrics)      after an evaluation; the names begin with eval/
on_save(trainer, path)             after a checkpoint
on_train_end(trainer, history)     train() ends, also when interrupted
"""

import json
import sys
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop._checks import printable
from strop._types import Json
from strop.data.formats import as_text
from strop.training.logging import JSONLLogger

if TYPE_CHECKING:
    from strop.training.state import History
    from strop.training.trainer import Trainer


class Callback:
    """The base class of callbacks: every event does nothing until a subclass overrides it."""

    def on_train_begin(self, trainer: "Trainer") -> None: ...

    def on_step_begin(self, trainer: "Trainer") -> None: ...

    def on_step_end(self, trainer: "Trainer", metrics: dict[str, float]) -> None: ...

    def on_evaluate(self, trainer: "Trainer", metrics: dict[str, float]) -> None: ...

    def on_save(self, trainer: "Trainer", path: str) -> None: ...

    def on_train_end(self, trainer: "Trainer", history: "History") -> None: ...

    def state_dict(self) -> Json:
        """Return this callback's state for checkpoints, as plain JSON values."""
        return {}

    def load_state_dict(self, state: Json) -> None:
        """Restore a state that `state_dict` returned."""


# phases of a step as the progress bar shows them; forward, backward and update are all shown as "learning"
DOING = {"generate": "sampling", "reward": "rewarding", "score": "scoring"}


class ProgressBar(Callback):
    """A progress bar for train(), with the current phase, the main metrics and the remaining time.

    A notebook shows one line that is updated. If output goes to a file, a line is written for the first step, for the
    last, and every `SECONDS` seconds between them, unless the trainer has a logger, which writes more.

    metrics   the metrics to show; the first three that exist are shown
    show      True always shows the bar, False shows nothing, None decides as described above
    """

    SECONDS, NOTEBOOK_SECONDS = 10.0, 0.2

    def __init__(
        self,
        metrics: tuple[str, ...] = ("reward/mean", "loss", "preference/accuracy", "kl"),
        *,
        show: bool | None = None,
    ):
        self.metrics, self.show = metrics, show
        self._progress: Any = None
        self._task: Any = None
        self._in_notebook = False  # running in a notebook, and not switched off
        self._line: Any = None  # the display handle in a notebook
        self._in_file = False
        self._told = 0.0  # time of the last line in a notebook or file
        self._ends: deque[float] = deque(maxlen=51)  # end times of the newest steps, preceded by the start of the first

    def on_train_begin(self, trainer: "Trainer") -> None:
        self._ends.clear()
        self._in_notebook, self._line = "ipykernel" in sys.modules and self.show is not False, None
        show = sys.stderr.isatty() if self.show is None else self.show
        alone = trainer.world.is_first and not self._in_notebook and self.show is None
        self._in_file = alone and not show and all(isinstance(logger, JSONLLogger) for logger in trainer.loggers)
        if self._in_notebook or not show or not trainer.world.is_first:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
        from rich.text import Text

        class Remaining(ProgressColumn):  # rich's own forgets steps after 30 seconds
            def render(_, task: Any) -> Text:
                return Text(self._remaining(task.remaining), style="progress.remaining")

        class Doing(ProgressColumn):
            def render(_, task: object) -> Text:
                return Text(f"{trainer.name} {doing(trainer):<10}")

        columns = (
            Doing(),
            BarColumn(),
            MofNCompleteColumn(),
            Remaining(),
            TextColumn("{task.fields[shown]}", markup=False),
        )
        self._progress = Progress(*columns, console=Console(stderr=True, force_terminal=self.show))
        state = trainer.state
        self._task = self._progress.add_task(trainer.name, total=state.total_steps, completed=state.step, shown="")
        self._progress.start()

    def on_step_begin(self, trainer: "Trainer") -> None:
        if not self._ends:
            self._ends.append(time.monotonic())

    def on_step_end(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        self._ends.append(time.monotonic())
        names = [name for name in self.metrics if name in metrics][:3]
        shown = printable("  ".join(f"{name} {metrics[name]:.3g}" for name in names))
        step, total = trainer.state.step, trainer.state.total_steps
        if self._progress is not None:
            self._progress.update(self._task, completed=step, shown=shown)
        elif self._in_notebook:
            if step == total or self._ends[-1] - self._told > self.NOTEBOOK_SECONDS:
                self._told = self._ends[-1]
                self._in_place(f"{trainer.name} {step}/{total}  {self._remaining(total - step)}  {shown}")
        elif self._in_file and (
            step in (trainer.state.first_step + 1, total) or self._ends[-1] - self._told > self.SECONDS
        ):
            self._told = self._ends[-1]
            print(
                f"{trainer.name} {step}/{total}  {self._remaining(total - step)} left  {shown}",
                file=sys.stderr,
                flush=True,
            )

    def on_train_end(self, trainer: "Trainer", history: "History") -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _in_place(self, text: str) -> None:
        """Update the line in a notebook. It is one output; if printed with \\r, every change would be saved."""
        from IPython.display import display

        if self._line is None:
            self._line = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._line.update({"text/plain": text}, raw=True)

    def _remaining(self, num_steps: float) -> str:
        """Return the estimated time for this many more steps, from the mean time of the newest steps."""
        ends = list(self._ends)
        if len(ends) < 2:
            return "-:--:--"
        seconds = num_steps * (ends[-1] - ends[0]) / (len(ends) - 1) - (time.monotonic() - ends[-1])
        return str(timedelta(seconds=max(round(seconds), 0)))


def doing(trainer: "Trainer") -> str:
    """Return one word for what the trainer is currently doing."""
    phase = trainer.phases.now
    return trainer.doing or (DOING.get(phase, "learning") if phase else "")


class CheckpointCallback(Callback):
    """A callback that writes a checkpoint to `folder` every `every` steps: a file, or a folder with several processes.

    keep   how many of the newest readable checkpoints to keep; 0 keeps all
    """

    def __init__(self, folder: str | Path, every: int, keep: int = 2):
        _check_every(every)
        self.folder, self.every, self.keep = Path(folder), every, keep
        self._whole: dict[Path, tuple[int, ...]] = {}  # checkpoints known to be good: path → `stamp`

    def on_step_end(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        if trainer.state.step % self.every == 0:
            self.save(trainer)

    def save(self, trainer: "Trainer") -> Path:
        """Write a checkpoint of the current step, then remove the oldest ones."""
        path = self.folder / f"step-{trainer.state.step:08d}{'' if trainer.world.size > 1 else '.safetensors'}"
        trainer.save(path, base=False)
        if self.keep and trainer.world.is_first:
            self._prune(path)
        return path

    def _prune(self, newest: Path) -> None:
        """Remove all but the newest `keep` readable checkpoints. Unreadable ones are neither removed nor counted."""
        from strop.training.checkpoint import all_in, is_whole, remove, stamp

        self._whole = {path: known for path, known in self._whole.items() if stamp(path) == known}
        self._whole[newest] = stamp(newest)
        num_kept = 1
        for path in reversed(all_in(self.folder)):
            if path == newest:
                continue
            if num_kept == self.keep:
                remove(path)
            elif path in self._whole or is_whole(path):
                self._whole[path] = stamp(path)
                num_kept += 1


class BestCheckpoint(Callback):
    """A callback that writes the checkpoint of the best evaluation to `folder`/best.safetensors.

    Several processes write a folder `best` instead.
    metric, higher_is_better   as in EarlyStopping, but only metrics of evaluations
    """

    def __init__(self, folder: str | Path, metric: str = "eval/loss", *, higher_is_better: bool | None = None):
        if not metric.startswith("eval/"):
            raise ValueError(f"metric must be one of an evaluation, eval/…, found {metric!r}")
        self.folder, self.metric = Path(folder), metric
        self.higher_is_better = not falls(metric) if higher_is_better is None else higher_is_better
        self.best: float | None = None

    def on_evaluate(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        value, sign = metric_of(trainer, metrics, self.metric), 1 if self.higher_is_better else -1
        if self.best is None or sign * (value - self.best) > 0:
            self.best = value
            trainer.save(self.folder / f"best{'' if trainer.world.size > 1 else '.safetensors'}", base=False)

    def state_dict(self) -> Json:
        return {"best": self.best}

    def load_state_dict(self, state: Json) -> None:
        self.best = state["best"]


def falls(metric: str) -> bool:
    """Return whether lower values of this metric are better, judging by its name."""
    return metric.rpartition("/")[2] in ("loss", "perplexity", "kl", "truncated_fraction")


def metric_of(trainer: "Trainer", metrics: dict[str, float], name: str) -> float:
    if name not in metrics:
        known = ", ".join(sorted(metrics))
        raise ValueError(f"metric must be one that {trainer.name} gives, found {name!r}; known are {known}")
    return metrics[name]


class EvaluationCallback(Callback):
    """A callback that evaluates a dataset every `every` steps.

    The metrics, named eval/<metric>, go to the loggers and to every callback's on_evaluate.
    at_start   evaluate also before the first step
    """

    def __init__(self, dataset: object, every: int, *, at_start: bool = False):
        _check_every(every)
        self.dataset, self.every, self.at_start = dataset, every, at_start
        self._last_step = -1

    def on_train_begin(self, trainer: "Trainer") -> None:
        if self.at_start and trainer.state.step == trainer.state.first_step:
            self.evaluate(trainer)

    def on_step_end(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        if trainer.state.step % self.every == 0:
            self.evaluate(trainer)

    @property
    def last_step(self) -> int:
        """The step of the last evaluation; -1 before the first."""
        return self._last_step

    def evaluate(self, trainer: "Trainer") -> dict[str, float]:
        """Evaluate now and return the metrics; {} if this step was evaluated already."""
        if self._last_step == trainer.state.step:
            return {}
        self._last_step = trainer.state.step
        self.dataset = trainer.prepared_sets(self.dataset)  # done once: later calls return it unchanged
        metrics = trainer.evaluate(self.dataset)
        trainer.log(metrics)
        trainer.history.evaluations.append({"step": trainer.state.step, **metrics})
        trainer.fire("on_evaluate", metrics)
        return metrics

    def state_dict(self) -> Json:
        return {"last_step": self._last_step}

    def load_state_dict(self, state: Json) -> None:
        self._last_step = state["last_step"]


class EarlyStopping(Callback):
    """A callback that ends train() when a metric has stopped improving.

    metric             a metric of evaluations ("eval/loss") or of steps ("reward/mean")
    patience           end after this many evaluations (or steps) in a row without an improvement above min_delta
    higher_is_better   None decides by the name: loss, perplexity, kl and truncated_fraction should fall, others rise
    """

    def __init__(
        self,
        metric: str = "eval/loss",
        patience: int = 3,
        *,
        min_delta: float = 0.0,
        higher_is_better: bool | None = None,
    ):
        if patience < 1:
            raise ValueError(f"patience must be at least 1, found {patience}")
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.higher_is_better = not falls(metric) if higher_is_better is None else higher_is_better
        self._looks = "evaluations" if metric.startswith("eval/") else "steps"
        self.best: float | None = None
        self.num_bad = 0

    def on_evaluate(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        if self.metric.startswith("eval/"):
            self._look(trainer, metrics)

    def on_step_end(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        if not self.metric.startswith("eval/"):
            self._look(trainer, metrics)

    def _look(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        value = metric_of(trainer, metrics, self.metric)
        sign = 1 if self.higher_is_better else -1
        if self.best is None or sign * (value - self.best) > self.min_delta:
            self.best, self.num_bad = value, 0
            return
        self.num_bad += 1
        if self.num_bad >= self.patience:
            trainer.stop(f"{self.metric} has not improved on {self.best:.6g} for {self.num_bad} {self._looks}")

    def state_dict(self) -> Json:
        return {"best": self.best, "num_bad": self.num_bad}

    def load_state_dict(self, state: Json) -> None:
        self.best, self.num_bad = state["best"], state["num_bad"]


class SampleTable(Callback):
    """A callback that shows prompts, completions and rewards every `every` steps, and after the first and last step.

    num_rows   maximum number of samples, spread over the step's prompts; the printed table has the first four
    path       file to which the samples are also written, one JSON object per line
    show       print the table to standard error, above the progress bar; None prints it only on a terminal
    """

    NUM_SHOWN, MOST_CHARACTERS = 4, 300  # the file has the rest

    def __init__(self, every: int = 10, num_rows: int = 4, *, path: str | Path | None = None, show: bool | None = None):
        _check_every(every)
        self.every, self.num_rows, self.show = every, num_rows, show
        self.path = None if path is None else Path(path)

    def on_step_end(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        state = trainer.state
        is_due = state.step % self.every == 0 or state.step in (state.first_step + 1, state.total_steps)
        if not is_due or not trainer.samples or not trainer.world.is_first:
            return
        chosen = _spread(trainer.samples, self.num_rows)
        samples = [{"step": trainer.state.step, **sample} for sample in chosen]
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(sample) + "\n" for sample in samples)
        if sys.stderr.isatty() if self.show is None else self.show:
            self._print(samples[: self.NUM_SHOWN])

    def _print(self, samples: list[dict[str, object]]) -> None:
        from rich.console import Console
        from rich.table import Column, Table
        from rich.text import Text

        columns = [name for name in samples[0] if name != "step"]
        heads = (Text(printable(name)) for name in columns)
        table = Table(*(Column(head) for head in heads), title=f"step {samples[0]['step']}", show_lines=True)
        for sample in samples:
            table.add_row(*(Text(self._cell(sample.get(name, ""))) for name in columns))
        Console(stderr=True).print(table)

    def _cell(self, value: object) -> str:
        """Return a value as text for the table: shortened if long, with control characters escaped."""
        text = f"{value:.4g}" if isinstance(value, float) else as_text(value)
        if len(text) > self.MOST_CHARACTERS:
            text = f"{text[: self.MOST_CHARACTERS]}… ({len(text):,} characters)"
        return printable(text)


def _spread(samples: list[Any], num_rows: int) -> list[Any]:
    """Return `num_rows` samples at equal distances, so that they come from different prompts."""
    count = min(num_rows, len(samples))
    return [samples[i * len(samples) // count] for i in range(count)]


def _check_every(every: object) -> None:
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every must be a whole number of at least 1, found {every!r}")
