"""The loss of GRPO and its relatives, from hidden states and the LM head.

Shapes: B sequences, T completion tokens, H hidden, V the vocabulary.
"""

from collections.abc import Callable, Sequence

import torch

from strop._tensors import Count, GivenHead, RefHead, check_device, check_head, check_shape
from strop.config.policy_losses import ClipEps
from strop.losses import PolicyLoss, PolicyRule
from strop.ops.linear_logp.reference import check_linear_logp, linear_logp
from strop.ops.policy import Given, PolicyBatch, check_batch, composed
from strop.ops.registry import op


@op
def linear_grpo_loss(
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
    ref_logps: torch.Tensor | None = None,
    samples_per_prompt: int | None = None,
    group_boundaries: torch.Tensor | Sequence[int] | None = None,
    advantages: torch.Tensor | None = None,
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
    workspace: int | None = None,
    validate: bool = False,
) -> PolicyLoss:
    """`grpo_loss` of hidden @ weightᵀ + bias without memory for [N, V] beside the gradients'; this reference alone holds it.

    hidden            [B, T, H], position t being the one that predicts action_ids[:, t]
    weight, bias      [V, H] and [V] of the LM head, of hidden's dtype (any under autocast); tied or frozen heads too
    ref_hidden        [B, T, H'] of the reference with ref_weight [V, H'] and ref_bias, or ref_logps [B, T] instead, or neither
    completion_mask   [B, T] tokens that count; the others are dropped before the first product
    workspace         bytes of working memory; by default 560 MiB, 64 MiB on a CPU
    everything else   as in `grpo_loss`

    returns           `PolicyLoss`: three 0-d tensors, and `.metrics`. Only the loss has a gradient, and only to hidden,
                      weight and bias
    """
    rule = PolicyRule(
        loss_type=loss_type, importance_level=importance_level, clip_eps=clip_eps, delta=delta, beta=beta,
        kl_estimator=kl_estimator, entropy_coef=entropy_coef, max_completion_length=max_completion_length,
        sapo_temperatures=sapo_temperatures, vespo_gamma=vespo_gamma, stale_kl=stale_kl,
    )  # fmt: skip
    given = Given(
        samples_per_prompt, group_boundaries, advantages, ref_logps, temperature, num_tokens, num_sequences, validate
    )
    head, ref = (hidden, weight, bias), (ref_hidden, ref_weight, ref_bias)
    batch = check_linear_grpo_loss(head, ref, action_ids, old_logps, rewards, completion_mask, workspace, rule, given)
    return composed_from_hidden(linear_logp.reference, batch, head, ref, action_ids, workspace)


def check_linear_grpo_loss(
    head: GivenHead,
    ref: RefHead,
    action_ids: torch.Tensor,
    old_logps: torch.Tensor | None,
    rewards: torch.Tensor | None,
    completion_mask: torch.Tensor,
    workspace: int | None,
    rule: PolicyRule,
    given: Given,
) -> PolicyBatch:
    hidden, weight, bias = head
    check_head(hidden, weight, bias)
    if hidden.ndim != 3:
        raise ValueError(f"hidden must have shape [B, T, H], found {list(hidden.shape)}")
    check_linear_logp(
        hidden,
        weight,
        action_ids,
        bias,
        given.temperature,
        completion_mask,
        workspace,
        given.validate,
        "action_ids",
    )
    check_reference(head, ref)
    return check_batch(action_ids, old_logps, rewards, completion_mask, rule, given, ref[0], "ref_hidden")


def check_reference(head: GivenHead, ref: RefHead) -> None:
    """The reference's hidden states and head: all or nothing, the same tokens and vocabulary as the policy's."""
    hidden, weight, _ = head
    ref_hidden, ref_weight, ref_bias = ref
    if (ref_hidden is None) != (ref_weight is None):
        found = "ref_weight" if ref_hidden is None else "ref_hidden"
        raise ValueError(f"ref_hidden and ref_weight must be given together, found only {found}")
    if ref_hidden is None or ref_weight is None:
        if ref_bias is not None:
            raise ValueError("ref_bias must come with ref_hidden and ref_weight, found it alone")
        return
    check_head(ref_hidden, ref_weight, ref_bias, prefix="ref_")
    check_device(ref_hidden, "ref_hidden", hidden, "hidden")
    check_shape(ref_hidden, "ref_hidden", (*hidden.shape[:-1], ref_hidden.shape[-1]))
    check_shape(ref_weight, "ref_weight", (weight.shape[0], ref_weight.shape[1]))


def ref_logps_of(
    linear_logp_of: Callable[..., torch.Tensor],
    batch: PolicyBatch,
    ref: RefHead,
    action_ids: torch.Tensor,
    workspace: int | None,
) -> torch.Tensor | None:
    ref_hidden, ref_weight, ref_bias = ref
    if ref_hidden is None:
        return batch.given.ref_logps
    with torch.no_grad():
        return linear_logp_of(
            ref_hidden, ref_weight, action_ids, bias=ref_bias, temperature=batch.given.temperature,
            completion_mask=batch.mask_BT, workspace=workspace,
        )  # fmt: skip


def composed_from_hidden(
    linear_logp_of: Callable[..., torch.Tensor], batch: PolicyBatch, head: GivenHead, ref: RefHead, action_ids: torch.Tensor,
    workspace: int | None,
) -> PolicyLoss:  # fmt: skip
    """By log-probs; linear_logp_of: one backend of `linear_logp`."""
    hidden, weight, bias = head
    ref_logps = ref_logps_of(linear_logp_of, batch, ref, action_ids, workspace)

    def score(entropy: bool) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return linear_logp_of(
            hidden, weight, action_ids, bias=bias, temperature=batch.given.temperature,
            completion_mask=batch.mask_BT, entropy=entropy, workspace=workspace,
        )  # fmt: skip

    return composed(batch, ref_logps, score)
