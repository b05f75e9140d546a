"""Contexts around the work of a step: what happens inside leaves torch's settings as they were.

    contained        undoes changes of torch's settings by code of users
    no_silent_exit   makes os._exit(0) an error
    one_thread       runs torch on one thread
    Phases           also measures the time of each phase of a step

torch is imported only where it is needed.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

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


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread. Next to the MoE engine or a GPU the host's tensors are small. More threads would spin on the
    engine's cores while they wait for work, and a GPU would wait for the slowest, up to 40 ms on a shared machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Phases:
    """The times of a step's phases, by name. Time in a nested phase counts for the inner phase only.

    On a GPU, times are measured with events in its stream, without waiting: a phase lasts from the end of the GPU work
    before it to the end of its own. Host work counts only as far as it keeps the GPU idle, so the phases add up to the
    step.
    """

    def __init__(self, device: "torch.device | None" = None) -> None:
        self.thread = threading.get_ident()  # whose phases they are
        self.failed: str | None = None  # the innermost phase an error came from
        self.num_tokens = 0  # number of tokens in the step
        self.wanted_norm: torch.Tensor | None = None  # norm of a gradient that must not be 0
        self.num_draws = 0  # number of times dropout was seeded
        self.unfit: list[torch.Tensor] = []  # one per update: 1 if it or an earlier one is not finite, else 0
        self._gpu = device if device is not None and device.type == "cuda" else None
        self._spans: list[tuple[str, str | None, Any, Any]] = []  # name, the phase around it, begin, end
        self._open: list[str] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time of this context, and restore torch's settings at its end."""
        around = self._open[-1] if self._open else None
        self._open.append(name)
        begin = self._mark()
        try:
            with contained():
                yield
        except BaseException:
            self.failed = self.failed or name
            raise
        finally:
            self._open.pop()
            self._spans.append((name, around, begin, self._mark()))

    @property
    def now(self) -> str:
        """The name of the current innermost phase; "" between phases."""
        return self._open[-1] if self._open else ""

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each phase, by name. Reading it waits for the GPU."""
        if self._gpu is not None:
            import torch

            torch.cuda.synchronize(self._gpu)
        found: dict[str, float] = {}
        for name, around, begin, end in self._spans:
            taken = end - begin if self._gpu is None else begin.elapsed_time(end) / 1e3
            found[name] = found.get(name, 0.0) + taken
            if around is not None:
                found[around] = found.get(around, 0.0) - taken
        return found

    def metrics(self) -> dict[str, float]:
        """Return time/<name> for every phase, and on a GPU the peak memory as `memory`."""
        found = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        if self._gpu is None:
            return found
        import torch

        return found | {"memory": float(torch.cuda.max_memory_allocated(self._gpu))}

    def note_unfit(self, value: "torch.Tensor") -> "torch.Tensor":
        """Append to `unfit`, and return, 1 if this value or an earlier one in this step is not finite, else 0.

        The result stays on the device.
        """
        unfit = (~value.isfinite()).float()
        self.unfit.append(self.unfit[-1].maximum(unfit) if self.unfit else unfit)
        return self.unfit[-1]

    def anew(self) -> "Phases":
        """Return empty phases for the next step, on the same device."""
        return Phases(self._gpu)

    def _mark(self) -> Any:
        if self._gpu is None:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._gpu))
        return event
