"""Operators of `torch.ops.strop`, each of which a compiled graph sees as one node; and what autograd functions share.

The operators have no gradients of their own; the functions in `strop.ops` join a forward to its backward. They are
defined by `torch.library.Library`, because its decorator costs four times as much per call.
"""

from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

import torch

from strop._types import Context

Function = TypeVar("Function", bound=Callable[..., object])
Result = TypeVar("Result")


def constant_when_compiled(function: Function) -> Function:
    """Decorator: a compiled graph calls the function while it is made and keeps the result.

    It does what `torch.compiler.assume_constant_result` does. That would import the compiler, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_LIBRARY = torch.library.Library("strop", "FRAGMENT")


class LibraryOp(Generic[Result]):
    """Calls the function itself with plain tensors, and `torch.ops.strop.<name>` in a graph or on the meta device.

    The way through torch's dispatcher and back into Python takes as long as launching a kernel.
    """

    def __init__(self, name: str, function: Callable[..., Result]) -> None:
        self.function = function
        self.op = getattr(torch.ops.strop, name).default

    def __call__(self, tensor: torch.Tensor, *more: object) -> Result:
        return self.function(tensor, *more) if is_plain(tensor) else self.op(tensor, *more)


def is_plain(tensor: torch.Tensor) -> bool:
    """True if the tensor holds values; False within a graph that is being compiled, and on the meta device."""
    return type(tensor) in _PLAIN and not tensor.is_meta and not torch.compiler.is_compiling()


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def library_op(schema: str, fake: Callable[..., object]) -> Callable[[Callable[..., Result]], LibraryOp[Result]]:
    """Decorator: define `torch.ops.strop.<name of the schema>` as this function; `fake` gives the shapes of its results."""

    def define(function: Callable[..., Result]) -> LibraryOp[Result]:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"strop::{name}", fake, lib=_LIBRARY)
        return LibraryOp(name, function)

    return define


# ---- what the autograd functions share ----


def note_overwritten(logits: torch.Tensor) -> None:
    """Tell autograd that a kernel has written the gradient over the logits.

    If another operation saved them for its own backward (a tanh its output, a second loss), torch then raises an error.
    """
    if not torch.compiler.is_compiling():  # a graph knows it from the operator's schema
        torch.autograd.graph.increment_version(logits)


def first_order(*gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return gradients that raise if anyone asks for their gradient: they were computed without a graph.

    torch's `once_differentiable` raises only where the incoming gradient has a graph; otherwise a gradient penalty would
    silently be a constant.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # enabled: create_graph=True
        return gradients
    return tuple(None if g is None else _NoSecondGradient.apply(g.detach().requires_grad_()) for g in gradients)


class _NoSecondGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> NoReturn:
        raise RuntimeError(
            "this backend has no gradient of its gradient; the reference has: with strop.ops.registry.use_backend('torch')"
        )
