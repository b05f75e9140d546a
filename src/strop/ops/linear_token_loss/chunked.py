"""`linear_token_loss` by chunks (see `strop.ops.chunks`): "chunked" with torch's row functions on any device, "triton" with
the row kernels, "exact" with sums of one order. Three products in all, two with a frozen head: the gradients are made in the forward.
"""

from typing import Any

import torch

from strop._tensors import check_linear_logp, check_tokens, computed_in, in_dtype, sums_in
from strop.losses import PolicyLoss
from strop.losses.policy import check_given, policy_loss_of
from strop.losses.rules import TokenRule
from strop.ops.chunks import linear_policy_loss
from strop.ops.library import first_order, keep_gradients, kept_gradients
from strop.ops.linear_token_loss.reference import linear_token_loss
from strop.ops.registry import on_gpu, on_gpu_or_interpreted, only_by_name
from strop.ops.rows import implementation


@linear_token_loss.backend("chunked")
def linear_token_loss_chunked(hidden, weight, ids, weights, **options) -> PolicyLoss:
    return _linear_token_loss("torch", hidden, weight, ids, weights, **options)


@linear_token_loss.backend("exact", when=only_by_name, by_name=on_gpu_or_interpreted)
def linear_token_loss_exact(hidden, weight, ids, weights, **options) -> PolicyLoss:
    return _linear_token_loss("exact", hidden, weight, ids, weights, **options)


@linear_token_loss.backend("triton", when=on_gpu, by_name=on_gpu_or_interpreted)
def linear_token_loss_triton(hidden, weight, ids, weights, **options) -> PolicyLoss:
    return _linear_token_loss("triton", hidden, weight, ids, weights, **options)


def _linear_token_loss(
    rows: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    rule: TokenRule,
    old_logps: torch.Tensor | None = None,
    ref_logps: torch.Tensor | None = None,
    advantages: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    workspace: int | None = None,
    validate: bool = False,
) -> PolicyLoss:
    check_linear_logp(hidden, weight, ids, bias, temperature, None, workspace, validate)
    check_tokens(ids, hidden, weights=weights, old_logps=old_logps, ref_logps=ref_logps, advantages=advantages)
    check_given(rule, ref_logps, advantages)
    sums = sums_in(computed_in(hidden))
    weights, old_n, ref_n, advantages_n = in_dtype(sums, weights, old_logps, ref_logps, advantages)
    per_token = ids, None, old_n, ref_n, weights if advantages_n is None else advantages_n, weights
    total, policy_and_kl, logps_n = linear_loss(
        "linear_token_loss", rows, (hidden, weight, bias), per_token, float(temperature), rule, workspace
    )
    policy, kl = policy_and_kl.unbind()
    return policy_loss_of(rule, total, policy, kl, logps_n, old_n, advantages_n, ref_n)


def linear_loss(
    name: str, rows: str, head: Any, per_token: Any, temperature: float, rule: TokenRule, workspace: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss, its policy's and KL's parts [2], log-probs [N].

    name        of the operator, for its errors
    head        hidden [N, H], weight, bias
    per_token   ids, mask, old log-probs, reference log-probs, advantages, weights: [N] or None
    """
    wanted = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in head]
    return LinearTokenLoss.apply(
        *head, per_token, temperature, rule, (rows, workspace, computed_in(head[0])), wanted, name
    )


class LinearTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight, bias, tensors, temperature, rule, settings, wanted, name):
        total, policy_and_kl, logps_N, *gradients = linear_policy_loss(
            hidden_NH, weight, bias, *tensors, temperature, rule.text, *settings, wanted
        )
        ctx.wanted, ctx.rows = wanted, settings[0]
        if any(wanted):
            keep_gradients(ctx, name, *gradients)
        ctx.mark_non_differentiable(policy_and_kl, logps_N)
        ctx.set_materialize_grads(False)  # no zeros for those
        return total, policy_and_kl, logps_N

    @staticmethod
    def backward(ctx, d_total, _policy_and_kl, _logps):
        with torch.no_grad():
            gradients = kept_gradients(ctx, d_total, lambda *given: implementation(ctx.rows).scale_(*given))
        found = (g if w else None for g, w in zip(gradients, ctx.wanted, strict=True))
        return first_order(*found, None, None, None, None, None, None)
