"""Estimates of KL(policy ‖ reference) from the log-probs of the sampled tokens (Schulman 2020, "Approximating KL").

With d = log π_ref − log π_θ of a token that the policy sampled:

    k1 = −d                 unbiased, of both signs
    k2 = d²/2               biased, never negative; its gradient is the one whose mean is the KL's
    k3 = exp(d) − d − 1     unbiased, never negative; what GRPO adds to its loss

Direction: d is reference minus policy, as in TRL, verl and strop's primitives.
"""

import math

import torch

from strop._checks import check_choice
from strop._tensors import check_floats, check_like, in_float

KL_ESTIMATORS = ("k1", "k2", "k3")

# k3 = d²·(1/2! + d/3! + … + d¹³/15!) inside |d| < ½: what is left out is 6e-18 of the value
_SERIES_BELOW = 0.5
_SERIES = [1 / math.factorial(n) for n in range(15, 1, -1)]


def kl_estimate(logps: torch.Tensor, ref_logps: torch.Tensor, estimator: str = "k3") -> torch.Tensor:
    """An estimate of the KL at every token, unreduced.

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
