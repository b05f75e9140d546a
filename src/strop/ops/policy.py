"""What `grpo_loss` and `linear_grpo_loss` share: their options, and the two ways to the loss.

Fused: a token's loss needs only its own row, so a row function gives the loss and the gradient of the logits in one
visit. Composed: log-probs by an operator, then `strop.losses.policy_loss`; for everything a row alone cannot know
(importance over a sequence, an entropy bonus).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from strop._tensors import as_completion_mask, check_choice, check_device, check_floats, check_number, check_shape
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
from strop.losses._common import Count
from strop.losses.policy import ClipEps, per_token
from strop.ops.rows import TokenLoss


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
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


@dataclass(frozen=True)
class PolicyBatch:
    """The tensors of [B] and [B, T] besides the logits, checked."""

    options: PolicyOptions
    mask_BT: torch.Tensor
    old_logps_BT: torch.Tensor | None
    advantages: torch.Tensor  # [B] or [B, T]


def check_batch(
    ids: torch.Tensor, old_logps: Any, rewards: Any, completion_mask: Any, options: PolicyOptions, ref: Any, ref_name: str
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
    check_number(options.beta, "beta")
    if options.beta and ref is None and options.ref_logps is None:
        raise ValueError(f"{ref_name} or ref_logps must be given where beta is above 0, found beta={options.beta}")
    return PolicyBatch(options, mask_BT, old_logps, _advantages(rewards, options, ids))


def _advantages(rewards: Any, options: PolicyOptions, ids: torch.Tensor) -> torch.Tensor:
    given = options.of("samples_per_prompt", "group_boundaries", "advantages")
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        found = " and ".join(named) or "none"
        raise ValueError(f"exactly one of samples_per_prompt, group_boundaries, advantages must be given, found {found}")
    if options.advantages is not None:
        return options.advantages
    if not isinstance(rewards, torch.Tensor):
        raise TypeError(f"rewards must be a tensor, found {type(rewards).__name__}")
    if rewards.shape != ids.shape[:1]:
        raise ValueError(f"rewards must have shape [{ids.shape[0]}], found {list(rewards.shape)}")
    check_device(rewards, ids, "rewards", "action_ids")
    return group_advantages(rewards, **options.of("samples_per_prompt", "group_boundaries"))


def composed(
    batch: PolicyBatch, ref_logps_BT: torch.Tensor | None, score: Callable[[bool], Any]
) -> PolicyLoss:
    """The loss from log-probs; score(entropy) gives those, and the entropies where they are wanted."""
    options, entropy = batch.options, batch.options.entropy_coef != 0
    scores = score(entropy)
    logps_BT, entropy_BT = scores if entropy else (scores, None)
    result = policy_loss(
        logps_BT,
        batch.old_logps_BT,
        batch.advantages,
        batch.mask_BT,
        ref_logps=ref_logps_BT,
        entropy=entropy_BT,
        **options.of("loss_type", "importance_level", "clip_eps", "delta", "beta", "kl_estimator", "entropy_coef"),
        **options.of("max_completion_length", "num_tokens", "num_sequences"),
    )
    # of the three only the loss has a gradient, as in the fused way
    return PolicyLoss(result.loss, result.policy_loss.detach(), result.kl.detach(), result._compute_metrics)


@dataclass(frozen=True)
class RowInputs:
    """What a row function reads of a batch, flat."""

    ids_N: torch.Tensor
    mask_N: torch.Tensor
    old_logps_N: torch.Tensor | None
    ref_logps_N: torch.Tensor | None
    advantages_N: torch.Tensor
    weights_N: torch.Tensor


def row_inputs(batch: PolicyBatch, ids: torch.Tensor, ref_logps_BT: torch.Tensor | None, dtype: torch.dtype) -> RowInputs:
    options = batch.options
    weights_BT = token_weights(
        batch.mask_BT,
        options.loss_type,
        dtype=dtype,
        **options.of("max_completion_length", "num_tokens", "num_sequences"),
    )
    old_logps_N, ref_logps_N = (
        None if logps is None else logps.detach().to(dtype).reshape(-1) for logps in (batch.old_logps_BT, ref_logps_BT)
    )
    return RowInputs(
        ids.reshape(-1),
        batch.mask_BT.reshape(-1),
        old_logps_N,
        ref_logps_N,
        per_token(batch.advantages, weights_BT).to(dtype).reshape(-1),
        weights_BT.reshape(-1),
    )


def fused_result(
    batch: PolicyBatch,
    ref_logps_BT: torch.Tensor | None,
    loss: torch.Tensor,
    policy_and_kl: torch.Tensor,
    logps_BT: torch.Tensor,
) -> PolicyLoss:
    policy, kl = policy_and_kl.unbind()
    compute_metrics = functools.partial(
        policy_metrics,
        logps_BT,
        batch.old_logps_BT,
        batch.advantages,
        batch.mask_BT,
        ref_logps=ref_logps_BT,
        **batch.options.of("loss_type", "importance_level", "clip_eps", "delta", "kl_estimator"),
    )
    return PolicyLoss(loss, policy, kl, compute_metrics)


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
