"""Tool calls of every chat template that TRL ships: what the template writes is read back, or refused with the reason.

`python tests/data/test_tool_calls.py` writes the table in docs/environments.md.
"""

import time
from pathlib import Path

import pytest
from chat_templates import PEERS, of_bytes, tokenizer

from strop.data.tool_calls import (
    EXAMPLE,
    NAME,
    Call,
    call_format,
    example_tools,
    parse_deepseek,
    parse_harmony,
    parse_lfm2,
    parse_mistral,
)
from strop.rollout.forced_calls import call_frame

peers = pytest.mark.skipif(not PEERS.is_dir(), reason="make has not laid TRL's templates into this environment")
MISTRAL = """{{ bos_token }}
{%- if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}[INST] {{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS] [
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else '') }}
{%- endfor %}]{{ eos_token }}
{%- else %} {{ m.content }}{{ eos_token }}{% endif %}
{%- endfor %}"""  # as of Mistral 7B v0.3


def test_mistral():
    tokens = of_bytes(MISTRAL, ("<s>", "[TOOL_CALLS]"), "</s>")
    assert call_format(tokens).name == "mistral"
    both = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "123456789"}, {"name": "g", "arguments": {}}]'
    assert parse_mistral(both) == [Call("f", {"a": 1}), Call("g", {})]
    later = '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}'
    assert parse_mistral(later) == [Call("f", {"a": 1}), Call("g", {})]
    assert parse_mistral("[TOOL_CALLS]f[ARGS]{")[0].error
    assert parse_mistral("[TOOL_CALLS] [")[0].error
    assert parse_mistral("no calls") == []


def test_deepseek():
    """V3 has the arguments in a block of code, V3.1 right behind the name."""
    old = (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
    new = (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    )
    assert parse_deepseek(old) == parse_deepseek(new) == [Call("f", {"a": 1}), Call("g", {})]
    (call,) = parse_deepseek(new.partition("<｜tool▁call▁end｜>")[0])
    assert "be closed" in call.error
    assert parse_deepseek("no calls") == []


def test_gpt_oss():
    """Models write the channel before the receiver, the template behind it."""
    template = ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    model = '<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
    assert parse_harmony(template) == parse_harmony(model) == [Call("f", {"a": 1})]
    assert parse_harmony("<|channel|>final<|message|>2") == []
    assert parse_harmony(" to=functions.f<|channel|>commentary json<|message|>{")[0].error


def test_lfm2():
    said = "<|tool_call_start|>[f(a='it is', b=[1, {'k': None}], c=True, d=null), g()]<|tool_call_end|>"
    assert parse_lfm2(said) == [Call("f", {"a": "it is", "b": [1, {"k": None}], "c": True, "d": None}), Call("g", {})]
    for bad in (
        "[f(",
        "[f(a=b)]",
        "[f(1)]",
        "[f(**a)]",
        "[f(a={[1]: 2})]",
        "[f(a=\x00)]",
        "[f.g(a=1)]",
        "[__import__('os').system('a')]",
        "[" * 5000,
    ):
        assert parse_lfm2(f"<|tool_call_start|>{bad}<|tool_call_end|>")[0].error
    assert parse_lfm2("<|tool_call_start|>[f()]")[0].error


@pytest.mark.parametrize("name", ["smollm2", "phi", "gemma"])
def test_a_template_without_calls_is_told_to_write_those_of_hermes(name):
    found = call_format(tokenizer(name))
    assert (found.name, found.example) == ("hermes", "")


def test_the_template_of_the_tokenizer_itself_comes_first():
    tokens = of_bytes(MISTRAL, ("<s>", "[TOOL_CALLS]"), "</s>")
    tokens.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "[/INST]",
        "fields": {
            "tool_calls": {
                "open_pattern": r"\[TOOL_CALLS\] \[", "close_pattern": r"\]", "content": "json", "repeats": True,
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"content": "text"},
        },
    }  # fmt: skip
    try:
        assert call_format(tokens).name == "own"
        assert call_format(tokens).parse('[TOOL_CALLS] [{"name": "f", "arguments": {}}]') == [Call("f", {})]
        assert call_format(tokens).parse("[TOOL_CALLS] [{]")[0].error
        assert call_format(tokens).parse("no calls") == []
        said = call_format(tokens).message('So. [TOOL_CALLS] [{"name": "f", "arguments": {}}]', ["</s>"])
        assert said == {"content": "So."}
    finally:
        del tokens.response_template


# ---- every template that ships with TRL, and the table in docs/environments.md ----

VALUES = {
    "text": ("string", "some words"),
    "text of digits": ("string", "75001"),
    "text of several lines": ("string", "a\n  b"),
    "text with blanks around it": ("string", " a "),
    "text with quotes": ("string", 'it\'s "so", {a}: [b]'),
    "empty text": ("string", ""),
    "text beyond ASCII": ("string", "ü€😀"),
    "whole numbers": ("integer", -7),
    "decimal numbers": ("number", 1.5),
    "booleans": ("boolean", True),
    "lists": ("array", [1, "b", [True]]),
    "objects": ("object", {"k": {"l": [1.5, "x"]}}),
}
ENDS = {  # tokens that end a turn, by template; others have <|im_end|>
    "gptoss": "<|call|>", "deepseekv3": "<｜end▁of▁sentence｜>", "glm4moe": "<|observation|>", "muse_glimmer": "<|eot|>",
    "llama": "<|eot_id|>", "gemma4": "<turn|>", "diffusion_gemma": "<turn|>",
}  # fmt: skip
FILES = sorted(path.stem for path in PEERS.glob("*.jinja") if not path.stem.endswith("_training"))


def tokens_of(name):
    end = next((end for prefix, end in ENDS.items() if name.startswith(prefix)), "<|im_end|>")
    return of_bytes((PEERS / f"{name}.jinja").read_text(encoding="utf-8"), ("<s>", end), end)


def written(tokens, found, calls, tools):
    """Return what the template writes for a reply with these calls, up to the end of the turn."""
    made = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for i, call in enumerate(calls)
    ]
    asked = [{"role": "user", "content": "?"}]
    answered = found.as_template_takes([*asked, {"role": "assistant", "content": "", "tool_calls": made}])
    options = {"tools": tools, "tokenize": False}
    prompt = tokens.apply_chat_template(asked, add_generation_prompt=True, **options)
    whole = tokens.apply_chat_template(answered, **options)
    shared = next(i for i in range(len(whole)) if not prompt.startswith(whole[: i + 1]))
    return whole[shared:].partition(tokens.eos_token)[0]


def outcome(name):
    """Return (format, what is not read back, whether two calls are, whether a call can be forced) of a template."""
    tokens = tokens_of(name)
    try:
        found = call_format(tokens)
    except ValueError:
        return "refused", "no parser reads its calls", "", "no"
    if not found.example:
        return "none written", "", "", "no"
    lost = []
    for what, (kind, value) in VALUES.items():
        parameters = {"type": "object", "properties": {"a": {"type": kind, "description": "-"}}, "required": ["a"]}
        tools = [{"type": "function", "function": {"name": "f", "description": "-", "parameters": parameters}}]
        if found.parse(written(tokens, found, [Call("f", {"a": value})], tools), tools) != [Call("f", {"a": value})]:
            lost.append(what)
    calls = [Call(NAME, EXAMPLE), Call(NAME, {**EXAMPLE, "its_number": 8})]
    try:
        several = found.parse(written(tokens, found, calls, example_tools()), example_tools()) == calls
    except Exception:  # the template's own refusal
        several = False
    try:
        call_frame(tokens, [tokens.eos_token_id], found, {})
        forced = "yes"
    except ValueError as error:
        forced = (
            "no: a call is not written behind the prompt" if "must render a prompt" in str(error) else f"no: {error}"
        )
    return (
        found.name,
        ", ".join(lost),
        "yes" if several else "one call",
        forced.replace("the model's chat template", "it"),
    )


def table():
    groups = {}
    for name in FILES:
        groups.setdefault(outcome(name), []).append(name)
    lines = [
        "| templates | format | not read back exactly | several calls | a call can be forced |",
        "|---|---|---|---|---|",
    ]
    return "\n".join(
        lines + [f"| {', '.join(names)} | {' | '.join(found)} |" for found, names in sorted(groups.items())]
    )


PAGE, BEGIN, END = (
    Path(__file__).parents[2] / "docs/environments.md",
    "<!-- table of tool calls -->\n",
    "<!-- end of the table -->",
)


@peers
@pytest.mark.parametrize(
    "name", ["qwen2_5", "llama3_1", "deepseekv3", "gptoss", "lfm2_v2", "qwen3_5_think", "glm4moe", "gemma4"]
)
def test_long_replies_that_mean_nothing_are_read_in_time(name):
    """Openings alone, closings alone, and calls that are cut, 100,000 letters each."""
    found = call_format(tokens_of(name))
    start = time.process_time()
    for part in (found.example.partition("some words")[0], found.example[::-1], found.opening or "{", found.example):
        calls = found.parse(part * (100_000 // len(part)), example_tools())
        assert all(call.error or call == Call(NAME, EXAMPLE) for call in calls)
    assert time.process_time() - start < 10


@peers
def test_the_page_says_what_is_read():
    assert PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip() == table()


@peers
@pytest.mark.parametrize("name", FILES)
def test_calls_are_read_or_refused(name):
    """What the page calls exact is read back; a reply without calls has none; what is broken off is an error."""
    form, lost, _, _ = outcome(name)
    if form == "none written":
        return
    if form == "refused":
        with pytest.raises(ValueError, match="tool calls of this chat template cannot be read: ' to=example_tool<"):
            call_format(tokens_of(name))
        return
    assert not lost or name in ("lfm2_2_5", "lfm2_2_5_v2")  # they put texts between quotes as they are
    tokens = tokens_of(name)
    found = call_format(tokens)
    assert found.parse("The sum is {3}.", example_tools()) == []
    (call,) = found.parse(found.example[: found.example.index("some words")], example_tools())
    assert call.error


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
