"""Rows of logits: from a row to the log-prob of its token, to its term of a loss, and back to the row's gradient.

`strop.ops.rows.torch_rows` and `strop.ops.rows.triton_rows` hold the same functions, the latter a few more; `implementation` gives one of them
by name.
"""

import functools
import importlib
import importlib.util
from types import ModuleType
from typing import Any, NamedTuple

import torch

from strop.ops.library import constant_when_compiled

_DECIDING = ("logits", "policy_logits", "hidden")  # an operator's first argument
_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


class PolicyTerms(NamedTuple):
    """What rows of logits give.

    terms_3N    of the loss, of its policy's part and of the KL, each to be summed over the rows
    factors_N   by which the rows of d_logits are still to be multiplied; None where there is nothing to multiply
    """

    logps_N: torch.Tensor
    terms_3N: torch.Tensor
    d_logits: torch.Tensor | None
    factors_N: torch.Tensor | None = None


@functools.cache
def implementation(name: str) -> ModuleType:
    return importlib.import_module(f"strop.ops.rows.{name}_rows")


def strided_rows(logits: torch.Tensor) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The rows as [B, T] with two strides: (B, stride) and (T, stride); None where they lie otherwise."""
    V = logits.shape[-1]
    if logits.stride(-1) != 1 and V > 1:
        return None
    # neighbouring dimensions that lie one after another are one dimension; those of size 1 are none
    merged: list[tuple[int, int]] = []
    for length, stride in zip(logits.shape[:-1], logits.stride()[:-1], strict=True):
        if merged and merged[-1][1] == length * stride:
            merged[-1] = (merged[-1][0] * length, stride)
        elif length != 1:
            merged.append((length, stride))
    if len(merged) > 2 or any(stride < V for _, stride in merged):  # a stride below V: rows that overlap
        return None
    outer, inner = [(1, 0), (1, 0), *merged][-2:]
    return outer, inner


def empty_gradient(logits: torch.Tensor, misaligned: int | torch.SymInt) -> torch.Tensor:
    """Memory for the gradient, laid out as the logits, each row as far from a 16-byte boundary as the logits' row."""
    if misaligned == 0 and logits.is_contiguous():
        return torch.empty_like(logits)
    span = 1 + sum((size - 1) * stride for size, stride in zip(logits.shape, logits.stride(), strict=True))
    memory = logits.new_empty(misaligned + max(span, 0))
    return memory.as_strided(logits.shape, logits.stride(), misaligned)


def fake_gradient(logits: torch.Tensor) -> torch.Tensor:
    """As the kernels lay out the gradient: like the logits, or packed where those had to be copied."""
    if not logits.is_contiguous() and strided_rows(logits) is None:
        return torch.empty_like(logits, memory_format=torch.contiguous_format)
    return empty_gradient(logits, logits.storage_offset() % (16 // logits.element_size()))


def check_in_place(logits: torch.Tensor) -> None:
    """The gradient can overwrite the logits only where the kernels read them as they lie."""
    if not logits.is_contiguous() and strided_rows(logits) is None:
        raise ValueError(
            f"in_place needs logits whose rows lie in memory one after another, found strides {list(logits.stride())} "
            f"of shape {list(logits.shape)}"
        )


def on_gpu(*args: Any, **kwargs: Any) -> bool | str:
    """Whether the kernels can take an operator's arguments, judged by the logits or hidden states; or why not."""
    tensor = _first_floats(args, kwargs)
    if tensor is None:
        return True  # and raises, as every backend does
    if not tensor.is_cuda:
        return f"the tensors are on {tensor.device}, it needs a GPU"
    return _cannot_take(tensor) or True


def on_gpu_or_interpreted(*args: Any, **kwargs: Any) -> bool | str:
    """The same where the backend is asked for by name: then Triton's interpreter will do too."""
    tensor = _first_floats(args, kwargs)
    if tensor is None or tensor.device.type != "cpu":
        return on_gpu(*args, **kwargs)
    if reason := _cannot_take(tensor):
        return reason
    if _interpreted():
        return True
    return "the tensors are on the CPU, where it runs only through Triton's interpreter (TRITON_INTERPRET=1)"


@constant_when_compiled
def _interpreted() -> bool:
    return implementation("triton").INTERPRETED


def _first_floats(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
        return args[0]  # as it nearly always is
    # by keyword in any order: the logits or hidden states decide, not log-probs in float64 that were written before them
    values = (*args, *(kwargs.get(name) for name in _DECIDING), *kwargs.values())
    return next((value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()), None)


def _cannot_take(tensor: torch.Tensor) -> str:
    if not _TRITON_INSTALLED:
        return "Triton is not installed"
    return "float64 is computed by the reference" if tensor.dtype == torch.float64 else ""
