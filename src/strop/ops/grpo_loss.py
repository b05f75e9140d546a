"""The loss of GRPO and its variants, from logits.

The kernels read each row once: a row's coefficient in the loss depends on that row only, so the forward writes the
gradient. There are four launches in the forward (advantages and weights, reference log-probs, loss and gradient, sums)
and one in the backward. At small sizes the launches dominate the time.

Shapes: B sequences, T completion tokens, V the vocabulary.
"""

from collections.abc import Sequence
from typing import Unpack

import torch

from strop._tensors import Count, check_ids_in_range, check_like, check_logits, check_logits_and_ids
from strop.losses import PolicyLoss, PolicyRule
from strop.losses.rules import PolicyOptions, computed_loss, from_text
from strop.ops.library import library_op, note_overwritten
from strop.ops.linear import with_gradients
from strop.ops.logp import logp_kernels, logp_torch
from strop.ops.policy import PolicyBatch, coefficients, composed
from strop.ops.registry import op_with_backends
from strop.ops.rows import TokenValues, fake_gradient, implementation


@op_with_backends(torch=logp_torch, triton=logp_kernels)
def grpo_loss(
    logp_by,
    policy_logits: torch.Tensor,
    ref_logits: torch.Tensor | None,
    action_ids: torch.Tensor,
    old_logps: torch.Tensor | None,
    rewards: torch.Tensor | None,
    completion_mask: torch.Tensor,
    *,
    samples_per_prompt: int | None = None,
    group_boundaries: torch.Tensor | Sequence[int] | None = None,
    advantages: torch.Tensor | None = None,
    ref_logps: torch.Tensor | None = None,
    temperature: float = 1.0,
    num_tokens: Count | None = None,
    num_sequences: Count | None = None,
    in_place: bool = False,
    validate: bool = False,
    **rule_options: Unpack[PolicyOptions],
) -> PolicyLoss:
    """Return (loss, policy_loss, kl) of GRPO or a variant: group-normalised rewards, clipped surrogate, β·KL.

    policy_logits        [B, T, V] of the policy; position t predicts action_ids[:, t]
    ref_logits           [B, T, V] of the reference; None with ref_logps or without a KL
    action_ids           [B, T] int64 or int32
    old_logps            [B, T] of the policy that sampled; None: the current policy, so the ratio is 1
    rewards              [B]; ignored if advantages are given
    completion_mask      [B, T] tokens in the loss; values at other tokens are ignored
    samples_per_prompt, group_boundaries, advantages   exactly one: groups of equal size, groups by their boundaries
                         (0 first, B last, strictly increasing), or advantages [B] or [B, T] instead of rewards
    ref_logps            [B, T] instead of ref_logits
    temperature          divides policy and reference logits
    num_tokens, num_sequences   see `strop.losses.token_weights`
    in_place             let the gradient overwrite policy_logits, which saves memory; do not read them after this call
    validate             check ids against the vocabulary on a GPU too
    rule_options         fields of `strop.losses.PolicyRule`: loss_type="grpo", clip_eps=0.2, beta=0.0 and so on

    returns              `PolicyLoss`: three 0-d tensors, and `.metrics`. Only the loss has a gradient, to policy_logits
                         only

    Rewards become (r − mean)/std of their group, as `strop.losses.group_advantages` does by default. For other
    conventions (TRL's ddof=1 and eps=1e-4) call it yourself and pass `advantages`.
    """
    rule = PolicyRule(**rule_options)
    check_logits_and_ids(policy_logits, action_ids, temperature, ("policy_logits", "action_ids"))
    if policy_logits.ndim != 3:
        raise ValueError(f"policy_logits must have shape [B, T, V], found {list(policy_logits.shape)}")
    if ref_logits is not None:
        check_logits(ref_logits, "ref_logits")
        check_like(ref_logits, "ref_logits", policy_logits, "policy_logits")
    batch = PolicyBatch(
        rule, action_ids, completion_mask, old_logps, ref_logps, rewards, advantages, samples_per_prompt, group_boundaries,
        num_tokens, num_sequences,
    ).checked(ref_logits, "ref_logits")  # fmt: skip
    check_ids_in_range(action_ids, "action_ids", policy_logits.shape[-1], batch.mask_BT, validate)
    if ref_logits is not None:
        with torch.no_grad():
            batch = batch._replace(ref_logps_BT=logp_by(ref_logits, action_ids, batch.mask_BT, temperature)[0])
    if logp_by is logp_kernels and rule.row_suffices:
        return _by_kernels(batch, policy_logits, float(temperature), in_place)
    entropy = rule.entropy_coef != 0
    return composed(batch, logp_by(policy_logits, action_ids, batch.mask_BT, temperature, entropy, in_place))


def _by_kernels(batch: PolicyBatch, logits: torch.Tensor, temperature: float, in_place: bool) -> PolicyLoss:
    old_N, ref_N = batch.flat_logps(torch.float32)
    mask_N = batch.mask_BT.reshape(-1)
    advantages, weights = coefficients(batch)
    tensors = batch.ids_BT.reshape(-1), mask_N, old_N, ref_N, advantages, weights
    settings = tensors, temperature, batch.rule, in_place
    results = with_gradients(_terms_and_gradient, (logits,), settings, rows="triton", name="grpo_loss")
    return computed_loss(batch.rule, results, old_N, advantages, ref_N, mask_N)


def _terms_and_gradient(logits, tensors, temperature, rule, in_place, wanted):
    if any(wanted) and in_place:
        results = policy_terms_(logits, *tensors, temperature, rule.text)
        note_overwritten(logits)
        return results, (logits.detach(),)
    *results, d_logits = policy_terms(logits, *tensors, temperature, rule.text, any(wanted))
    return results, (d_logits,)


# ---- as operators of torch.ops.strop ----


_TERMS = (
    "Tensor ids, Tensor? mask, Tensor? old_logps, Tensor? ref_logps, Tensor advantages, Tensor weights, "
    "float temperature, str rule"
)


def _fake_terms(logits, ids_N, *_):
    return tuple(logits.new_empty(size, dtype=torch.float32) for size in ((), (2,), ids_N.shape))


def _run(logits, *rest, gradient, in_place):
    *values, temperature, rule = rest
    rows = implementation("triton")
    terms = rows.policy_terms(logits, TokenValues(*values), temperature, from_text(rule), gradient, in_place)
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
