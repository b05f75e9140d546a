"""Rewards for sums: `strop train grpo --reward examples/rewards/arithmetic.py:right_number`."""

import re


def right_number(completions, answer):
    """1 where the last number of the completion is the answer."""
    return [float(re.findall(r"-?\d+", text)[-1:] == [right]) for text, right in zip(completions, answer, strict=True)]


def nothing_else(completions):
    """1 for a completion that is a number and nothing else."""
    return [float(re.fullmatch(r"\s*-?\d+\.?\s*", text) is not None) for text in completions]
