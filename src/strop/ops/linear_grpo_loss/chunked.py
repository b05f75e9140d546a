"""`linear_grpo_loss` by chunks (see `strop.ops.chunks`): "chunked" with torch's row functions on any device, "triton" with
the row kernels. Three products in all, two with a frozen head: the gradients are made in the forward.
"""

from functools import partial
from typing import Any

import torch

from strop.losses import PolicyLoss
from strop.ops.autograd import first_order
from strop.ops.chunks import linear_policy_terms
from strop.ops.head import Wanted, sums_in
from strop.ops.library import library_op
from strop.ops.linear_grpo_loss.reference import (
    check_linear_grpo_loss,
    composed_from_hidden,
    linear_grpo_loss,
    ref_logps_of,
)
from strop.ops.linear_logp.chunked import (
    computed_in,
    fake_gradients,
    head_in,
    linear_logp_chunked,
    linear_logp_triton,
)
from strop.ops.policy import (
    PolicyOptions,
    coefficients,
    flat,
    fused_result,
    keep_gradients,
    kept_gradients,
    token_coefficients,
)
from strop.ops.rows import TokenLoss, implementation, on_gpu, on_gpu_or_interpreted


@linear_grpo_loss.backend("chunked")
def linear_grpo_loss_chunked(hidden, weight, action_ids, old_logps, rewards, completion_mask, **options) -> PolicyLoss:
    given = action_ids, old_logps, rewards, completion_mask
    return _linear_grpo_loss("torch", linear_logp_chunked, hidden, weight, *given, **options)


@linear_grpo_loss.backend("triton", when=on_gpu, by_name=on_gpu_or_interpreted)
def linear_grpo_loss_triton(hidden, weight, action_ids, old_logps, rewards, completion_mask, **options) -> PolicyLoss:
    given = action_ids, old_logps, rewards, completion_mask
    return _linear_grpo_loss("triton", linear_logp_triton, hidden, weight, *given, **options)


def _linear_grpo_loss(
    rows: str,
    linear_logp_of: Any,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    action_ids: torch.Tensor,
    old_logps: torch.Tensor | None,
    rewards: torch.Tensor | None,
    completion_mask: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ref_hidden: torch.Tensor | None = None,
    ref_weight: torch.Tensor | None = None,
    ref_bias: torch.Tensor | None = None,
    workspace: int | None = None,
    **options: Any,
) -> PolicyLoss:
    chosen = PolicyOptions(**options)
    head, ref = (hidden, weight, bias), (ref_hidden, ref_weight, ref_bias)
    batch = check_linear_grpo_loss(head, ref, action_ids, old_logps, rewards, completion_mask, workspace, chosen)
    if not chosen.row_suffices:
        return composed_from_hidden(linear_logp_of, batch, head, ref, action_ids, workspace)
    ref_logps = ref_logps_of(linear_logp_of, batch, ref, action_ids, workspace)
    dtype = computed_in(hidden)
    old_logps_N, ref_logps_N = (flat(logps, sums_in(dtype)) for logps in (batch.old_logps_BT, ref_logps))
    if rows == "triton":
        advantages_N, weights_N = (_per_row(values, action_ids) for values in coefficients(batch))
    else:
        advantages_N, weights_N = token_coefficients(batch, sums_in(dtype))
    total, policy_and_kl, logps_N = _LinearPolicyLoss.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        (action_ids.reshape(-1), batch.mask_BT.reshape(-1), old_logps_N, ref_logps_N, advantages_N, weights_N),
        float(chosen.temperature),
        chosen.token_loss,
        (rows, workspace, dtype),
        [torch.is_grad_enabled() and x is not None and x.requires_grad for x in head],
    )
    return fused_result(batch, advantages_N, ref_logps_N, total, policy_and_kl, logps_N)


def _per_row(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """One value for every token, where there may be one for every sequence."""
    return values if values.numel() == ids.numel() else values[:, None].expand(ids.shape).reshape(-1)


class _LinearPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight, bias, tensors, temperature, loss, settings, wanted):
        total, policy_and_kl, logps_N, *gradients = linear_policy_loss(
            hidden_NH, weight, bias, *tensors, temperature, loss.loss_type, loss.clip_eps, loss.delta, loss.beta, loss.kl_estimator,
            *settings, wanted,
        )  # fmt: skip
        ctx.wanted, ctx.rows = wanted, settings[0]
        if any(wanted):
            keep_gradients(ctx, "linear_grpo_loss", *gradients)
        ctx.mark_non_differentiable(policy_and_kl, logps_N)
        ctx.set_materialize_grads(False)  # no zeros for those
        return total, policy_and_kl, logps_N

    @staticmethod
    @first_order
    def backward(ctx, d_total, _policy_and_kl, _logps):
        gradients = kept_gradients(ctx, d_total, lambda *arguments: implementation(ctx.rows).scale_(*arguments))
        return (*(g if w else None for g, w in zip(gradients, ctx.wanted, strict=True)), None, None, None, None, None)


def _fake(hidden_NH, weight, bias, ids_N, *rest):
    *_, dtype, wanted = rest
    make = partial(hidden_NH.new_empty, dtype=sums_in(dtype))
    return make(()), make(2), make(ids_N.shape), *fake_gradients(hidden_NH, weight, bias, dtype, wanted)


@library_op(
    "linear_policy_loss(Tensor hidden, Tensor weight, Tensor? bias, Tensor ids, Tensor? mask, Tensor? old_logps, "
    "Tensor? ref_logps, Tensor advantages, Tensor weights, float temperature, str loss_type, float[] clip_eps, "
    "float? delta, float beta, str kl_estimator, str rows, int? workspace, ScalarType dtype, bool[] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake,
)
def linear_policy_loss(
    hidden_NH, weight, bias, ids_N, mask_N, old_N, ref_N, advantages_N, weights_N, temperature, loss_type, clip_eps,
    delta, beta, kl_estimator, rows, workspace, dtype, wanted,
):  # fmt: skip
    total, policy_and_kl, logps_N, gradients = linear_policy_terms(
        hidden_NH, head_in(dtype, weight, bias), ids_N, mask_N, old_N, ref_N, advantages_N, weights_N, temperature,
        TokenLoss(loss_type, tuple(clip_eps), delta, beta, kl_estimator), implementation(rows), workspace,
        Wanted(wanted[0], wanted[1], wanted[2], weight.dtype),
    )  # fmt: skip
    d_bias = gradients.bias_V.to(weight.dtype if bias is None else bias.dtype)
    return total, policy_and_kl, logps_N, gradients.hidden_NH, gradients.weight_VH, d_bias
