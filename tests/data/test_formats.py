"""Where rows come from, which format they are in, and what is said where they are in none."""

import io
import json
import re

import pytest

from strop.data.files import read_jsonl
from strop.data.formats import check_rows, detect_format, load_rows, prepared, read_rows, with_prompt
from strop.data.streams import Streamed

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
ROWS = [{"prompt": "1+1=", "completion": "2", "level": 1}, {"prompt": "1+2=", "completion": "3", "level": 2}]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"text": "a"}, "language_modeling"),
        ({"messages": [USER, ANSWER]}, "language_modeling"),
        ({"prompt": "a"}, "prompt_only"),
        ({"prompt": [USER], "answer": 3}, "prompt_only"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
        ({"prompt": "a", "completion": "", "text": None}, "prompt_completion"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference"),
        ({"chosen": "ab", "rejected": "ac"}, "preference"),
    ],
)
def test_detection(row, name):
    assert detect_format(row) == name


def test_an_unknown_format_names_the_columns_and_the_formats():
    expected = (
        r'rows\[0\] is in no known format: found the columns question, answer\. Formats: language_modeling \{"text"\}'
    )
    with pytest.raises(ValueError, match=expected):
        load_rows([{"question": "1+1", "answer": "2"}])


def test_lists_are_copied_and_keep_their_columns():
    rows = load_rows(ROWS)
    assert rows == ROWS
    rows[0]["prompt"] = "changed"
    assert ROWS[0]["prompt"] == "1+1="
    assert load_rows(ROWS, limit=1) == ROWS[:1]


def test_jsonl_files_patterns_folders(tmp_path):
    first, second = write(tmp_path / "train.jsonl", ROWS), write(tmp_path / "test.jsonl", ROWS[:1])
    assert load_rows(first) == load_rows(str(first)) == ROWS
    assert load_rows([first, second]) == ROWS + ROWS[:1]
    assert load_rows(str(tmp_path / "t*.jsonl")) == ROWS[:1] + ROWS
    assert load_rows(tmp_path) == ROWS
    assert load_rows(tmp_path, split="test") == ROWS[:1]
    with pytest.raises(
        FileNotFoundError,
        match=r"must hold validation\.jsonl \(or \.csv, .* or a saved dataset, found test.jsonl, train.jsonl",
    ):
        load_rows(tmp_path, split="validation")


def test_empty_lines_and_a_byte_order_mark_are_passed_over(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('\ufeff{"text": "ä"}\n\n  \n{"text": "b"}', encoding="utf-8")
    assert list(read_jsonl(path)) == [{"text": "ä"}, {"text": "b"}]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (
            '{"text": "a"}\n{"text": "b"\n',
            r"rows\.jsonl, line 2: not JSON \(Expecting ',' delimiter at column 13\): \{\"text\": \"b\"$",
        ),
        ('{"text": "a"}\n\n7\n', r"rows\.jsonl, line 3: must be an object of columns, found int"),
        (
            '[{"text": "a"}]\n',
            r"line 1: must be an object of columns, found list; a JSON array belongs into a file whose name ends in .json",
        ),
        ("", r"rows\.jsonl must hold at least one row"),
        (
            '{"text": "a"}\n{"prompt": "b"}\n',
            r"rows\.jsonl: rows\[1\] is prompt_only, the rows before it language_modeling",
        ),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, content, match):
    path = tmp_path / "rows.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=match):
        load_rows(path)


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("rows.json", '\ufeff [\n{"text": "ä"},\n {"text": "b"}]', [{"text": "ä"}, {"text": "b"}]),
        ("rows.json", '{"text": "a"}\n{"text": "b"}\n', [{"text": "a"}, {"text": "b"}]),
        ("rows.csv", '\ufeffprompt,answer\r\n"1, 2\n3",6\r\n\r\n"say ""a""",\r\n',
         [{"prompt": "1, 2\n3", "answer": "6"}, {"prompt": 'say "a"', "answer": ""}]),
        ("rows.TSV", "prompt\tanswer\na b\tc,d\n", [{"prompt": "a b", "answer": "c,d"}]),
    ],
)  # fmt: skip
def test_files_by_their_endings(name, content, rows, tmp_path):
    (tmp_path / name).write_bytes(content.encode())
    assert load_rows(tmp_path / name) == rows


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("rows.json", b'[{"text": "a"},\n {"text" 1}]', r"rows\.json, line 2: not JSON \(.* at column 10\):  \{\"text\" 1\}\]$"),
        ("rows.json", b'[{"text": "a"}, 7]', r"rows\.json, entry 1 must be an object of columns, found int"),
        ("rows.json", b'[{"text": "\xff"}]', r"rows\.json must be UTF-8 text"),
        ("rows.json", b"[" * 100_000, r"rows\.json: not JSON that can be read"),
        ("rows.csv", b"prompt,answer\na,b\na\n", r"rows\.csv, line 3 must have 2 values, found 1"),
        ("rows.csv", b"prompt,prompt\na,b\n", r"rows\.csv, line 1 must name each column once, found 'prompt', 'prompt'"),
        ("rows.csv", b'prompt\n"a', r"rows\.csv, line 2: not CSV: unexpected end of data"),
        ("rows.csv", b"\xff", r"rows\.csv must be UTF-8 text"),
        ("rows.csv", b"", r"rows\.csv must hold at least one row"),
        ("rows.parquet", b"PAR1 nothing", r"rows\.parquet must be a Parquet file that can be read"),
    ],
)  # fmt: skip
def test_a_broken_file_of_another_kind(name, content, match, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=match):
        load_rows(tmp_path / name)


def test_standard_input(monkeypatch):
    lines = b'{"text": "a"}\n{"text": "b"}\n'
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines)))
    assert load_rows("-") == [{"text": "a"}, {"text": "b"}]


def test_rows_of_any_columns():
    assert read_rows([{"question": "a"}], limit=1) == [{"question": "a"}]


def test_bytes_that_are_not_utf8_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1 must be UTF-8 text"):
        load_rows(path)


@pytest.mark.parametrize(
    ("row", "error", "match"),
    [
        ({"prompt": [USER], "completion": "x"}, ValueError, "prompt is messages but completion is text"),
        ({"prompt": "x", "chosen": "a", "rejected": [ANSWER]}, ValueError, "chosen is text but rejected is messages"),
        ({"prompt": [{"role": "user"}]}, ValueError, r"rows\[0\]\['prompt'\]\[0\] must be a message"),
        ({"prompt": 3}, TypeError, r"rows\[0\]\['prompt'\] must be a text, a list of messages or token ids, found int"),
        ({"prompt": "x", "chosen": "a"}, ValueError, r"rows\[0\] has 'chosen' without its counterpart"),
    ],
)
def test_contents_are_checked(row, error, match):
    with pytest.raises(error, match=match):
        load_rows([row])


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([{"prompt": None}], r"^rows\[0\]\['prompt'\] must be a text, a list of messages or token ids, found null$"),
        ([{"prompt": None, "answer": 3}], r"^rows\[0\]\['prompt'\] must be .*, found null$"),
        ([{"text": None, "messages": None}], r"^rows\[0\]\['text'\] must be .*, found null$"),
        ([{"chosen": "a", "rejected": None}], r"^rows\[0\]\['rejected'\] must be .*, found null$"),
        ([{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}],
         r"^rows\[1\] is prompt_only, the rows before it prompt_completion; found the columns prompt, completion \(null\)$"),
        ([{"prompt": "a"}, {"prompt": None}], r"^rows\[1\]\['prompt'\] must be .*, found null$"),
    ],
)  # fmt: skip
def test_null_values_are_named_as_the_cause(rows, match):
    with pytest.raises((TypeError, ValueError), match=match):
        load_rows(rows)


def test_null_beside_a_whole_format_is_no_column():
    """As datasets fills the columns that some rows lack."""
    assert check_rows([{"prompt": "a", "completion": None}, {"prompt": "b"}]) == "prompt_only"
    assert check_rows([{"text": None, "messages": [{"role": "user", "content": "a"}]}]) == "language_modeling"


def test_invalid_sources_are_refused():
    with pytest.raises(TypeError, match=r"rows\[1\] must be a dict of columns, found str"):
        load_rows([{"text": "a"}, "b"])
    with pytest.raises(TypeError, match="data must be a list of dicts, a path, a task's name or a Dataset, found int"):
        load_rows(7)
    with pytest.raises(FileNotFoundError, match=r"no such file: nowhere/rows\.jsonl"):
        load_rows("nowhere/rows.jsonl")
    with pytest.raises(FileNotFoundError, match=r"no file matches nowhere/\*\.jsonl"):
        load_rows("nowhere/*.jsonl")
    with pytest.raises(ValueError, match="split must be one of 'train', 'test', found 'tset'; did you mean 'test'"):
        load_rows({"train": ROWS, "test": ROWS}, split="tset")


def test_tasks_by_name():
    rows = load_rows("addition", limit=3)
    assert load_rows("task:addition", limit=3) == rows
    assert all(eval(row["prompt"].rstrip("=")) == int(row["answer"]) for row in rows)
    assert {r["prompt"] for r in load_rows("addition", split="test", limit=50)}.isdisjoint(
        r["prompt"] for r in load_rows("addition", limit=500)
    )
    with pytest.raises(ValueError, match="called 'adition'; did you mean 'addition'"):
        load_rows("adition")


def test_what_an_algorithm_wants():
    assert check_rows([{"prompt": "a"}], ["prompt_only"]) == "prompt_only"
    assert check_rows(ROWS, ["prompt_only"]) == "prompt_only"  # the completion is an extra column
    with pytest.raises(ValueError, match=r"DPO needs preference .* is prompt_only: found the columns prompt"):
        check_rows([{"prompt": "a"}], ["preference"], what="DPO")


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        ([USER, ANSWER], [USER, USER], ([USER], [ANSWER], [USER])),
        ("1+1= 2", "1+1= 3", ("1+1=", " 2", " 3")),
        ("abc", "abd", ("ab", "c", "d")),
        ("ab", "abd", ("ab", "", "d")),
    ],
)
def test_an_implicit_prompt_is_the_common_start(chosen, rejected, expected):
    row = with_prompt({"chosen": chosen, "rejected": rejected, "id": 7})
    assert (row["prompt"], row["chosen"], row["rejected"]) == expected
    assert row["id"] == 7


def test_an_explicit_prompt_stays():
    row = {"prompt": "x", "chosen": "ab", "rejected": "ac"}
    assert with_prompt(row) == row


@pytest.mark.parametrize(
    ("a", "b", "match"), [("x", "y", "begin alike"), ("x", "x", "must differ"), ([USER], [ANSWER], "begin alike")]
)
def test_no_prompt_to_be_found(a, b, match):
    with pytest.raises(ValueError, match=match):
        with_prompt({"chosen": a, "rejected": b})


class TestDatasets:
    @pytest.fixture
    def datasets(self):
        return pytest.importorskip("datasets")

    def test_a_dataset_is_used_as_it_is(self, datasets):
        dataset = datasets.Dataset.from_list(ROWS)
        rows = load_rows(dataset)
        assert [dict(row) for row in rows] == ROWS
        assert list(load_rows(dataset, limit=1)) == ROWS[:1]

    def test_splits_and_saved_folders(self, datasets, tmp_path):
        both = datasets.DatasetDict(
            {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
        )
        assert list(load_rows(both, split="test")) == ROWS[:1]
        both.save_to_disk(tmp_path / "saved")
        assert list(load_rows(tmp_path / "saved", split="test")) == ROWS[:1]
        both["train"].save_to_disk(tmp_path / "one")
        assert list(load_rows(tmp_path / "one")) == ROWS

    def test_parquet(self, datasets, tmp_path, tmp_path_factory, monkeypatch):
        cache = tmp_path_factory.mktemp("cache")  # datasets wants one, and there may be no home to write to
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
        datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "train.parquet"))
        assert [dict(row) for row in load_rows(tmp_path / "train.parquet")] == ROWS
        assert [dict(row) for row in load_rows(tmp_path)] == ROWS

    def test_a_config_of_the_hub(self, datasets, monkeypatch):
        asked = []

        def load_dataset(*arguments, **options):
            asked.append((arguments, options))
            return datasets.Dataset.from_list(ROWS)

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        assert len(load_rows("openai/gsm8k:main", split="test")) == len(ROWS)
        assert len(load_rows("owner/name")) == len(ROWS)
        assert asked == [(("openai/gsm8k", "main"), {"split": "test"}), (("owner/name", None), {"split": "train"})]

    def test_a_stream_is_an_error(self, datasets):
        with pytest.raises(TypeError, match="found a streaming dataset"):
            load_rows(datasets.Dataset.from_list(ROWS).to_iterable_dataset())


# ---- streamed ----


def test_streamed_rows_are_those_in_memory(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    lines = [json.dumps({"prompt": f"{i}é", "completion": str(i)}) for i in range(5)]
    first.write_text("\ufeff" + "\n\n".join(lines[:3]) + "\n  \n", encoding="utf-8")
    second.write_text("\n".join(lines[3:]), encoding="utf-8")  # the last line has no end
    for source in (first, [first, second], str(tmp_path / "*.jsonl")):
        rows, kept = load_rows(source, stream=True), load_rows(source)
        assert isinstance(rows, Streamed)
        assert [*rows] == [rows[i] for i in range(len(rows))] == kept
        assert rows[-1] == kept[-1]
        assert [*rows[1:][::-1]] == kept[1:][::-1]
        assert [*load_rows(source, stream=True, limit=2)] == kept[:2]
        assert load_rows(rows) is rows
        with pytest.raises(IndexError):
            rows[len(kept)]


def test_streamed_rows_are_checked_as_they_are_read(tmp_path):
    (path := tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": 3}\n{"text":\n')
    rows = load_rows(path, stream=True)
    read = prepared(rows, lambda rows, name: [check_rows(rows, where=name) for _ in rows], "dataset")
    assert prepared(read, None, "dataset") is read
    assert (len(read), read[0]) == (3, "language_modeling")
    with pytest.raises(TypeError, match=re.escape("dataset: rows[1]['text'] must be a text")):
        read[1]
    with pytest.raises(ValueError, match=r"a\.jsonl, row 2: not JSON"):
        read[2]
    with path.open("a") as file:
        file.write("\n")
    with pytest.raises(ValueError, match="must stay as it is while it is streamed"):
        read[0]


@pytest.mark.parametrize("source", ["a.csv", "-", "sorting", [{"text": "a"}]])
def test_sources_that_cannot_be_streamed(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("text\na\n")
    with pytest.raises(ValueError, match=r"stream needs \.jsonl files, one \.parquet file or a Dataset, found"):
        load_rows(source, stream=True)


def test_a_streamed_dataset_is_read_row_by_row(tmp_path):
    datasets = pytest.importorskip("datasets")
    found = load_rows(datasets.Dataset.from_list(ROWS), stream=True)
    assert isinstance(found, Streamed)
    assert [*found] == ROWS
