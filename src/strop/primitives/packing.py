"""Packing of sequences of different lengths into rows of one length, so that a batch has little padding."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from strop import _compiled
from strop._checks import as_count, as_integers, is_plain_integers, is_tensor, like_input
from strop._types import Array

IGNORED_LABEL = -100
PADDING_SEQUENCE = -1


def pack_sequences(lengths: Array, max_length: int) -> list[list[int]]:
    """Assign sequences to bins of at most max_length tokens, first-fit decreasing.

    lengths   their lengths, or the sequences themselves
    returns   bins of indices; within a bin longer sequences come first, equally long ones in their original order

    First-fit decreasing never needs more than 11/9 of the fewest possible bins (+ 6/9).
    """
    max_length = as_count(max_length, "max_length", 1)
    array = _as_lengths(lengths)
    for wrong, what in ((array > max_length, f"at most max_length={max_length}"), (array < 0, "at least 0")):
        if wrong.any():
            index = int(np.argmax(wrong))
            raise ValueError(f"every length must be {what}, found {array[index]} at index {index}")
    if _compiled.native is not None:
        return _compiled.native.pack(array, max_length)
    return _first_fit_decreasing(array, max_length)


def collate_packed(
    sequences: Sequence[Array], bins: Sequence[Sequence[int]], pad_to: int | None = None, *, pad_id: int = 0
) -> dict[str, Any]:
    """Return packed sequences as a batch of one row per bin, for a varlen or padding-free forward.

    sequences      1-D token ids: lists, arrays or tensors (then the result holds tensors)
    bins           the result of `pack_sequences`; sequences in no bin are left out
    pad_to         length L of every row; by default that of the longest row

    input_ids      (bins, L) tokens, then pad_id
    position_ids   (bins, L) counted from 0 in every sequence, and in the padding
    cu_seqlens     (segments + 1,) int32, the start of each segment of the flattened batch, and the end of the last one.
                   Every sequence is a segment, and so is the padding of a row
    labels         (bins, L) the tokens; −100 on the first of each sequence (no token predicts it) and on padding
    sequence_ids   (bins, L) the index of each token's sequence, −1 on padding: `x[sequence_ids == i]` is sequence i's
                   part of any (bins, L) result, in its original order

    One bin without pad_to gives a batch of shape (1, tokens) with no padding at all.
    """
    sequences, bins = _as_list(sequences, "sequences"), _as_list(bins, "bins")
    arrays = [s if is_plain_integers(s) else as_integers(s, f"sequences[{i}]") for i, s in enumerate(sequences)]
    lengths = np.fromiter((a.size for a in arrays), np.int64, len(arrays))
    order, row_ends = _flatten_bins(bins, len(arrays))
    row_length = _row_length(lengths, order, row_ends, pad_to)
    if len(bins) * row_length > np.iinfo(np.int32).max:
        raise ValueError(f"a batch of {len(bins)} rows of {row_length} tokens is too large for the int32 of cu_seqlens")

    pad_id = as_count(pad_id, "pad_id", np.iinfo(np.int64).min)
    names = ("input_ids", "position_ids", "labels", "sequence_ids")
    rows = dict(zip(names, np.empty((len(names), len(bins), row_length), np.int64), strict=True))
    collate = _collate_numpy if _compiled.native is None else _compiled.native.collate
    cu_seqlens = collate(arrays, order, row_ends, pad_id, *rows.values())

    like = sequences[0] if len(arrays) else None
    found = {**rows, "cu_seqlens": cu_seqlens}
    in_order = ("input_ids", "position_ids", "cu_seqlens", "labels", "sequence_ids")
    return {name: like_input(found[name], like) for name in in_order}


def _as_list(value: object, name: str) -> list[Any]:
    if not isinstance(value, Iterable) or isinstance(value, (str, Mapping)):
        raise TypeError(f"{name} must be a sequence of sequences, found {type(value).__name__}")
    return list(value)


def _as_lengths(lengths: Array) -> np.ndarray:
    if not (isinstance(lengths, np.ndarray) or is_tensor(lengths)):
        if not isinstance(lengths, Iterable):
            raise TypeError(f"lengths must be a sequence of integers or of sequences, found {type(lengths).__name__}")
        lengths = list(lengths)
        if lengths and hasattr(lengths[0], "__len__") and getattr(lengths[0], "ndim", 1) != 0:
            return _lengths_of(lengths)
    elif lengths.ndim == 2:
        return np.full(lengths.shape[0], lengths.shape[1], dtype=np.int64)
    return as_integers(lengths, "lengths")


def _lengths_of(sequences: Sequence[Any]) -> np.ndarray:
    for i, sequence in enumerate(sequences):
        if isinstance(sequence, (str, Mapping)) or not hasattr(sequence, "__len__"):
            raise TypeError(f"sequences[{i}] must be a sequence of token ids, found {type(sequence).__name__}")
        if getattr(sequence, "ndim", 1) != 1:
            raise ValueError(f"sequences[{i}] must be one-dimensional, found shape {tuple(sequence.shape)}")
    return np.array([len(s) for s in sequences], dtype=np.int64)


def _flatten_bins(bins: Sequence[Sequence[int]], num_sequences: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sequences' indices row by row, and the end of each row in this list."""
    for i, b in enumerate(bins):
        if not hasattr(b, "__len__"):
            raise TypeError(f"bins[{i}] must be a sequence of indices, found {type(b).__name__}")
    sizes = [len(b) for b in bins]
    order = as_integers([index for b in bins for index in b], "bins")
    outside = (order < 0) | (order >= num_sequences)
    if outside.any():
        raise ValueError(f"bins must hold indices from 0 to {num_sequences - 1}, found {order[outside][0]}")
    counts = np.bincount(order, minlength=num_sequences)
    if (counts > 1).any():
        raise ValueError(f"bins must hold each sequence once, found {counts.argmax()} {counts.max()} times")
    return order, np.cumsum(sizes, dtype=np.int64)


def _row_length(lengths: np.ndarray, order: np.ndarray, row_ends: np.ndarray, pad_to: int | None) -> int:
    tokens_before = np.concatenate([[0], np.cumsum(lengths[order])])
    totals = np.diff(tokens_before[row_ends], prepend=0)
    longest = int(totals.max(initial=0))
    if pad_to is None:
        return longest
    pad_to = as_count(pad_to, "pad_to", 1)
    if pad_to < longest:
        raise ValueError(f"pad_to must be at least the {longest} tokens of bin {totals.argmax()}, found {pad_to}")
    return pad_to


def _first_fit_decreasing(lengths: np.ndarray, max_length: int) -> list[list[int]]:
    """Return the bins. As in the compiled function, each node of a tree holds the largest room of the bins below."""
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [max_length] * (2 * leaves)
    bins: list[list[int]] = []
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(index)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def _collate_numpy(
    arrays: list[np.ndarray], order: np.ndarray, row_ends: np.ndarray, pad_id: int,
    input_ids: np.ndarray, position_ids: np.ndarray, labels: np.ndarray, sequence_ids: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Fill the rows and return cu_seqlens, as the compiled function does."""
    num_rows, row_length = input_ids.shape
    cu_seqlens = [0]
    first = 0
    for row in range(num_rows):
        at = 0
        for sequence in order[first : row_ends[row]].tolist():
            piece = arrays[sequence]
            place = slice(at, at + piece.size)
            input_ids[row, place] = labels[row, place] = piece
            labels[row, at : min(at + 1, place.stop)] = IGNORED_LABEL
            position_ids[row, place] = np.arange(piece.size)
            sequence_ids[row, place] = sequence
            at = place.stop
            cu_seqlens.append(row * row_length + at)
        first = row_ends[row]
        if at < row_length:
            input_ids[row, at:], labels[row, at:], sequence_ids[row, at:] = pad_id, IGNORED_LABEL, PADDING_SEQUENCE
            position_ids[row, at:] = np.arange(row_length - at)
            cu_seqlens.append((row + 1) * row_length)
    return np.array(cu_seqlens, dtype=np.int32)
