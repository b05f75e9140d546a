"""The draw of a token: temperature, then top-k, top-p and min-p. The rules are those of `strop.moe.sampling`, in torch.

A token's random number has an address: (seed, prompt, sample, position in the completion). A row therefore draws the
same tokens whatever rows are beside it, in whatever order rows end, and however many processes share the prompts.

Shapes: B rows in all, N in a step, T tokens, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from strop.config import Sampling
from strop.ops.head import widest


def uniforms(seed: int, addresses: Sequence[int], num_samples: int, num_tokens: int) -> torch.Tensor:
    """Return [B, T] float64 in [0, 1), the random numbers of num_samples completions of the prompts with these
    addresses.
    """
    row_bits_B = row_bits(seed, addresses, num_samples)
    return uniforms_from(row_bits_B, np.zeros(len(row_bits_B), np.uint64), num_tokens)


def row_bits(seed: int, addresses: Sequence[int], num_samples: int) -> np.ndarray:
    """Return [B] uint64, the bits that all random numbers of a row are made from."""
    with np.errstate(over="ignore"):
        prompts_P1 = _mixed(_mixed(np.uint64(seed)) + np.asarray(addresses, np.uint64)[:, None])
        rows: np.ndarray = _mixed(prompts_P1 + np.arange(num_samples, dtype=np.uint64)).reshape(-1)
    return rows


def uniforms_from(row_bits_B: np.ndarray, first_B: np.ndarray, num_tokens: int) -> torch.Tensor:
    """Return [B, T] random numbers of num_tokens tokens, from position first_B of each row on."""
    with np.errstate(over="ignore"):
        places_BT = first_B[:, None].astype(np.uint64) + np.arange(1, num_tokens + 1, dtype=np.uint64)
        bits_BT = _mixed(row_bits_B[:, None] + _STRIDE * places_BT)
    return torch.from_numpy((bits_BT >> np.uint64(11)) * 2.0**-53)


_STRIDE = np.uint64(0x9E3779B97F4A7C15)


def _mixed(bits: Any) -> Any:
    """Return splitmix64 of the bits, a bijection that mixes all 64 bits (Steele et al., OOPSLA 2014)."""
    bits = bits + _STRIDE
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def sampling_logps(logits_NV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return log-probs of the distribution that tokens are drawn from; −inf where a token cannot be drawn.

    Greedy: those of softmax(logits), since under a distribution of one token every log-prob would be 0.
    Of equally probable tokens the lower id counts as the more probable.
    """
    logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    if sampling.greedy or (sampling.temperature == 1 and not sampling.cuts):
        return logits_NV.log_softmax(-1)
    top = logits_NV.amax(-1, keepdim=True)
    logps_NV = ((logits_NV - top) / sampling.temperature).log_softmax(-1)  # 0 at the top, at any temperature
    if not sampling.cuts:
        return logps_NV
    sorted_NV, order_NV = logps_NV.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        sorted_NV[..., sampling.top_k :] = -torch.inf
        sorted_NV = sorted_NV.log_softmax(-1)
    if sampling.top_p < 1:
        p_NV = sorted_NV.exp()
        before_NV = p_NV.cumsum(-1) - p_NV  # the mass of the tokens more probable than this one
        before_NV[..., 0] = 0.0  # the most probable token always stays
        sorted_NV = sorted_NV.masked_fill(before_NV >= sampling.top_p, -torch.inf).log_softmax(-1)
    if sampling.min_p > 0:
        least_N1 = sorted_NV[..., :1] + math.log(sampling.min_p)
        sorted_NV = sorted_NV.masked_fill(sorted_NV < least_N1, -torch.inf).log_softmax(-1)
    return torch.empty_like(logps_NV).scatter_(-1, order_NV, sorted_NV)


def draw(logits_NV: torch.Tensor, uniforms_N: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens_N and their log-probs under `sampling_logps`.

    uniforms_N   one number in [0, 1) per row: the token is the first whose cumulative probability exceeds it
    """
    logps_NV = sampling_logps(logits_NV, sampling)
    if sampling.greedy:
        tokens_N = logits_NV.argmax(-1)
    else:
        cdf_NV = logps_NV.exp().cumsum(-1, dtype=widest(logps_NV.device))
        # u·total < total, so the search ends at the last token with any mass, or before
        tokens_N = torch.searchsorted(cdf_NV, (uniforms_N.to(cdf_NV.dtype) * cdf_NV[:, -1])[:, None], right=True)[:, 0]
    return tokens_N, logps_NV.gather(-1, tokens_N[:, None])[:, 0]


def completion_lengths(new_BT: torch.Tensor, eos_ids: tuple[int, ...]) -> torch.Tensor:
    """Return the number of tokens up to and including the first EOS; all if there is none."""
    is_eos_BT = torch.isin(new_BT, torch.tensor(eos_ids, dtype=new_BT.dtype, device=new_BT.device))
    first_B = is_eos_BT.int().argmax(1) + 1
    return torch.where(is_eos_BT.any(1), first_B, new_BT.shape[1])
