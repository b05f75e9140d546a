"""Rows of logits whose log-probs are one kernel's, whatever is asked for besides: a rollout's, a score's and a loss's are equal
bit for bit. The same functions as in `strop.ops.rows.triton_rows`.

Rows must begin on multiples of 16 bytes (`Head.row`): where one begins otherwise, other elements are summed together.
"""

import torch

from strop.losses.rules import TokenRule, token_terms
from strop.ops.rows import PolicyTerms, triton_rows
from strop.ops.rows.triton_rows import logps_bwd, put_multiplied, scale_, sums

__all__ = ["bytes_per_logit", "logps", "logps_bwd", "policy_terms", "put_multiplied", "scale_", "sums"]


def bytes_per_logit(dtype: torch.dtype, entropy: bool = False, kept: bool = False) -> int:
    """Of working memory: the logit itself. `kept`, for which rows are cut into blocks of the vocabulary, is refused so."""
    return dtype.itemsize * (2 if kept else 1)


def logps(
    logits: torch.Tensor,
    ids_N: torch.Tensor,
    mask_N: torch.Tensor | None,
    temperature: float,
    entropy: bool,
    into: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    block: tuple[int, int, int] | None = None,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """As of `triton_rows`, of whole rows. Entropies are a visit of their own."""
    given = logits, ids_N, mask_N, temperature
    assert block is None or block[:2] == (0, logits.shape[-1]), "of whole rows"
    entropies_N = triton_rows.logps(*given, True)[2] if entropy else None
    if entropies_N is not None and into is not None:
        into[2].copy_(entropies_N)
    rest = None if into is None else (*into[:2], None)
    return *triton_rows.logps(*given, False, rest)[:2], entropies_N


def policy_terms(
    logits: torch.Tensor,
    ids_N: torch.Tensor,
    mask_N: torch.Tensor | None,
    old_logps_N: torch.Tensor | None,
    ref_logps_N: torch.Tensor | None,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    temperature: float,
    rule: TokenRule,
    gradient: bool,
    in_place: bool,
    into: tuple[torch.Tensor, torch.Tensor],
    factored: bool = False,
) -> PolicyTerms:
    """As of `triton_rows`: the log-prob by its kernel, the loss by torch, the gradient by another kernel."""
    assert in_place
    logps_N, stats_2N, _ = logps(logits, ids_N, mask_N, temperature, False)
    terms_3N, d_logps_N = token_terms(logps_N, old_logps_N, ref_logps_N, advantages, weights, rule)
    into[0].copy_(logps_N)
    into[1].copy_(terms_3N)
    if gradient:
        logps_bwd(logits, ids_N, mask_N, stats_2N, logps_N, d_logps_N, None, temperature, True)  # type: ignore[arg-type]
    return PolicyTerms(*into, logits)
