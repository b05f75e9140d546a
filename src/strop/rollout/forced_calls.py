"""Grammars of tool calls, in the format in which the model's chat template writes them.

The template renders one call and two calls of known tools. What stands around the names and the arguments frames a call.
So every template that writes arguments as JSON is understood without a list of templates. The parser of the template's
format must read the framed calls back; otherwise an answer would hold the call as text.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from strop._types import Json, Tokenizer
from strop.data import templates
from strop.data.tool_calls import EXAMPLE, Call, CallFormat, example_calls, example_tools
from strop.rollout.grammar import BLANKS

NAMES = ("first_tool_name", "second_tool_name")
ARGUMENTS = re.compile(
    r"\{\s*" + r"\s*,\s*".join(f'"{key}"\\s*:\\s*{json.dumps(value)}' for key, value in EXAMPLE.items()) + r"\s*\}"
)
NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}")


@dataclass(frozen=True)
class CallFrame:
    """The text around the names and the arguments of calls in a reply.

    before, between, after   up to the first name; from a name to its arguments; from the last arguments to the end
    next                     from arguments to the next name; None if a reply may have one call only
    """

    before: str
    between: str
    after: str
    next: str | None

    def rules(self, tools: Sequence[Json], single: bool, tokenizer: Any) -> str:
        """Return the grammar, in llguidance's form of Lark, of a reply with calls of these tools alone.

        single   the reply has one call; otherwise one or several, if the format has several
        """
        added = tokenizer.get_added_vocab()
        before, between, after = (_terms(text, added) for text in (self.before, self.between, self.after))
        several = "" if single or self.next is None else f" ({_terms(self.next, added)} call)*"
        lines = [
            f"start: {before} call{several} {after}",
            f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}",
        ]
        for i, tool in enumerate(tools):
            function = tool["function"]
            lines.append(f"call_{i}: {json.dumps(function['name'])} {between} arguments_{i}")
            lines.append(f"arguments_{i}: %json {json.dumps(_schema(function))}")
        return "\n".join(lines)


def call_frame(tokenizer: Tokenizer | None, eos_ids: Sequence[int], calls: CallFormat, options: Json) -> CallFrame:
    """Return the frame of calls in the tokenizer's chat template. Raise ValueError, with the reason, if there is none.

    calls     the template's format of calls
    options   the template's options
    """
    if not calls.example:
        raise ValueError("the model's chat template does not write calls")
    one = _reply(tokenizer, NAMES[:1], calls, options)
    parts = _parts(one, NAMES[:1])
    if parts is None:
        raise ValueError("the model's chat template does not write the arguments of calls as JSON")
    before, between, after = parts
    ends = [place for token in eos_ids if (place := after.find(tokenizer.decode([token]))) >= 0]  # type: ignore[union-attr]
    if not ends:
        raise ValueError("the model's chat template does not end a call with a token that ends a completion")
    found = CallFrame(before, between, after[: min(ends)], _next(tokenizer, calls, options, parts))
    framed = f"{before}{NAMES[0]}{between}{json.dumps(EXAMPLE)}{found.after}"
    if calls.parse(framed, example_tools(NAMES)) != [Call(NAMES[0], EXAMPLE)]:
        raise ValueError(f"calls of this chat template cannot be read: {framed[:80]!r}")
    return found


def _reply(tokenizer: Tokenizer | None, names: Sequence[str], calls: CallFormat, options: Json) -> str:
    """Return what the template writes, after the prompt, for a reply that calls these tools."""
    asked = [{"role": "user", "content": "?"}]
    row = {"tools": example_tools(names), "chat_template_kwargs": options}
    prompt = templates.render(asked, tokenizer, row, add_generation_prompt=True)
    made = example_calls(names, calls.text_arguments)
    answered: list[Json] = [*asked, {"role": "assistant", "content": "", "tool_calls": made}]
    return templates.following(prompt, templates.render(answered, tokenizer, row))


def _parts(reply: str, names: Sequence[str]) -> list[str] | None:
    """Return the reply cut at the names and the arguments; None if they are not there once each, in this order."""
    parts = []
    for name in names:
        before, _, rest = reply.partition(name)
        arguments = ARGUMENTS.search(rest)
        if arguments is None:
            return None
        parts += [before, rest[: arguments.start()]]
        reply = rest[arguments.end() :]
    parts.append(reply)
    return None if any(word in part for part in parts for word in (*NAMES, *EXAMPLE)) else parts


def _next(tokenizer: Tokenizer | None, calls: CallFormat, options: Json, alone: Sequence[str]) -> str | None:
    """Return the text from a call's arguments to the next call's name; None if the template writes one call only."""
    try:
        parts = _parts(_reply(tokenizer, NAMES, calls, options), NAMES)
    except Exception:  # Llama's template refuses several calls; others may fail in any way
        return None
    if parts is None:
        return None
    before, between, following, again, after = parts
    return following if [before, between, after] == list(alone) and again == between else None


def _schema(function: Json) -> Json:
    """Return the JSON schema of a tool's arguments. A tool without parameters takes none."""
    schema = function.get("parameters") or {"properties": {}, "additionalProperties": False}
    return {"type": "object", **schema, "x-guidance": {"whitespace_pattern": BLANKS}}


def _terms(text: str, added: dict[str, int]) -> str:
    """Return a text as terms of a grammar: words of the tokenizer's own are single tokens."""
    if not text:
        return '""'
    words = sorted(added, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, words))})", text) if words else [text]
    return " ".join(f"<[{added[part]}]>" if part in added else json.dumps(part) for part in parts if part)
