"""Every chat template that TRL ships: conversations are trained on where the template's own marks say, or refused."""

import re

import pytest
from chat_templates import PEERS, of_bytes
from transformers.utils.chat_template_utils import render_jinja_template

from strop.data.tokenize import encode_row

pytestmark = pytest.mark.skipif(not PEERS.is_dir(), reason="make has not laid TRL's templates into this environment")

USER, ANSWER = {"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "It is 4."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
CONVERSATIONS = {
    "one turn": [USER, ANSWER],
    "system": [{"role": "system", "content": "Be brief."}, USER, ANSWER],
    "two turns": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}, USER, ANSWER],
    "thinking": [USER, {"role": "assistant", "content": "<think>\nA sum.\n</think>\n\nIt is 4."}],
    "call": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "content": "3"},
        ANSWER,
    ],
}
SPECIAL = re.compile(r"<\|[^<>|\s]+\|?>|<｜[^<>\s]+｜>|<[a-zA-Z_/]+>|\[/?[A-Z_]+\]|<[a-z_]+\|>")
PLAIN = re.compile(r"</?(think|tools?|tool_call|tool_response|function|parameter|arg_key|arg_value)>")
EOS = "<the-end>"
FILES = sorted(path.stem for path in PEERS.glob("*.jinja"))
BLOCKS_ONLY = {"idefics3", "llava_next", "smolvlm"}  # of these templates a message's content is a list


def _tokenizer(name):
    template = (PEERS / f"{name}.jinja").read_text(encoding="utf-8")
    found = [token for token in dict.fromkeys(SPECIAL.findall(template)) if not PLAIN.fullmatch(token)]
    return of_bytes(template, ("<s>", *(token for token in found if token != "<s>"), EOS), EOS)


def _marked(tokenizer, messages):
    """Return the template's text, and the texts it marks, without blanks behind the token that ends a turn."""
    (text,), (spans,) = render_jinja_template(
        [messages],
        chat_template=tokenizer.chat_template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    marked = [text[start:end] for start, end in spans]
    ends = tuple(tokenizer.all_special_tokens)
    return text, [words.rstrip() if words.rstrip().endswith(ends) else words for words in marked]


@pytest.mark.parametrize("name", FILES)
def test_what_is_trained_on_is_what_the_template_marks(name):
    outcomes = {}
    for kind, messages in CONVERSATIONS.items():
        tokenizer = _tokenizer(name)
        try:
            text, marked = _marked(tokenizer, messages)
        except Exception:  # the template's own refusal, of any kind
            continue
        try:
            prompt, ids, loss_mask = encode_row({"messages": messages}, tokenizer)
        except ValueError as error:
            outcomes[kind] = str(error)
            continue
        trained = tokenizer.decode([token for token, counts in zip(ids, loss_mask, strict=True) if counts])
        assert text.startswith(tokenizer.decode(prompt + ids).removesuffix(EOS))
        if name.endswith("_training"):
            assert trained == "".join(marked)
        else:
            assert "It is 4." in trained
            assert "2+2" not in trained
        outcomes[kind] = "trained"
    for kind, outcome in outcomes.items():
        refused = "leaves out 'add'" if kind == "call" else "what the assistant says once, found it 0 times"
        assert outcome == "trained" or (
            refused in outcome and (kind == "call" or name.removesuffix("_training") in BLOCKS_ONLY)
        ), (kind, outcome)
    assert outcomes or name.removesuffix("_training") in BLOCKS_ONLY
