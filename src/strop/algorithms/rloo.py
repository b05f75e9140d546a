"""RLOO: REINFORCE with a leave-one-out baseline (arXiv 2402.14740), a form of GRPO."""

from strop.algorithms.grpo import GRPO
from strop.config import RLOOConfig


class RLOO(GRPO):
    """GRPO whose baseline is the mean reward of the prompt's other completions, and whose loss divides by no length.

    rloo = RLOO(model=model, reward_fn=reward_fn, group_size=4, learning_rate=1e-6, max_new_tokens=128)
    """

    Config = RLOOConfig
