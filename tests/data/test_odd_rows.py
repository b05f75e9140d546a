"""Rows in other people's formats, and rows that are no error but hardly meant."""

import json

import pytest
from tiny_models import llama
from tiny_tokenizers import hugging_face
from typer.testing import CliRunner

from strop import DPO, SFT
from strop.cli.data import app
from strop.data.formats import load_rows

SHARED = {"conversations": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "cd"}], "id": 7}
MESSAGES = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_of_sharegpt_are_messages(tmp_path):
    wanted = [{"messages": MESSAGES, "id": 7}, {"messages": [{"role": "system", "content": "a"}, *MESSAGES], "id": 7}]
    rows = [SHARED, {**SHARED, "system": "a"}]
    assert load_rows(rows) == wanted
    assert load_rows(write(tmp_path / "rows.jsonl", rows)) == wanted
    with pytest.raises(ValueError, match=r"rows\[1\].*conversations\[0\] must be a turn"):
        load_rows([SHARED, {"conversations": [{"from": "human"}]}])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"instruction": "a", "input": "b", "output": "c"}, r"--map completion=output --template \$'{instruction}\\n{input}' --chat"),
        ({"question": "a", "answer": "b"}, "--map prompt=question,completion=answer"),
    ],
)  # fmt: skip
def test_an_error_says_how_other_columns_are_mapped(row, says):
    with pytest.raises(ValueError, match=says):
        load_rows([row])


def test_the_options_for_alpaca_work():
    from strop.cli.job import JobConfig, shaped

    row = {"instruction": "a", "input": "b", "output": "c"}
    job = JobConfig(map="completion=output", template="{instruction}\n{input}", chat=True)
    (found,) = shaped([row], job)
    assert found["prompt"] == [{"role": "user", "content": "a\nb"}]
    assert found["completion"] == [{"role": "assistant", "content": "c"}]


def test_a_data_frame_is_a_dataset():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"prompt": ["a", "b"], "completion": ["c", "d"], "score": [1.5, None]})
    rows = load_rows(frame)
    assert rows == [{"prompt": "a", "completion": "c", "score": 1.5}, {"prompt": "b", "completion": "d", "score": None}]
    assert load_rows(pandas.DataFrame({"messages": [MESSAGES, MESSAGES]})) == [{"messages": MESSAGES}] * 2
    sft = SFT(model=llama(vocab_size=60), tokenizer=hugging_face(), batch_size=2, num_steps=1)
    assert len(sft.train(frame, progress=False).steps) == 1


def test_unusual_roles_are_a_warning():
    rows = [{"messages": [{"role": "usr", "content": "ab"}, MESSAGES[1]]}, {"messages": MESSAGES}]
    sft = SFT(model=llama(vocab_size=60, max_length=256), tokenizer=hugging_face(template=CHAT))
    with pytest.warns(UserWarning, match=r"dataset: the unusual role 'usr' \(did you mean 'user'\?\) in 1 message$"):
        sft.prepared(rows)


CHAT = "{% for m in messages %}{{ m['role'][0] + m['content'] + '<eos>' }}{% endfor %}{% if add_generation_prompt %}{{ 'a' }}{% endif %}"


def test_pairs_without_a_difference_are_a_warning():
    rows = [{"prompt": "a", "chosen": "b", "rejected": "b"}] * 2 + [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    dpo = DPO(model=llama(vocab_size=60), tokenizer=hugging_face())
    with pytest.warns(UserWarning, match="dataset: 2 pairs have the same completion as chosen and as rejected"):
        dpo.prepared(rows)


def test_data_check_lists_odd_rows_and_keys_that_stand_twice(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "b"}] * 5)
    path.write_text(path.read_text() + '{"prompt": "a", "prompt": "b", "chosen": "c", "rejected": "d"}\n')
    done = CliRunner().invoke(app, ["check", str(path)])
    assert done.exit_code == 1
    assert "chosen and rejected are the same: line 1, line 2, line 3 and 2 more" in " ".join(done.output.split())
    assert "line 6: the key 'prompt' must stand once in an object, found it twice" in " ".join(done.output.split())
    write(path, [{"messages": [{"role": "usr", "content": "ab"}, MESSAGES[1]]}])
    done = CliRunner().invoke(app, ["check", str(path)])
    assert "the unusual role 'usr' (did you mean 'user'?): line 1" in done.output
    write(path, [SHARED])
    done = CliRunner().invoke(app, ["check", str(path)])
    assert done.exit_code == 0
    assert "language_modeling" in done.output
