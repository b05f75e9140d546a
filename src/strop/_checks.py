"""Checks of arguments: counts, numbers, choices and arrays, with uniform messages. Needs NumPy, not torch.

Parameters are the value, then its name, then what is wanted. `check_…` raises or returns None; `as_…` returns the value
converted to one standard form. A wrong class, dtype or device is a TypeError; a wrong shape, size or value is a
ValueError. Every message names the argument, what was found and what is expected. `strop._tensors` has the checks of
tensors.
"""

import contextlib
import math
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, SupportsIndex, TypeGuard, cast

import numpy as np

from strop._types import Row

if TYPE_CHECKING:
    import torch

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
COLDEST = float(np.finfo(np.float32).tiny)  # the lowest temperature: below it 1/temperature overflows float32
END_OF_COUNTS = 2**63  # the limit of NumPy's and torch's int64, and of the seeds that every torch generator accepts


# ---- counts, numbers, choices ----


def check_count(value: object, name: str, low: int = 0) -> None:
    """Raise unless `value` is an int, at least `low` and below 2⁶³."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, found {type(value).__name__}")
    if value >= END_OF_COUNTS:
        raise ValueError(f"{name} must be at least {low} and below 2**63, found {value}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, found {value}")


def as_count(value: object, name: str, low: int = 0) -> int:
    """Return an integer, which may be NumPy's or a 0-d tensor, as Python's int."""
    if isinstance(value, SupportsIndex) and not isinstance(value, (bool, np.bool_)):
        with contextlib.suppress(TypeError):  # `check_count` raises instead
            value = operator.index(value)
    check_count(value, name, low)
    return cast(int, value)


def check_number(
    value: object,
    name: str,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
    finite: bool = True,
) -> None:
    """Raise unless `value` is a number within the bounds, and finite unless finite=False."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, found {type(value).__name__}")
    number = as_float(value)
    outside = not low <= number <= high or (open_low and number == low) or (open_high and number == high)
    if outside or (finite and abs(number) == math.inf):
        bounds = [("above" if open_low else "at least") + f" {low:g}"] if low > -math.inf else []
        bounds += [("below" if open_high else "at most") + f" {high:g}"] if high < math.inf else []
        wanted = " and ".join(["finite", *bounds] if finite and len(bounds) < 2 else bounds or ["a number"])
        raise ValueError(f"{name} must be {wanted}, found {value if abs(number) < math.inf else number}")


def as_number(value: object, name: str, low: float = -math.inf, high: float = math.inf, **options: bool) -> float:
    """Return a number, which may be NumPy's, as Python's float."""
    value = value.item() if isinstance(value, np.generic) else value
    check_number(value, name, low, high, **options)
    return float(cast(float, value))


def as_float(value: float) -> float:
    """Return the number as a float; an integer too large for a float becomes infinity."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def check_timeout(timeout: object, name: str = "timeout") -> float | None:
    if timeout is None:
        return None
    check_number(timeout, name, 0, open_low=True)
    return float(cast(float, timeout))


def check_choice(value: object, name: str, choices: Iterable[str | None]) -> None:
    """Raise unless `value` is one of the choices. The message suggests the nearest choice."""
    known = list(choices)
    if (value is not None and not isinstance(value, str)) or value not in known:
        hint = did_you_mean(value, known)
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, found {value!r}{hint}")


def did_you_mean(name: object, known: Iterable[str | None], form: str = "; {}", cutoff: float = 0.6) -> str:
    """Return a hint with the known name that is most similar to this one; "" if none is similar."""
    import difflib

    near = difflib.get_close_matches(str(name), [one for one in known if one is not None], n=1, cutoff=cutoff)
    return form.format(f"did you mean {near[0]!r}?") if near else ""


# ---- arrays, CPU tensors and lists ----


def is_conversation(value: object) -> "TypeGuard[Sequence[Row]]":
    """Return whether this is a conversation, a list of messages."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    return len(value) > 0 and isinstance(value[0], Mapping)


def is_tensor(value: object) -> "TypeGuard[torch.Tensor]":
    """Return whether this is a tensor, without importing torch, which another thread may be importing."""
    tensor_class = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor_class is not None and isinstance(value, tensor_class)


def like_input(result: np.ndarray, value: object) -> object:
    """Return the result as a tensor that shares its memory if the input was a tensor, else the array itself."""
    return sys.modules["torch"].from_numpy(result) if is_tensor(value) else result


def as_array(value: object, name: str) -> np.ndarray:
    """Return the value as an array: a view of an array or CPU tensor, a new array for a list."""
    if is_tensor(value):
        if value.device.type != "cpu":
            raise TypeError(f"{name} must be on the CPU, found a tensor on {value.device}")
        if value.requires_grad:
            raise TypeError(f"{name} requires a gradient, which the primitives do not compute: pass {name}.detach()")
        try:
            return value.numpy()
        except (TypeError, RuntimeError):  # bfloat16, sparse, conjugated views and the like
            what = f"{value.dtype}, {str(value.layout).removeprefix('torch.')}"
            raise TypeError(f"{name} must be a dense tensor of a dtype NumPy knows, found {what}") from None
    if isinstance(value, np.ma.MaskedArray):
        wanted = "an array without a mask of its own"
        raise TypeError(f"{name} must be {wanted}, found a masked array: pass {name}.data and a mask")
    try:
        return np.asarray(value)
    except ValueError:
        raise ValueError(f"{name} must be rectangular, found nested sequences of different lengths") from None


def _wrong_dtype(array: np.ndarray, name: str, value: object, wanted: str) -> TypeError:
    found = str(array.dtype) if array.dtype != object else f"{type(value).__name__} of objects"
    return TypeError(f"{name} must be {wanted}, found {found}")


def _plain(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the array as a contiguous, aligned np.ndarray in native byte order; it is copied only if needed."""
    return np.require(np.asarray(array), dtype=dtype.newbyteorder("="), requirements=["C", "A"])


def as_log_probs(value: object, name: str, dtype: type | None = None) -> np.ndarray:
    array = as_array(value, name)
    allowed = FLOATS if dtype is None else (np.dtype(dtype),)
    native_dtype = array.dtype.newbyteorder("=")
    if native_dtype not in allowed:
        raise _wrong_dtype(array, name, value, " or ".join(str(d) for d in allowed))
    return _plain(array, native_dtype)


def as_rewards(value: object, name: str = "rewards") -> np.ndarray:
    """Return finite rewards: float32 and float64 stay; integers and booleans become float64."""
    array = as_array(value, name)
    dtype = array.dtype.newbyteorder("=")
    if dtype not in FLOATS:
        if array.dtype.kind not in "biu" and array.size:
            raise _wrong_dtype(array, name, value, "float32, float64 or integers")
        dtype = np.dtype(np.float64)
    array = _plain(array, dtype)
    finite = np.isfinite(array)
    if not finite.all():
        index = tuple(np.argwhere(~finite)[0].tolist())
        place = index[0] if len(index) == 1 else index
        raise ValueError(f"{name} must be finite, found {array[index]} at index {place}")
    return array


def as_mask(value: object, name: str, shape: tuple[int, ...], of: str) -> np.ndarray | None:
    """Return the mask as booleans; it may hold booleans, or numbers that are all 0 or 1."""
    if value is None:
        return None
    array = as_array(value, name)
    if array.shape != shape:
        raise ValueError(f"{name} must have the shape {shape} of {of}, found {array.shape}")
    if array.dtype != bool:
        if array.dtype.kind not in "iuf" and array.size:
            raise _wrong_dtype(array, name, value, "boolean or numbers 0 and 1")
        wrong = (array != 0) & (array != 1)
        if wrong.any():
            index = tuple(np.argwhere(wrong)[0].tolist())
            raise ValueError(f"{name} must hold only 0 and 1, found {array[index]} at index {index}")
    return _plain(array != 0, np.dtype(bool))


def is_plain_integers(value: object) -> bool:
    """Return whether `as_integers` would return this array unchanged; a fast check for thousands of arrays."""
    if type(value) is not np.ndarray or value.dtype != np.int64 or value.ndim != 1:
        return False
    return value.flags.c_contiguous and value.flags.aligned


def as_integers(value: object, name: str) -> np.ndarray:
    """Return a 1-D array of int64."""
    array = as_array(value, name)
    if array.dtype.kind not in "iu" and array.size:
        raise _wrong_dtype(array, name, value, "integers")
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, found shape {array.shape}")
    if array.dtype == np.uint64 and (array >= END_OF_COUNTS).any():
        raise ValueError(f"{name} must be below 2**63, found {array.max()}")
    return _plain(array, np.dtype(np.int64))


def rows_and_columns(
    shape: tuple[int, ...], columns: int | None, array_name: str, columns_name: str
) -> tuple[int, int]:
    """Return the numbers of rows and columns of a 2-D array, or of a flat array with a given row length."""
    about = f"for {array_name} of shape {shape}"
    if len(shape) == 2:
        if columns is not None and as_count(columns, columns_name, 1) != shape[1]:
            raise ValueError(f"{columns_name} must be {shape[1]} or left out {about}, found {columns}")
        return shape
    if len(shape) != 1:
        raise ValueError(f"{array_name} must be one- or two-dimensional, found shape {shape}")
    if columns is None:
        raise ValueError(f"{columns_name} is needed {about}; only a 2-D array carries its own")
    columns = as_count(columns, columns_name, 1)
    if shape[0] % columns:
        raise ValueError(f"{array_name} must have a multiple of {columns_name}={columns} elements, found {shape[0]}")
    return shape[0] // columns, columns


# ---- texts that are shown ----


def printable(text: str) -> str:
    """Return text that is safe to print on a terminal: control characters are escaped."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
