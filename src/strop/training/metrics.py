"""Metrics while a step computes them: a mean is a sum and a count until all processes have added theirs."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from strop._tensors import on_host
from strop.distributed import World


class Mean(NamedTuple):
    """Σ total / Σ number over the processes; left out where the number is 0."""

    total: Any
    number: float


class Sum(NamedTuple):
    value: Any


class Largest(NamedTuple):
    value: Any


KINDS = (Mean, Sum, Largest)


def told(metrics: Mapping[str, Any], extra: list[torch.Tensor], world: World) -> tuple[dict[str, float], list[float]]:
    """The metrics of all processes as numbers, and the host's copy of `extra`, in one wait for the device.

    A plain number or tensor is the same in every process already, or what counts where no process has a Mean.
    """
    flat = {(name, i): value for name, metric in metrics.items() for i, value in enumerate(_values(metric))}
    tensors = {key: value for key, value in flat.items() if isinstance(value, torch.Tensor)}
    values = on_host([*tensors.values(), *extra])
    flat |= zip(tensors, values, strict=False)
    here = {
        name: type(metric)(*(flat[name, i] for i in range(len(metric)))) if isinstance(metric, KINDS) else flat[name, 0]
        for name, metric in metrics.items()
    }
    everywhere = world.gathered(here)
    names = dict.fromkeys(name for one in everywhere for name in one)
    found = {name: _combined([one[name] for one in everywhere if name in one]) for name in names}
    return {name: value for name, value in found.items() if value is not None}, values[len(tensors) :]


def _values(metric: Any) -> tuple[Any, ...]:
    return metric if isinstance(metric, KINDS) else (metric,)


def _combined(parts: list[Any]) -> Any:
    parts = [part for part in parts if isinstance(part, KINDS)] or parts
    if isinstance(parts[0], Largest):
        return max(part.value for part in parts)
    if isinstance(parts[0], Sum):
        return sum(part.value for part in parts)
    if not isinstance(parts[0], Mean):
        return parts[0]
    number = sum(part.number for part in parts)
    return sum(part.total for part in parts) / number if number else None
