"""The compiled pass over a file's rows finds what Python finds: facts, columns in order, and the same error."""

import json
import random

import pytest

from strop import _compiled
from strop.data.files import jsonl_row
from strop.data.formats import _is_usual, load_rows
from strop.data.streams import CONTENT, NOT_PLAIN, ROLES, read_lines

scan_rows = getattr(_compiled.native, "scan_rows", None)
pytestmark = pytest.mark.skipif(scan_rows is None, reason="the compiled module is not built, or too old")


def kinds_of(data):
    begins, kinds, columns = scan_rows(data, 0, CONTENT, ROLES)
    return list(memoryview(begins).cast("Q")), list(kinds), columns


def is_usual(line):
    """Return whether Python reads the line and finds it usual."""
    try:
        row = jsonl_row(line, "line")
    except ValueError:
        return False
    return _is_usual(row, [name for name in row if name in CONTENT])


PLAIN = [
    b'{"text": "a"}',
    b'\t{ "text" :"a" , "n":[1,-2.5e+3,0.5E2,true,false,null,{},[],{"a":{"b":[[]]}}]\t}  \r',
    '{"text": "ä€𝄞"}'.encode(),
    rb'{"text": "\u00e4\ud834\udd1e\n\/\"\\\\"}',
    b'{"prompt": "a", "completion": ""}',
    b'{"prompt": "a", "chosen": "b", "rejected": "c"}',
    rb'{"prompt": "a", "chosen": "b\n", "rejected": "b\t"}',
    rb'{"prompt": "a", "chosen": "b", "rejected": "b\n"}',
    '{"prompt": "a", "chosen": "bä", "rejected": "bö"}'.encode(),
    b'{"messages": [{"role": "user", "content": "a"}, {"content": null, "role": "assistant", "tool_calls": [{"n": 1}]}]}',
    b'{"chosen": [{"role":"user","content":"a"}], "rejected": [{"role":"user","content":"b"}], "score": 12345678901234567890}',
]
NOT_PLAINS = [
    b"{}", b"[]", b'"text"', b"null", b'{"text": 1}', b'{"text": null}', b'{"text": "a"', b'{"text": "a"}}', b'{"text": "a"} x',
    b'{"text": "a",}', b"{'text': 'a'}", b'{"text": "a", "text": "b"}', b'{"text": "a", "o": {"k": 1, "k": 2}}',
    rb'{"te\u0078t": "a"}', b'{"text": "a\tb"}', b'{"text": "\x00"}', b'{"text": "\xff"}', b'{"text": "\xc0\xaf"}',
    b'{"text": "\xed\xa0\x80"}', b'{"text": "\xf4\x90\x80\x80"}', b'{"text": "\xe2\x82"}', rb'{"text": "\ud834"}', rb'{"text": "\udd1e"}',
    rb'{"text": "\ud834\u0041"}', rb'{"text": "\x41"}', rb'{"text": "\u12g4"}', b'{"text": "a", "n": 01}', b'{"text": "a", "n": 1.}',
    b'{"text": "a", "n": NaN}', b'{"text": "a", "n": -}', b'{"text": "a", "n": +1}', b'{"text": "a", "n": .5}', b'{"text": "a", "n": 1e}',
    b'{"text": "a", "n": tru}', b'{"text": "a", "n": ' + b"1" * 5000 + b"}", b'{"text": "a", "n": ' + b"[" * 99999 + b"}",
    b'{"messages": []}', b'{"messages": ["a"]}', b'{"messages": [{"role": "usr", "content": "a"}]}',
    b'{"messages": [{"role": "user"}]}', b'{"messages": [{"content": "a"}]}', b'{"prompt": "a", "completion": [{"role": "user", "content": "a"}]}',
    b'{"prompt": "a", "chosen": "b", "rejected": "b"}', rb'{"prompt": "a", "chosen": "b/", "rejected": "b\/"}',
    rb'{"prompt": "a", "chosen": "\u0041", "rejected": "A"}', rb'{"prompt": "a", "chosen": "\u00E4", "rejected": "\u00e4"}',
    '{"prompt": "a", "chosen": "ä", "rejected": "\\u00e4"}'.encode(), b'{"prompt": [1, 2]}', b"\xc2\xa0", b'\x0c{"text": "a"}',
    b'{"chosen": [{"role":"user","content":"a"}], "rejected": [{"content":"a","role":"user"}]}',
]  # fmt: skip


@pytest.mark.parametrize("line", PLAIN)
def test_a_plain_row_is_found_plain(line):
    assert is_usual(line)
    assert kinds_of(line) == ([0], [0], [tuple(json.loads(line))])


@pytest.mark.parametrize("line", NOT_PLAINS, ids=[str(i) for i in range(len(NOT_PLAINS))])
def test_a_row_that_is_not_plain_is_left_to_python(line):
    assert kinds_of(line)[1] == [NOT_PLAIN]


def outcome(path):
    """Return all that a pass over the rows finds, or its error."""
    try:
        rows = load_rows(path)
    except (ValueError, TypeError) as error:
        return type(error), str(error)
    facts = rows.facts
    return facts, list(facts.column_counts), list(facts.odd_roles), len(rows), [rows[i] for i in range(0, len(rows), 7)]


def same_both_ways(path, monkeypatch):
    compiled = outcome(path)
    with monkeypatch.context() as patched:
        patched.setattr(_compiled, "native", None)
        assert outcome(path) == compiled
    return compiled


@pytest.mark.parametrize("line", [*PLAIN, *NOT_PLAINS], ids=[str(i) for i in range(len(PLAIN) + len(NOT_PLAINS))])
def test_the_answer_is_the_one_without_compiled_code(tmp_path, monkeypatch, line):
    around = b'{"prompt": "x", "chosen": "y", "rejected": "z"}\n' if b"chosen" in line else b'{"text": "x"}\n'
    for name, data in {"alone": line, "later": around + b"\n \r\x0b\n" + around + line + b"\n" + around}.items():
        (path := tmp_path / f"{name}.jsonl").write_bytes(b"\xef\xbb\xbf" + data)
        same_both_ways(path, monkeypatch)


def damaged(draw, line):
    """Return the line with a few bytes changed, cut or repeated."""
    data = bytearray(line)
    for _ in range(draw.randint(0, 3)):
        at = draw.randrange(len(data) + 1)
        piece = draw.choice(
            [
                b"",
                b'"',
                b"\\",
                b"{",
                b"}",
                b"[",
                b",",
                b":",
                b"\x80",
                b"\xf0",
                b"0",
                b"e",
                b"\\u",
                b" ",
                b"\r",
                b"\x0b",
                b"null",
                data[:9],
            ]
        )
        data[at : at + draw.randint(0, 2)] = piece
    return bytes(data).replace(b"\n", b" ")


@pytest.mark.parametrize("seed", range(20))
def test_damaged_rows_are_never_taken_for_plain(seed):
    draw = random.Random(seed)
    lines = [damaged(draw, draw.choice(3 * PLAIN + NOT_PLAINS[:-20])) for _ in range(500)]
    begins, kinds, columns = kinds_of(b"\n".join(lines))
    places = [sum(len(line) + 1 for line in lines[:i]) for i, line in enumerate(lines) if not line.isspace() and line]
    assert begins == places
    read = [line for line in lines if line and not line.isspace()]
    assert sum(kind != NOT_PLAIN for kind in kinds) > 50
    for line, kind in zip(read, kinds, strict=True):
        if kind != NOT_PLAIN:
            assert is_usual(line), line
            assert columns[kind] == tuple(jsonl_row(line, ""))


def random_row(draw):
    text = "".join(draw.choices('ab"\\\n\t/ä€𝄞', k=draw.randint(0, 9)))
    messages = [{"role": draw.choice([*ROLES[:3], "usr"]), "content": text}] * draw.randint(1, 2)
    row = draw.choice([{"text": text}, {"messages": messages}, {"text": text, "n": 1.5}, {"id": 7, "text": text}])
    return json.dumps(row, ensure_ascii=draw.random() < 0.5).encode()


@pytest.mark.parametrize("seed", range(10))
def test_many_files_of_random_rows(tmp_path, monkeypatch, seed):
    """Some with one broken row, which both ways name; in one and in two files."""
    draw = random.Random(seed)
    lines = [random_row(draw) for _ in range(300)]
    if seed % 2:
        lines[draw.randrange(300)] = damaged(draw, draw.choice(NOT_PLAINS))
    one, other = tmp_path / "rows.jsonl", tmp_path / "other.jsonl"
    one.write_bytes(b"\n".join(lines[:200]))
    other.write_bytes(b"\n".join(lines[200:]))
    same_both_ways(one, monkeypatch)
    same_both_ways([one, other], monkeypatch)


def test_the_parts_of_a_large_file_are_joined(tmp_path, monkeypatch):
    """Three parts of 4 MiB, with other columns in each, and a row that is longer than a part."""
    parts = [b'{"text": "%b"}\n', b'{"text": "%b", "n": 1}\n', b'{"m": 2, "text": "%b"}\n']
    data = b"".join(part % (b"a" * 80) * 50_000 for part in parts) + b'{"text": "' + b"b" * 5_000_000 + b'"}'
    (path := tmp_path / "rows.jsonl").write_bytes(data)
    facts, columns, *_ = same_both_ways(path, monkeypatch)
    assert facts.column_counts == {"text": 150_001, "n": 50_000, "m": 50_000}
    assert columns == ["text", "n", "m"]
    assert sum(kind == NOT_PLAIN for kind in read_lines(path, on_disk=False).plain[0].kinds_R) == 0


def test_rows_of_more_sets_of_columns_than_a_byte_counts(tmp_path, monkeypatch):
    (path := tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "a", "c{i % 300}": 1}}\n' for i in range(900)))
    facts, columns, *_ = same_both_ways(path, monkeypatch)
    assert facts.column_counts["c299"] == 3
    assert columns == ["text", *(f"c{i}" for i in range(300))]


def test_a_part_of_the_rows_is_checked_alone(tmp_path, monkeypatch):
    (path := tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 5 + '{"prompt": "a"}\n')
    assert load_rows(path, limit=5).facts.column_counts == {"text": 5}
    with pytest.raises(ValueError, match=r"rows\[5\] is prompt_only"):
        load_rows(path, limit=6)
