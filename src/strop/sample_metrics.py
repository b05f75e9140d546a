"""Metrics of several completions per prompt: mean@k, pass@k, maj@k, each with a 95 % interval.

P prompts, K completions of each.
"""

import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from strop._types import Json

Z = 1.959963984540054  # of a 95 % interval


def sample_metrics(rewards_PK: np.ndarray, answers: Sequence[Hashable]) -> dict[str, np.ndarray]:
    """Return [P] values by metric: mean@K, maj@K and, if all rewards are 0 or 1, pass@k for k = 1, 2, 4 … K.

    answers   the answers of all completions, P·K
    """
    num_samples = rewards_PK.shape[1]
    found = {f"mean@{num_samples}": rewards_PK.mean(1), f"maj@{num_samples}": majority(rewards_PK, answers)}
    if not np.isin(rewards_PK, (0.0, 1.0)).all():
        return found
    sizes = [2**i for i in range(num_samples.bit_length()) if 2**i < num_samples] + [num_samples]
    return found | {f"pass@{k}": pass_at(rewards_PK, k) for k in sizes}


def pass_at(right_PK: np.ndarray, k: int) -> np.ndarray:
    """Return [P], the unbiased estimate of the probability that one of k completions is right (arXiv 2107.03374)."""
    num_samples = right_PK.shape[1]
    by_right = [1 - math.comb(num_samples - c, k) / math.comb(num_samples, k) for c in range(num_samples + 1)]
    return np.asarray(by_right)[right_PK.sum(1).astype(int)]


def majority(rewards_PK: np.ndarray, answers: Sequence[Hashable]) -> np.ndarray:
    """Return [P], the mean reward of the completions with the most frequent answer; tied answers have equal shares."""
    found, num_samples = [], rewards_PK.shape[1]
    for i, rewards_K in enumerate(rewards_PK):
        given = answers[i * num_samples : (i + 1) * num_samples]
        counts = Counter(given)
        most = max(counts.values())
        found.append(np.mean([r for r, answer in zip(rewards_K, given, strict=True) if counts[answer] == most]))
    return np.asarray(found)


def answer_of(completion: object, pattern: str | None = None) -> Hashable:
    """Return what is compared for maj@k: the last match of the pattern's first group, else the text without outer spaces.

    A completion without a match has an answer of its own, which no other completion shares.
    """
    if not isinstance(completion, str):
        return tuple(completion.tolist()) if hasattr(completion, "tolist") else repr(completion)
    if pattern is None:
        return completion.strip()
    matches = list(re.finditer(pattern, completion))
    return matches[-1][1 if matches[-1].re.groups else 0] if matches else object()


def interval(values: Sequence[float], rounds: int = 2000) -> Json:
    """Return the mean of one value per prompt and its 95 % interval: Wilson's if all are 0 or 1, else by bootstrap."""
    mean, n = sum(values) / len(values), len(values)
    if set(values) <= {0.0, 1.0}:
        centre = (mean + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z / (1 + Z * Z / n) * math.sqrt(mean * (1 - mean) / n + Z * Z / (4 * n * n))
        low, high = max(0.0, centre - half), min(1.0, centre + half)  # rounding may exceed [0, 1]
        return {"mean": mean, "low": low, "high": high, "interval": "wilson"}
    draws = np.random.default_rng(0).choice(np.asarray(values, float), (rounds, n)).mean(1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return {"mean": mean, "low": float(low), "high": float(high), "interval": "bootstrap"}
