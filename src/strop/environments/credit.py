"""Rewards from environments, and advantages of whole trajectories or of each turn (`credit`)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from strop._types import Row
from strop.data.batch import RewardedTurn, Trajectory
from strop.environments.play import Player
from strop.environments.tools import ToolBox
from strop.primitives import compute_batch_group_advantages
from strop.rewards import RewardError, RewardFunctions, Rewards

if TYPE_CHECKING:
    from strop.environments.recorder import Recorder


class EnvironmentRewards:
    """Adds the discounted rewards of environments, the column `environment`, to those of reward functions.

    The rewards of agents are the column `agent`.

    Tools give no rewards for turns. If their object has a `get_reward`, it is used as one more reward function.
    """

    def __init__(self, besides: RewardFunctions | None, player: "Player | Recorder"):
        self.discount = player.config.turn_discount
        self.parts = [] if besides is None else [besides]
        self.functions = [] if besides is None else besides.functions
        if isinstance(player.make, ToolBox) and player.make.gives_reward:
            self.parts.append(RewardFunctions(player.make.own_reward()))
        elif isinstance(player.make, ToolBox) and besides is None:
            raise ValueError(f"reward_fn must be given: {player.name} has tools and no get_reward(), found None")
        self.names = [player.reward_name, *(name for part in self.parts for name in part.names)]
        if len(set(self.names)) < len(self.names):
            what = player.reward_name
            raise ValueError(f"reward_fn must not be called as the {what} or {what!r}: both name rewards")

    def check(self, rows: Sequence[Row], name: str, besides: Sequence[str] = ()) -> None:
        for part in self.parts:
            part.check(rows, name, besides)

    def take_metrics(self) -> dict[str, float]:
        return {name: value for part in self.parts for name, value in part.take_metrics().items()}

    def __call__(self, rows: Mapping[str, Sequence[object]], trajectories: Sequence[Trajectory]) -> Rewards:
        for one in trajectories:
            if not one.turns and not self.parts:
                raise RewardError(
                    f"the agent must return a reward without a reward_fn, found None (row {dict(one.row)!r:.80})"
                )
        returns = [returns_of(one.turns, self.discount) for one in trajectories]
        total_B = torch.tensor([values[0] if values else 0.0 for values in returns], dtype=torch.float32)
        columns = {self.names[0]: total_B}
        for part in self.parts:
            rewards = part(rows)
            total_B, columns = total_B + rewards.total_B, columns | rewards.columns
        return Rewards(total_B, columns)


def returns_of(turns: Sequence[RewardedTurn], discount: float) -> list[float]:
    """Return the discounted reward G_t = r_t + γ·G_(t+1) from each turn on."""
    found: list[float] = []
    for turn in reversed(turns):
        found.append(turn.reward + discount * (found[-1] if found else 0.0))
    return found[::-1]


def turn_advantages(
    trajectories: Sequence[Trajectory], group_size: int, discount: float, *, scale: str, ddof: int, eps: float
) -> list[torch.Tensor]:
    """Return the advantage of every sampled token: its turn's discounted reward compared with that turn in the group.

    Rewards of reward functions count at the last turn. A turn that no other trajectory of the group reached has
    advantage 0. scale="batch" divides by the standard deviation over all turns.
    """
    returns: list[list[float]] = []
    for trajectory in trajectories:
        own = returns_of(trajectory.turns, discount)
        late, last = trajectory.reward - own[0], len(own) - 1  # late: the reward of the reward functions
        returns.append([value + discount ** (last - t) * late for t, value in enumerate(own)])
    advantages = [[0.0] * len(values) for values in returns]
    for first in range(0, len(trajectories), group_size):
        group = range(first, first + group_size)
        for turn in range(max(len(returns[i]) for i in group)):
            there = [i for i in group if turn < len(returns[i])]
            for i, value in zip(there, _centred([returns[i][turn] for i in there], scale, ddof, eps), strict=True):
                advantages[i][turn] = value
    if scale == "batch":
        spread = torch.tensor([value for values in returns for value in values]).double().std(correction=ddof).item()
        advantages = [[value / (spread + eps) for value in values] for values in advantages]
    return [
        torch.tensor(values).repeat_interleave(torch.tensor([turn.num_tokens for turn in trajectory.turns]))
        for trajectory, values in zip(trajectories, advantages, strict=True)
    ]


def _centred(values: list[float], scale: str, ddof: int, eps: float) -> list[float]:
    if len(values) < 2:
        return [0.0] * len(values)
    scale = "group" if scale == "group" and len(values) > ddof else "none"
    rewards = torch.tensor(values, dtype=torch.float64)
    return compute_batch_group_advantages(rewards, len(values), ddof=ddof, eps=eps, scale=scale).tolist()
