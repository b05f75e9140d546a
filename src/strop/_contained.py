"""Code of the user's, kept from changing how the rest of the program computes or ends.

    with contained():
        values = reward_fn(completions)

torch is looked at only where it is loaded already, so that importing this costs nothing.
"""

import contextlib
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

AUTOCAST_DEVICES = ("cpu", "cuda")
_guards: list[Any] = []  # of inference mode: one that was put right stays right until the process ends


class ExitError(RuntimeError):
    """Code that was called ended the program, as sys.exit does."""


class Settings(NamedTuple):
    """torch's settings that change what is computed, or how fast. All but `dtype` and `threads` are those of one thread."""

    grad: bool = True
    inference: bool = False
    autocast: tuple[bool, ...] = (False,) * len(AUTOCAST_DEVICES)
    dtype: Any = None  # None, as `threads`: left as it is
    threads: int | None = None

    @classmethod
    def now(cls) -> "Settings":
        """Return the settings as they are."""
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
        """Return what training needs: gradients, no autocast but its own; dtype and threads as they are now."""
        now = cls.now()
        return cls(dtype=now.dtype, threads=now.threads)

    def apply(self) -> None:
        """Put torch into these settings; what is as wanted already is not touched."""
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
    """Put torch's settings back at the end, whatever the code within did to them. sys.exit() within is an `ExitError`."""
    before = Settings.now()
    try:
        yield
    except SystemExit as error:
        raise ExitError(exit_message(error)) from error
    finally:
        before.apply()


def exit_message(error: SystemExit) -> str:
    """Return what is said of code that ends the program: where it did so, and with which exit code."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    code = "" if error.code is None else repr(error.code)
    place = f"{frame.filename}, line {frame.lineno}"
    return f"sys.exit({code:.60}) was called at {place}: code that strop calls must return"
