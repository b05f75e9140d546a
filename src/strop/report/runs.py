"""Run folders: what `train(output_dir=…)` leaves behind, read with forgiveness for a run that is still going on or was killed."""

import json
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.report.curves import short
from strop.training.logging import parse_line

HEADER, METRICS, SAMPLES = "run.json", "metrics.jsonl", "samples.jsonl"


@dataclass(frozen=True)
class Series:
    """One metric of one run. Values are finite; the steps where they were not stand apart."""

    steps: list[int]
    values: list[float]
    broken_steps: list[int]

    def __len__(self) -> int:
        return len(self.steps)


@dataclass
class Run:
    """A run's folder in memory. `notes` say what was wrong with it."""

    name: str
    metrics: list[dict[str, Any]]
    samples: list[dict[str, Any]] = field(default_factory=list)
    header: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def algorithm(self) -> str:
        name = str(self.header.get("algorithm", ""))
        return name.upper().replace("_", "-") if name.islower() else name

    @property
    def model(self) -> str:
        """In words: a name, or the class and its size."""
        about = self.header.get("model") or ""
        if not isinstance(about, dict):
            return str(about)
        words = [str(about.get("class", ""))]
        if is_number(about.get("num_parameters")):
            words.append(f"{short(about['num_parameters'])} parameters")
        return " of ".join(w for w in words if w)

    @property
    def config(self) -> dict[str, Any]:
        return flatten(self.header.get("config") or {})

    @property
    def num_steps(self) -> int:
        """The last step logged."""
        return max((row["step"] for row in self.metrics), default=0)

    @property
    def seconds(self) -> float | None:
        times = [row["time"] for row in self.metrics if is_number(row.get("time")) and math.isfinite(row["time"])]
        return max(times, default=None)

    @property
    def names(self) -> list[str]:
        """Of every metric, in the order of their first appearance."""
        found = dict.fromkeys(name for row in self.metrics for name in row)
        return [name for name in found if name not in ("step", "time")]

    def series(self, name: str) -> Series:
        """A metric by step; of several lines for one step the last counts."""
        found = {
            row["step"]: row[name]
            for row in self.metrics
            if name in row and (row[name] is None or is_number(row[name]))
        }
        steps = sorted(found)
        good = [s for s in steps if found[s] is not None and math.isfinite(found[s])]
        values = [float(found[s]) for s in good]
        return Series(good, values, [s for s in steps if found[s] is None or not math.isfinite(found[s])])


def is_number(value: Any) -> bool:
    """Of a float's size: a whole number may have any number of digits in JSON."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1023)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim": {"eps": 1}} as {"optim.eps": 1}"""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class NothingLogged(ValueError):
    """A run folder without a single step, as a run leaves it that was killed in its first."""


def is_run(folder: Path) -> bool:
    return (folder / METRICS).is_file() or (folder / HEADER).is_file()


def load_run(folder: str | Path, name: str | None = None) -> Run:
    """One run folder."""
    folder = Path(folder)
    if not folder.exists():
        raise FileNotFoundError(f"no such run folder: {folder}")
    if not folder.is_dir():
        raise NotADirectoryError(f"a run must be a folder, found the file {folder}")
    if not is_run(folder):
        there = ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing"
        raise ValueError(f"{folder} is no run: it must hold {METRICS}, found {there}")
    notes: list[str] = []
    run = Run(name or folder.resolve().name, _read_lines(folder / METRICS, notes), notes=notes)
    run.samples = _read_lines(folder / SAMPLES, notes)
    run.header = _read_header(folder / HEADER, notes)
    if not run.metrics:
        raise NothingLogged(f"{folder} has logged no step yet: its {METRICS} is empty or not there")
    return run


def load_runs(folders: Iterable[str | Path]) -> list[Run]:
    """Several run folders; a folder that holds runs stands for all of them. Names are made distinct.

    A run that has logged nothing is left out with a warning; where no other is left, that is an error.
    """
    found: list[Path] = []
    for folder in map(Path, folders):
        inner = sorted(p for p in folder.iterdir() if p.is_dir() and is_run(p)) if folder.is_dir() else []
        found += [folder] if is_run(folder) or not inner else inner
    unique = {path.resolve(): path for path in reversed(found)}
    runs, empty = {}, {}
    for path in dict.fromkeys(path.resolve() for path in found):
        try:
            runs[path] = load_run(unique[path])
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


def _distinct_names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, with as many before it as it takes for that one."""
    names = []
    for path in paths:
        ends = ["/".join(path.parts[-depth:]) for depth in range(1, len(path.parts) + 1)]
        others = [f"/{other}" for other in paths if other != path]
        names.append(next((end for end in ends if not any(o.endswith(f"/{end}") for o in others)), str(path)))
    return names


def _read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """JSONL whose last line may have been cut off: a run that was killed, or is writing just now."""
    if not path.is_file():
        return []
    *lines, rest = path.read_bytes().split(b"\n")
    rows = [parse_line(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    if rest.strip():
        try:
            rows.append(parse_line(rest, path, len(lines) + 1))
        except ValueError:
            notes.append(f"the last line of {path.name} was cut off and is left out")
    return rows


def _read_header(path: Path, notes: list[str]) -> dict[str, Any]:
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
