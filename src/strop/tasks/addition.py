"""Addition: "12+7=" → "19"."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strop.primitives._inputs import as_whole_number
from strop.tasks.base import Problem, Task


@dataclass(frozen=True)
class Addition(Task):
    """Two numbers of at most `digits` digits. a+b and b+a are in the same split."""

    name: ClassVar[str] = "addition"
    alphabet: ClassVar[str] = "0123456789+="

    digits: int = 2

    def __post_init__(self) -> None:
        if as_whole_number(self.digits, "digits", 1) > 18:
            raise ValueError(f"digits must be at most 18, found {self.digits}")

    def problem(self, rng: np.random.Generator) -> Problem:
        a, b = (int(n) for n in rng.integers(0, 10**self.digits, 2))
        return Problem(f"{a}+{b}=", str(a + b), f"{min(a, b)}+{max(a, b)}")

    @property
    def longest_answer(self) -> int:
        return self.digits + 1
