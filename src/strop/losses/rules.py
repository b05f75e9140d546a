"""The loss of a token by a rule, its derivative, and estimates of the KL.

A rule is a frozen value that names a loss. It gives the formula for one token and the weight of a token in its batch.
It is passed unchanged from the config to the kernel.

Shapes: N tokens.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self, TypedDict

import torch

from strop._types import Context
from strop.config.policy_losses import POLICY_LOSSES, ClipBounds, ClipEps, PolicyRule, Tokens, cut


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
    cov_fraction: float
    cov_bounds: tuple[float, float]
    cov_kl_coef: float
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
    elif POLICY_LOSSES[loss_type].clips:
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
    marked_N: torch.Tensor | None = None,
) -> Tokens:
    """Return `Tokens` made from log-probs and advantages. A sequence-level rule also needs `sequence_N`."""
    log_ratio_N = OnPolicyLogRatio.apply(logps_N) if old_N is None else logps_N - old_N
    tokens = Tokens(logps_N, old_N, log_ratio_N, advantages_N, mask_N, marked_N=marked_N)
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


# ---- the loss and its metrics ----


Metrics = dict[str, torch.Tensor]


class LossResult(tuple[torch.Tensor, torch.Tensor, torch.Tensor]):
    """A tuple of three tensors, the loss first. `metrics` is a dict of 0-d tensors, computed on first access."""

    _compute_metrics: Callable[[], Metrics]
    _metrics: Metrics | None = None

    def __new__(
        cls,
        loss: torch.Tensor,
        second: torch.Tensor,
        third: torch.Tensor,
        compute_metrics: Callable[[], Metrics] = dict,
    ) -> Self:
        self = super().__new__(cls, (loss, second, third))
        self._compute_metrics = compute_metrics
        return self

    def __getnewargs__(self) -> tuple[object, ...]:
        return (*self, self._compute_metrics)

    @property
    def loss(self) -> torch.Tensor:
        return self[0]

    @property  # not functools.cached_property: torch.compile cannot trace its lock in Python 3.11
    def metrics(self) -> Metrics:
        if self._metrics is None:
            with torch.no_grad():
                self._metrics = self._compute_metrics()
        return self._metrics


class PolicyLoss(LossResult):
    """The tuple (loss, policy_loss, kl) of 0-d tensors. `metrics`: see `policy_metrics`; computed on first access."""

    @property
    def policy_loss(self) -> torch.Tensor:
        return self[1]

    @property
    def kl(self) -> torch.Tensor:
        return self[2]


def tokens_loss(
    rule: PolicyRule,
    tokens: Tokens,
    weights_N: torch.Tensor,
    ref_logps_N: torch.Tensor | None = None,
    entropy_N: torch.Tensor | None = None,
) -> PolicyLoss:
    """Return Σ weight·(token loss + beta·kl − entropy_coef·entropy) over the packed tokens of `tokens_of`."""
    policy = (weights_N * token_loss(rule, tokens)).sum()
    loss, kl = policy.clone(), policy.new_zeros(())  # a copy, so that `loss += other` does not change policy_loss
    if ref_logps_N is not None:
        kl = (weights_N * kl_of(tokens.logps_N, ref_logps_N, rule.kl_estimator)).sum()
        if rule.beta:  # 0·inf is NaN
            loss = loss + rule.beta * kl
    if entropy_N is not None and rule.entropy_coef:
        loss = loss - rule.entropy_coef * (weights_N * entropy_N).sum()
    # detached, because the pending metrics must not keep the graph alive
    entropy_N = None if entropy_N is None else entropy_N.detach()
    compute_metrics = functools.partial(tokens_metrics, rule, tokens.detached(), ref_logps_N, entropy_N)
    return PolicyLoss(loss, policy, kl, compute_metrics)


def nll_of(logps_N: torch.Tensor, weights_N: torch.Tensor) -> PolicyLoss:
    """Return the loss of the rule `NLL`, −Σ weight·log π."""
    loss = -(weights_N * logps_N).sum()
    return PolicyLoss(loss, loss.detach().clone(), loss.new_zeros(()))


def computed_loss(
    rule: TokenRule,
    results: tuple[torch.Tensor, ...],
    old_N: torch.Tensor | None,
    advantages: torch.Tensor | None,
    ref_N: torch.Tensor | None,
    mask_N: torch.Tensor | None = None,
) -> PolicyLoss:
    """Return the `PolicyLoss` for results of the row functions, with metrics (none for NLL).

    results      the loss, its policy and KL parts [2], log-probs [N]
    advantages   [N], or [B] for sequences of N/B tokens
    """
    loss, policy_and_kl, logps_N = results
    policy, kl = policy_and_kl.unbind()
    if isinstance(rule, NLL):
        return PolicyLoss(loss, policy, kl)
    assert advantages is not None

    def metrics() -> Metrics:
        per_sequence = len(logps_N) // max(len(advantages), 1)
        advantages_N = advantages[:, None].expand(-1, per_sequence).reshape(-1)
        logps, old, of_tokens, ref = (
            values_N if values_N is None or mask_N is None else values_N.masked_fill(~mask_N, 0.0)
            for values_N in (logps_N, old_N, advantages_N, ref_N)
        )
        assert logps is not None
        assert of_tokens is not None
        return tokens_metrics(rule, tokens_of(rule, logps, old, of_tokens, mask_N=mask_N), ref, None)

    return PolicyLoss(loss, policy, kl, metrics)


@torch.no_grad()
def tokens_metrics(
    rule: PolicyRule, tokens: Tokens, ref_logps_N: torch.Tensor | None, entropy_N: torch.Tensor | None
) -> Metrics:
    """Return `policy_metrics` for packed tokens."""
    bounds, mask_N, ratio_N = rule.bounds, tokens.mask_N, tokens.log_ratio_N.exp()
    num_tokens: int | torch.Tensor = max(len(ratio_N), 1) if mask_N is None else mask_N.sum().clamp(min=1)

    def mean(values_N: torch.Tensor) -> torch.Tensor:
        return tokens.active(values_N.to(ratio_N.dtype)).sum() / num_tokens

    if rule.loss_type == "cispo" or not rule.type.clips:  # cispo clips the weight for either sign of A
        none_N = torch.zeros_like(ratio_N, dtype=torch.bool)
        low_N, high_N, delta_N = none_N, ratio_N > bounds.high if rule.loss_type == "cispo" else none_N, none_N
    elif rule.type.outside is not None:
        low_N, high_N = rule.type.outside(tokens, rule)
        delta_N = ~(low_N | high_N) & (ratio_N > bounds.delta)
    else:
        low_N, high_N, delta_N = tokens.cut_N or cut(tokens.log_ratio_N, tokens.advantages_N, bounds)
        high_N = high_N & (tokens.advantages_N > 0)  # clipping has no effect at A = 0
    metrics = {
        "clip_fraction": mean(low_N | high_N | delta_N),
        "clip_fraction_low": mean(low_N),
        "clip_fraction_high": mean(high_N),
        "clip_fraction_delta": mean(delta_N),
        "ratio/mean": mean(ratio_N),
        "ratio/min": _extreme(ratio_N, mask_N, torch.amin, math.inf),
        "ratio/max": _extreme(ratio_N, mask_N, torch.amax, -math.inf),
        "approx_kl": mean(_since_rollout(tokens)),
    }
    if ref_logps_N is not None:
        metrics["kl"] = mean(kl_of(tokens.logps_N, ref_logps_N, rule.kl_estimator))
    if entropy_N is not None:
        metrics["entropy"] = mean(entropy_N)
    return metrics


def _since_rollout(tokens: Tokens) -> torch.Tensor:
    """Return the k3 estimate of KL(old ‖ policy) on samples of the old policy; 0 on policy, even if logp is −inf."""
    if tokens.old_N is None:
        return OnPolicyLogRatio.apply(tokens.logps_N)
    return kl_of(tokens.old_N, tokens.logps_N, "k3")


def _extreme(
    ratio_N: torch.Tensor, mask_N: torch.Tensor | None, of: Callable[[torch.Tensor], torch.Tensor], none: float
) -> torch.Tensor:
    """Return the minimum or maximum ratio over unmasked tokens; 0, like the means, if all are masked."""
    if not ratio_N.numel():
        return ratio_N.new_zeros(())
    if mask_N is None:
        return of(ratio_N)
    return of(ratio_N.masked_fill(~mask_N, none)).masked_fill(~mask_N.any(), 0.0)


# ---- the KL ----

# k3 = d²·(1/2! + d/3! + … + d¹³/15!) inside |d| < ½: the truncation error is 6e-18 of the value
_SERIES_BELOW = 0.5
_SERIES = [1 / math.factorial(n) for n in range(15, 1, -1)]


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
