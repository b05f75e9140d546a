"""What every operator asks of its arguments, in the same words."""

from typing import Any

import torch

from strop._tensors import COLDEST, as_completion_mask, can_look, check_device, check_floats, check_number, check_shape

LOGP_NAMES = ("logits", "ids")


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
    if temperature < COLDEST:
        raise ValueError(
            f"temperature must be at least {COLDEST:.2g}, found {temperature}: float32 cannot divide by less"
        )


def check_ids_in_range(
    ids: torch.Tensor, mask: torch.Tensor | None, vocabulary: int, validate: bool, name: str = "ids"
) -> None:
    """An id that counts and lies outside the vocabulary raises where looking is free (CPU) or wanted."""
    if not validate and not can_look(ids):
        return
    wrong = (ids < 0) | (ids >= vocabulary)
    if mask is not None:
        wrong &= mask
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise ValueError(f"{name} must be from 0 to {vocabulary - 1}, found {ids[tuple(at)].item()} at index {at}")


def check_logp(
    logits: Any,
    ids: Any,
    temperature: Any,
    completion_mask: Any,
    validate: bool,
    *,
    names: tuple[str, str] = LOGP_NAMES,
) -> torch.Tensor | None:
    """Everything `logp` asks of its arguments. Returns the mask as booleans."""
    check_logits_and_ids(logits, ids, temperature, names)
    mask = as_completion_mask(completion_mask, ids.shape)
    if mask is not None:
        check_device(mask, logits, "completion_mask", names[0])
    check_ids_in_range(ids, mask, logits.shape[-1], validate, names[1])
    return mask


def check_logits_and_ids(logits: Any, ids: Any, temperature: Any, names: tuple[str, str]) -> None:
    check_logits(logits, names[0])
    check_ids(ids, logits.shape[:-1], names[1])
    check_device(ids, logits, names[1], names[0])
    check_temperature(temperature)


def check_head(hidden: Any, weight: Any, bias: Any, prefix: str = "") -> None:
    """An LM head: hidden states [.., H], its weight [V, H] and bias [V]."""
    hidden_name, weight_name, bias_name = (f"{prefix}{name}" for name in ("hidden", "weight", "bias"))
    check_floats(hidden, hidden_name)
    if hidden.ndim < 1 or hidden.shape[-1] < 1:
        raise ValueError(f"{hidden_name} must have shape [.., H] with H at least 1, found {list(hidden.shape)}")
    check_floats(weight, weight_name)
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1] or weight.shape[0] < 1:
        raise ValueError(f"{weight_name} must have shape [V, {hidden.shape[-1]}], found {list(weight.shape)}")
    if bias is not None:
        check_floats(bias, bias_name)
        check_shape(bias, weight.shape[:1], bias_name)
    autocast = autocast_on(hidden)
    for tensor, name in ((weight, weight_name), (bias, bias_name)):
        if tensor is None:
            continue
        check_device(tensor, hidden, name, hidden_name)
        if tensor.dtype != hidden.dtype and (not autocast or torch.float64 in (tensor.dtype, hidden.dtype)):
            why = "autocast leaves float64 alone" if autocast else "autocast is off"
            raise TypeError(f"{name} must be {hidden.dtype} as {hidden_name} is, found {tensor.dtype} ({why})")


def autocast_on(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)  # torch has no answer for meta


def check_workspace(workspace: Any) -> None:
    if workspace is None:
        return
    if isinstance(workspace, bool) or not isinstance(workspace, int):
        raise TypeError(f"workspace must be a number of bytes, found {type(workspace).__name__}")
    if workspace < 1:
        raise ValueError(f"workspace must be at least 1 byte, found {workspace}")
