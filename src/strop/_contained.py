"""Contexts for user code, which keep it from changing torch's settings or ending the program in silence.

    with contained():
        values = reward_fn(completions)

torch is used only if it is imported already.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

AUTOCAST_DEVICES = ("cpu", "cuda")
_guards: list[Any] = []  # of inference mode, entered by `apply`: kept so that they never exit


class ExitError(RuntimeError):
    """The error for called code that tried to end the program, for example by sys.exit."""


class Settings(NamedTuple):
    """The settings of torch that affect results or speed. All but `dtype` and `threads` are per thread."""

    grad: bool = True
    inference: bool = False
    autocast: tuple[bool, ...] = (False,) * len(AUTOCAST_DEVICES)
    dtype: Any = None  # None leaves it unchanged; so for `threads`
    threads: int | None = None

    @classmethod
    def now(cls) -> "Settings":
        """Return the current settings."""
        torch = sys.modules.get("torch")
        if torch is None:
            return cls()
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(torch.is_autocast_enabled(device) for device in AUTOCAST_DEVICES),
            torch.get_default_dtype(),
            torch.get_num_threads(),
        )

    @classmethod
    def of_a_run(cls) -> "Settings":
        """Return the settings for training: gradients on, autocast off, current dtype and threads."""
        now = cls.now()
        return cls(dtype=now.dtype, threads=now.threads)

    def apply(self) -> None:
        """Apply these settings to torch, changing only those that differ."""
        torch = sys.modules.get("torch")
        if torch is None or (now := Settings.now()) == self:
            return
        if now.inference != self.inference:
            _guards.append(torch.inference_mode(self.inference))
            _guards[-1].__enter__()
        torch.set_grad_enabled(self.grad)
        for device, wanted, found in zip(AUTOCAST_DEVICES, self.autocast, now.autocast, strict=True):
            if wanted != found:
                torch.set_autocast_enabled(device, wanted)
        if self.dtype not in (None, now.dtype):
            torch.set_default_dtype(self.dtype)
        if self.threads not in (None, now.threads):
            torch.set_num_threads(self.threads)


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Restore torch's settings on exit. If the code inside calls sys.exit(), raise an `ExitError`."""
    before = Settings.now()
    try:
        yield
    except SystemExit as error:
        raise ExitError(exit_message(error)) from error
    finally:
        before.apply()


@contextlib.contextmanager
def no_silent_exit() -> Iterator[None]:
    """Make os._exit(0) an error that ends this process with code 1; forked children and other codes stay as they are.

    Without this, a reward function that calls it ends a command as if it had finished. An exit in C cannot be seen.
    """
    before, pid = os._exit, os.getpid()

    def end(status: int) -> None:
        if status == 0 and os.getpid() == pid:
            frame = traceback.extract_stack(limit=2)[0]
            place = f"{frame.filename}, line {frame.lineno}"
            print(
                f"strop: os._exit(0) was called at {place}: code that strop calls must return",
                file=sys.stderr,
                flush=True,
            )
            status = 1
        before(status)

    os._exit = end  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = before


def exit_message(error: SystemExit) -> str:
    """Return the message about code that called sys.exit: its file and line, and the exit code."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    code = "" if error.code is None else repr(error.code)
    place = f"{frame.filename}, line {frame.lineno}"
    return f"sys.exit({code:.60}) was called at {place}: code that strop calls must return"
