"""`linear_token_loss` by chunks (see `strop.ops.chunks`): "chunked" with torch's row functions on any device, "triton" with
the row kernels. Three products in all, two with a frozen head: the gradients are made in the forward.
"""

from functools import partial
from typing import Any

import torch

from strop._tensors import in_dtype
from strop.losses import NLL, PolicyLoss
from strop.losses.policy import tokens_metrics, tokens_of
from strop.losses.rules import TokenRule, as_text, from_text
from strop.ops.autograd import first_order
from strop.ops.chunks import linear_policy_terms
from strop.ops.head import Wanted, sums_in
from strop.ops.library import library_op
from strop.ops.linear_logp.chunked import computed_in, fake_gradients, head_in
from strop.ops.linear_token_loss.reference import check_linear_token_loss, linear_token_loss
from strop.ops.policy import keep_gradients, kept_gradients
from strop.ops.rows import implementation, on_gpu, on_gpu_or_interpreted


@linear_token_loss.backend("chunked")
def linear_token_loss_chunked(hidden, weight, ids, weights, **options) -> PolicyLoss:
    return _linear_token_loss("torch", hidden, weight, ids, weights, **options)


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
    check_linear_token_loss(
        hidden, weight, ids, weights, rule, old_logps, ref_logps, advantages, bias, temperature, workspace, validate
    )
    sums = sums_in(computed_in(hidden))
    weights, old_n, ref_n, advantages_n = in_dtype(sums, weights, old_logps, ref_logps, advantages)
    per_token = ids, None, old_n, ref_n, weights if advantages_n is None else advantages_n, weights
    total, policy_and_kl, logps_n = linear_loss(
        "linear_token_loss", rows, (hidden, weight, bias), per_token, float(temperature), rule, workspace
    )
    policy, kl = policy_and_kl.unbind()
    if isinstance(rule, NLL):
        return PolicyLoss(total, policy, kl)
    return PolicyLoss(
        total, policy, kl, lambda: tokens_metrics(rule, tokens_of(logps_n, old_n, advantages_n), ref_n, None)
    )


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
            hidden_NH, weight, bias, *tensors, temperature, as_text(rule), *settings, wanted
        )
        ctx.wanted, ctx.rows = wanted, settings[0]
        if any(wanted):
            keep_gradients(ctx, name, *gradients)
        ctx.mark_non_differentiable(policy_and_kl, logps_N)
        ctx.set_materialize_grads(False)  # no zeros for those
        return total, policy_and_kl, logps_N

    @staticmethod
    @first_order
    def backward(ctx, d_total, _policy_and_kl, _logps):
        gradients = kept_gradients(ctx, d_total, lambda *arguments: implementation(ctx.rows).scale_(*arguments))
        return (
            *(g if w else None for g, w in zip(gradients, ctx.wanted, strict=True)),
            None,
            None,
            None,
            None,
            None,
            None,
        )


def _fake(hidden_NH, weight, bias, ids_N, *rest):
    *_, dtype, wanted = rest
    make = partial(hidden_NH.new_empty, dtype=sums_in(dtype))
    return make(()), make(2), make(ids_N.shape), *fake_gradients(hidden_NH, weight, bias, dtype, wanted)


@library_op(
    "linear_policy_loss(Tensor hidden, Tensor weight, Tensor? bias, Tensor ids, Tensor? mask, Tensor? old_logps, "
    "Tensor? ref_logps, Tensor advantages, Tensor weights, float temperature, str rule, str rows, int? workspace, "
    "ScalarType dtype, bool[] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake,
)
def linear_policy_loss(
    hidden_NH, weight, bias, ids_N, mask_N, old_N, ref_N, advantages_N, weights_N, temperature, rule, rows,
    workspace, dtype, wanted,
):  # fmt: skip
    total, policy_and_kl, logps_N, gradients = linear_policy_terms(
        hidden_NH, head_in(dtype, weight, bias), ids_N, mask_N, old_N, ref_N, advantages_N, weights_N, temperature,
        from_text(rule), implementation(rows), workspace,
        Wanted(wanted[0], wanted[1], wanted[2], weight.dtype),
    )  # fmt: skip
    d_bias = gradients.bias_V.to(weight.dtype if bias is None else bias.dtype)
    return total, policy_and_kl, logps_N, gradients.hidden_NH, gradients.weight_VH, d_bias
