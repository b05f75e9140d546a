"""The base class of tasks: seeded rows, a train/test split that does not depend on the seed, an exact reward."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np

from strop._checks import as_count, check_choice
from strop.tasks.tokenizer import CharTokenizer

SPLITS = ("train", "test")
TEST_SHARE = 10  # one problem in ten is held out
DEFAULT_ROWS = 1000
PATIENCE = 100  # stop after this many draws without a new problem, times the number of problems found


class Problem(NamedTuple):
    """A prompt and its answer. `key` decides the split; equivalent problems (2+3 and 3+2) have the same key."""

    prompt: str
    answer: str
    key: str


@dataclass(frozen=True)
class Task(ABC):
    """A family of problems with one right answer each; the fields of a subclass set the difficulty.

    The hash of a problem's key decides its split, so train and test never overlap, whatever the seeds and sizes.
    """

    name: ClassVar[str]

    @property
    @abstractmethod
    def alphabet(self) -> str:
        """All characters of the task's prompts and answers."""

    @abstractmethod
    def problem(self, rng: np.random.Generator) -> Problem:
        """Return a random problem, of either split."""

    @property
    @abstractmethod
    def longest_answer(self) -> int:
        """The length of the longest answer in characters."""

    @property
    def max_new_tokens(self) -> int:
        """The number of tokens of the longest answer and its EOS."""
        return self.longest_answer + 1

    @cached_property
    def tokenizer(self) -> CharTokenizer:
        return CharTokenizer(self.alphabet)

    def rows(self, split: str = "train", limit: int | None = None, *, seed: int = 0) -> list[dict[str, str]]:
        """Return `limit` different problems of a split, as {"prompt", "answer", "completion"}; the last two are equal.

        limit   None is 1000, or all problems if there are fewer
        """
        check_choice(split, "split", SPLITS)
        wanted = DEFAULT_ROWS if limit is None else as_count(limit, "limit", 1)
        rng = np.random.default_rng([as_count(seed, "seed", 0), SPLITS.index(split)])
        found: dict[str, str] = {}
        fruitless = 0
        while len(found) < wanted and fruitless < PATIENCE * (len(found) + PATIENCE):
            problem = self.problem(rng)
            fruitless += 1
            if split_of(problem.key) == split and problem.prompt not in found:
                found[problem.prompt] = problem.answer
                fruitless = 0
        if limit is not None and len(found) < wanted:
            raise ValueError(f"limit must be at most {len(found)}, all {split} problems of {self}, found {limit}")
        return [{"prompt": prompt, "answer": answer, "completion": answer} for prompt, answer in found.items()]

    def reward(self, completions: Sequence[str], answer: Sequence[str]) -> list[float]:
        """Return 1 for each completion that equals its answer (apart from spaces around it), else 0."""
        return exact_match(completions, answer)


def split_of(key: str) -> str:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "little") % TEST_SHARE == 0 else "train"


def exact_match(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    if len(completions) != len(answer):
        raise ValueError(f"answer must hold one answer per completion ({len(completions)}), found {len(answer)}")
    return [float(_as_text(completion).strip() == right) for completion, right in zip(completions, answer, strict=True)]


def _as_text(completion: object) -> str:
    """Return the completion as text: the text itself, or the last message of a conversation."""
    if isinstance(completion, list) and completion and isinstance(completion[-1], dict):
        completion = completion[-1].get("content")
    if not isinstance(completion, str):
        hint = "give the algorithm the task's tokenizer"
        raise TypeError(f"completions must be texts, found {type(completion).__name__}: {hint}")
    return completion
