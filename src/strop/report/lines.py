"""Incremental reading of growing JSONL files, and a metrics file's numbers as arrays."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeGuard

import numpy as np

from strop._types import Json, Row
from strop.training.logging import parse_line

BLOCK = 1 << 20  # bytes read at once
SEEN = 64  # last bytes read, compared at the next read to detect a rewritten file
JOIN_BELOW = 4096  # rows: smaller blocks of a table are joined


class LineReader:
    """A reader of a file's complete lines. Each later call reads only the lines added since.

    A block counts as read when the next block is requested. So after an error it is read again.
    """

    def __init__(self, path: Path):
        self.path = path
        self.offset, self.num_lines = 0, 0  # read so far
        self.is_cut_off = False  # the last line has no newline: the run was killed or is still writing
        self._inode, self._seen = 0, b""

    def was_replaced(self) -> bool:
        """Return whether the file was replaced: it is another file, it is shorter, or the last bytes read have changed."""
        if not self.path.is_file():
            return self.offset > 0
        about = self.path.stat()
        if self.offset and (about.st_ino != self._inode or about.st_size < self.offset):
            return True
        with self.path.open("rb") as file:
            file.seek(self.offset - len(self._seen))
            return file.read(len(self._seen)) != self._seen

    def blocks(self) -> Iterator[tuple[int, int, list[bytes]]]:
        """Yield blocks of new lines: (number of the first line, its offset, the lines with their newlines)."""
        if not self.path.is_file():
            return
        self.is_cut_off = False
        with self.path.open("rb") as file:
            self._inode = os.fstat(file.fileno()).st_ino
            file.seek(self.offset)
            while lines := file.readlines(BLOCK):
                if not lines[-1].endswith(b"\n"):
                    self.is_cut_off = bool(lines.pop().strip())
                if lines:
                    yield self.num_lines + 1, self.offset, lines
                    self.offset += sum(map(len, lines))
                    self.num_lines += len(lines)
                    self._seen = lines[-1][-SEEN:]


class Table:
    """All lines that have the same metrics. Blocks are float64 [rows, 1 + metrics]; column 0 is the line number."""

    def __init__(self, names: Sequence[str]):
        self.names = list(names)
        self.blocks: list[np.ndarray] = []
        self._steps: np.ndarray | None = None

    def add(self, rows: np.ndarray) -> None:
        if self.blocks and len(self.blocks[-1]) < JOIN_BELOW:
            rows = np.concatenate([self.blocks.pop(), rows])
        self.blocks.append(rows)
        self._steps = None

    def column(self, name: str) -> np.ndarray:
        index = 1 + self.names.index(name)
        return np.concatenate([block[:, index] for block in self.blocks])

    @property
    def lines(self) -> np.ndarray:
        return np.concatenate([block[:, 0] for block in self.blocks])

    @property
    def steps(self) -> np.ndarray:
        """The steps as integers; one array for all metrics of the table."""
        if self._steps is None:
            self._steps = self.column("step").astype(np.int64)
        return self._steps


class Columns:
    """All numbers of a metrics file: one table per set of metrics. null becomes NaN; texts are left out."""

    def __init__(self) -> None:
        self.tables: dict[tuple[str, ...], Table] = {}

    @classmethod
    def of(cls, rows: Iterable[Row]) -> "Columns":
        """Return the columns of these rows, each with its step."""
        made = cls()
        made.add([json.dumps(row).encode() for row in rows], 1, Path("rows"))
        return made

    @property
    def names(self) -> list[str]:
        """The names of all metrics, in order of first appearance."""
        found = dict.fromkeys(name for table in self.tables.values() for name in table.names)
        return [name for name in found if name not in ("step", "time")]

    def having(self, name: str) -> list[Table]:
        return [table for table in self.tables.values() if name in table.names]

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return steps in ascending order and their values. If several lines have the same step, the last one is used."""
        tables = self.having(name)
        if not tables:
            return np.empty(0, np.int64), np.empty(0)
        steps = tables[0].steps if len(tables) == 1 else np.concatenate([table.steps for table in tables])
        values = np.concatenate([table.column(name) for table in tables])
        if (np.diff(steps) <= 0).any():
            order = np.lexsort((np.concatenate([table.lines for table in tables]), steps))
            steps, values = steps[order], values[order]
            is_last = np.append(steps[1:] != steps[:-1], True)
            steps, values = steps[is_last], values[is_last]
        return steps, values

    def rename(self, old: str, new: str) -> None:
        """Rename a metric. If a table already has a metric of the new name, that metric is dropped."""
        for table in self.having(old):
            table.names = ["" if name == new else new if name == old else name for name in table.names]

    def add(self, lines: Sequence[bytes], first: int, path: Path) -> None:
        """Add lines; `first` is the number of the first line. If a line is broken, nothing is added."""
        found: dict[tuple[str, ...], list[list[float]]] = {}
        for number, line in enumerate(lines, first):
            if line.strip():
                row = _numbers(parse_line(line, path, number))
                found.setdefault(tuple(row), []).append([number, *row.values()])
        for names, rows in found.items():
            self.tables.setdefault(names, Table(names)).add(np.array(rows, dtype=float))

    def condensed(self, most: int) -> "Columns":
        """Return a copy whose tables have at most `most` rows: means of neighbouring rows, at the last step of each group."""
        made = Columns()
        for key, table in self.tables.items():
            rows = np.concatenate(table.blocks)
            if len(rows) > most:
                starts = np.linspace(0, len(rows), most, endpoint=False).astype(int)
                counts = np.diff(np.append(starts, len(rows)))
                means = np.add.reduceat(rows, starts) / counts[:, None]
                for name in ("step", "time"):
                    if name in table.names:
                        column = 1 + table.names.index(name)
                        means[:, column] = rows[starts + counts - 1, column]
                rows = means
            made.tables[key] = Table(table.names)
            made.tables[key].add(rows)
        return made


def _numbers(row: Json) -> Json:
    """Return the row's metrics that are numbers, with NaN for null."""
    if all(type(value) is float or is_number(value) for value in row.values()):
        return row
    return {name: math.nan if v is None else v for name, v in row.items() if v is None or is_number(v)}


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number that fits a float. Integers in JSON may be too large."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**1023
    return isinstance(value, float)
