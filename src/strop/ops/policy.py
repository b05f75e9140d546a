"""Code shared by `grpo_loss` and `linear_grpo_loss`: checks of their options, and the loss from log-probs.

If a token's loss needs only its own row of logits, row functions compute loss and gradient in one pass. Other losses
(sequence-level importance ratios, an entropy bonus) are computed from log-probs, as in `strop.losses.policy_loss`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from strop._tensors import Count, as_completion_mask, check_device, check_like, check_shape
from strop.losses import PolicyLoss, PolicyRule, group_advantages
from strop.losses.advantages import check_group_size, check_rewards
from strop.losses.policy import per_token, rows_loss, weight_counts, weights_of
from strop.ops.head import in_dtype
from strop.ops.library import library_op
from strop.ops.logp import Scores
from strop.ops.rows import implementation


class PolicyBatch(NamedTuple):
    """The arguments of the two operators besides logits or hidden states; see `grpo_loss` for their meaning."""

    rule: PolicyRule
    ids_BT: torch.Tensor
    mask_BT: torch.Tensor
    old_logps_BT: torch.Tensor | None
    ref_logps_BT: torch.Tensor | None
    rewards_B: torch.Tensor | None
    given_advantages: torch.Tensor | None
    samples_per_prompt: int | None
    group_boundaries: torch.Tensor | Sequence[int] | None
    num_tokens: Count | None
    num_sequences: Count | None

    def checked(self, ref: torch.Tensor | None, ref_name: str) -> "PolicyBatch":
        """Return the batch with a boolean mask; raise if arguments are inconsistent. ref: logits or hidden states."""
        if self.ids_BT.ndim != 2:
            raise ValueError(f"action_ids must have shape [B, T], found {list(self.ids_BT.shape)}")
        mask_BT = as_completion_mask(self.mask_BT, self.ids_BT, "action_ids")
        for logps, name in ((self.old_logps_BT, "old_logps"), (self.ref_logps_BT, "ref_logps")):
            if logps is not None:
                check_like(logps, name, self.ids_BT, "action_ids")
        if ref is not None and self.ref_logps_BT is not None:
            raise ValueError(f"at most one of {ref_name} and ref_logps must be given, found both")
        if self.rule.beta and ref is None and self.ref_logps_BT is None:
            raise ValueError(
                f"{ref_name} or ref_logps must be given where beta is above 0, found beta={self.rule.beta}"
            )
        self._check_advantages()
        return self._replace(mask_BT=mask_BT)

    def _check_advantages(self) -> None:
        given = {
            "samples_per_prompt": self.samples_per_prompt,
            "group_boundaries": self.group_boundaries,
            "advantages": self.given_advantages,
        }
        found = [name for name, value in given.items() if value is not None]
        if len(found) != 1:
            raise ValueError(f"exactly one of {', '.join(given)} must be given, found {' and '.join(found) or 'none'}")
        if self.given_advantages is not None:
            per_token(self.given_advantages, self.ids_BT)
            return
        check_rewards(self.rewards_B)
        assert self.rewards_B is not None
        check_shape(self.rewards_B, "rewards", self.ids_BT.shape[:1])
        check_device(self.rewards_B, "rewards", self.ids_BT, "action_ids")

    def advantages(self) -> torch.Tensor:
        """Return the advantages, [B] or [B, T]."""
        if self.given_advantages is not None:
            return self.given_advantages
        assert self.rewards_B is not None
        return group_advantages(
            self.rewards_B, samples_per_prompt=self.samples_per_prompt, group_boundaries=self.group_boundaries
        )

    def flat_logps(self, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return old and reference log-probs in the given dtype, each [N] or None."""
        old, ref = in_dtype(dtype, self.old_logps_BT, self.ref_logps_BT)
        return None if old is None else old.reshape(-1), None if ref is None else ref.reshape(-1)


def composed(batch: PolicyBatch, scores: Scores) -> PolicyLoss:
    """Return the loss computed from log-probs and, for an entropy bonus, entropies."""
    logps_BT, entropy_BT = scores
    result = rows_loss(
        batch.rule, logps_BT, batch.old_logps_BT, batch.advantages(), batch.mask_BT, ref_logps=batch.ref_logps_BT,
        entropy=entropy_BT, num_tokens=batch.num_tokens, num_sequences=batch.num_sequences,
    )  # fmt: skip
    return loss_alone(result)


def loss_alone(result: PolicyLoss) -> PolicyLoss:
    """Return the result with a gradient on the loss only, as the fused backends do."""
    return PolicyLoss(result.loss, result.policy_loss.detach(), result.kl.detach(), result._compute_metrics)


def token_coefficients(batch: PolicyBatch, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the advantage and the weight of each token, [N] and [N]."""
    weights_BT = weights_of(batch.rule, batch.mask_BT, batch.num_tokens, batch.num_sequences, dtype)
    return per_token(batch.advantages(), weights_BT).to(dtype).reshape(-1), weights_BT.reshape(-1)


def coefficients(batch: PolicyBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and weights for the row kernels, one per sequence or one per token.

    If all groups have the same size, one kernel replaces thirty launches in torch.
    """
    rewards_B = batch.rewards_B
    if batch.samples_per_prompt is None or rewards_B is None or rewards_B.dtype == torch.float64:
        return token_coefficients(batch, torch.float32)
    group_size = check_group_size(rewards_B.shape[0], batch.samples_per_prompt)
    count, tokens = weight_counts(batch.mask_BT, batch.rule, batch.num_tokens, batch.num_sequences)
    if torch.compiler.is_compiling() and not isinstance(count, torch.Tensor):
        # a float argument would be a constant of the graph, which would be recompiled for each step's count
        count = torch.ones((), device=rewards_B.device) * count
    if isinstance(count, torch.Tensor):
        on_device = count.to(rewards_B.device, non_blocking=True)
        return batch_coefficients(rewards_B, batch.mask_BT, group_size, on_device, 0.0, tokens)
    return batch_coefficients(rewards_B, batch.mask_BT, group_size, None, float(count or 1), tokens)


def _fake_coefficients(rewards_B, *_):
    return tuple(rewards_B.new_empty(rewards_B.shape, dtype=torch.float32) for _ in range(2))


@library_op(
    "batch_coefficients(Tensor rewards, Tensor mask, int group_size, Tensor? count_on_device, float count, int? tokens) "
    "-> (Tensor, Tensor)",
    _fake_coefficients,
)
def batch_coefficients(rewards_B, mask_BT, group_size, count_on_device, count, tokens):
    return implementation("triton").batch_coefficients(rewards_B, mask_BT, group_size, count_on_device, count, tokens)
