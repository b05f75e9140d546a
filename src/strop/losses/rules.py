"""Rules: which loss, as one value that checks itself and goes unchanged from a config to a kernel; and the KL.

A rule knows the formula of one token and the weight of a token in its batch; nothing else of a loss depends on it.

Shapes: N tokens.
"""

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from strop._checks import check_choice, check_count, check_number
from strop._tensors import check_floats, check_like, in_float

POLICY_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
KL_ESTIMATORS = ("k1", "k2", "k3")
IMPORTANCE_LEVELS = ("token", "sequence", "geometric")
OVER_TOKENS = ("bnpo", "dapo", "cispo", "vespo")  # means over the tokens of the batch; the others go by sequences
UNCLIPPED = ("sapo", "vespo")  # the ratio is damped, not cut

FLAT = 60.0  # a log-ratio above which sapo's gate is flat: its ratio stays finite

ClipEps = float | tuple[float, float]
Cut = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Tokens:
    """What the formulas read, [N] each. Where the mask is 0 everything else is 0 too; None: every token counts.

    old_N   None: the policy itself
    cut_N   which tokens were cut by low, high and delta before their mean was taken; None where none was
    """

    logps_N: torch.Tensor
    old_N: torch.Tensor | None
    log_ratio_N: torch.Tensor
    advantages_N: torch.Tensor
    mask_N: torch.Tensor | None = None
    cut_N: "Cut | None" = None

    def active(self, values_N: torch.Tensor) -> torch.Tensor:
        return values_N if self.mask_N is None else values_N.masked_fill(~self.mask_N, 0.0)

    def detached(self) -> "Tokens":
        return replace(self, logps_N=self.logps_N.detach(), log_ratio_N=self.log_ratio_N.detach())


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
    check_choice(loss_type, "loss_type", POLICY_LOSS_TYPES)
    pair = clip_eps if isinstance(clip_eps, (tuple, list)) else (clip_eps, clip_eps)
    if len(pair) != 2:
        raise ValueError(f"clip_eps must be one number or a pair (low, high), found {len(pair)} numbers")
    for value in pair:
        check_number(value, "clip_eps", 0, open_low=True, finite=False)
    high = float(pair[1])
    if loss_type == "cispo":
        if high < 1:
            raise ValueError(
                f"clip_eps must be a pair (low, high) with high at least 1 for 'cispo', where high is the bound of the "
                f"ratio itself, such as (0.2, 5.0); found {clip_eps}"
            )
        if delta is not None:
            raise ValueError(f"delta must be None for 'cispo', whose ratio clip_eps bounds already, found {delta}")
    elif delta is not None:
        check_number(delta, "delta", finite=False)
        if not delta >= 1 + high:
            raise ValueError(f"delta must be at least 1 + clip_eps = {1 + high}, found {delta}")
    return _bounds(clip_eps, delta, loss_type)


def _bounds(clip_eps: ClipEps, delta: float | None, loss_type: str) -> ClipBounds:
    low, high = clip_eps if isinstance(clip_eps, (tuple, list)) else (clip_eps, clip_eps)
    if loss_type == "cispo":
        return ClipBounds(0.0, float(high), math.inf)
    return ClipBounds(1 - float(low), 1 + float(high), math.inf if delta is None else float(delta))


@dataclass(frozen=True, kw_only=True)
class PolicyRule:
    """Which policy loss: one value from the config to the kernel, checked when it is made.

    loss_type               grpo, bnpo, dr_grpo, dapo, luspo, cispo, sapo or vespo; docs/losses.md has the formulas
    importance_level        "token": the token's ratio is clipped; "sequence": the geometric mean of its sequence's (GSPO);
                            "geometric": the tokens' log-ratios are clipped to [−low, high], then their mean is taken (GMPO)
    clip_eps                ε or (low, high); None is 0.2, for cispo (0.2, 5.0), for the geometric level 0.4. sapo and
                            vespo clip nothing
    delta                   upper bound of the ratio where the advantage is negative; None is off
    beta                    the coefficient of the KL to the reference
    kl_estimator            how the KL is estimated: k1, k2 or k3
    entropy_coef            weight of the entropy bonus
    max_completion_length   what dr_grpo divides by
    sapo_temperatures       temperatures of sapo's gate, for negative and for positive advantages
    vespo_gamma             k and λ of vespo's weight φ(w) = w^k·exp(λ − λw), for negative and for positive advantages
    stale_kl                a sequence with a negative advantage has no policy term where the mean of log(π_old/π) over its
                            tokens is above this; None keeps all

    In GRPO's config beta and max_completion_length are set by the options kl_coef and max_new_tokens.
    """

    loss_type: str = "grpo"
    importance_level: str = "token"
    clip_eps: float | tuple[float, float] | None = None
    delta: float | None = None
    beta: float = field(default=0.0, metadata={"set_by": "kl_coef"})
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    max_completion_length: int | None = field(default=None, metadata={"set_by": "max_new_tokens"})
    sapo_temperatures: tuple[float, float] = (1.05, 1.0)
    vespo_gamma: tuple[float, float, float, float] = (3.0, 2.0, 2.0, 3.0)
    stale_kl: float | None = None
    row_suffices: ClassVar[bool]  # whether a token's loss needs its own row of logits alone: no sequence, no entropy

    def __post_init__(self) -> None:
        check_choice(self.importance_level, "importance_level", IMPORTANCE_LEVELS)
        check_choice(self.kl_estimator, "kl_estimator", KL_ESTIMATORS)
        check_choice(self.loss_type, "loss_type", POLICY_LOSS_TYPES)
        if isinstance(self.clip_eps, list):
            object.__setattr__(self, "clip_eps", tuple(self.clip_eps))
        for name in ("beta", "entropy_coef"):
            check_number(getattr(self, name), name, 0)
        if self.max_completion_length is not None:
            check_count(self.max_completion_length, "max_completion_length", 1)
        for name, count, open_low in (("sapo_temperatures", 2, True), ("vespo_gamma", 4, False)):
            _check_numbers(getattr(self, name), name, count, open_low)
        if self.stale_kl is not None:
            check_number(self.stale_kl, "stale_kl", 0)
        self._check_level()
        if self.loss_type not in UNCLIPPED:
            clip_bounds(self.clip, self.delta, self.loss_type)  # checks them
        alone = self.importance_level == "token" and self.loss_type != "vespo" and self.stale_kl is None
        object.__setattr__(self, "row_suffices", alone and not self.entropy_coef)

    def _check_level(self) -> None:
        """What a loss type or an importance level has no use for is not given."""
        for name, value in (("clip_eps", self.clip_eps), ("delta", self.delta)):
            if self.loss_type in UNCLIPPED and value is not None:
                raise ValueError(f"{name} must be None for {self.loss_type!r}, which clips nothing, found {value}")
        if self.loss_type == "vespo" and self.importance_level != "token":
            raise ValueError(
                f"importance_level must be 'token' for 'vespo', which weighs whole sequences by itself, found "
                f"{self.importance_level!r}"
            )
        if self.importance_level == "geometric":
            if self.loss_type in ("cispo", "sapo"):
                raise ValueError(
                    f"importance_level must be 'token' or 'sequence' for {self.loss_type!r}, found 'geometric'"
                )
            if self.delta is not None:
                raise ValueError(f"delta must be None at the geometric importance_level, found {self.delta}")

    @property
    def clip(self) -> ClipEps:
        if self.clip_eps is not None:
            return self.clip_eps
        if self.loss_type == "cispo":
            return 0.2, 5.0
        return 0.4 if self.importance_level == "geometric" else 0.2

    @property
    def bounds(self) -> ClipBounds:
        """Of the ratio; for sapo the temperatures of its gate."""
        if self.loss_type == "sapo":
            return ClipBounds(*self.sapo_temperatures, math.inf)
        if self.importance_level == "geometric":
            low, high = self._pair
            return ClipBounds(math.exp(-low), math.exp(high), math.inf)
        return _bounds(self.clip, self.delta, self.loss_type)

    @property
    def _pair(self) -> tuple[float, float]:
        return self.clip if isinstance(self.clip, tuple) else (self.clip, self.clip)

    @property
    def text(self) -> str:
        """What a row needs, for operators of torch.ops, which take no objects; `from_text` is the way back."""
        low, high = self.sapo_temperatures if self.loss_type == "sapo" else self._pair
        return f"{self.loss_type} {low} {high} {self.delta} {self.beta} {self.kl_estimator}"

    def weight(self, length: int, num_tokens: int, num_sequences: int) -> float:
        """Of each token of a sequence with so many, in a batch with so many tokens and sequences in all."""
        if self.loss_type in OVER_TOKENS:
            return 1 / (num_tokens or 1)
        return 1 / ((num_sequences or 1) * (self.length_divisor or max(length, 1)))

    @property
    def length_divisor(self) -> int | None:
        """What a token's weight is divided by besides the number of sequences; None: the length of its own."""
        if self.loss_type != "dr_grpo":
            return 1 if self.loss_type == "luspo" else None
        if self.max_completion_length is None:
            raise ValueError("max_completion_length must be given for 'dr_grpo', found None")
        return self.max_completion_length

    def token_loss(self, tokens: Tokens) -> torch.Tensor:
        """The formula of one token, [N]."""
        bounds = self.bounds
        if self.loss_type == "cispo":
            weight_N = tokens.log_ratio_N.detach().exp().clamp(max=bounds.high)
            return -weight_N * tokens.advantages_N * tokens.logps_N
        if self.loss_type == "vespo":
            return -self._gamma_weight(tokens) * tokens.advantages_N * tokens.logps_N
        if self.loss_type == "sapo":
            heat_N = torch.full_like(tokens.logps_N, bounds.low).masked_fill(tokens.advantages_N > 0, bounds.high)
            ratio_N = tokens.log_ratio_N.clamp(max=FLAT).exp()
            return -torch.sigmoid(heat_N * (ratio_N - 1)) * (4 / heat_N) * tokens.advantages_N
        if self.importance_level == "geometric":  # clipped before the mean was taken
            return -tokens.log_ratio_N.exp() * tokens.advantages_N
        too_low_N, too_high_N, over_delta_N = cut(tokens, bounds)
        # exp of what is not cut only: where the ratio overflows, its gradient would be 0·inf = NaN
        inside_N = tokens.log_ratio_N.masked_fill(too_low_N | too_high_N | over_delta_N, 0.0)
        ratio_N = inside_N.exp().masked_fill(too_low_N, bounds.low).masked_fill(too_high_N, bounds.high)
        return -ratio_N.masked_fill(over_delta_N, bounds.delta) * tokens.advantages_N

    @torch.no_grad()
    def _gamma_weight(self, tokens: Tokens) -> torch.Tensor:
        """φ(w) = w^k·exp(λ − λw), 1 at w = 1, where w is the product of a sequence's ratios (VESPO)."""
        log_w_N = tokens.log_ratio_N.clamp(math.log(1e-8), 20.0)
        k_neg, decay_neg, k_pos, decay_pos = self.vespo_gamma
        k_N, decay_N = (
            torch.full_like(log_w_N, negative).masked_fill(tokens.advantages_N >= 0, positive)
            for positive, negative in ((k_pos, k_neg), (decay_pos, decay_neg))
        )
        return (decay_N.clamp(min=1e-4) * (1 - log_w_N.exp()) + k_N * log_w_N).exp()


@dataclass(frozen=True, kw_only=True)
class NLL:
    """−log π of every token, as SFT has it: no ratio, no reference, the mean over the batch's tokens."""

    loss_type: str = "nll"
    beta: float = 0.0
    kl_estimator: str = "k3"
    bounds = ClipBounds(0.0, math.inf, math.inf)
    text = ""
    row_suffices = True

    def weight(self, length: int, num_tokens: int, num_sequences: int) -> float:
        return 1 / (num_tokens or 1)

    def token_loss(self, tokens: Tokens) -> torch.Tensor:
        return -tokens.logps_N


TokenRule = PolicyRule | NLL


@functools.lru_cache(maxsize=64)
def from_text(text: str) -> TokenRule:
    """The rule of a `text`, as far as a row needs it."""
    if not text:
        return NLL()
    loss_type, low, high, delta, beta, kl_estimator = text.split()
    pair: Any = {"sapo_temperatures" if loss_type == "sapo" else "clip_eps": (float(low), float(high))}
    return PolicyRule(
        loss_type=loss_type,
        delta=None if delta == "None" else float(delta),
        beta=float(beta),
        kl_estimator=kl_estimator,
        **pair,
    )


def _check_numbers(values: Any, name: str, count: int, open_low: bool) -> None:
    if not isinstance(values, (tuple, list)) or len(values) != count:
        raise ValueError(f"{name} must be {count} numbers, found {values!r}")
    for value in values:
        check_number(value, name, 0, open_low=open_low)


def cut(tokens: Tokens, bounds: ClipBounds) -> Cut:
    """Where −min(r·A, clip(r)·A) is constant in r, by the bound that holds it: low, high, delta.

    min() keeps the smaller product: for A ≥ 0 the smaller ratio (clip acts above), for A < 0 the larger (it acts below).
    """
    ratio_N = tokens.log_ratio_N.detach().exp()
    negative_N = tokens.advantages_N < 0
    return (
        negative_N & (ratio_N < bounds.low),
        (tokens.advantages_N >= 0) & (ratio_N > bounds.high),
        negative_N & (ratio_N > bounds.delta),
    )


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
    """Tokens from their log-probs and advantages; for a rule that a row alone does not give also whose each is."""
    log_ratio_N = OnPolicyLogRatio.apply(logps_N) if old_N is None else logps_N - old_N
    tokens = Tokens(logps_N, old_N, log_ratio_N, advantages_N, mask_N)
    if isinstance(rule, NLL) or rule.row_suffices:
        return tokens
    assert sequence_N is not None

    def total(values_N: torch.Tensor) -> torch.Tensor:
        """Of its sequence, at every token."""
        zeros_S = values_N.new_zeros(num_sequences)
        return zeros_S.index_add(0, sequence_N, values_N).index_select(0, sequence_N)

    active_N = torch.ones_like(logps_N) if mask_N is None else mask_N.to(logps_N.dtype)
    length_N = total(active_N.detach()).clamp(min=1)
    if rule.stale_kl is not None:  # without an advantage there is no policy term
        stale_N = (advantages_N < 0) & (-total(log_ratio_N.detach()) / length_N > rule.stale_kl)
        tokens = replace(tokens, advantages_N=advantages_N.masked_fill(stale_N, 0.0))
    if rule.loss_type == "vespo":
        return replace(tokens, log_ratio_N=total(log_ratio_N.clamp(-20.0, 20.0)))
    if rule.importance_level == "geometric":
        bounds = rule.bounds
        low_N, high_N, _ = tokens_cut = cut(tokens, bounds)
        log_ratio_N = log_ratio_N.masked_fill(low_N, math.log(bounds.low)).masked_fill(high_N, math.log(bounds.high))
        tokens = replace(tokens, cut_N=tokens_cut)
    if rule.importance_level != "token":
        tokens = replace(tokens, log_ratio_N=total(log_ratio_N) / length_N)
    return tokens


class OnPolicyLogRatio(torch.autograd.Function):
    """logp − stop_gradient(logp): 0, also where logp is −inf and the difference would be NaN; NaN for NaN."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logps_N: torch.Tensor) -> torch.Tensor:
        return logps_N.masked_fill(logps_N == logps_N, 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is needed."""

    @staticmethod
    def backward(ctx: Any, d_log_ratio_N: torch.Tensor) -> torch.Tensor:
        return d_log_ratio_N


def token_terms(
    logps_N: torch.Tensor,
    old_logps_N: torch.Tensor | None,
    ref_logps_N: torch.Tensor | None,
    advantages_N: torch.Tensor,
    weights_N: torch.Tensor,
    rule: TokenRule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The terms, their policy's and their KL's parts [3, N], and d sum of the terms / d logp of every token."""
    loss_N = rule.token_loss(tokens_of(rule, logps_N, old_logps_N, advantages_N))
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
    """d (loss + beta·kl) / d logp of every token. Not by autograd, which is switched off inside an operator of torch.ops."""
    if isinstance(rule, NLL):  # −1, but NaN where there is no log-prob
        return torch.where(logps_N == logps_N, -1.0, logps_N)
    bounds = rule.bounds
    ratio_N = torch.ones_like(logps_N) if old_logps_N is None else (logps_N - old_logps_N).exp()
    if rule.loss_type == "cispo":  # −min(r, high)·A
        d_N = -advantages_N * ratio_N.clamp(max=bounds.high)
    elif rule.loss_type == "sapo":  # −4·A·σ·(1 − σ)·r
        heat_N = torch.full_like(ratio_N, bounds.low).masked_fill(advantages_N > 0, bounds.high)
        ratio_N = ratio_N.clamp(max=math.exp(FLAT))
        gate_N = heat_N * (ratio_N - 1)
        d_N = -4 * advantages_N * gate_N.sigmoid() * (-gate_N).sigmoid() * ratio_N
    else:  # −A·r, 0 where the ratio is cut
        bounded_N = torch.where(
            advantages_N < 0, ratio_N.clamp(bounds.low, bounds.delta), ratio_N.clamp(max=bounds.high)
        )
        cut_N = (bounded_N < ratio_N) | (bounded_N > ratio_N)  # a NaN is not
        d_N = (-advantages_N * ratio_N).masked_fill(cut_N, 0.0)
    if rule.beta and ref_logps_N is not None:
        below_N = ref_logps_N - logps_N
        if rule.kl_estimator == "k1":  # 1
            return d_N + rule.beta
        d_N = d_N - rule.beta * (below_N if rule.kl_estimator == "k2" else below_N.expm1())  # −d or 1 − exp(d)
    return d_N


# ---- the KL ----

# k3 = d²·(1/2! + d/3! + … + d¹³/15!) inside |d| < ½: what is left out is 6e-18 of the value
_SERIES_BELOW = 0.5
_SERIES = [1 / math.factorial(n) for n in range(15, 1, -1)]


def kl_estimate(logps: torch.Tensor, ref_logps: torch.Tensor, estimator: str = "k3") -> torch.Tensor:
    """An estimate of KL(policy ‖ reference) at every sampled token, unreduced (Schulman 2020, "Approximating KL").

    With d = log π_ref − log π_θ, reference minus policy as in TRL, verl and strop's primitives:

        k1 = −d                 unbiased, of both signs
        k2 = d²/2               biased, never negative; its gradient is the one whose mean is the KL's
        k3 = exp(d) − d − 1     unbiased, never negative; what GRPO adds to its loss

    logps       [..] log-probs of the policy, any floating dtype
    ref_logps   [..] those of the reference; no gradient flows into them
    estimator   "k1", "k2" or "k3"

    returns     [..] float32 (float64 for float64)

    Right to the dtype's precision, gradient included, however near the two policies are:
        d k1 / d logp = 1        d k2 / d logp = −d        d k3 / d logp = 1 − exp(d)
    """
    check_floats(logps, "logps")
    check_like(ref_logps, "ref_logps", logps, "logps")
    check_choice(estimator, "estimator", KL_ESTIMATORS)
    return kl_of(in_float(logps), in_float(ref_logps.detach()), estimator)


def kl_of(logps: torch.Tensor, ref_logps: torch.Tensor, estimator: str) -> torch.Tensor:
    """`kl_estimate` of what is known to fit."""
    d = ref_logps - logps
    if estimator == "k1":
        return -d
    return d.square() / 2 if estimator == "k2" else _K3.apply(d)


class _K3(torch.autograd.Function):
    """exp(d) − d − 1. A function of its own, because its exact gradient is one call: expm1(d)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(d: torch.Tensor) -> torch.Tensor:
        series = torch.full_like(d, _SERIES[0])
        for coefficient in _SERIES[1:]:
            series = series * d + coefficient
        # outside the series expm1(d) is at least 0.39 away from 0 and not near d: the subtraction costs two bits
        return torch.where(d.abs() < _SERIES_BELOW, series * d.square(), torch.expm1(d) - d)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, *grads):
        (d,) = ctx.saved_tensors
        return grads[0] * torch.expm1(d)  # d k3 / d d = exp(d) − 1
