"""strop data check: what it says of rows, how it shows them, what it calls bad."""

import json
from pathlib import Path

import pytest
from tiny_tokenizers import hugging_face

from strop.tasks import CharTokenizer


@pytest.fixture
def check(strop, elsewhere, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    CharTokenizer("0123456789+= abc").save_pretrained(tmp_path / "tokenizer")
    return lambda *arguments: strop("data", "check", *arguments)[:2]


def write(path, rows):
    Path(path).write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def test_rows_are_shown_as_the_model_sees_them(check):
    write("rows.jsonl", [{"prompt": "1+1=", "completion": "2"}, {"prompt": "2+2=", "completion": "4", "level": 3}])
    code, out = check("rows.jsonl", "--tokenizer", "tokenizer")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "2 rows"
    assert lines[1] == (
        "format: prompt_completion; for strop train sft, grpo, rloo, ppo, distill, online-dpo; with a column label, true or false, "
        "also kto"
    )
    assert lines[2] == "columns: prompt, completion, level (in 1)"
    assert "tokens, all: 6 to 6, median 6, 12 together" in lines
    assert "tokens, that count: 2 to 2, median 2, 4 together" in lines
    assert lines[lines.index("line 2:") + 1] == "2+2=⟦4<eos>⟧"


def test_what_a_chat_template_opens_for_generation_alone_is_told(check, tmp_path):
    template = (
        "{% for m in messages %}{{ 'a=' if m.role == 'assistant' }}{{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}a=abc{% endif %}"
    )
    hugging_face(template=template).save_pretrained(tmp_path / "thinking")
    messages = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "x"}]
    write("rows.jsonl", [{"messages": messages}])
    code, out = check("rows.jsonl", "--tokenizer", "thinking")
    assert code == 0
    assert "the chat template opens 'abc' for a model that generates" in out
    refusing = "{% if messages[0].role != 'system' %}{{ raise_exception('a system message is needed') }}{% endif %}"
    hugging_face(template=refusing + template).save_pretrained(tmp_path / "refusing")
    write("rows.jsonl", [{"messages": [{"role": "system", "content": "x"}, *messages]}])
    code, out = check("rows.jsonl", "--tokenizer", "refusing")
    assert code == 0
    assert "for a model that generates" not in out
    write("rows.jsonl", [{"prompt": "b", "completion": "a"}])
    assert "for a model that generates" not in check("rows.jsonl", "--tokenizer", "thinking")[1]


def test_nothing_in_rows_steers_the_terminal(check):
    write("rows.jsonl", [{"prompt": "1\x1b[31m", "completion": "2\x07"}, {"promp\x1b[2Jt": "1"}])
    code, out = check("rows.jsonl")
    assert code == 1
    assert "prompt: 1\\x1b[31m\ncompletion: 2\\x07" in out
    assert "promp\\x1b[2Jt" in out
    assert not set(out) & {"\x1b", "\x07"}


def test_pairs_texts_and_prompts(check):
    write("pairs.jsonl", [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}])
    assert "chosen: 1+1=⟦2<eos>⟧\nrejected: 1+1=⟦3<eos>⟧" in check("pairs.jsonl", "--tokenizer", "tokenizer")[1]
    write("texts.jsonl", [{"text": "abc"}])
    assert "\na⟦bc<eos>⟧\n" in check("texts.jsonl", "--model", "tokenizer")[1]
    write("prompts.jsonl", [{"question": "1+1=", "label": "2"}])
    code, out = check("prompts.jsonl", "--tokenizer", "tokenizer", "--map", "prompt=question")
    assert code == 0
    assert "format: prompt_only; for strop train grpo, rloo, ppo, distill, online-dpo" in out
    assert "\n1+1=\n" in out


def test_bad_rows_are_named_by_line_and_the_rest_is_read(check):
    write("rows.jsonl", [
        {"prompt": "1+1=", "completion": "2"}, '{"prompt": "1', "", {"prompt": "1+1=", "completion": None, "chosen": "x"},
        {"prompt": "z", "completion": "2"}, {"prompt": 5, "completion": "2"}, {"prompt": "2+1=", "completion": "3"},
    ])  # fmt: skip
    code, out = check("rows.jsonl", "--tokenizer", "tokenizer", "--show", 0)
    assert code == 1
    assert "4 bad:" in out
    told = [line.strip() for line in out.partition("4 bad:\n")[2].splitlines() if line.startswith("  ")]
    assert told[0].startswith("line 2: not JSON (")
    assert told[1].startswith("line 4 has 'chosen' without its counterpart")
    assert told[2].startswith("line 5: ")
    assert told[3].startswith("line 6['prompt'] must be a text, a list of messages or token ids, found int")
    assert "format: prompt_completion in 2 rows" in out


def test_rows_of_two_formats_are_reported(check):
    write("rows.jsonl", [{"prompt": "1"}, {"text": "2"}])
    code, out = check("rows.jsonl")
    assert code == 1
    assert "All rows of one training must be of one format." in out
    assert "prompt: 1" in out


def test_other_files_and_standard_input(check, monkeypatch):
    Path("rows.csv").write_text("question,label\n1+1=,2\n")
    code, out = check("rows.csv", "--template", "{question}", "--chat")
    assert code == 0
    assert "prompt: user: 1+1=" in out
    code, out = check("rows.csv", "--template", "{missing}")
    assert code == 1
    assert "must use the columns question, label, found 'missing'" in out


def test_the_same_mistake_in_many_rows_is_reported_once(check):
    Path("rows.csv").write_text("question,label\n1+1=,2\n1+2=,3\n1+3=,4\n")
    code, out = check("rows.csv", "--show", 0)
    assert code == 1
    assert "3 bad:" in out
    assert out.count("is in no known format") == 1
    assert "(and 2 more like it, up to row 2)" in " ".join(out.split())
    assert "--map prompt=question,completion=answer" in out


def test_empty_texts_are_reported(check):
    Path("rows.csv").write_text("prompt,completion\n1+1=,2\n1+2=,\n")
    code, out = check("rows.csv", "--show", 0)
    assert (code, "empty completion: row 1" in out) == (0, True)
