"""What an algorithm measured, from the device's numbers to plain ones."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from strop.rewards import Rewards


def on_host(values: Sequence[torch.Tensor]) -> list[float]:
    """Numbers, each a tensor of one element, as floats: the device is waited for once and not for every one."""
    if not values:
        return []
    return torch.cat([value.detach().reshape(1).to(values[0].device) for value in values]).tolist()


class PolicyMeter:
    """Means over tokens, and extremes, of what `PolicyLoss.metrics` tells of micro-batches. Stays on the device."""

    NAMES: ClassVar = {"kl": "kl", "entropy": "entropy", "clip_fraction": "clip_fraction", "ratio_mean": "ratio/mean"}

    def __init__(self) -> None:
        self._parts: list[tuple[dict[str, torch.Tensor], int, bool]] = []

    def add(self, metrics: dict[str, torch.Tensor], num_tokens: int, first: bool) -> None:
        """Of a micro-batch with so many tokens that count; `first`: of the first update, before any weight has changed."""
        if num_tokens:
            self._parts.append((metrics, num_tokens, first))

    def metrics(self) -> dict[str, Any]:
        parts = [(values, weight) for values, weight, _ in self._parts]
        known = [name for name in self.NAMES if parts and name in parts[0][0]]
        found = dict(zip((self.NAMES[name] for name in known), _means(parts, known), strict=True))
        return found | {"ratio/max": _largest(parts) if parts else 1.0}

    def first(self) -> dict[str, Any]:
        """Of the first update alone."""
        parts = [(values, weight) for values, weight, first in self._parts if first]
        if not parts:
            return {}
        return {"mismatch_kl": _means(parts, ["approx_kl"])[0], "mismatch_ratio_max": _largest(parts)}


Parts = Sequence[tuple[dict[str, torch.Tensor], int]]


def _means(parts: Parts, names: Sequence[str]) -> Sequence[torch.Tensor]:
    if not names:
        return []
    sums: Any = sum(torch.stack([values[name] for name in names]).double() * weight for values, weight in parts)
    return (sums / sum(weight for _, weight in parts)).unbind()


def _largest(parts: Parts) -> torch.Tensor:
    return torch.stack([values["ratio_max"] for values, _ in parts]).max()


def reward_metrics(rewards: Rewards) -> dict[str, float]:
    total_B = rewards.total_B.double()
    found = {"reward/mean": total_B.mean().item(), "reward/std": total_B.std(correction=0).item()}
    return found | {f"reward/{name}": column.double().mean().item() for name, column in rewards.columns.items()}
