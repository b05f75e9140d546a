"""Rows whose results depend on the longest row of the call, and the boundaries that keep such rows apart.

Longrope changes the frequencies of all rows of a call if one row is longer than a boundary. Dynamic rotary embeddings
change them for every length beyond it. To find this, the model's rotary modules are called on the first two positions
together with positions before and after each boundary in the config.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from strop._types import Foreign

BOUNDARY = re.compile(r"max_position|max_seq_len|context_length")  # in names of fields of configs and modules


@dataclass(frozen=True)
class Rotation:
    """A call that a model makes to a rotary module, with the arguments it used."""

    module: nn.Module
    arguments: tuple[object, ...]
    named: tuple[tuple[str, object], ...]

    def __call__(self, *positions: int) -> list[torch.Tensor]:
        """Return the module's output for positions 0 and 1 when the given positions follow them."""
        device = next(self.module.buffers()).device

        def other(value: object) -> object:
            if not isinstance(value, torch.Tensor):
                return value
            if value.is_floating_point():
                return value.new_empty(1, 1, 1, device=device)
            return torch.tensor([0, 1, *positions], device=device).expand(*value.shape[:-1], -1)

        with torch.no_grad():
            found = self.module(*map(other, self.arguments), **{name: other(value) for name, value in self.named})
        return [one[..., :2, :].clone() for one in (found if isinstance(found, (tuple, list)) else [found])]

    def changes(self, *positions: int) -> bool:
        """Return whether these positions change the rotation of positions 0 and 1."""
        alone, beside = self(), self(*positions)
        self()  # reset: dynamic frequencies stay those of the longest row until a short row is read
        return not all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(alone, beside, strict=True))


@contextlib.contextmanager
def rotations(model: nn.Module) -> Iterator[list[Rotation]]:
    """Yield a list; on exit, add to it the calls that the model made to its rotary modules."""
    found: dict[tuple[int, str], Rotation] = {}
    result: list[Rotation] = []

    def look(module: nn.Module, arguments: tuple[object, ...], named: dict[str, object]) -> None:
        options = [value for value in (*arguments, *named.values()) if not isinstance(value, torch.Tensor)]
        found.setdefault((id(module), repr(options)), Rotation(module, arguments, tuple(named.items())))

    modules = [one for one in model.modules() if any(name.endswith("inv_freq") for name in one._buffers)]
    hooks = [one.register_forward_pre_hook(look, with_kwargs=True) for one in modules]
    try:
        yield result
    finally:
        for hook in hooks:
            hook.remove()
        result += found.values()


@dataclass(frozen=True)
class Boundaries:
    """The rule for rows that may be read together: those on the same side of all boundaries.

    lengths      the boundaries: a row is beyond one if it has more tokens
    apart        rows with more tokens than this are read only with rows of equal length; None if there is no such limit
    rotations    the rotary calls that depend on the longest row
    """

    lengths: tuple[int, ...]
    apart: int | None
    rotations: tuple[Rotation, ...]

    @property
    def in_words(self) -> str:
        """The rule in words."""
        beyond = [f"rows on the same side of {boundary} tokens together" for boundary in self.lengths]
        equal = [] if self.apart is None else [f"rows of more than {self.apart} tokens with rows of equal length"]
        return ", ".join(beyond + equal) + ": its rotation depends on the longest row of a call"

    def side(self, length: int) -> int:
        """Return a group number: rows whose lengths have the same number can be read together."""
        if self.apart is not None and length > self.apart:
            return length
        return -sum(length > boundary for boundary in self.lengths)

    def steps(self, length: int) -> int | None:
        """Return how many tokens a row of this length can be extended by with a KV cache; None if there is no limit.

        It is 0 if the cache would belong to another side, or if every length has its own frequencies.
        """
        if self.apart is not None and length > self.apart:
            return 0
        if any(length == boundary + 1 for boundary in self.lengths):
            return 0  # a cache without the last token would belong to the side before the boundary
        ahead = [boundary for boundary in (*self.lengths, self.apart) if boundary is not None and boundary >= length]
        return min(ahead) + 1 - length if ahead else None

    def forget(self) -> None:
        """Reset the rotary modules, because dynamic frequencies depend on the previous call."""
        for rotation in self.rotations if self.apart is not None else ():
            rotation()


def boundaries_of(rotations: list[Rotation], config: Foreign) -> Boundaries | None:
    """Return the `Boundaries` of rotations that change with the longest row of a call; None if none changes."""
    boundaries: set[int] = set()
    apart: int | None = None
    for rotation in rotations:
        lengths = sorted(_lengths(config) | _lengths_in(vars(rotation.module)))
        if not lengths or not rotation.changes(4 * lengths[-1]):
            continue
        # positions count from 0: position L belongs to a row of L + 1 tokens
        first = next((L for L in lengths if rotation.changes(L) and not rotation.changes(L - 1)), 0)
        alike = first and all(torch.equal(a, b) for a, b in zip(rotation(first), rotation(4 * first), strict=True))
        rotation()
        if alike:
            boundaries.add(first)
        else:
            apart = min(first, first if apart is None else apart)
    return Boundaries(tuple(sorted(boundaries)), apart, tuple(rotations)) if boundaries or apart is not None else None


def _lengths(config: Foreign) -> set[int]:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return _lengths_in(vars(text))


def _lengths_in(fields: dict[str, object]) -> set[int]:
    found = {size for name, size in fields.items() if type(size) is int and size > 2 and BOUNDARY.search(str(name))}
    for value in fields.values():
        found |= _lengths_in(value) if type(value) is dict else set()
    return found
