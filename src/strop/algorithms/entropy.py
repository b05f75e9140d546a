"""Entropy in policy-gradient updates: a bonus that follows a target, and tokens chosen by their entropy or covariance.

What is chosen is chosen once a step, from the tokens of all processes and by the weights before the updates. So
neither micro-batches nor the number of processes change it.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from strop._types import Json
from strop.config import EntropyConfig
from strop.config.policy_losses import PolicyRule
from strop.data.batch import Trajectory, joined
from strop.distributed import World
from strop.losses import covariance_marks


class EntropyBonus:
    """The coefficient of an entropy bonus that follows a target (Skywork-OR1, arXiv 2505.22312), as TRL 1.16 has it.

    After each update it rises by a step if the entropy is at the target or below, and else falls by it. It is applied
    only while the latest entropy is at the target or below.
    """

    def __init__(self, config: EntropyConfig, rule: PolicyRule):
        self.config, self._rule = config, rule
        self.coefficient, self.latest = rule.entropy_coef, np.inf

    @property
    def rule(self) -> PolicyRule:
        """The rule of the next update."""
        assert self.config.entropy_target is not None
        applied = self.coefficient if self.latest <= self.config.entropy_target else 0.0
        return replace(self._rule, entropy_coef=applied)

    def follow(self, entropy: float) -> None:
        """Fill `coefficient` and `latest`, given the mean entropy of an update's tokens."""
        config = self.config
        assert config.entropy_target is not None
        step = config.entropy_coef_delta if entropy <= config.entropy_target else -config.entropy_coef_delta
        self.coefficient = min(max(self.coefficient + step, config.entropy_coef_min), config.entropy_coef_max)
        self.latest = entropy

    @property
    def state(self) -> Json:
        return {"coefficient": self.coefficient, "latest": None if self.latest == np.inf else self.latest}

    @state.setter
    def state(self, values: Json) -> None:
        latest = values["latest"]
        self.coefficient, self.latest = values["coefficient"], np.inf if latest is None else latest


def keep_uncertain(trajectories: Sequence[Trajectory], quantile: float, world: World) -> None:
    """Fill advantages_t with 0 but for this share of the tokens, those with the largest entropies (arXiv 2506.01939)."""
    own_N = joined([one.entropies_t for one in trajectories if one.entropies_t is not None]).double().cpu().numpy()
    entropies_N = np.concatenate(world.gathered(own_N))
    if not len(entropies_N):
        return
    least = float(np.quantile(entropies_N, 1 - quantile))
    for one in trajectories:
        assert one.entropies_t is not None
        assert one.advantages_t is not None
        one.advantages_t = one.advantages_t * (one.entropies_t.double().cpu() >= least)


def mark_covariant(trajectories: Sequence[Trajectory], rule: PolicyRule, seed: int, world: World) -> None:
    """Fill marked_t by `covariance_marks` of all tokens' log-probs before the updates."""
    logps = [one.old_logps_t for one in trajectories if one.old_logps_t is not None]
    advantages = [one.advantages_t for one in trajectories if one.advantages_t is not None]
    own = [joined(rows).double().cpu() for rows in (logps, advantages)]
    everywhere = world.gathered(own)
    logps_1N, advantages_1N = (torch.cat([part[i] for part in everywhere])[None] for i in (0, 1))
    marked_N = covariance_marks(logps_1N, advantages_1N, None, rule=rule, seed=seed)[0]
    start = sum(len(part[0]) for part in everywhere[: world.rank])
    lengths = [len(logps_t) for logps_t in logps]
    for one, marked_t in zip(trajectories, marked_N[start : start + len(own[0])].split(lengths), strict=True):
        one.marked_t = marked_t
