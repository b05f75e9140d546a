"""Corrections where a sampler's probabilities differ from those of the training forward.

Importance weights: w = π_old/π_rollout of a token, or of its sequence (the product over its tokens), within bounds.
Rejection: tokens or sequences are left out by an estimate of how far π_old is from the sampler. Of one token it is

    k1 = −log w        k2 = (log w)²/2        k3 = w − log w − 1

and of a sequence the sum, the mean or the maximum of its tokens'. The mean of k1 is the logarithm of a geometric mean.
Names and definitions are those of verl 0.9.1 (`rollout_corr_helper`); weights are also those of TRL 1.16.

Shapes: N tokens of S sequences, one after another.
"""

import math

import torch


class Sequences:
    """Sequences of these lengths, for sums over each of them."""

    def __init__(self, lengths: list[int], device: torch.device):
        lengths_S = torch.tensor(lengths, dtype=torch.int64)
        of_N = torch.arange(len(lengths)).repeat_interleave(lengths_S)
        self.lengths_S, self.of_N = (one.to(device, non_blocking=True) for one in (lengths_S, of_N))

    def reduced(self, values_N: torch.Tensor, how: str) -> torch.Tensor:
        """Return, for each token, the sum ("seq_sum"), mean ("seq_mean") or maximum ("seq_max") over its sequence."""
        values_S = values_N.new_zeros(len(self.lengths_S))
        if how == "seq_max":
            values_S = values_S.scatter_reduce(0, self.of_N, values_N, "amax", include_self=False)
        else:
            values_S = values_S.index_add(0, self.of_N, values_N)
        if how == "seq_mean":
            values_S = values_S / self.lengths_S.clamp(min=1)
        return values_S[self.of_N]


def bounded_weights(ratios_N: torch.Tensor, low: float, high: float, mode: str) -> torch.Tensor:
    """Return the ratios truncated to [low, high], or 0 outside of it if the mode is a mask."""
    weights_N = ratios_N.clamp(low, high)
    return ratios_N.masked_fill(weights_N != ratios_N, 0.0) if mode.endswith("mask") else weights_N


def accepted(
    log_ratio_N: torch.Tensor, sequences: Sequences, criterion: str, bounds: float | tuple[float, float]
) -> torch.Tensor:
    """Return [N] bool: True where the criterion's estimate is within the bounds.

    log_ratio_N   log w of each token
    criterion     token_k1 … seq_max_k3
    bounds        for k1 a pair (low, high) of bounds of exp(k1), which is about 1/w; a number is (1/high, high). For k2 and
                  k3 the largest estimate
    """
    how, estimator = criterion.rsplit("_", 1)
    estimate_N = -log_ratio_N
    if estimator == "k2":
        estimate_N = log_ratio_N.square() / 2
    elif estimator == "k3":
        estimate_N = log_ratio_N.exp() - log_ratio_N - 1
    if how != "token":
        estimate_N = sequences.reduced(estimate_N, how)
    if estimator != "k1":
        assert not isinstance(bounds, tuple)
        return estimate_N <= bounds
    low, high = bounds if isinstance(bounds, tuple) else (1 / bounds, bounds)
    return (estimate_N >= math.log(low)) & (estimate_N <= math.log(high))
