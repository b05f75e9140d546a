"""A tool that runs Python: a process of its own with limits on time, memory, files, processes and the network.

    GRPO(model=model, tokenizer=tokenizer, tools=[python_tool(seconds=5)], reward_fn=reward_fn)

The limits keep a model's mistakes from harming the run: endless loops, huge lists, deleted files. They are no security
boundary: Python cannot be locked in by Python, and somebody who means harm gets out. Run foreign code, or a model you have
reason to fear, in a container or a virtual machine without a network (gVisor, Firecracker), and call that from a tool.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

from strop._checks import check_count, check_number

LONGEST = 4000  # characters of an answer
LARGEST = 1 << 20  # bytes of a file, and of all that is printed

# The child: limits first, then a hook that refuses, then the code. An audit hook cannot be taken away again.
CHILD = """
import os, resource, sys, traceback
seconds, megabytes, largest, folder = *map(int, sys.argv[1:4]), sys.argv[4]
code = sys.stdin.read()
for what, most in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, megabytes << 20), (resource.RLIMIT_FSIZE, largest),
                   (resource.RLIMIT_NOFILE, 32), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(what, (most, most))
REFUSED = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.kill", "ctypes.", "pty.",
           "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink", "os.truncate",
           "shutil.", "signal.pthread_kill")
def refuse(event, arguments):
    if event == "open":
        path, mode, flags = (*arguments, None, None)[:3]
        writes = (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND))
        inside = isinstance(path, str) and os.path.realpath(path).startswith(folder + os.sep)
        if writes and not inside:
            raise PermissionError(f"files may be written in the tool's own folder only, not {path!r}")
    elif event.startswith(REFUSED):
        raise PermissionError(f"the tool does not allow {event}")
sys.addaudithook(refuse)
try:
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
except BaseException as error:
    if not isinstance(error, SystemExit):
        lines = traceback.format_exception_only(error)
        print("".join(lines).strip().splitlines()[-1])
        sys.exit(1)
"""


def python_tool(seconds: float = 5.0, megabytes: int = 512) -> Callable[[str], str]:
    """The function `python(code)` with these limits; what the code prints is the answer, or its error's last line."""
    check_number(seconds, "seconds", 0, open_low=True)
    check_count(megabytes, "megabytes", low=64)

    def python(code: str) -> str:
        """Run Python code and return what it prints.

        Args:
            code: the program; print what you want to know
        """
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as printed:  # which has a file's limit
            limits = [str(max(1, round(seconds + 0.5))), str(megabytes), str(LARGEST), folder]
            try:
                done = subprocess.run(
                    [sys.executable, "-I", "-S", "-c", CHILD, *limits], input=code.encode("utf-8", "replace"),
                    stdout=printed, stderr=subprocess.DEVNULL, timeout=seconds, cwd=folder, env={},
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"the code must end within {seconds:g} seconds, found it still running") from None
            size = printed.seek(0, os.SEEK_END)
            printed.seek(max(size - 4 * LONGEST, 0))
            said = printed.read().decode("utf-8", "replace").strip()[-LONGEST:]
        if size >= LARGEST:
            raise RuntimeError("the code must print less than 1 MB, found more")
        if done.returncode < 0:
            raise RuntimeError(f"the code was stopped by signal {-done.returncode}: too much time or memory")
        if done.returncode:
            raise RuntimeError(said.splitlines()[-1] if said else "the code failed")
        return said

    return python
