"""Rows that a background thread prepares shortly before the step that needs them.

Templates and tokenisation take long for many rows. A run knows the order of its rows, so a thread prepares the rows of the
next steps in parts while the current step computes. The result does not depend on when a row was prepared.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from strop.data.streams import Streamed

Prepare = Callable[[Sequence[Any], str], Sequence[Any]]
PART = 128  # rows that are prepared together
NUM_ROWS_AHEAD = 3 * PART  # rows after a batch, prepared during its step


class PreparedAhead(Sequence[Any]):
    """A dataset's rows as an algorithm's `prepare` returns them, each prepared on access or shortly before.

    before        the original rows, for their digest
    columns       the columns of all rows; a row that lacks one has None there, in every batch
    with_thread   prepare rows named by `take` in a thread; False if the tokenizer is not thread-safe
    """

    def __init__(
        self,
        rows: Sequence[object],
        prepare: Prepare,
        name: str,
        columns: Iterable[str] = (),
        with_thread: bool = False,
    ):
        self.rows, self.prepare, self.name = rows, prepare, name
        self.before = rows
        self.columns, self.with_thread = dict.fromkeys(columns), with_thread
        self._threads: ThreadPoolExecutor | None = None
        self._ahead: dict[int, tuple[Future[Sequence[Any]], int]] = {}  # row i: its part, its place in the part

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        place = range(len(self))[index]
        return self.take(place) if isinstance(place, range) else self.take([place])[0]

    def __iter__(self) -> Iterator[object]:
        for start in range(0, len(self), PART):
            end = start + PART
            yield from self.take(range(len(self))[start:end], range(len(self))[end : end + PART])

    def take(self, indices: Sequence[int], following: Sequence[int] | None = None) -> list[object]:
        """Return these rows prepared; begin to prepare `following`, the rows that are needed next."""
        found = {i: self._ahead[i] for i in indices if i in self._ahead}
        missing = [i for i in indices if i not in found]
        values = dict(zip(missing, self._prepared_or_named(missing), strict=True))
        if following is not None:
            self._begin(following)
        values |= {i: part.result()[place] for i, (part, place) in found.items() if part.exception() is None}
        failed = [i for i in indices if i not in values]
        values |= zip(failed, self._prepared_or_named(failed), strict=True)
        return [values[i] for i in indices]

    def _begin(self, indices: Sequence[int]) -> None:
        """Start preparing these rows in the thread, unless they were started before; drop all other rows."""
        self._ahead = {i: self._ahead[i] for i in indices if i in self._ahead}
        missing = [i for i in indices if i not in self._ahead]
        if not self.with_thread or not missing:
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="strop-data")
        for start in range(0, len(missing), PART):
            part = missing[start : start + PART]
            if len(part) < min(PART, len(indices)) and len(missing) < len(indices):
                break  # too few rows are left for a part: the next call has more
            future = self._threads.submit(self._prepared, part)
            self._ahead |= {i: (future, place) for place, i in enumerate(part)}

    def _prepared(self, indices: Sequence[int]) -> Sequence[object]:
        return self.prepare([self._row(i) for i in indices], self.name)

    def _prepared_or_named(self, indices: Sequence[int]) -> Sequence[object]:
        """Return the prepared rows. If one fails, raise an error with its index in the dataset."""
        if not indices:
            return []
        if len(indices) > 1:
            try:
                return self._prepared(indices)
            except (ValueError, TypeError):
                return [row for i in indices for row in self._prepared_or_named([i])]
        (i,) = indices
        try:
            return self._prepared([i])
        except (ValueError, TypeError) as error:
            text = str(error).replace(f"{self.name}[0]", f"{self.name}[{i}]").replace("rows[0]", f"rows[{i}]")
            raise type(error)(text + self._place(i)) from None

    def _row(self, i: int) -> object:
        row = self.rows[i]
        if isinstance(row, Mapping) and len(row) < len(self.columns):
            return {**self.columns, **row}
        return row

    def _place(self, i: int) -> str:
        place = self.rows.place if isinstance(self.rows, Streamed) else None
        return f" ({place(i)})" if place is not None else ""
