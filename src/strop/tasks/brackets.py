"""Brackets: "([]{<:" → ">})", the brackets that close the open ones."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strop._checks import as_count
from strop.tasks.base import Problem, Task

PAIRS = ("()", "[]", "{}", "<>")
CLOSE_CHANCE = 0.4  # the probability of closing the innermost bracket instead of opening another


@dataclass(frozen=True)
class Brackets(Task):
    """The beginning of a balanced text, up to `length` brackets with at least one open; the answer closes them all."""

    name: ClassVar[str] = "brackets"
    alphabet: ClassVar[str] = "".join(PAIRS) + ":"

    length: int = 8

    def __post_init__(self) -> None:
        as_count(self.length, "length", 1)

    def problem(self, rng: np.random.Generator) -> Problem:
        text, closers = "", ""
        for _ in range(rng.integers(1, self.length + 1)):
            if len(closers) > 1 and rng.random() < CLOSE_CHANCE:
                text, closers = text + closers[-1], closers[:-1]
            else:
                pair = PAIRS[rng.integers(len(PAIRS))]
                text, closers = text + pair[0], closers + pair[1]
        return Problem(f"{text}:", closers[::-1], text)

    @property
    def longest_answer(self) -> int:
        return self.length
