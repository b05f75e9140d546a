"""Tool calls in replies, in the format in which the tokenizer's chat template writes them.

    calls = call_format(tokenizer)
    calls.parse(reply, tools)       # the Calls of a reply; tools: as given to the template, for the types of arguments

The template renders an example, and the format is the one that reads it back. So a template needs no entry in a list. A
tokenizer with a `response_template` of its own is read by transformers' `parse_response`, and formats whose arguments are
no JSON are `response_template`s for it. Parsers of our own are for what it cannot read, or reads without saying what is
wrong with a call.
"""

import ast
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from strop._types import Json, Tokenizer
from strop.data import templates


@dataclass
class Call:
    """A call that the model made; `error` says why it could not be parsed."""

    name: str = ""
    arguments: Json = field(default_factory=dict)
    error: str = ""


Parser = Callable[..., list[Call]]  # (reply, tools=()) → calls


def parse_hermes(reply: str, tools: Sequence[Json] = ()) -> list[Call]:
    """Parse <tool_call>{"name": …, "arguments": {…}}</tool_call>, the format of Hermes, Qwen and SmolLM3.

    SmolLM2 writes a list.
    """
    found = _between(reply, "<tool_call>", "</tool_call>")
    return [call for one in found for call in ([one] if isinstance(one, Call) else _calls_in(one))]


def parse_llama(reply: str, tools: Sequence[Json] = ()) -> list[Call]:
    """Parse {"name": …, "parameters": {…}} alone, the format of Llama 3, with or without <|python_tag|>.

    Semicolons separate calls.
    """
    text = reply.replace("<|python_tag|>", "").strip()
    looks = re.match(r'\{\s*"(name|type|function)"', text)
    return _calls_in(text) if looks else []


def parse_mistral(reply: str, tools: Sequence[Json] = ()) -> list[Call]:
    """Parse [TOOL_CALLS] [{"name": …, "arguments": {…}}], or [TOOL_CALLS]name[ARGS]{…} of later versions."""
    calls = []
    for part in reply.split("[TOOL_CALLS]")[1:]:
        name, tag, arguments = part.partition("[ARGS]")
        calls += [_json_call(name.partition("[CALL_ID]")[0].strip(), arguments)] if tag else _calls_in(part)
    return calls


FINAL = re.compile(r"<\|channel\|>final<\|message\|>(.*?)(?:<\|return\|>|<\|end\|>|$)", re.DOTALL)
ANALYSIS = re.compile(r"<\|channel\|>analysis<\|message\|>(.*?)(?:<\|end\|>|$)", re.DOTALL)


def parse_deepseek(reply: str, tools: Sequence[Json] = ()) -> list[Call]:
    """Parse the calls of DeepSeek V3, R1 and V3.1, which have the name and the arguments between special tokens."""
    calls = []
    for text in _between(reply, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"):
        if isinstance(text, str):  # V3.1 has no kind of tool, and no block of code
            name, _, arguments = text.removeprefix("function<｜tool▁sep｜>").partition("<｜tool▁sep｜>")
            if not arguments:
                name, _, arguments = name.partition("\n```json\n")
            text = _json_call(name, arguments.removesuffix("\n```"))
        calls.append(text)
    return calls


def _between(reply: str, opening: str, closing: str) -> Iterator[str | Call]:
    """Yield the texts between two marks, and an error for one that is not closed."""
    for part in reply.split(opening)[1:]:
        text, end, _ = part.partition(closing)
        yield text if end else Call(error=f"{opening} must be closed by {closing}")


def parse_harmony(reply: str, tools: Sequence[Json] = ()) -> list[Call]:
    """Parse the calls of gpt-oss: messages to functions.NAME on the channel `commentary`."""
    calls = []
    _, found, rest = reply.partition("to=functions.")
    while found:
        head, _, rest = rest.partition("<|message|>")  # the name, and maybe the channel and the kind of arguments
        arguments, _, rest = rest.partition("<|call|>")
        calls.append(_json_call(re.split(r"[\s<]", head, maxsplit=1)[0], arguments))
        _, found, rest = rest.partition("to=functions.")
    return calls


def parse_lfm2(reply: str, tools: Sequence[Json] = ()) -> list[Call]:
    """Parse <|tool_call_start|>[name(key='value')]<|tool_call_end|>, the calls of LFM2 as Python writes them."""
    found = _between(reply, "<|tool_call_start|>", "<|tool_call_end|>")
    return [call for one in found for call in ([one] if isinstance(one, Call) else _python_calls(one))]


def _python_calls(text: str) -> list[Call]:
    try:
        listed = ast.parse(text.strip(), mode="eval").body
        calls = listed.elts if isinstance(listed, ast.List) else [listed]
        return [_python_call(one) for one in calls]
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        return [Call(error=f"calls must be a list of name(key=value), found {text!r:.60} ({error})")]


def _python_call(node: Any) -> Call:
    if node.args or not all(one.arg for one in node.keywords):
        raise ValueError("arguments must have names")
    return Call(node.func.id, {one.arg: _literal(one.value) for one in node.keywords})


def _literal(node: ast.expr) -> Any:
    """Return the value of a Python literal, in which JSON's words are known too."""
    if isinstance(node, ast.Name) and node.id in (words := {"true": True, "false": False, "null": None}):
        return words[node.id]
    if isinstance(node, ast.List):
        return list(map(_literal, node.elts))
    if isinstance(node, ast.Dict):
        return {_literal(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    return ast.literal_eval(node)


def _unread(reply: str, opening: str, num_found: int) -> list[Call]:
    """Return an error if the reply opens more calls than were found."""
    whole = reply.count(opening) == num_found
    return (
        [] if whole else [Call(error=f"a call after {opening} must be written as in the chat template, and be closed")]
    )


def _json_call(name: str, arguments: str) -> Call:
    try:
        return _call({"name": name, "arguments": json.loads(arguments)})
    except (ValueError, RecursionError) as error:
        return Call(name, error=f"arguments must be JSON, found {arguments!r:.60} ({error})")


def _calls_in(text: str) -> list[Call]:
    """Parse one call, a list of calls, or calls separated by semicolons."""
    calls: list[Call] = []
    rest = text.strip()
    while True:
        try:
            found, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError) as error:
            return [*calls, Call(error=f"a call must be JSON, found {rest!r:.60} ({error})")]
        calls += [_call(one) for one in found] if isinstance(found, list) else [_call(found)]
        rest = rest[end:].lstrip("; \n")
        if not rest:
            return calls


def _call(found: object) -> Call:
    if isinstance(found, dict) and isinstance(found.get("function"), dict):  # {"type": "function", "function": {…}}
        found = found["function"]
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return Call(error=f'a call must be {{"name": …, "arguments": {{…}}}}, found {json.dumps(found):.60}')
    arguments = found.get("arguments", found.get("parameters", {}))
    if not isinstance(arguments, dict):
        return Call(found["name"], error=f"arguments must be an object, found {json.dumps(arguments):.60}")
    return Call(found["name"], arguments)


# ---- formats that transformers reads ----


def _response_template(opening: str, closing: str, argument: str) -> Json:
    """Return a `response_template` of calls whose arguments are elements of a kind of XML, with text as values."""
    as_text = {"name": "text", "args": {"strip": False}}  # parse_response makes numbers of it by the tool's schema
    calls = {
        "open_pattern": opening, "close_pattern": closing, "repeats": True, "content": "xml-inline",
        "content_args": {"tag_pattern": argument, "value_parser": as_text},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }  # fmt: skip
    return _of_calls(calls)


def _of_calls(calls: Json) -> Json:
    fields = {"tool_calls": calls, "content": {"content": "text"}}
    return {"defaults": {"role": "assistant"}, "start_anchor": "-", "fields": fields}  # the anchor is for prefixes


RESPONSE_TEMPLATES: dict[str, tuple[str, str, Json]] = {
    # the text that opens a call, the text that closes it, the response_template
    "qwen3_coder": (
        "<tool_call>", "</tool_call>",
        _response_template(
            r"<tool_call>\s*<function=(?P<name>[^\n>]+)>", r"</function>\s*</tool_call>",
            r"<parameter=(?P<key>[^>\n]+)>\n(?P<value>.*?)\n</parameter>",
        ),
    ),
    "glm4": (
        "<tool_call>", "</tool_call>",
        _response_template(
            r"<tool_call>(?P<name>[^\s<{]+)\n?", r"</tool_call>",
            r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        ),
    ),
    "gemma4": (
        "<|tool_call>", "<tool_call|>",
        _of_calls({
            "open_pattern": r"<\|tool_call>call:(?P<name>[^\s{]+)", "close_pattern": r"<tool_call\|>", "repeats": True,
            "content": "json", "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        }),
    ),
}  # fmt: skip


def _by_response_template(tokenizer: Any, name: str, opening: str, closing: str, schema: Json | None) -> Parser:
    def parse(reply: str, tools: Sequence[Json] = ()) -> list[Call]:
        if opening and reply.count(opening) != reply.count(closing):
            return [Call(error=f"{opening} must be closed by {closing}")]
        try:
            message = tokenizer.parse_response(reply, schema=schema, prefix="", tools=list(tools))
        except Exception as error:  # errors of many kinds, from a model's text
            return [
                Call(error=f"a call must be written as in the chat template ({' '.join(str(error).split())})"[:200])
            ]
        found = [_call(one) for one in message.get("tool_calls") or ()]
        return found + (_unread(reply, opening, len(found)) if opening else [])

    parse.__name__ = f"parse_{name}"
    return parse


# ---- which format it is ----

PARSERS: dict[str, tuple[Parser, str]] = {  # and the text that begins a call; "" if a call is the whole reply
    "hermes": (parse_hermes, "<tool_call>"), "llama": (parse_llama, ""), "mistral": (parse_mistral, "[TOOL_CALLS]"),
    "deepseek": (parse_deepseek, "<｜tool▁calls▁begin｜>"), "harmony": (parse_harmony, "to=functions."),
    "lfm2": (parse_lfm2, "<|tool_call_start|>"),
}  # fmt: skip
NAME, EXAMPLE = "example_tool", {"its_text": "some words", "its_number": 7}


@dataclass(frozen=True)
class CallFormat:
    """How a chat template writes calls.

    parse            parses the calls of a reply
    opening          the text that begins a call
    text_arguments   the template takes arguments as JSON texts, not as objects
    example          what the template writes for a call; "" if it writes none
    tokenizer        the tokenizer, whose own `response_template` may say what is content
    """

    name: str
    parse: Parser
    opening: str
    text_arguments: bool = False
    example: str = ""
    tokenizer: Any = None

    def message(self, reply: str, special_tokens: Sequence[str]) -> Json:
        """Return the fields `content` and, if the format tells them apart, `reasoning_content` of a reply."""
        found: Json = {}
        if self.name == "harmony":
            found = {"content": "".join(FINAL.findall(reply)), "thinking": "".join(ANALYSIS.findall(reply))}
        elif self.name == "own":
            with contextlib.suppress(Exception):  # errors of many kinds, from a model's text
                found = self.tokenizer.parse_response(reply, prefix="")
        elif self.opening:
            found = {"content": reply.partition(self.opening)[0]}
        texts = found.get("content"), found.get("reasoning_content") or found.get("thinking")
        content, reasoning = (_without(special_tokens, text or "").strip() for text in texts)
        return {"content": content} | ({"reasoning_content": reasoning} if reasoning else {})

    def as_template_takes(self, messages: Sequence[Json]) -> list[Json]:
        """Return the messages with the arguments of past calls as the template takes them."""
        if not self.text_arguments:
            return list(messages)
        return [
            {**one, "tool_calls": list(map(_with_text, one["tool_calls"]))} if one.get("tool_calls") else one
            for one in messages
        ]


def _without(words: Sequence[str], text: str) -> str:
    for word in words:
        text = text.replace(word, "")
    return text


def _with_text(call: Json) -> Json:
    arguments = call["function"].get("arguments")
    return {**call, "function": {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False)}}


def call_format(tokenizer: Tokenizer | None) -> CallFormat:
    """Return the format of the tokenizer's chat template.

    Models whose template writes no calls are told to write them as Hermes does. Raise ValueError, with an example, if the
    template writes calls that no parser reads.
    """
    shown = ""
    for text_arguments in (False, True):
        example = _example(tokenizer, text_arguments)
        if NAME not in example:
            continue
        shown = shown or example
        for name, parse, opening in _parsers(tokenizer):
            if parse(example, example_tools()) == [Call(NAME, EXAMPLE)]:
                return CallFormat(name, parse, opening, text_arguments, example, tokenizer)
    if shown:
        raise ValueError(f"tool calls of this chat template cannot be read: {shown[:200]!r}")
    return CallFormat("hermes", *PARSERS["hermes"])


def _parsers(tokenizer: Any) -> Iterator[tuple[str, Parser, str]]:
    """Yield name, parser and opening of every format; the tokenizer's own first."""
    if getattr(tokenizer, "response_template", None) is not None:
        yield "own", _by_response_template(tokenizer, "own", "", "", None), ""
    for name, (parse, opening) in PARSERS.items():
        yield name, parse, opening
    for name, (opening, closing, schema) in RESPONSE_TEMPLATES.items():
        yield name, _by_response_template(tokenizer, name, opening, closing, schema), opening


def parser_of(tokenizer: Tokenizer | None) -> Parser:
    """Return the parser of calls for the chat template."""
    return call_format(tokenizer).parse


def example_tools(names: Sequence[str] = (NAME,)) -> list[Json]:
    """Return tools with these names, which take the example's arguments."""
    properties = {
        "its_text": {"type": "string", "description": "-"},
        "its_number": {"type": "integer", "description": "-"},
    }
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return [
        {"type": "function", "function": {"name": name, "description": "-", "parameters": parameters}} for name in names
    ]


def example_calls(names: Sequence[str], text_arguments: bool) -> list[Json]:
    """Return calls of these tools with the example's arguments."""
    arguments: Any = json.dumps(EXAMPLE) if text_arguments else EXAMPLE
    return [
        {"id": f"call0000{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, name in enumerate(names)
    ]


def _example(tokenizer: Tokenizer | None, text_arguments: bool) -> str:
    """Return what the template writes after the prompt for a reply that calls the example; "" if it fails."""
    asked = [{"role": "user", "content": "?"}]
    answered: list[Json] = [
        *asked,
        {"role": "assistant", "content": "", "tool_calls": example_calls([NAME], text_arguments)},
    ]
    row = {"tools": example_tools()}
    try:
        prompt = templates.render(asked, tokenizer, row, add_generation_prompt=True)
        whole = templates.render(answered, tokenizer, row)
    except Exception:  # a template may fail in any way
        return ""
    reply = whole[templates.num_shared(prompt, whole) :]
    ends = [place for end in _ends(tokenizer) if (place := reply.find(end)) >= 0]
    return reply[: min(ends)] if ends else reply


def _ends(tokenizer: Any) -> list[str]:
    """Return the texts that end a reply: the tokenizer's EOS, and those of templates whose tokenizer has another."""
    return [
        end for end in (tokenizer.eos_token, "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<turn|>", "<|return|>") if end
    ]
