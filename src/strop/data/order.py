"""The order of a dataset's rows in an epoch: shuffled, and with a curriculum from easy to hard."""

import math
import random
from array import array
from collections.abc import Sequence

from strop import _compiled
from strop.data.formats import PreparedRows
from strop.user_code import load_function


def difficulty_of(rows: PreparedRows, curriculum: str | None) -> list[float] | None:
    """Return the difficulty of each row: a column, or what a function file.py:function returns for the row."""
    if curriculum is None:
        return None
    before = rows.before
    if before is None or getattr(before, "on_disk", False):
        raise ValueError("curriculum must be None with rows that are read in parts (stream), which have no order")
    function = load_function(curriculum, "curriculum") if ":" in curriculum else None
    found = []
    for i, row in enumerate(before):
        value = row.get(curriculum) if function is None else function(row)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(
                f"curriculum needs a number for each row, found {value!r:.60} of rows[{i}] in {curriculum!r}"
            )
        found.append(float(value))
    return found


def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool) -> Sequence[int]:
    """Return the order of an epoch's rows, in 8 bytes a row: Python's `random.shuffle` of their indices."""
    draw = random.Random(f"{seed}/{epoch}")
    shuffled = getattr(_compiled.native, "shuffled", None)
    if shuffle and num_rows > 1_000 and shuffled is not None:
        return memoryview(shuffled(num_rows, draw.getstate()[1])).cast("q")
    order = array("q", range(num_rows))
    if shuffle:
        draw.shuffle(order)
    return order
