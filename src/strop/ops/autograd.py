"""What the operators' autograd functions share."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def note_overwritten(logits: torch.Tensor) -> None:
    """Tell autograd what it cannot see: a kernel has written the gradient over the logits.

    Whoever has kept them for a backward of their own (a tanh its output, a second loss) is then refused by torch,
    where they would have read a gradient for logits.
    """
    if not torch.compiler.is_compiling():  # a graph knows it from the operator's schema
        torch.autograd.graph.increment_version(logits)


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a backward without a gradient of its own: asking for one raises.

    torch's `once_differentiable` raises only where the incoming gradient has a graph; otherwise a gradient penalty would
    silently be a constant.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # enabled: create_graph=True
            return backward(ctx, *grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        return tuple(None if r is None else _NoSecondGradient.apply(r.detach().requires_grad_()) for r in results)

    return wrapped


class _NoSecondGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "this backend has no gradient of its gradient; the reference has: with strop.ops.registry.use_backend('torch')"
        )
