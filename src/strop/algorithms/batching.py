"""Micro-batches: rows of like lengths under a budget of tokens, so that little is padding and memory is bounded."""

from collections.abc import Sequence
from typing import TypeVar

Row = TypeVar("Row")


def split(rows: Sequence[Row], lengths: Sequence[int], size: int = 0, num_tokens: int = 0) -> list[list[Row]]:
    """The rows in parts of at most `size` rows and `num_tokens` tokens, padding included; 0 is no limit.

    lengths   tokens of each row; a part of n rows has n · (its longest) of them

    What fits at once stays as it is. Else the longest come first: neighbours are of like lengths, and a lack of memory
    shows in the first part. A row above the limit is a part of its own.
    """
    size = size or len(rows)
    if not rows or (len(rows) <= size and (not num_tokens or len(rows) * max(lengths) <= num_tokens)):
        return [list(rows)] if rows else []
    order = sorted(range(len(rows)), key=lambda i: -lengths[i])
    parts = _cut(order, lengths, size, num_tokens)
    if num_tokens:  # as even as can be, since the largest part is what needs memory
        padded = sum(len(part) * lengths[part[0]] for part in parts)
        even = _cut(order, lengths, size, -(-padded // len(parts)))
        parts = even if len(even) == len(parts) else parts
    return [[rows[i] for i in part] for part in parts]


def _cut(order: Sequence[int], lengths: Sequence[int], size: int, num_tokens: int) -> list[Sequence[int]]:
    """An order of falling lengths: a part's first row is its longest."""
    parts, start = [], 0
    while start < len(order):
        fitting = num_tokens // max(lengths[order[start]], 1) if num_tokens else size
        parts.append(order[start : start + max(1, min(size, fitting))])
        start += len(parts[-1])
    return parts
