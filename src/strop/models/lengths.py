"""Rows that cannot be read together because the longest row of a call changes the numbers of the others.

Longrope takes other frequencies for all rows of a call once one is longer than a boundary, and dynamic rotary embeddings
take other ones for every length beyond it. A trial finds this out: it calls the model's own rotary modules again on the
first two positions, beside positions before and behind each boundary that the config names.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

BOUNDARY = re.compile(r"max_position|max_seq_len|context_length")  # in names of fields of a config, and of modules


@dataclass(frozen=True)
class Rotation:
    """One way in which a model calls a rotary module: its inputs were x and positions of such a shape."""

    module: nn.Module
    arguments: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]

    def __call__(self, *positions: int) -> list[torch.Tensor]:
        """Return what the module gives for the first two positions, which stand before the given ones."""
        device = next(self.module.buffers()).device

        def other(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if value.is_floating_point():
                return value.new_empty(1, 1, 1, device=device)
            return torch.tensor([0, 1, *positions], device=device).expand(*value.shape[:-1], -1)

        with torch.no_grad():
            found = self.module(*map(other, self.arguments), **{name: other(value) for name, value in self.named})
        return [one[..., :2, :].clone() for one in (found if isinstance(found, (tuple, list)) else [found])]

    def changes(self, *positions: int) -> bool:
        """Whether the rotation of the first two positions is another one beside these positions."""
        alone, beside = self(), self(*positions)
        self()  # dynamic frequencies stay those of the longest row until a short one
        return not all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(alone, beside, strict=True))


@contextlib.contextmanager
def rotations(model: nn.Module) -> Iterator[list[Rotation]]:
    """Within, fill the list with the ways in which the model calls its rotary modules."""
    found: dict[tuple[int, str], Rotation] = {}
    result: list[Rotation] = []

    def look(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
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
class Sides:
    """Which rows may be read together: those on the same side of all boundaries.

    boundaries   a row is beyond one if it has more tokens
    apart        beyond so many tokens only rows of equal length belong together; None: nowhere
    rotations    to be forgotten before each call, since dynamic frequencies depend on the call before
    """

    boundaries: tuple[int, ...]
    apart: int | None
    rotations: tuple[Rotation, ...]

    def side(self, length: int) -> int:
        """Return a number that is the same for two lengths if such rows can be read together."""
        if self.apart is not None and length > self.apart:
            return length
        return -sum(length > boundary for boundary in self.boundaries)

    def steps(self, length: int) -> int | None:
        """Return how many tokens a row of this length can get from steps with a cache; None: as many as it likes.

        0 where the cache would be of another side, or the next token's frequencies are its own.
        """
        if self.apart is not None and length > self.apart:
            return 0
        if any(length == boundary + 1 for boundary in self.boundaries):
            return 0  # a cache of the tokens before the last would be one of the side before
        ahead = [boundary for boundary in (*self.boundaries, self.apart) if boundary is not None and boundary >= length]
        return min(ahead) + 1 - length if ahead else None

    def forget(self) -> None:
        """Let the rotary modules forget the rows that they were called with."""
        for rotation in self.rotations:
            rotation()


def sides(rotations: list[Rotation], config: object) -> Sides | None:
    """Return the sides of the boundaries at which rotations change with the longest row; None where none does."""
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
    return (
        Sides(tuple(sorted(boundaries)), apart, tuple(rotations) if apart is not None else ())
        if boundaries or apart is not None
        else None
    )


def _lengths(config: Any) -> set[int]:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return _lengths_in(vars(text))


def _lengths_in(fields: dict[str, Any]) -> set[int]:
    found = {size for name, size in fields.items() if type(size) is int and size > 2 and BOUNDARY.search(str(name))}
    for value in fields.values():
        found |= _lengths_in(value) if type(value) is dict else set()
    return found
