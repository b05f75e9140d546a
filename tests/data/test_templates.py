"""Conversations in the chat templates of well-known models: which tokens are the assistant's, and what stands between."""

import copy

import pytest
from chat_templates import TEMPLATES, tokenizer

from strop.data import templates
from strop.data.tokenize import encode_prompt, encode_row, turn_ends

SYSTEM = {"role": "system", "content": "Be the best."}
USER = {"role": "user", "content": "the  inn?\n\n"}
SAID = {"role": "assistant", "content": "ooh, all"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
TOOL = {"role": "tool", "content": "13"}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
every_template = pytest.mark.parametrize("name", TEMPLATES)
appending = pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "qwen3"])


def with_template(name, template):
    tokens = copy.deepcopy(tokenizer(name))
    tokens.chat_template = template
    return tokens


def counted(tokens, ids, counts):
    """The text of each run of tokens that count."""
    runs, before = [], False
    for token, counts_ in zip(ids, counts, strict=True):
        if counts_ and not before:
            runs.append([])
        if counts_:
            runs[-1].append(token)
        before = counts_
    return [tokens.decode(run) for run in runs]


@every_template
def test_the_assistants_words_and_their_ends_count(name):
    tokens, end = tokenizer(name), TEMPLATES[name][3]
    messages = [USER, SAID, USER, {"role": "assistant", "content": "in"}]
    _, ids, counts = encode_row({"messages": messages}, tokens)
    space = " " if name == "mistral" else ""  # which it puts in front of every answer
    assert counted(tokens, ids, counts) == [f"{space}ooh, all{end}", f"{space}in{end}"]
    whole = templates.render(messages, tokens)
    assert whole.startswith(tokens.decode(ids))
    assert whole.removeprefix(tokens.decode(ids)).strip() in ("", tokens.eos_token)


@every_template
def test_a_completion_is_what_follows_its_prompt(name):
    tokens = tokenizer(name)
    row = {"prompt": [USER], "completion": [SAID, USER, SAID]}
    prompt, completion, counts = encode_row(row, tokens)
    _, whole, all_counts = encode_row({"messages": [USER, SAID, USER, SAID]}, tokens)
    assert prompt + completion == whole
    assert [False] * len(prompt) + counts == all_counts


@pytest.mark.parametrize("name", ["qwen", "llama"])
def test_calls_of_tools_count_and_their_results_do_not(name):
    tokens, end = tokenizer(name), TEMPLATES[name][3]
    _, ids, counts = encode_row({"messages": [USER, CALL, TOOL, SAID], "tools": [ADD]}, tokens)
    call, said = counted(tokens, ids, counts)
    assert '"name": "add"' in call
    assert call.endswith(end)
    assert said == f"ooh, all{end}"
    assert '"description": "Adds."' in tokens.decode(ids)


@every_template
def test_the_token_that_ends_a_turn_is_found(name):
    tokens, (_, _, eos, end) = tokenizer(name), TEMPLATES[name]
    assert set(turn_ends(tokens)) == set(tokens.convert_tokens_to_ids([eos, end]))


def test_a_template_without_such_a_token_ends_turns_with_eos():
    from tiny_tokenizers import hugging_face

    plain = "{% for m in messages %}{{ m.role[0] + ': ' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
    tokens = hugging_face(template=plain)
    assert turn_ends(tokens) == (tokens.eos_token_id,)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ab"}]
    _, ids, counts = encode_row({"messages": messages}, tokens)
    assert tokens.convert_ids_to_tokens(ids)[-4:] == [" ", "ab", "\n", "<eos>"]
    assert counts[-4:] == [False, True, True, True]


PLAIN = (
    "{% for m in messages %}{{ m.role[0] + ': ' + (m.tool_calls[0].function.name if m.tool_calls else m.content) }}\n"
    "{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)
ROLES = (  # as of GLM: the opening of the next turn ends the last
    "{% for m in messages %}{{ '<|im_start|>' + m.role + (m.tool_calls[0].function.name if m.tool_calls else m.content) }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "end"), [(PLAIN, "\n"), (ROLES, "<|im_start|>")], ids=["no end", "the next one's opening"]
)
def test_where_no_token_ends_a_turn_the_words_of_others_count_for_nothing(template, end):
    tokens = with_template("qwen", template)
    later = {"role": "user", "content": "later"}
    _, ids, counts = encode_row({"messages": [USER, SAID, later, CALL, TOOL, SAID]}, tokens)
    assert "later" in tokens.decode(ids)
    found = counted(tokens, ids, counts)
    assert found[:2] == [f"ooh, all{end}", f"add{end}"]
    assert found[2].startswith("ooh, all")
    prompt, completion, counts_ = encode_row({"prompt": [USER], "completion": [SAID, later, CALL, TOOL, SAID]}, tokens)
    assert (prompt + completion, [False] * len(prompt) + counts_) == (ids, counts)
    _, ids, counts = encode_row({"messages": [USER, SAID, later]}, tokens)  # and where nobody answers
    assert counted(tokens, ids, counts) == [f"ooh, all{end}"]


def test_turns_that_cannot_be_told_apart_are_refused():
    """No token ends them, and they are rewritten once the conversation goes on."""
    said = "{{ m.content if loop.last or m.role == 'user' else m.content | upper }}"
    tokens = with_template("qwen", PLAIN.replace("m.content) }}", "'') }}" + said))
    with pytest.raises(ValueError, match=r"must end the assistant's turns with a special token .* from 'ooh, all"):
        encode_row({"messages": [USER, SAID, USER, SAID]}, tokens)


def test_calls_that_a_template_leaves_out_are_refused():
    with pytest.raises(ValueError, match=r"must write tool_calls, and leaves out 'add' of messages\[1\]"):
        encode_row({"messages": [USER, CALL, TOOL, SAID], "tools": [ADD]}, tokenizer("smollm2"))


@appending
@pytest.mark.parametrize("new", [[USER], [TOOL], [TOOL, TOOL]], ids=["user", "tool", "tools"])
def test_what_stands_between_turns_is_the_templates(name, new):
    tokens = tokenizer(name)
    between = templates.between([USER], new, tokens)
    opening = templates.render_prompt([USER], tokens)
    space = " " if name == "mistral" else ""
    assert opening + space + SAID["content"] + between == templates.render_prompt([USER, SAID, *new], tokens)
    templates.check_append_only([USER], new, tokens)


def test_a_template_that_rewrites_thinking_is_refused_with_the_reason():
    with pytest.raises(
        ValueError, match=r"rewrites an earlier turn's thinking .*'.*<think>.* becomes .*; rewritten_turns=\"keep\""
    ):
        templates.check_append_only([USER], [USER], tokenizer("qwen3"))


def test_a_template_that_rewrites_turns_is_refused_with_the_reason():
    from tiny_tokenizers import hugging_face

    last = "{% for m in messages %}{{ m.role + ': ' + (m.content if loop.last else '…') + '<eos>' }}{% endfor %}"
    with pytest.raises(ValueError, match=r"rewrites earlier turns .*§.* becomes .*…"):
        templates.check_append_only([USER], [USER], hugging_face(template=last))


def test_a_system_message_may_open_a_conversation():
    for name in ("qwen", "llama", "smollm2", "phi"):
        tokens = tokenizer(name)
        _, ids, counts = encode_row({"messages": [SYSTEM, USER, SAID]}, tokens)
        assert ids[: counts.index(True)] == encode_prompt([SYSTEM, USER], tokens)
