"""What an algorithm measured, from the device's numbers to plain ones."""

from collections.abc import Sequence
from typing import ClassVar

import torch

from strop.rewards import Rewards


def on_host(values: Sequence[torch.Tensor]) -> list[float]:
    """Numbers, each a tensor of one element, as floats: the device is waited for once and not for every one."""
    if not values:
        return []
    return torch.cat([value.detach().reshape(1).to(values[0].device) for value in values]).tolist()


class PolicyMeter:
    """Means over tokens, and extremes, of what `PolicyLoss.metrics` tells of micro-batches."""

    NAMES: ClassVar = {"kl": "kl", "entropy": "entropy", "clip_fraction": "clip_fraction", "ratio_mean": "ratio/mean"}

    def __init__(self) -> None:
        self._added: list[tuple[dict[str, torch.Tensor], int, bool]] = []
        self._read: list[tuple[dict[str, float], int, bool]] = []

    def add(self, metrics: dict[str, torch.Tensor], num_tokens: int, first: bool) -> None:
        """Of a micro-batch with so many tokens that count; `first`: of the first update, before any weight has changed."""
        if num_tokens:
            self._added.append((metrics, num_tokens, first))

    def metrics(self) -> dict[str, float]:
        parts = [(values, weight) for values, weight, _ in self._parts()]
        known = [name for name in self.NAMES if parts and name in parts[0][0]]
        found = {self.NAMES[name]: _mean(parts, name) for name in known}
        found["ratio/max"] = max((values["ratio_max"] for values, _ in parts), default=1.0)
        return found

    def first(self) -> dict[str, float]:
        """Of the first update alone."""
        parts = [(values, weight) for values, weight, first in self._parts() if first]
        if not parts:
            return {}
        largest = max(values["ratio_max"] for values, _ in parts)
        return {"mismatch_kl": _mean(parts, "approx_kl"), "mismatch_ratio_max": largest}

    def _parts(self) -> list[tuple[dict[str, float], int, bool]]:
        """What was added, as numbers: one transfer for all of it."""
        numbers = iter(on_host([value for metrics, _, _ in self._added for value in metrics.values()]))
        for metrics, num_tokens, first in self._added:
            self._read.append(({name: next(numbers) for name in metrics}, num_tokens, first))
        self._added = []
        return self._read


def _mean(parts: list[tuple[dict[str, float], int]], name: str) -> float:
    return sum(values[name] * weight for values, weight in parts) / sum(weight for _, weight in parts)


def reward_metrics(rewards: Rewards) -> dict[str, float]:
    total_B = rewards.total_B.double()
    found = {"reward/mean": total_B.mean().item(), "reward/std": total_B.std(correction=0).item()}
    return found | {f"reward/{name}": column.double().mean().item() for name, column in rewards.columns.items()}
