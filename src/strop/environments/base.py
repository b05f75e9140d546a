"""What an environment is: a partner of the model for more than one turn."""

import inspect
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from strop._types import Row


@dataclass
class Turn:
    """What an environment answers to a reply.

    messages   what the model reads next: messages, a text (with a chat template a message of the user's, without one a
               text as it is), or without a tokenizer token ids
    reward     of this reply
    done       the trajectory ends here; the messages are not read
    info       numbers, which are added up over a trajectory and whose means are metrics: environment/NAME
    """

    messages: Any = ()
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, float] = field(default_factory=dict)


class Environment:
    """One object for each trajectory. Both methods may be `async def`.

    class GuessANumber(Environment):
        def reset(self, row):
            self.secret = row["secret"]
            return "Guess my number from 0 to 99."
        def step(self, reply):
            right = reply.strip() == str(self.secret)
            return Turn("higher" if reply < str(self.secret) else "lower", reward=float(right), done=right)

    It may also have what a task has, for `strop train --environment`: `rows(split, limit)` and a `tokenizer`.

    tools            schemas for the chat template; None has none
    special_tokens   whether replies show special tokens as text
    stop_ids         token ids that end a turn, besides EOS and the chat template's own
    """

    tools: ClassVar[Any] = None
    special_tokens: ClassVar[bool] = False
    stop_ids: ClassVar[tuple[int, ...]] = ()

    def reset(self, row: Row) -> Any:
        """Begin with a row of the dataset; what the model reads first, as in `Turn.messages`. Here: the row's prompt."""
        if row.get("prompt") is None:
            raise ValueError(
                f"the row must have a prompt for {type(self).__name__}, which has no reset of its own, found the columns "
                f"{', '.join(map(str, row)) or '(none)'}"
            )
        return row["prompt"]

    def step(self, reply: Any) -> Any:
        """Answer what the model said: a text, without a tokenizer its token ids. Called once for every turn."""
        raise NotImplementedError(f"{type(self).__name__} has no step(reply)")


def as_turn(answer: object) -> Turn:
    """What a step returned, checked: nothing is made up where it is wrong."""
    if not isinstance(answer, Turn):
        raise TypeError(f"it must return a Turn, found {answer!r:.60}")
    if not isinstance(answer.done, (bool, np.bool_)):
        raise TypeError(f"it must return a Turn whose done is True or False, found {answer.done!r:.60}")
    reward = answer.reward.item() if hasattr(answer.reward, "item") else answer.reward
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise ValueError(f"it must return a Turn with a finite reward, found {answer.reward!r:.60}")
    if not isinstance(answer.info, Mapping):
        raise TypeError(f"it must return a Turn whose info is a dict of numbers, found {answer.info!r:.60}")
    for name, value in answer.info.items():
        if name in ("seconds", "failed_fraction"):
            raise ValueError(f"it must return a Turn whose info has other names than metrics have, found {name!r}")
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise TypeError(f"it must return a Turn whose info has finite numbers, found {name} {value!r:.60}")
    if not answer.done:
        _check_messages(answer.messages)
    return Turn(answer.messages, float(reward), bool(answer.done), {k: float(v) for k, v in answer.info.items()})


def _check_messages(messages: object) -> None:
    if isinstance(messages, Mapping) or not (messages is None or hasattr(messages, "__len__")):
        raise TypeError(f"it must return a Turn whose messages are a list, a text or ids, found {messages!r:.60}")
    if messages is None or len(messages) == 0:
        raise ValueError("it must return a Turn with messages, or one that is done, found neither")


def as_environment(environment: object) -> Any:
    """A class or function that makes an environment, checked; a class that is no Environment may have its methods."""
    if isinstance(environment, type):
        missing = [name for name in ("reset", "step") if not callable(getattr(environment, name, None))]
        if missing:
            raise TypeError(
                f"environment {environment.__name__} must have reset(row) and step(reply), found no {missing[0]}"
            )
        return environment
    if callable(environment) and not hasattr(environment, "step"):
        return environment
    raise TypeError(
        f"environment must be a class, or a function that makes one for each trajectory, found a {type(environment).__name__}"
    )


def is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function)
