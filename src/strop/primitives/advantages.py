"""Advantages of rewards that are compared with each other.

    compute_batch_group_advantages   (r − mean of its group) / divisor              GRPO and others, see `scale`
    compute_group_advantages         the same for one group; with lengths for REINFORCE++
    compute_pass_at_k_advantages     how much r raises the best of k samples        PKPO, arXiv 2505.15201

    scale           divisor of a group                      algorithm
    group           its std + eps                           GRPO, arXiv 2402.03300, eq. 4.1
    batch           the std of all rewards + eps            arXiv 2508.08221
    none            1                                       Dr. GRPO, arXiv 2503.20783
    leave_one_out   (G − 1)/G: r − mean of the others       RLOO, arXiv 2402.14740
    mean            its mean + eps, of rewards ≥ 0          MaxRL, arXiv 2602.02710

Libraries differ in two conventions, so both are arguments:

    ddof=0, eps=0.0     the population's std, nothing added (the paper as written; the default)
    ddof=1, eps=1e-4    Bessel's correction and TRL's epsilon: TRL's numbers

A group whose rewards are all equal has advantages of exactly 0, and so has a group of one.

MaxRL. With rewards of 0 and 1 and p the chance of a 1, the mean of A·∇log π over a group has the expectation
Σ_{j < G} (1 − p)^(j−1)·∇p, the gradient of log p's series −Σ (1 − p)^j/j up to order G − 1. The paper's Σ r·∇log π / Σ r
gives order G; the baseline costs one order, because a group of zeros has no advantages. With G = 2 it is RLOO.

REINFORCE++ (arXiv 2501.03262) compares every token of a batch with all others: all rewards are one group, and a reward
counts once for each token of its completion. Its form with a baseline centres by prompt first, scale="none".

Pass@k. A set of k of the G completions of a prompt is worth its best reward. Completion i adds to a set S what the set
without it lacks, and its advantage is the mean of that over all sets with i:

    A_i = mean over S ∋ i, |S| = k, of max(S) − max(S∖{i})

Times k this estimates the gradient of the expected best of k without bias (PKPO's leave-one-out-minus-one). Only sets
in which i is the best count. In rising order r_1 … r_G, the gap r_(m+1) − r_m is added to every reward above it for the
C(m, k−1) of C(G−1, k−1) sets whose other members are among the m below:

    A_(i) = Σ_{m < i} (r_(m+1) − r_m)·C(m, k−1)/C(G−1, k−1)

With k = G only the best completion has an advantage, its lead over the second (arXiv 2503.19595).

Shapes: P prompts, G completions of each.
"""

import math
from typing import Any

import numpy as np

from strop import _compiled
from strop._checks import as_count, as_integers, as_number, as_rewards, check_choice, like_input, rows_and_columns
from strop._types import Array

SCALES = ("group", "batch", "none", "leave_one_out", "mean")
STD_SCALES = ("group", "batch")


@_compiled.compiled
def compute_group_advantages(rewards: Array, *, ddof: int = 0, eps: float = 0.0, lengths: Array | None = None) -> Any:
    """Return the advantages of one group: (r − mean) / (std + eps).

    rewards   (G,) float32 or float64; integers and booleans are taken as float64
    lengths   (G,) whole numbers: how often each reward counts in mean and std, which ddof counts in too; with 0 it does
              not count, and its advantage is 0. None counts each once
    returns   (G,) of the same dtype; exactly 0 where all rewards are equal
    """
    array = as_rewards(rewards)
    if array.ndim != 1:
        raise ValueError(
            f"rewards must be one group of shape (G,), found {array.shape}; compute_batch_group_advantages takes several"
        )
    if lengths is None:
        return like_input(_advantages(array, 1, array.size, ddof, eps, "group"), rewards)
    return like_input(_weighted(array, as_integers(lengths, "lengths"), ddof, eps), rewards)


@_compiled.compiled
def compute_batch_group_advantages(
    rewards: Array, group_size: int | None = None, *, ddof: int = 0, eps: float = 0.0, scale: str = "group"
) -> Any:
    """Return the advantages of P groups of G rewards.

    rewards   (P·G,) with group_size=G, or (P, G); float32 or float64; integers and booleans are taken as float64
    scale     the divisor of the centred rewards: "group" is each group's std + eps, "batch" the std + eps of all
              rewards, "none" is 1, "leave_one_out" is (G − 1)/G, "mean" is each group's mean + eps
    returns   the same shape and dtype
    """
    array = as_rewards(rewards)
    groups, size = _groups(array, group_size)
    return like_input(_advantages(array, groups, size, ddof, eps, scale), rewards)


@_compiled.compiled
def compute_pass_at_k_advantages(rewards: Array, group_size: int | None = None, *, k: int) -> Any:
    """Return how much each of P·G completions raises the best reward among k of its group, on average.

    rewards   (P·G,) with group_size=G, or (P, G); float32 or float64; integers and booleans are taken as float64
    k         from 2 to G; for k = 1 use compute_batch_group_advantages with scale="leave_one_out"
    returns   the same shape and dtype
    """
    array = as_rewards(rewards)
    groups, size = _groups(array, group_size)
    k = as_count(k, "k", 2)
    if k > size:
        raise ValueError(f"k must be at most the {size} rewards of a group, found {k}")
    if kernel := _compiled.kernels.get("compute_pass_at_k_advantages"):
        found = kernel(array.reshape(groups, size), k=k)
        if found is not None:  # None: no memory for the order of a group
            return like_input(found.reshape(array.shape), rewards)
    found = _pass_at_k_numpy(array.reshape(groups, size).astype(np.float64), k)
    return like_input(found.astype(array.dtype).reshape(array.shape), rewards)


def _groups(array: np.ndarray, group_size: int | None) -> tuple[int, int]:
    groups, size = rows_and_columns(array.shape, group_size, "rewards", "group_size")
    if size < 1:
        raise ValueError(f"group_size must be at least 1, found {size} in rewards of shape {array.shape}")
    return groups, size


def _pass_at_k_numpy(rewards_PG: np.ndarray, k: int) -> np.ndarray:
    P, G = rewards_PG.shape
    order_PG = rewards_PG.argsort(1)
    gaps_PG = np.diff(np.take_along_axis(rewards_PG, order_PG, 1), axis=1, prepend=np.zeros((P, 1)))
    gaps_PG[:, 0] = 0.0
    share_G = np.array([math.comb(m, k - 1) / math.comb(G - 1, k - 1) for m in range(G)])
    found_PG = np.empty_like(rewards_PG)
    np.put_along_axis(found_PG, order_PG, (gaps_PG * share_G).cumsum(1), 1)
    return found_PG


def _weighted(array: np.ndarray, lengths: np.ndarray, ddof: int, eps: float) -> np.ndarray:
    ddof, eps = as_count(ddof, "ddof", 0), as_number(eps, "eps", 0)
    if lengths.shape != array.shape:
        raise ValueError(f"lengths must have the shape {array.shape} of rewards, found {lengths.shape}")
    if (lengths < 0).any():
        at = int((lengths < 0).argmax())
        raise ValueError(f"lengths must be at least 0, found {lengths[at]} at index {at}")
    counted = lengths > 0
    if not counted.any() or (array[counted] == array[counted][0]).all():
        return np.zeros_like(array)
    if ddof >= lengths.sum():
        raise ValueError(f"ddof must be below the sum {lengths.sum()} of lengths, found {ddof}")
    if kernel := _compiled.kernels.get("compute_group_advantages"):
        found = kernel(array, ddof=ddof, eps=eps, lengths=lengths)
        if found is not None:  # None: the squares overflow or underflow in the kernel
            return found
    exponent = np.frexp(np.abs(array[counted]).max())[1]
    with np.errstate(over="ignore", under="ignore"):
        scaled = np.ldexp(array.astype(np.float64), -exponent)
        centred = scaled - scaled[counted][0]
        centred -= np.average(centred, weights=lengths)
        std = np.sqrt((lengths * centred**2).sum() / (lengths.sum() - ddof))
        return np.where(counted, centred / (std + np.ldexp(eps, -exponent)), 0.0).astype(array.dtype)


def _advantages(array: np.ndarray, groups: int, size: int, ddof: int, eps: float, scale: str) -> np.ndarray:
    ddof = as_count(ddof, "ddof", 0)
    eps = as_number(eps, "eps", 0)
    check_choice(scale, "scale", SCALES)
    scale = SCALES[SCALES.index(scale)]  # the same object: the kernel compares by identity
    if scale not in STD_SCALES:
        ddof = 0
    if scale == "mean" and (array < 0).any():
        at = int((array < 0).argmax())
        raise ValueError(f'rewards must be at least 0 for scale="mean", found {array.flat[at]} at index {at}')
    if array.size == 0 or size == 1:
        return np.zeros_like(array)
    divided_by = {"group": size, "batch": array.size}.get(scale, math.inf)
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
    if scale in ("none", "leave_one_out"):
        size = rewards_PG.shape[1]
        return np.ldexp(centred_PG * (size / (size - 1)) if scale == "leave_one_out" else centred_PG, exponent)
    if scale == "mean":
        std = scaled_PG.mean(axis=1, keepdims=True)
    elif scale == "group":
        std = np.sqrt((centred_PG**2).sum(axis=1, keepdims=True) / (rewards_PG.shape[1] - ddof))
    else:
        from_batch_PG = scaled_PG - scaled_PG[0, 0]
        from_batch_PG -= from_batch_PG.mean()
        std = np.sqrt((from_batch_PG**2).sum() / (rewards_PG.size - ddof))
    divisor = np.broadcast_to(std + np.ldexp(eps, -exponent), rewards_PG.shape)
    return np.divide(centred_PG, divisor, out=np.zeros_like(centred_PG), where=centred_PG != 0)
