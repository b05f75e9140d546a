"""Start processes that have imported torch, transformers and strop already, alone or as torchrun starts a group.

Importing them takes seconds, and tests of several processes start dozens. So each pytest worker keeps one process that has
imported everything. For each start it forks a child. The child runs the function itself or, for a group, torchrun's own
agent with the same options as the command; the agent then forks the processes of the group. Each start has fresh processes,
an environment of its own, and exit codes and signals as usual.
"""

import contextlib
import functools
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

TESTS = Path(__file__).resolve().parent
TORCHRUN = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Process:
    """A started process, with the part of `subprocess.Popen`'s interface that tests use. One runs at a time."""

    def __init__(self, function, arguments, num_processes, environment):
        self.server, self.returncode = _server(), None
        self.files = [tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") for _ in range(2)]  # noqa: SIM115
        request = {
            "function": function, "arguments": list(map(str, arguments)), "num_processes": num_processes,
            "environment": os.environ | ONE_THREAD | environment,
            "output": [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in self.files],
        }  # fmt: skip
        print(json.dumps(request), file=self.server.stdin, flush=True)
        self.pid = int(self.server.stdout.readline())

    def poll(self, timeout=0):
        """Return the exit code, or None if the process still runs after this many seconds."""
        if self.returncode is None and select.select([self.server.stdout], [], [], timeout)[0]:
            self.returncode = int(self.server.stdout.readline())
        return self.returncode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def communicate(self, timeout):
        """Return standard output and standard error once the process has ended. After `timeout` seconds, end it."""
        if self.poll(timeout) is None:
            self.send_signal(signal.SIGTERM)
            if self.poll(30) is None:
                self.send_signal(signal.SIGKILL)
                self.poll(30)
            raise TimeoutError(f"it ran for more than {timeout} s\n{self._read()[1][-4000:]}")
        return self._read()

    def errors(self):
        """Return what the running process has written to standard error."""
        self.files[1].seek(0)
        return self.files[1].read()

    def _read(self):
        found = []
        for file in self.files:
            file.seek(0)
            found.append(file.read())
            file.close()
        return found


def start(function, *arguments, num_processes=None, **environment):
    """Start `module:function` with arguments of the command line, in one process or in a group of this many."""
    return Process(function, arguments, num_processes, environment)


def run(function, *arguments, num_processes=None, timeout=300, **environment):
    """Run it to its end and return its standard output and standard error. It must exit with 0."""
    process = start(function, *arguments, num_processes=num_processes, **environment)
    out, err = process.communicate(timeout)
    assert process.returncode == 0, err[-4000:]
    return out, err


def strop(*arguments, timeout=120):
    """Run the command strop to its end and return its exit code and output."""
    process = start("strop.cli:main", *arguments)
    out, err = process.communicate(timeout)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


@functools.cache
def _server():
    """Return this pytest worker's process that has everything imported. It ends when its standard input does."""
    command = [sys.executable, __file__]
    return subprocess.Popen(
        command, env=os.environ | ONE_THREAD, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=TESTS.parent
    )


# ---- the process that forks ----


def serve():
    sys.path[:0] = [str(TESTS), str(TESTS / "distributed")]
    for name in ("torch.distributed.run", "transformers", "peft", "strop.cli", "work", "runs"):
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a process that forks must have one thread, found {len(threads)}"
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run_and_exit(**request)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run_and_exit(function, arguments, num_processes, environment, output):
    """Run the function of a request in this forked child; never return."""
    code = 1
    try:
        for number, path in enumerate([os.devnull, *output]):
            file = os.open(path, os.O_RDWR)
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(environment)
        time.tzset()
        if num_processes is None:
            _call(function, arguments)
        else:
            _run_group(num_processes, function, arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)


def _call(function, arguments):
    module, _, name = function.partition(":")
    sys.argv = [module, *arguments]
    getattr(importlib.import_module(module), name)(*([] if module == "strop.cli" else arguments))


def _run_group(num_processes, function, arguments):
    """Run what `torchrun --nproc-per-node …` runs, with forked processes in place of new ones."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.launcher.api import elastic_launch

    options = torchrun.parse_args([*TORCHRUN, "--nproc-per-node", str(num_processes), "unused"])
    config, *_ = torchrun.config_from_args(options)
    config.start_method = "fork"
    record(lambda: elastic_launch(config, _call)(function, arguments))()


if __name__ == "__main__":
    serve()
