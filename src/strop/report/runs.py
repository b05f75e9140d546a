"""Reading of the run folders that `train(output_dir=…)` writes, including those of running or killed runs."""

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from strop._types import Json
from strop.config.base import flat
from strop.report.curves import short
from strop.report.lines import Columns, LineReader, is_number
from strop.report.sample_index import SampleIndex

HEADER, METRICS, SAMPLES = "run.json", "metrics.jsonl", "samples.jsonl"
MANY_RUNS, CONDENSED_ROWS = 40, 1000  # if there are more than MANY_RUNS, each is reduced to CONDENSED_ROWS rows


@dataclass(frozen=True)
class Series:
    """One metric of one run. The values are finite; `broken_steps` are the steps with non-finite values."""

    steps: np.ndarray
    values: np.ndarray
    broken_steps: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

    def ends(self) -> tuple[float, float]:
        """Return the means of the first and of the last tenth of the values."""
        n = max(1, len(self) // 10)
        return float(self.values[:n].mean()), float(self.values[-n:].mean())


@dataclass
class Run:
    """A run's folder in memory.

    samples         samples that the page shows
    sampled_steps   steps of which `samples` has all samples
    notes           problems found in the folder
    hidden          metrics that are not drawn
    """

    name: str
    columns: Columns
    samples: list[Json] = field(default_factory=list)
    sampled_steps: list[int] = field(default_factory=list)
    header: Json = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    hidden: set[str] = field(default_factory=set)

    @property
    def algorithm(self) -> str:
        name = str(self.header.get("algorithm", ""))
        return name.upper().replace("_", "-") if name.islower() else name

    @property
    def model(self) -> str:
        """The model's name, its class and its size, in words."""
        about = self.header.get("model") or ""
        if not isinstance(about, dict):
            return str(about)
        words = [str(about.get("class", ""))]
        if is_number(about.get("num_parameters")):
            words.append(f"{short(about['num_parameters'])} parameters")
        described = " of ".join(w for w in words if w)
        name = str(about.get("name") or "")
        return f"{name} ({described})" if name and described else name or described

    @property
    def config(self) -> Json:
        return flat(self.header.get("config") or {})

    @property
    def num_steps(self) -> int:
        """The last step logged."""
        return max((int(table.steps.max()) for table in self.columns.tables.values()), default=0)

    @property
    def seconds(self) -> float | None:
        times = self.series("time").values
        return float(times.max()) if len(times) else None

    @property
    def names(self) -> list[str]:
        """The metrics to draw, in order of first appearance."""
        return [name for name in self.columns.names if name not in self.hidden]

    def series(self, name: str) -> Series:
        """Return a metric by step. If several lines have the same step, the last one is used."""
        steps, values = self.columns.series(name)
        is_good = np.isfinite(values)
        if is_good.all():
            return Series(steps, values, steps[:0])
        return Series(steps[is_good], values[is_good], steps[~is_good])


class NothingLogged(ValueError):
    """The run folder has no logged step yet, for example after a kill in the first step."""


def is_run(folder: Path) -> bool:
    return (folder / METRICS).is_file() or (folder / HEADER).is_file()


class RunReader:
    """A reader of one run folder. A second `read` reads only the lines added to its files."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._forget()

    def _forget(self) -> None:
        self._metrics, self._columns = LineReader(self.folder / METRICS), Columns()
        self._samples = SampleIndex(self.folder / SAMPLES)

    def read(self, name: str | None = None) -> Run:
        folder = self.folder
        if not folder.exists():
            raise FileNotFoundError(f"no such run folder: {folder}")
        if not folder.is_dir():
            raise NotADirectoryError(f"a run must be a folder, found the file {folder}")
        if not is_run(folder):
            there = ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing"
            raise ValueError(f"{folder} is no run: it must hold {METRICS}, found {there}")
        if self._metrics.was_replaced() or self._samples.reader.was_replaced():
            self._forget()
        for first, _, lines in self._metrics.blocks():
            self._columns.add(lines, first, self._metrics.path)
        self._samples.update()
        readers = (self._metrics, self._samples.reader)
        notes = [f"the last line of {r.path.name} was cut off and is left out" for r in readers if r.is_cut_off]
        header = _read_header(folder / HEADER, notes)
        if not self._columns.tables:
            raise NothingLogged(f"{folder} has logged no step yet: its {METRICS} is empty or not there")
        samples, steps = self._samples.shown()
        run = Run(name or folder.resolve().name, self._columns, samples, steps, header, notes)
        total = header.get("total_steps")
        if is_number(total) and run.num_steps < total and not (folder / "final").exists():
            notes.append(f"it is not finished: step {run.num_steps:,} of {total:,} is the last one logged")
        return run


def load_run(folder: str | Path, name: str | None = None) -> Run:
    """Load one run folder."""
    return RunReader(folder).read(name)


def load_runs(folders: Iterable[str | Path], readers: dict[Path, RunReader] | None = None) -> list[Run]:
    """Return the runs of several folders, with distinct names. A folder that contains runs stands for all of them.

    A run without logged steps is left out with a warning; if no run is left, that is an error. If there are more than
    MANY_RUNS, each metric is condensed to CONDENSED_ROWS values, so that memory does not grow with the runs' length.
    `readers` keep their state for the next call.
    """
    found: list[Path] = []
    for folder in map(Path, folders):
        inner = sorted(p for p in folder.iterdir() if p.is_dir() and is_run(p)) if folder.is_dir() else []
        found += [folder] if is_run(folder) or not inner else inner
    unique = {path.resolve(): path for path in reversed(found)}
    runs, empty = {}, {}
    for path in dict.fromkeys(path.resolve() for path in found):
        reader = RunReader(unique[path]) if readers is None else readers.setdefault(path, RunReader(unique[path]))
        try:
            runs[path] = reader.read()
            if len(unique) > MANY_RUNS:
                runs[path] = _condensed(runs[path])
        except NothingLogged as error:
            empty[unique[path]] = error
    if empty and not runs:
        (_, first), *others = empty.items()
        raise NothingLogged("".join([str(first), *(f"; nor has {path}" for path, _ in others)]))
    for reason in empty.values():
        warnings.warn(f"{reason}; it is left out", stacklevel=2)
    for run, name in zip(runs.values(), _distinct_names(list(runs)), strict=True):
        run.name = name
    return list(runs.values())


def _condensed(run: Run) -> Run:
    columns = run.columns.condensed(CONDENSED_ROWS)
    if run.num_steps > CONDENSED_ROWS:
        run.notes.append(f"its values are means of neighbouring steps, {CONDENSED_ROWS:,} in all")
    return replace(run, columns=columns)


def _distinct_names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each path: the fewest last parts that make it unique."""
    ends = [["/".join(path.parts[-depth:]) for depth in range(1, len(path.parts) + 1)] for path in paths]
    counts = Counter(end for of_path in ends for end in of_path)
    return [next((end for end in of_path if counts[end] == 1), of_path[-1]) for of_path in ends]


def _read_header(path: Path, notes: list[str]) -> Json:
    if not path.is_file():
        notes.append(f"there is no {path.name}: algorithm and configuration are unknown")
        return {}
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is broken: {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path} must hold an object, found {type(header).__name__}")
    for name in ("config", "versions"):
        if not isinstance(header.get(name) or {}, dict):
            raise ValueError(f"{path}: {name} must be an object, found {type(header[name]).__name__}")
    return header
