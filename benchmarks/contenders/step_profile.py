"""What a GPU does in a training step from the end of generation on: how long kernels run, which, and what waits for them."""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

KERNELS = 12  # of the longest that are told by name


def training_profile(grpo: Any, prompts: torch.Tensor) -> dict[str, Any]:
    """One step of the trainer, from the end of generation to the end of the update.

    Kernels and time are of the same step: the profiler slows the host down, and a GPU that has waited is quicker than one
    that has not. What takes long in the profiler is done before generation.
    """
    from torch.profiler import ProfilerActivity, profile, schedule

    recorder = profile(activities=[ProfilerActivity.CUDA], schedule=schedule(wait=0, warmup=1, active=1, repeat=1))
    started: list[float] = []

    def begin() -> None:
        recorder.step()
        torch.cuda.synchronize()
        started.append(time.perf_counter())

    recorder.start()
    with after_generation(grpo, begin):
        grpo.train_step(prompts)
    torch.cuda.synchronize()
    nanoseconds = round(1e9 * (time.perf_counter() - started[0]))
    recorder.stop()
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in recorder.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    by_name: dict[str, list[float]] = {}
    for name, start, end in spans:
        by_name.setdefault(name[:80], []).append(end - start)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:KERNELS]
    busy_ns = round(1e3 * busy((start, end) for _, start, end in spans))
    return {
        "busy_ns": busy_ns,
        "profiled_ns": nanoseconds,
        "busy_share": round(busy_ns / nanoseconds, 3),
        "kernels": len(spans),
        "waits": waits(grpo, prompts),
        "longest": [{"kernel": name, "count": len(us), "ns": round(1e3 * sum(us))} for name, us in longest],
    }


def waits(grpo: Any, prompts: torch.Tensor) -> int:
    """How often a step waits for the device from the end of generation on, as far as torch knows of it."""
    found: list[Any] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with after_generation(grpo, lambda: torch.cuda.set_sync_debug_mode("warn")):
                grpo.train_step(prompts)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        # not what torch says once of the mode itself, that it does not know of all synchronizing operations
        found += [one for one in told if "called a synchronizing" in str(one.message)]
    return len(found)


@contextlib.contextmanager
def after_generation(grpo: Any, then: Callable[[], None]) -> Iterator[None]:
    """Within, `then` is called whenever a rollout is done."""

    def draw(*arguments: Any) -> Any:
        lines = type(grpo).draw(grpo, *arguments)
        then()
        return lines

    grpo.draw = draw
    try:
        yield
    finally:
        del grpo.draw


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """The length of what the spans cover together."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total
