"""Linear layers of a model in training, on CPUs where oneDNN multiplies faster than torch (`strop.ops.onednn`).

Shapes: N tokens, H inputs and E outputs of a layer.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import linear

from strop._types import Context
from strop.models.kinds import is_plain
from strop.ops import onednn
from strop.ops.head import first_order


def faster_forwards(model: nn.Module) -> dict[nn.Module, Callable[..., torch.Tensor]]:
    """Return a forward by oneDNN for each linear layer that is large enough, where oneDNN is faster; else {}."""
    if not onednn.is_faster():
        return {}
    linears = [module for module in model.modules() if type(module) is nn.Linear and is_plain(module.weight)]
    return {
        layer: functools.partial(_forward, layer) for layer in linears if layer.weight.numel() >= onednn.FEWEST_WEIGHTS
    }


def _forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Return the layer's output, by oneDNN if `takes` says so."""
    plain = x.ndim < 2 or not x.numel() or torch.is_autocast_enabled("cpu") or layer.weight.dtype != x.dtype
    if plain or not onednn.takes(x):
        return linear(x, layer.weight, layer.bias)
    return Linear.apply(x, layer.weight, layer.bias)


class Linear(torch.autograd.Function):
    """The function x @ weightᵀ + bias, [.., E], with its gradients."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, weight_EH: torch.Tensor, bias_E: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight_EH)
        return onednn.product(x.flatten(0, -2), weight_EH, bias_E).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Context, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight_EH = ctx.saved_tensors
        dy_NE = dy.flatten(0, -2)
        dx = dw_EH = db_E = None
        if ctx.needs_input_grad[0]:
            dx = onednn.product(dy_NE, weight_EH.T).unflatten(0, x.shape[:-1])  # dL/dx = dy·W
        if ctx.needs_input_grad[1]:
            dw_EH = onednn.product(dy_NE.T, x.flatten(0, -2).T)  # dL/dW = dyᵀ·x
        if ctx.needs_input_grad[2]:
            db_E = dy_NE.sum(0)  # dL/db = Σ_n dy
        return first_order(dx, dw_EH, db_E)
