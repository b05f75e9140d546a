"""Generalised advantage estimation (arXiv 1506.02438, eqs. 11 and 16).

    δ_t = r_t + γ·V_{t+1} − V_t        A_t = δ_t + γλ·A_{t+1}        V and A are 0 after the last token

t runs over the tokens whose mask is 1. The others are skipped and get the advantage 0, so tool output between two turns
of a policy needs no special handling. Sums are taken in float64 for both dtypes.

Shapes: B sequences, T tokens.
"""

from typing import Any

import numpy as np

from strop import _compiled
from strop._checks import as_log_probs, as_mask, as_number, like_input
from strop._types import Array


@_compiled.compiled
def compute_gae(
    rewards: Array, values: Array, *, gamma: float = 1.0, lam: float = 0.95, mask: Array | None = None
) -> Any:
    """Return the advantages of every token. A critic is trained on advantages + values, the returns.

    rewards   (B, T) or (T,), float32 or float64: the reward of each token
    values    the same shape and dtype: the critic's value before each token
    gamma     γ, the discount, from 0 to 1
    lam       λ, from 0 (one step) to 1 (the whole return)
    mask      the same shape, True or 1 where a token counts
    returns   the same shape and dtype
    """
    r, v = as_log_probs(rewards, "rewards", None), as_log_probs(values, "values", None)
    if r.dtype != v.dtype:
        raise TypeError(f"values must be {r.dtype} as rewards is, found {v.dtype}")
    if r.shape != v.shape:
        raise ValueError(f"values must have the shape {r.shape} of rewards, found {v.shape}")
    if r.ndim not in (1, 2):
        raise ValueError(f"rewards must have shape (B, T) or (T,), found {r.shape}")
    m = as_mask(mask, "mask", r.shape, of="rewards")
    gamma, lam = as_number(gamma, "gamma", 0, 1), as_number(lam, "lam", 0, 1)
    if kernel := _compiled.kernels.get("compute_gae"):
        return like_input(kernel(r, v, gamma=gamma, lam=lam, mask=m), rewards)
    rows = (1, r.size) if r.ndim == 1 else r.shape
    found = _gae_numpy(r.reshape(rows), v.reshape(rows), gamma, lam, None if m is None else m.reshape(rows))
    return like_input(found.astype(r.dtype).reshape(r.shape), rewards)


def _gae_numpy(
    rewards_BT: np.ndarray, values_BT: np.ndarray, gamma: float, lam: float, mask_BT: np.ndarray | None
) -> np.ndarray:
    rewards_BT, values_BT = rewards_BT.astype(np.float64), values_BT.astype(np.float64)
    found_BT = np.zeros_like(rewards_BT)
    next_value_B = next_advantage_B = np.zeros(len(rewards_BT))
    with np.errstate(over="ignore", invalid="ignore"):
        for t in reversed(range(rewards_BT.shape[1])):
            delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
            advantage_B = delta_B + gamma * lam * next_advantage_B
            counts_B = np.ones(len(delta_B), dtype=bool) if mask_BT is None else mask_BT[:, t]
            found_BT[:, t] = np.where(counts_B, advantage_B, 0.0)
            next_advantage_B = np.where(counts_B, advantage_B, next_advantage_B)
            next_value_B = np.where(counts_B, values_BT[:, t], next_value_B)
    return found_BT
