"""Sorting: "52814>" → "12458"."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strop._checks import as_count
from strop.tasks.base import Problem, Task


@dataclass(frozen=True)
class Sorting(Task):
    """The task to sort `length` digits. All orders of the same digits are in one split, so no answer is in both."""

    name: ClassVar[str] = "sorting"
    alphabet: ClassVar[str] = "0123456789>"

    length: int = 5

    def __post_init__(self) -> None:
        as_count(self.length, "length", 2)

    def problem(self, rng: np.random.Generator) -> Problem:
        digits = "".join(map(str, rng.integers(0, 10, self.length)))
        answer = "".join(sorted(digits))
        return Problem(f"{digits}>", answer, answer)

    @property
    def longest_answer(self) -> int:
        return self.length
