"""`grpo_loss` by the row kernels: loss and gradient in one visit of a row.

A row's coefficient in the loss needs only the row, so the gradient is written in the forward; backward hands it out,
scaled by the incoming gradient unless that is 1.
"""

from typing import Any

import torch

from strop.losses import PolicyLoss
from strop.ops.grpo_loss.reference import check_grpo_loss, composed_from_logits, grpo_loss
from strop.ops.library import library_op
from strop.ops.logp.triton import logp_forward, logp_triton
from strop.ops.policy import GradientFromForward, PolicyOptions, fused_result, row_inputs
from strop.ops.rows import TokenLoss, implementation, on_gpu, on_gpu_or_interpreted


@grpo_loss.backend("triton", when=on_gpu, by_name=on_gpu_or_interpreted)
def grpo_loss_triton(
    policy_logits: torch.Tensor,
    ref_logits: torch.Tensor | None,
    action_ids: torch.Tensor,
    old_logps: torch.Tensor | None,
    rewards: torch.Tensor | None,
    completion_mask: torch.Tensor,
    *,
    in_place: bool = False,
    **options: Any,
) -> PolicyLoss:
    chosen = PolicyOptions(**options)
    batch = check_grpo_loss(policy_logits, ref_logits, action_ids, old_logps, rewards, completion_mask, chosen)
    if not chosen.row_suffices:
        return composed_from_logits(logp_triton, batch, policy_logits, ref_logits, action_ids, in_place)
    ref_logps = chosen.ref_logps
    if ref_logits is not None:
        flat_ids, flat_mask = action_ids.reshape(-1), batch.mask_BT.reshape(-1)
        ref_logps, _, _ = logp_forward(ref_logits.detach(), flat_ids, flat_mask, float(chosen.temperature), False)
        ref_logps = ref_logps.view(action_ids.shape)
    rows = row_inputs(batch, action_ids, ref_logps, torch.float32)
    loss, policy_and_kl, logps_N = _PolicyLoss.apply(
        policy_logits, rows, float(chosen.temperature), chosen.token_loss, in_place
    )
    return fused_result(batch, ref_logps, loss, policy_and_kl, logps_N.view(action_ids.shape))


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, rows, temperature, loss, in_place):
        gradient = ctx.needs_input_grad[0]
        given = rows.ids_N, rows.mask_N, rows.old_logps_N, rows.ref_logps_N, rows.advantages_N, rows.weights_N
        settings = temperature, loss.loss_type, loss.clip_eps, loss.delta, loss.beta, loss.kl_estimator
        if gradient and in_place:
            logps_N, total, policy_and_kl = policy_terms_(logits, *given, *settings)
            d_logits = logits.detach()
        else:
            logps_N, total, policy_and_kl, d_logits = policy_terms(logits, *given, *settings, gradient)
        if gradient:
            ctx.gradient = GradientFromForward("grpo_loss", d_logits)
        ctx.mark_non_differentiable(policy_and_kl, logps_N)
        return total, policy_and_kl, logps_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_total, _policy_and_kl, _logps):
        (d_logits,) = ctx.gradient.scaled(d_total, scale_)
        return d_logits, None, None, None, None


_TERMS = (
    "Tensor ids, Tensor? mask, Tensor? old_logps, Tensor? ref_logps, Tensor advantages, Tensor weights, "
    "float temperature, str loss_type, float[] clip_eps, float? delta, float beta, str kl_estimator"
)


def _fake_terms(logits, ids_N, *_):
    return tuple(logits.new_empty(size, dtype=torch.float32) for size in (ids_N.shape, (), (2,)))


def _run(logits, ids_N, mask_N, old_N, ref_N, advantages_N, weights_N, temperature, *loss, gradient, in_place):
    loss_type, clip_eps, delta, beta, kl_estimator = loss
    logps_N, terms_3N, d_logits = implementation("triton").policy_terms(
        logits, ids_N, mask_N, old_N, ref_N, advantages_N, weights_N, temperature,
        TokenLoss(loss_type, tuple(clip_eps), delta, beta, kl_estimator), gradient, in_place,
    )  # fmt: skip
    return logps_N, terms_3N[0].sum(), terms_3N[1:].sum(-1), d_logits


@library_op(
    f"policy_terms(Tensor logits, {_TERMS}, bool gradient) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda logits, ids_N, *rest: (*_fake_terms(logits, ids_N), logits.new_empty(logits.shape if rest[-1] else 0)),
)
def policy_terms(logits, *rest):
    *rest, gradient = rest
    return _run(logits, *rest, gradient=gradient, in_place=False)


@library_op(f"policy_terms_(Tensor(a!) logits, {_TERMS}) -> (Tensor, Tensor, Tensor)", _fake_terms)
def policy_terms_(logits, *rest):
    return _run(logits, *rest, gradient=True, in_place=True)[:3]


@library_op("scale_(Tensor(a!) gradient, Tensor factor) -> ()", lambda gradient, factor: None)
def scale_(gradient, factor):
    implementation("triton").scale_(gradient, factor)
