"""Calls of environments beside generation: some threads for plain methods, an event loop for `async def`."""

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import Any

from strop.environments.base import is_async
from strop.rewards import OutOfTime, time_limit

Future = concurrent.futures.Future[Any]


class Late(Exception):
    """A call took longer than its time."""


class Pool:
    """At most `size` calls at the same time, each for at most `timeout` seconds. Threads end with the program.

    A plain method that is late is stopped where Python code runs; where it waits in C it is left behind, as
    `strop.rewards.time_limit` says.
    """

    def __init__(self, size: int, timeout: float | None = None):
        self.size, self.timeout = size, timeout
        self._jobs: queue.SimpleQueue[tuple[Future, Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()
        self._num_threads = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._free: asyncio.Semaphore | None = None

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future:
        if is_async(function):
            return asyncio.run_coroutine_threadsafe(self._awaited(function, *arguments), self._event_loop())
        future: Future = concurrent.futures.Future()
        self._jobs.put((future, function, arguments))
        if self._num_threads < self.size:
            self._num_threads += 1
            threading.Thread(target=self._work, daemon=True, name="environment").start()
        return future

    def _work(self) -> None:
        while True:
            future, function, arguments = self._jobs.get()
            try:
                future.set_result(self._call(function, arguments))
            except OutOfTime:
                future.set_exception(Late())
            except BaseException as error:
                future.set_exception(error)
            del future, function, arguments

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if self.timeout is None:
            return function(*arguments)
        return time_limit(lambda: function(*arguments), self.timeout)

    async def _awaited(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._free is None:
            self._free = asyncio.Semaphore(self.size)
        async with self._free:
            try:
                return await asyncio.wait_for(function(*arguments), self.timeout)
            except TimeoutError:
                raise Late from None

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True, name="environments").start()
        return self._loop
