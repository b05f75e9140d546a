"""What the losses share: their result."""

from collections.abc import Callable
from typing import Any, Self

import torch

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
