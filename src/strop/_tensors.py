"""Checks of tensors for losses and operators, with uniform messages. Imports torch, but no operator and no loss.

The rules are those of `strop._checks`: the parameters are the value, its name, then what is wanted. A wrong class,
dtype or device is a TypeError; a wrong shape or value is a ValueError.
"""

from collections.abc import Sequence

import torch

from strop._checks import COLDEST, check_count, check_number

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LOGP_NAMES = ("logits", "ids")

Count = int | float | torch.Tensor


def can_look(tensor: torch.Tensor) -> bool:
    """Return whether values can be read at no cost: false on a GPU, which needs a wait, and during torch.compile."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def in_float(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the dtype of losses: float64 stays, everything else becomes float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def widest(device: torch.device) -> torch.dtype:
    """Return the dtype for sums: float64, or float32 on a device without float64 (Apple's)."""
    return torch.float32 if device.type == "mps" else torch.float64


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the dtype for sums."""
    return tensor.to(widest(tensor.device))


# ---- any tensor ----


def check_tensor(tensor: object, name: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, found {type(tensor).__name__}")


def check_floats(tensor: torch.Tensor, name: str) -> None:
    check_tensor(tensor, name)
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{name} must be of a floating dtype, found {tensor.dtype}")


def check_shape(tensor: torch.Tensor, name: str, shape: Sequence[int]) -> None:
    if tensor.shape != torch.Size(shape):
        raise ValueError(f"{name} must have shape {list(shape)}, found {list(tensor.shape)}")


def check_device(tensor: torch.Tensor, name: str, other: torch.Tensor, other_name: str) -> None:
    if tensor.device != other.device:
        raise TypeError(f"{name} must be on {other.device} as {other_name} is, found {tensor.device}")


def check_like(tensor: torch.Tensor, name: str, other: torch.Tensor, other_name: str) -> None:
    """Raise unless this is a floating-point tensor with the other's shape and device."""
    check_floats(tensor, name)
    check_shape(tensor, name, other.shape)
    check_device(tensor, name, other, other_name)


def as_completion_mask(mask: torch.Tensor, other: torch.Tensor, other_name: str) -> torch.Tensor:
    """Return the mask as booleans, True where a token counts. Raise unless it has the other's shape and device."""
    check_tensor(mask, "completion_mask")
    check_shape(mask, "completion_mask", other.shape)
    check_device(mask, "completion_mask", other, other_name)
    if mask.dtype == torch.bool:
        return mask
    if can_look(mask) and (wrong := (mask != 0) & (mask != 1)).any():
        raise ValueError(f"completion_mask must hold only 0 and 1, found {mask[wrong][0].item()}")
    return mask != 0


def check_total(total: Count, name: str) -> Count:
    """Return `total`, a count over a batch. Raise unless it is a number or a 0-d tensor. Does not wait for a GPU."""
    if not isinstance(total, torch.Tensor):
        check_number(total, name, 0)
    elif total.ndim:
        raise ValueError(f"{name} must be a number or a tensor of shape [], found shape {list(total.shape)}")
    elif can_look(total):
        check_number(total.item(), name, 0)
    return total


def as_divisor(total: Count, name: str, like: torch.Tensor) -> Count:
    """Return the total as a divisor: 1 if it is 0, as all summands are 0 then. Does not wait for a GPU."""
    total = check_total(total, name)
    if isinstance(total, torch.Tensor):
        total = total.to(like.device, like.dtype, non_blocking=True)
        return torch.where(total > 0, total, torch.ones_like(total))
    return total or 1


# ---- logits, ids and LM heads ----


def check_logits(logits: torch.Tensor, name: str = "logits") -> None:
    check_floats(logits, name)
    if logits.ndim < 1 or logits.shape[-1] < 1:
        raise ValueError(f"{name} must have shape [.., V] with V at least 1, found {list(logits.shape)}")


def check_ids(ids: torch.Tensor, name: str, shape: torch.Size) -> None:
    check_tensor(ids, name)
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be int64 or int32, found {ids.dtype}")
    check_shape(ids, name, shape)


def check_ids_in_range(
    ids: torch.Tensor, name: str, vocabulary: int, mask: torch.Tensor | None, validate: bool
) -> None:
    """Raise if an unmasked id is outside the vocabulary. Checked on the CPU, elsewhere only with validate=True."""
    if not validate and not can_look(ids):
        return
    wrong = (ids < 0) | (ids >= vocabulary)
    if mask is not None:
        wrong &= mask
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise ValueError(f"{name} must be from 0 to {vocabulary - 1}, found {ids[tuple(at)].item()} at index {at}")


def check_temperature(temperature: float) -> None:
    if type(temperature) is float and COLDEST <= temperature < float("inf"):
        return
    check_number(temperature, "temperature", 0, open_low=True)
    if temperature < COLDEST:
        why = "float32 cannot divide by less"
        raise ValueError(f"temperature must be at least {COLDEST:.2g}, found {temperature}: {why}")


def check_logp(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: float,
    completion_mask: torch.Tensor | None,
    validate: bool,
    *,
    names: tuple[str, str] = LOGP_NAMES,
) -> torch.Tensor | None:
    """Check the arguments of `logp`, and return the mask as booleans."""
    check_logits_and_ids(logits, ids, temperature, names)
    mask = None if completion_mask is None else as_completion_mask(completion_mask, ids, names[1])
    check_ids_in_range(ids, names[1], logits.shape[-1], mask, validate)
    return mask


def check_logits_and_ids(logits: torch.Tensor, ids: torch.Tensor, temperature: float, names: tuple[str, str]) -> None:
    check_logits(logits, names[0])
    check_ids(ids, names[1], logits.shape[:-1])
    check_device(ids, names[1], logits, names[0])
    check_temperature(temperature)


GivenHead = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # hidden states, weight and bias of an LM head
RefHead = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]  # the same of a reference, or None


def check_head(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, prefix: str = "") -> None:
    """Raise unless these fit together: hidden states [.., H], an LM head's weight [V, H] and its bias [V] or None."""
    hidden_name, weight_name, bias_name = (f"{prefix}{name}" for name in ("hidden", "weight", "bias"))
    check_floats(hidden, hidden_name)
    if hidden.ndim < 1 or hidden.shape[-1] < 1:
        raise ValueError(f"{hidden_name} must have shape [.., H] with H at least 1, found {list(hidden.shape)}")
    check_floats(weight, weight_name)
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1] or weight.shape[0] < 1:
        raise ValueError(f"{weight_name} must have shape [V, {hidden.shape[-1]}], found {list(weight.shape)}")
    if bias is not None:
        check_floats(bias, bias_name)
        check_shape(bias, bias_name, weight.shape[:1])
    autocast = autocast_on(hidden)
    for tensor, name in ((weight, weight_name), (bias, bias_name)):
        if tensor is None:
            continue
        check_device(tensor, name, hidden, hidden_name)
        if tensor.dtype != hidden.dtype and (not autocast or torch.float64 in (tensor.dtype, hidden.dtype)):
            why = "autocast leaves float64 alone" if autocast else "autocast is off"
            raise TypeError(f"{name} must be {hidden.dtype} as {hidden_name} is, found {tensor.dtype} ({why})")


def autocast_on(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)  # torch raises for meta


def check_workspace(workspace: int | None) -> None:
    """Raise unless this is a number of bytes or None."""
    if workspace is not None:
        check_count(workspace, "workspace", 1)


def check_linear_logp(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: float,
    mask: torch.Tensor | None,
    workspace: int | None,
    validate: bool,
    ids_name: str = "ids",
) -> torch.Tensor | None:
    """Check the arguments of `linear_logp`, and return the mask as booleans."""
    check_head(hidden, weight, bias)
    check_ids(ids, ids_name, hidden.shape[:-1])
    check_device(ids, ids_name, hidden, "hidden")
    check_temperature(temperature)
    check_workspace(workspace)
    as_booleans = None if mask is None else as_completion_mask(mask, ids, ids_name)
    check_ids_in_range(ids, ids_name, weight.shape[0], as_booleans, validate)
    return as_booleans


def check_tokens(ids: torch.Tensor, hidden: torch.Tensor, **given: torch.Tensor | None) -> None:
    """Raise unless `ids` has shape [n] and each given tensor is None or holds a float for each of the n tokens."""
    if ids.ndim != 1:
        raise ValueError(f"ids must have shape [n], found {list(ids.shape)}")
    for name, tensor in given.items():
        if tensor is not None:
            check_floats(tensor, name)
            check_shape(tensor, name, ids.shape)
            check_device(tensor, name, hidden, "hidden")
