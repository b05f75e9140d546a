"""Loggers, which receive the metrics. Pass one or a list as `logger=`; an error in a logger stops the run.

Any object with log(metrics, step) and close() is a logger. The metric `time` is the seconds of training so far.
"""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from strop._checks import printable
from strop._types import Json

CONSOLE_METRICS = (
    "loss", "reward/mean", "preference/accuracy", "preference/margin", "kl", "entropy_estimate", "completion/length",
    "grad_norm", "learning_rate", "tokens_per_second",
)  # fmt: skip


class Logger(Protocol):
    """The interface of a logger."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class ConsoleLogger:
    """A logger that prints the means of the main metrics every log_interval steps, and evaluations at once.

    metrics   the names to print; None prints CONSOLE_METRICS. Evaluations are printed in full.
    file      None is standard output
    """

    def __init__(self, log_interval: int = 1, *, metrics: tuple[str, ...] | None = None, file: TextIO | None = None):
        if isinstance(log_interval, bool) or not isinstance(log_interval, int) or log_interval < 1:
            raise ValueError(f"log_interval must be a whole number of at least 1, found {log_interval!r}")
        self.log_interval, self.file = log_interval, file
        self.metrics = metrics
        self._sums: dict[str, tuple[float, int]] = {}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        evaluated = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        if evaluated:
            self._write(step, evaluated)
            return
        for name, value in metrics.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + float(value), count + 1
        if step % self.log_interval == 0:
            means = {name: total / count for name, (total, count) in self._sums.items()}
            self._sums.clear()
            self._write(step, {name: means[name] for name in self.metrics or CONSOLE_METRICS if name in means})

    def close(self) -> None:
        pass

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        parts = [f"{printable(name)} {value:.4g}" for name, value in values.items()]
        print(f"step {step:>6}  " + "  ".join(parts), file=self.file or sys.stdout, flush=True)


class JSONLLogger:
    """A logger that writes one JSON object per line: {"step": …, "time": …, "loss": …}."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        with self.path.open("a", encoding="utf-8") as file:  # closed after each line, so that a killed run loses none
            file.write(json.dumps({"step": step, **metrics}) + "\n")

    def close(self) -> None:
        pass


class TensorBoardLogger:
    """A logger that writes scalars for TensorBoard to `folder`."""

    def __init__(self, folder: str | Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _absent(error, "TensorBoardLogger", "tensorboard") from None
        self._writer = SummaryWriter(str(folder))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class TrackioLogger:
    """A logger for trackio, which stores metrics on this machine; the arguments are those of trackio.init."""

    def __init__(self, project: str = "strop", **init: Any):
        try:
            import trackio
        except ImportError as error:
            raise _absent(error, "TrackioLogger", "trackio") from None
        self._trackio = trackio
        with contextlib.redirect_stdout(sys.stderr):  # trackio prints; standard output is for the run folder
            trackio.init(project=project, **init)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        named = {"seconds" if name == "time" else name: value for name, value in metrics.items()}  # "time" is reserved
        self._trackio.log(named, step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._trackio.finish()


class WandbLogger:
    """A logger for Weights & Biases; the arguments are those of wandb.init."""

    def __init__(self, **init: Any):
        try:
            import wandb
        except ImportError as error:
            raise _absent(error, "WandbLogger", "wandb") from None
        self._run = wandb.init(**init)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _absent(error: ImportError, logger: str, package: str) -> ImportError:
    """Return the error for a logger's package that is not installed, or is installed but fails to import."""
    if error.name in (None, package):
        return ImportError(f"{logger} needs {package}: pip install {package}")
    return ImportError(f"{logger} needs {package}, which is installed but cannot be imported: {error}")


def read_metrics(path: str | Path) -> list[Json]:
    """Return the entries of a metrics file. A last line without a newline, as left by a kill, is skipped."""
    return [entry for _, entry in _entries(Path(path))]


def _entries(path: Path) -> Iterator[tuple[bytes, Json]]:
    """Yield each line of a metrics file with its parsed entry."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n") and not line.isspace():
                entry = parse_line(line, path, number)
                yield line, {sys.intern(name): value for name, value in entry.items()}  # all entries share their names


def parse_line(line: bytes, path: Path, number: int) -> Json:
    """Return a parsed line of metrics or samples, an object with its step. Raise a ValueError if it is invalid."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, too long a number, too deeply nested
        raise ValueError(f"{path}, line {number} is broken: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{path}, line {number} must be an object, found {type(row).__name__}")
    step = row.get("step")
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**53:
        raise ValueError(f"{path}, line {number} must have a whole number 'step', found {step!r:.40}")
    return row


def is_evaluation(entry: Mapping[str, object]) -> bool:
    """Return whether an entry of metrics comes from an evaluation, not from a step."""
    return any(name.startswith("eval/") for name in entry)


def drop_after(path: str | Path, step: int, evaluations_until: int | None = None) -> list[Json]:
    """Remove the entries after `step` from a file of JSON lines, and return the others. The run will log them again.

    evaluations_until   last step of the evaluations to keep, at most `step`; None is `step`
    """
    last = step if evaluations_until is None else min(step, evaluations_until)
    path = Path(path)
    if not path.exists():
        return []
    unfinished, kept = path.with_name(f".{path.name}.tmp"), []
    try:
        with unfinished.open("wb") as file:
            for line, entry in _entries(path):
                if entry["step"] <= (last if is_evaluation(entry) else step):
                    kept.append(entry)
                    file.write(line)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return kept
