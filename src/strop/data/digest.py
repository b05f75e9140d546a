"""A digest of a dataset's rows. A resumed run uses it to check that its rows are unchanged."""

import dataclasses
import hashlib
import marshal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from strop import checksums

CHUNK = 1000  # rows that are hashed in one call
NUM_EXAMPLES = 8  # rows of a stream, after mapping, that are hashed together with its files


def digest_rows(rows: Sequence[object]) -> str:
    """Return a digest of all rows and their order; for prepared rows that of the original rows."""
    if (before := getattr(rows, "before", None)) is not None:
        return digest_rows(before)
    found = hashlib.sha256(b"%d" % len(rows))
    files: Sequence[str] = getattr(rows, "files", ())
    for file in files:
        found.update(b"%08x" % checksums.of_file(Path(file)))
    for piece in _examples(rows) if files else _arrow(rows) if hasattr(rows, "with_format") else _chunks(rows):
        found.update(piece)
    return found.hexdigest()


def _examples(rows: Sequence[object]) -> Iterator[bytes]:
    count = min(NUM_EXAMPLES, len(rows))
    yield _as_bytes([_readable(rows, i * len(rows) // count) for i in range(count)])


def _readable(rows: Sequence[object], i: int) -> object:
    """Return the row; None if it is broken. The error is raised when a step reaches it."""
    try:
        return rows[i]
    except (ValueError, TypeError):
        return None


def _chunks(rows: Sequence[object]) -> Iterator[bytes]:
    for start in range(0, len(rows), CHUNK):
        yield _as_bytes([rows[i] for i in range(start, min(start + CHUNK, len(rows)))])


def _arrow(rows: Any) -> Iterator[bytes]:
    """Yield the rows of a `datasets.Dataset` as bytes of Arrow's stream format, without making Python objects."""
    import pyarrow

    for table in rows.with_format("arrow").iter(CHUNK):
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        yield memoryview(sink.getvalue())  # type: ignore[misc]


def _as_bytes(rows: list[object]) -> bytes:
    try:
        return marshal.dumps(rows, 2)  # version 2: equal values give equal bytes, shared objects or not
    except ValueError:  # a tensor, a class of the user's
        return marshal.dumps([_plain(row) for row in rows], 2)


def _plain(value: Any) -> Any:
    """Return the value in a form that marshal accepts; for an unknown class only its name."""
    if hasattr(value, "tolist"):  # a tensor, an array, a number of NumPy's
        return [str(value.dtype), value.tolist()]
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(one) for one in (sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value)]
    if isinstance(value, (str, int, float, bool, bytes, type(None))):
        return value
    return type(value).__qualname__
