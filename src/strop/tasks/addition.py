"""Addition: "12+7=" → "19"."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strop._checks import as_count
from strop.tasks.base import Problem, Task

DIGITS = "0123456789"


@dataclass(frozen=True)
class Addition(Task):
    """The sum of two numbers of at most `digits` digits. a+b and b+a are in the same split.

    form   the prompt, with {a} and {b}; "{a} + {b} =" suits models that were pretrained mostly on this form
    """

    name: ClassVar[str] = "addition"

    digits: int = 2
    form: str = "{a}+{b}="

    def __post_init__(self) -> None:
        if as_count(self.digits, "digits", 1) > 18:
            raise ValueError(f"digits must be at most 18, found {self.digits}")
        if any(self.form.count(field) != 1 for field in ("{a}", "{b}")):
            raise ValueError(f"form must have {{a}} and {{b}} once each, found {self.form!r}")

    @property
    def alphabet(self) -> str:
        between = self.form.replace("{a}", "").replace("{b}", "")
        return DIGITS + "".join(c for c in dict.fromkeys(between) if c not in DIGITS)

    def problem(self, rng: np.random.Generator) -> Problem:
        a, b = (int(n) for n in rng.integers(0, 10**self.digits, 2))
        prompt = self.form.replace("{a}", str(a)).replace("{b}", str(b))
        return Problem(prompt, str(a + b), f"{min(a, b)}+{max(a, b)}")

    @property
    def longest_answer(self) -> int:
        return self.digits + 1
