"""Ids of hand-written rows: what is in front of the boundary, what is behind it, and where a completion ends."""

import numpy as np
import pytest
from tiny_tokenizers import Letters, hugging_face

from strop.data.tokenize import (
    encode_preference,
    encode_prompt,
    encode_row,
    needs_tokenizer,
    row_named,
)

USER = {"role": "user", "content": "hi?"}
ANSWER = {"role": "assistant", "content": "ab."}


@pytest.fixture(scope="module")
def tokenizer():
    return hugging_face()


def words(tokenizer, ids):
    return tokenizer.convert_ids_to_tokens(ids)


def test_text_without_special_tokens():
    assert encode_row({"prompt": "1+1=", "completion": "2"}, Letters()) == (
        [49, 43, 49, 61], [50, 0], [True, True],
    )  # fmt: skip
    assert encode_row({"text": "ab"}, Letters()) == ([], [97, 98, 0], [True] * 3)


def test_the_boundary_is_tokenised_once(tokenizer):
    prompt, completion, _ = encode_row({"prompt": "xa", "completion": "bc"}, tokenizer)
    assert words(tokenizer, prompt) == ["x", "a"]  # "xabc" as one text would merge a and b
    assert words(tokenizer, completion) == ["b", "c", "<eos>"]
    assert words(tokenizer, tokenizer.encode("xabc")) == ["x", "ab", "c"]


def test_eos_is_not_doubled(tokenizer):
    for completion, written in (("b<eos>", ["b", "<eos>"]), ("", ["<eos>"])):
        assert words(tokenizer, encode_row({"prompt": "a", "completion": completion}, tokenizer)[1]) == written


def test_a_tokenizer_that_wraps_texts_gives_its_bos_to_the_prompt_alone():
    tokenizer = hugging_face(bos=True)
    prompt, completion, _ = encode_row({"prompt": "x", "completion": "y"}, tokenizer)
    assert words(tokenizer, prompt) == ["<bos>", "x"]  # without the EOS this tokenizer puts behind every text
    assert words(tokenizer, completion) == ["y", "<eos>"]
    assert words(tokenizer, encode_row({"text": "xy"}, tokenizer)[1]) == ["<bos>", "x", "y", "<eos>"]
    assert words(tokenizer, encode_prompt("", tokenizer)) == ["<bos>"]


def test_conversations(tokenizer):
    prompt, completion, _ = encode_row({"prompt": [USER], "completion": [ANSWER]}, tokenizer)
    assert words(tokenizer, prompt) == ["<|user|>", "h", "i", "?", "<eos>", "\n", "<|assistant|>"]
    assert words(tokenizer, completion) == ["ab", ".", "<eos>"]  # not the line break behind: generation ends before it
    prompt, whole, counts = encode_row({"messages": [USER, ANSWER]}, tokenizer)
    assert prompt == []
    written = ["<|user|>", "h", "i", "?", "<eos>", "\n", "<|assistant|>", "ab", ".", "<eos>"]
    assert words(tokenizer, whole) == written
    assert counts == [False] * 7 + [True] * 3
    _, whole, counts = encode_row({"messages": [USER, ANSWER]}, tokenizer, assistant_only=False)
    assert words(tokenizer, whole) == [*written, "\n"]
    assert all(counts)


def test_a_turn_the_template_does_not_end_is_ended():
    bare = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    tokenizer = hugging_face(
        template=bare.replace("{{ m['content'] }}", "{{ (':' if m.role == 'assistant' else '') + m['content'] }}")
    )
    prompt, completion, _ = encode_row({"prompt": [USER], "completion": [ANSWER]}, tokenizer)
    assert words(tokenizer, prompt + completion) == ["h", "i", "?", ":", "ab", ".", "<eos>"]


def test_an_answer_begun_in_the_prompt_is_gone_on_with(tokenizer):
    begun = [USER, {"role": "assistant", "content": "a"}]
    prompt, completion, _ = encode_row(
        {"prompt": begun, "completion": [{"role": "assistant", "content": "b."}]}, tokenizer
    )
    assert words(tokenizer, prompt)[-2:] == ["<|assistant|>", "a"]
    assert words(tokenizer, completion) == ["b", ".", "<eos>"]


def test_several_turns_behind_the_boundary(tokenizer):
    row = {"prompt": [USER], "completion": [ANSWER, USER, ANSWER]}
    _, completion, counts = encode_row(row, tokenizer)
    assert words(tokenizer, completion) == [
        "ab", ".", "<eos>", "\n", "<|user|>", "h", "i", "?", "<eos>", "\n", "<|assistant|>", "ab", ".", "<eos>",
    ]  # fmt: skip
    assert counts == [True] * 3 + [False] * 8 + [True] * 3
    assert encode_row(row, tokenizer, assistant_only=False)[1:] == (completion, [True] * 14)


def test_preferences_with_and_without_a_prompt(tokenizer):
    no = {"role": "assistant", "content": "no"}
    explicit = encode_preference({"prompt": [USER], "chosen": [ANSWER], "rejected": [no]}, tokenizer)
    implicit = encode_preference({"chosen": [USER, ANSWER], "rejected": [USER, no]}, tokenizer)
    assert explicit == implicit
    assert [words(tokenizer, ids) for ids, _ in explicit[1:]] == [["ab", ".", "<eos>"], ["n", "o", "<eos>"]]
    text = encode_preference({"chosen": "1+1= 2", "rejected": "1+1= 3"}, Letters())
    assert [Letters().decode(ids) for ids in (text[0], text[1][0], text[2][0])] == ["1+1=", " 2\0", " 3\0"]


def test_ids_pass_through():
    assert encode_row({"prompt": [1, 2], "completion": np.array([3])}) == ([1, 2], [3], [True])
    assert encode_preference({"prompt": [1], "chosen": [2], "rejected": [3, 4]}) == (
        [1], ([2], [True]), ([3, 4], [True, True]),
    )  # fmt: skip
    assert encode_prompt([5, 6], Letters()) == [5, 6]
    assert not needs_tokenizer({"prompt": [1, 2], "answer": "text"})
    assert needs_tokenizer({"prompt": "1"})
    assert needs_tokenizer({"prompt": [USER]})


def test_a_template_that_rewrites_the_prompt_is_an_error():
    shouting = "{% for m in messages %}{{ m.content.upper() if messages|length > 1 else m.content }}{% endfor %}:"
    with pytest.raises(ValueError, match=r"after '' the prompt has 'hi\?:', the conversation 'HI\?AB"):
        encode_row({"prompt": [USER], "completion": [ANSWER]}, hugging_face(template=shouting))


THINKING = (
    "{% for m in messages %}{{ '<|assistant|>' if m.role == 'assistant' }}{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>xt{% endif %}"
)


@pytest.mark.parametrize(
    ("answer", "trained"), [("ab", ["ab", "<eos>"]), ("xa", ["x", "a", "<eos>"]), ("xta", ["a", "<eos>"])]
)
def test_where_a_prompt_opens_more_than_the_conversation_has_the_turn_is_found_in_the_conversation(answer, trained):
    tokenizer = hugging_face(template=THINKING)
    said = {"role": "assistant", "content": answer}
    prompt, completion, _ = encode_row({"prompt": [USER], "completion": [said]}, tokenizer)
    assert words(tokenizer, completion) == trained
    assert words(tokenizer, prompt)[:5] == ["h", "i", "?", "<eos>", "<|assistant|>"]
    assert words(tokenizer, encode_prompt([USER], tokenizer))[-2:] == ["x", "t"]  # what a model reads that generates


def test_a_template_may_ask_for_a_system_message():
    asking = "{% if messages[0].role != 'system' %}{{ raise_exception('a system message is needed') }}{% endif %}"
    messages = [{"role": "system", "content": "x"}, USER, ANSWER]
    plain = encode_row({"messages": messages}, hugging_face())
    tokenizer = hugging_face()
    tokenizer.chat_template = asking + tokenizer.chat_template
    assert encode_row({"messages": messages}, tokenizer) == plain


def test_chosen_and_rejected_share_the_shorter_of_two_prompts():
    """One of them begins as the prompt opens it, the other does not."""
    tokenizer = hugging_face(template=THINKING)
    row = {"prompt": [USER]} | {
        name: [{"role": "assistant", "content": answer}] for name, answer in (("chosen", "xta"), ("rejected", "b"))
    }
    prompt, (chosen, counts), (rejected, others) = encode_preference(row, tokenizer)
    assert words(tokenizer, prompt)[-1] == "<|assistant|>"
    assert words(tokenizer, chosen) == ["x", "t", "a", "<eos>"]
    assert counts == [False, False, True, True]
    assert words(tokenizer, rejected) == ["b", "<eos>"]
    assert others == [True, True]


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: encode_prompt("1+1="), ValueError, "text needs a tokenizer, found '1\\+1='"),
        (lambda: encode_prompt([USER], Letters()), ValueError, "chat template, and Letters has none"),
        (lambda: encode_prompt([USER]), ValueError, "chat template, and there is no tokenizer"),
        (lambda: encode_prompt([[1, 2]]), TypeError, "token ids must be a flat list of integers"),
        (
            lambda: encode_row({"messages": [USER]}, hugging_face()),
            ValueError,
            "messages must have a turn of the assistant",
        ),
        (lambda: encode_row({"prompt": "a"}, Letters()), ValueError, "found prompt_only"),
        (
            lambda: encode_preference({"prompt": "a", "completion": "b"}, Letters()),
            ValueError,
            "found prompt_completion",
        ),
    ],
)
def test_errors(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_a_row_that_cannot_be_encoded_is_named():
    """Also where the tokenizer's error is of a kind with another signature, or of none."""
    for error, kind in ((KeyError("x"), ValueError), (TypeError("x"), TypeError), (Exception("x"), ValueError)):
        with pytest.raises(kind, match=r"dataset\[3\]: .*x"), row_named("dataset[3]"):
            raise error
    with pytest.raises(ValueError, match=r"dataset\[3\]: .*surrogates not allowed"), row_named("dataset[3]"):
        "\ud800".encode()
