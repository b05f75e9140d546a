"""Rows of logits: from a row to the log-prob of its token, to its term of a loss, and back to the row's gradient.

`strop.ops.rows.torch_rows` and `strop.ops.rows.triton_rows` hold the same functions; `implementation` gives one of them by name.
"""

import functools
import importlib
import importlib.util
from types import ModuleType
from typing import Any, NamedTuple

import torch

_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


class TokenLoss(NamedTuple):
    """A token's loss as a function of its log-prob alone: its formula in `strop.losses`, and β times the KL's."""

    loss_type: str
    clip_eps: tuple[float, float]
    delta: float | None
    beta: float
    kl_estimator: str


class PolicyTerms(NamedTuple):
    """A loss and its parts: the sum of the terms and, in one tensor, those of the policy and of the KL."""

    total: torch.Tensor
    policy_and_kl: torch.Tensor
    logps_N: torch.Tensor
    d_logits: torch.Tensor | None


@functools.cache
def implementation(name: str) -> ModuleType:
    return importlib.import_module(f"strop.ops.rows.{name}_rows")


def on_gpu(*args: Any, **kwargs: Any) -> bool | str:
    """Whether the kernels can take an operator's arguments, judged by the first tensor of floats; or why not."""
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


@torch.compiler.assume_constant_result
def _interpreted() -> bool:
    return implementation("triton").INTERPRETED


def _first_floats(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    values = (*args, *kwargs.values())
    return next((value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()), None)


def _cannot_take(tensor: torch.Tensor) -> str:
    if not _TRITON_INSTALLED:
        return "Triton is not installed"
    return "float64 is computed by the reference" if tensor.dtype == torch.float64 else ""
