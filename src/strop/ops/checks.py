"""What every operator asks of its arguments, in the same words."""

from typing import Any

import torch

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_logits(logits: Any, name: str = "logits") -> None:
    if not isinstance(logits, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, found {type(logits).__name__}")
    if logits.dtype not in FLOATS:
        raise TypeError(f"{name} must be of a floating dtype, found {logits.dtype}")
    if logits.ndim < 1 or logits.shape[-1] < 1:
        raise ValueError(f"{name} must have shape [.., V] with V at least 1, found {list(logits.shape)}")


def check_ids(ids: Any, shape: torch.Size, name: str = "ids") -> None:
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, found {type(ids).__name__}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be int64 or int32, found {ids.dtype}")
    if ids.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, found {list(ids.shape)}")


def as_completion_mask(mask: Any, shape: torch.Size) -> torch.Tensor | None:
    """The mask as booleans: True where a token counts."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"completion_mask must be a tensor, found {type(mask).__name__}")
    if mask.shape != shape:
        raise ValueError(f"completion_mask must have shape {list(shape)}, found {list(mask.shape)}")
    if mask.dtype == torch.bool:
        return mask
    if mask.device.type == "cpu" and (wrong := (mask != 0) & (mask != 1)).any():
        raise ValueError(f"completion_mask must hold only 0 and 1, found {mask[wrong][0].item()}")
    return mask != 0


def check_temperature(temperature: Any) -> None:
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise TypeError(f"temperature must be a float, found {type(temperature).__name__}")
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
