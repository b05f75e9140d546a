"""What `grpo_loss` and `linear_grpo_loss` share: their options, and the two ways to the loss.

Fused: a token's loss needs only its own row, so a row function gives the loss and the gradient of the logits in one
visit. Composed: log-probs by an operator, then `strop.losses.policy_loss`; for everything a row alone cannot know
(importance over a sequence, an entropy bonus).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from strop._tensors import (
    as_completion_mask,
    check_choice,
    check_device,
    check_floats,
    check_number,
    check_shape,
)
from strop.losses import (
    IMPORTANCE_LEVELS,
    KL_ESTIMATORS,
    PolicyLoss,
    clip_bounds,
    group_advantages,
    policy_loss,
    policy_metrics,
    token_weights,
)
from strop.losses._common import Count, Metrics
from strop.losses.advantages import check_group_size, check_rewards
from strop.losses.policy import ClipEps, per_token, weight_counts
from strop.ops.library import library_op
from strop.ops.rows import TokenLoss, implementation


class PolicyOptions(NamedTuple):
    """The keyword arguments of `grpo_loss`; their meaning is written there."""

    samples_per_prompt: int | None = None
    group_boundaries: torch.Tensor | Sequence[int] | None = None
    advantages: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None
    loss_type: str = "grpo"
    importance_level: str = "token"
    clip_eps: ClipEps = 0.2
    delta: float | None = None
    beta: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    temperature: float = 1.0
    max_completion_length: int | None = None
    num_tokens: Count | None = None
    num_sequences: Count | None = None
    validate: bool = False

    @property
    def row_suffices(self) -> bool:
        return self.importance_level == "token" and not self.entropy_coef

    @property
    def token_loss(self) -> TokenLoss:
        low, high = self.clip_eps if isinstance(self.clip_eps, (tuple, list)) else (self.clip_eps, self.clip_eps)
        return TokenLoss(self.loss_type, (float(low), float(high)), self.delta, float(self.beta), self.kl_estimator)

    def of(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}


class PolicyBatch(NamedTuple):
    """The tensors of [B] and [B, T] besides the logits, checked."""

    options: PolicyOptions
    mask_BT: torch.Tensor
    old_logps_BT: torch.Tensor | None
    rewards: torch.Tensor | None  # [B], None where advantages are given

    def advantages(self) -> torch.Tensor:
        """[B] or [B, T]"""
        if self.rewards is None:
            assert self.options.advantages is not None
            return self.options.advantages
        return group_advantages(self.rewards, **self.options.of("samples_per_prompt", "group_boundaries"))


def flat(logps_BT: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """[N], in the dtype of the policy's log-probs: float64 beside float32 would make the loss float64."""
    return None if logps_BT is None else logps_BT.detach().to(dtype).reshape(-1)


def check_batch(
    ids: torch.Tensor,
    old_logps: Any,
    rewards: Any,
    completion_mask: Any,
    options: PolicyOptions,
    ref: Any,
    ref_name: str,
) -> PolicyBatch:
    """Everything the two operators ask of arguments other than logits or hidden states and ids."""
    if ids.ndim != 2:
        raise ValueError(f"action_ids must have shape [B, T], found {list(ids.shape)}")
    clip_bounds(options.clip_eps, options.delta, options.loss_type)
    check_choice(options.importance_level, IMPORTANCE_LEVELS, "importance_level")
    check_choice(options.kl_estimator, KL_ESTIMATORS, "kl_estimator")
    mask_BT = as_completion_mask(completion_mask, ids.shape)
    if mask_BT is None:
        raise TypeError("completion_mask must be a tensor, found NoneType")
    check_device(mask_BT, ids, "completion_mask", "action_ids")
    for logps, name in ((old_logps, "old_logps"), (options.ref_logps, "ref_logps")):
        if logps is not None:
            check_floats(logps, name)
            check_shape(logps, ids.shape, name)
            check_device(logps, ids, name, "action_ids")
    if ref is not None and options.ref_logps is not None:
        raise ValueError(f"at most one of {ref_name} and ref_logps must be given, found both")
    for value, name in ((options.beta, "beta"), (options.entropy_coef, "entropy_coef")):
        check_number(value, name)
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and at least 0, found {value}")
    if options.beta and ref is None and options.ref_logps is None:
        raise ValueError(f"{ref_name} or ref_logps must be given where beta is above 0, found beta={options.beta}")
    return PolicyBatch(options, mask_BT, old_logps, _check_rewards(rewards, options, ids))


def _check_rewards(rewards: Any, options: PolicyOptions, ids: torch.Tensor) -> torch.Tensor | None:
    """The rewards, or None where advantages are given."""
    given = options.samples_per_prompt, options.group_boundaries, options.advantages
    if sum(value is not None for value in given) != 1:
        names = ("samples_per_prompt", "group_boundaries", "advantages")
        found = " and ".join(name for name, value in zip(names, given, strict=True) if value is not None) or "none"
        raise ValueError(f"exactly one of {', '.join(names)} must be given, found {found}")
    if options.advantages is not None:
        per_token(options.advantages, ids)
        return None
    check_rewards(rewards)
    check_shape(rewards, ids.shape[:1], "rewards")
    check_device(rewards, ids, "rewards", "action_ids")
    return rewards


def composed(batch: PolicyBatch, ref_logps_BT: torch.Tensor | None, score: Callable[[bool], Any]) -> PolicyLoss:
    """The loss from log-probs; score(entropy) gives those, and the entropies where they are wanted."""
    options, entropy = batch.options, batch.options.entropy_coef != 0
    scores = score(entropy)
    logps_BT, entropy_BT = scores if entropy else (scores, None)
    result = policy_loss(
        logps_BT,
        batch.old_logps_BT,
        batch.advantages(),
        batch.mask_BT,
        ref_logps=ref_logps_BT,
        entropy=entropy_BT,
        **options.of("loss_type", "importance_level", "clip_eps", "delta", "beta", "kl_estimator", "entropy_coef"),
        **options.of("max_completion_length", "num_tokens", "num_sequences"),
    )
    # of the three only the loss has a gradient, as in the fused way
    return PolicyLoss(result.loss, result.policy_loss.detach(), result.kl.detach(), result._compute_metrics)


def token_coefficients(batch: PolicyBatch, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and weights of every token, [N] and [N]."""
    weights_BT = token_weights(
        batch.mask_BT,
        batch.options.loss_type,
        dtype=dtype,
        **batch.options.of("max_completion_length", "num_tokens", "num_sequences"),
    )
    return per_token(batch.advantages(), weights_BT).to(dtype).reshape(-1), weights_BT.reshape(-1)


def coefficients(batch: PolicyBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and weights for the row kernels, one per sequence or one per token.

    Where groups are of one size, and their advantages and the weights take thirty launches in torch, one kernel does it.
    """
    options, rewards = batch.options, batch.rewards
    if rewards is None or options.samples_per_prompt is None or rewards.dtype == torch.float64:
        return token_coefficients(batch, torch.float32)
    group_size = check_group_size(rewards.shape[0], options.samples_per_prompt)
    count, tokens = weight_counts(
        batch.mask_BT, options.loss_type, options.max_completion_length, options.num_tokens, options.num_sequences
    )
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
    policy, kl = policy_and_kl.unbind()
    compute_metrics = functools.partial(_fused_metrics, batch, advantages, ref_logps_N, logps_N)
    return PolicyLoss(total, policy, kl, compute_metrics)


def _fused_metrics(
    batch: PolicyBatch, advantages: torch.Tensor, ref_logps_N: torch.Tensor | None, logps_N: torch.Tensor
) -> Metrics:
    shape = batch.mask_BT.shape
    return policy_metrics(
        logps_N.view(shape),
        batch.old_logps_BT,
        advantages if advantages.shape == shape[:1] else advantages.view(shape),
        batch.mask_BT,
        ref_logps=None if ref_logps_N is None else ref_logps_N.view(shape),
        **batch.options.of("loss_type", "importance_level", "clip_eps", "delta", "kl_estimator"),
    )


class GradientFromForward:
    """Gradients made in the forward: handed out once, scaled by the incoming gradient where that is not 1."""

    def __init__(self, name: str, *gradients: torch.Tensor) -> None:
        self.name, self._gradients = name, gradients

    def scaled(self, factor: torch.Tensor, scale_: Callable[[torch.Tensor, torch.Tensor], None]) -> list[torch.Tensor]:
        if not self._gradients:
            raise RuntimeError(
                f"backward of {self.name} can run once: its gradient was made in the forward and has been handed out; "
                "call it again for another backward"
            )
        gradients, self._gradients = self._gradients, ()
        for gradient in gradients:
            scale_(gradient, factor)
        return list(gradients)


def keep_gradients(ctx: Any, name: str, *gradients: torch.Tensor) -> None:
    """For `kept_gradients`. A compiled graph keeps tensors only, and decides itself about their memory."""
    if torch.compiler.is_compiling():
        ctx.save_for_backward(*gradients)
    else:
        ctx.gradient = GradientFromForward(name, *gradients)


def kept_gradients(ctx: Any, factor: torch.Tensor, scale_: Callable[..., None]) -> list[torch.Tensor]:
    if torch.compiler.is_compiling():
        return [gradient * factor for gradient in ctx.saved_tensors]
    return ctx.gradient.scaled(factor, scale_)
