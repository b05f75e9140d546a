"""Large datasets: checked in one pass, prepared in a thread ahead of the steps, with the numbers of small ones."""

import json
import threading

import pytest
import torch
from tiny_models import llama
from tiny_tokenizers import Letters, hugging_face
from trained_models import weights_of

from strop import GRPO, KTO, SFT
from strop.data import ahead, formats
from strop.data.ahead import PreparedAhead
from strop.data.formats import Prepared, load_rows
from strop.data.one_rendering import marked_template
from strop.data.streams import Streamed
from strop.data.templates import pieces

WORDS = ["ab", "cab", "dad", "abcd", "bad cab"]


def chats(count):
    return [
        {
            "messages": [
                {"role": "user", "content": WORDS[i % 5]},
                {"role": "assistant", "content": f"{i} {WORDS[i % 3]}"},
            ]
        }
        for i in range(count)
    ]


@pytest.fixture
def written(tmp_path):
    def write(rows):
        (path := tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def large(monkeypatch):
    """Datasets of more than 3 rows count as large, and are prepared in parts of 4."""
    monkeypatch.setattr(formats, "MOST_AT_ONCE", 3)
    monkeypatch.setattr(ahead, "PART", 4)


def trained(rows, tokenizer=None, **options):
    sft = SFT(
        model=llama(vocab_size=60, max_length=256), tokenizer=tokenizer or hugging_face(), batch_size=3, num_steps=9,
        learning_rate=1e-2, **options,
    )  # fmt: skip
    return sft, sft.train(rows, progress=False)


def test_a_run_is_the_same_whenever_its_rows_are_prepared(monkeypatch, written):
    path = written(chats(11))
    runs = [trained(path)]
    for part in (1, 4, 100):
        monkeypatch.setattr(formats, "MOST_AT_ONCE", 3)
        monkeypatch.setattr(ahead, "PART", part)
        runs += [trained(path), trained(chats(11)), trained(load_rows(path, stream=True))]
    for sft, history in runs:
        assert history.values("loss") == runs[0][1].values("loss")
        assert torch.equal(weights_of(sft), weights_of(runs[0][0]))


def test_rows_of_the_next_steps_are_prepared_in_a_thread(large):
    threads = []

    def prepare(rows, name):
        threads.append(threading.current_thread().name)
        return [f"prepared {row}" for row in rows]

    rows = PreparedAhead(list(range(20)), prepare, "dataset", with_thread=True)
    assert rows.take([3, 1], [5, 6, 7, 8, 9]) == ["prepared 3", "prepared 1"]
    assert rows.take([5, 6], [7, 8, 9, 10, 11]) == ["prepared 5", "prepared 6"]
    assert rows[7] == "prepared 7"
    assert threads[:2] == ["MainThread", "strop-data_0"]  # rows 5 to 8 were prepared together
    assert list(rows) == [f"prepared {i}" for i in range(20)]
    assert rows[2:4] == ["prepared 2", "prepared 3"]


def test_a_tokenizer_that_may_not_be_shared_is_used_by_one_thread(large):
    sft = SFT(model=llama(vocab_size=130), tokenizer=Letters(), batch_size=2, num_steps=3)
    rows = sft.prepared([{"text": "abcd"}] * 9)
    assert isinstance(rows, PreparedAhead)
    assert not rows.with_thread
    assert len(sft.train(rows, progress=False).steps) == 3


def test_a_row_that_cannot_be_encoded_is_named_when_its_step_comes(large, written):
    rows = chats(10)
    rows[7] = {"messages": [{"role": "user", "content": "a"}]}  # nobody answers
    path = written(rows)
    options = {"model": llama(vocab_size=60, max_length=256), "tokenizer": hugging_face(), "shuffle": False}
    sft = SFT(**options, batch_size=3, num_steps=4)
    with pytest.raises(ValueError, match=r"dataset\[7\]: messages must have a turn of the assistant.*\(line 8\)"):
        sft.train(path, progress=False)
    assert sft.state.step == 2


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ('{"messages": [{"role": "user"}]}', r"rows\[5\].*must be a message .*\(line 6\)"),
        ('{"text": "a"}\n{"text": 3}', r"rows\[5\] .*has 'text'|rows\[6\]\['text'\] must be a text.*\(line 7\)"),
        ('{"messages": }', "line 6: not JSON"),
        ('{"text": "a", "text": "b"}', "line 6: the key 'text' must stand once in an object, found it twice"),
        ('{"messages": [{"role": "user", "role": "assistant", "content": "a"}]}', "line 6: the key 'role' must stand once"),
        ('{"prompt": "a"}', r"rows\[5\] is prompt_only, the rows before it language_modeling.*\(line 6\)"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_by_its_line_before_the_first_step(large, written, bad, says):
    path = written(chats(5))
    path.write_text((path.read_text() if "text" not in bad[:8] else '{"text": "a"}\n' * 5) + bad + "\n")
    sft = SFT(model=llama(vocab_size=60), tokenizer=hugging_face(), batch_size=2, num_steps=1, shuffle=False)
    with pytest.raises((ValueError, TypeError), match=says):
        sft.train(path, progress=False)
    assert sft.state.step == 0


def test_columns_that_rewards_ask_for_are_checked_before_the_first_step(large):
    rows = [{"prompt": "ab", "answer": "1"}] * 8 + [{"prompt": "ab"}]
    options = {"model": llama(vocab_size=60), "tokenizer": hugging_face(), "batch_size": 2, "max_new_tokens": 2}
    grpo = GRPO(**options, reward_fn=lambda completions, answer: [0.0] * len(completions))
    with pytest.raises(Exception, match=r"dataset\[8\] must have the column 'answer'"):
        grpo.train(rows, num_steps=1, progress=False)


def test_a_column_that_some_rows_lack_is_none_whichever_rows_share_a_part(large):
    rows = [{"prompt": "ab"}] * 4 + [{"prompt": "ab", "hint": "x"}]
    grpo = GRPO(
        model=llama(vocab_size=60), tokenizer=hugging_face(), batch_size=2, max_new_tokens=2,
        reward_fn=lambda completions, hint=None: [0.0] * len(completions),
    )  # fmt: skip
    found = grpo.prepared(rows)
    assert isinstance(found, PreparedAhead)
    assert found._row(0) == {"prompt": "ab", "hint": None}


def test_kto_checks_labels_and_takes_pairs_of_large_datasets(large, tmp_path):
    options = {"tokenizer": hugging_face(), "batch_size": 2, "num_steps": 2}
    kto = KTO(model=llama(vocab_size=60), **options)
    rows = [{"prompt": "ab", "completion": "cd", "label": True}] * 6 + [{"prompt": "ab", "completion": "cd"}]
    with pytest.raises(TypeError, match=r"dataset\[6\]: label must be true or false, found None"):
        kto.train(rows, progress=False)
    (file := tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    with pytest.raises(TypeError, match=r"dataset\[6\]: label must be true or false, found None \(line 13\)"):
        kto.train(file, progress=False)
    with pytest.raises(ValueError, match='KTO, with a column "label", true or false, needs prompt_completion'):
        kto.train([{"text": "ab"}] * 7, progress=False)
    pairs = [{"prompt": "ab", "chosen": "cd", "rejected": f"{i}"} for i in range(6)]
    found = kto.prepared(pairs)
    assert isinstance(found, PreparedAhead)
    assert [line.row["label"] for line in found] == [True, False] * 6
    single = [
        {"prompt": "ab", "completion": pair[name], "label": name == "chosen"} for pair in pairs for name in ("chosen", "rejected")
    ]  # fmt: skip
    for line, wanted in zip(found, kto.prepare(single), strict=True):
        assert torch.equal(line.ids_T, wanted.ids_T)
        assert torch.equal(line.loss_mask_T, wanted.loss_mask_T)


def test_small_datasets_are_prepared_before_the_first_step(written):
    sft = SFT(model=llama(vocab_size=60, max_length=256), tokenizer=hugging_face())
    assert isinstance(sft.prepared(written(chats(4))), Prepared)


def test_rows_of_a_file_are_kept_as_its_bytes(written):
    rows = load_rows(written(chats(7)))
    assert isinstance(rows, Streamed)
    assert not rows.on_disk
    assert rows == chats(7)
    assert rows != chats(6)
    assert rows[2:5] == chats(7)[2:5]
    assert rows.facts.format == "language_modeling"


# ---- one rendering of a conversation ----

ONE = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<eos>\n' }}{% endfor %}"
OPENS = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
FIRST = "{% if messages[0]['role'] != 'system' %}{{ '<|system|>a<eos>' }}{% endif %}"
STATE = "{% set ns = namespace(n=0) %}"


def rendering(template):
    return marked_template(hugging_face(template=template))


@pytest.mark.parametrize(
    "template",
    [
        ONE + OPENS,
        FIRST + ONE + OPENS,
        "{% for m in messages %}{% if loop.first %}{{ '<bos>' }}{% endif %}{{ m.role + m.content | trim }}{% endfor %}" + OPENS,
        STATE + "{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ '<|assistant|>' if m.role == 'assistant' else '' }}"
        "{{ ns.n }}{{ m.content }}{% endfor %}" + OPENS,
    ],
)  # fmt: skip
def test_one_rendering_cuts_as_several_do(monkeypatch, template):
    from strop.data import templates

    tokenizer = hugging_face(template=template)
    assert rendering(template) is not None
    conversation = [
        {"role": role, "content": text} for role, text in (
            ("system", "be <|assistant|> ab"), ("user", "hi<eos>\n<|assistant|>cd"), ("assistant", " cd "), ("user", "a"),
            ("assistant", ""), ("assistant", "<|assistant|>"), ("user", "?"),
        )
    ]  # fmt: skip
    for messages in (conversation, conversation[1:], conversation[:3]):
        for first in (0, 2, 3):
            found, several = [], []
            for out, single in ((found, True), (several, False)):
                if not single:
                    monkeypatch.setattr(templates, "marked_template", lambda tokenizer: None)
                try:
                    out += pieces(messages, first, tokenizer)
                except ValueError as error:
                    out.append(str(error))
            monkeypatch.undo()
            assert found == several


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% if not loop.last %}{{ ' ' }}{% endif %}{% endfor %}" + OPENS,
        "{% for m in messages %}{{ messages | length }}{{ m.content }}{% endfor %}" + OPENS,
        "{% for m in messages[1:] %}{{ m.content }}{% endfor %}" + OPENS,
        "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}" + OPENS,
        "{% set last = messages[-1] %}" + ONE + OPENS,
        "{% set all = messages %}" + ONE + OPENS,
        ONE + "{{ 'end' }}" + OPENS,
        ONE + "{% if add_generation_prompt and messages[0].role == 'user' %}{{ '<|assistant|>' }}{% endif %}",
        STATE + "{% for m in messages %}{% set ns.n = 1 %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}{{ ns.n }}{% endif %}",
        "{% if add_generation_prompt %}{{ 'a' }}{% endif %}" + ONE + OPENS,
        ONE + ONE,
        "{% for m in messages %}{{ loop.nextitem }}{% endfor %}" + OPENS,
    ],
)  # fmt: skip
def test_a_template_in_which_later_messages_change_earlier_text_is_rendered_several_times(template):
    assert rendering(template) is None
