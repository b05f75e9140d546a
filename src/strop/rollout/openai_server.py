"""An OpenAI-compatible HTTP server over a `ServedModel`: `strop serve`.

    served = ServedModel(policy, "my-model")
    OpenAIServer(served, port=8000).serve_forever()      # or start() and stop(), in a thread

It answers the requests of `strop.rollout.client`, as a vLLM does (ids in and out, log-probs of drawn and prompt
tokens), and those of chat programs. HTTP is uvicorn's and starlette's. This file adds access control, limits on size
and time, and the status of answers. Requests are parsed in `openai_requests`, answers are made in `openai_answers`.
"""

import asyncio
import concurrent.futures
import contextlib
import hmac
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from strop._install import missing

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route
    from starlette.types import ASGIApp

    from strop.rollout.http_guard import Guard, Protocol, is_loopback, json_response
except ImportError as error:
    raise missing("a server", error.name or "uvicorn", "serve") from None

from strop.rollout.openai_answers import (
    StreamedText,
    answer_body,
    answer_head,
    chat_logprobs,
    chat_message,
    cut_at_stop,
    error_body,
    usage_of,
)
from strop.rollout.openai_requests import (
    Json,
    OpenAIRequest,
    parse_body,
    parse_chat_request,
    parse_name,
    parse_text_request,
)
from strop.rollout.sampling_queue import OnPiece, QueueFull, SampledCompletion, Ticket
from strop.rollout.served_model import RequestError, ServedModel

MAX_HEAD = 32 << 10  # maximum bytes of a request's line and headers
MIN_BODY, MAX_BODY = 1 << 20, 64 << 20  # bytes of a body: enough for the longest prompt, within these limits
MAX_BODIES = 256 << 20  # bytes of all bodies being received
BODY_SECONDS, IDLE_SECONDS = 60, 30  # limits: to receive a body, and between requests of a connection
SMALL_BODY, SMALL_ANSWER = 16 << 10, 4096  # bytes, and tokens, handled without another thread
MAKES_GRAMMAR = (b"response_format", b"tool_choice")  # fields whose parsing may take long

T = TypeVar("T")
Page = Callable[[Request], Awaitable[Response]]
log = logging.getLogger("strop")


def check_exposure(host: str, api_key: str | None) -> None:
    """Raise if other machines can reach the host and no key is given, or if the key is not valid."""
    if api_key is not None and (not api_key or not api_key.isascii() or api_key != api_key.strip()):
        raise ValueError("api_key must be ASCII characters without blanks around them")
    if api_key is None and not is_loopback(host):
        raise ValueError(
            f"api_key must be given where other machines can ask (host {host}): --api-key or STROP_API_KEY"
        )


class OpenAIServer:
    """The server. `url` is its address; port 0 takes any free port.

    allow_sync      clients may also exchange the weights and load adapters
    api_key         the key that clients must send; required if other machines can reach the host
    allowed_hosts   accepted names in a request's Host, besides loopback's and `host`
    """

    def __init__(
        self,
        served: ServedModel,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        allow_sync: bool = False,
        api_key: str | None = None,
        allowed_hosts: Sequence[str] = (),
    ):
        check_exposure(host, api_key)
        self.served = served
        need = 6 * served.max_characters + 12 * (served.policy.max_length or 0)  # \uXXXX per character, or ids
        self.max_body = min(max(need, MIN_BODY), MAX_BODY)
        self._body_bytes = 0
        self._workers = concurrent.futures.ThreadPoolExecutor(2, "strop-texts")
        accepts_key = self.key_check(api_key)
        self.app: ASGIApp = Guard(self._make_app(allow_sync), host, allowed_hosts, accepts_key)
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, kind, number)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(address)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._uvicorn: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def key_check(self, api_key: str | None) -> Callable[[str], bool] | None:
        """Return a function that says whether a key is the server's; None without a key."""
        if api_key is None:
            return None
        wanted = api_key.encode()
        return lambda key: hmac.compare_digest(key.encode("latin-1"), wanted)

    def submit(self, request: Request, asked: OpenAIRequest, on_piece: OnPiece | None = None) -> list[Ticket]:
        """Put a checked request into the sampling queue; return one ticket for each of its prompts."""
        tickets: list[Ticket] = []
        try:
            for one in asked.sampling_requests(self.served):
                tickets.append(self.served.queue.submit(one, on_piece))
        except BaseException:
            for ticket in tickets:
                ticket.cancel()
            raise
        return tickets

    def _make_app(self, allow_sync: bool) -> Starlette:
        pages: list[tuple[str, str, Page]] = [
            ("GET", "/health", self._health),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{name:path}", self._model),
            ("POST", "/v1/completions", self._completions),
            ("POST", "/v1/chat/completions", self._chat),
        ]
        if allow_sync:
            pages += [
                ("POST", "/collective_rpc", self._collective_rpc),
                ("POST", "/reset_prefix_cache", self._reset_prefix_cache),
                ("POST", "/v1/load_lora_adapter", self._load_adapter),
                ("POST", "/v1/unload_lora_adapter", self._unload_adapter),
            ]
        routes = [Route(path, _with_errors(page), methods=[method]) for method, path, page in pages]
        return Starlette(routes=routes, exception_handlers={HTTPException: _not_served})

    # ---- running ----

    def serve_forever(self, on_ready: Callable[[], None] | None = None) -> None:
        """Serve until `stop()`, or in the main thread until SIGINT or SIGTERM. `on_ready` is called first."""
        self._socket.listen(1024)
        if on_ready is not None:
            on_ready()
        config = uvicorn.Config(
            self.app, http=Protocol, ws="none", lifespan="off", interface="asgi3", proxy_headers=False,
            log_config=None, log_level="critical", access_log=False, server_header=False,
            timeout_keep_alive=IDLE_SECONDS, timeout_graceful_shutdown=3, backlog=1024, h11_max_incomplete_event_size=MAX_HEAD,
        )  # fmt: skip
        self._uvicorn = uvicorn.Server(config)
        try:
            self._uvicorn.run(sockets=[self._socket])
        finally:
            self._socket.close()
            self._workers.shutdown(wait=False)

    def start(self) -> "OpenAIServer":
        """Serve in a thread. Connections are accepted at once."""
        self._socket.listen(1024)
        self._thread = threading.Thread(target=self.serve_forever, name="strop-http", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop the thread that `start` began. Answers in progress have three seconds to finish."""
        while self._thread is not None and self._thread.is_alive():
            if self._uvicorn is not None:
                self._uvicorn.should_exit = True
            self._thread.join(0.05)

    # ---- small pages ----

    async def _health(self, request: Request) -> Response:
        return json_response({})

    async def _models(self, request: Request) -> Response:
        return json_response(self.served.list_models())

    async def _model(self, request: Request) -> Response:
        self.served.check_name(name := request.path_params["name"])
        return json_response(next(one for one in self.served.list_models()["data"] if one["id"] == name))

    async def _reset_prefix_cache(self, request: Request) -> Response:
        await self._read(request)
        return json_response({"success": True})  # there is no prefix cache

    async def _collective_rpc(self, request: Request) -> Response:
        body = parse_body(await self._read(request))
        if body.get("method") != "reload_weights":
            raise RequestError(f"method must be 'reload_weights', found {body.get('method')!r:.80}")
        if not isinstance(arguments := body.get("kwargs") or {}, dict):
            raise RequestError(f"kwargs must be an object, found {arguments!r:.80}")
        path = parse_name(arguments, "weights_path")
        try:
            await asyncio.to_thread(self.served.reload_weights, path)
        except (OSError, RuntimeError) as error:
            raise RequestError(f"reload_weights failed: {error}", 500) from None
        return json_response({"results": [None]})

    async def _load_adapter(self, request: Request) -> Response:
        body = parse_body(await self._read(request))
        await asyncio.to_thread(self.served.load_adapter, parse_name(body, "lora_name"), parse_name(body, "lora_path"))
        return json_response({})

    async def _unload_adapter(self, request: Request) -> Response:
        body = parse_body(await self._read(request))
        await asyncio.to_thread(self.served.unload_adapter, parse_name(body, "lora_name"))
        return json_response({})

    # ---- completions ----

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, parse_text_request)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, parse_chat_request)

    async def _answer(self, request: Request, parse: Callable[[Json, ServedModel], OpenAIRequest]) -> Response:
        data = await self._read(request)
        slow = len(data) > SMALL_BODY or any(name in data for name in MAKES_GRAMMAR)
        asked = await self._apart(slow, lambda: parse(parse_body(data), self.served))
        if asked.stream:
            return self._stream(request, asked)
        tickets = self.submit(request, asked)
        try:
            found = await _unless_gone(request, [ticket.future for ticket in tickets])
        finally:
            for ticket in tickets:
                ticket.cancel()
        num_tokens = sum(len(one.ids) for some in found for one in some)
        return await self._apart(
            num_tokens > SMALL_ANSWER, lambda: json_response(answer_body(asked, self.served, found, tickets))
        )

    async def _apart(self, apart: bool, make: Callable[[], T]) -> T:
        """Call a function, in another thread if it may take long."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, make) if apart else make()

    async def _read(self, request: Request) -> bytes:
        """Return the body. Raise as soon as it is too long or late."""
        length = request.headers.get("content-length", "0")
        if len(length) > 18 or int(length) > self.max_body:
            raise RequestError(f"a body must have at most {self.max_body} bytes, found {length:.40}", 413)
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    self._body_bytes += len(chunk)
                    data += chunk
                    if len(data) > self.max_body:
                        raise RequestError(f"a body must have at most {self.max_body} bytes, found more", 413)
                    if self._body_bytes > MAX_BODIES:
                        raise RequestError("this server reads too many bytes at once; ask again later", 503)
        except TimeoutError:
            raise RequestError(f"a body must be sent within {BODY_SECONDS} s", 408) from None
        finally:
            self._body_bytes -= len(data)
        return bytes(data)

    def _stream(self, request: Request, asked: OpenAIRequest) -> Response:
        """Return the answer as events, one per piece. Errors in the request are raised before the first event."""
        pieces: asyncio.Queue[tuple[list[int], list[float], str]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def on_piece(ids: list[int], logps: list[float], reason: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(pieces.put_nowait, (ids, logps, reason))

        (ticket,) = self.submit(request, asked, on_piece)
        # an exception of the engine arrives as the last piece
        ticket.future.add_done_callback(lambda _: on_piece([], [], "failed"))
        return StreamingResponse(self._events(asked, ticket, pieces), media_type="text/event-stream")

    async def _events(
        self, asked: OpenAIRequest, ticket: Ticket, pieces: "asyncio.Queue[tuple[list[int], list[float], str]]"
    ) -> AsyncIterator[bytes]:
        head = answer_head(asked, self.served, "chat.completion.chunk" if asked.chat else "text_completion")
        head |= {} if asked.stream_usage else {"usage": None}
        text = StreamedText(self.served.decode, asked.stop)
        ids: list[int] = []
        try:
            if asked.chat:
                yield _event(head | {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""},
                                                  "finish_reason": None}]})  # fmt: skip
            finish = None
            while finish is None:
                new_ids, logps, reason = await pieces.get()
                if reason == "failed":
                    error = ticket.future.exception()
                    yield _event(error_body(f"{type(error).__name__}: {error}", 500))
                    return
                ids += new_ids
                new, finish = text.add(new_ids, reason)
                choice = self._piece(asked, ticket, new, new_ids, logps, finish)
                yield _event(head | {"choices": [{"index": 0, **choice}]})
            if asked.stream_usage:
                usage = usage_of(asked.prompts, [SampledCompletion(ids=ids)])
                yield _event(head | {"choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"
        finally:
            ticket.cancel()

    def _piece(
        self, asked: OpenAIRequest, ticket: Ticket, new: str, ids: list[int], logps: list[float], finish: str | None
    ) -> Json:
        """Return the choice of one piece.

        With tools everything is sent at the end, since a call is parsed only as a whole.
        """
        extra = {"token_ids": ids} if asked.echo_ids or not asked.chat else {}
        if not asked.chat:
            words = [self.served.decode([token]) for token in ids] if asked.logprobs else []
            logprobs = {"tokens": words, "token_logprobs": logps, "top_logprobs": None} if asked.logprobs else None
            return {"text": new, "logprobs": logprobs, "finish_reason": finish, **extra}
        delta: Json = {"content": new}
        if asked.tools and finish is None:
            delta = {"content": ""}
        elif asked.tools:
            cut = cut_at_stop(ticket.completions[0], asked.stop, self.served)
            message, finish = chat_message(asked, self.served, cut)
            calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", ()))]
            delta = {"content": message["content"]} | ({"tool_calls": calls} if calls else {})
        logprobs = {"content": chat_logprobs(self.served, ids, logps, [])} if asked.logprobs else None
        return {"delta": delta, "logprobs": logprobs, "finish_reason": finish, **extra}


def _event(found: Json) -> bytes:
    return f"data: {json.dumps(found)}\n\n".encode()


async def _unless_gone(
    request: Request, futures: Sequence["concurrent.futures.Future[list[SampledCompletion]]"]
) -> list[list[SampledCompletion]]:
    """Wait for the results. Raise ClientDisconnect as soon as the client has left."""
    results = asyncio.gather(*map(asyncio.wrap_future, futures))
    gone = asyncio.ensure_future(_until_gone(request))
    both: list[asyncio.Future[Any]] = [results, gone]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not results.done():
            raise ClientDisconnect
        return results.result()
    finally:
        gone.cancel()
        results.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _with_errors(page: Page) -> Page:
    """Return the page with every error turned into an answer in OpenAI's form."""

    async def answered(request: Request) -> Response:
        try:
            return await page(request)
        except ClientDisconnect:
            return Response(status_code=499)  # the client has left
        except QueueFull as error:
            return json_response(error_body(str(error), 503), 503)
        except (
            ValueError,
            TypeError,
            OverflowError,
            RecursionError,
        ) as error:  # errors in the request, from any check
            status = getattr(error, "status", 400)
            return json_response(error_body(str(error)[:1000], status), status, close=status in (408, 413, 503))
        except Exception as error:
            log.exception("a request failed")
            return json_response(error_body(f"{type(error).__name__}: {error}"[:1000], 500), 500)

    return answered


async def _not_served(request: Request, error: Any) -> Response:
    message = f"{request.method} {request.url.path:.200} is not served"
    return json_response(error_body(message, error.status_code), error.status_code, close=True)
