"""Rows of logits: from a row to the log-prob of its token, to its term of a loss, and back to the row's gradient.

`strop.ops.rows.torch` and `strop.ops.rows.triton` hold the same functions; `implementation` gives one of them by name.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType

import torch

from strop.losses.policy import ClipBounds, clip_bounds


@dataclass(frozen=True)
class TokenLoss:
    """A token's loss as a function of its log-prob alone: its formula in `strop.losses`, and β times the KL's."""

    loss_type: str
    clip_eps: tuple[float, float]
    delta: float | None
    beta: float
    kl_estimator: str

    @property
    def bounds(self) -> ClipBounds:
        return clip_bounds(self.clip_eps, self.delta, self.loss_type)


def implementation(name: str) -> ModuleType:
    return importlib.import_module(f"strop.ops.rows.{name}")


def on_gpu(tensor: torch.Tensor) -> bool | str:
    """Whether the kernels of Triton can take the tensor, or why not."""
    if not isinstance(tensor, torch.Tensor):
        return True  # and raises, as every backend does
    if not tensor.is_cuda:
        return f"the tensors are on {tensor.device}, it needs a GPU"
    return _installed() or _float64(tensor) or True


def on_gpu_or_interpreted(tensor: torch.Tensor) -> bool | str:
    """The same where the backend is asked for by name: then Triton's interpreter will do too."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_cuda or tensor.device.type != "cpu":
        return on_gpu(tensor)
    if reason := _installed() or _float64(tensor):
        return reason
    if implementation("triton").INTERPRETED:
        return True
    return "the tensors are on the CPU, where it runs only through Triton's interpreter (TRITON_INTERPRET=1)"


def _installed() -> str:
    return "" if importlib.util.find_spec("triton") else "Triton is not installed"


def _float64(tensor: torch.Tensor) -> str:
    return "float64 is computed by the reference" if tensor.dtype == torch.float64 else ""
