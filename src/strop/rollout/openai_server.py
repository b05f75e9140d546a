"""`strop serve`: an OpenAI-compatible server over strop's own engine, with the requests by which weights are exchanged.

    make_server(Serving(policy, "my-model"), port=8000).serve_forever()

It speaks what `strop.rollout.client` asks of a vLLM (ids in and out, log-probs of the tokens drawn and of the prompt), and
what chat programs ask. A thread for every request, and one model: requests take turns.
"""

import contextlib
import itertools
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from strop.data.batch import TokenBatch, Trajectory
from strop.data.tokenize import encode_prompt
from strop.models import Policy, load_model, unwrapped
from strop.models.kinds import adapter_off, is_peft
from strop.rollout import Sampling, generate

ADAPTER = ("adapter_config.json", "adapter_model.safetensors")  # files of an adapter that peft saved

MAX_BODY = 64 << 20
FIRST_PIECE, LONGEST_PIECE = 4, 64  # tokens of a streamed answer that are sent together
IGNORED = {  # what is taken and has no effect, or only one of its values
    "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0, "echo": False, "best_of": None,
    "suffix": None, "logit_bias": None, "tools": None, "response_format": None, "top_logprobs": None,
}  # fmt: skip


class RequestError(ValueError):
    """Of the request; `status` is HTTP's."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


@dataclass
class Serving:
    """A model, its adapters, and whose turn it is. Methods are what the requests do, on parsed JSON."""

    policy: Policy
    name: str
    allow_sync: bool = False
    adapters: list[str] = field(default_factory=list)
    turn: Any = field(default_factory=threading.RLock)

    def models(self) -> dict[str, Any]:
        about = {"object": "model", "created": 0, "owned_by": "strop", "max_model_len": self.policy.max_length}
        base = [{"id": self.name, **about, "parent": None}]
        return {"object": "list", "data": base + [{"id": one, **about, "parent": self.name} for one in self.adapters]}

    # ---- weights ----

    def reload_weights(self, weights_path: str) -> None:
        """In place, so that everything made for this model goes on with them."""
        own = next(self.policy.model.parameters())
        new, _ = load_model(weights_path, dtype=own.dtype, device=own.device)
        with self.turn:
            base = unwrapped(self.policy.model)
            if is_peft(base):
                raise RequestError("weights must be loaded before any adapter, found one")
            own_shapes, new_shapes = ({k: w.shape for k, w in m.state_dict().items()} for m in (base, new))
            if odd := sorted(
                {name for name, _ in own_shapes.items() ^ new_shapes.items()}
            ):  # before anything is changed
                raise RequestError(f"weights_path must hold the weights of {self.name}, found other ones at {odd[0]}")
            base.load_state_dict(new.state_dict())

    def load_adapter(self, name: str, path: str) -> None:
        import peft

        with self.turn:
            if name in (self.name, *self.adapters):
                raise RequestError(f"lora_name must be a new one, found {name!r}")
            if missing := [one for one in ADAPTER if not (Path(path) / one).is_file()]:
                raise RequestError(f"Loading lora {name} failed: there is no {missing[0]} in {path}", 404)
            model: Any = unwrapped(self.policy.model)
            had_others = is_peft(model)
            try:  # the configuration first: what does not fit is then found before a layer is exchanged
                config = peft.PeftConfig.from_pretrained(path)
                weights = peft.load_peft_weights(path, device=str(self.policy.device))
                if had_others:
                    model.add_adapter(name, config)
                else:
                    model = peft.get_peft_model(model, config, adapter_name=name)
                result: Any = peft.set_peft_model_state_dict(model, weights, adapter_name=name)
                if result.unexpected_keys:
                    raise ValueError(f"it has weights of other layers, {result.unexpected_keys[0]}")
            except Exception as error:  # peft raises errors of every kind
                if had_others and name in model.peft_config:
                    model.delete_adapter(name)
                elif not had_others and is_peft(model):
                    self.policy = Policy(model.unload(), self.policy.tokenizer)
                raise RequestError(f"Loading lora {name} failed: {error}", 404) from None
            self.policy = Policy(model.eval(), self.policy.tokenizer)
            self.adapters.append(name)

    def unload_adapter(self, name: str) -> None:
        with self.turn:
            if name not in self.adapters:
                raise RequestError(f"The lora adapter {name!r} cannot be found.", 404)
            self.adapters.remove(name)
            model: Any = unwrapped(self.policy.model)
            if self.adapters:
                model.set_adapter(self.adapters[0])  # peft warns of one that is deleted while it is in use
                model.delete_adapter(name)
            else:  # the last one: the model below them is as it was
                self.policy = Policy(model.unload(), self.policy.tokenizer)

    @contextlib.contextmanager
    def model(self, name: Any) -> Iterator[Policy]:
        """The policy for a request's "model": with this adapter, or none. Its turn lasts as long as the context."""
        with self.turn:
            if name not in (None, self.name, *self.adapters):
                raise RequestError(f"The model `{name}` does not exist.", 404)
            model: Any = unwrapped(self.policy.model)
            if name in self.adapters:
                model.set_adapter(name)
            with adapter_off(model) if self.adapters and name not in self.adapters else contextlib.nullcontext():
                yield self.policy

    # ---- completions ----

    def complete(self, asked: "Asked", prompt: list[int]) -> list[dict[str, Any]]:
        """The answers to one prompt: ids, log-probs, text, finish_reason."""
        with self.model(asked.model) as policy:
            rollout = generate(
                policy, [prompt], asked.sampling, num_samples=asked.n, seed=asked.seed, ignore_eos=asked.ignore_eos
            )
            prompt_logps = self._prompt_logps(policy, prompt) if asked.prompt_logprobs else None
        return [
            self._answer(ids.tolist(), logps.tolist(), why == "eos", asked) | {"prompt_logprobs": prompt_logps}
            for ids, logps, why in zip(rollout.completion_ids, rollout.logps, rollout.finish_reasons, strict=True)
        ]

    def _answer(self, ids: list[int], logps: list[float], ended: bool, asked: "Asked") -> dict[str, Any]:
        reason = "stop" if ended else "length"
        text = self.text(ids[:-1] if reason == "stop" else ids)
        if places := [place for stop in asked.stop if (place := text.find(stop)) >= 0]:
            text, reason = text[: min(places)], "stop"
            num = next(n for n in range(1, len(ids) + 1) if any(stop in self.text(ids[:n]) for stop in asked.stop))
            ids, logps = ids[:num], logps[:num]
        return {"ids": ids, "logps": logps, "text": text, "finish_reason": reason}

    def _prompt_logps(self, policy: Policy, prompt: list[int]) -> list[Any]:
        if len(prompt) < 2:
            return [None]
        with torch.no_grad(), policy.evaluating():
            logps = policy.logps(TokenBatch.of([Trajectory.of(prompt[:1], prompt[1:])], policy.device)).tolist()
        return [None, *({str(token): {"logprob": logp}} for token, logp in zip(prompt[1:], logps, strict=True))]

    def stream(self, asked: "Asked", prompt: list[int]) -> Iterator[tuple[str, list[int], str | None]]:
        """Pieces of one answer: new text, new ids, at the end why. Every piece is generated from all that is before it."""
        ids: list[int] = []
        sent, size = "", FIRST_PIECE
        while True:
            left = asked.sampling.max_new_tokens - len(ids)
            part = replace(asked, n=1, seed=asked.seed + len(ids), prompt_logprobs=False, stop=(),
                           sampling=replace(asked.sampling, max_new_tokens=min(size, left)))  # fmt: skip
            found = self.complete(part, prompt + ids)[0]
            ids, before, size = ids + found["ids"], len(ids), min(2 * size, LONGEST_PIECE)
            text = self.text(ids[:-1] if found["finish_reason"] == "stop" else ids)
            places = [place for stop in asked.stop if (place := text.find(stop)) >= 0]
            over = bool(places) or found["finish_reason"] == "stop" or left == len(found["ids"])
            text = text[: min(places)] if places else text
            # half a character, or what may be the beginning of a stop text, waits for the next piece
            held = 0 if over else max([len(text) - len(text.rstrip("\ufffd")), *(len(stop) - 1 for stop in asked.stop)])
            new = text[len(sent) : len(text) - held]
            sent += new
            reason = ("stop" if places else found["finish_reason"]) if over else None
            yield new, ids[before:], reason
            if over:
                return

    def text(self, ids: list[int]) -> str:
        tokenizer = self.policy.tokenizer
        if tokenizer is None:
            return ""
        try:
            return tokenizer.decode(ids, skip_special_tokens=True)
        except TypeError:  # one of the plainest kind
            return tokenizer.decode(ids)


# ---- requests ----


@dataclass(frozen=True)
class Asked:
    """A request's parameters, checked."""

    model: str | None
    sampling: Sampling
    n: int
    seed: int
    stop: tuple[str, ...]
    ignore_eos: bool
    prompt_logprobs: bool
    logprobs: bool
    token_ids: bool
    stream: bool

    @classmethod
    def of(cls, body: dict[str, Any], max_tokens: int) -> "Asked":
        for name, only in IGNORED.items():
            if body.get(name) not in (None, only):
                raise RequestError(f"{name} must be {json.dumps(only)}, found {json.dumps(body[name])}")
        for name in ("logprobs", "prompt_logprobs"):
            if (value := body.get(name)) is not None and not isinstance(value, bool) and value != 0:
                raise RequestError(f"{name} must be 0, the log-probs of the tokens that are there, found {value!r:.80}")
        sampling = Sampling(
            max_new_tokens=_whole(body, ("max_tokens", "max_completion_tokens"), max_tokens),
            temperature=_number(body, "temperature", 1.0),
            top_k=max(_whole(body, ("top_k",), 0), 0),
            top_p=_number(body, "top_p", 1.0),
            stop_ids=tuple(_listed(body, "stop_token_ids")),
        )
        stop = (body["stop"],) if isinstance(body.get("stop"), str) else tuple(_listed(body, "stop"))
        if not all(isinstance(one, str) and one for one in stop):
            raise RequestError(f"stop must be a text or several, found {body['stop']!r:.80}")
        n, stream = _whole(body, ("n",), 1), bool(body.get("stream"))
        if n < 1 or (stream and n > 1):
            raise RequestError(f"n must be {'1 in a stream' if stream else 'at least 1'}, found {n}")
        seed = _whole(body, ("seed",), secrets.randbits(48)) % 2**62
        flags = (body.get("ignore_eos"), _wanted(body, "prompt_logprobs"))
        shown = (_wanted(body, "logprobs"), body.get("return_token_ids"), stream)
        return cls(body.get("model"), sampling, n, seed, stop, *map(bool, flags + shown))


def _listed(body: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(found := body.get(name) or [], list):
        raise RequestError(f"{name} must be a list, found {found!r:.80}")
    return found


def _wanted(body: dict[str, Any], name: str) -> bool:
    """0 asks for log-probs, without any of other tokens; False for none."""
    return body.get(name) is not None and body[name] is not False


def _whole(body: dict[str, Any], names: Sequence[str], default: int) -> int:
    for name in names:
        if (value := body.get(name)) is not None:
            if type(value) is not int:
                raise RequestError(f"{name} must be a whole number, found {value!r:.80}")
            return value
    return default


def _number(body: dict[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise RequestError(f"{name} must be a number, found {value!r:.80}")
    return default if value is None else float(value)


def _texts(body: dict[str, Any], serving: Serving) -> list[list[int]]:
    """The prompts of a request of completions as ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and type(prompt[0]) is int):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(f"prompt must be a text, ids, or a list of these, found {prompt!r:.80}")
    for one in prompt:
        if isinstance(one, list) and any(type(token) is not int for token in one):
            raise RequestError(f"prompt must hold ids that are whole numbers, found {one!r:.80}")
    return [encode_prompt(one, serving.policy.tokenizer) for one in prompt]


class Handler(BaseHTTPRequestHandler):
    """HTTP around `Serving`: JSON in, JSON or a stream of events out, errors in OpenAI's form."""

    protocol_version = "HTTP/1.1"
    serving: Serving
    streaming = False

    def do_GET(self) -> None:
        pages: dict[str, Callable[[], Any]] = {"/health": dict, "/v1/models": self.serving.models}
        self._answered(pages.get(self.path.partition("?")[0]))

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY:
            self.close_connection = True
            return self._send(413, _error(f"a body must have at most {MAX_BODY} bytes, found {length}", 413))
        text = self.rfile.read(int(length))
        pages: dict[str, Callable[[dict[str, Any]], Any]] = {
            "/v1/completions": self._completions, "/v1/chat/completions": self._chat,
        }  # fmt: skip
        if self.serving.allow_sync:
            pages |= {
                "/collective_rpc": self._collective_rpc,
                "/reset_prefix_cache": lambda _: {"success": True},  # there is none
                "/v1/load_lora_adapter": lambda b: self.serving.load_adapter(
                    _text(b, "lora_name"), _text(b, "lora_path")
                ),
                "/v1/unload_lora_adapter": lambda b: self.serving.unload_adapter(_text(b, "lora_name")),
            }
        page = pages.get(self.path.partition("?")[0])
        return self._answered(None if page is None else lambda: page(_parsed(text)))

    def _answered(self, page: Callable[[], Any] | None) -> None:
        try:
            if page is None:
                raise RequestError(f"{self.command} {self.path} is not served", 404)
            found = page()
            if found is not self:  # else the page has answered, as a stream
                self._send(200, found or {})
        except (ValueError, TypeError) as error:  # of the request, by whichever check it met
            status = getattr(error, "status", 400)
            self._send(status, _error(str(error), status))
        except ConnectionError:  # nobody listens any more
            self.close_connection = True
        except Exception as error:
            if self.streaming:  # too late for a status: the client sees a stream without its end
                raise
            self._send(500, _error(f"{type(error).__name__}: {error}", 500))

    def _send(self, status: int, found: Any) -> None:
        data = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    # ---- pages ----

    def _collective_rpc(self, body: dict[str, Any]) -> Any:
        if body.get("method") != "reload_weights":
            raise RequestError(f"method must be 'reload_weights', found {body.get('method')!r:.80}")
        if not isinstance(arguments := body.get("kwargs") or {}, dict):
            raise RequestError(f"kwargs must be an object, found {arguments!r:.80}")
        try:
            self.serving.reload_weights(_text(arguments, "weights_path"))
        except (OSError, RuntimeError) as error:
            raise RequestError(f"reload_weights failed: {error}", 500) from None
        return {"results": [None]}

    def _completions(self, body: dict[str, Any]) -> Any:
        prompts, asked = _texts(body, self.serving), Asked.of(body, 16)

        def choice(index: int, prompt: list[int], one: dict[str, Any]) -> dict[str, Any]:
            ids = {"token_ids": one["ids"], "prompt_token_ids": prompt} if asked.token_ids else {}
            words = [self.serving.text([token]) for token in one["ids"]] if asked.logprobs else []
            logprobs = (
                {"tokens": words, "token_logprobs": one["logps"], "top_logprobs": None} if asked.logprobs else None
            )
            return {"index": index, "text": one["text"], "logprobs": logprobs, "finish_reason": one["finish_reason"],
                    "prompt_logprobs": one.get("prompt_logprobs"), **ids}  # fmt: skip

        if asked.stream:
            return self._stream(prompts, asked, "text_completion", lambda new, ids: {"text": new, "token_ids": ids})
        pairs = [(prompt, one) for prompt in prompts for one in self.serving.complete(asked, prompt)]
        choices = [choice(index, *pair) for index, pair in enumerate(pairs)]
        return self._body("text_completion", asked, choices, _usage(prompts, [one for _, one in pairs]))

    def _chat(self, body: dict[str, Any]) -> Any:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
            raise RequestError(f"messages must be a list of messages, found {messages!r:.80}")
        prompt = encode_prompt(messages, self.serving.policy.tokenizer)
        longest = self.serving.policy.max_length
        asked = Asked.of(body, 1024 if longest is None else max(1, min(1024, longest - len(prompt))))
        if asked.stream:
            role = iter([{"role": "assistant"}])
            return self._stream([prompt], asked, "chat.completion.chunk",
                                lambda new, ids: {"delta": {**next(role, {}), "content": new}})  # fmt: skip
        answers = self.serving.complete(asked, prompt)
        choices = [
            {"index": index, "message": {"role": "assistant", "content": one["text"]}, "finish_reason": one["finish_reason"],
             "logprobs": {"content": [{"token": self.serving.text([token]), "logprob": logp} for token, logp in
                                      zip(one["ids"], one["logps"], strict=True)]} if asked.logprobs else None}
            for index, one in enumerate(answers)
        ]  # fmt: skip
        return self._body("chat.completion", asked, choices, _usage([prompt], answers))

    def _body(self, kind: str, asked: Asked, choices: list[Any], usage: Any = None) -> dict[str, Any]:
        about = {"id": f"strop-{secrets.token_hex(8)}", "object": kind, "created": int(time.time())}
        return about | {"model": asked.model or self.serving.name, "choices": choices, "usage": usage}

    def _stream(
        self, prompts: list[list[int]], asked: Asked, kind: str, piece: Callable[..., dict[str, Any]]
    ) -> "Handler":
        """Events as pieces come. The answer's length is not known before, so the connection ends with it."""
        if len(prompts) > 1:
            raise RequestError(f"prompt must be one in a stream, found {len(prompts)}")
        pieces = self.serving.stream(asked, prompts[0])
        first = next(pieces)  # an error of the request is still told as one
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = self.streaming = True
        body = self._body(kind, asked, [])
        for new, ids, reason in itertools.chain([first], pieces):
            event = body | {"choices": [{"index": 0, **piece(new, ids), "finish_reason": reason}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
        return self

    def log_message(self, *_: Any) -> None:
        """Requests are not told: a rollout has thousands."""


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        body = json.loads(text or b"{}")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"a body must be JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError(f"a body must be an object, found {type(body).__name__}")
    return body


def _text(body: dict[str, Any], name: str) -> str:
    if not isinstance(body.get(name), str) or not body[name]:
        raise RequestError(f"{name} must be a text, found {body.get(name)!r:.80}")
    return body[name]


def _error(message: str, status: int) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _usage(prompts: list[list[int]], answers: list[dict[str, Any]]) -> dict[str, int]:
    read, written = sum(map(len, prompts)), sum(len(one["ids"]) for one in answers)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # connections that wait for their thread; 5 by default, and a rollout has more at once


def make_server(serving: Serving, host: str = "127.0.0.1", port: int = 0) -> Listener:
    """A server that `serve_forever()` starts; port 0 is any that is free."""
    return Listener((host, port), type("Handler", (Handler,), {"serving": serving}))
