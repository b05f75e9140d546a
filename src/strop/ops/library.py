"""Operators of `torch.ops.strop`: what a compiled graph sees as one node.

They compute and know no gradient; the functions in `strop.ops` join a forward to its backward. Defined through
`torch.library.Library` and not its decorator, which costs four times as much per call.
"""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("strop", "FRAGMENT")


def library_op(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: define `torch.ops.strop.<name of the schema>` as this function; `fake` gives the shapes of its results."""

    def define(function: Callable[..., Any]) -> Any:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"strop::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.strop, name).default

    return define
