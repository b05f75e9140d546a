"""The policy losses. Each is declared once: formula, derivative, weight of a token, name of its Triton function.

To add one, write its formula and its derivative here, add an entry to `POLICY_LOSSES`, and write its Triton function in
`strop.ops.rows.kernels`. Options, operators, metrics, documents and tests read this table.

`PolicyRule` is a loss with its numbers: the value that goes from a config to a kernel.

The formulas use tensors' own methods only, so that options can be checked without importing torch.

r is the ratio π/π_old, A the advantage, σ the logistic function. Shapes: N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from strop._checks import check_choice, check_number
from strop.config.base import check_fields, choice, count, number, without_use

if TYPE_CHECKING:
    from torch import Tensor

KL_ESTIMATORS = ("k1", "k2", "k3")
IMPORTANCE_LEVELS = ("token", "sequence", "geometric")
ClipEps = float | tuple[float, float]
Count = TypeVar("Count")  # a number, or a tensor with one
FLAT = 60.0  # a log-ratio above which sapo's gate is flat: its ratio stays finite


@dataclass(frozen=True)
class ClipBounds:
    """The bounds of the ratio: `low` for A < 0, `high` for A ≥ 0, `delta` from above for A < 0.

    For cispo only `high` acts, whatever the sign of A. sapo has the temperatures of its gate in `low` and `high`, dppo_tv and
    dppo_kl the largest divergences for A ≤ 0 and for A > 0. With a trust region `delta` bounds r for either sign.
    """

    low: float
    high: float
    delta: float


@dataclass(frozen=True)
class Tokens:
    """What the formulas read, [N] each. Where the mask is 0 everything else is 0 too; None: every token is in the loss.

    old_N         log-probs of the policy that sampled; None: the policy itself
    log_ratio_N   log r of the token, or of its sequence where the importance level is not the token
    cut_N         which tokens were cut by low, high and delta before their mean was taken; None where none was
    marked_N      which tokens Clip-Cov leaves out, or KL-Cov holds back
    """

    logps_N: Tensor
    old_N: Tensor | None
    log_ratio_N: Tensor
    advantages_N: Tensor
    mask_N: Tensor | None = None
    cut_N: tuple[Tensor, Tensor, Tensor] | None = None
    marked_N: Tensor | None = None

    def active(self, values_N: Tensor) -> Tensor:
        """Return the values, with 0 where the mask is 0."""
        return values_N if self.mask_N is None else values_N.masked_fill(~self.mask_N, 0.0)

    def detached(self) -> Tokens:
        """Return the same tokens, detached from the autograd graph."""
        return replace(self, logps_N=self.logps_N.detach(), log_ratio_N=self.log_ratio_N.detach())


@dataclass(frozen=True)
class PolicyLossType:
    """One policy loss.

    formula      the loss of every token, [N]; autograd gives its gradient
    derivative   d loss / d logp of every token, [N], from r, A and the bounds; None where the loss of a token needs more than
                 its own row of logits
    weight       what a token's weight divides by: "tokens" of the whole update; "length" of its sequence · sequences;
                 "max_length" · sequences; or "sequences" alone
    kernel       the name of the Triton function with formula and derivative, in `strop.ops.rows.kernels`
    clips        whether clip_eps and delta bound the ratio; other losses damp it
    outside      the tokens that have left the trust region, downwards and upwards; None where the ratio is clipped
    marks        whether the loss reads marked_N
    """

    formula: Callable[[Tokens, PolicyRule], Tensor]
    derivative: Callable[[Tensor, Tensor, ClipBounds], Tensor] | None
    weight: Literal["tokens", "length", "max_length", "sequences"]
    kernel: str | None
    clips: bool = True
    outside: Callable[[Tokens, PolicyRule], tuple[Tensor, Tensor]] | None = None
    marks: bool = False


def clipped_surrogate(tokens: Tokens, rule: PolicyRule) -> Tensor:
    """Return −min(r·A, clip(r)·A), where r is at most delta if A < 0."""
    if rule.importance_level == "geometric":  # clipped before the mean was taken
        return -tokens.log_ratio_N.exp() * tokens.advantages_N
    bounds = rule.bounds
    too_low_N, too_high_N, over_delta_N = cut(tokens.log_ratio_N, tokens.advantages_N, bounds)
    # exp of what is not cut only: where the ratio overflows, its gradient would be 0·inf = NaN
    inside_N = tokens.log_ratio_N.masked_fill(too_low_N | too_high_N | over_delta_N, 0.0)
    ratio_N = inside_N.exp().masked_fill(too_low_N, bounds.low).masked_fill(too_high_N, bounds.high)
    return -ratio_N.masked_fill(over_delta_N, bounds.delta) * tokens.advantages_N


def d_clipped_surrogate(ratio_N: Tensor, advantages_N: Tensor, bounds: ClipBounds) -> Tensor:
    """Return the derivative of the clipped surrogate: −A·r, and 0 where the ratio is clipped."""
    bounded_N = ratio_N.clamp(bounds.low, bounds.delta).where(advantages_N < 0, ratio_N.clamp(max=bounds.high))
    cut_N = (bounded_N < ratio_N) | (bounded_N > ratio_N)  # a NaN is not
    return (-advantages_N * ratio_N).masked_fill(cut_N, 0.0)


def clipped_weight(tokens: Tokens, rule: PolicyRule) -> Tensor:
    """Return −stop_gradient(min(r, high))·A·log π (CISPO)."""
    weight_N = tokens.log_ratio_N.detach().exp().clamp(max=rule.bounds.high)
    return -weight_N * tokens.advantages_N * tokens.logps_N


def d_clipped_weight(ratio_N: Tensor, advantages_N: Tensor, bounds: ClipBounds) -> Tensor:
    """Return the derivative of CISPO's loss, −min(r, high)·A."""
    return -advantages_N * ratio_N.clamp(max=bounds.high)


def soft_gate(tokens: Tokens, rule: PolicyRule) -> Tensor:
    """Return −4/τ·σ(τ·(r − 1))·A, where the sign of A selects the temperature τ (SAPO)."""
    heat_N = _heat(tokens.logps_N, tokens.advantages_N, rule.bounds)
    ratio_N = tokens.log_ratio_N.clamp(max=FLAT).exp()
    return -(heat_N * (ratio_N - 1)).sigmoid() * (4 / heat_N) * tokens.advantages_N


def d_soft_gate(ratio_N: Tensor, advantages_N: Tensor, bounds: ClipBounds) -> Tensor:
    """Return the derivative of SAPO's loss, −4·A·σ·(1 − σ)·r."""
    ratio_N = ratio_N.clamp(max=math.exp(FLAT))
    gate_N = _heat(ratio_N, advantages_N, bounds) * (ratio_N - 1)
    return -4 * advantages_N * gate_N.sigmoid() * (-gate_N).sigmoid() * ratio_N


def _heat(like_N: Tensor, advantages_N: Tensor, bounds: ClipBounds) -> Tensor:
    """Return the temperature of SAPO's gate for each token, in the dtype of `like_N`."""
    return like_N.new_full(like_N.shape, bounds.low).masked_fill(advantages_N > 0, bounds.high)


def gamma_weight(tokens: Tokens, rule: PolicyRule) -> Tensor:
    """Return −stop_gradient(φ(w))·A·log π, φ(w) = w^k·exp(λ − λw), w the product of the sequence's ratios (VESPO)."""
    log_w_N = tokens.log_ratio_N.detach().clamp(math.log(1e-8), 20.0)
    k_negative, decay_negative, k_positive, decay_positive = rule.vespo_gamma
    k_N, decay_N = (
        log_w_N.new_full(log_w_N.shape, negative).masked_fill(tokens.advantages_N >= 0, positive)
        for positive, negative in ((k_positive, k_negative), (decay_positive, decay_negative))
    )
    weight_N = (decay_N.clamp(min=1e-4) * (1 - log_w_N.exp()) + k_N * log_w_N).exp()
    return -weight_N * tokens.advantages_N * tokens.logps_N


def trusted_weight(tokens: Tokens, rule: PolicyRule) -> Tensor:
    """Return −stop_gradient(min(r, delta))·A·log π inside the trust region, and 0 outside of it (DPPO, GLM-5)."""
    assert rule.type.outside is not None
    below_N, above_N = rule.type.outside(tokens, rule)
    weight_N = tokens.log_ratio_N.detach().clamp(max=FLAT).exp().clamp(max=rule.bounds.delta)
    return -weight_N.masked_fill(below_N | above_N, 0.0) * tokens.advantages_N * tokens.logps_N


def outside_by_ratio(tokens: Tokens, rule: PolicyRule) -> tuple[Tensor, Tensor]:
    """Return where r is below `low` and where it is above `high`, whatever the sign of A."""
    ratio_N = tokens.log_ratio_N.detach().exp()
    return ratio_N < rule.bounds.low, ratio_N > rule.bounds.high


def outside_by_divergence(tokens: Tokens, rule: PolicyRule) -> tuple[Tensor, Tensor]:
    """Return where a token has moved too far in the direction in which A pushes it (DPPO, arXiv 2602.04879).

    Its binary divergence is that of two distributions over {this token, any other}. With probabilities p now and q before:

        dppo_tv    |p − q|
        dppo_kl    q·log(q/p) + (1 − q)·log((1 − q)/(1 − p)), both 1 − … plus 1e-8, as verl has it
    """
    positive_N = tokens.advantages_N > 0
    if tokens.old_N is None:  # on policy, also where a log-prob is −inf
        nowhere_N = positive_N & ~positive_N
        return nowhere_N, nowhere_N
    logps_N = tokens.logps_N.detach()
    now_N, before_N = logps_N.exp(), tokens.old_N.exp()
    if rule.loss_type == "dppo_tv":
        far_N = (now_N - before_N).abs()
    else:
        others_N = ((1 - before_N + 1e-8) / (1 - now_N + 1e-8)).log()
        far_N = before_N * (tokens.old_N - logps_N) + (1 - before_N) * others_N
    below_N = ~positive_N & (far_N > rule.bounds.low) & (now_N < before_N)
    return below_N, positive_N & (far_N > rule.bounds.high) & (now_N > before_N)


def clipped_but_marked(tokens: Tokens, rule: PolicyRule) -> Tensor:
    """Return the clipped surrogate, and 0 for marked tokens (Clip-Cov, arXiv 2505.22617)."""
    loss_N = clipped_surrogate(tokens, rule)
    return loss_N if tokens.marked_N is None else loss_N.masked_fill(tokens.marked_N, 0.0)


def held_where_marked(tokens: Tokens, rule: PolicyRule) -> Tensor:
    """Return −r·A, and for marked tokens cov_kl_coef·|log r| besides (KL-Cov, arXiv 2505.22617)."""
    log_ratio_N = tokens.log_ratio_N.clamp(max=FLAT)
    loss_N = -log_ratio_N.exp() * tokens.advantages_N
    if tokens.marked_N is None:
        return loss_N
    return loss_N + rule.cov_kl_coef * log_ratio_N.abs().masked_fill(~tokens.marked_N, 0.0)


def cut(log_ratio_N: Tensor, advantages_N: Tensor, bounds: ClipBounds) -> tuple[Tensor, Tensor, Tensor]:
    """Return three masks: the tokens clipped by low, by high and by delta, where −min(r·A, clip(r)·A) is constant in r.

    min() keeps the smaller product: for A ≥ 0 the smaller ratio (clip acts above), for A < 0 the larger (it acts below).
    """
    ratio_N = log_ratio_N.detach().exp()
    negative_N = advantages_N < 0
    return (
        negative_N & (ratio_N < bounds.low),
        (advantages_N >= 0) & (ratio_N > bounds.high),
        negative_N & (ratio_N > bounds.delta),
    )


POLICY_LOSSES = {
    "grpo": PolicyLossType(clipped_surrogate, d_clipped_surrogate, "length", "clipped_surrogate"),
    "bnpo": PolicyLossType(clipped_surrogate, d_clipped_surrogate, "tokens", "clipped_surrogate"),
    "dr_grpo": PolicyLossType(clipped_surrogate, d_clipped_surrogate, "max_length", "clipped_surrogate"),
    "dapo": PolicyLossType(clipped_surrogate, d_clipped_surrogate, "tokens", "clipped_surrogate"),
    "luspo": PolicyLossType(clipped_surrogate, d_clipped_surrogate, "sequences", "clipped_surrogate"),
    "cispo": PolicyLossType(clipped_weight, d_clipped_weight, "tokens", "clipped_weight"),
    "sapo": PolicyLossType(soft_gate, d_soft_gate, "length", "soft_gate", clips=False),
    "vespo": PolicyLossType(gamma_weight, None, "tokens", None, clips=False),
    "double_sided": PolicyLossType(trusted_weight, None, "tokens", None, outside=outside_by_ratio),
    "dppo_tv": PolicyLossType(trusted_weight, None, "tokens", None, outside=outside_by_divergence),
    "dppo_kl": PolicyLossType(trusted_weight, None, "tokens", None, outside=outside_by_divergence),
    "clip_cov": PolicyLossType(clipped_but_marked, None, "tokens", None, marks=True),
    "kl_cov": PolicyLossType(held_where_marked, None, "tokens", None, clips=False, marks=True),
}
POLICY_LOSS_TYPES = tuple(POLICY_LOSSES)
BY_DIVERGENCE = ("dppo_tv", "dppo_kl")


# ---- the rule ----


def clip_bounds(clip_eps: ClipEps, delta: float | None, loss_type: str) -> ClipBounds:
    """Return the bounds of the ratio for a loss's `clip_eps` and `delta`; raise if they are invalid."""
    check_choice(loss_type, "loss_type", tuple(POLICY_LOSSES))
    pair = clip_eps if isinstance(clip_eps, (tuple, list)) else (clip_eps, clip_eps)
    if len(pair) != 2:
        raise ValueError(f"clip_eps must be one number or a pair (low, high), found {len(pair)} numbers")
    for value in pair:
        check_number(value, "clip_eps", 0, open_low=True, finite=False)
    high = float(pair[1])
    if loss_type == "cispo":
        if high < 1:
            wanted = "a pair (low, high) with high at least 1 for 'cispo', the ratio's bound, such as (0.2, 5.0)"
            raise ValueError(f"clip_eps must be {wanted}, found {clip_eps}")
        if delta is not None:
            raise ValueError(f"delta must be None for 'cispo', whose ratio clip_eps bounds already, found {delta}")
    elif delta is not None:
        check_number(delta, "delta", finite=False)
        least = 1.0 if loss_type in BY_DIVERGENCE else 1 + high
        if not delta >= least:
            wanted = "1" if loss_type in BY_DIVERGENCE else f"1 + clip_eps = {least}"
            raise ValueError(f"delta must be at least {wanted}, found {delta}")
    return _bounds(clip_eps, delta, loss_type)


def _bounds(clip_eps: ClipEps, delta: float | None, loss_type: str) -> ClipBounds:
    low, high = clip_eps if isinstance(clip_eps, (tuple, list)) else (clip_eps, clip_eps)
    if loss_type == "cispo":
        return ClipBounds(0.0, float(high), math.inf)
    if loss_type in BY_DIVERGENCE:
        return ClipBounds(float(low), float(high), math.inf if delta is None else float(delta))
    return ClipBounds(1 - float(low), 1 + float(high), math.inf if delta is None else float(delta))


@dataclass(frozen=True, kw_only=True)
class PolicyRule:
    """Which policy loss: one value from the config to the kernel, checked when it is made.

    loss_type               grpo, bnpo, dr_grpo, dapo, luspo, cispo, sapo, vespo, double_sided, dppo_tv, dppo_kl, clip_cov or
                            kl_cov; docs/losses.md has the formulas
    importance_level        "token": the token's ratio is clipped; "sequence": the geometric mean of its sequence's (GSPO);
                            "geometric": the tokens' log-ratios are clipped to [−low, high], then their mean is taken (GMPO)
    clip_eps                ε or (low, high); None is 0.2, for cispo (0.2, 5.0), for dppo_kl 0.05, for the geometric level
                            0.4. For dppo_tv and dppo_kl it bounds the divergence. sapo, vespo and kl_cov clip nothing
    delta                   upper bound of the ratio where the advantage is negative, of double_sided, dppo_tv and dppo_kl
                            where it is positive too; None is off
    beta                    the coefficient of the KL to the reference
    kl_estimator            how the KL is estimated: k1, k2 or k3
    entropy_coef            weight of the entropy bonus
    max_completion_length   what dr_grpo divides by
    sapo_temperatures       temperatures of sapo's gate, for negative and for positive advantages
    vespo_gamma             k and λ of vespo's weight φ(w) = w^k·exp(λ − λw), for negative and for positive advantages
    cov_fraction            share of the tokens that clip_cov or kl_cov marks, at most
    cov_bounds              clip_cov marks tokens whose covariance of log-prob and advantage is between these
    cov_kl_coef             weight of |log r| of the tokens that kl_cov marks
    stale_kl                a sequence with a negative advantage has no policy term where the mean of log(π_old/π) over its
                            tokens is above this; None keeps all

    In GRPO's config beta and max_completion_length are set by the options kl_coef and max_new_tokens.
    """

    loss_type: str = "grpo"
    importance_level: str = choice("token", IMPORTANCE_LEVELS)
    clip_eps: float | tuple[float, float] | None = None
    delta: float | None = None
    beta: float = number(0.0, 0, set_by="kl_coef")
    kl_estimator: str = choice("k3", KL_ESTIMATORS)
    entropy_coef: float = number(0.0, 0)
    max_completion_length: int | None = count(None, 1, set_by="max_new_tokens")
    sapo_temperatures: tuple[float, float] = (1.05, 1.0)
    vespo_gamma: tuple[float, float, float, float] = (3.0, 2.0, 2.0, 3.0)
    cov_fraction: float = number(0.0002, 0, 1, open_low=True)
    cov_bounds: tuple[float, float] = (1.0, 5.0)
    cov_kl_coef: float = number(0.1, 0)
    stale_kl: float | None = number(None, 0)
    row_suffices: ClassVar[bool]  # whether a token's loss needs its own row of logits alone: no sequence, no entropy

    def __post_init__(self) -> None:
        check_choice(self.loss_type, "loss_type", tuple(POLICY_LOSSES))  # the table as it is now, with entries of users
        check_fields(self)
        for name in ("clip_eps", "sapo_temperatures", "vespo_gamma", "cov_bounds"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        for name, size, open_low in (
            ("sapo_temperatures", 2, True),
            ("vespo_gamma", 4, False),
            ("cov_bounds", 2, False),
        ):
            values = getattr(self, name)
            if not isinstance(values, (tuple, list)) or len(values) != size:
                raise ValueError(f"{name} must be {size} numbers, found {values!r}")
            for value in values:
                check_number(value, name, 0, open_low=open_low)
        self._check_level()
        if self.type.clips:
            clip_bounds(self.clip, self.delta, self.loss_type)  # checks them
        alone = self.importance_level == "token" and self.type.derivative is not None and self.stale_kl is None
        object.__setattr__(self, "row_suffices", alone and not self.entropy_coef)

    def _check_level(self) -> None:
        """Raise if an option is set that the loss type or importance level does not support."""
        for name, value in (("clip_eps", self.clip_eps), ("delta", self.delta)):
            if not self.type.clips and value is not None:
                raise ValueError(f"{name} must be None for {self.loss_type!r}, which clips nothing, found {value}")
        if self.loss_type == "vespo" and self.importance_level != "token":
            found = f"found {self.importance_level!r}"
            raise ValueError(f"importance_level must be 'token' for 'vespo', which weighs whole sequences, {found}")
        if self.importance_level != "token" and (self.loss_type in BY_DIVERGENCE or self.type.marks):
            found = f"found {self.importance_level!r}"
            raise ValueError(
                f"importance_level must be 'token' for {self.loss_type!r}, which looks at single tokens, {found}"
            )
        if self.importance_level == "geometric":
            if self.loss_type in ("cispo", "sapo", "double_sided"):
                wanted = f"'token' or 'sequence' for {self.loss_type!r}"
                raise ValueError(f"importance_level must be {wanted}, found 'geometric'")
            if self.delta is not None:
                raise ValueError(f"delta must be None at the geometric importance_level, found {self.delta}")

    def without_effect(self) -> list[str]:
        """Return a sentence for each option that is set but has no effect with this loss type."""
        needed = [
            ("sapo_temperatures", "sapo"),
            ("vespo_gamma", "vespo"),
            ("cov_bounds", "clip_cov"),
            ("cov_kl_coef", "kl_cov"),
        ]
        needed += [] if self.type.marks else [("cov_fraction", "clip_cov")]
        return without_use(self, needed, (self.loss_type,))

    @property
    def clip(self) -> ClipEps:
        if self.clip_eps is not None:
            return self.clip_eps
        if self.loss_type == "cispo":
            return 0.2, 5.0
        if self.loss_type == "dppo_kl":
            return 0.05
        return 0.4 if self.importance_level == "geometric" else 0.2

    @property
    def bounds(self) -> ClipBounds:
        """The bounds of the ratio; for sapo the temperatures of its gate."""
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
        """The fields that a row's loss needs, as text for torch.ops, which takes no objects; `from_text` parses it."""
        low, high = self.sapo_temperatures if self.loss_type == "sapo" else self._pair
        return f"{self.loss_type} {low} {high} {self.delta} {self.beta} {self.kl_estimator}"

    @property
    def type(self) -> PolicyLossType:
        """The loss type's entry in `POLICY_LOSSES`."""
        return POLICY_LOSSES[self.loss_type]

    def weight(self, length: int, num_tokens: int, num_sequences: int) -> float:
        """Return the weight of a token, given its sequence's length and the update's numbers of tokens and sequences."""
        count, divisor = self.weight_divisors(num_tokens, num_sequences)
        return 1 / ((count or 1) * (divisor or max(length, 1)))

    def weight_divisors(self, num_tokens: Count, num_sequences: Count) -> tuple[Count, int | None]:
        """Return (count, length) for the weight 1/(count·length); length None is the length of the token's sequence."""
        weight = self.type.weight
        if weight == "tokens":
            return num_tokens, 1
        if weight == "max_length":
            if self.max_completion_length is None:
                raise ValueError(f"max_completion_length must be given for {self.loss_type!r}, found None")
            return num_sequences, self.max_completion_length
        return num_sequences, 1 if weight == "sequences" else None
