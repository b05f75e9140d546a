"""Calls as models write them, what they are answered with, and tools of classes."""

import asyncio
import functools
from typing import Literal

import pytest
from chat_templates import tokenizer

from strop.data.tool_calls import parse_hermes, parse_llama, parser_of
from strop.environments.tools import ToolBox


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def fail(why: str) -> str:
    """Raise.

    Args:
        why: the reason
    """
    raise RuntimeError(why)


async def wait(text: str) -> str:
    """Answer later.

    Args:
        text: the answer
    """
    await asyncio.sleep(0)
    return text


def calls(found):
    return [(call.name, call.arguments) for call in found]


def test_calls_of_hermes_qwen_and_smollm():
    reply = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n<tool_call>{"name": "stop"}</tool_call>'
    assert calls(parse_hermes(reply)) == [("add", {"a": 1, "b": 2}), ("stop", {})]
    listed = '<tool_call>[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]</tool_call>'
    assert calls(parse_hermes(listed)) == [("add", {"a": 1}), ("add", {"a": 2})]
    assert parse_hermes("The sum is 3.") == []


def test_calls_of_llama():
    assert calls(parse_llama('{"name": "add", "parameters": {"a": 1}}')) == [("add", {"a": 1})]
    assert calls(parse_llama('<|python_tag|>{"name": "add", "parameters": {"a": 1}}')) == [("add", {"a": 1})]
    nested = '{"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}'
    assert calls(parse_llama(nested)) == [("add", {"a": 1})]
    assert parse_llama("The sum is {3}.") == []
    for between in ("; ", ";\n", "\n"):
        both = f'{{"name": "add", "parameters": {{"a": 1}}}}{between}{{"name": "stop", "parameters": {{}}}}'
        assert calls(parse_llama(both)) == [("add", {"a": 1}), ("stop", {})]
    one, other = parse_llama('{"name": "add", "parameters": {"a": 1}} and')
    assert (one.error, other.error[:30]) == ("", "a call must be JSON, found 'an")


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ("<tool_call>{", "must be closed by </tool_call>"),
        ("<tool_call>add(1, 2)</tool_call>", "a call must be JSON, found 'add(1, 2)'"),
        ('<tool_call>{"arguments": {}}</tool_call>', "a call must be {\"name\": …"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "arguments must be an object, found [1]"),
        ('<tool_call>{"name": "sub", "arguments": {}}</tool_call>', "there is no tool 'sub'; there are add, fail"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "add needs b"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": "2"}}</tool_call>', "b of add must be of type integer"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": true}}</tool_call>', "b of add must be of type integer"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2, "c": 3}}</tool_call>', "has no argument 'c'"),
        ('<tool_call>{"name": "fail", "arguments": {"why": "so"}}</tool_call>', "RuntimeError: so"),
    ],
)  # fmt: skip
def test_a_call_that_fails_is_answered_with_the_error(reply, error):
    turn = ToolBox([add, fail], tokenizer("qwen"))().step(reply)
    (message,) = turn.messages
    assert message["role"] == "tool"
    assert message["content"].startswith("error: ")
    assert error in message["content"]
    assert (turn.info, turn.done) == ({"tool_calls": 1, "failed_calls": 1}, False)


def optional(count: int | None = None, unit: Literal["m", "km"] = "m", what: int | str = 0) -> str:
    """Say what was given.

    Args:
        count: how many
        unit: of what
        what: a number or its name
    """
    return f"{count} {unit} {what}"


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("{}", "None m 0"),
        ('{"count": null, "unit": "km", "what": "two"}', "None km two"),
        ('{"count": "1"}', 'error: count of optional must be of type integer, found "1"'),
        ('{"unit": "mile"}', 'error: unit of optional must be one of ["m", "km"], found "mile"'),
        ('{"what": true}', "error: what of optional must be of type integer or string, found true"),
    ],
)
def test_arguments_that_may_be_left_out_or_be_one_of_several(given, answer):
    call = f'<tool_call>{{"name": "optional", "arguments": {given}}}</tool_call>'
    (message,) = ToolBox([optional], tokenizer("qwen"))().step(call).messages
    assert message["content"] == answer


def test_results_are_written_as_people_read_them():
    def tell(what: str) -> dict:
        """Tell.

        Args:
            what: it
        """
        return {"city": "Zürich"} if what == "city" else {(1, 2): 3}

    tools = ToolBox([tell], tokenizer("qwen"))()
    city, pair = (
        tools.step(f'<tool_call>{{"name": "tell", "arguments": {{"what": "{what}"}}}}</tool_call>')
        for what in ("city", "pair")
    )
    assert city.messages[0]["content"] == '{"city": "Zürich"}'
    assert pair.messages[0]["content"].startswith("error: TypeError: keys must be str")
    assert pair.info["failed_calls"] == 1


def generator(n: int):
    """Count.

    Args:
        n: to where
    """
    yield from range(n)


def by_place(n: int, /) -> int:
    """Count.

    Args:
        n: to where
    """
    return n


@pytest.mark.parametrize(
    ("tools", "match"),
    [
        ([generator], "tool generator must return its result, found a generator"),
        ([by_place], "tool by_place must take arguments by their names, found n: int"),
        ([functools.partial(add, 1)], "tools must be functions, found functools.partial"),
        ([add, add], r"tools must have different names, found \['add', 'add'\]"),
    ],
)
def test_tools_that_could_not_be_called_are_refused(tools, match):
    with pytest.raises((TypeError, ValueError), match=match):
        ToolBox(tools, tokenizer("qwen"))


def test_results_are_in_order_and_a_reply_without_calls_ends():
    tools = ToolBox([add], tokenizer("qwen"))()
    both = "".join(f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": 1}}}}</tool_call>' for a in (1, 2))
    turn = tools.step(both)
    assert [message["content"] for message in turn.messages] == ["2", "3"]
    assert turn.info == {"tool_calls": 2, "failed_calls": 0}
    last = tools.step("3.")
    assert (last.done, last.info) == (True, {"tool_calls": 0, "failed_calls": 0})


def test_the_parser_is_chosen_by_the_template():
    found = {name: parser_of(tokenizer(name)).__name__ for name in ("qwen", "llama", "smollm2", "phi")}
    assert found == {"qwen": "parse_hermes", "llama": "parse_llama", "smollm2": "parse_hermes", "phi": "parse_hermes"}
    mine = ToolBox([add], tokenizer("qwen"), parser=lambda reply: [])
    assert mine().step("<tool_call>{</tool_call>").done


def test_a_template_that_tells_of_no_tools_gets_a_system_message():
    box = ToolBox([add], tokenizer("smollm2"))
    first = box().reset({"prompt": "2 + 2?"})
    assert [message["role"] for message in first] == ["system", "user"]
    assert '"description": "Add two numbers."' in first[0]["content"]
    own = box().reset({"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]})
    assert own[0]["content"].startswith("Be brief.\n\nYou may call these functions:")
    assert ToolBox([add], tokenizer("qwen"))().reset({"prompt": "?"}) == [{"role": "user", "content": "?"}]


def test_async_functions_are_awaited():
    tools = ToolBox([add, wait], tokenizer("qwen"))()
    made = {"wait": '{"text": "so"}', "add": '{"a": 1, "b": 1}'}
    reply = "".join(
        f'<tool_call>{{"name": "{name}", "arguments": {given}}}</tool_call>' for name, given in made.items()
    )
    assert [message["content"] for message in asyncio.run(tools.step(reply)).messages] == ["so", "2"]


class Counter:
    """As TRL's environment_factory wants one."""

    def reset(self, start: int = 0, **row) -> str:
        self.count = start
        return f" It is {start}."

    def increment(self, by: int) -> int:
        """Count up.

        Args:
            by: how far
        """
        self.count += by
        return self.count

    def _hidden(self):
        raise AssertionError


def test_public_methods_of_a_class_are_tools_of_each_trajectory():
    box = ToolBox(Counter, tokenizer("qwen"))
    assert [tool["function"]["name"] for tool in box.tools] == ["increment"]
    one, two = box(), box()
    assert one.reset({"prompt": "Count.", "start": 3})[0]["content"] == "Count. It is 3."
    two.reset({"prompt": "Count.", "start": 10})
    call = '<tool_call>{"name": "increment", "arguments": {"by": 2}}</tool_call>'
    assert [one.step(call).messages[0]["content"], two.step(call).messages[0]["content"]] == ["5", "12"]
    assert (one.held.count, two.held.count) == (5, 12)


class Later(Counter):
    async def reset(self, start: int = 0, **row):
        return super().reset(start)


def test_reset_may_be_async_and_return_text_or_none():
    first = asyncio.run(ToolBox(Later, tokenizer("qwen"))().reset({"prompt": "Count."}))
    assert first == [{"role": "user", "content": "Count. It is 0."}]
    silent = type("Silent", (Counter,), {"reset": lambda self, **row: None})
    with pytest.raises(ValueError, match="the row must have a prompt, or reset must return one"):
        ToolBox(silent, tokenizer("qwen"))().reset({"start": 1})
    listed = type("Listed", (Counter,), {"reset": lambda self, **row: [{"role": "user", "content": "?"}]})
    with pytest.raises(TypeError, match=r"must return a text or None, found \[\{'role'"):
        ToolBox(listed, tokenizer("qwen"))().reset({"prompt": "Count."})


def test_a_function_without_types_is_refused_by_name():
    def bare(x):
        """Bare."""

    with pytest.raises(ValueError, match="tool bare must have type hints and a docstring with Args"):
        ToolBox([bare], tokenizer("qwen"))
    with pytest.raises(ValueError, match="tools need a tokenizer with a chat template"):
        ToolBox([add], None)
