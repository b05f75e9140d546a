"""A pool that calls environments while the model samples: threads for plain methods, an event loop for `async def`."""

import asyncio
import concurrent.futures
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from strop.environments.base import is_async
from strop.rewards import OutOfTime, time_limit

IDLE_SECONDS = 5.0  # a thread without calls ends after this time


class Late(Exception):
    """A call exceeded its time limit."""


class Answer(concurrent.futures.Future[Any]):
    """The future of a call, with the number of seconds it ran."""

    seconds = 0.0
    task: concurrent.futures.Future[None] | None = None

    def stop(self) -> None:
        """Cancel the call if it is an `async def`. A plain function goes on in its thread."""
        if self.task is not None:
            self.task.cancel()

    def settle(self, start: float, value: object = None, error: BaseException | None = None) -> None:
        if self.done():  # it was late before its event loop said so
            return
        self.seconds = time.perf_counter() - start
        if error is None:
            self.set_result(value)
        else:
            self.set_exception(error)


class Pool:
    """Runs at most `size` calls at the same time, each for at most `timeout` seconds.

    There are as many threads as there were calls of plain methods at the same time. Idle threads end, and the event
    loop ends with the pool.

    A plain method that is late is stopped if it runs Python code, and abandoned if it waits in C
    (`strop.rewards.time_limit`). An `async def` that is late is cancelled. One that never awaits blocks all others;
    `forget_loop` abandons them.
    """

    def __init__(self, size: int, timeout: float | None = None):
        self.size, self.timeout = size, timeout
        self._jobs: queue.SimpleQueue[tuple[Answer, Callable[..., Any], tuple[object, ...]]] = queue.SimpleQueue()
        self._num_threads = self._num_calls = 0
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._free: asyncio.Semaphore | None = None

    def submit(self, function: Callable[..., object], *arguments: object) -> Answer:
        answer = Answer()
        if is_async(function):
            answer.task = asyncio.run_coroutine_threadsafe(self._await(answer, function, arguments), self._event_loop())
            return answer
        with self._lock:
            self._jobs.put((answer, function, arguments))
            self._num_calls += 1
            is_needed = self._num_threads < min(self._num_calls, self.size)
            self._num_threads += is_needed
        if is_needed:
            threading.Thread(target=self._work, daemon=True, name="environment").start()
        return answer

    def forget_loop(self) -> None:
        """Abandon the event loop and the calls in it. Further calls get a new loop."""
        self._loop = self._free = None

    def _work(self) -> None:
        while True:
            try:
                answer, function, arguments = self._jobs.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if not self._jobs.empty():
                        continue
                    self._num_threads -= 1
                    return
            start = time.perf_counter()
            value: object = None
            error: BaseException | None = None
            try:
                value = self._call(function, arguments)
            except OutOfTime:
                error = Late()
            except BaseException as raised:
                error = raised
            with self._lock:
                self._num_calls -= 1
            answer.settle(start, value, error)
            del answer, function, arguments, value, error

    def _call(self, function: Callable[..., object], arguments: tuple[object, ...]) -> Any:
        if self.timeout is None:
            return function(*arguments)
        return time_limit(lambda: function(*arguments), self.timeout)

    async def _await(self, answer: Answer, function: Callable[..., Any], arguments: tuple[object, ...]) -> None:
        if self._free is None:
            self._free = asyncio.Semaphore(self.size)
        async with self._free:
            start = time.perf_counter()
            limit = asyncio.timeout(self.timeout)
            try:
                async with limit:
                    value = await function(*arguments)
            except BaseException as error:  # SystemExit too: it would end the loop
                late = isinstance(error, TimeoutError) and limit.expired()
                answer.settle(start, error=Late() if late else error)
            else:
                answer.settle(start, value)

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(loop,), daemon=True, name="environments").start()
            weakref.finalize(self, loop.call_soon_threadsafe, loop.stop).atexit = False
        return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()
