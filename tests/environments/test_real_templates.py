"""Chat templates as models have them: what is fed is what is trained on, and what the template writes."""

import pytest
import torch
from chat_templates import PEERS, REAL, real_tokenizer

from strop.data import templates
from strop.data.tokenize import encode_row
from strop.data.tool_calls import parser_of
from strop.environments import Chat

pytestmark = pytest.mark.skipif(not PEERS.is_dir(), reason="make has not laid TRL's templates into this environment")

ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer", "description": "it"}}, "required": ["a"]}}}  # fmt: skip
SYSTEM = {"role": "system", "content": "Be the best."}
USER = {"role": "user", "content": "the  inn? ü€😀"}
RESULTS = [{"role": "tool", "name": "add", "content": "13"}, {"role": "tool", "name": "add", "content": "14"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
APPENDING = [name for name, (_, _, end) in REAL.items() if end]
CASES = [(name, None) for name in APPENDING] + [(name, [ADD]) for name in APPENDING if name != "phi3"]


@pytest.mark.parametrize("first", [[USER], [SYSTEM, USER]], ids=["user", "system"])
@pytest.mark.parametrize(
    ("name", "tools"), CASES, ids=[f"{name}{' with tools' * bool(tools)}" for name, tools in CASES]
)
def test_three_turns_are_the_templates_text_and_the_ids_of_sft(name, tools, first):
    """Played and imitated, a conversation is the same ids, of which the same count."""
    tokens, end = real_tokenizer(name), REAL[name][2]
    dialogue, messages = Chat(tokens, tools).begin(first), list(first)
    for said in (CALL, "in the inn", "ooh ü€"):
        ids = tokens.encode(said + end, add_special_tokens=False)
        assert dialogue.draw(ids, torch.zeros(len(ids)), special_tokens=True) == said
        messages.append({"role": "assistant", "content": said})
        _, imitated, counts = encode_row({"messages": messages, "tools": tools}, tokens)
        assert (imitated, counts) == (dialogue.ids, dialogue.drawn)
        new = RESULTS if tools else [USER]
        dialogue.hear(new)
        messages += new
        assert tokens.decode(dialogue.ids) == templates.render_prompt(messages, tokens, {"tools": tools})
    line = dialogue.trajectory("environment")
    assert (line.ids_T.tolist(), line.loss_mask_T.tolist()) == (dialogue.ids, dialogue.drawn)
    assert tokens.decode(line.ids_T[line.loss_mask_T]) == "".join(
        f"{said}{end}" for said in (CALL, "in the inn", "ooh ü€")
    )


def test_what_is_refused_with_the_reason():
    with pytest.raises(
        ValueError, match="a message of the role tool behind what the assistant says, and it is left out"
    ):
        Chat(real_tokenizer("phi3"), [ADD])
    with pytest.raises(ValueError, match="rewrites an earlier turn's thinking"):
        Chat(real_tokenizer("glm4moe"))


def test_parsers():
    found = {name: parser_of(real_tokenizer(name)).__name__ for name in REAL}
    others = {
        "llama3_1": "parse_llama",
        "glm4moe": "parse_glm4",
    }  # Llama 3 writes no calls: it is told to, as Hermes does
    assert found == {name: others.get(name, "parse_hermes") for name in REAL}


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507", "llama3_1", "glm4moe"])
def test_only_calls_are_trained_on_not_their_results(name):
    tokens, end = real_tokenizer(name), REAL[name][2] or "<|observation|>"
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    call, said = {"role": "assistant", "content": "", "tool_calls": calls}, {"role": "assistant", "content": "ooh"}
    _, ids, counts = encode_row({"messages": [USER, call, RESULTS[0], said], "tools": [ADD]}, tokens)
    trained = tokens.decode([token for token, counted in zip(ids, counts, strict=True) if counted])
    first, _, second = trained.partition(end)
    assert "add" in first
    assert second.strip().removeprefix("<think></think>").lstrip().startswith("ooh")
    assert "13" not in trained
    assert "inn" not in trained
