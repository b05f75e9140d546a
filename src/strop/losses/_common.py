"""What the losses share: their result, and the count a mean divides by."""

import math
from collections.abc import Callable
from typing import Any, Self

import torch

from strop._tensors import can_look, check_number

Count = int | float | torch.Tensor
Metrics = dict[str, torch.Tensor]


class LossResult(tuple[torch.Tensor, torch.Tensor, torch.Tensor]):
    """Three tensors to unpack, the loss first. `metrics`: a dict of 0-d tensors, computed when first asked for."""

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

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (*self, self._compute_metrics)

    @property
    def loss(self) -> torch.Tensor:
        return self[0]

    @property  # not functools.cached_property: its lock, in Python 3.11, does not go into a compiled graph
    def metrics(self) -> Metrics:
        if self._metrics is None:
            with torch.no_grad():
                self._metrics = self._compute_metrics()
        return self._metrics


def check_count(count: Any, name: str) -> Count:
    if isinstance(count, torch.Tensor):
        if count.ndim:
            raise ValueError(f"{name} must be a number or a tensor of shape [], found shape {list(count.shape)}")
        if can_look(count) and not 0 <= count < math.inf:
            raise ValueError(f"{name} must be finite and at least 0, found {count.item()}")
        return count
    check_number(count, name)
    if not 0 <= count < math.inf:
        raise ValueError(f"{name} must be finite and at least 0, found {count}")
    return count


def as_divisor(count: Any, name: str, like: torch.Tensor) -> Count:
    """A count to divide by; 1 in place of 0, where everything divided is 0. A tensor is not waited for."""
    count = check_count(count, name)
    if isinstance(count, torch.Tensor):
        count = count.to(like.device, like.dtype, non_blocking=True)
        return torch.where(count > 0, count, torch.ones_like(count))
    return count or 1
