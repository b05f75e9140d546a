"""The loss of GRPO and its relatives, from logits.

Shapes: B sequences, T completion tokens, V the vocabulary.
"""

import functools
from collections.abc import Sequence

import torch

from strop._tensors import Count, check_ids_in_range, check_like, check_logits, check_logits_and_ids
from strop.config.policy_losses import ClipEps
from strop.losses import PolicyLoss, PolicyRule
from strop.ops.logp import logp
from strop.ops.policy import Given, PolicyBatch, check_batch, composed
from strop.ops.registry import op

LOGITS_NAMES = ("policy_logits", "action_ids")


@op
def grpo_loss(
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
    loss_type: str = "grpo",
    importance_level: str = "token",
    clip_eps: ClipEps | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
    temperature: float = 1.0,
    max_completion_length: int | None = None,
    sapo_temperatures: tuple[float, float] = PolicyRule.sapo_temperatures,
    vespo_gamma: tuple[float, float, float, float] = PolicyRule.vespo_gamma,
    stale_kl: float | None = None,
    num_tokens: Count | None = None,
    num_sequences: Count | None = None,
    in_place: bool = False,
    validate: bool = False,
) -> PolicyLoss:
    """loss, policy_loss, kl = grpo_loss(…): group-normalised rewards, clipped surrogate, β·KL, any policy loss.

    policy_logits        [B, T, V] of the policy, position t being the one that predicts action_ids[:, t]
    ref_logits           [B, T, V] of the reference, or None: then ref_logps, or no KL
    action_ids           [B, T] int64 or int32
    old_logps            [B, T] of the policy that sampled; None: the policy itself, so that the ratio is 1
    rewards              [B]; not read where advantages are given
    completion_mask      [B, T] tokens that count; whatever stands elsewhere changes nothing
    samples_per_prompt, group_boundaries, advantages   exactly one: groups of equal size, groups by their boundaries
                         (0 first, B last, strictly increasing), or advantages [B] or [B, T] instead of rewards
    ref_logps            [B, T] instead of ref_logits
    loss_type … num_sequences   see `strop.losses.policy_loss`
    temperature          divides policy and reference logits
    in_place             the gradient may overwrite policy_logits, which nobody may read after this call; saves their size
    validate             raise for an id outside the vocabulary on a GPU too

    returns              `PolicyLoss`: three 0-d tensors, and `.metrics`. Only the loss has a gradient, and only to
                         policy_logits

    Rewards become (r − mean)/std of their group, `strop.losses.group_advantages` as it stands; for other conventions
    (TRL's ddof=1 and eps=1e-4) call it and pass `advantages`.
    """
    rule = PolicyRule(
        loss_type=loss_type, importance_level=importance_level, clip_eps=clip_eps, delta=delta, beta=beta,
        kl_estimator=kl_estimator, entropy_coef=entropy_coef, max_completion_length=max_completion_length,
        sapo_temperatures=sapo_temperatures, vespo_gamma=vespo_gamma, stale_kl=stale_kl,
    )  # fmt: skip
    given = Given(
        samples_per_prompt, group_boundaries, advantages, ref_logps, temperature, num_tokens, num_sequences, validate
    )
    batch = check_grpo_loss(policy_logits, ref_logits, action_ids, old_logps, rewards, completion_mask, rule, given)
    return composed_from_logits(logp.reference, batch, policy_logits, ref_logits, action_ids, in_place)


def check_grpo_loss(
    policy_logits, ref_logits, action_ids, old_logps, rewards, completion_mask, rule, given
) -> PolicyBatch:
    check_logits_and_ids(policy_logits, action_ids, given.temperature, LOGITS_NAMES)
    if policy_logits.ndim != 3:
        raise ValueError(f"policy_logits must have shape [B, T, V], found {list(policy_logits.shape)}")
    if ref_logits is not None:
        check_logits(ref_logits, "ref_logits")
        check_like(ref_logits, "ref_logits", policy_logits, "policy_logits")
    batch = check_batch(action_ids, old_logps, rewards, completion_mask, rule, given, ref_logits, "ref_logits")
    check_ids_in_range(action_ids, "action_ids", policy_logits.shape[-1], batch.mask_BT, given.validate)
    return batch


def composed_from_logits(logp_of, batch: PolicyBatch, policy_logits, ref_logits, action_ids, in_place) -> PolicyLoss:
    """By log-probs; logp_of: one backend of `logp`."""
    score = functools.partial(
        logp_of, ids=action_ids, temperature=batch.given.temperature, completion_mask=batch.mask_BT
    )
    ref_logps = batch.given.ref_logps
    if ref_logits is not None:
        with torch.no_grad():
            ref_logps = score(ref_logits)
    return composed(batch, ref_logps, lambda entropy: score(policy_logits, entropy=entropy, in_place=in_place))
