"""How a speed is measured here.

A case is one piece of work and several contenders for it. Before anything is timed, each contender's result is compared
with what is expected of it. Then the contenders take turns, round after round, so that what disturbs the machine disturbs
all of them: a turn is an untimed stretch of calls, in which the threads and caches of the one before are forgotten, and
then a timed stretch, long enough for the clock. One stretch gives one sample, in nanoseconds a call. All samples are kept.

The figure is the median; a ratio of medians comes with a bootstrap interval over rounds, and the verdict says "faster"
or "slower" only where that interval leaves 1 out.
"""

import datetime
import json
import os
import platform
import subprocess
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import strop
from strop import _compiled

SCHEMA = 1
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to do the work: `function(*args, **kwargs)`, and the result it must give."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    expected: Any = None
    tolerance: float = 1e-4

    def timer(self) -> timeit.Timer:
        """The bare call, its arguments being names, so that the loop adds as little as it can."""
        names = {f"a{i}": value for i, value in enumerate(self.args)} | {f"k_{k}": v for k, v in self.kwargs.items()}
        arguments = [f"a{i}" for i in range(len(self.args))] + [f"{k}=k_{k}" for k in self.kwargs]
        return timeit.Timer(f"function({', '.join(arguments)})", globals={"function": self.function, **names})

    def check(self) -> None:
        if self.expected is None:
            return
        found = np.asarray(self.function(*self.args, **self.kwargs), dtype=np.float64)
        expected = np.asarray(self.expected, dtype=np.float64)
        if found.shape != expected.shape or not np.allclose(found, expected, rtol=self.tolerance, atol=self.tolerance):
            raise RuntimeError(
                f"contender {self.name} does not do the same work: its result differs from what is expected"
            )


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of a table. The first contender is the one the others are compared with."""

    work: str
    labels: dict[str, Any]
    contenders: Sequence[Contender]


@dataclass(frozen=True, kw_only=True)
class Method:
    rounds: int = 21
    sample_seconds: float = 2e-3

    def __post_init__(self) -> None:
        if self.rounds < 3:
            raise ValueError(f"rounds must be at least 3 for an interval, found {self.rounds}")


def _calls_per_sample(timer: timeit.Timer, seconds: float) -> int:
    calls = 1
    while (taken := timer.timeit(calls)) < seconds:
        calls = max(2 * calls, min(10 * calls, int(1.1 * calls * seconds / max(taken, 1e-9))))
    return calls


def measure(case: Case, method: Method) -> dict[str, Any]:
    """Samples, statistics and ratios of one case, ready for JSON."""
    for contender in case.contenders:
        contender.check()
    timers = {c.name: c.timer() for c in case.contenders}
    calls = {name: _calls_per_sample(timer, method.sample_seconds) for name, timer in timers.items()}
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(method.rounds):
        for name, timer in timers.items():
            timer.timeit(calls[name])
            samples[name].append(round(timer.timeit(calls[name]) / calls[name] * 1e9, 2))
    ours, *others = timers
    return {
        "work": case.work,
        "labels": case.labels,
        "contenders": {name: {"calls": calls[name], **statistics(samples[name])} for name in timers},
        "ratios": {name: ratio(samples[name], samples[ours]) for name in others},
    }


def statistics(samples: Sequence[float]) -> dict[str, Any]:
    quartiles = np.percentile(samples, [25, 50, 75, 95])
    return {
        "median_ns": round(float(quartiles[1]), 2),
        "p95_ns": round(float(quartiles[3]), 2),
        "iqr_ns": round(float(quartiles[2] - quartiles[0]), 2),
        "samples_ns": list(samples),
    }


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """How many times as long they take, with the bootstrap interval of that ratio over paired rounds."""
    from scipy.stats import bootstrap

    def of_medians(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.median(a, axis=axis) / np.median(b, axis=axis)

    value = float(of_medians(np.asarray(theirs), np.asarray(ours)))
    if np.ptp(theirs) == 0 and np.ptp(ours) == 0:  # nothing to resample
        low = high = value
    else:
        interval = bootstrap(
            (theirs, ours), of_medians, paired=True, method="percentile", confidence_level=CONFIDENCE,
            n_resamples=2000, rng=np.random.default_rng(0),
        ).confidence_interval  # fmt: skip
        low, high = float(interval.low), float(interval.high)
    verdict = "faster" if low > 1 else "slower" if high < 1 else "same"
    return {"value": round(value, 3), "low": round(low, 3), "high": round(high, 3), "verdict": verdict}


def run_cases(cases: Sequence[Case], method: Method) -> Iterator[dict[str, Any]]:
    for case in cases:
        yield measure(case, method)


def result(suite: str, cases: list[dict[str, Any]], method: Method, command: str) -> dict[str, Any]:
    """Everything a reader needs to trust or repeat the figures."""
    return {
        "schema": SCHEMA,
        "suite": suite,
        "command": command,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "threads": threads(),
        "versions": versions(),
        "method": {"rounds": method.rounds, "sample_seconds": method.sample_seconds, "confidence": CONFIDENCE},
        "cases": cases,
    }


def commit() -> dict[str, Any]:
    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()

    return {
        "id": git("rev-parse", "HEAD") or None,
        "clean": git("status", "--porcelain", "--", ":/src", ":/native") == "",
    }


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = models[0] if models else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "instruction_set": _compiled.native.isa() if _compiled.native else "none (NumPy)",
    }


def threads() -> dict[str, Any]:
    found: dict[str, Any] = {
        "usable_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "strop": strop.get_num_threads(),
    }
    import sys

    if "torch" in sys.modules:
        found["torch"] = sys.modules["torch"].get_num_threads()
    for variable in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "STROP_NUM_THREADS"):
        found[variable] = os.environ.get(variable)
    return found


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "strop": strop.__version__}
    for package in ("numpy", "torch", "triton", "transformers", "trl", "liger-kernel", "rlox"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def save(found: dict[str, Any], path: Path) -> None:
    """Small enough to diff: one line for every list of samples."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, indent=1, ensure_ascii=False)
    path.write_text(_samples_on_one_line(text) + "\n", encoding="utf-8")


def _samples_on_one_line(text: str) -> str:
    lines: list[str] = []
    inside = False
    for line in text.split("\n"):
        if inside:
            lines[-1] += line.strip() + ("" if line.strip().startswith("]") else " ")
            inside = not line.strip().startswith("]")
        else:
            lines.append(line)
            inside = line.rstrip().endswith('"samples_ns": [')
    return "\n".join(line.replace(" ]", "]") for line in lines)


def load(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if found.get("schema") != SCHEMA:
        raise ValueError(f"{path} must have schema {SCHEMA}, found {found.get('schema')!r}")
    return found
