"""The outer checks of `strop serve`: which requests are accepted, and limits on time, size and connections."""

import asyncio
import contextlib
import ipaddress
import json
import socket
import urllib.parse
from collections.abc import Callable, Sequence

import h11
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from strop.rollout.openai_answers import error_body

MAX_CONNECTIONS = 512  # open connections; a further one gets an error and is closed
HEAD_SECONDS, SEND_SECONDS = 15, 60  # to receive a request's line and headers; for a client to read its answer


def json_response(found: object, status: int = 200, close: bool = False) -> Response:
    """Return a JSON answer; `close` ends the connection after it."""
    headers = {"connection": "close"} if close else None
    return Response(json.dumps(found), status, headers, "application/json")  # ASCII: texts may hold half a character


def is_loopback(host: str) -> bool:
    """Return whether a server at this host is reachable from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bearer_key(authorization: str) -> str | None:
    """Return the API key in an Authorization header; None if it has none."""
    scheme, _, given = authorization.partition(" ")
    return given.strip() if scheme.lower() == "bearer" else None


class Guard:
    """Refuses requests that a page in a browser, or a client without the key, could send.

    A page can send requests to a server on this machine. It cannot choose Host (its own name, even if that name
    resolves to this machine), Origin, or without the server's consent the Content-Type of JSON.

    accepts_key   returns whether a client with this API key may ask; None lets everybody ask
    """

    def __init__(
        self, app: ASGIApp, host: str, allowed_hosts: Sequence[str], accepts_key: Callable[[str], bool] | None
    ):
        self.app, self.accepts_key = app, accepts_key
        self.hosts = {name.lower().strip("[]") for name in (host, *allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_SECONDS):  # limits a client that does not read its answer
                await send(message)

        if (refused := self._refusal(scope)) is not None:
            status, message = refused
            await json_response(error_body(message, status), status, close=True)(scope, receive, send_in_time)
        else:
            await self.app(scope, receive, send_in_time)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if scope["http_version"] not in ("1.0", "1.1"):
            return 400, f"HTTP must be of version 1.0 or 1.1, found {scope['http_version']}"
        host = headers.get(b"host", "")
        if not self._is_ours(host, scope):
            return 403, f"Host must be this server's, found {host!r:.80}; strop serve --allowed-host lets others ask"
        origin = headers.get(b"origin")
        if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
            return 403, f"Origin must be this server's own, found {origin!r:.80}"
        if self.accepts_key is not None and scope["path"] != "/health":
            key = bearer_key(headers.get(b"authorization", ""))
            if key is None or not self.accepts_key(key):
                return 401, "Authorization must be Bearer and the server's API key"
        if scope["method"] != "POST" and (
            headers.get(b"content-length", "0") != "0" or b"transfer-encoding" in headers
        ):
            return 400, f"{scope['method']} must have no body"
        kind = headers.get(b"content-type", "")
        if scope["method"] == "POST" and kind.partition(";")[0].strip().lower() != "application/json":
            return 415, f"Content-Type must be application/json, found {kind!r:.80}"
        return None

    def _is_ours(self, host: str, scope: Scope) -> bool:
        try:
            name = urllib.parse.urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        own = scope["server"][0] if scope.get("server") else None  # the address that received this connection
        return name in self.hosts or name == own or is_loopback(name)


class Protocol(H11Protocol):
    """uvicorn's HTTP/1.1 with limits on connections and on the time of a request's head, and OpenAI's errors."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        found = transport.get_extra_info("socket")
        if found is not None and hasattr(socket, "TCP_USER_TIMEOUT"):  # closes connections of clients that do not read
            with contextlib.suppress(OSError):
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SEND_SECONDS * 1000)
        if len(self.connections) > MAX_CONNECTIONS:
            self.refuse(503, f"this server has at most {MAX_CONNECTIONS} connections; ask again later")
        else:
            self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        try:
            super().data_received(data)
        except Exception as error:  # requests that h11 does not expect
            self.refuse(400, f"the request is not HTTP: {type(error).__name__}")
        self._watch_head()

    def _watch_head(self) -> None:
        """Close the connection unless the head of the next request arrives in time."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._forget_head()
        elif self._head_timer is None and self.timeout_keep_alive_task is None:
            self._head_timer = self.loop.call_later(
                HEAD_SECONDS, self.refuse, 408, f"a request's head must be sent within {HEAD_SECONDS} s"
            )

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, msg)

    def refuse(self, status: int, message: str) -> None:
        """Answer with an error, if no answer has begun, and close the connection."""
        self._forget_head()
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error_body(message, status)).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            if self.cycle is not None:  # tell the page that was to answer that the client has left
                self.cycle.disconnected = True
                self.cycle.message_event.set()
        self.transport.close()
