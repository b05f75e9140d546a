"""Tools: Python functions the model may call. Calls are parsed from its reply; results are what it reads next.

    def search(query: str) -> str:
        '''Search the archive.

        Args:
            query: what to look for
        '''

    GRPO(model=model, tokenizer=tokenizer, tools=[search], reward_fn=reward_fn, max_turns=4)

A trajectory ends with a reply without a call. The model reads an error if its call cannot be parsed, names an unknown
function or has wrong arguments, or if the function raises.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from strop._checks import is_conversation
from strop._types import Json, Row, Tokenizer
from strop.data import templates
from strop.data.tool_calls import Call, parser_of
from strop.environments.base import Environment, Turn

KINDS: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "string": (str,), "boolean": (bool,), "array": (list,), "object": (dict,),
    "null": (type(None),),
}  # fmt: skip


# ---- the environment ----


class ToolBox:
    """Makes an environment for each trajectory, whose tools are these functions.

    functions   functions with type hints and a docstring that describes their arguments (Google style, as transformers'
                `get_json_schema` reads it); some may be `async def`. Or a class, or a function that makes an object,
                with `reset(**row)` and maybe `get_reward()` (TRL's environment_factory): each trajectory gets an
                object, whose other public methods are the tools
    parser      function that parses the `Call`s of a reply; None chooses by the chat template
    """

    special_tokens = True

    def __init__(self, functions: Any, tokenizer: Tokenizer | None, parser: Callable[[str], list[Call]] | None = None):
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError("tools need a tokenizer with a chat template, found none")
        self.factory = functions if callable(functions) else None
        held = functions() if self.factory else None
        functions = list(functions) if held is None else methods_of(held)
        if not functions or not all(map(callable, functions)):
            who = f"{type(held).__name__} must have methods that are tools"
            raise TypeError(f"{'tools must be functions' if held is None else who}, found {functions!r:.60}")
        self.tools = [schema_of(function) for function in functions]
        self.functions = {function.__name__: function for function in functions}
        if len(self.functions) < len(functions):
            raise ValueError(f"tools must have different names, found {[function.__name__ for function in functions]}")
        self.parser = parser or partial(parser_of(tokenizer), tools=self.tools)
        self.described = "" if _shows(tokenizer, self.tools) else _description(self.tools)
        self.__name__ = "tools" if held is None else type(held).__name__
        self.gives_reward = hasattr(held, "get_reward")
        self.is_async = any(map(inspect.iscoroutinefunction, (*functions, getattr(held, "reset", None))))

    def __call__(self) -> "Tools":
        make = AsyncTools if self.is_async else Tools
        if self.factory is None:
            return make(self, self.functions)
        held = self.factory()
        return make(self, {function.__name__: function for function in methods_of(held)}, held)

    def own_reward(self) -> Callable[..., list[object]]:
        """Return a reward function that calls `get_reward()` of each trajectory's object."""

        def own(environments: Sequence[Any]) -> list[Any]:
            return [_awaited(held.get_reward()) for held in environments]

        own.__name__ = self.__name__
        return own


class Tools(Environment):
    """An environment of functions that the model may call. `held` is the object whose methods they are, if any."""

    special_tokens = True

    def __init__(self, box: ToolBox, functions: Mapping[str, Callable[..., object]], held: Any = None):
        self.box, self.functions, self.held = box, functions, held
        self.parameters = {one["function"]["name"]: one["function"]["parameters"] for one in box.tools}

    def reset(self, row: Row) -> Any:
        return self._first(row, None if self.held is None else self.held.reset(**row))

    def _first(self, row: Row, seen: object) -> list[Json]:
        """Return the first messages. `seen` is the result of the object's own reset."""
        if not (seen is None or isinstance(seen, str)):
            raise TypeError(f"it must return a text or None, found {seen!r:.60}")
        if seen is None and self.held is not None and row.get("prompt") is None:
            raise ValueError("the row must have a prompt, or reset must return one, found neither")
        says_all = seen is not None and "prompt" not in row  # the object's reset returned the whole prompt
        prompt: Any = "" if says_all else super().reset(row)
        messages = [dict(m) for m in prompt] if is_conversation(prompt) else [{"role": "user", "content": prompt}]
        messages[-1]["content"] = messages[-1]["content"] + (seen or "")
        if self.box.described and messages[0]["role"] == "system":
            messages[0]["content"] = messages[0]["content"] + "\n\n" + self.box.described
        elif self.box.described:
            messages.insert(0, {"role": "system", "content": self.box.described})
        return messages

    def step(self, reply: str) -> Turn:
        calls = self.box.parser(reply)
        return self._turn(calls, [self._result(call) for call in calls])

    def _result(self, call: Call) -> object:
        """Call the function; return its result or a Failure."""
        error = call.error or self._refused(call)
        if error:
            return Failure(error)
        try:
            return self.functions[call.name](**call.arguments)
        except Exception as raised:
            return Failure(f"{type(raised).__name__}: {raised}")

    def _refused(self, call: Call) -> str:
        if call.name not in self.functions:
            return f"there is no tool {call.name!r}; there are {', '.join(self.functions)}"
        wanted, given = self.parameters[call.name], call.arguments
        known = wanted.get("properties", {})
        if missing := [name for name in wanted.get("required", ()) if name not in given]:
            return f"{call.name} needs {', '.join(missing)}"
        for name, value in given.items():
            if name not in known:
                return f"{call.name} has no argument {name!r}; it has {', '.join(known)}"
            if other := _wanted_instead(value, known[name]):
                return f"{name} of {call.name} must be {other}, found {json.dumps(value):.60}"
        return ""

    def _turn(self, calls: Sequence[Call], results: Sequence[object]) -> Turn:
        texts = [as_text(result) for result in results]
        failed = sum(isinstance(text, Failure) for text in texts)
        messages = [
            {"role": "tool", "name": call.name, "content": f"error: {text}" if isinstance(text, Failure) else text}
            for call, text in zip(calls, texts, strict=True)
        ]
        return Turn(messages, done=not calls, info={"tool_calls": len(calls), "failed_calls": failed})


class AsyncTools(Tools):
    """Tools, some of them `async def`. Plain ones block the event loop that all trajectories share."""

    async def reset(self, row: Row) -> Any:
        seen = None if self.held is None else self.held.reset(**row)
        return self._first(row, await seen if inspect.isawaitable(seen) else seen)

    async def step(self, reply: str) -> Turn:  # type: ignore[override]
        calls, results = self.box.parser(reply), []
        for call in calls:
            result = self._result(call)
            try:
                results.append(await result if inspect.isawaitable(result) else result)
            except Exception as raised:
                results.append(Failure(f"{type(raised).__name__}: {raised}"))
        return self._turn(calls, results)


class Failure(str):
    """The reason why a call has no result."""


def as_text(result: object) -> str:
    """Return a result as the model reads it: a text, else JSON. Return a Failure if it cannot be written as JSON."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, default=str, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        return Failure(f"{type(error).__name__}: {error}")


def _wanted_instead(value: object, schema: Row) -> str:
    """Return what the schema requires instead of this value; "" if the value fits."""
    if value is None and schema.get("nullable"):
        return ""
    names = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", [])
    if names and not any(_is_a(value, name) for name in names):
        return f"of type {' or '.join(names)}"
    return f"one of {json.dumps(schema['enum'])}" if value not in schema.get("enum", [value]) else ""


def _is_a(value: object, name: str) -> bool:
    return isinstance(value, KINDS.get(name, object)) and (name == "boolean" or not isinstance(value, bool))


def methods_of(held: object) -> list[Callable[..., object]]:
    """Return the public methods except `reset` and `get_reward`. Properties are not evaluated."""
    named = [name for name, _ in inspect.getmembers(type(held), inspect.isfunction)]
    names = [name for name in named if not name.startswith("_") and name not in ("reset", "get_reward")]
    return [method for name in names if inspect.ismethod(method := getattr(held, name))]


def _awaited(value: Any) -> object:
    async def result() -> Any:
        return await value

    return asyncio.run(result()) if inspect.isawaitable(value) else value


def schema_of(function: Callable[..., object]) -> Json:
    from transformers.utils import get_json_schema

    if not hasattr(function, "__name__"):
        raise TypeError(f"tools must be functions, found {function!r:.60}, which has no name")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"tool {function.__name__} must return its result, found a generator")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"tool {function.__name__} must take arguments by their names, found {parameter}")
    try:
        return get_json_schema(function)
    except Exception as error:  # transformers' message says what is missing
        raise ValueError(f"tool {function.__name__} must have type hints and a docstring with Args: {error}") from None


def _shows(tokenizer: Tokenizer | None, tools: Sequence[object]) -> bool:
    """Return whether the chat template writes the tools."""
    messages = [{"role": "user", "content": "?"}]
    return templates.render(messages, tokenizer, {"tools": list(tools)}) != templates.render(messages, tokenizer)


def _description(tools: Sequence[Json]) -> str:
    """Return a description of the tools, for templates that do not write them."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You may call these functions:\n<tools>\n{listed}\n</tools>\n"
        'A call is written as\n<tool_call>\n{"name": <function>, "arguments": <object>}\n</tool_call>'
    )
