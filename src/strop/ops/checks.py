"""What every operator asks of its arguments, in the same words."""

from typing import Any

import torch

from strop._tensors import FLOATS, as_completion_mask, check_floats, check_number

__all__ = [
    "FLOATS",
    "as_completion_mask",
    "check_ids",
    "check_ids_in_range",
    "check_logits",
    "check_temperature",
]


def check_logits(logits: Any, name: str = "logits") -> None:
    check_floats(logits, name)
    if logits.ndim < 1 or logits.shape[-1] < 1:
        raise ValueError(f"{name} must have shape [.., V] with V at least 1, found {list(logits.shape)}")


def check_ids(ids: Any, shape: torch.Size, name: str = "ids") -> None:
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, found {type(ids).__name__}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be int64 or int32, found {ids.dtype}")
    if ids.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, found {list(ids.shape)}")


def check_temperature(temperature: Any) -> None:
    check_number(temperature, "temperature")
    if not (temperature > 0 and temperature != float("inf")):
        raise ValueError(f"temperature must be finite and above 0, found {temperature}")


def check_ids_in_range(
    ids: torch.Tensor, mask: torch.Tensor | None, vocabulary: int, validate: bool, name: str = "ids"
) -> torch.Tensor:
    """Where an id that counts lies in the vocabulary. One outside raises where looking is free (CPU) or wanted."""
    in_range = (ids >= 0) & (ids < vocabulary)
    if validate or ids.device.type == "cpu":
        wrong = ~in_range if mask is None else ~in_range & mask
        if wrong.any():
            at = wrong.nonzero()[0].tolist()
            raise ValueError(f"{name} must be from 0 to {vocabulary - 1}, found {ids[tuple(at)].item()} at index {at}")
    return in_range
