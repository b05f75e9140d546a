"""Work in a fresh process: the most memory it held, and what one call allocates.

    python -m benchmarks.alone MODULE ARGUMENTS…

imports the module, takes the function that its `alone(*arguments)` returns, calls it a few times, and prints JSON.
"""

import ctypes
import functools
import importlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benchmarks

WARM_UP_CALLS = 3


def run_alone(*arguments: str) -> dict[str, Any]:
    """Peak resident memory in MB; calls and bytes of malloc in one warm call (None where they cannot be counted)."""
    environment = benchmarks.environment()
    if counter := _counter():
        environment["LD_PRELOAD"] = counter
    command = [sys.executable, "-m", "benchmarks.alone", *arguments]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RuntimeError(f"{' '.join(arguments)} failed in a fresh process: {reason[0]}")
    return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def _counter() -> str | None:
    """The counting library, compiled once a run; None without a C compiler or with another C library than glibc."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    library = Path(_folder().name) / "allocations.so"
    source = Path(__file__).with_name("allocations.c")
    done = subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], capture_output=True)
    return str(library) if done.returncode == 0 else None


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="strop-bench-")  # goes with the process


def peak_megabytes() -> float:
    """The most resident memory this process has held. Linux's ru_maxrss would remember the parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _counts() -> Callable[[], tuple[int, int]] | None:
    """A function that reads calls and bytes so far; None where the counting library is not loaded."""
    library = ctypes.CDLL(None)
    try:
        calls, size = library.strop_allocation_calls, library.strop_allocation_bytes
    except AttributeError:
        return None
    calls.restype = size.restype = ctypes.c_ulong
    return lambda: (calls(), size())


def main(module: str, *arguments: str) -> None:
    function = importlib.import_module(module).alone(*arguments)
    for _ in range(WARM_UP_CALLS):
        function()
    found: dict[str, Any] = {"peak_rss_mb": round(peak_megabytes(), 1), "allocations": None, "allocated_bytes": None}
    if counts := _counts():
        before = counts()
        result = function()  # held, so that its release is not part of the call
        after = counts()
        del result
        found |= {"allocations": after[0] - before[0], "allocated_bytes": after[1] - before[1]}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
