"""How a speed is measured here.

A case is one piece of work and several contenders for it. Before anything is timed, each contender's result is compared
with what is expected of it. Then the contenders take turns, round after round, so that what disturbs the machine disturbs
all of them: a turn is an untimed stretch of calls, in which the threads and caches of the one before are forgotten, and
then a timed stretch, long enough for the clock. Heat is not forgotten as fast, and a GPU slows down for it: so each round
has an order of its own, and nobody always comes after the same one. One stretch gives one sample, in nanoseconds a call.
All samples are kept.
Work on a GPU is timed by the GPU's own clock, call by call, each after its cache has been overwritten (`benchmarks.gpu_timers`).

The figure is the median; a ratio of medians comes with a bootstrap interval over rounds, and the verdict says "faster"
or "slower" only where that interval leaves 1 out.

What a fresh process needs (peak memory, heap allocations of a call) is measured in fresh processes after the timing,
see `benchmarks.alone`.
"""

import datetime
import gc
import json
import os
import platform
import random
import re
import resource
import shutil
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import strop
from strop import _compiled

SCHEMA = 1
CONFIDENCE = 0.95


def _is_nested_list(value: Any) -> bool:
    """Lists of lists, such as bins, are compared as they are; everything else as numbers."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to do the work: `function(*args, **kwargs)`, and the result it must give.

    read    the numbers of a result that are compared with what is expected; by default the result itself
    alone   arguments of `python -m benchmarks.alone` that do the same work in a fresh process, for its memory
    notes   what else is known after the calls, for the JSON
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    expected: Any = None
    tolerance: float = 1e-4
    read: Callable[[Any], Any] | None = None
    alone: tuple[str, ...] = ()
    notes: Callable[[], dict[str, Any]] | None = None

    def timer(self, setup: str = "pass") -> timeit.Timer:
        """The bare call, its arguments being names, so that the loop adds as little as it can."""
        names = {f"a{i}": value for i, value in enumerate(self.args)} | {f"k_{k}": v for k, v in self.kwargs.items()}
        arguments = [f"a{i}" for i in range(len(self.args))] + [f"{k}=k_{k}" for k in self.kwargs]
        call = f"function({', '.join(arguments)})"
        return timeit.Timer(call, setup, globals={"function": self.function, "gc": gc, **names})

    def check(self) -> None:
        if self.expected is None:
            return
        result = self.function(*self.args, **self.kwargs)
        if _is_nested_list(self.expected):
            if result != self.expected:
                raise RuntimeError(f"contender {self.name} does not do the same work: its result is another list")
            return
        found = np.asarray(self.read(result) if self.read else result, dtype=np.float64)
        expected = np.asarray(self.expected, dtype=np.float64)
        if found.shape != expected.shape or not np.allclose(found, expected, rtol=self.tolerance, atol=self.tolerance):
            raise RuntimeError(
                f"contender {self.name} does not do the same work: its result differs from what is expected"
            )

    def is_finite(self) -> bool:
        """Whether every number of the result is finite, now that it has been timed."""
        return bool(np.isfinite(np.asarray(self.function(*self.args, **self.kwargs), dtype=np.float64)).all())


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of a table. The first contender is the one the others are compared with.

    tokens, flops   of one call, for the rates
    collect         the garbage collector stays on, as in a program, and its time is recorded
    warm_up         False times every call: for what starts a process, which nothing warms
    rounds          instead of the method's
    sample_seconds  instead of the method's
    setup           called before the case is measured (threads)
    clock           what times a contender, instead of `timeit`
    """

    work: str
    labels: dict[str, Any]
    contenders: Sequence[Contender]
    tokens: int | None = None
    flops: int | None = None
    collect: bool = False
    warm_up: bool = True
    rounds: int | None = None
    sample_seconds: float | None = None
    setup: Callable[[], None] | None = None
    clock: "Callable[[Contender], Timer] | None" = None

    def measure(self, method: "Method") -> dict[str, Any]:
        return measure(self, method)


class Measurable(Protocol):
    """What a suite is a list of: a `Case`, or anything else with a name and a result."""

    @property
    def work(self) -> str: ...

    def measure(self, method: "Method") -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Method:
    rounds: int = 21
    sample_seconds: float = 2e-3

    def __post_init__(self) -> None:
        if self.rounds < 3:
            raise ValueError(f"rounds must be at least 3 for an interval, found {self.rounds}")


class Timer(Protocol):
    def timeit(self, number: int) -> float:
        """The seconds that many calls take."""
        ...


def _calls_per_sample(timer: Timer, seconds: float) -> int:
    calls = 1
    while (taken := timer.timeit(calls)) < seconds:
        calls = max(2 * calls, min(10 * calls, int(1.1 * calls * seconds / max(taken, 1e-9))))
    return calls


def measure(case: Case, method: Method) -> dict[str, Any]:
    """Samples, statistics and ratios of one case, ready for JSON."""
    if case.setup:
        case.setup()
    for contender in case.contenders:
        contender.check()
    clock = case.clock or (lambda contender: contender.timer("gc.enable()" if case.collect else "pass"))
    timers: dict[str, Timer] = {c.name: clock(c) for c in case.contenders}
    seconds = case.sample_seconds or method.sample_seconds
    calls = {name: _calls_per_sample(timer, seconds) if case.warm_up else 1 for name, timer in timers.items()}
    wall: dict[str, list[float]] = {name: [] for name in timers}
    cpu: dict[str, list[float]] = {name: [] for name in timers}
    collecting: dict[str, list[float]] = {name: [] for name in timers}
    draw = random.Random(0)
    for _ in range(case.rounds or method.rounds):
        for name in draw.sample(list(timers), len(timers)):
            timer = timers[name]
            if case.warm_up:
                timer.timeit(calls[name])
            with _collector_clock() as collector:
                cpu_before = _cpu_seconds()
                elapsed = timer.timeit(calls[name])
                cpu_elapsed = _cpu_seconds() - cpu_before
            wall[name].append(round(elapsed / calls[name] * 1e9, 2))
            cpu[name].append(cpu_elapsed / calls[name] * 1e9)
            collecting[name].append(collector["seconds"] / calls[name] * 1e9)
    found: dict[str, Any] = {
        "work": case.work,
        "labels": case.labels,
        "contenders": {
            name: {
                "calls": calls[name],
                **statistics(wall[name]),
                "cpu_ns": round(float(np.median(cpu[name])), 2),
                **_rates(case, float(np.median(wall[name]))),
            }
            for name in timers
        },
        "ratios": {name: ratio(wall[name], wall[next(iter(timers))]) for name in list(timers)[1:]},
    }
    for contender in case.contenders:
        facts = found["contenders"][contender.name]
        if case.collect:
            facts["gc_ns"] = round(float(np.mean(collecting[contender.name])), 2)
            facts["finite"] = contender.is_finite()
        if contender.notes:
            facts |= contender.notes()
    return found


def _rates(case: Case, nanoseconds: float) -> dict[str, float]:
    rates = {}
    if case.tokens:
        rates["tokens_per_second"] = round(case.tokens / nanoseconds * 1e9, 1)
    if case.flops:
        rates["gflops"] = round(case.flops / nanoseconds, 4)
    return rates


def _cpu_seconds() -> float:
    """CPU time of this process, all its threads, and the processes it has waited for."""
    usages = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@contextmanager
def _collector_clock() -> Iterator[dict[str, float]]:
    """The seconds the garbage collector takes inside the block."""
    clock = {"seconds": 0.0, "started": 0.0}

    def watch(phase: str, _: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            clock["started"] = now
        else:
            clock["seconds"] += now - clock["started"]

    gc.callbacks.append(watch)
    try:
        yield clock
    finally:
        gc.callbacks.remove(watch)


def measure_alone(cases: Sequence[Measurable], measured: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Adds to each result the memory and allocations of its contenders, two fresh processes at a time; yields names."""
    from concurrent.futures import ThreadPoolExecutor

    from benchmarks.alone import run_alone

    jobs = [(found, c) for case, found in zip(cases, measured, strict=True) for c in able_alone(case)]
    with ThreadPoolExecutor(2) as pool:
        for (found, c), facts in zip(jobs, pool.map(lambda job: run_alone(*job[1].alone), jobs), strict=True):
            found["contenders"][c.name] |= facts
            yield f"alone: {c.name}"


def able_alone(case: Measurable) -> list[Contender]:
    return [c for c in getattr(case, "contenders", ()) if c.alone]


class Load:
    """How much of the machine other processes took since this was made: what makes a timing doubtful."""

    def __init__(self) -> None:
        self.wall, self.busy, self.own = time.perf_counter(), _busy_seconds(), _cpu_seconds()

    def by_others(self) -> float | None:
        """Their share of all CPU time, from 0 to 1; None where the system does not tell."""
        if self.busy is None:
            return None
        seconds = (time.perf_counter() - self.wall) * (os.cpu_count() or 1)
        others = (_busy_seconds() or 0.0) - self.busy - (_cpu_seconds() - self.own)
        return round(min(1.0, max(0.0, others / seconds)), 3)


def _busy_seconds() -> float | None:
    """CPU seconds that all processes together have used."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, stat.read_text(encoding="utf-8").split(maxsplit=9)[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


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


def header(suite: str, method: Method, command: str) -> dict[str, Any]:
    """Everything a reader needs to trust or repeat the figures; taken before the measuring starts."""
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
    }


def commit() -> dict[str, Any]:
    """Return the commit that is measured: STROP_COMMIT where the sources travel without it, else the repository's."""
    if told := os.environ.get("STROP_COMMIT"):
        return {"id": told, "clean": None}

    def git(*args: str) -> str | None:
        if shutil.which("git") is None:
            return None
        done = subprocess.run(["git", *args], cwd=Path(__file__).parent, capture_output=True, encoding="utf-8")
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return {"id": None, "clean": None}
    return {
        "id": git("rev-parse", "HEAD"),
        "clean": git("status", "--porcelain", "--", ":/src", ":/native", ":/benchmarks/*.py") == "",
    }


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [
            line.split(":", 1)[1].strip()
            for line in cpuinfo.read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ]
        cpu = models[0] if models else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "instruction_set": _compiled.native.isa() if _compiled.native else "none (NumPy)",
    }


def gpu() -> dict[str, Any] | None:
    """The GPU torch would use, with its driver and clocks as they are now; None where there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    found = {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "cache_bytes": getattr(properties, "L2_cache_size", None),
        "cuda": torch.version.cuda,
    }
    if shutil.which("nvidia-smi"):
        names = (
            "driver_version",
            "clocks.sm",
            "clocks.mem",
            "clocks.max.sm",
            "clocks.max.mem",
            "power.limit",
            "temperature.gpu",
        )
        query = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", "--id=0"]
        done = subprocess.run(query, capture_output=True, encoding="utf-8")
        if done.returncode == 0:
            values = done.stdout.strip().split(", ")
            found |= {name.replace(".", "_"): value for name, value in zip(names, values, strict=False)}
    return found


def threads() -> dict[str, Any]:
    found: dict[str, Any] = {
        "usable_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "strop": strop.get_num_threads(),
    }
    if "torch" in sys.modules:
        found["torch"] = sys.modules["torch"].get_num_threads()
    blas = blas_threads()
    if blas is not None:
        found["blas"] = blas
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS", "STROP_NUM_THREADS"):
        found[variable] = os.environ.get(variable)
    return found


def blas_threads() -> int | None:
    """Threads of NumPy's BLAS, where threadpoolctl is there to ask."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return None
    return next((pool["num_threads"] for pool in threadpool_info() if "numpy" in pool["filepath"]), None)


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "strop": strop.__version__}
    for package in ("numpy", "torch", "triton", "transformers", "trl", "vllm", "liger-kernel", "rlox"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def machine_name(found: dict[str, Any]) -> str:
    """What a result's file is named after: the GPU the suite ran on, or the CPU's architecture and cores."""
    if found.get("gpu"):
        return found["gpu"]["name"].lower().removeprefix("nvidia ").replace(" ", "-")
    return f"{found['machine']['architecture']}-{found['threads']['usable_cpus']}cores"


NUMBER = r"(?:-?[0-9][0-9.eE+-]*|null|NaN|-?Infinity)"
NUMBERS = re.compile(rf"\[\s+({NUMBER}(?:,\s+{NUMBER})*)\s+\]")


def save(found: dict[str, Any], path: Path) -> None:
    """Small enough to diff: one line for every list of numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, indent=1, ensure_ascii=False)
    path.write_text(NUMBERS.sub(lambda match: f"[{' '.join(match[1].split())}]", text) + "\n", encoding="utf-8")


def load(path: Path) -> dict[str, Any]:
    """A result whose figures are those of its samples; anything else is an error that names the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.get("schema") != SCHEMA:
            raise ValueError(f"schema must be {SCHEMA}, found {found.get('schema')!r}")
        for case in found["cases"]:
            _check_figures(case)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a result of the harness: {type(error).__name__}: {error}") from None
    return found


def _check_figures(case: dict[str, Any]) -> None:
    """The printed figures of a timed case; other measurements carry their curves themselves."""
    if "contenders" not in case:
        return
    contenders = case["contenders"]
    for name, stored in contenders.items():
        if stored["median_ns"] != statistics(stored["samples_ns"])["median_ns"]:
            raise ValueError(f"the median of {name} in {case['work']} is not that of its samples")
    ours = next(iter(contenders.values()))
    for name, stored in case["ratios"].items():
        value = np.median(contenders[name]["samples_ns"]) / np.median(ours["samples_ns"])
        if abs(stored["value"] - value) > 6e-4 * max(value, 1):
            raise ValueError(f"the ratio of {name} in {case['work']} is not that of its samples")
