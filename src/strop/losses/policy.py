"""Policy-gradient losses as pure functions of log-probs (GRPO and its relatives, GSPO, CISPO, RLOO).

Every loss here is two choices: a formula for one token (`token_policy_loss`) and a fixed weight for every token
(`token_weights`), and then

    policy_loss = Σ weights · token_loss        loss = policy_loss + beta·kl − entropy_coef·entropy

where kl and entropy are reduced with the same weights. Fused kernels compute the same two things.

    loss_type   token                                       weight of a token that counts
    grpo        −min(r·A, clip(r)·A)                        1 / (length of its sequence · sequences)    arXiv 2402.03300
    bnpo        the same                                    1 / tokens
    dapo        the same                                    1 / tokens of the whole step                arXiv 2503.14476
    dr_grpo     the same                                    1 / (max_completion_length · sequences)     arXiv 2503.20783
    cispo       −stop_gradient(min(r, high))·A·log π        1 / tokens of the whole step                arXiv 2506.13585

r is the ratio π/π_old of the token, or with importance_level="sequence" the geometric mean over its sequence
(GSPO, arXiv 2507.18071).

Shapes: B sequences, T tokens, P prompts, G samples of a prompt.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from strop._tensors import (
    as_completion_mask,
    check_choice,
    check_device,
    check_floats,
    check_like,
    check_number,
    check_shape,
    in_float,
)
from strop.losses._common import Count, LossResult, Metrics, as_divisor, check_count
from strop.losses.kl import KL_ESTIMATORS, kl_estimate

POLICY_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo")
IMPORTANCE_LEVELS = ("token", "sequence")

ClipEps = float | tuple[float, float]


class PolicyLoss(LossResult):
    """`loss, policy_loss, kl`, 0-d tensors. `metrics`: see `policy_metrics`, computed when first asked for."""

    @property
    def policy_loss(self) -> torch.Tensor:
        return self[1]

    @property
    def kl(self) -> torch.Tensor:
        return self[2]


@dataclass(frozen=True)
class ClipBounds:
    """Where the ratio is cut: below `low` for A < 0, above `high` for A ≥ 0, above `delta` for A < 0.

    For cispo only `high` acts, whatever the sign of A.
    """

    low: float
    high: float
    delta: float


def clip_bounds(clip_eps: ClipEps, delta: float | None, loss_type: str) -> ClipBounds:
    """The arguments `clip_eps` and `delta` of a loss as bounds of the ratio, checked."""
    check_choice(loss_type, POLICY_LOSS_TYPES, "loss_type")
    pair = clip_eps if isinstance(clip_eps, (tuple, list)) else (clip_eps, clip_eps)
    if len(pair) != 2:
        raise ValueError(f"clip_eps must be one number or a pair (low, high), found {len(pair)} numbers")
    for value in pair:
        check_number(value, "clip_eps")
        if not value > 0:
            raise ValueError(f"clip_eps must be above 0, found {value}")
    low, high = map(float, pair)
    if loss_type == "cispo":
        if high < 1:
            raise ValueError(
                f"clip_eps must be a pair (low, high) with high at least 1 for 'cispo', where high is the bound of the "
                f"ratio itself, such as (0.2, 5.0); found {clip_eps}"
            )
        if delta is not None:
            raise ValueError(f"delta must be None for 'cispo', whose ratio clip_eps bounds already, found {delta}")
        return ClipBounds(0.0, high, math.inf)
    if delta is not None:
        check_number(delta, "delta")
        if not delta >= 1 + high:
            raise ValueError(f"delta must be at least 1 + clip_eps = {1 + high}, found {delta}")
    return ClipBounds(1 - low, 1 + high, math.inf if delta is None else float(delta))


def policy_loss(
    logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    loss_type: str = "grpo",
    importance_level: str = "token",
    clip_eps: ClipEps = 0.2,
    delta: float | None = None,
    ref_logps: torch.Tensor | None = None,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    entropy: torch.Tensor | None = None,
    entropy_coef: float = 0.0,
    max_completion_length: int | None = None,
    num_tokens: Count | None = None,
    num_sequences: Count | None = None,
) -> PolicyLoss:
    """The loss of a batch, or of a micro-batch as its share of one.

    logps             [B, T] of the policy, any floating dtype; computed in float32 (float64 in float64)
    old_logps         [B, T] of the policy that sampled the tokens; None: the policy itself, so that the ratio is 1
    advantages        [B], or [B, T] for one per token
    completion_mask   [B, T] tokens that count (None: all); what stands elsewhere changes neither value nor gradient
    clip_eps          ε, or (low, high): the ratio's range is 1 − low to 1 + high. For cispo `high` is the bound itself
    delta             an upper bound of the ratio where A < 0 (two-sided clipping); at least 1 + high
    ref_logps, beta   the KL to the reference and its coefficient; the kl is computed wherever ref_logps is given
    entropy           [B, T] entropies, for the bonus entropy_coef·entropy and the metrics
    max_completion_length, num_tokens, num_sequences   see `token_weights`

    returns           (loss, policy_loss, kl) with `.metrics`; loss = policy_loss + beta·kl − entropy_coef·entropy

    The gradient goes to logps (and entropy), never to old_logps, ref_logps or advantages.
    """
    check_choice(kl_estimator, KL_ESTIMATORS, "kl_estimator")
    bounds = clip_bounds(clip_eps, delta, loss_type)
    _check_coefficient(beta, "beta", ref_logps, "ref_logps")
    _check_coefficient(entropy_coef, "entropy_coef", entropy, "entropy")
    tokens = _tokens(logps, old_logps, advantages, completion_mask, importance_level)
    weights_BT = token_weights(
        tokens.mask_BT,
        loss_type,
        max_completion_length=max_completion_length,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        dtype=tokens.logps_BT.dtype,
    )
    policy = (weights_BT * _token_loss(tokens, loss_type, bounds)).sum()

    loss, kl = policy.clone(), policy.new_zeros(())  # so that `loss += other` leaves policy_loss as it is
    if ref_logps is not None:
        ref_logps = _like_tokens(ref_logps, tokens, "ref_logps").detach()
        kl = (weights_BT * kl_estimate(tokens.logps_BT, ref_logps, kl_estimator)).sum()
        if beta:  # 0·inf is NaN
            loss = loss + beta * kl
    if entropy is not None:
        entropy = _like_tokens(entropy, tokens, "entropy")
        if entropy_coef:
            loss = loss - entropy_coef * (weights_BT * entropy).sum()

    compute_metrics = functools.partial(
        policy_metrics,
        tokens.logps_BT.detach(),  # detached: metrics asked for late, or never, must not keep the graph
        None if old_logps is None else tokens.old_BT,
        tokens.advantages_BT,
        tokens.mask_BT,
        loss_type=loss_type,
        importance_level=importance_level,
        clip_eps=clip_eps,
        delta=delta,
        ref_logps=ref_logps,
        kl_estimator=kl_estimator,
        entropy=None if entropy is None else entropy.detach(),
    )
    return PolicyLoss(loss, policy, kl, compute_metrics)


def token_policy_loss(
    logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    *,
    loss_type: str = "grpo",
    importance_level: str = "token",
    clip_eps: ClipEps = 0.2,
    delta: float | None = None,
    completion_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss of every token, [B, T], before weights; arguments as in `policy_loss`.

    completion_mask   where it is 0 the result is 0 without gradient; None: every token counts

    Gradient with respect to logp, for a token whose ratio r is not cut: −A·r; cut: 0. With importance_level="sequence"
    it is spread over the sequence, each of its tokens getting the mean. cispo: −A·min(r, high), cut or not.
    """
    bounds = clip_bounds(clip_eps, delta, loss_type)
    return _token_loss(_tokens(logps, old_logps, advantages, completion_mask, importance_level), loss_type, bounds)


def token_weights(
    completion_mask: torch.Tensor,
    loss_type: str,
    *,
    max_completion_length: int | None = None,
    num_tokens: Count | None = None,
    num_sequences: Count | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The weight of every token, [B, T]: loss = Σ weights · token_loss. 0 where the mask is 0.

    max_completion_length   of the run, for dr_grpo
    num_tokens              tokens that count in the whole batch of which this is a part (bnpo, dapo, cispo)
    num_sequences           sequences in the whole batch (grpo, dr_grpo)

    Left out, the counts are those of the mask: this is then the whole batch. With them the losses of micro-batches add
    up to the loss of the batch. They may be 0-d tensors, which are not waited for.
    """
    check_choice(loss_type, POLICY_LOSS_TYPES, "loss_type")
    if isinstance(completion_mask, torch.Tensor) and completion_mask.ndim != 2:
        raise ValueError(f"completion_mask must have shape [B, T], found {list(completion_mask.shape)}")
    mask_BT = as_completion_mask(completion_mask, getattr(completion_mask, "shape", torch.Size()))
    if mask_BT is None:
        raise TypeError("completion_mask must be a tensor, found NoneType")
    count, tokens = weight_counts(mask_BT, loss_type, max_completion_length, num_tokens, num_sequences)
    active_BT = mask_BT.to(dtype)
    per_token_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1).to(dtype) if tokens is None else tokens
    return active_BT / (as_divisor(count, "count", active_BT) * per_token_B1)


def weight_counts(
    mask_BT: torch.Tensor,
    loss_type: str,
    max_completion_length: int | None,
    num_tokens: Count | None,
    num_sequences: Count | None,
) -> tuple[Count, int | None]:
    """(count, tokens) of the weight 1/(count·tokens); tokens None: the length of the token's own sequence."""
    check_choice(loss_type, POLICY_LOSS_TYPES, "loss_type")
    if loss_type in ("bnpo", "dapo", "cispo"):
        return mask_BT.sum() if num_tokens is None else check_count(num_tokens, "num_tokens"), 1
    sequences = mask_BT.shape[0] if num_sequences is None else check_count(num_sequences, "num_sequences")
    return sequences, _as_max_completion_length(max_completion_length) if loss_type == "dr_grpo" else None


def rloo_loss(
    logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    clip_eps: ClipEps = 0.2,
    num_sequences: Count | None = None,
) -> PolicyLoss:
    """REINFORCE leave-one-out (arXiv 2402.14740): a completion is one action, and the ratio is clipped as in PPO.

        r = exp(Σ logp − Σ old)      loss = mean over sequences of −min(r·A, clip(r)·A)

    logps             [B, T]
    old_logps         [B] sums over the tokens that count, or [B, T] per token; None: the policy itself
    advantages        [B], as `rloo_advantages` gives them
    completion_mask   [B, T]; a sequence without a token that counts adds nothing
    num_sequences     in the whole batch of which this is a part

    returns           (loss, policy_loss, kl) with `.metrics`; the kl is 0: RLOO takes it off the rewards beforehand
    """
    mask_BT = _check_tokens(logps, completion_mask)
    mask_B1 = mask_BT.any(-1, keepdim=True)
    logps_B1 = _active(logps, mask_BT).sum(-1, keepdim=True)
    old_B1 = None
    if old_logps is not None:
        check_floats(old_logps, "old_logps")
        if old_logps.ndim == 1:
            check_shape(old_logps, logps.shape[:1], "old_logps")
            old_B1 = in_float(old_logps)[:, None]
        else:
            check_like(old_logps, logps, "old_logps", "logps")
            old_B1 = _active(old_logps, mask_BT).sum(-1, keepdim=True)
    check_floats(advantages, "advantages")
    check_shape(advantages, logps.shape[:1], "advantages")
    # one "token" per sequence: grpo's mean over a length of 1, then over sequences
    return policy_loss(logps_B1, old_B1, advantages, mask_B1, clip_eps=clip_eps, num_sequences=num_sequences)


def policy_metrics(
    logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    loss_type: str = "grpo",
    importance_level: str = "token",
    clip_eps: ClipEps = 0.2,
    delta: float | None = None,
    ref_logps: torch.Tensor | None = None,
    kl_estimator: str = "k3",
    entropy: torch.Tensor | None = None,
) -> Metrics:
    """What to watch in training, 0-d tensors without gradient; arguments as in `policy_loss`.

    Means over the tokens that count, whatever the loss's weights, so that loss types compare; 0 where none counts.

    clip_fraction         tokens whose ratio is cut (cispo: whose weight is), and of these
    clip_fraction_low, clip_fraction_high, clip_fraction_delta     those cut by each bound
    ratio_mean, ratio_min, ratio_max
    approx_kl             k3 of KL(old ‖ policy): how far the updates have gone since the rollout
    kl, entropy           where ref_logps, entropy are given
    """
    bounds = clip_bounds(clip_eps, delta, loss_type)
    with torch.no_grad():
        tokens = _tokens(logps, old_logps, advantages, completion_mask, importance_level)
        mask_BT, ratio_BT = tokens.mask_BT, tokens.log_ratio_BT.exp()
        num_tokens = mask_BT.sum().clamp(min=1)

        def mean(values_BT: torch.Tensor) -> torch.Tensor:
            return values_BT.to(ratio_BT.dtype).masked_fill(~mask_BT, 0.0).sum() / num_tokens

        if loss_type == "cispo":  # the weight is cut for either sign
            low_BT, high_BT, delta_BT = torch.zeros_like(mask_BT), ratio_BT > bounds.high, torch.zeros_like(mask_BT)
        else:
            low_BT, high_BT, delta_BT = _cut(tokens, bounds)
            high_BT = high_BT & (tokens.advantages_BT > 0)  # at A = 0 nothing is lost
        metrics = {
            "clip_fraction": mean(low_BT | high_BT | delta_BT),
            "clip_fraction_low": mean(low_BT),
            "clip_fraction_high": mean(high_BT),
            "clip_fraction_delta": mean(delta_BT),
            "ratio_mean": mean(ratio_BT),
            "ratio_min": _extreme(ratio_BT, mask_BT, torch.amin, math.inf),
            "ratio_max": _extreme(ratio_BT, mask_BT, torch.amax, -math.inf),
            "approx_kl": mean(_since_rollout(tokens, on_policy=old_logps is None)),
        }
        if ref_logps is not None:
            ref_BT = _like_tokens(ref_logps, tokens, "ref_logps")
            metrics["kl"] = mean(kl_estimate(tokens.logps_BT, ref_BT, kl_estimator))
        if entropy is not None:
            metrics["entropy"] = mean(_like_tokens(entropy, tokens, "entropy"))
        return metrics


@dataclass(frozen=True)
class _Tokens:
    """What the formulas read. Where the mask is 0 everything else is 0 too."""

    logps_BT: torch.Tensor
    old_BT: torch.Tensor
    log_ratio_BT: torch.Tensor
    advantages_BT: torch.Tensor
    mask_BT: torch.Tensor


def _tokens(logps: Any, old_logps: Any, advantages: Any, completion_mask: Any, importance_level: str) -> _Tokens:
    check_choice(importance_level, IMPORTANCE_LEVELS, "importance_level")
    mask_BT = _check_tokens(logps, completion_mask)
    logps_BT = _active(logps, mask_BT)
    old_BT = logps_BT.detach()
    if old_logps is not None:
        check_like(old_logps, logps, "old_logps", "logps")
        old_BT = _active(old_logps.detach(), mask_BT).to(logps_BT.dtype)
    advantages_BT = _active(per_token(advantages, logps), mask_BT).to(logps_BT.dtype)
    log_ratio_BT = _OnPolicyLogRatio.apply(logps_BT) if old_logps is None else logps_BT - old_BT
    if importance_level == "sequence":
        length_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1)
        log_ratio_BT = (log_ratio_BT.sum(-1, keepdim=True) / length_B1).expand_as(log_ratio_BT)
    return _Tokens(logps_BT, old_BT, log_ratio_BT, advantages_BT, mask_BT)


class _OnPolicyLogRatio(torch.autograd.Function):
    """logp − stop_gradient(logp): 0, also where logp is −inf and the difference would be NaN; NaN for NaN."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logps_BT: torch.Tensor) -> torch.Tensor:
        return logps_BT.masked_fill(logps_BT == logps_BT, 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is needed."""

    @staticmethod
    def backward(ctx: Any, d_log_ratio_BT: torch.Tensor) -> torch.Tensor:
        return d_log_ratio_BT


def _token_loss(tokens: _Tokens, loss_type: str, bounds: ClipBounds) -> torch.Tensor:
    """The formula of one token."""
    if loss_type == "cispo":
        weight_BT = tokens.log_ratio_BT.detach().exp().clamp(max=bounds.high)
        return -weight_BT * tokens.advantages_BT * tokens.logps_BT
    too_low_BT, too_high_BT, over_delta_BT = _cut(tokens, bounds)
    # exp of what is not cut only: where the ratio overflows, its gradient would be 0·inf = NaN
    inside_BT = tokens.log_ratio_BT.masked_fill(too_low_BT | too_high_BT | over_delta_BT, 0.0)
    ratio_BT = inside_BT.exp().masked_fill(too_low_BT, bounds.low).masked_fill(too_high_BT, bounds.high)
    return -ratio_BT.masked_fill(over_delta_BT, bounds.delta) * tokens.advantages_BT


def _cut(tokens: _Tokens, bounds: ClipBounds) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where −min(r·A, clip(r)·A) is constant in r, by the bound that holds it: low, high, delta.

    min() keeps the smaller product: for A ≥ 0 the smaller ratio (clip acts above), for A < 0 the larger (it acts below).
    """
    ratio_BT = tokens.log_ratio_BT.detach().exp()
    negative_BT = tokens.advantages_BT < 0
    return (
        negative_BT & (ratio_BT < bounds.low),
        (tokens.advantages_BT >= 0) & (ratio_BT > bounds.high),
        negative_BT & (ratio_BT > bounds.delta),
    )


def _since_rollout(tokens: _Tokens, on_policy: bool) -> torch.Tensor:
    """k3 of KL(old ‖ policy), the old policy having sampled; on policy 0, also where logp is −inf."""
    return _OnPolicyLogRatio.apply(tokens.logps_BT) if on_policy else kl_estimate(tokens.old_BT, tokens.logps_BT)


def _extreme(
    ratio_BT: torch.Tensor, mask_BT: torch.Tensor, of: Callable[[torch.Tensor], torch.Tensor], none: float
) -> torch.Tensor:
    """The least or greatest ratio that counts; 0, as the means, where none does."""
    if not ratio_BT.numel():
        return ratio_BT.new_zeros(())
    return of(ratio_BT.masked_fill(~mask_BT, none)).masked_fill(~mask_BT.any(), 0.0)


def _check_tokens(logps: Any, completion_mask: Any) -> torch.Tensor:
    """logps are [B, T] floats, and the mask as booleans."""
    check_floats(logps, "logps")
    if logps.ndim != 2:
        raise ValueError(f"logps must have shape [B, T], found {list(logps.shape)}")
    mask_BT = as_completion_mask(completion_mask, logps.shape)
    if mask_BT is None:
        return torch.ones_like(logps, dtype=torch.bool)
    check_device(mask_BT, logps, "completion_mask", "logps")
    return mask_BT


def _check_coefficient(value: Any, name: str, needed: Any, needed_name: str) -> None:
    check_number(value, name)
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be finite and at least 0, found {value}")
    if value and needed is None:
        raise ValueError(f"{needed_name} must be given where {name} is above 0, found None with {name}={value}")


def _active(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """0 where the mask is 0, before any arithmetic: what stands there may be NaN, and 0·NaN is NaN."""
    return in_float(values_BT).masked_fill(~mask_BT, 0.0)


def _like_tokens(values: Any, tokens: _Tokens, name: str) -> torch.Tensor:
    check_like(values, tokens.logps_BT, name, "logps")
    return _active(values, tokens.mask_BT).to(tokens.logps_BT.dtype)


def per_token(advantages: Any, logps: torch.Tensor) -> torch.Tensor:
    """Advantages [B] or [B, T] as [B, T], checked against the log-probs."""
    check_floats(advantages, "advantages")
    if advantages.shape != logps.shape and advantages.shape != logps.shape[:1]:  # `in` takes no symbol for a number
        rows, columns = logps.shape
        raise ValueError(f"advantages must have shape [{rows}] or [{rows}, {columns}], found {list(advantages.shape)}")
    check_device(advantages, logps, "advantages", "logps")
    advantages = advantages.detach()
    return advantages[:, None].expand_as(logps) if advantages.ndim == 1 else advantages


def _as_max_completion_length(length: Any) -> int:
    if length is None:
        raise ValueError("max_completion_length must be given for 'dr_grpo', found None")
    if isinstance(length, bool) or not isinstance(length, int):
        raise TypeError(f"max_completion_length must be an int, found {type(length).__name__}")
    if length < 1:
        raise ValueError(f"max_completion_length must be at least 1, found {length}")
    return length
