"""Products of three-digit numbers, with a calculator to call: SmolLM2-135M cannot do them in its head.

A class whose public methods are tools, as TRL's environment_factory has them; rewards are functions.
"""

import random
import re

from strop.tasks import split_of

# One solved problem shows how a call is written. At temperature 1 the untrained model then makes a call that works in 3% of
# its answers, which is where learning starts; with a problem of two digits it never did, with two of three it is 40%.
EXAMPLE = [
    {"role": "user", "content": "What is 312 * 434?"},
    {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "multiply", "arguments": {"a": 312, "b": 434}}\n</tool_call>',
    },
    {"role": "tool", "content": "135408"},
    {"role": "assistant", "content": "135408"},
]


class Calculator:
    @staticmethod
    def rows(split="train", limit=None, *, seed=0):
        """So many different problems (by default 4000); one in ten of all there are is held out."""
        rng, found = random.Random(f"{split}/{seed}"), {}
        while len(found) < (4000 if limit is None else limit):
            a, b = rng.randint(100, 999), rng.randint(100, 999)
            if split_of(f"{min(a, b)}*{max(a, b)}") == split and {a, b} != {312, 434}:
                prompt = [*EXAMPLE, {"role": "user", "content": f"What is {a} * {b}?"}]
                found[a, b] = {"prompt": prompt, "answer": str(a * b)}
        return list(found.values())

    def reset(self, **row):
        """Nothing to prepare."""

    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: the first number
            b: the second number
        """
        return a * b


def right(completions, answer):
    """1 where the last number the model said is the product."""
    said = [re.findall(r"\d+", text.replace(",", "")) for text in completions]
    return [float(bool(numbers) and numbers[-1] == wanted) for numbers, wanted in zip(said, answer, strict=True)]


def called(replies):
    """1 where a call was answered with a number, 0.3 where one was tried."""
    answers = [[m["content"] for m in messages if m["role"] == "tool"] for messages in replies]
    return [1.0 if any(map(str.isdigit, texts)) else 0.3 if texts else 0.0 for texts in answers]
