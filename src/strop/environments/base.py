"""`Environment`, the model's partner in conversations of several turns, and `Turn`, its answer."""

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
    """An environment's answer to a reply.

    messages   messages or a text that the model reads next, or token ids without a tokenizer. With a chat template a
               text becomes a user message.
    reward     the reward of this reply
    done       the trajectory ends here; the messages are not read
    info       numbers, summed over a trajectory; their means are the metrics environment/NAME
    """

    messages: Any = ()
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, float] = field(default_factory=dict)


class Environment:
    """A partner of the model: one object for each trajectory. Both methods may be `async def`.

    class GuessANumber(Environment):
        def reset(self, row):
            self.secret = row["secret"]
            return "Guess my number from 0 to 99."
        def step(self, reply):
            right = reply.strip() == str(self.secret)
            return Turn("higher" if reply < str(self.secret) else "lower", reward=float(right), done=right)

    For `strop train --environment` it may also have `rows(split, limit)` and a `tokenizer`, as tasks do.

    tools            schemas for the chat template; None: no tools
    special_tokens   True if replies show special tokens as text
    stop_ids         token ids that end a turn, besides EOS and those of the chat template
    """

    tools: ClassVar[Any] = None
    special_tokens: ClassVar[bool] = False
    stop_ids: ClassVar[tuple[int, ...]] = ()

    def reset(self, row: Row) -> Any:
        """Begin with a row of the dataset; return what the model reads first, in the form of `Turn.messages`.

        Without an override this is the row's prompt.
        """
        if row.get("prompt") is None:
            found = f"found the columns {', '.join(map(str, row)) or '(none)'}"
            raise ValueError(f"the row must have a prompt for {type(self).__name__}, which has no reset, {found}")
        return row["prompt"]

    def step(self, reply: Any) -> Any:
        """Answer the model's reply: a text, or token ids without a tokenizer. Called once for every turn."""
        raise NotImplementedError(f"{type(self).__name__} has no step(reply)")


def as_turn(answer: object) -> Turn:
    """Check what a step returned, and return it with plain Python numbers."""
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
            raise ValueError(f"it must return a Turn whose info does not use the reserved name {name!r}")
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise TypeError(f"it must return a Turn whose info has finite numbers, found {name} {value!r:.60}")
    if not answer.done:
        _check_messages(answer.messages)
    return Turn(answer.messages, float(reward), bool(answer.done), {k: float(v) for k, v in answer.info.items()})


def _check_messages(messages: object) -> None:
    if isinstance(messages, Mapping) or not (messages is None or hasattr(messages, "__len__")):
        raise TypeError(f"it must return a Turn whose messages are a list, a text or ids, found {messages!r:.60}")
    if messages is None or len(messages) == 0:
        raise ValueError("it must return a Turn that has messages or is done, found neither")


def as_environment(environment: object) -> Any:
    """Check that this is a class with the methods of an environment, or a function that makes one; return it."""
    if isinstance(environment, type):
        missing = [name for name in ("reset", "step") if not callable(getattr(environment, name, None))]
        if missing:
            wanted = "reset(row) and step(reply)"
            raise TypeError(f"environment {environment.__name__} must have {wanted}, found no {missing[0]}")
        return environment
    if callable(environment) and not hasattr(environment, "step"):
        return environment
    wanted = "a class, or a function that makes one for each trajectory"
    raise TypeError(f"environment must be {wanted}, found a {type(environment).__name__}")


def is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function)
