"""What losses and operators ask of their tensors, in the same words. Knows torch, no operator and no loss.

One kind of mistake has one exception type: TypeError for a wrong kind of thing (class, dtype, device), ValueError for
a wrong shape or value.
"""

import difflib
from collections.abc import Sequence
from typing import Any

import torch

COLDEST = torch.finfo(torch.float32).tiny  # a temperature below it has no finite inverse in float32
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_floats(tensor: Any, name: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, found {type(tensor).__name__}")
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{name} must be of a floating dtype, found {tensor.dtype}")


def check_shape(tensor: torch.Tensor, shape: Sequence[int], name: str) -> None:
    if tensor.shape != torch.Size(shape):
        raise ValueError(f"{name} must have shape {list(shape)}, found {list(tensor.shape)}")


def check_like(tensor: Any, other: torch.Tensor, name: str, other_name: str) -> None:
    """Floats of the other's shape on the other's device."""
    check_floats(tensor, name)
    check_shape(tensor, other.shape, name)
    check_device(tensor, other, name, other_name)


def check_device(tensor: torch.Tensor, other: torch.Tensor, name: str, other_name: str) -> None:
    if tensor.device != other.device:
        raise TypeError(f"{name} must be on {other.device} as {other_name} is, found {tensor.device}")


def can_look(tensor: torch.Tensor) -> bool:
    """Whether looking at values costs nothing: a GPU would be waited for, and a graph being compiled has none yet."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


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
    if can_look(mask) and (wrong := (mask != 0) & (mask != 1)).any():
        raise ValueError(f"completion_mask must hold only 0 and 1, found {mask[wrong][0].item()}")
    return mask != 0


def check_number(value: Any, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a float, found {type(value).__name__}")


def check_choice(value: Any, choices: Sequence[str], name: str) -> None:
    if not isinstance(value, str) or value not in choices:
        near = difflib.get_close_matches(str(value), list(choices), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, found {value!r}{hint}")


def in_float(tensor: torch.Tensor) -> torch.Tensor:
    """float64 as it is, everything else as float32: what losses are computed in."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def in_dtype(dtype: torch.dtype, *tensors: torch.Tensor | None) -> Any:
    """Without gradient, in the dtype of the policy's log-probs: float64 beside float32 would make the loss float64."""
    return tuple(None if tensor is None else tensor.detach().to(dtype) for tensor in tensors)


def on_host(values: Sequence[torch.Tensor]) -> list[float]:
    """Numbers, each a tensor of one element, as floats: the device is waited for once and not for every one."""
    if not values:
        return []
    return torch.cat([value.detach().reshape(1).to(values[0].device) for value in values]).tolist()
