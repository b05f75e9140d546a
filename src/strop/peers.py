"""When one of several processes fails, all end, and the first error is told once.

torchrun holds a store that all can write to. The first process that ends with an error writes itself there, and only
that one speaks. A thread looks there, and for processes of this machine that are gone: then this one ends too, within
GRACE seconds, whatever it is waiting for. torchrun itself ends the others by SIGTERM, and 30 s later by SIGKILL.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

TIMEOUT = 1800  # seconds that a process waits for the others; STROP_TIMEOUT sets another
GRACE = 5  # seconds that a process has to end by itself once another has failed
ERROR, TOLD, DONE = "strop/error", "strop/told", "strop/done"  # in the store
OF_PEERS = ("gloo", "NCCL", "by peer")  # words of errors by which torch says that a process is gone, or does not answer

_peers: "Peers | None" = None


class PeerError(RuntimeError):
    """Another process failed, so that this one cannot go on. The other tells why."""


class Peers:
    """The other processes, as far as they can be seen without waiting for them.

    beside     those of the same machine: pid by rank
    is_first   whether this process was the first to fail
    """

    def __init__(self, rank: int, where: Sequence[tuple[Any, int]], store: Any):
        self.rank, self.size, self.store, self.is_first = rank, len(where), store, False
        self.pid, self.ended = os.getpid(), threading.Event()
        machine = where[rank][0]
        self.beside = {other: pid for other, (at, pid) in enumerate(where) if at == machine and other != rank}

    def failed(self, store: Any, own: bool = False) -> str | None:
        """What became of another process (or with `own` of this one), or of torchrun; None while all go on."""
        try:
            if store.check([ERROR]) and ((rank := int(store.get(ERROR))) != self.rank or own):
                return f"process {rank} failed"
            for rank, pid in self.beside.items():
                if not _is_alive(pid) and not store.check([f"{DONE}/{rank}"]):
                    return f"process {rank} is gone, killed perhaps"
        except RuntimeError:  # the store is torchrun's
            return "torchrun is gone"
        return None

    def told(self, error: BaseException) -> str:
        """What became of the others, of an error that says no more than that something did."""
        if isinstance(error, PeerError):
            return str(error)
        if "imed out" in str(error):
            return f"another process did not answer for {timeout():g} s (STROP_TIMEOUT)"
        until = time.monotonic() + 1
        while (why := self.failed(self.store)) is None and time.monotonic() < until:
            time.sleep(0.1)  # a killed process is there until torchrun has noticed
        return why or "another process is gone"

    def begin(self) -> None:
        thread = threading.Thread(target=self.watch, args=(self.store.clone(),), daemon=True)
        thread.start()

        def end() -> None:
            if os.getpid() != self.pid:  # a fork's
                return
            self.ended.set()
            thread.join()  # a thread that Python leaves behind within torch aborts the process
            with contextlib.suppress(RuntimeError):
                self.store.set(f"{DONE}/{self.rank}", "1")

        atexit.register(end)

    def watch(self, store: Any) -> None:
        while (why := self.failed(store, own=True)) is None:  # its own too: it may hang at its end
            if self.ended.wait(0.5):
                return
        if self.ended.wait(GRACE):
            return
        if not self.is_first:
            tell(lambda: print(f"strop: process {self.rank} of {self.size}: {why}", file=sys.stderr, flush=True))
        os._exit(1)


def begin(rank: int, where: Sequence[tuple[Any, int]], store: Any) -> None:
    """Look after the other processes from now on.

    where   of every process the machine it is on, and its pid
    """
    global _peers
    _peers = Peers(rank, where, store)
    _peers.begin()
    before = sys.excepthook

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        tell(lambda: print(told(error), file=sys.stderr) if is_of_peers(error) else before(kind, error, trace))

    sys.excepthook = hook


def tell(speak: Callable[[], Any]) -> None:
    """Speak of the error this process ends with, if it is the first to fail; else let that one speak first.

    torchrun ends all as soon as one has ended.
    """
    if _peers is None or _peers.pid != os.getpid():
        speak()
        return
    store, rank = _peers.store, _peers.rank
    with contextlib.suppress(RuntimeError):  # torchrun is gone, or the first had nothing to say
        _peers.is_first = int(store.compare_set(ERROR, "", str(rank))) == rank
        if not _peers.is_first:
            store.wait([TOLD], timedelta(seconds=GRACE))
    if _peers.is_first:
        speak()
        sys.stderr.flush()
        with contextlib.suppress(RuntimeError):
            store.set(TOLD, "1")


def raise_if_failed() -> None:
    """A PeerError if another process failed. For handlers of signals: torchrun sends one to the processes that are left."""
    is_ending = sys.exc_info()[1] is not None  # by an error of its own
    if _peers is not None and not is_ending and (why := _peers.failed(_peers.store)) is not None:
        raise PeerError(why)


def is_of_peers(error: BaseException) -> bool:
    """Whether an error says no more than that another process is gone, or does not answer."""
    return _of_peers(error) is not None


def _of_peers(error: BaseException | None) -> BaseException | None:
    """The error that says so: this one, or the one it came from, as in a reward function that was interrupted."""
    while _peers is not None and error is not None:
        if isinstance(error, RuntimeError) and (
            isinstance(error, PeerError) or any(word in str(error) for word in OF_PEERS)
        ):
            return error
        error = error.__cause__ or error.__context__
    return None


def told(error: BaseException) -> str:
    """One line of an error and of its notes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    more = "" if len(lines) == 1 else " (--debug shows the rest)"
    notes = getattr(error, "__notes__", ())
    if _peers is None:
        return "; ".join([f"strop: {type(error).__name__}: {lines[0]}{more}", *notes])
    cause = _of_peers(error)
    text = f"{type(error).__name__}: {lines[0]}{more}" if cause is None else _peers.told(cause)
    return "; ".join([f"strop: process {_peers.rank} of {_peers.size}: {text}", *notes])


def timeout() -> float:
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
