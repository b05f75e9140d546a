"""What `grpo_loss` and `linear_grpo_loss` share: their options, and the two ways to the loss.

Fused: a token's loss needs only its own row, so a row function gives the loss and the gradient of the logits in one
visit. Composed: log-probs by an operator, then `strop.losses.policy_loss`; for everything a row alone cannot know
(importance over a sequence, an entropy bonus).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from strop._tensors import Count, as_completion_mask, check_device, check_like, check_shape
from strop.losses import PolicyLoss, PolicyRule, group_advantages, token_weights
from strop.losses.advantages import check_group_size, check_rewards
from strop.losses.policy import Metrics, per_token, rows_loss, tokens_metrics, weight_counts
from strop.losses.rules import tokens_of
from strop.ops.library import library_op
from strop.ops.rows import implementation


class Given(NamedTuple):
    """The options of `grpo_loss` that are not the rule's; their meaning is written there."""

    samples_per_prompt: int | None = None
    group_boundaries: torch.Tensor | Sequence[int] | None = None
    advantages: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None
    temperature: float = 1.0
    num_tokens: Count | None = None
    num_sequences: Count | None = None
    validate: bool = False


RULE_FIELDS = tuple(field.name for field in dataclasses.fields(PolicyRule))


def rule_and_given(options: Mapping[str, Any]) -> tuple[PolicyRule, Given]:
    """The keyword arguments of a backend as the rule and the rest."""
    rule = {name: value for name, value in options.items() if name in RULE_FIELDS}
    return PolicyRule(**rule), Given(**{name: value for name, value in options.items() if name not in RULE_FIELDS})


class PolicyBatch(NamedTuple):
    """What the two operators work on besides logits or hidden states, checked."""

    rule: PolicyRule
    given: Given
    mask_BT: torch.Tensor
    old_logps_BT: torch.Tensor | None
    rewards: torch.Tensor | None  # [B], None where advantages are given

    def advantages(self) -> torch.Tensor:
        """[B] or [B, T]"""
        given = self.given
        if self.rewards is None:
            assert given.advantages is not None
            return given.advantages
        return group_advantages(
            self.rewards, samples_per_prompt=given.samples_per_prompt, group_boundaries=given.group_boundaries
        )


def flat(logps_BT: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """[N], in the dtype of the policy's log-probs: float64 beside float32 would make the loss float64."""
    return None if logps_BT is None else logps_BT.detach().to(dtype).reshape(-1)


def check_batch(
    ids: torch.Tensor,
    old_logps: torch.Tensor | None,
    rewards: torch.Tensor | None,
    completion_mask: torch.Tensor,
    rule: PolicyRule,
    given: Given,
    ref: torch.Tensor | None,
    ref_name: str,
) -> PolicyBatch:
    """Everything the two operators ask of arguments other than logits or hidden states and ids."""
    if ids.ndim != 2:
        raise ValueError(f"action_ids must have shape [B, T], found {list(ids.shape)}")
    mask_BT = as_completion_mask(completion_mask, ids, "action_ids")
    for logps, name in ((old_logps, "old_logps"), (given.ref_logps, "ref_logps")):
        if logps is not None:
            check_like(logps, name, ids, "action_ids")
    if ref is not None and given.ref_logps is not None:
        raise ValueError(f"at most one of {ref_name} and ref_logps must be given, found both")
    if rule.beta and ref is None and given.ref_logps is None:
        raise ValueError(f"{ref_name} or ref_logps must be given where beta is above 0, found beta={rule.beta}")
    return PolicyBatch(rule, given, mask_BT, old_logps, _check_rewards(rewards, given, ids))


def _check_rewards(rewards: torch.Tensor | None, given: Given, ids: torch.Tensor) -> torch.Tensor | None:
    """The rewards, or None where advantages are given."""
    names = ("samples_per_prompt", "group_boundaries", "advantages")
    found = [name for name in names if getattr(given, name) is not None]
    if len(found) != 1:
        raise ValueError(f"exactly one of {', '.join(names)} must be given, found {' and '.join(found) or 'none'}")
    if given.advantages is not None:
        per_token(given.advantages, ids)
        return None
    check_rewards(rewards)
    assert rewards is not None
    check_shape(rewards, "rewards", ids.shape[:1])
    check_device(rewards, "rewards", ids, "action_ids")
    return rewards


Score = Callable[[bool], torch.Tensor | tuple[torch.Tensor, torch.Tensor]]


def composed(batch: PolicyBatch, ref_logps_BT: torch.Tensor | None, score: Score) -> PolicyLoss:
    """The loss from log-probs; score(entropy) gives those, and the entropies where they are wanted."""
    rule, given, scores = batch.rule, batch.given, score(batch.rule.entropy_coef != 0)
    logps_BT, entropy_BT = scores if isinstance(scores, tuple) else (scores, None)
    result = rows_loss(
        rule, logps_BT, batch.old_logps_BT, batch.advantages(), batch.mask_BT, ref_logps=ref_logps_BT,
        entropy=entropy_BT, num_tokens=given.num_tokens, num_sequences=given.num_sequences,
    )  # fmt: skip
    return loss_alone(result)


def loss_alone(result: PolicyLoss) -> PolicyLoss:
    """Of the three only the loss has a gradient, as in the fused way."""
    return PolicyLoss(result.loss, result.policy_loss.detach(), result.kl.detach(), result._compute_metrics)


def token_coefficients(batch: PolicyBatch, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and weights of every token, [N] and [N]."""
    rule, given = batch.rule, batch.given
    weights_BT = token_weights(
        batch.mask_BT, rule.loss_type, dtype=dtype, max_completion_length=rule.max_completion_length,
        num_tokens=given.num_tokens, num_sequences=given.num_sequences,
    )  # fmt: skip
    return per_token(batch.advantages(), weights_BT).to(dtype).reshape(-1), weights_BT.reshape(-1)


def coefficients(batch: PolicyBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and weights for the row kernels, one per sequence or one per token.

    Where groups are of one size, and their advantages and the weights take thirty launches in torch, one kernel does it.
    """
    given, rewards = batch.given, batch.rewards
    if rewards is None or given.samples_per_prompt is None or rewards.dtype == torch.float64:
        return token_coefficients(batch, torch.float32)
    group_size = check_group_size(rewards.shape[0], given.samples_per_prompt)
    count, tokens = weight_counts(batch.mask_BT, batch.rule, given.num_tokens, given.num_sequences)
    if torch.compiler.is_compiling() and not isinstance(count, torch.Tensor):
        # as a float of an operator it would be a constant of the graph, which each step's count would make anew
        count = torch.ones((), device=rewards.device) * count
    if isinstance(count, torch.Tensor):
        on_device = count.to(rewards.device, non_blocking=True)
        return batch_coefficients(rewards, batch.mask_BT, group_size, on_device, 0.0, tokens)
    return batch_coefficients(rewards, batch.mask_BT, group_size, None, float(count or 1), tokens)


def _fake_coefficients(rewards_B, *_):
    return tuple(rewards_B.new_empty(rewards_B.shape, dtype=torch.float32) for _ in range(2))


@library_op(
    "batch_coefficients(Tensor rewards, Tensor mask, int group_size, Tensor? count_on_device, float count, int? tokens) "
    "-> (Tensor, Tensor)",
    _fake_coefficients,
)
def batch_coefficients(rewards_B, mask_BT, group_size, count_on_device, count, tokens):
    return implementation("triton").batch_coefficients(rewards_B, mask_BT, group_size, count_on_device, count, tokens)


def fused_result(
    batch: PolicyBatch,
    advantages: torch.Tensor,
    ref_logps_N: torch.Tensor | None,
    total: torch.Tensor,
    policy_and_kl: torch.Tensor,
    logps_N: torch.Tensor,
) -> PolicyLoss:
    """advantages   one a sequence or one a token"""
    policy, kl = policy_and_kl.unbind()

    def compute_metrics() -> Metrics:
        mask_N = batch.mask_BT.reshape(-1)
        rows = batch.mask_BT.shape
        advantages_N = advantages if advantages.numel() == logps_N.numel() else advantages[:, None].expand(rows)
        old_N, ref_N = (
            None if values is None else values.reshape(-1).to(logps_N.dtype).masked_fill(~mask_N, 0.0)
            for values in (batch.old_logps_BT, ref_logps_N)
        )
        given = (values.reshape(-1).masked_fill(~mask_N, 0.0) for values in (logps_N, advantages_N))
        logps, advantages_of_tokens = given
        tokens = tokens_of(batch.rule, logps, old_N, advantages_of_tokens, mask_N=mask_N)
        return tokens_metrics(batch.rule, tokens, ref_N, None)

    return PolicyLoss(total, policy, kl, compute_metrics)
