"""Group-relative advantages (GRPO, arXiv 2402.03300, eq. 4.1).

    advantage = (r − mean of its group) / (std + eps)

Libraries differ in two conventions, so both are arguments:

    ddof=0, eps=0.0     the population's std, nothing added (the paper as written; the default)
    ddof=1, eps=1e-4    Bessel's correction and TRL's epsilon: TRL's numbers

A group whose rewards are all equal has advantages of exactly 0, and so has a group of one.

Shapes: P prompts, G completions of each.
"""

import math
from typing import Any

import numpy as np

from strop import _compiled
from strop._checks import as_count, as_number, as_rewards, check_choice, like_input, rows_and_columns
from strop._types import Array

SCALES = ("group", "batch", "none")


@_compiled.compiled
def compute_group_advantages(rewards: Array, *, ddof: int = 0, eps: float = 0.0) -> Any:
    """Return the advantages of one group: (r − mean) / (std + eps).

    rewards   (G,) float32 or float64; integers and booleans are taken as float64
    returns   (G,) of the same dtype; exactly 0 where all rewards are equal
    """
    array = as_rewards(rewards)
    if array.ndim != 1:
        raise ValueError(
            f"rewards must be one group of shape (G,), found {array.shape}; compute_batch_group_advantages takes several"
        )
    return like_input(_advantages(array, 1, array.size, ddof, eps, "group"), rewards)


@_compiled.compiled
def compute_batch_group_advantages(
    rewards: Array, group_size: int | None = None, *, ddof: int = 0, eps: float = 0.0, scale: str = "group"
) -> Any:
    """Return the advantages of P groups of G rewards.

    rewards   (P·G,) with group_size=G, or (P, G); float32 or float64; integers and booleans are taken as float64
    scale     the divisor of the centred rewards: "group" is each group's std + eps, "batch" the std + eps of all
              rewards, "none" is 1
    returns   the same shape and dtype
    """
    array = as_rewards(rewards)
    groups, size = rows_and_columns(array.shape, group_size, "rewards", "group_size")
    if size < 1:
        raise ValueError(f"group_size must be at least 1, found {size} in rewards of shape {array.shape}")
    return like_input(_advantages(array, groups, size, ddof, eps, scale), rewards)


def _advantages(array: np.ndarray, groups: int, size: int, ddof: int, eps: float, scale: str) -> np.ndarray:
    ddof = as_count(ddof, "ddof", 0)
    eps = as_number(eps, "eps", 0)
    check_choice(scale, "scale", SCALES)
    scale = SCALES[SCALES.index(scale)]  # the same object: the kernel compares by identity
    if scale == "none":
        ddof = 0
    if array.size == 0 or size == 1:
        return np.zeros_like(array)
    divided_by = {"group": size, "batch": array.size, "none": math.inf}[scale]
    if ddof >= divided_by:
        raise ValueError(f"ddof must be below the {divided_by} rewards of a {scale}, found {ddof}")
    if kernel := _compiled.kernels.get("compute_batch_group_advantages"):
        found = kernel(array.reshape(groups, size), ddof=ddof, eps=eps, scale=scale)
        if found is not None:  # None: the squares overflow or underflow in the kernel
            return found.reshape(array.shape)
    with np.errstate(over="ignore", under="ignore"):
        found = _advantages_numpy(array.reshape(groups, size).astype(np.float64), ddof, eps, scale)
        return found.astype(array.dtype).reshape(array.shape)


def _advantages_numpy(rewards_PG: np.ndarray, ddof: int, eps: float, scale: str) -> np.ndarray:
    """Return advantages of any finite rewards. Scaling by a power of two to [−1, 1] keeps squares from overflowing."""
    largest = np.abs(rewards_PG).max(axis=None if scale == "batch" else 1, keepdims=True)
    exponent = np.frexp(largest)[1]
    scaled_PG = np.ldexp(rewards_PG, -exponent)

    centred_PG = scaled_PG - scaled_PG[:, :1]  # subtract the first reward: equal rewards give exactly 0
    centred_PG -= centred_PG.mean(axis=1, keepdims=True)
    if scale == "none":
        return np.ldexp(centred_PG, exponent)
    if scale == "group":
        std = np.sqrt((centred_PG**2).sum(axis=1, keepdims=True) / (rewards_PG.shape[1] - ddof))
    else:
        from_batch_PG = scaled_PG - scaled_PG[0, 0]
        from_batch_PG -= from_batch_PG.mean()
        std = np.sqrt((from_batch_PG**2).sum() / (rewards_PG.size - ddof))
    divisor = np.broadcast_to(std + np.ldexp(eps, -exponent), rewards_PG.shape)
    return np.divide(centred_PG, divisor, out=np.zeros_like(centred_PG), where=centred_PG != 0)
