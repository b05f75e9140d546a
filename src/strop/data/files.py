"""Files of rows: JSONL, JSON arrays, CSV, TSV, Parquet; standard input. Errors name the broken line."""

import codecs
import csv
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from strop._checks import printable
from strop._install import missing
from strop._types import Json

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")


class RepeatedKeyError(ValueError):
    """A JSON object has a key twice."""


def read_file(path: str | os.PathLike[str]) -> Sequence[Json]:
    """Return the rows of a file. Its suffix gives the format, else it is JSONL; "-" is JSONL on standard input."""
    suffix = Path(path).suffix.lower()
    if str(path) == "-":
        return list(_jsonl(sys.stdin.buffer, "standard input"))
    if suffix == ".parquet":
        return read_parquet(path)
    if suffix in (".csv", ".tsv"):
        return list(read_csv(path, "\t" if suffix == ".tsv" else ","))
    if suffix == ".json" and _is_array(path):
        return read_array(path)
    return list(read_jsonl(path))


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[Json]:
    """Yield one object per line; skip empty lines. An error names the broken line."""
    with open(path, "rb") as file:
        yield from _jsonl(file, path)


def _jsonl(lines: Iterable[bytes], path: object) -> Iterator[Json]:
    for number, line in enumerate(lines, 1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if line.strip():
            yield jsonl_row(line, f"{path}, line {number}")


def jsonl_row(line: bytes, where: str) -> Json:
    row = _parse(line.strip(), where, of_line=True)
    return row if type(row) is dict else _row_of(row, f"{where}:")


def checked_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, Json | ValueError]]:
    """Yield the number of every line of a JSONL file with its row or its error."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            data = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if data.strip():
                try:
                    yield number, jsonl_row(data, f"line {number}")
                except ValueError as error:
                    yield number, error


def _object_of(pairs: list[tuple[str, object]]) -> Json:
    """Return the dict of a JSON object; raise if it has a key twice, of which only the last would be kept."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise RepeatedKeyError(f"the key {one_line(repr(repeated))} must stand once in an object, found it twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object_of)


def _parse(data: bytes, where: str, *, of_line: bool = False) -> Any:
    """Return the parsed JSON of a line or of a whole file."""
    try:
        text = data.decode()
        found = _decoded_line(text) if of_line else _DECODER.decode(text)
        if b"\\u" in data and b"\\ud" in data.lower():
            json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair is JSON, but cannot be tokenised
    except UnicodeError as error:
        raise ValueError(f"{where} must be UTF-8 text: {error}") from None
    except json.JSONDecodeError as error:
        start = text.rfind("\n", 0, error.pos) + 1
        shown = one_line(text[start : start + 60]) + ("…" if len(text) > start + 60 else "")
        line = "" if of_line else f", line {error.lineno}"
        raise ValueError(f"{where}{line}: not JSON ({error.msg} at column {error.colno}): {shown}") from None
    except RepeatedKeyError as error:
        raise ValueError(f"{where}: {error}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or brackets without end
        raise ValueError(f"{where}: not JSON that can be read: {error}") from None
    return found


def _decoded_line(text: str) -> Any:
    """Return the parsed JSON of a text without outer spaces. For short texts this takes half the time of `decode`."""
    found, end = _DECODER.raw_decode(text)
    if end != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return found


def _row_of(row: object, where: str) -> Json:
    if not isinstance(row, dict):
        hint = "; a JSON array belongs into a file whose name ends in .json" if isinstance(row, list) else ""
        raise ValueError(f"{where} must be an object of columns, found {type(row).__name__}{hint}")
    return row


def _is_array(path: str | os.PathLike[str]) -> bool:
    with open(path, "rb") as file:
        return file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def read_array(path: str | os.PathLike[str]) -> list[Json]:
    """Return the objects of a file that is one JSON array."""
    found = _parse(Path(path).read_bytes().removeprefix(codecs.BOM_UTF8), str(path))
    return [_row_of(row, f"{path}, entry {i}") for i, row in enumerate(found)]


def read_csv(path: str | os.PathLike[str], delimiter: str = ",") -> Iterator[Json]:
    """Yield the rows of a CSV file. The first line names the columns; every value is a string, possibly empty."""
    try:
        text = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeError as error:
        raise ValueError(f"{path} must be UTF-8 text: {error}") from None
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        names = next(lines, [])
        if len(set(names)) < len(names) or not all(names):
            raise ValueError(f"{path}, line 1 must name each column once, found {', '.join(map(repr, names)):.200}")
        for values in lines:
            if values and len(values) != len(names):
                raise ValueError(f"{path}, line {lines.line_num} must have {len(names)} values, found {len(values)}")
            if values:
                yield dict(zip(names, values, strict=True))
    except csv.Error as error:
        raise ValueError(f"{path}, line {lines.line_num}: not CSV: {error}") from None


def read_parquet(path: str | os.PathLike[str]) -> Any:
    """Return a Dataset, which stays on the disk and is read on access."""
    try:
        return datasets_package().Dataset.from_parquet(str(path))
    except ImportError:
        raise
    except Exception as error:  # of pyarrow or datasets, of many kinds
        cause = error.__cause__ or error
        why = " ".join(str(cause).split())
        raise ValueError(f"{path} must be a Parquet file that can be read: {why:.200}") from None


def datasets_package() -> ModuleType:
    try:
        import datasets
    except ImportError:
        raise missing("this source", "the package datasets", "train") from None
    return datasets


def one_line(text: str) -> str:
    """Return the text for use in an error: printable, and without line breaks."""
    return printable(text).replace("\n", "\\n")
