"""The divergence of a student from a teacher, from the hidden states and LM heads of both: what distillation trains on.

Shapes: n tokens, H hidden of the student, G of the teacher, V the vocabulary.
"""

from typing import NamedTuple

import torch

from strop._checks import check_number
from strop._tensors import (
    GivenHead,
    check_device,
    check_floats,
    check_head,
    check_shape,
    check_temperature,
    check_workspace,
    computed_in,
    in_dtype,
    sums_in,
)
from strop.losses.divergence import divergence
from strop.ops.registry import op


class DivergenceLoss(NamedTuple):
    """Σ weight·divergence, 0-d, and the divergence of every token, [n], without gradient."""

    loss: torch.Tensor
    divergences: torch.Tensor


@op
def linear_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    weights: torch.Tensor,
    *,
    beta: float = 1.0,
    bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    workspace: int | None = None,
) -> DivergenceLoss:
    """Σ weight·D(student, teacher) over tokens, without ever holding [n, V] (but in this reference).

    hidden           [n, H] the student's states that predict the tokens
    weight, bias     [V, H] and [V] of its LM head, of hidden's dtype (any under autocast); tied or frozen heads too
    teacher_hidden   [n, G] the teacher's states of the same tokens, with teacher_weight [V, G] and teacher_bias [V]
    weights          [n] of each token in the loss
    beta             1 the reverse KL, 0 the forward KL, between them the generalised Jensen–Shannon divergence of GKD
    temperature      divides the logits of both
    workspace        bytes of working memory; by default 560 MiB, 64 MiB on a CPU

    returns          `DivergenceLoss`. Only the loss has a gradient, and only to hidden, weight and bias
    """
    head, teacher = (hidden, weight, bias), (teacher_hidden, teacher_weight, teacher_bias)
    check_linear_divergence(head, teacher, weights, beta, temperature, workspace)
    log_p_nV, log_q_nV = (_log_probs(*one, temperature) for one in (head, teacher))
    found_n = divergence(log_p_nV, log_q_nV.detach().to(log_p_nV.dtype), beta)
    (weights_n,) = in_dtype(found_n.dtype, weights)
    return DivergenceLoss((weights_n * found_n).sum(), found_n.detach())


def _log_probs(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float
) -> torch.Tensor:
    logits_nV = torch.nn.functional.linear(hidden, weight, bias)
    return torch.log_softmax(logits_nV.to(sums_in(computed_in(hidden))) / temperature, -1)


def check_linear_divergence(
    head: GivenHead, teacher: GivenHead, weights: torch.Tensor, beta: float, temperature: float, workspace: int | None
) -> None:
    """Everything the operator asks of its arguments."""
    hidden, weight, _ = head
    check_head(*head)
    if hidden.ndim != 2:
        raise ValueError(f"hidden must have shape [n, H], found {list(hidden.shape)}")
    check_head(teacher[0], teacher[1], teacher[2], prefix="teacher_")
    check_device(teacher[0], "teacher_hidden", hidden, "hidden")
    check_shape(teacher[0], "teacher_hidden", (hidden.shape[0], teacher[0].shape[-1]))
    if teacher[1].shape[0] != weight.shape[0]:
        raise ValueError(
            f"teacher_weight must have the vocabulary of weight, {weight.shape[0]} tokens, found {teacher[1].shape[0]}"
        )
    check_floats(weights, "weights")
    check_shape(weights, "weights", hidden.shape[:1])
    check_device(weights, "weights", hidden, "hidden")
    check_number(beta, "beta", 0, 1)
    check_temperature(temperature)
    check_workspace(workspace)
