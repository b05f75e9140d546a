"""A pool that calls environments while the model samples: threads for plain methods, an event loop for `async def`."""

import asyncio
import concurrent.futures
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from strop.environments.base import is_async
from strop.rewards import OutOfTime, time_limit


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
    """Runs at most `size` calls at the same time, each for at most `timeout` seconds. Threads end with the program.

    A plain method that is late is stopped if it runs Python code, and abandoned if it waits in C
    (`strop.rewards.time_limit`). An `async def` that is late is cancelled. One that never awaits blocks all others;
    `forget_loop` abandons them.
    """

    def __init__(self, size: int, timeout: float | None = None):
        self.size, self.timeout = size, timeout
        self._jobs: queue.SimpleQueue[tuple[Answer, Callable[..., Any], tuple[object, ...]]] = queue.SimpleQueue()
        self._num_threads = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._free: asyncio.Semaphore | None = None

    def submit(self, function: Callable[..., object], *arguments: object) -> Answer:
        answer = Answer()
        if is_async(function):
            answer.task = asyncio.run_coroutine_threadsafe(self._await(answer, function, arguments), self._event_loop())
            return answer
        self._jobs.put((answer, function, arguments))
        if self._num_threads < self.size:
            self._num_threads += 1
            threading.Thread(target=self._work, daemon=True, name="environment").start()
        return answer

    def forget_loop(self) -> None:
        """Abandon the event loop and the calls in it. Further calls get a new loop."""
        self._loop = self._free = None

    def _work(self) -> None:
        while True:
            answer, function, arguments = self._jobs.get()
            start = time.perf_counter()
            try:
                answer.settle(start, self._call(function, arguments))
            except OutOfTime:
                answer.settle(start, error=Late())
            except BaseException as error:
                answer.settle(start, error=error)
            del answer, function, arguments

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
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True, name="environments").start()
        return self._loop
