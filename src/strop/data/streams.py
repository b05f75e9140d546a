"""Lazy rows: parsed on access from the bytes of JSONL files, in memory or on the disk.

One pass over a file finds the offsets of its lines and stores them in 8 bytes per row. Of a file in memory, compiled code
also checks in this pass which rows are plain; Python then parses only the others. A `datasets.Dataset` is on the disk already.
"""

import codecs
import io
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from strop import _compiled
from strop.data.files import jsonl_row

CONTENT = ("text", "messages", "prompt", "completion", "chosen", "rejected")
ROLES = (  # known to common chat templates
    "system", "user", "assistant", "tool", "developer", "function", "ipython", "observation", "model", "tool_response",
)  # fmt: skip
NOT_PLAIN = 255
Columns = tuple[str, ...]


@dataclass
class RowFacts:
    """The facts that one pass over all rows found.

    format          the format of all rows
    column_counts   column → number of rows that have it
    odd_roles       role that no known chat template uses → number of messages that have it
    num_equal       number of pairs whose chosen and rejected completions are equal
    """

    format: str
    column_counts: dict[str, int] = field(default_factory=dict)
    odd_roles: dict[str, int] = field(default_factory=dict)
    num_equal: int = 0


@dataclass
class PlainRows:
    """The rows of a file that a compiled pass found plain.

    A plain row is right JSON with the columns of CONTENT either all texts or all messages of known ROLES, whose chosen and
    rejected differ. A row that is not plain may be right or wrong.

    kinds_R   index in `columns` of each row's columns, in their order; NOT_PLAIN
    columns   the sets of columns that plain rows have
    """

    kinds_R: np.ndarray
    columns: Sequence[Columns]

    def usual(self, is_wanted: Callable[[Columns], bool]) -> dict[int, tuple[int, int]]:
        """Return the kinds whose columns are wanted → index of the first such row, number of such rows."""
        counts = np.bincount(self.kinds_R, minlength=NOT_PLAIN)
        kinds = [kind for kind, names in enumerate(self.columns) if counts[kind] and is_wanted(names)]
        return {kind: (int(np.argmax(self.kinds_R == kind)), int(counts[kind])) for kind in kinds}

    def without(self, kinds: Iterable[int]) -> list[int]:
        """Return the indices of all rows that are not of these kinds."""
        is_other = np.ones(256, bool)
        is_other[list(kinds)] = False
        return np.flatnonzero(is_other[self.kinds_R]).tolist()


class Streamed(Sequence[Any]):
    """A sequence of `num_rows` rows, each made on access and not stored.

    on_disk   rows are checked when they are read, not before the first step
    place     returns the place of row i, such as "line 8", for errors
    files     the files that the rows are read from, if any
    plain     what a compiled pass found in each of the files; empty without it
    facts     the facts that a pass over all rows found; None before that pass
    """

    def __init__(
        self,
        num_rows: int,
        get: Callable[[int], object],
        *,
        on_disk: bool = True,
        place: Callable[[int], str] | None = None,
        files: Sequence[str] = (),
        plain: Sequence[PlainRows] = (),
    ):
        self.num_rows, self.get, self.on_disk, self.place, self.files = num_rows, get, on_disk, place, files
        self.plain = plain
        self.facts: RowFacts | None = None

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: Any) -> Any:
        part = range(self.num_rows)[index]
        if not isinstance(part, range):
            return self.get(part)
        place = self.place
        return Streamed(
            len(part),
            lambda i: self.get(part[i]),
            on_disk=self.on_disk,
            place=None if place is None else lambda i: place(part[i]),
            files=self.files,
            plain=[PlainRows(one.kinds_R[index], one.columns) for one in self.plain] if len(self.plain) == 1 else (),
        )

    def __iter__(self) -> Iterator[Any]:
        return map(self.get, range(self.num_rows))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(other) != len(self):
            return False
        return all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def mapped(self, change: Callable[[Any, int], Any]) -> "Streamed":
        """Return the same rows, changed as they are read."""
        known = {"on_disk": self.on_disk, "place": self.place, "files": self.files}
        return Streamed(self.num_rows, lambda i: change(self.get(i), i), **known)  # type: ignore[arg-type]


def read_lines(path: str | os.PathLike[str], *, on_disk: bool) -> Streamed:
    """Return the rows of a JSONL file, without empty lines. Reading a broken line raises an error that names it.

    on_disk   leave the file's bytes on the disk; else they are kept in memory
    """
    with open(path, "rb") as file:
        data = b"" if on_disk else file.read()
        file.seek(0)
        start = len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0
        size = os.fstat(file.fileno()).st_size
        scan = getattr(_compiled.native, "scan_rows", None)  # a module that was built before it has none
        begins: Sequence[int]
        plain = []
        if on_disk or scan is None:
            begins = _begins(file if on_disk else io.BytesIO(data), start)
        else:
            found, kinds, columns = scan(data, start, CONTENT, ROLES)
            begins, plain = memoryview(found).cast("Q"), [PlainRows(np.frombuffer(kinds, np.uint8), columns)]

    def from_disk(i: int) -> object:
        with open(path, "rb") as file:  # opened each time, because forked processes would share a file position
            if os.fstat(file.fileno()).st_size != size:
                raise ValueError(f"{path} must stay as it is while it is streamed, found that it has changed")
            file.seek(begins[i])
            return jsonl_row(file.readline(), f"{path}, row {i}")

    def from_memory(i: int) -> object:
        line = data[begins[i] : begins[i + 1] if i + 1 < len(begins) else None]  # and empty lines after it
        try:
            return jsonl_row(line, str(path))
        except ValueError:  # finding the line's number takes long, so only on errors
            return jsonl_row(line, f"{path}, {line_of(i)}")

    def line_of(i: int) -> str:
        num_before = data.count(b"\n", 0, begins[i])
        return f"line {num_before + 1}"

    if on_disk:
        return Streamed(len(begins), from_disk, files=[str(path)])
    return Streamed(len(begins), from_memory, on_disk=False, place=line_of, files=[str(path)], plain=plain)


def _begins(lines: BinaryIO, start: int) -> Sequence[int]:
    """Return where each line begins, without empty lines."""
    begins = array("Q")
    lines.seek(start)
    for line in lines:
        if not line.isspace():
            begins.append(start)
        start += len(line)
    return begins


def read_files(paths: Sequence[str | os.PathLike[str]], *, on_disk: bool) -> Streamed:
    """Return the rows of several JSONL files in order; see `read_lines`."""
    parts = [read_lines(path, on_disk=on_disk) for path in paths]
    if len(parts) == 1:
        return parts[0]
    ends, total = [], 0
    for part in parts:
        total += len(part)
        ends.append(total)

    def found(i: int) -> tuple[int, int]:
        """Return the index of the file that has row i, and the row's index in it."""
        k = next(k for k, end in enumerate(ends) if i < end)
        return k, i - ends[k] + len(parts[k])

    def get(i: int) -> Any:
        k, row = found(i)
        return parts[k][row]

    def place(i: int) -> str:
        k, row = found(i)
        name = parts[k].place
        return f"{paths[k]}, {name(row) if name else f'row {row}'}"

    plain = [one for part in parts for one in part.plain]
    names = [str(path) for path in paths]
    return Streamed(total, get, on_disk=on_disk, place=None if on_disk else place, files=names, plain=plain)


def is_jsonl(path: str | os.PathLike[str]) -> bool:
    return str(path) != "-" and Path(path).suffix.lower() in (".jsonl", ".ndjson")
