"""Calls of async functions: several at the same time, limited in time, made again after an error; and their HTTP."""

import asyncio
import http.client
import io
import json
import os
import threading
import urllib.parse
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from strop._contexts import ExitError, exit_message
from strop._types import Json

LONGEST_PAUSE = 30.0  # seconds before a call is made again
Result = TypeVar("Result")


@dataclass
class FailedCall(Exception):
    """A call that failed as often as it may be made. error: its last; None if it was late. index: which call it was."""

    index: int
    error: Exception | None


def pause_before(attempt: int) -> float:
    """Return the seconds to wait before a call is made: 0 before the first, then 0.5, 1, 2 …"""
    return min(2.0 ** (attempt - 2), LONGEST_PAUSE) if attempt else 0.0


def begin(
    calls: Sequence[Callable[[], Awaitable[Any]]], *, at_once: int, timeout: float | None, retries: int, stops: bool
) -> Future[list[Any]]:
    """Begin the calls and return the future of their results, in order.

    at_once   how many run at the same time
    timeout   seconds for one call, from its own beginning
    retries   how often a call that fails is made again
    stops     raise the first FailedCall and cancel the other calls; else a FailedCall takes the place of a result
    """
    return event_loop.submit(_all(calls, at_once, timeout, retries, stops))


async def _all(
    calls: Sequence[Callable[[], Awaitable[Any]]], at_once: int, timeout: float | None, retries: int, stops: bool
) -> list[Any]:
    free = asyncio.Semaphore(at_once)

    async def result(index: int) -> Any:
        found = await _result(calls[index], index, free, timeout, retries)
        if stops and isinstance(found, FailedCall):
            raise found
        return found

    tasks = [asyncio.ensure_future(result(index)) for index in range(len(calls))]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _result(
    call: Callable[[], Awaitable[Any]], index: int, free: asyncio.Semaphore, timeout: float | None, retries: int
) -> Any:
    failure = FailedCall(index, None)
    for attempt in range(retries + 1):
        await asyncio.sleep(pause_before(attempt))
        limit = asyncio.timeout(timeout)
        try:
            async with free, limit:
                return await call()
        except SystemExit as error:  # it would end the loop
            failure.error = ExitError(exit_message(error)).with_traceback(error.__traceback__)
        except Exception as error:
            failure.error = None if isinstance(error, TimeoutError) and limit.expired() else error
    return failure


class EventLoop:
    """An event loop in a thread of its own, begun with the first coroutine. Clients of user code may stay open in it."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        if self._loop is None or self._pid != os.getpid():  # a forked process has no thread
            self._loop, self._pid = asyncio.new_event_loop(), os.getpid()
            threading.Thread(target=self._loop.run_forever, daemon=True, name="rewards").start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def give_up(self) -> None:
        """Abandon the loop, in which a call blocks. The next coroutine gets a new one."""
        self._loop = None


event_loop = EventLoop()


# ---- HTTP ----


class _Received:
    """The bytes of an answer, as `http.client` takes them from a socket."""

    def __init__(self, data: bytes):
        self.makefile = lambda mode: io.BytesIO(data)


async def post_json(url: str, body: Json, api_key: str | None = None) -> Json:
    """Send a JSON object and return the one that is answered; raise RuntimeError for any other answer."""
    place, data = urllib.parse.urlsplit(url), json.dumps(body).encode()
    key = "" if api_key is None else f"Authorization: Bearer {api_key}\r\n"
    head = f"POST {place.path} HTTP/1.1\r\nHost: {place.netloc}\r\n{key}Content-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    secure = place.scheme == "https"
    reader, writer = await asyncio.open_connection(
        place.hostname, place.port or (443 if secure else 80), ssl=True if secure else None
    )
    try:
        writer.write(head.encode("latin-1") + data)
        response = http.client.HTTPResponse(_Received(await reader.read()))  # type: ignore[arg-type]
    finally:
        writer.close()
    try:
        response.begin()
        text = response.read().decode("utf-8", "replace")
        found = json.loads(text)
    except http.client.HTTPException as error:
        raise RuntimeError(f"{url} must answer, found a connection that was closed ({type(error).__name__})") from None
    except ValueError:
        found = text
    if response.status != 200 or not isinstance(found, dict):
        told = found.get("error") if isinstance(found, dict) else None
        said = told.get("message") if isinstance(told, dict) else text
        raise RuntimeError(f"{url} answers with {response.status}: {' '.join(str(said).split())[:300]}")
    return found
