"""A tool that runs Python code in a process of its own, with limits on time, memory, files, processes and network.

    GRPO(model=model, tokenizer=tokenizer, tools=[python_tool(seconds=5)], reward_fn=reward_fn)

On Linux the kernel refuses writing outside the tool's folder, starting or reaching other processes, and the network
(`strop.environments.sandbox`). Elsewhere, and in containers that forbid these limits, only Python refuses such calls,
which stops mistakes; a warning says so once, and `strop doctor` shows it. Neither protects against malicious programs:
they can read what you can read, and kernels have bugs. Run such programs in a container or a virtual machine without a
network (gVisor, Firecracker), and call that from a tool.
"""

import os
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from strop._checks import check_count, check_number
from strop.environments import sandbox
from strop.environments.sandbox_child import MAX_NODES, NOT_PROTECTED

LONGEST = 4000  # maximum characters of an answer
LOOK_EVERY = 0.02  # seconds between two checks of the folder, if the kernel does not limit its size


def python_tool(seconds: float = 5.0, megabytes: int = 512) -> Callable[[str], str]:
    """Return a function `python(code)` with these limits.

    It returns what the code prints, or raises with its last line.
    """
    check_number(seconds, "seconds", 0, open_low=True)
    check_count(megabytes, "megabytes", low=64)
    layers = sandbox.available()
    if lacking := sandbox.unprotected():
        warnings.warn(f"the Python tool is protected less on this machine: {lacking}", stacklevel=2)

    def python(code: str) -> str:
        """Run Python code and return what it prints.

        Args:
            code: the program; print what you want to know
        """
        with tempfile.TemporaryDirectory() as made, tempfile.TemporaryFile() as printed:  # limited as a file
            folder = os.path.realpath(made)
            command = sandbox.command(folder, layers, max(1, round(seconds + 0.5)), megabytes)
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=printed, stderr=subprocess.DEVNULL, cwd=folder, env={},
                start_new_session=True,
            ) as process:  # fmt: skip
                try:
                    _wait(process, code, seconds, None if "folder" in layers else Path(folder))
                finally:
                    process.kill()
            size = printed.seek(0, os.SEEK_END)
            printed.seek(max(size - 4 * LONGEST, 0))
            said = printed.read().decode("utf-8", "replace").strip()[-LONGEST:]
        if size >= sandbox.LARGEST:
            raise RuntimeError("the code must print less than 1 MB, found more")
        if process.returncode == NOT_PROTECTED:
            why = "the protection that this machine had before is missing now"
            raise RuntimeError(f"the code was not run: {why} ({said})")
        if process.returncode < 0:
            raise RuntimeError(f"the code was stopped by signal {-process.returncode}: too much time or memory")
        if process.returncode:
            raise RuntimeError(said.splitlines()[-1] if said else "the code failed")
        return said

    return python


def _wait(process: subprocess.Popen[bytes], code: str, seconds: float, folder: Path | None) -> None:
    """Send the program to the process and wait for its end. Raise if it takes too long, or fills this folder."""
    end, given = time.monotonic() + seconds, code.encode("utf-8", "replace") or None
    while True:
        left = end - time.monotonic()
        try:
            process.communicate(given, timeout=max(left if folder is None else min(left, LOOK_EVERY), 0))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= end:
                raise TimeoutError(f"the code must end within {seconds:g} seconds, found it still running") from None
            given = None  # subprocess keeps the rest of the input
        else:
            break
        if folder is not None:
            _check_size(folder)
    if folder is not None:
        _check_size(folder)


def _check_size(folder: Path) -> None:
    sizes = [path.lstat().st_size for path in folder.rglob("*") if path.is_file()]
    if sum(sizes) > sandbox.TOTAL or len(sizes) > MAX_NODES:
        raise RuntimeError(
            f"the code's files must be at most {MAX_NODES}, and {sandbox.TOTAL >> 20} MB together, found {len(sizes)} of "
            f"{sum(sizes) >> 20} MB"
        )
