"""Micro-batches: parts of a batch under a budget of tokens, so that memory is bounded. The result does not depend on them."""

from collections.abc import Sequence
from typing import TypeVar

from strop.primitives import pack_sequences

Item = TypeVar("Item")


def split(
    items: Sequence[Item], lengths: Sequence[int], size: int = 0, num_tokens: int = 0, *, padded: bool = False
) -> list[list[Item]]:
    """The items in parts of at most `size` items and `num_tokens` tokens; 0 is no limit.

    lengths   tokens of each item
    padded    the model reads rows as long as the longest: a part of n items has n · (its longest) tokens

    What fits at once stays as it is. An item above the limit is a part of its own.
    """
    size = size or len(items)
    whole = len(items) * max(lengths, default=0) if padded else sum(lengths)
    if not items or (len(items) <= size and (not num_tokens or whole <= num_tokens)):
        return [list(items)] if items else []
    if padded or not num_tokens:
        parts = _of_like_lengths(lengths, size, num_tokens)
    else:
        bins = pack_sequences(list(lengths), max(num_tokens, *lengths))
        # as even as can be, since the largest part is what needs memory
        even = pack_sequences(list(lengths), max(-(-whole // len(bins)), *lengths))
        bins = even if len(even) == len(bins) else bins
        parts = [found[i : i + size] for found in bins for i in range(0, len(found), size)]
    return [[items[i] for i in part] for part in parts]


def _of_like_lengths(lengths: Sequence[int], size: int, num_tokens: int) -> list[list[int]]:
    """The longest first: neighbours are of like lengths, so little is padding, and a lack of memory shows at once."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    parts = _cut(order, lengths, size, num_tokens)
    if num_tokens:  # as even as can be, since the largest part is what needs memory
        with_padding = sum(len(part) * lengths[part[0]] for part in parts)
        even = _cut(order, lengths, size, -(-with_padding // len(parts)))
        parts = even if len(even) == len(parts) else parts
    return parts


def _cut(order: Sequence[int], lengths: Sequence[int], size: int, num_tokens: int) -> list[list[int]]:
    """An order of falling lengths: a part's first item is its longest."""
    parts, start = [], 0
    while start < len(order):
        fitting = num_tokens // max(lengths[order[start]], 1) if num_tokens else size
        parts.append(list(order[start : start + max(1, min(size, fitting))]))
        start += len(parts[-1])
    return parts
