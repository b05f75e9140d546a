"""Operators of `torch.ops.strop`: what a compiled graph sees as one node.

They compute and know no gradient; the functions in `strop.ops` join a forward to its backward. Defined through
`torch.library.Library` and not its decorator, which costs four times as much per call.
"""

from collections.abc import Callable
from typing import Any

import torch


def constant_when_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: a compiled graph calls the function while it is made and keeps the result.

    As `torch.compiler.assume_constant_result`, which would import the compiler: a second of every `import strop.ops`.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_LIBRARY = torch.library.Library("strop", "FRAGMENT")


class LibraryOp:
    """Called with plain tensors it is the function itself; in a graph being made, or on the meta device, it is
    `torch.ops.strop.<name>`.

    The way through torch's dispatcher and back into Python would take as long as launching a kernel.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.function = function
        self.op = getattr(torch.ops.strop, name).default

    def __call__(self, *args: Any) -> Any:
        plain = type(args[0]) in _PLAIN and not args[0].is_meta and not torch.compiler.is_compiling()
        return self.function(*args) if plain else self.op(*args)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def library_op(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], LibraryOp]:
    """Decorator: define `torch.ops.strop.<name of the schema>` as this function; `fake` gives the shapes of its results."""

    def define(function: Callable[..., Any]) -> LibraryOp:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"strop::{name}", fake, lib=_LIBRARY)
        return LibraryOp(name, function)

    return define
