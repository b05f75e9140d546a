"""Products of three-digit numbers, with a calculator to call. SmolLM2-135M cannot do them in its head."""

import random
import re

from strop.environments.tools import ToolBox
from strop.tasks import split_of


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a * b


EXAMPLE = [
    {"role": "user", "content": "What is 12 * 34?"},
    {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "multiply", "arguments": {"a": 12, "b": 34}}\n</tool_call>',
    },
    {"role": "tool", "content": "408"},
    {"role": "assistant", "content": "408"},
]


def rows(split="train", limit=1000, seed=0):
    """Different problems; one in ten is held out."""
    rng, found = random.Random(f"{split}/{seed}"), {}
    while len(found) < limit:
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        if split_of(f"{min(a, b)}*{max(a, b)}") == split:
            found[a, b] = {
                "prompt": [*EXAMPLE, {"role": "user", "content": f"What is {a} * {b}?"}],
                "answer": str(a * b),
            }
    return list(found.values())


def right(completions, answer):
    """1 where the last number the model said is the product."""
    said = [re.findall(r"\d+", text.replace(",", "")) for text in completions]
    return [float(bool(numbers) and numbers[-1] == wanted) for numbers, wanted in zip(said, answer, strict=True)]


__all__ = ["ToolBox", "multiply", "right", "rows"]
