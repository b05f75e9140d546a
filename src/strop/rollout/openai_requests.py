"""OpenAI's requests as data: from a body's bytes to requests for the sampling queue.

This module knows nothing of HTTP. Every mistake in a request is a `RequestError` (or a ValueError or TypeError of a
deeper check) that names the field.
"""

import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from strop._types import Json, Row
from strop.data.tokenize import encode_prompt
from strop.rollout.forced_calls import NAME, call_frame
from strop.rollout.grammar import Grammar
from strop.rollout.sampling import Sampling
from strop.rollout.sampling_queue import SamplingRequest
from strop.rollout.served_model import RequestError, ServedModel

MAX_CHOICES = 1024  # maximum completions of one request, over all its prompts
MAX_TOKENS = 1 << 20  # maximum length of a completion, if the model does not state its own
MAX_TOP, MAX_STOPS, MAX_STOP_LENGTH = 20, 64, 1000
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {  # fields accepted only with these values, besides null
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "suffix": ("",),
    "best_of": (1,), "logit_bias": ({},), "functions": ([],), "function_call": ("none",), "min_tokens": (0,),
    "length_penalty": (1,), "use_beam_search": (False,), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "include_stop_str_in_output": (False,), "bad_words": ([],),
    "modalities": (["text"],),
}  # fmt: skip
READ = {
    "model", "prompt", "messages", "tools", "tool_choice", "n", "seed", "max_tokens", "max_completion_tokens", "temperature",
    "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "logprobs", "top_logprobs", "prompt_logprobs",
    "return_token_ids", "stream", "stream_options", "response_format", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "parallel_tool_calls", "echo",
}  # fmt: skip
WITHOUT_EFFECT = {  # fields that change no token of an answer
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id", "priority", "cache_salt",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OpenAIRequest:
    """A checked request for completions.

    given      the prompts as given: messages, texts or ids; `prompts` are their ids
    row        what else the chat template is given, such as tools
    echo       the answer begins with the prompt
    echo_ids   also send token ids (`return_token_ids`)
    tools      the tools shown to the model; None if there are none
    grammar    the rules for a completion; None for any text
    """

    chat: bool
    model: str | None
    prompts: list[list[int]]
    sampling: Sampling
    n: int
    seed: int
    stop: tuple[str, ...]
    ignore_eos: bool
    prompt_logprobs: bool
    logprobs: bool
    num_top: int
    echo: bool
    echo_ids: bool
    stream: bool
    stream_usage: bool
    tools: list[Json] | None
    grammar: Grammar | None = None
    given: Sequence[Any] = ()
    row: Row = field(default_factory=dict)

    def sampling_requests(self, served: ServedModel) -> list[SamplingRequest]:
        """Return one request to the queue per prompt."""

        def ends(ids: list[int]) -> bool:
            text = served.decode(ids)
            return any(stop in text for stop in self.stop)

        return [
            SamplingRequest(
                prompt=prompt, sampling=self.sampling, num_samples=self.n, seed=self.seed, ignore_eos=self.ignore_eos,
                model=self.model, ends=ends if self.stop else None,
                prompt_logps=self.prompt_logprobs or (self.echo and self.logprobs),
                num_top=self.num_top, streams=self.stream, grammar=self.grammar,
            )
            for prompt in self.prompts
        ]  # fmt: skip


# ---- requests ----


def parse_body(data: bytes) -> Json:
    """Return the JSON object of a request's body."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        body = json.loads(data.decode("utf-8") or "{}", parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"a body must be JSON: {str(error) or type(error).__name__:.200}") from None
    if not isinstance(body, dict):
        raise RequestError(f"a body must be an object, found {type(body).__name__}")
    return body


def parse_text_request(body: Json, served: ServedModel) -> OpenAIRequest:
    """Parse a body of /v1/completions."""
    served.check_name(body.get("model"))
    prompts = body.get("prompt")
    if isinstance(prompts, str) or (isinstance(prompts, list) and prompts and type(prompts[0]) is int):
        prompts = [prompts]
    if not isinstance(prompts, list) or not prompts or not all(isinstance(one, str | list) for one in prompts):
        raise RequestError(f"prompt must be a text, ids, or a list of these, found {_shown(prompts)}")
    if len(prompts) > MAX_CHOICES:
        raise RequestError(f"prompt must be at most {MAX_CHOICES} prompts, found {len(prompts)}")
    longest = served.policy.max_length
    for one in prompts:
        if isinstance(one, list) and any(type(token) is not int or token.bit_length() > 62 for token in one):
            raise RequestError(f"prompt must hold ids that are whole numbers, found {_shown(one)}")
        if isinstance(one, list) and longest is not None and len(one) > longest:
            raise RequestError(f"prompt must have at most {longest} tokens, found {len(one)}")
        if isinstance(one, str):
            _check_length(len(one), "prompt", served)
    logprobs = _whole(body, ("logprobs",), 0) if not isinstance(body.get("logprobs"), bool) else 0
    ids = [_encoded(one, served, "prompt") for one in prompts]
    return replace(_request(body, served, ids, chat=False, max_tokens=16, num_top=logprobs), given=prompts)


def parse_chat_request(body: Json, served: ServedModel) -> OpenAIRequest:
    """Parse a body of /v1/chat/completions. The prompt goes through the model's chat template."""
    served.check_name(body.get("model"))
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages must be a list of messages, found {_shown(messages)}")
    messages = [parse_message(one, f"messages[{index}]") for index, one in enumerate(messages)]
    tools, forced = _tools(body, served)
    continues = messages[-1]["role"] == "assistant"
    for name, value in (("continue_final_message", continues), ("add_generation_prompt", not continues)):
        if body.get(name) not in (None, value):
            raise RequestError(
                f"{name} must be {json.dumps(value)} where the last message's role is {messages[-1]['role']!r:.80}"
            )
    num_characters = sum(len(one["content"] or "") for one in messages)
    _check_length(num_characters + (len(json.dumps(tools)) if tools else 0), "messages", served)
    row: Json = {"chat_template_kwargs": _template_options(body)} | ({"tools": tools} if tools else {})
    written = (
        served.call_format.as_template_takes(messages) if any(one.get("tool_calls") for one in messages) else messages
    )
    ids = _encoded(written, served, "messages", row)
    longest = served.policy.max_length
    max_tokens = 1024 if longest is None else max(1, min(1024, longest - len(ids)))
    num_top = _whole(body, ("top_logprobs",), 0)
    if num_top and not _wanted(body, "logprobs"):
        raise RequestError(f"top_logprobs must be 0 without logprobs, found {num_top}")
    _flag(body, "logprobs")
    grammar = _forced_calls(body, served, forced, continues) if forced else None
    asked = _request(
        body, served, [ids], chat=True, max_tokens=max_tokens, num_top=num_top, tools=tools, forced=grammar
    )
    return replace(asked, given=[messages], row=row)


def _request(
    body: Json,
    served: ServedModel,
    prompts: list[list[int]],
    *,
    chat: bool,
    max_tokens: int,
    num_top: int,
    tools: list[Json] | None = None,
    forced: Grammar | None = None,
) -> OpenAIRequest:
    for name, value in body.items():
        if value is None or name in READ or name in WITHOUT_EFFECT:
            continue
        if name not in SUPPORTED_VALUES:
            raise RequestError(f"{name:.80} must be left out: this server does not know it, found {_shown(value)}")
        if value not in SUPPORTED_VALUES[name]:
            raise RequestError(f"{name} must be {json.dumps(SUPPORTED_VALUES[name][0])}, found {_shown(value)}")
    grammar = _grammar(body.get("response_format"), served)
    if grammar is not None and forced is not None:
        raise RequestError("response_format must be text where a call is forced")
    grammar = grammar or forced
    if _whole(body, ("prompt_logprobs",), 0) if not isinstance(body.get("prompt_logprobs"), bool) else 0:
        raise RequestError(
            f"prompt_logprobs must be 0, the prompt's own tokens, found {_shown(body['prompt_logprobs'])}"
        )
    if not 0 <= num_top <= MAX_TOP:
        raise RequestError(f"{'top_logprobs' if chat else 'logprobs'} must be from 0 to {MAX_TOP}, found {num_top}")
    stop, stop_ids = body.get("stop"), _listed(body, "stop_token_ids")
    stop = (stop,) if isinstance(stop, str) else tuple(_listed(body, "stop"))
    if not all(isinstance(one, str) and 0 < len(one) <= MAX_STOP_LENGTH for one in stop):
        raise RequestError(f"stop must be a text or several, found {_shown(body['stop'])}")
    if max(len(stop), len(stop_ids)) > MAX_STOPS:
        raise RequestError(
            f"stop and stop_token_ids must be at most {MAX_STOPS} each, found {max(len(stop), len(stop_ids))}"
        )
    n, stream = _whole(body, ("n",), 1), _flag(body, "stream")
    if n < 1 or (stream and n > 1):
        raise RequestError(f"n must be {'1 in a stream' if stream else 'at least 1'}, found {n}")
    if n * len(prompts) > MAX_CHOICES:
        raise RequestError(f"n must be at most {MAX_CHOICES // len(prompts)} for {len(prompts)} prompts, found {n}")
    if stream and num_top:
        raise RequestError(f"{'top_logprobs' if chat else 'logprobs'} must be 0 in a stream, found {num_top}")
    if (echo := _flag(body, "echo")) and (chat or stream):
        raise RequestError(f"echo must be false in a {'chat' if chat else 'stream'}, found true")
    if stream and len(prompts) > 1:
        raise RequestError(f"prompt must be one in a stream, found {len(prompts)}")
    if served.sampling is not None:
        max_tokens = served.sampling.max_new_tokens
    max_new_tokens = _whole(body, ("max_completion_tokens", "max_tokens"), max_tokens)
    if max_new_tokens > MAX_TOKENS:
        raise RequestError(f"max_tokens must be at most {MAX_TOKENS}, found {_shown(max_new_tokens)}")
    default = served.sampling or Sampling()
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=_number(body, "temperature", default.temperature),
        top_k=min(max(_whole(body, ("top_k",), default.top_k), 0), 1 << 30),
        top_p=_number(body, "top_p", default.top_p),
        min_p=_number(body, "min_p", default.min_p),
        stop_ids=tuple(stop_ids),
    )
    if sampling.min_p and served.policy.kind == "moe":
        raise RequestError(f"min_p must be 0 for strop's MoE, found {sampling.min_p:g}")
    options = body.get("stream_options")
    return OpenAIRequest(
        chat=chat, model=body.get("model"), prompts=prompts, sampling=sampling, n=n,
        seed=_whole(body, ("seed",), secrets.randbits(48)) % 2**62, stop=stop, ignore_eos=_flag(body, "ignore_eos"),
        prompt_logprobs=_wanted(body, "prompt_logprobs"), logprobs=_wanted(body, "logprobs"), num_top=num_top,
        echo=echo, echo_ids=_flag(body, "return_token_ids"), stream=stream,
        stream_usage=isinstance(options, dict) and bool(options.get("include_usage")), tools=tools,
        grammar=grammar,
    )  # fmt: skip


def _grammar(found: object, served: ServedModel) -> Grammar | None:
    """Return the grammar that `response_format` asks for; None for any text."""
    if found is None or found == {"type": "text"}:
        return None
    kind = found.get("type") if isinstance(found, dict) else found
    if not isinstance(found, dict) or kind not in ("json_object", "json_schema"):
        raise RequestError(
            f'response_format must be of type "text", "json_object" or "json_schema", found {_shown(kind)}'
        )
    schema = {"type": "object"}
    if kind == "json_schema":
        described = found.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None  # type: ignore[assignment]
        if not isinstance(schema, dict):
            raise RequestError(f"response_format must have a json_schema with a schema, found {_shown(described)}")
    try:
        return served.grammars.of_schema(schema)
    except ValueError as error:
        raise RequestError(f"response_format {error}") from None


def _forced_calls(body: Json, served: ServedModel, tools: list[Json], continues: bool) -> Grammar:
    """Return the grammar of a reply that calls one of these tools, or several."""
    if continues:
        raise RequestError("tool_choice must be auto where the last message is the assistant's")
    for tool in tools:
        if not NAME.fullmatch(name := tool["function"]["name"]):
            raise RequestError(f"tools must have names of letters, digits and _.- to be forced, found {name!r:.80}")
        if not isinstance(parameters := tool["function"].get("parameters") or {}, dict):
            raise RequestError(f"tools must have parameters that are a JSON schema, found {_shown(parameters)}")
    tokenizer = served.policy.tokenizer
    try:
        grammars = served.grammars
        frame = call_frame(tokenizer, served.policy.eos_ids, served.call_format, _template_options(body))
    except RequestError:
        raise
    except Exception as error:  # errors of many kinds: ours, the template's
        raise RequestError(f"tool_choice must be auto or none: {error}"[:500]) from None
    single = isinstance(body.get("tool_choice"), dict) or body.get("parallel_tool_calls") is False
    try:
        return grammars.of_rules(frame.rules(tools, single, tokenizer))
    except ValueError as error:
        raise RequestError(f"tools {error}") from None


def _template_options(body: Json) -> Json:
    """Return the request's options for the chat template, such as Qwen3's `enable_thinking`."""
    options = body.get("chat_template_kwargs") or {}
    if not isinstance(options, dict) or "chat_template" in options:  # a template is a program that may not end
        raise RequestError(f"chat_template_kwargs must be an object without a chat_template, found {_shown(options)}")
    return options


def _encoded(
    prompt: str | list[int] | list[Json],
    served: ServedModel,
    name: str,
    row: Json | None = None,
) -> list[int]:
    """Return the prompt's ids. Errors of the tokenizer or the template become a `RequestError`."""
    tokenizer, row = served.policy.tokenizer, row or {}
    try:
        ids = encode_prompt(prompt, tokenizer, row)
        if row.get("tools") and ids == encode_prompt(prompt, tokenizer, {**row, "tools": None}):
            raise RequestError("tools must be none: the model's chat template does not write them")
    except RequestError:
        raise
    except Exception as error:  # errors of many kinds: ours, the template's, the tokenizer's
        raise RequestError(f"{name}: {error}"[:500]) from None
    return ids


def parse_message(found: object, where: str) -> Json:
    """Return a message in the form of chat templates: its content is a text, the arguments of its calls are objects."""
    if not isinstance(found, dict) or not isinstance(found.get("role"), str):
        raise RequestError(f"{where} must be an object with a role, found {_shown(found)}")
    content = found.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise RequestError(f"{where}.content must be a text or parts of the type text, found {_shown(content)}")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) and not (content is None and found.get("tool_calls")):
        raise RequestError(f"{where}.content must be a text, found {_shown(content)}")
    message = {**found, "content": content or ""}
    if (calls := found.get("tool_calls")) is not None:
        if not isinstance(calls, list):
            raise RequestError(f"{where}.tool_calls must be a list, found {_shown(calls)}")
        message["tool_calls"] = [_past_call(call, f"{where}.tool_calls") for call in calls]
    return message


def _past_call(call: Any, where: str) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must be objects with a function and its name, found {_shown(call)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise RequestError(f"{where}: arguments must be JSON, found {_shown(arguments)}") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _tools(body: Json, served: ServedModel) -> tuple[list[Json] | None, list[Json]]:
    """Return the tools that the template should write, None if there are none; and those of which one must be called."""
    tools, choice, name = body.get("tools"), body.get("tool_choice"), None
    if isinstance(choice, dict):
        named = choice.get("function")
        name = named.get("name") if isinstance(named, dict) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise RequestError(f"tool_choice must be of type function, with the name of one, found {_shown(choice)}")
    elif choice not in (None, "auto", "none", "required"):
        raise RequestError(f'tool_choice must be "auto", "none", "required" or a function, found {_shown(choice)}')
    forces = name is not None or choice == "required"
    if not isinstance(parallel := body.get("parallel_tool_calls"), bool | None):
        raise RequestError(f"parallel_tool_calls must be true or false, found {_shown(parallel)}")
    if parallel is False and tools and choice != "none" and not forces:
        raise RequestError("parallel_tool_calls must be true where no call is forced, found false")
    if not tools and forces:
        raise RequestError(f"tools must be given for tool_choice {_shown(choice)}, found none")
    if not tools or choice == "none":
        return None, []
    if not isinstance(tools, list):
        raise RequestError(f"tools must be a list, found {_shown(tools)}")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"tools must be objects with a function and its name, found {_shown(tool)}")
    try:
        served.call_format  # noqa: B018
    except ValueError as error:
        raise RequestError(f"tools must be none: {error}"[:500]) from None
    forced = tools if choice == "required" else [tool for tool in tools if tool["function"]["name"] == name][:1]
    if name is not None and not forced:
        raise RequestError(f"tool_choice must name one of the tools, found {name!r:.80}")
    return tools, forced


def _check_length(num_characters: int, name: str, served: ServedModel) -> None:
    """Raise, before tokenising, if a text is certainly longer than the model reads."""
    if num_characters > served.max_characters:
        raise RequestError(
            f"{name} must have at most {served.max_characters} characters (more are certainly more tokens than the model "
            f"reads), found {num_characters}"
        )


def _listed(body: Json, name: str) -> list[Any]:
    if not isinstance(found := body.get(name) or [], list):
        raise RequestError(f"{name} must be a list, found {_shown(found)}")
    return found


def _wanted(body: Json, name: str) -> bool:
    """Return whether log-probs are asked for. The value 0 asks for those of the drawn tokens alone."""
    return body.get(name) is not None and body[name] is not False


def _flag(body: Json, name: str) -> bool:
    if not isinstance(found := body.get(name) or False, bool):
        raise RequestError(f"{name} must be true or false, found {_shown(found)}")
    return found


def _whole(body: Json, names: Sequence[str], default: int) -> int:
    for name in names:
        if (value := body.get(name)) is not None:
            if type(value) is not int:
                raise RequestError(f"{name} must be a whole number, found {_shown(value)}")
            return value
    return default


def _number(body: Json, name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, found {_shown(value)}")
    if not math.isfinite(value) if isinstance(value, float) else value.bit_length() > 64:
        raise RequestError(
            f"{name} must be a finite number, found {'infinity' if isinstance(value, float) else 'more'}"
        )
    return float(value)


def parse_name(body: Row, name: str) -> str:
    """Return a field after a check that it is a text."""
    if not isinstance(body.get(name), str) or not body[name]:
        raise RequestError(f"{name} must be a text, found {_shown(body.get(name))}")
    return body[name]


def _shown(value: object) -> str:
    """Return a short form of a wrong value for a message."""
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 60 digits"
    try:
        return f"{value!r:.80}"
    except (RecursionError, ValueError):  # nested too deeply, or a number too long to print
        return type(value).__name__
