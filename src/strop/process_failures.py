"""End all processes when one of them fails, and print the first error once.

torchrun has a store that all processes can write to. The first process that fails writes its rank there, and only that
one prints its error. In every process a thread watches the store and the processes of the same machine. When one has
failed or is gone, the thread ends its own process within GRACE seconds, whatever that is waiting for. torchrun itself
ends the others by SIGTERM, and 30 s later by SIGKILL.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Protocol

TIMEOUT = 1800  # seconds that a process waits for the others; STROP_TIMEOUT sets another
GRACE = 5  # seconds that a process has to end by itself once another has failed
ERROR, REPORTED, DONE = "strop/error", "strop/reported", "strop/done"  # keys of the store
LOST_PROCESS_WORDS = ("gloo", "NCCL", "by peer")  # torch's errors have one of these if a process is gone or silent

_others: "OtherProcesses | None" = None


class PeerError(RuntimeError):
    """Another process failed, so this one cannot go on. The other one prints why."""


class Store(Protocol):
    """The methods of torch's `TCPStore` that are used here."""

    def check(self, keys: list[str]) -> bool: ...
    def get(self, key: str) -> bytes: ...
    def set(self, key: str, value: str) -> None: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def clone(self) -> "Store": ...


class OtherProcesses:
    """The state of the other processes, which can be read without waiting for them.

    pid_by_rank   the other processes of this machine
    is_first      True if this process was the first to fail
    """

    def __init__(self, rank: int, where: Sequence[tuple[str | None, int]], store: Store):
        self.rank, self.size, self.store, self.is_first = rank, len(where), store, False
        self.pid, self.ended = os.getpid(), threading.Event()
        machine = where[rank][0]
        self.pid_by_rank = {other: pid for other, (at, pid) in enumerate(where) if at == machine and other != rank}

    def failure(self, store: Store, own: bool = False) -> str | None:
        """Return why this process must end: another (with `own` also this one) or torchrun failed; else None."""
        try:
            if store.check([ERROR]) and ((rank := int(store.get(ERROR))) != self.rank or own):
                return f"process {rank} failed"
            for rank, pid in self.pid_by_rank.items():
                if not _is_alive(pid) and not store.check([f"{DONE}/{rank}"]):
                    return f"process {rank} is gone, killed perhaps"
        except RuntimeError:  # the store is torchrun's
            return "torchrun is gone"
        return None

    def cause_of(self, error: BaseException) -> str:
        """Return what happened to the other process, for an error that says only that a process is gone."""
        if isinstance(error, PeerError):
            return str(error)
        if "imed out" in str(error):
            return f"another process did not answer for {timeout():g} s (STROP_TIMEOUT)"
        until = time.monotonic() + 1
        while (why := self.failure(self.store)) is None and time.monotonic() < until:
            time.sleep(0.1)  # a killed process seems alive until torchrun has noticed
        return why or "another process is gone"

    def start(self) -> None:
        """Start the thread that watches the others until this process ends."""
        thread = threading.Thread(target=self.watch, args=(self.store.clone(),), daemon=True)
        thread.start()

        def end() -> None:
            if os.getpid() != self.pid:  # this is a forked process
                return
            self.ended.set()
            thread.join()  # Python aborts if it ends while the thread is inside torch
            with contextlib.suppress(RuntimeError):
                self.store.set(f"{DONE}/{self.rank}", "1")

        atexit.register(end)

    def watch(self, store: Store) -> None:
        """Wait until a process fails, then end this one."""
        while (why := self.failure(store, own=True)) is None:  # own=True: a failed process may hang as it ends
            if self.ended.wait(0.5):
                return
        if self.ended.wait(GRACE):
            return
        if not self.is_first:
            told = f"strop: process {self.rank} of {self.size}: {why}"
            report_first(lambda: print(told, file=sys.stderr, flush=True))
        os._exit(1)


def watch_others(rank: int, where: Sequence[tuple[str | None, int]], store: Store) -> None:
    """Start watching the other processes.

    where   the machine and the pid of every process
    """
    global _others
    _others = OtherProcesses(rank, where, store)
    _others.start()
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        def report() -> None:
            if is_lost_process(error):
                print(format_error(error), file=sys.stderr)
            else:
                before(kind, error, trace)

        report_first(report)

    sys.excepthook = hook


def report_first(report: Callable[[], object]) -> None:
    """Call `report`, which prints this process's error, if this process is the first to fail; else wait for the first.

    torchrun ends all processes as soon as one has ended, so the first must have printed its error by then.
    """
    if _others is None or _others.pid != os.getpid():
        report()
        return
    store, rank = _others.store, _others.rank
    with contextlib.suppress(RuntimeError):  # torchrun is gone, or the first printed nothing
        _others.is_first = int(store.compare_set(ERROR, "", str(rank))) == rank
        if not _others.is_first:
            store.wait([REPORTED], timedelta(seconds=GRACE))
    if _others.is_first:
        report()
        sys.stderr.flush()
        with contextlib.suppress(RuntimeError):
            store.set(REPORTED, "1")


def raise_if_failed() -> None:
    """Raise a PeerError if another process failed. For signal handlers: torchrun signals the processes that are left."""
    is_ending = sys.exc_info()[1] is not None  # this process ends because of its own error
    if _others is not None and not is_ending and (why := _others.failure(_others.store)) is not None:
        raise PeerError(why)


def is_lost_process(error: BaseException) -> bool:
    """Return whether an error says only that another process is gone or does not answer."""
    return _lost_process_error(error) is not None


def _lost_process_error(error: BaseException | None) -> BaseException | None:
    """Return the error that says a process is gone: this one or one of its causes, as in an interrupted reward function."""
    while _others is not None and error is not None:
        says_so = isinstance(error, RuntimeError) and any(word in str(error) for word in LOST_PROCESS_WORDS)
        if says_so or isinstance(error, PeerError):
            return error
        error = error.__cause__ or error.__context__
    return None


def format_error(error: BaseException) -> str:
    """Return an error and its notes as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    more = "" if len(lines) == 1 else " (--debug shows the rest)"
    notes = getattr(error, "__notes__", ())
    if _others is None:
        return "; ".join([f"strop: {type(error).__name__}: {lines[0]}{more}", *notes])
    cause = _lost_process_error(error)
    text = f"{type(error).__name__}: {lines[0]}{more}" if cause is None else _others.cause_of(cause)
    return "; ".join([f"strop: process {_others.rank} of {_others.size}: {text}", *notes])


def timeout() -> float:
    """Return how many seconds a process waits for the others."""
    given = os.environ.get("STROP_TIMEOUT", str(TIMEOUT))
    try:
        if 0 < float(given) < float("inf"):
            return float(given)
    except ValueError:
        pass
    raise ValueError(f"STROP_TIMEOUT must be a number of seconds above 0, found {given!r}")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's: alive
        return True
    return True
