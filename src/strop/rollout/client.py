"""Rollouts by servers that speak OpenAI's `/v1/completions`: a stock vLLM, or `strop serve`. Ids in, ids out, no text.

Before a rollout, changed weights are written once. Every server is told to load them and is then asked for the
log-probs of a fixed probe, which must agree with the trainer's. A server that fails is asked again and receives the
weights again, since it may have been restarted; meanwhile the other servers take its requests.
"""

import collections
import http.client
import json
import math
import os
import socket
import threading
import time
import urllib.parse
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from strop._types import Json
from strop.config import ServerConfig
from strop.models import Policy
from strop.rollout.generate import Captured

NEEDS = {  # start options a server needs for these paths
    "/collective_rpc": "VLLM_SERVER_DEV_MODE=1",
    "/reset_prefix_cache": "VLLM_SERVER_DEV_MODE=1",
    "/v1/load_lora_adapter": "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
    "/v1/unload_lora_adapter": "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
}
PASSING = (408, 425, 429, 500, 502, 503, 504)  # temporary errors: the server may answer a later request
PROBE = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "seed": 0, "prompt_logprobs": 0}
Completion = tuple[torch.Tensor, torch.Tensor]  # ids and log-probs
SIGMAS = 8  # two versions of the weights are distinguishable if their log-probs differ by this many standard errors


class ServerError(RuntimeError):
    """The server sent an invalid reply, or an error. The message begins with its address."""

    status: int | None = None


class Unreachable(ServerError):
    """A temporary failure: the server may answer a later request."""


# ---- weights ----


@dataclass
class Weights:
    """A version of the weights that servers should have.

    logps     the trainer's log-probs of the probe; `old` are those of an earlier version, to tell them apart
    apart     the largest distance (root mean square) of a server's log-probs from `logps` so far; None before the first
    refused   the error of the server that could not load them; no server is offered them again
    """

    name: str
    folder: Path
    probe: list[int]
    logps: torch.Tensor
    old: torch.Tensor | None
    apart: float | None = None
    refused: ServerError | None = None

    def check(self, found: torch.Tensor, url: str, tolerance: float) -> None:
        """Raise unless `found`, a server's log-probs of the probe after a sync, are those of these weights."""
        apart, stale = _rms(found - self.logps), math.inf if self.old is None else _rms(found - self.old)
        if stale < apart and self._differ(min(stale, apart)):
            raise ServerError(
                f"{url} must serve the weights of {self.name}, found the old ones: its log-probs of a probe are "
                f"{stale:.3g} from theirs and {apart:.3g} from the new ones' (root mean square)"
            )
        if not apart <= tolerance:
            raise ServerError(
                f"{url} must serve the weights of {self.name}, found others: its log-probs of a probe are {apart:.3g} from "
                f"the trainer's (root mean square), sync_tolerance={tolerance:g}; is it started with the same model?"
            )
        self.apart = apart if self.apart is None else max(self.apart, apart)

    def _differ(self, noise: float) -> bool:
        """Return whether log-probs with this error can distinguish these weights from the old ones."""
        return self.old is not None and _rms(self.logps - self.old) * len(self.logps) ** 0.5 > SIGMAS * noise

    @property
    def baseline(self) -> torch.Tensor | None:
        """Log-probs of the version that servers are known to have: this one if they were seen to have left the old."""
        if self.apart is None:
            return self.old
        return self.logps if self.old is None or self._differ(self.apart) else self.old


def _rms(difference: torch.Tensor) -> float:
    return difference.square().mean().sqrt().item()


# ---- one server ----


class Server:
    """Requests to one address, and the weights that the server has."""

    def __init__(self, url: str, config: ServerConfig):
        self.url, self.config = url.rstrip("/").removesuffix("/v1"), config
        self.failing_since: float | None = None
        self.has_answered = False
        self._nobody_listens = False  # True if the last request found no server
        self._weights: Weights | None = None  # the weights the server has; None after a failure
        self.num_lost = 0  # how often its weights became unknown
        self.is_verified = False  # False if it was idle: it may have been restarted, with other weights
        self.num_sent = 0  # requests that it works on
        self.sent_with: Weights | None = None  # the weights they were sent with
        self._model = ""  # the name in requests: the model's or the adapter's
        self._turn = threading.Lock()

    @property
    def patience(self) -> float:
        """The seconds that the server may fail before it is given up."""
        never_started = self._nobody_listens and not self.has_answered
        return min(self.config.server_timeout, self.config.server_start_timeout if never_started else math.inf)

    @property
    def late(self) -> bool:
        """True if the server fails and has failed for longer than `patience`."""
        return self.failing_since is not None and time.monotonic() - self.failing_since > self.patience

    def failed(self, since: float, error: ServerError) -> None:
        """Note a failure.

        A server that broke off may have been restarted with other weights, so its weights count as unknown.
        """
        self.failing_since = self.failing_since or since
        if error.status in (None, 500):
            self._weights, self.num_lost = None, self.num_lost + 1

    def hold(self, weights: Weights) -> None:
        """Load these weights into the server, unless it has them."""
        with self._turn:
            if self._weights is weights and (self.is_verified or self._still_has(weights)):
                self.is_verified = True
                return
            if weights.refused is not None:  # the previous request found that they cannot be loaded
                raise weights.refused
            if self.late:
                raise Unreachable(f"{self.url} does not answer")
            try:
                self._load(weights)
                weights.check(self._probe(weights), self.url, self.config.sync_tolerance)
            except Unreachable:
                raise
            except ServerError as error:
                weights.refused = error
                raise
            self._weights, self.is_verified = weights, True

    def _still_has(self, weights: Weights) -> bool:
        try:
            weights.check(self._probe(weights), self.url, self.config.sync_tolerance)
        except Unreachable:
            raise
        except ServerError:
            return False
        return True

    def _load(self, weights: Weights) -> None:
        if self.config.sync == "disk":
            self._model = self._base_model()
            self._told_to("/collective_rpc", method="reload_weights", kwargs={"weights_path": str(weights.folder)})
            if not _of(self._told_to("/reset_prefix_cache"), "success", True):
                raise Unreachable(f"{self.url} does not empty its prefix cache after a sync")
            return
        if self._model and self._model != weights.name:
            self._told_to("/v1/unload_lora_adapter", 404, lora_name=self._model)  # 404: the server was restarted
        again = 400 if self._model == weights.name else None  # 400: it still has the adapter
        self._told_to("/v1/load_lora_adapter", again, lora_name=weights.name, lora_path=str(weights.folder))
        self._model = weights.name

    def _told_to(self, path: str, fine: int | None = None, **body: Any) -> object:
        """Send a request that changes the server.

        Errors in the reply are final, except the status `fine`, which is ignored.
        """
        try:
            return self.post(path, body)
        except ServerError as error:
            if error.status == fine is not None:
                return None
            if error.status not in (404, 500):
                raise
            needs = f"; start it with {NEEDS[path]} (strop serve: --allow-sync)" if error.status == 404 else ""
            raise ServerError(f"{error}{needs}") from None

    def _base_model(self) -> str:
        answer = self._call("GET", "/v1/models")
        for model in _of(answer, "data", []):
            if _of(model, "parent") is None and isinstance(_of(model, "id"), str):
                return model["id"]
        raise ServerError(f"{self.url} must list its model at /v1/models, found {_shown(answer)}")

    def _probe(self, weights: Weights) -> torch.Tensor:
        """Return the log-probs of the probe. With top_k=1 one token is left, so its processed log-prob must be 0."""
        choice = self._choices(self.complete(PROBE | {"prompt": weights.probe}), 1)[0]
        found = self._prompt_logps(choice, weights.probe)
        try:
            drawn = float(choice["logprobs"]["token_logprobs"][0])
        except (KeyError, TypeError, ValueError, IndexError):
            raise ServerError(f"{self.url} must give logprobs, found {_shown(choice)}") from None
        if not drawn > -1e-3:
            raise ServerError(
                f"{self.url} must give log-probs of the distribution it draws from, found others: start it with "
                f"--logprobs-mode processed_logprobs"
            )
        return torch.tensor(found, dtype=torch.float64)

    def prompt_logps(self, ids: list[int]) -> list[float]:
        """Return log-probs of every token but the first, by the model the server was started with."""
        self._model = self._model or self._base_model()
        return self._prompt_logps(self._choices(self.complete(PROBE | {"prompt": ids}), 1)[0], ids)

    def _prompt_logps(self, choice: Any, ids: list[int]) -> list[float]:
        try:
            entries = zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)
            return [float(entry[str(token)]["logprob"]) for token, entry in entries]
        except (KeyError, TypeError, ValueError, IndexError):
            raise ServerError(f"{self.url} must give prompt_logprobs, found {_shown(choice)}") from None

    def complete(self, asked: Json) -> Any:
        """Send a completion request with every option set.

        A server takes missing options from the model's generation_config.
        """
        told = {"model": self._model, "n": 1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
                "frequency_penalty": 0.0, "logprobs": 0, "return_token_ids": True, "ignore_eos": True}  # fmt: skip
        return self.post("/v1/completions", told | asked)

    def completions(self, asked: Json, policy: Policy) -> list[Completion]:
        """Return ids and log-probs of each completion. Raise if the answer is invalid."""
        choices = self._choices(self.complete(asked), asked["n"])
        return [self._checked(choice, asked, policy) for choice in choices]

    def _choices(self, answer: object, num: int) -> list[Any]:
        choices = _of(answer, "choices")
        if not isinstance(choices, list) or sorted(_of(one, "index", -1) for one in choices) != list(range(num)):
            raise ServerError(f"{self.url} must give {num} choices, found {_shown(answer)}")
        return sorted(choices, key=lambda choice: choice["index"])

    def _checked(self, choice: Any, asked: Json, policy: Policy) -> Completion:
        def wrong(wanted: str, found: object) -> ServerError:
            return ServerError(f"{self.url} must give {wanted}, found {_shown(found)}")

        ids, logps = _of(choice, "token_ids"), _of(_of(choice, "logprobs"), "token_logprobs")
        if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
            raise wrong("token_ids of every choice (return_token_ids)", ids)
        if _of(choice, "prompt_token_ids", asked["prompt"]) not in (None, asked["prompt"]):
            raise wrong("the prompt's ids back as they were sent", choice["prompt_token_ids"])
        if not isinstance(logps, list) or len(logps) != len(ids):
            raise wrong(f"token_logprobs of the {len(ids)} tokens", logps)
        if not all(isinstance(one, float | int) and math.isfinite(one) for one in logps):
            raise wrong("token_logprobs that are finite numbers", logps)
        ends = asked["stop_token_ids"]
        if any(one in ends for one in ids[:-1]) or not (ids[-1] in ends or len(ids) == asked["max_tokens"]):
            why = {"finish_reason": _of(choice, "finish_reason"), "token_ids": ids}
            raise wrong(f"tokens up to one of {ends} or {asked['max_tokens']} of them", why)
        found = torch.tensor(ids)
        policy.check_ids(found, f"token_ids of {self.url}")
        return found, torch.tensor(logps, dtype=policy.loss_dtype)

    # ---- HTTP ----

    def post(self, path: str, body: Json) -> object:
        return self._call("POST", path, json.dumps(body))

    def _call(self, method: str, path: str, body: str | None = None) -> Any:
        """Return the answer's JSON, or its text if it is not JSON."""
        address = urllib.parse.urlsplit(self.url)
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("STROP_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        connection = kind(address.hostname or "", address.port, timeout=self.config.server_timeout)
        try:
            connection.request(method, address.path + path, body, headers)
            answer = connection.getresponse()
            self.has_answered = True
            status, text = answer.status, answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            self._nobody_listens = isinstance(error, ConnectionRefusedError | socket.gaierror)
            said = f"no answer in {self.config.server_timeout:g} s" if isinstance(error, TimeoutError) else error
            raise Unreachable(f"{self.url} does not answer {path}: {type(error).__name__}: {said}") from None
        finally:
            connection.close()
        try:
            found = json.loads(text) if text else {}
        except ValueError:
            found = text
        if status != 200:
            said = _of(_of(found, "error"), "message") or _of(found, "detail") or _shown(found)
            raised = (Unreachable if status in PASSING else ServerError)(
                f"{self.url} answers {path} with {status}: {said}"
            )
            raised.status = status
            raise raised
        return found


def _of(value: object, key: str, default: object = None) -> Any:
    """Return the value of a key; the default if `value` is not a dict."""
    return value.get(key, default) if isinstance(value, dict) else default


def _shown(value: object) -> str:
    text = " ".join((value if isinstance(value, str) else json.dumps(value)).split())
    return text if len(text) < 160 else f"{text[:160]}…"


# ---- all of them ----

_pools: "weakref.WeakSet[ServerPool]" = weakref.WeakSet()


def is_stuck() -> bool:
    """Return whether a rollout waits for servers that all fail.

    A signal then acts at once, since no step can be finished.
    """
    return any(pool.is_stuck for pool in list(_pools))


@dataclass(eq=False)
class Pending:
    """The requests of one rollout: the answers so far, each with the weights that it was drawn with, or an error.

    held   returns the weights that a request is sent with
    """

    requests: list[Json]
    policy: Policy
    held: Callable[[], Captured]
    found: dict[int, tuple[list[Completion], Captured]] = field(default_factory=dict)
    error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        return self.error is not None or len(self.found) == len(self.requests)


class ServerPool:
    """Servers of the same model that share the requests of any number of rollouts.

    Each server has threads that take the next request; the request of a server that fails is taken again. A server works
    with one version of the weights at a time: it loads another one when it has answered the requests of the last.
    """

    def __init__(self, servers: Sequence[Server]):
        self.servers = list(servers)
        self._todo: collections.deque[tuple[Pending, int]] = collections.deque()
        self._waiting: list[Pending] = []
        self._failures: dict[str, str] = {}
        self._told: set[str] = set()
        self._num_threads: Counter[Server] = Counter()
        self._changed = threading.Condition()
        _pools.add(self)

    @property
    def is_stuck(self) -> bool:
        """True if a rollout waits and every server fails at present, so that it is unknown when the step can go on."""
        return bool(self._waiting) and all(server.failing_since is not None for server in self.servers)

    def run(self, pending: Pending) -> list[tuple[list[Completion], Captured]]:
        """Wait for all completions; return them and the weights of each, in the order of the requests."""
        with self._changed:
            self._begin(pending)
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: pending.is_over or self._failures.keys() - self._told, timeout=1)
                    new = {url: said for url, said in self._failures.items() if url not in self._told}
                    self._told |= new.keys()
                for said in new.values():
                    warnings.warn(f"{said}; it is asked again, with the weights brought to it anew", stacklevel=3)
                if pending.error is not None:
                    raise pending.error
                if pending.is_over:
                    return [pending.found[index] for index in range(len(pending.requests))]
        finally:
            with self._changed:
                self._waiting.remove(pending)
                self._todo = collections.deque(one for one in self._todo if one[0] is not pending)
                self._changed.notify_all()

    def _begin(self, pending: Pending) -> None:
        """Queue the requests and start threads for them. Servers that were given up get another chance."""
        if not self._waiting:
            self._failures.clear()
            self._told.clear()
        self._waiting.append(pending)
        self._todo.extend((pending, index) for index in range(len(pending.requests)))
        for server in self.servers:
            is_new, was_late = len(self._waiting) == 1, server.late
            if is_new or (was_late and not self._num_threads[server]):
                server.failing_since = None
            most = 1 if was_late and not is_new else server.config.server_requests
            for _ in range(self._num_threads[server], min(most, len(self._todo))):
                self._num_threads[server] += 1
                threading.Thread(target=self._work, args=(server,), daemon=True, name="strop-client").start()
        self._changed.notify_all()

    def _work(self, server: Server) -> None:
        wait = 0.1
        while (taken := self._next(server)) is not None:
            pending, index, captured = taken
            start, num_lost = time.monotonic(), server.num_lost
            try:
                server.hold(captured.weights)
                found = server.completions(pending.requests[index], pending.policy)
            except Unreachable as error:
                server.failed(start, error)
                if self._put_back(server, pending, index, error):
                    return
                time.sleep(wait)
                wait = min(2 * wait, 5.0 if server.has_answered else 0.5)
            except BaseException as error:
                with self._changed:
                    pending.error = error
                    self._answered(server)
            else:
                wait = 0.1
                with self._changed:
                    if server.num_lost == num_lost:
                        server.failing_since = None
                        pending.found[index] = found, captured
                    elif (
                        not pending.is_over
                    ):  # it broke off another request meanwhile: this answer may be of a new server
                        self._todo.appendleft((pending, index))
                    self._answered(server)

    def _next(self, server: Server) -> tuple[Pending, int, Captured] | None:
        """Return the next request and the weights to send it with; None if no rollout waits, which ends this thread.

        Waits while the server works on requests with other weights, and while other servers may fail.
        """
        with self._changed:
            while any(not one.is_over for one in self._waiting):
                if self._todo:
                    pending, index = self._todo[0]
                    captured = pending.held()
                    if not server.num_sent or server.sent_with is captured.weights:
                        self._todo.popleft()
                        server.is_verified &= server.num_sent > 0
                        server.num_sent, server.sent_with = server.num_sent + 1, captured.weights
                        return pending, index, captured
                self._changed.wait()
            self._num_threads[server] -= 1
            return None

    def _answered(self, server: Server) -> None:
        server.num_sent -= 1
        self._changed.notify_all()

    def _put_back(self, server: Server, pending: Pending, index: int, error: Unreachable) -> bool:
        """Put a failed request back for another server; return whether this thread gives its server up.

        The last one to be given up ends all rollouts.
        """
        late = server.late
        with self._changed:
            if not pending.is_over:
                self._todo.appendleft((pending, index))
            self._failures.setdefault(server.url, str(error))
            self._num_threads[server] -= late
            if not any(self._num_threads.values()):
                causes = "; ".join(self._failures.values())
                hint = "; is the server started? One that is loading needs server_start_timeout"
                given_up = f"{causes}; given up after {server.patience:g} s{'' if server.has_answered else hint}"
                for one in self._waiting:
                    one.error = one.error or ServerError(given_up)
                self._todo.clear()
            self._answered(server)
        return late
