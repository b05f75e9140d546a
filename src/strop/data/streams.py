"""Rows that stay on the disk: a row is read, checked and tokenised when a step asks for it.

A JSONL file is read once for where its lines begin, 8 bytes a row; a `datasets.Dataset` is on the disk already.
"""

import codecs
import os
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from strop.data.files import jsonl_row


class Streamed(Sequence[Any]):
    """So many rows, each made when it is asked for and then forgotten.

    files    what they are read from, where it is files
    digest   of the rows before they were prepared, once it is known
    """

    digest: str | None = None

    def __init__(self, num_rows: int, get: Callable[[int], Any], files: Sequence[str] = ()):
        self.num_rows, self.get, self.files = num_rows, get, files

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: Any) -> Any:
        part = range(self.num_rows)[index]
        return (
            type(self)(len(part), lambda i: self.get(part[i]), self.files)
            if isinstance(part, range)
            else self.get(part)
        )

    def mapped(self, change: Callable[[Any, int], Any]) -> "Streamed":
        """The same rows, changed as they are read."""
        return Streamed(self.num_rows, lambda i: change(self.get(i), i), self.files)


class PreparedStream(Streamed):
    """Rows that go through an algorithm's `prepare` as they are read; an error has the row's own number."""

    @classmethod
    def of(cls, rows: Streamed, prepare: Callable[[Sequence[Any], str], Sequence[Any]], name: str) -> "PreparedStream":
        def get(i: int) -> Any:
            try:
                return prepare([rows[i]], name)[0]
            except (ValueError, TypeError) as error:
                text = str(error).replace(f"{name}[0]", f"{name}[{i}]").replace("rows[0]", f"rows[{i}]")
                raise type(error)(text) from None

        return cls(len(rows), get)


def stream_jsonl(path: str | os.PathLike[str]) -> Streamed:
    """The rows of a JSONL file. Empty lines are passed over; a broken one is named when it is read."""
    begins = array("Q")
    with open(path, "rb") as file:
        at = len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0
        file.seek(at)
        for line in file:
            if not line.isspace():
                begins.append(at)
            at += len(line)
    size = at

    def get(i: int) -> Any:
        with open(path, "rb") as file:  # each time: a process that is forked must not share a position in the file
            if os.fstat(file.fileno()).st_size != size:
                raise ValueError(f"{path} must stay as it is while it is streamed, found that it has changed")
            file.seek(begins[i])
            return jsonl_row(file.readline(), f"{path}, row {i}")

    return Streamed(len(begins), get, [str(path)])


def stream_files(paths: Sequence[str | os.PathLike[str]]) -> Streamed:
    """The rows of JSONL files, one file after the other."""
    parts = [stream_jsonl(path) for path in paths]
    ends, total = [], 0
    for part in parts:
        total += len(part)
        ends.append(total)

    def get(i: int) -> Any:
        k = next(k for k, end in enumerate(ends) if i < end)
        return parts[k][i - ends[k] + len(parts[k])]

    return parts[0] if len(parts) == 1 else Streamed(total, get, [str(path) for path in paths])


def is_jsonl(path: str | os.PathLike[str]) -> bool:
    return str(path) != "-" and Path(path).suffix.lower() in (".jsonl", ".ndjson")
