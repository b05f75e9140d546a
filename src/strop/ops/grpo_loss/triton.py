"""`grpo_loss` by the row kernels: the loss and the gradient in one visit of a row.

A row's coefficient in the loss needs only the row, so the gradient is written in the forward; backward hands it out,
scaled by the incoming gradient unless that is 1. Four launches forward (advantages and weights, the reference's
log-probs, loss and gradient, sums) and one backward: at small sizes launching is what takes the time.
"""

from typing import Any

import torch

from strop.losses import PolicyLoss
from strop.losses.rules import from_text
from strop.ops.grpo_loss.reference import check_grpo_loss, composed_from_logits, grpo_loss
from strop.ops.library import first_order, keep_gradients, kept_gradients, library_op, note_overwritten
from strop.ops.logp.triton import logp_triton, score
from strop.ops.policy import coefficients, flat, fused_result, rule_and_given
from strop.ops.registry import on_gpu, on_gpu_or_interpreted
from strop.ops.rows import fake_gradient, implementation


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
    rule, given = rule_and_given(options)
    batch = check_grpo_loss(policy_logits, ref_logits, action_ids, old_logps, rewards, completion_mask, rule, given)
    if not rule.row_suffices:
        return composed_from_logits(logp_triton, batch, policy_logits, ref_logits, action_ids, in_place)
    ids_N, mask_N, temperature = action_ids.reshape(-1), batch.mask_BT.reshape(-1), float(given.temperature)
    old_logps_N, ref_logps_N = flat(batch.old_logps_BT, torch.float32), flat(given.ref_logps, torch.float32)
    if ref_logits is not None:
        ref_logps_N = score(ref_logits.detach(), ids_N, mask_N, temperature)
    advantages, weights = coefficients(batch)
    total, policy_and_kl, logps_N = _PolicyLoss.apply(
        policy_logits,
        (ids_N, mask_N, old_logps_N, ref_logps_N, advantages, weights),
        temperature,
        rule,
        policy_logits.requires_grad and torch.is_grad_enabled(),
        in_place,
    )
    return fused_result(batch, advantages, ref_logps_N, total, policy_and_kl, logps_N)


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, tensors, temperature, rule, gradient, in_place):
        settings = temperature, rule.text
        if gradient and in_place:
            results = list(policy_terms_(logits, *tensors, *settings))
            note_overwritten(logits)
            d_logits = logits.detach()
        else:
            *results, d_logits = policy_terms(logits, *tensors, *settings, gradient)
        if gradient:
            keep_gradients(ctx, "grpo_loss", d_logits)
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)  # no zeros for those
        return tuple(results)

    @staticmethod
    def backward(ctx, d_total, *_):
        with torch.no_grad():
            gradients = kept_gradients(ctx, d_total, scale_)
        return first_order(*gradients, None, None, None, None, None)


_TERMS = (
    "Tensor ids, Tensor? mask, Tensor? old_logps, Tensor? ref_logps, Tensor advantages, Tensor weights, "
    "float temperature, str rule"
)


def _fake_terms(logits, ids_N, *_):
    return tuple(logits.new_empty(size, dtype=torch.float32) for size in ((), (2,), ids_N.shape))


def _run(logits, ids_N, mask_N, old_N, ref_N, advantages, weights, temperature, rule, *, gradient, in_place):
    rows = implementation("triton")
    terms = rows.policy_terms(
        logits, ids_N, mask_N, old_N, ref_N, advantages, weights, temperature,
        from_text(rule), gradient, in_place,
    )  # fmt: skip
    return *rows.sums(terms.terms_3N), terms.logps_N, terms.d_logits


@library_op(
    f"policy_terms(Tensor logits, {_TERMS}, bool gradient) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda logits, *rest: (*_fake_terms(logits, *rest), fake_gradient(logits) if rest[-1] else logits.new_empty(0)),
)
def policy_terms(logits, *rest):
    *results, d_logits = _run(logits, *rest[:-1], gradient=rest[-1], in_place=False)
    return *results, logits.new_empty(0) if d_logits is None else d_logits


@library_op(f"policy_terms_(Tensor(a!) logits, {_TERMS}) -> (Tensor, Tensor, Tensor)", _fake_terms)
def policy_terms_(logits, *rest):
    return tuple(_run(logits, *rest, gradient=True, in_place=True)[:-1])


@library_op("scale_(Tensor(a!) gradient, Tensor factor) -> ()", lambda gradient, factor: None)
def scale_(gradient, factor):
    implementation("triton").scale_(gradient, factor)
