"""Checks of token ids, targets and masks, and their conversion to the form that engines take.

Shapes: B rows, T columns.
"""

from collections.abc import Sequence

import numpy as np

from strop._checks import as_array, as_mask
from strop._types import Array
from strop.moe.config import MoEConfig


def as_token_ids(value: Array, name: str) -> np.ndarray:
    """Return the ids as int64 (B, T), B and T at least 1. Their range is checked by `check_ids_in_range`."""
    array = as_array(value, name)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name} must be integers, found {array.dtype}")
    if array.ndim != 2:
        raise ValueError(f"{name} must have the shape (batch, tokens), found {array.shape}")
    if 0 in array.shape:
        raise ValueError(f"{name} must hold at least one row of at least one token, found shape {array.shape}")
    return np.ascontiguousarray(array, dtype=np.int64)


def check_ids_in_range(ids_BT: np.ndarray, name: str, config: MoEConfig, counts_BT: np.ndarray | None = None) -> None:
    if ids_BT.view(np.uint64).max() < config.vocab_size:  # as unsigned integers, negative ids are the largest
        return
    wrong_BT = (ids_BT < 0) | (ids_BT >= config.vocab_size)
    if counts_BT is not None:
        wrong_BT &= counts_BT
    if wrong_BT.any():
        row, column = (int(i) for i in np.argwhere(wrong_BT)[0])
        raise ValueError(
            f"{name} must be from 0 to {config.vocab_size - 1} (vocab_size={config.vocab_size}), "
            f"found {ids_BT[row, column]} at row {row}, column {column}"
        )


def as_batch(
    tokens: Array, attention_mask: Array | None, config: MoEConfig, name: str = "tokens"
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the engine's tokens, with id 0 at padding, and the mask of real tokens (None if there is no padding).

    name   the name of the caller's argument, for error messages
    """
    tokens_BT = as_token_ids(tokens, name)
    mask_BT = as_mask(attention_mask, "attention_mask", tokens_BT.shape, of=name)
    if mask_BT is not None and mask_BT.all():
        mask_BT = None
    check_ids_in_range(tokens_BT, name, config, mask_BT)
    longest = tokens_BT.shape[1]
    if mask_BT is not None:
        lengths_B = mask_BT.sum(1)
        if not lengths_B.all():
            raise ValueError(
                f"attention_mask must keep at least one token in each row, found none in row {lengths_B.argmin()}"
            )
        longest = int(lengths_B.max())
        tokens_BT = np.where(mask_BT, tokens_BT, 0)
    if longest > config.max_seq_len:
        raise ValueError(f"{name} must have at most max_seq_len={config.max_seq_len} tokens in a row, found {longest}")
    return tokens_BT, mask_BT


def as_targets(
    targets: Array,
    target_mask: Array | None,
    tokens_BT: np.ndarray,
    attention_mask_BT: np.ndarray | None,
    config: MoEConfig,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the targets and the mask of those in the loss, which excludes padding."""
    targets_BT = as_token_ids(targets, "targets")
    if targets_BT.shape != tokens_BT.shape:
        raise ValueError(f"targets must have the shape {tokens_BT.shape} of tokens, found {targets_BT.shape}")
    mask_BT = as_mask(target_mask, "mask", tokens_BT.shape, of="tokens")
    if attention_mask_BT is not None:
        mask_BT = attention_mask_BT if mask_BT is None else mask_BT & attention_mask_BT
    check_ids_in_range(targets_BT, "targets", config, mask_BT)
    return targets_BT, mask_BT


def as_counts(
    counts: Array | None, tokens_BT: np.ndarray, attention_mask_BT: np.ndarray | None, name: str
) -> np.ndarray:
    """Return the mask of the tokens to score: real tokens that are not the first of their row."""
    counts_BT = as_mask(counts, name, tokens_BT.shape, of="input_ids" if name == "completion_mask" else "tokens")
    if counts_BT is None:
        counts_BT = np.ones(tokens_BT.shape, bool)
    if attention_mask_BT is None:
        counts_BT = counts_BT.copy()
        counts_BT[:, 0] = False
        return counts_BT
    return counts_BT & attention_mask_BT & (attention_mask_BT.cumsum(1) > 1)


def left_padded(prompts: Sequence[Array]) -> tuple[np.ndarray, np.ndarray]:
    """Return prompts of any lengths as (tokens_BT, attention_mask_BT), padded on the left with 0."""
    if len(prompts) == 0:
        raise ValueError("prompts must hold at least one prompt, found 0")
    rows = [as_array(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]
    for index, row in enumerate(rows):
        if row.ndim != 1 or row.size == 0:
            raise ValueError(f"prompts[{index}] must be a row of at least one token id, found shape {row.shape}")
        if row.dtype.kind not in "iu":
            raise TypeError(f"prompts[{index}] must be integers, found {row.dtype}")
    longest = max(row.size for row in rows)
    tokens_BT = np.zeros((len(rows), longest), np.int64)
    mask_BT = np.zeros((len(rows), longest), bool)
    for index, row in enumerate(rows):
        tokens_BT[index, longest - row.size :] = row
        mask_BT[index, longest - row.size :] = True
    return tokens_BT, mask_BT
