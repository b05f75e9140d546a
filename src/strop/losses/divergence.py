"""Divergences of a student's distribution p from a teacher's q over the whole vocabulary (GKD, arXiv 2306.13649, eq. 1).

    beta = 0          Σ q·(log q − log p)                        forward KL
    0 < beta < 1      β·KL(q ‖ m) + (1−β)·KL(p ‖ m)              generalised Jensen–Shannon, m = (1−β)·p + β·q
    beta = 1          Σ p·(log p − log q)                        reverse KL

The gradient with respect to the student's logits, at temperature 1:

    forward           p − q
    others            p·(g − Σ p·g)      g = log p − log q, or (1−β)·(log p − log m)

A token of weight 0 adds 0. The reverse KL is infinite if the teacher excludes a token that the student does not, the
forward KL in the opposite case.

Shapes: N tokens, V vocabulary.
"""

import math

import torch


def divergence(log_p_NV: torch.Tensor, log_q_NV: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the divergence of each row, [N], differentiable in log_p."""
    if beta == 0:
        return _weighted(log_q_NV, log_q_NV - log_p_NV).sum(-1)
    if beta == 1:
        return _weighted(log_p_NV, log_p_NV - log_q_NV).sum(-1)
    log_m_NV = log_mixture(log_p_NV, log_q_NV, beta)
    of_teacher_N = _weighted(log_q_NV, log_q_NV - log_m_NV).sum(-1)
    return beta * of_teacher_N + (1 - beta) * _weighted(log_p_NV, log_p_NV - log_m_NV).sum(-1)


def divergence_and_gradient(
    log_p_NV: torch.Tensor, log_q_NV: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divergences [N] and their gradient by the student's logits [N, V], without autograd."""
    if beta == 0:
        return divergence(log_p_NV, log_q_NV, beta), log_p_NV.exp() - log_q_NV.exp()
    if beta == 1:
        g_NV = log_p_NV - log_q_NV
    else:
        log_m_NV = log_mixture(log_p_NV, log_q_NV, beta)
        g_NV = (1 - beta) * (log_p_NV - log_m_NV)
    weighted_NV = _weighted(log_p_NV, g_NV)
    sum_N = weighted_NV.sum(-1)
    found_N = sum_N
    if beta != 1:
        found_N = sum_N + beta * _weighted(log_q_NV, log_q_NV - log_m_NV).sum(-1)
    return found_N, weighted_NV - log_p_NV.exp() * sum_N[:, None]


def log_mixture(log_p_NV: torch.Tensor, log_q_NV: torch.Tensor, beta: float) -> torch.Tensor:
    """Return log m, where m = (1−β)·p + β·q."""
    lowest = torch.finfo(log_p_NV.dtype).min  # not −inf: the gradient of logaddexp(−inf, −inf) is NaN
    parts = log_p_NV + math.log1p(-beta), log_q_NV + math.log(beta)
    return torch.logaddexp(*(part.clamp(min=lowest) for part in parts))


def _weighted(log_weight_NV: torch.Tensor, values_NV: torch.Tensor) -> torch.Tensor:
    """Return exp(log_weight)·values, with 0 where the weight is 0, even if the value is infinite there."""
    weight_NV = log_weight_NV.exp()
    return weight_NV * values_NV.masked_fill(weight_NV == 0, 0.0)
