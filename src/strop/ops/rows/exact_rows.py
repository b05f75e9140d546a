"""Row functions that compute all log-probs with one kernel, so rollouts, scores and losses agree bit for bit.

They build on `strop.ops.rows.triton_rows`. Rows must begin on multiples of 16 bytes (`Head.row`): another alignment
changes the order of the sums.
"""

import torch

from strop.losses.rules import TokenRule, token_terms
from strop.ops.rows import PolicyTerms, TokenValues, triton_rows
from strop.ops.rows.triton_rows import logps_bwd, put_multiplied, scale_, sums

__all__ = ["bytes_per_logit", "logps", "logps_bwd", "policy_terms", "put_multiplied", "scale_", "sums"]


def bytes_per_logit(dtype: torch.dtype, entropy: bool = False, kept: bool = False) -> int:
    """Return the bytes per logit. With `kept` they are overestimated, so that rows are not split into blocks."""
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
    """Return the results of `triton_rows.logps` for whole rows. Entropies take a second pass."""
    given = logits, ids_N, mask_N, temperature
    assert block is None or block[:2] == (0, logits.shape[-1]), "of whole rows"
    entropies_N = triton_rows.logps(*given, True)[2] if entropy else None
    if entropies_N is not None and into is not None:
        into[2].copy_(entropies_N)
    rest = None if into is None else (*into[:2], None)
    return *triton_rows.logps(*given, False, rest)[:2], entropies_N


def policy_terms(
    logits: torch.Tensor,
    tokens: TokenValues,
    temperature: float,
    rule: TokenRule,
    gradient: bool,
    in_place: bool,
    into: tuple[torch.Tensor, torch.Tensor],
    factored: bool = False,
) -> PolicyTerms:
    """Return the results of `triton_rows.policy_terms`: log-probs and gradient by kernels, the loss by torch."""
    assert in_place
    logps_N, stats_2N, _ = logps(logits, tokens.ids, tokens.mask, temperature, False)
    terms_3N, d_logps_N = token_terms(logps_N, *tokens[2:], rule)
    into[0].copy_(logps_N)
    into[1].copy_(terms_3N)
    if gradient:
        logps_bwd(logits, tokens.ids, tokens.mask, stats_2N, logps_N, d_logps_N, None, temperature, True)  # type: ignore[arg-type]
    return PolicyTerms(*into, logits)
