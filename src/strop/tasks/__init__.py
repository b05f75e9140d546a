"""Verifiable tasks that need no download: seeded problems, splits without overlap, exact rewards, matching tokenizers.

    task = strop.tasks.get("sorting", length=5)
    train, test = task.rows("train", 1000, seed=0), task.rows("test", 200, seed=0)
    GRPO(model=model, tokenizer=task.tokenizer, reward_fn=task.reward, max_new_tokens=task.max_new_tokens).train(train)

They need only NumPy. `get("reasoning_gym:NAME")` is a dataset of the optional package reasoning-gym as a task.
"""

from dataclasses import fields
from typing import Any

from strop._checks import did_you_mean
from strop.tasks.addition import Addition as Addition
from strop.tasks.base import SPLITS as SPLITS
from strop.tasks.base import Task as Task
from strop.tasks.base import split_of as split_of
from strop.tasks.brackets import Brackets as Brackets
from strop.tasks.reasoning_gym import ReasoningGym as ReasoningGym
from strop.tasks.sorting import Sorting as Sorting
from strop.tasks.tokenizer import CharTokenizer as CharTokenizer

TASKS: dict[str, type[Task]] = {task.name: task for task in (Addition, Sorting, Brackets)}
GYM = "reasoning_gym:"


def available_tasks() -> list[str]:
    return list(TASKS)


def get(name: str, **options: Any) -> Any:
    """Return the task with this name; options are its fields, such as digits=3 for addition.

    "reasoning_gym:leg_counting" is reasoning-gym's dataset of that name.
    """
    if name.startswith(GYM):
        return ReasoningGym(name.removeprefix(GYM), **options)
    if name not in TASKS:
        near = did_you_mean(name, TASKS, " ({})")
        raise ValueError(f"unknown task {name!r}{near}; there are {', '.join(TASKS)}")
    known = [field.name for field in fields(TASKS[name])]
    for option in options:
        if option not in known:
            near = did_you_mean(option, known, " ({})")
            raise ValueError(f"unknown option {option!r} of task {name!r}{near}; there are {', '.join(known)}")
    return TASKS[name](**options)


load_task = get
