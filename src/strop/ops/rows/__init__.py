"""Row functions: from a row of logits to its token's log-prob or loss term, and to the row's gradient.

`strop.ops.rows.torch_rows` and `strop.ops.rows.triton_rows` have the same functions; the second has a few more.
`strop.ops.rows.exact_rows` has those that the "exact" backends need. `implementation` returns a module by name.
"""

import functools
import importlib
from types import ModuleType
from typing import NamedTuple

import torch


class TokenValues(NamedTuple):
    """The values of each token that a loss reads, [N] each."""

    ids: torch.Tensor
    mask: torch.Tensor | None
    old_logps: torch.Tensor | None
    ref_logps: torch.Tensor | None
    advantages: torch.Tensor
    weights: torch.Tensor


class PolicyTerms(NamedTuple):
    """The results of `policy_terms`.

    terms_3N    each row's terms of the loss, of its policy part and of the KL; their sums over the rows are the results
    factors_N   factors by which the rows of d_logits must still be multiplied, or None
    """

    logps_N: torch.Tensor
    terms_3N: torch.Tensor
    d_logits: torch.Tensor | None
    factors_N: torch.Tensor | None = None


@functools.cache
def implementation(name: str) -> ModuleType:
    return importlib.import_module(f"strop.ops.rows.{name}_rows")


def strided_rows(logits: torch.Tensor) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return the rows' layout as (B, stride), (T, stride), or None if two strides cannot describe it."""
    V = logits.shape[-1]
    if logits.stride(-1) != 1 and V > 1:
        return None
    # merge neighbouring dimensions that are contiguous, and drop those of size 1
    merged: list[tuple[int, int]] = []
    for length, stride in zip(logits.shape[:-1], logits.stride()[:-1], strict=True):
        if merged and merged[-1][1] == length * stride:
            merged[-1] = (merged[-1][0] * length, stride)
        elif length != 1:
            merged.append((length, stride))
    if len(merged) > 2 or any(stride < V for _, stride in merged):  # with a stride below V rows overlap
        return None
    outer, inner = [(1, 0), (1, 0), *merged][-2:]
    return outer, inner


def empty_gradient(logits: torch.Tensor, misaligned: int | torch.SymInt) -> torch.Tensor:
    """Return memory for the gradient with the logits' strides and the same offset from a 16-byte boundary."""
    if misaligned == 0 and logits.is_contiguous():
        return torch.empty_like(logits)
    span = 1 + sum((size - 1) * stride for size, stride in zip(logits.shape, logits.stride(), strict=True))
    memory = logits.new_empty(misaligned + max(span, 0))
    return memory.as_strided(logits.shape, logits.stride(), misaligned)


def fake_gradient(logits: torch.Tensor) -> torch.Tensor:
    """Return empty memory in the layout of the kernels' gradient: as the logits, or packed if those were copied."""
    if not logits.is_contiguous() and strided_rows(logits) is None:
        return torch.empty_like(logits, memory_format=torch.contiguous_format)
    return empty_gradient(logits, logits.storage_offset() % (16 // logits.element_size()))


def check_in_place(logits: torch.Tensor) -> None:
    """Raise unless the kernels can read the logits without a copy. Otherwise the gradient cannot overwrite them."""
    if not logits.is_contiguous() and strided_rows(logits) is None:
        raise ValueError(
            f"in_place needs logits whose rows lie in memory one after another, found strides {list(logits.stride())} "
            f"of shape {list(logits.shape)}"
        )
