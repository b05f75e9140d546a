"""Verifiable tasks that need no download: seeded problems, splits without overlap, exact rewards, a tokenizer to match.

    task = strop.tasks.get("sorting", length=5)
    train, test = task.rows("train", 1000, seed=0), task.rows("test", 200, seed=0)
    GRPO(model=model, tokenizer=task.tokenizer, reward_fn=task.reward, max_new_tokens=task.max_new_tokens).train(train)

NumPy only. `get("reasoning_gym:NAME")` is a dataset of the package reasoning-gym, an extra, in the same clothes.
"""

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from strop.tasks.addition import Addition
from strop.tasks.base import SPLITS, Task, split_of
from strop.tasks.brackets import Brackets
from strop.tasks.reasoning_gym import ReasoningGym
from strop.tasks.sorting import Sorting
from strop.tasks.tokenizer import CharTokenizer

TASKS: dict[str, type[Task]] = {task.name: task for task in (Addition, Sorting, Brackets)}
GYM = "reasoning_gym:"

__all__ = [
    "SPLITS",
    "TASKS",
    "Addition",
    "Brackets",
    "CharTokenizer",
    "ReasoningGym",
    "Sorting",
    "Task",
    "available_tasks",
    "get",
    "load_task",
    "split_of",
]


def available_tasks() -> list[str]:
    return list(TASKS)


def get(name: str, **options: Any) -> Any:
    """The task of this name; options are its fields, such as digits=3 for addition.

    "reasoning_gym:leg_counting" is reasoning-gym's dataset of that name.
    """
    if name.startswith(GYM):
        return ReasoningGym(name.removeprefix(GYM), **options)
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}{_nearest(name, TASKS)}; there are {', '.join(TASKS)}")
    known = [field.name for field in fields(TASKS[name])]
    for option in options:
        if option not in known:
            raise ValueError(
                f"unknown option {option!r} of task {name!r}{_nearest(option, known)}; there are {', '.join(known)}"
            )
    return TASKS[name](**options)


load_task = get


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
