"""What a run remembers: where it stands, what it measured, how long each phase took."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class TrainState:
    """Where a run stands; all of it goes into a checkpoint.

    step          training steps done
    updates       optimiser steps done, of which a training step may have several
    epoch         passes over the dataset completed
    position      rows of the present epoch already used
    total_steps   where the schedule ends; 0 if unknown
    seconds       time spent training, over all resumptions
    """

    step: int = 0
    updates: int = 0
    epoch: int = 0
    position: int = 0
    total_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class History:
    """What `train` returns. `steps` and `evaluations` hold the metrics, each with its "step"."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    interrupted: bool = False
    signal: int | None = None
    stop_reason: str | None = None
    checkpoint: str | None = None

    def values(self, metric: str) -> list[float]:
        """One metric over the steps that have it."""
        return [metrics[metric] for metrics in (*self.steps, *self.evaluations) if metric in metrics]


class Phases:
    """Seconds by name of phase; a phase within another counts for the inner one only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner: list[float] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            taken = time.perf_counter() - start
            own = taken - self._inner.pop()
            self.seconds[name] = self.seconds.get(name, 0.0) + own
            if self._inner:
                self._inner[-1] += taken

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}": seconds for name, seconds in self.seconds.items()}
