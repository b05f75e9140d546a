"""The policy losses. Each is declared once: formula, derivative, weight of a token, name of its Triton function.

To add one, write its formula and its derivative here, add an entry to `POLICY_LOSSES`, and write its Triton function in
`strop.ops.rows.kernels`. Options, operators, metrics, documents and tests read this table.

The formulas use tensors' own methods only, so that options can be checked without importing torch.

r is the ratio π/π_old, A the advantage, σ the logistic function. Shapes: N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from strop.config.losses import PolicyRule

FLAT = 60.0  # a log-ratio above which sapo's gate is flat: its ratio stays finite


@dataclass(frozen=True)
class ClipBounds:
    """The bounds of the ratio: `low` for A < 0, `high` for A ≥ 0, `delta` from above for A < 0.

    For cispo only `high` acts, whatever the sign of A. sapo has the temperatures of its gate in `low` and `high`.
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
    """

    logps_N: Tensor
    old_N: Tensor | None
    log_ratio_N: Tensor
    advantages_N: Tensor
    mask_N: Tensor | None = None
    cut_N: tuple[Tensor, Tensor, Tensor] | None = None

    def active(self, values_N: Tensor) -> Tensor:
        """Return the values, 0 where the mask is 0."""
        return values_N if self.mask_N is None else values_N.masked_fill(~self.mask_N, 0.0)

    def detached(self) -> Tokens:
        """Return the same tokens without their graph."""
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
    """

    formula: Callable[[Tokens, PolicyRule], Tensor]
    derivative: Callable[[Tensor, Tensor, ClipBounds], Tensor] | None
    weight: Literal["tokens", "length", "max_length", "sequences"]
    kernel: str | None
    clips: bool = True


def clipped_surrogate(tokens: Tokens, rule: PolicyRule) -> Tensor:
    """Return −min(r·A, clip(r)·A), with r ≤ delta where A < 0."""
    if rule.importance_level == "geometric":  # clipped before the mean was taken
        return -tokens.log_ratio_N.exp() * tokens.advantages_N
    bounds = rule.bounds
    too_low_N, too_high_N, over_delta_N = cut(tokens.log_ratio_N, tokens.advantages_N, bounds)
    # exp of what is not cut only: where the ratio overflows, its gradient would be 0·inf = NaN
    inside_N = tokens.log_ratio_N.masked_fill(too_low_N | too_high_N | over_delta_N, 0.0)
    ratio_N = inside_N.exp().masked_fill(too_low_N, bounds.low).masked_fill(too_high_N, bounds.high)
    return -ratio_N.masked_fill(over_delta_N, bounds.delta) * tokens.advantages_N


def d_clipped_surrogate(ratio_N: Tensor, advantages_N: Tensor, bounds: ClipBounds) -> Tensor:
    """Return −A·r, and 0 where the ratio is cut."""
    bounded_N = ratio_N.clamp(bounds.low, bounds.delta).where(advantages_N < 0, ratio_N.clamp(max=bounds.high))
    cut_N = (bounded_N < ratio_N) | (bounded_N > ratio_N)  # a NaN is not
    return (-advantages_N * ratio_N).masked_fill(cut_N, 0.0)


def clipped_weight(tokens: Tokens, rule: PolicyRule) -> Tensor:
    """Return −stop_gradient(min(r, high))·A·log π (CISPO)."""
    weight_N = tokens.log_ratio_N.detach().exp().clamp(max=rule.bounds.high)
    return -weight_N * tokens.advantages_N * tokens.logps_N


def d_clipped_weight(ratio_N: Tensor, advantages_N: Tensor, bounds: ClipBounds) -> Tensor:
    """Return −min(r, high)·A."""
    return -advantages_N * ratio_N.clamp(max=bounds.high)


def soft_gate(tokens: Tokens, rule: PolicyRule) -> Tensor:
    """Return −4/τ·σ(τ·(r − 1))·A, with the temperature τ by the sign of A (SAPO)."""
    heat_N = _heat(tokens.logps_N, tokens.advantages_N, rule.bounds)
    ratio_N = tokens.log_ratio_N.clamp(max=FLAT).exp()
    return -(heat_N * (ratio_N - 1)).sigmoid() * (4 / heat_N) * tokens.advantages_N


def d_soft_gate(ratio_N: Tensor, advantages_N: Tensor, bounds: ClipBounds) -> Tensor:
    """Return −4·A·σ·(1 − σ)·r."""
    ratio_N = ratio_N.clamp(max=math.exp(FLAT))
    gate_N = _heat(ratio_N, advantages_N, bounds) * (ratio_N - 1)
    return -4 * advantages_N * gate_N.sigmoid() * (-gate_N).sigmoid() * ratio_N


def _heat(like_N: Tensor, advantages_N: Tensor, bounds: ClipBounds) -> Tensor:
    """Return the gate's temperature at every token, in the dtype of `like_N`."""
    return like_N.new_full(like_N.shape, bounds.low).masked_fill(advantages_N > 0, bounds.high)


def gamma_weight(tokens: Tokens, rule: PolicyRule) -> Tensor:
    """Return −stop_gradient(φ(w))·A·log π with φ(w) = w^k·exp(λ − λw), w the product of the sequence's ratios (VESPO)."""
    log_w_N = tokens.log_ratio_N.detach().clamp(math.log(1e-8), 20.0)
    k_negative, decay_negative, k_positive, decay_positive = rule.vespo_gamma
    k_N, decay_N = (
        log_w_N.new_full(log_w_N.shape, negative).masked_fill(tokens.advantages_N >= 0, positive)
        for positive, negative in ((k_positive, k_negative), (decay_positive, decay_negative))
    )
    weight_N = (decay_N.clamp(min=1e-4) * (1 - log_w_N.exp()) + k_N * log_w_N).exp()
    return -weight_N * tokens.advantages_N * tokens.logps_N


def cut(log_ratio_N: Tensor, advantages_N: Tensor, bounds: ClipBounds) -> tuple[Tensor, Tensor, Tensor]:
    """Return where −min(r·A, clip(r)·A) is constant in r, by the bound that holds it: low, high, delta.

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
}
POLICY_LOSS_TYPES = tuple(POLICY_LOSSES)
