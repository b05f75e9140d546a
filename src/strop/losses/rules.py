"""The loss of a token by a rule, its derivative, and estimates of the KL.

A rule is a frozen value that names a loss. It gives the formula for one token and the weight of a token in its batch.
It is passed unchanged from the config to the kernel.

Shapes: N tokens.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import TypedDict

import torch

from strop._checks import check_choice
from strop._tensors import check_floats, check_like, in_float
from strop._types import Context
from strop.config.policy_losses import KL_ESTIMATORS, ClipBounds, ClipEps, PolicyRule, Tokens, cut


@dataclass(frozen=True, kw_only=True)
class NLL:
    """The rule of SFT: the mean of −log π over the tokens of the batch."""

    loss_type: str = "nll"
    beta: float = 0.0
    kl_estimator: str = "k3"
    bounds = ClipBounds(0.0, math.inf, math.inf)
    text = ""
    row_suffices = True

    def weight(self, length: int, num_tokens: int, num_sequences: int) -> float:
        return 1 / (num_tokens or 1)


TokenRule = PolicyRule | NLL


class PolicyOptions(TypedDict, total=False):
    """The fields of `PolicyRule`, for functions that take them as keyword arguments."""

    loss_type: str
    importance_level: str
    clip_eps: ClipEps | None
    delta: float | None
    beta: float
    kl_estimator: str
    entropy_coef: float
    max_completion_length: int | None
    sapo_temperatures: tuple[float, float]
    vespo_gamma: tuple[float, float, float, float]
    stale_kl: float | None


def token_loss(rule: TokenRule, tokens: Tokens) -> torch.Tensor:
    """Return the loss of each token, [N], by the rule's formula."""
    if isinstance(rule, NLL):
        return -tokens.logps_N
    return rule.type.formula(tokens, rule)


@functools.lru_cache(maxsize=64)
def from_text(text: str) -> TokenRule:
    """Return the rule encoded in a `PolicyRule.text`, with the fields that a row's loss needs."""
    if not text:
        return NLL()
    loss_type, low, high, delta, beta, kl_estimator = text.split()
    options: PolicyOptions = {"loss_type": loss_type, "beta": float(beta), "kl_estimator": kl_estimator}
    if delta != "None":
        options["delta"] = float(delta)
    if loss_type == "sapo":
        options["sapo_temperatures"] = float(low), float(high)
    else:
        options["clip_eps"] = float(low), float(high)
    return PolicyRule(**options)


# ---- tokens ----


def tokens_of(
    rule: TokenRule,
    logps_N: torch.Tensor,
    old_N: torch.Tensor | None,
    advantages_N: torch.Tensor,
    *,
    sequence_N: torch.Tensor | None = None,
    num_sequences: int = 0,
    mask_N: torch.Tensor | None = None,
) -> Tokens:
    """Return `Tokens` made from log-probs and advantages. A sequence-level rule also needs `sequence_N`."""
    log_ratio_N = OnPolicyLogRatio.apply(logps_N) if old_N is None else logps_N - old_N
    tokens = Tokens(logps_N, old_N, log_ratio_N, advantages_N, mask_N)
    if isinstance(rule, NLL) or rule.row_suffices:
        return tokens
    assert sequence_N is not None

    def total(values_N: torch.Tensor) -> torch.Tensor:
        """Return, for each token, the sum over its sequence."""
        zeros_S = values_N.new_zeros(num_sequences)
        return zeros_S.index_add(0, sequence_N, values_N).index_select(0, sequence_N)

    active_N = torch.ones_like(logps_N) if mask_N is None else mask_N.to(logps_N.dtype)
    length_N = total(active_N.detach()).clamp(min=1)
    if rule.stale_kl is not None:  # an advantage of 0 removes the policy term
        stale_N = (advantages_N < 0) & (-total(log_ratio_N.detach()) / length_N > rule.stale_kl)
        tokens = replace(tokens, advantages_N=advantages_N.masked_fill(stale_N, 0.0))
    if rule.loss_type == "vespo":
        return replace(tokens, log_ratio_N=total(log_ratio_N.clamp(-20.0, 20.0)))
    if rule.importance_level == "geometric":
        bounds = rule.bounds
        low_N, high_N, _ = tokens_cut = cut(log_ratio_N, advantages_N, bounds)
        log_ratio_N = log_ratio_N.masked_fill(low_N, math.log(bounds.low)).masked_fill(high_N, math.log(bounds.high))
        tokens = replace(tokens, cut_N=tokens_cut)
    if rule.importance_level != "token":
        tokens = replace(tokens, log_ratio_N=total(log_ratio_N) / length_N)
    return tokens


class OnPolicyLogRatio(torch.autograd.Function):
    """The difference logp − stop_gradient(logp): 0, also for −inf, where a plain difference is NaN; NaN for NaN."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logps_N: torch.Tensor) -> torch.Tensor:
        return logps_N.masked_fill(logps_N == logps_N, 0.0)

    @staticmethod
    def setup_context(ctx: Context, inputs: object, output: object) -> None:
        """Save nothing: the backward needs no input."""

    @staticmethod
    def backward(ctx: Context, d_log_ratio_N: torch.Tensor) -> torch.Tensor:
        return d_log_ratio_N


def token_terms(
    logps_N: torch.Tensor,
    old_logps_N: torch.Tensor | None,
    ref_logps_N: torch.Tensor | None,
    advantages_N: torch.Tensor,
    weights_N: torch.Tensor,
    rule: TokenRule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's loss term with its policy and KL parts, [3, N], and d (Σ terms) / d logp, [N]."""
    loss_N = token_loss(rule, tokens_of(rule, logps_N, old_logps_N, advantages_N))
    kl_N = torch.zeros_like(logps_N)
    if ref_logps_N is not None:
        kl_N = kl_of(logps_N, ref_logps_N, rule.kl_estimator)
    total_N = loss_N + rule.beta * kl_N if rule.beta else loss_N  # 0·inf is NaN
    terms_3N = torch.stack([total_N, loss_N, kl_N]) * weights_N
    return terms_3N, weights_N * _d_terms(logps_N, old_logps_N, ref_logps_N, advantages_N, rule)


def _d_terms(
    logps_N: torch.Tensor,
    old_logps_N: torch.Tensor | None,
    ref_logps_N: torch.Tensor | None,
    advantages_N: torch.Tensor,
    rule: TokenRule,
) -> torch.Tensor:
    """Return d (loss + beta·kl) / d logp of each token, without autograd, which is off inside torch.ops operators."""
    if isinstance(rule, NLL):  # −1, and NaN where logp is NaN
        return torch.where(logps_N == logps_N, -1.0, logps_N)
    assert rule.type.derivative is not None
    ratio_N = torch.ones_like(logps_N) if old_logps_N is None else (logps_N - old_logps_N).exp()
    d_N = rule.type.derivative(ratio_N, advantages_N, rule.bounds)
    if rule.beta and ref_logps_N is not None:
        below_N = ref_logps_N - logps_N
        if rule.kl_estimator == "k1":  # 1
            return d_N + rule.beta
        d_N = d_N - rule.beta * (below_N if rule.kl_estimator == "k2" else below_N.expm1())  # −d or 1 − exp(d)
    return d_N


# ---- the KL ----

# k3 = d²·(1/2! + d/3! + … + d¹³/15!) inside |d| < ½: the truncation error is 6e-18 of the value
_SERIES_BELOW = 0.5
_SERIES = [1 / math.factorial(n) for n in range(15, 1, -1)]


def kl_estimate(logps: torch.Tensor, ref_logps: torch.Tensor, estimator: str = "k3") -> torch.Tensor:
    """Return an estimate of KL(policy ‖ reference) for each sampled token (Schulman 2020, "Approximating KL").

    With d = log π_ref − log π_θ (reference minus policy, as in TRL, verl and strop's primitives):

        k1 = −d                 unbiased, may be negative
        k2 = d²/2               biased, never negative; the mean of its gradient is the KL's gradient
        k3 = exp(d) − d − 1     unbiased, never negative; used in GRPO's loss

    logps       [..] log-probs of the policy, any floating dtype
    ref_logps   [..] those of the reference; no gradient flows into them
    estimator   "k1", "k2" or "k3"

    returns     [..] float32 (float64 for float64)

    Value and gradient are accurate to the dtype's precision, however close the two policies are:
        d k1 / d logp = 1        d k2 / d logp = −d        d k3 / d logp = 1 − exp(d)
    """
    check_floats(logps, "logps")
    check_like(ref_logps, "ref_logps", logps, "logps")
    check_choice(estimator, "estimator", KL_ESTIMATORS)
    return kl_of(in_float(logps), in_float(ref_logps.detach()), estimator)


def kl_of(logps: torch.Tensor, ref_logps: torch.Tensor, estimator: str) -> torch.Tensor:
    """Return `kl_estimate` for checked arguments."""
    d = ref_logps - logps
    if estimator == "k1":
        return -d
    return d.square() / 2 if estimator == "k2" else _K3.apply(d)


class _K3(torch.autograd.Function):
    """The function exp(d) − d − 1, with its exact gradient expm1(d)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(d: torch.Tensor) -> torch.Tensor:
        series = torch.full_like(d, _SERIES[0])
        for coefficient in _SERIES[1:]:
            series = series * d + coefficient
        # Outside the series |expm1(d)| is at least 0.39 and not close to d: the subtraction loses at most two bits.
        return torch.where(d.abs() < _SERIES_BELOW, series * d.square(), torch.expm1(d) - d)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, *grads):
        (d,) = ctx.saved_tensors
        return grads[0] * torch.expm1(d)  # d k3 / d d = exp(d) − 1
