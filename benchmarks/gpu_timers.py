"""How calls on a GPU are timed: on the GPU alone, in a loop, or from call to result. See `benchmarks.harness`."""

import functools
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.harness import Contender


@functools.cache
def _more_than_the_cache() -> torch.Tensor:
    """Memory larger than any GPU's cache."""
    return torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")


class GpuTimer:
    """Calls on a GPU, each by two events around it, after a write that leaves nothing of the one before in the cache.

    The GPU is kept waiting before each call, so that its launches are queued as they are behind a model's forward: what
    counts is the time on the GPU, and what Python does only where the call itself waits for the GPU. `WallGpuTimer`
    counts all that Python does, `LoopGpuTimer` what of it the GPU's work does not hide. The garbage collector is off
    meanwhile, as in `timeit`.
    """

    HEAD_START = 4_000_000  # cycles, about 2 ms: more than any contender's Python takes

    def __init__(self, contender: Contender) -> None:
        self._call = functools.partial(contender.function, *contender.args, **contender.kwargs)
        self._cache = _more_than_the_cache()
        self.timeit(2)  # the first calls compile

    def timeit(self, number: int) -> float:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(number)]
        with _no_garbage_collection():
            for start, end in events:
                self._cache.zero_()
                torch.cuda._sleep(self.HEAD_START)
                start.record()
                self._call()
                end.record()
            torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in events) * 1e-3


class WallGpuTimer(GpuTimer):
    """Calls on a GPU from the caller's side: from the call until its result is there."""

    def timeit(self, number: int) -> float:
        seconds = 0.0
        with _no_garbage_collection():
            for _ in range(number):
                self._cache.zero_()
                torch.cuda.synchronize()
                start = time.perf_counter()
                self._call()
                torch.cuda.synchronize()
                seconds += time.perf_counter() - start
        return seconds


class LoopGpuTimer(GpuTimer):
    """Calls on a GPU one after another, as a loop makes them: the longer of what Python and what the GPU takes."""

    def timeit(self, number: int) -> float:
        with _no_garbage_collection():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(number):
                self._call()
            torch.cuda.synchronize()
            return time.perf_counter() - start


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
