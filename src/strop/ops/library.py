"""Operators of `torch.ops.strop`, each one node of a compiled graph, and helpers shared by the autograd functions.

The operators have no gradients of their own; the functions in `strop.ops` pair a forward with its backward. They are
defined by `torch.library.Library`, because the decorator `custom_op` costs four times as much per call.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., object])
Result = TypeVar("Result")


def constant_when_compiled(function: Function) -> Function:
    """Mark a function whose result a compiled graph treats as a constant (decorator).

    Same as `torch.compiler.assume_constant_result`, which would import the compiler and take a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_LIBRARY = torch.library.Library("strop", "FRAGMENT")


class LibraryOp(Generic[Result]):
    """An operator that calls its function directly, and `torch.ops.strop.<name>` in a graph or on the meta device.

    Going through torch's dispatcher and back into Python takes as long as a kernel launch.
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
    """Define `torch.ops.strop.<name of the schema>` (decorator). `fake` returns empty results of the right shapes."""

    def define(function: Callable[..., Result]) -> LibraryOp[Result]:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"strop::{name}", fake, lib=_LIBRARY)
        return LibraryOp(name, function)

    return define


# ---- helpers of the autograd functions ----


def note_overwritten(logits: torch.Tensor) -> None:
    """Tell autograd that a kernel has overwritten the logits with their gradient.

    torch then raises an error if another operation (a tanh, a second loss) saved them for its own backward.
    """
    if not torch.compiler.is_compiling():  # in a graph the operator's schema says so
        torch.autograd.graph.increment_version(logits)
