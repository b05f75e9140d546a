"""Row functions in plain torch, for any device; the same functions as in `strop.ops.rows.triton_rows`.

The time goes into passes over [N, V]. There are few of them, and they reuse the logits' memory where allowed.
"""

import torch

from strop.losses.divergence import divergence_and_gradient
from strop.losses.rules import TokenRule, token_terms
from strop.ops.rows import PolicyTerms, TokenValues

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def bytes_per_logit(dtype: torch.dtype, entropy: bool = False, kept: bool = False) -> int:
    """Return the bytes of working memory per logit.

    These are the logit, a float32 copy if it is narrower or kept, and for the entropy one more copy and a mask.
    """
    wide = max(dtype.itemsize, 4)
    return dtype.itemsize + (wide if kept or dtype.itemsize < 4 else 0) + (wide + 1 if entropy else 0)


def logps(
    logits: torch.Tensor,
    ids_N: torch.Tensor,
    mask_N: torch.Tensor | None,
    temperature: float,
    entropy: bool,
    into: Results | None = None,
    block: tuple[int, int, int] | None = None,
    in_place: bool = False,
) -> Results:
    """Return log-probs [N], statistics [2, N] for the backward, entropies [N] (empty unless `entropy` is set).

    block      (first id, vocabulary, number of this block) if the logits are one of several blocks of the vocabulary;
               `into` has the results of earlier blocks: x[id], the maximum m, Σ exp(x − m), Σ exp·(x − m)
    in_place   the logits may be overwritten
    """
    assert mask_N is None, "masked tokens are dropped before"
    x_NV, own = _scaled(logits, temperature, in_place)
    N, V = x_NV.shape
    first_id, vocabulary, number = block or (0, V, 0)
    logps_N, stats_2N, entropies_N = into or (x_NV.new_empty(size) for size in ((N,), (2, N), (N if entropy else 0,)))

    here_N, picked_N = _picked(x_NV, ids_N, first_id)
    m_N = _highest(x_NV)
    d_NV = _minus(x_NV, own, m_N)
    t_N = None
    if entropy:
        e_NV = d_NV.exp()
        s_N = e_NV.sum(-1)
        t_N = d_NV.masked_fill_(e_NV == 0, 0.0).mul_(e_NV).sum(-1)
    else:
        s_N = d_NV.exp_().sum(-1)
    if number == 0:
        picked_N = torch.where(_exists(ids_N, vocabulary), picked_N, torch.nan)
    else:
        picked_N = torch.where(here_N, picked_N, logps_N)
        top_N = torch.maximum(m_N, stats_2N[0])
        here_down_N, before_down_N = m_N - top_N, stats_2N[0] - top_N
        if t_N is not None:
            before_t_N = (entropies_N + stats_2N[1] * before_down_N) * before_down_N.exp()
            t_N = (t_N + s_N * here_down_N) * here_down_N.exp() + before_t_N
        s_N = s_N * here_down_N.exp() + stats_2N[1] * before_down_N.exp()
        m_N = top_N
    if first_id + V == vocabulary:
        log_sum_N = s_N.log()
        picked_N = picked_N - m_N - log_sum_N
        t_N = None if t_N is None else log_sum_N - t_N / s_N
        s_N = log_sum_N
    logps_N.copy_(picked_N)
    stats_2N[0].copy_(m_N)
    stats_2N[1].copy_(s_N)
    if t_N is not None:
        entropies_N.copy_(t_N)
    return logps_N, stats_2N, entropies_N


def logps_bwd(
    logits: torch.Tensor,
    ids_N: torch.Tensor,
    mask_N: torch.Tensor | None,
    stats_2N: torch.Tensor,
    entropies_N: torch.Tensor,
    d_logps_N: torch.Tensor,
    d_entropies_N: torch.Tensor | None,
    temperature: float,
    in_place: bool,
    block: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Return the gradient of the logits; in_place writes it over them. block: (first id, vocabulary)."""
    assert mask_N is None, "masked tokens are dropped before"
    first_id, vocabulary = block or (0, logits.shape[-1])
    m_N, log_sum_N = stats_2N
    d_NV = _minus(*_scaled(logits, temperature, in_place), m_N)
    d_logps_N = torch.where(_exists(ids_N, vocabulary), d_logps_N, torch.nan) / temperature
    if d_entropies_N is None:
        dx_NV = _times(d_NV.exp_(), -d_logps_N * (-log_sum_N).exp())  # −d_logp·p
    else:  # −d_logp·p − d_H·p·(log p + H)
        log_p_NV = _minus(d_NV, True, log_sum_N)
        p_NV = log_p_NV.exp()
        inside_NV = log_p_NV.masked_fill_(p_NV == 0, 0.0).add_(entropies_N[:, None])
        dx_NV = _times(inside_NV, d_entropies_N / temperature).add_(d_logps_N[:, None]).mul_(p_NV).neg_()
    return _written(_with_targets(dx_NV, ids_N, d_logps_N, first_id), logits, in_place)


def policy_terms(
    logits: torch.Tensor,
    tokens: TokenValues,
    temperature: float,
    rule: TokenRule,
    gradient: bool,
    in_place: bool,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
    factored: bool = False,
) -> PolicyTerms:
    """Return the terms of a policy loss and the complete gradient of the logits; no row factors remain."""
    assert tokens.mask is None, "masked tokens are dropped before"
    ids_N = tokens.ids
    x_NV, own = _scaled(logits, temperature, in_place)
    exists_N = _exists(ids_N, x_NV.shape[1])
    picked_N = torch.where(exists_N, _picked(x_NV, ids_N, 0)[1], torch.nan)
    m_N = _highest(x_NV)
    e_NV = _minus(x_NV, own, m_N).exp_()
    s_N = e_NV.sum(-1)
    logps_N = picked_N - m_N - s_N.log()
    terms_3N, d_logps_N = token_terms(logps_N, *tokens[2:], rule)
    d_logits = None
    if gradient:
        d_logps_N = torch.where(exists_N, d_logps_N, torch.nan) / temperature
        d_logits = _written(_with_targets(_times(e_NV, -d_logps_N / s_N), ids_N, d_logps_N, 0), logits, in_place)
    if into is not None:
        logps_N, terms_3N = into[0].copy_(logps_N), into[1].copy_(terms_3N)
    return PolicyTerms(logps_N, terms_3N, d_logits)


def divergence_bytes(dtype: torch.dtype, teacher_dtype: torch.dtype) -> int:
    """Return the bytes per pair of student and teacher logits: both, wider copies, four intermediate results."""
    return dtype.itemsize + teacher_dtype.itemsize + 6 * max(dtype.itemsize, 4)


def divergence(
    logits_NV: torch.Tensor, teacher_NV: torch.Tensor, weights_N: torch.Tensor, beta: float, temperature: float,
    gradient: bool,
) -> torch.Tensor:  # fmt: skip
    """Return `strop.losses.divergence` [N]. With `gradient`, overwrite the logits with weight·gradient."""
    log_p_NV, log_q_NV = ((x.to(weights_N.dtype) / temperature).log_softmax(-1) for x in (logits_NV, teacher_NV))
    found_N, d_NV = divergence_and_gradient(log_p_NV, log_q_NV, beta)
    if gradient:
        logits_NV.copy_(d_NV.mul_((weights_N / temperature)[:, None]))
    return found_N


def sums(terms_3N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss, and its policy and KL parts in one tensor [2]."""
    return terms_3N[0].sum(), terms_3N[1:].sum(-1)


def scale_(gradient: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply the gradient by the factor in place."""
    gradient.mul_(factor)


# ---- passes over the logits ----


def _scaled(logits: torch.Tensor, temperature: float, in_place: bool) -> tuple[torch.Tensor, bool]:
    """Return logits / temperature in the precision of the arithmetic, and whether this tensor may be overwritten."""
    if logits.dtype in (torch.float32, torch.float64):
        x_NV, own = logits, in_place
    else:
        x_NV, own = logits.float(), True
    if temperature == 1:
        return x_NV, own
    return (x_NV.div_(temperature) if own else x_NV / temperature), True


def _highest(x_NV: torch.Tensor) -> torch.Tensor:
    return x_NV.amax(-1).clamp(min=torch.finfo(x_NV.dtype).min)  # finite, also for a row of −inf


def _minus(x_NV: torch.Tensor, own: bool, values_N: torch.Tensor) -> torch.Tensor:
    return x_NV.sub_(values_N[:, None]) if own else x_NV - values_N[:, None]


def _times(x_NV: torch.Tensor, factors_N: torch.Tensor) -> torch.Tensor:
    return x_NV.mul_(factors_N[:, None])


def _exists(ids_N: torch.Tensor, vocabulary: int) -> torch.Tensor:
    return (ids_N >= 0) & (ids_N < vocabulary)


def _column(ids_N: torch.Tensor, V: int, first_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which ids lie in this block of V, and their columns [N, 1], 0 for the others."""
    here_N = _exists(ids_N - first_id, V)
    return here_N, torch.where(here_N, ids_N - first_id, 0).long()[:, None]


def _picked(x_NV: torch.Tensor, ids_N: torch.Tensor, first_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which ids lie in this block, and their logits, which are meaningless for the others."""
    here_N, column_N1 = _column(ids_N, x_NV.shape[1], first_id)
    return here_N, x_NV.gather(-1, column_N1).squeeze(-1)


def _with_targets(dx_NV: torch.Tensor, ids_N: torch.Tensor, d_N: torch.Tensor, first_id: int) -> torch.Tensor:
    here_N, column_N1 = _column(ids_N, dx_NV.shape[1], first_id)
    return dx_NV.scatter_add_(1, column_N1, torch.where(here_N, d_N, 0.0)[:, None])


def _written(dx_NV: torch.Tensor, logits: torch.Tensor, in_place: bool) -> torch.Tensor:
    return logits.copy_(dx_NV) if in_place else dx_NV.to(logits.dtype)
