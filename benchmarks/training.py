"""Training runs as cases of a suite: the runner that `algorithms`, `convergence`, `demo` and `learning` share."""

import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.harness import Method

DIGITS = 6  # of a metric in the result

Columns = dict[str, list[float | None]]


@dataclass(frozen=True, kw_only=True)
class TrainingCase:
    """One training run. `train` trains and returns what is kept of it: curves, scores, samples, more labels."""

    work: str
    train: Callable[[], dict[str, Any]]
    labels: Mapping[str, Any] = field(default_factory=dict)

    def measure(self, method: Method) -> dict[str, Any]:
        """Return the labels, the seconds of the run (those `train` returns take precedence), and what it kept."""
        wall, cpu = time.perf_counter(), time.process_time()
        found = self.train()
        seconds = {"seconds": round(time.perf_counter() - wall, 2), "cpu_seconds": round(time.process_time() - cpu, 1)}
        return {"work": self.work, **seconds, **found, "labels": {**self.labels, **found.get("labels", {})}}


def run_strop(*arguments: str) -> None:
    """Run `strop …` as a user does, in a process of its own. Its output goes to this process's standard error."""
    subprocess.run([sys.executable, "-m", "strop", *arguments], check=True, cwd=ROOT, stdout=sys.stderr.fileno())


def read_curves(metrics: Path, names: Collection[str] = ()) -> dict[str, Columns]:
    """Return the metrics of a run's steps as `training` and those of its evaluations as `evaluations`; all by default."""
    from strop.training.logging import read_metrics

    rows = read_metrics(metrics)
    if names:
        rows = [{name: row[name] for name in ("step", *names) if name in row} for row in rows]
    evaluations = [row for row in rows if any(name.startswith("eval/") for name in row)]
    return {
        "training": columns([row for row in rows if row not in evaluations]),
        "evaluations": columns(evaluations),
    }


def columns(rows: Sequence[Mapping[str, float]]) -> Columns:
    """Return one list per metric, with None where a row lacks it, and the steps of the rows under `steps`."""
    names = [name for name in dict.fromkeys(n for row in rows for n in row) if name not in ("step", "time")]
    found: Columns = {"steps": [row["step"] for row in rows]}
    return found | {name: rounded(row.get(name) for row in rows) for name in names}


def rounded(values: Iterable[float | None], digits: int = DIGITS) -> list[float | None]:
    """Return the values with so many significant digits."""
    return [None if value is None else float(f"{value:.{digits}g}") for value in values]


def first_and_last(
    measured: Sequence[dict[str, Any]], name: str, curve: Callable[[dict[str, Any]], Sequence[float]], format_spec: str
) -> tuple[list[str], list[list[str]]]:
    """Return a header and one row per case for the command line: where its curve begins and ends, and the seconds."""
    rows = []
    for case in measured:
        values, seconds = curve(case), case["seconds"]
        total = sum(seconds.values()) if isinstance(seconds, dict) else seconds
        rows.append([case["work"], format(values[0], format_spec), format(values[-1], format_spec), f"{total:.1f} s"])
    return ["work", f"{name}, first", "last", "time"], rows
