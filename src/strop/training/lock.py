"""The lock of a run folder: only one process at a time writes to it."""

import contextlib
import errno
import fcntl
import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

FILE = ".lock"
UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_held: set[int] = set()  # descriptors of this process's locks


def _close_in_child() -> None:
    """Close the parent's locks in a forked child. Otherwise the child would keep them after the parent has ended."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder. Raise a ValueError if another process holds it.

    The kernel frees the lock when the process ends, in whatever way. On a network disk that supports locks, this also
    works between machines. A disk without locks gives a warning.
    """
    path = folder / FILE
    descriptor = _acquired(path)
    if descriptor is None:
        yield
        return
    _held.add(descriptor)
    pid = os.getpid()
    try:
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"process {pid} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        if os.getpid() == pid:
            path.unlink(missing_ok=True)  # before the lock is released: see `_acquired`
            _held.discard(descriptor)
            os.close(descriptor)


def _acquired(path: Path) -> int | None:
    """Return the descriptor of the locked file, or None if the disk does not support locks."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
            os.close(descriptor)  # the previous owner has just removed this file, so try again
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise ValueError(
                f"output_dir must not be in use: {holder} writes to {path.parent}; wait for it, or end it first"
            ) from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in UNSUPPORTED:
                raise
            warnings.warn(
                f"{path.parent} is on a disk without locks: see that one process alone writes to it", stacklevel=4
            )
            return None
