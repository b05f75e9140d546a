"""KL divergence between two policies, estimated from the log-probs of tokens.

    token_kl            Σ exp(p)·(p − q)                         exact KL where the tokens are the whole vocabulary
    token_kl_schulman   Σ exp(d) − d − 1   with  d = q − p       k3 (Schulman 2020): unbiased for tokens sampled from p,
                                                                 never negative

p is the policy that sampled the tokens, q the reference. The direction of k3 matters: d is *reference minus policy*,
as TRL and verl compute it. One public library computes exp(p − q) − (p − q) − 1 under the same name; to get its values,
exchange the arguments.

k3 is computed without cancellation. Near the reference d is small and exp(d) − d − 1 is about d²/2, which a direct
subtraction would lose (in float32 entirely below d = 3e-4).

A token with p = −inf has probability 0 and contributes 0 to token_kl. A position whose mask is 0 contributes 0,
whatever its values are. NaN anywhere else gives NaN. Sums are taken in float64 for both dtypes.

Shapes: B sequences, T tokens.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from strop import _compiled
from strop._checks import as_log_probs, as_mask, like_input, rows_and_columns
from strop._types import Array


@_compiled.compiled
def compute_token_kl(log_p: Array, log_q: Array, mask: Array | None = None) -> float:
    """Return Σ exp(p)·(p − q) over all tokens.

    log_p, log_q   log-probs of policy and reference, float32 or float64, of one shape
    mask           the same shape, True or 1 where a token counts
    """
    return _total("compute_token_kl", _token_kl_terms, log_p, log_q, mask)


@_compiled.compiled
def compute_token_kl_f32(log_p: Array, log_q: Array, mask: Array | None = None) -> float:
    """Return the same as `compute_token_kl`, for float32 inputs only."""
    return _total("compute_token_kl", _token_kl_terms, log_p, log_q, mask, np.float32)


@_compiled.compiled
def compute_token_kl_schulman(log_p: Array, log_q: Array, mask: Array | None = None) -> float:
    """Return k3, Σ exp(q − p) − (q − p) − 1 over all tokens; p is the policy, q the reference.

    log_p, log_q   log-probs of policy and reference, float32 or float64, of one shape
    mask           the same shape, True or 1 where a token counts
    """
    return _total("compute_token_kl_schulman", _schulman_terms, log_p, log_q, mask)


@_compiled.compiled
def compute_token_kl_schulman_f32(log_p: Array, log_q: Array, mask: Array | None = None) -> float:
    """Return the same as `compute_token_kl_schulman`, for float32 inputs only."""
    return _total("compute_token_kl_schulman", _schulman_terms, log_p, log_q, mask, np.float32)


@_compiled.compiled
def compute_batch_token_kl(log_p: Array, log_q: Array, seq_len: int | None = None, mask: Array | None = None) -> Any:
    """Return Σ exp(p)·(p − q) of each sequence.

    log_p, log_q   (B·T,) with seq_len=T, or (B, T); float32 or float64
    mask           the same shape, True or 1 where a token counts
    returns        (B,) of the same dtype
    """
    return _per_sequence("compute_batch_token_kl", _token_kl_terms, log_p, log_q, seq_len, mask)


@_compiled.compiled
def compute_batch_token_kl_f32(
    log_p: Array, log_q: Array, seq_len: int | None = None, mask: Array | None = None
) -> Any:
    """Return the same as `compute_batch_token_kl`, for float32 inputs only."""
    return _per_sequence("compute_batch_token_kl", _token_kl_terms, log_p, log_q, seq_len, mask, np.float32)


@_compiled.compiled
def compute_batch_token_kl_schulman(
    log_p: Array, log_q: Array, seq_len: int | None = None, mask: Array | None = None
) -> Any:
    """Return k3 of each sequence, Σ exp(q − p) − (q − p) − 1; p is the policy, q the reference.

    log_p, log_q   (B·T,) with seq_len=T, or (B, T); float32 or float64
    mask           the same shape, True or 1 where a token counts
    returns        (B,) of the same dtype
    """
    return _per_sequence("compute_batch_token_kl_schulman", _schulman_terms, log_p, log_q, seq_len, mask)


@_compiled.compiled
def compute_batch_token_kl_schulman_f32(
    log_p: Array, log_q: Array, seq_len: int | None = None, mask: Array | None = None
) -> Any:
    """Return the same as `compute_batch_token_kl_schulman`, for float32 inputs only."""
    return _per_sequence("compute_batch_token_kl_schulman", _schulman_terms, log_p, log_q, seq_len, mask, np.float32)


Terms = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _inputs(
    log_p: Array, log_q: Array, mask: Array | None, dtype: type | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    p, q = as_log_probs(log_p, "log_p", dtype), as_log_probs(log_q, "log_q", dtype)
    if p.dtype != q.dtype:
        raise TypeError(f"log_q must be {p.dtype} as log_p is, found {q.dtype}")
    if p.shape != q.shape:
        raise ValueError(f"log_q must have the shape {p.shape} of log_p, found {q.shape}")
    return p, q, as_mask(mask, "mask", p.shape, of="log_p")


def _total(name: str, terms: Terms, log_p: Array, log_q: Array, mask: Array | None, dtype: type | None = None) -> float:
    p, q, m = _inputs(log_p, log_q, mask, dtype)
    if kernel := _compiled.kernels.get(name):
        return kernel(p, q, m)
    return float(_sums_numpy(terms, p.reshape(1, -1), q.reshape(1, -1), None if m is None else m.reshape(1, -1))[0])


def _per_sequence(
    name: str,
    terms: Terms,
    log_p: Array,
    log_q: Array,
    seq_len: int | None,
    mask: Array | None,
    dtype: type | None = None,
) -> Any:
    p, q, m = _inputs(log_p, log_q, mask, dtype)
    shape = rows_and_columns(p.shape, seq_len, "log_p", "seq_len")
    p, q, m = p.reshape(shape), q.reshape(shape), None if m is None else m.reshape(shape)
    if kernel := _compiled.kernels.get(name):
        return like_input(kernel(p, q, None, m), log_p)
    with np.errstate(over="ignore"):
        return like_input(_sums_numpy(terms, p, q, m).astype(p.dtype), log_p)


def _sums_numpy(terms: Terms, p_BT: np.ndarray, q_BT: np.ndarray, mask_BT: np.ndarray | None) -> np.ndarray:
    p_BT, q_BT = p_BT.astype(np.float64), q_BT.astype(np.float64)
    if mask_BT is not None:  # p = q = 0 contributes 0 to either formula
        p_BT, q_BT = np.where(mask_BT, p_BT, 0.0), np.where(mask_BT, q_BT, 0.0)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return terms(p_BT, q_BT).sum(axis=1)


def _token_kl_terms(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.where(p == -np.inf, 0.0, np.exp(p) * (p - q))


_EXP_TAIL = [1 / math.factorial(k + 2) for k in range(12)]  # (e^d − 1 − d) / d² = Σ d^k / (k + 2)!


def _schulman_terms(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    d = np.minimum(q - p, 710.0)  # exp(710) is infinite; the bound avoids inf − inf
    near = np.clip(d, -0.35, 0.35)
    series = near * near * np.polynomial.polynomial.polyval(near, _EXP_TAIL)
    return np.where(near == d, series, np.exp(d) - (d + 1.0))
