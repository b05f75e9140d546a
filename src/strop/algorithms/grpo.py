"""GRPO: reinforcement learning from rewards compared within a group (arXiv 2402.03300), and its relatives.

A step: sample group_size completions of each prompt; reward them; compute each completion's advantage, its reward
relative to its group; score them with the frozen reference; then make one or several updates on

    policy_loss(log π, log π_old, advantages) + kl_coef·KL(π ‖ π_ref)

with the formulas of `strop.losses.policy_loss`. log π_old are the log-probs the completions were sampled with.

B completions, P prompts, T tokens. Completions of a prompt are adjacent.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from strop.algorithms.on_policy import PolicyGradient, WholeBatch, check_rewarded, sampled_and_trained
from strop.config import GRPOConfig
from strop.data.batch import Trajectory, joined
from strop.environments.credit import turn_advantages
from strop.models import unwrapped
from strop.models.routing import Routers
from strop.primitives import compute_batch_group_advantages
from strop.training.trainer import Mean, Metrics


class GRPO(PolicyGradient):
    """Group-relative policy optimisation.

    grpo = GRPO(model=model, reward_fn=reward_fn, group_size=8, kl_coef=0.04, learning_rate=1e-6, max_new_tokens=128)
    metrics = grpo.train_step(prompts)          # or grpo.train(dataset)

    reward_fn     a function or several; see `strop.rewards`
    environment   a class of `strop.environments` for several turns; its rewards are added to reward_fn's
    tools         functions the model may call, instead of an environment
    agent         function(row, client) that talks to the model over HTTP; see `strop.environments.recorder`
    """

    Config = GRPOConfig
    config: GRPOConfig

    def __init__(
        self, *, reward_fn: object = None, environment: object = None, tools: object = None, agent: object = None,
        **arguments: Any,
    ):  # fmt: skip
        check_rewarded("GRPO", arguments, "a reward_fn, an environment or an agent", reward_fn, environment, agent)
        super().__init__(reward_fn=reward_fn, environment=environment, tools=tools, agent=agent, **arguments)
        if self.player is not None and self.config.replay_routing:
            raise ValueError("replay_routing must be False with an environment, tools or an agent, found True")
        by_turn = self.player is not None and self.config.turns.credit == "turn"
        if by_turn and self.config.advantage_scale == "batch" and self.world.size > 1:
            raise ValueError('advantage_scale must be "group" or "none" with credit="turn" in several processes')

    def setup(self, ref_model: object) -> None:
        if self.config.replay_routing and isinstance(self.policy.routers, str):  # checked before weights are sharded
            name = type(unwrapped(self.policy.model)).__name__
            raise ValueError(f"replay_routing must be False for this {name}: {self.policy.routers}")
        super().setup(ref_model)

    def resample(
        self, trajectories: list[Trajectory], prompts: Sequence[Trajectory], addresses: Sequence[int], step: int
    ) -> Metrics:
        """Replace groups whose rewards are all equal; return their share before that.

        Their prompts are sampled again up to resample_rounds times. Then, with fill_batch, further prompts take their places.
        """
        config, size = self.config, self.config.group_size
        fill_rounds = config.fill_rounds if config.fill_batch else 0
        if not config.resample_rounds + fill_rounds:
            return {}
        self.reward(trajectories)
        metrics: Metrics = {"reward/resampled_fraction": self._fraction_without_signal(trajectories)}
        prompts, num_further = list(prompts), 0
        for attempt in range(1, config.resample_rounds + fill_rounds + 1):
            again = without_signal(trajectories, size).nonzero().flatten().tolist()
            everywhere = [addresses[i] for i in again]
            if self.queue is None:
                everywhere = self.of_all(everywhere)
            if not everywhere:  # all processes continue while one has to: they may share a server
                break
            if attempt > config.resample_rounds:
                further = dict(zip(everywhere, self.further_prompts(len(everywhere)), strict=False))
                again = [i for i in again if addresses[i] in further]
                num_further += len(further)
                for i in again:
                    prompts[i] = further[addresses[i]]
            new = self.draw([prompts[i] for i in again], [addresses[i] for i in again], step, attempt)
            self.reward(new)
            for number, group in enumerate(again):
                trajectories[group * size : (group + 1) * size] = new[number * size : (number + 1) * size]
        return metrics | ({"reward/further_prompts": float(num_further)} if fill_rounds else {})

    def further_prompts(self, num_prompts: int) -> list[Trajectory]:
        """Return the next prompts of the dataset, the same in every process; [] outside train()."""
        found: list[Trajectory] = []
        while len(found) < num_prompts and (
            more := self.run.take(self.state, self.config.run, num_prompts - len(found))
        ):
            found += more if isinstance(more[0], Trajectory) else self.prepare(more, "rows")
        return found

    def advantages(self, trajectories: Sequence[Trajectory], batch: WholeBatch) -> None:
        """Fill advantages_t; with importance_cap also importance_t."""
        config = self.config
        assert batch.rewards is not None
        lengths = [length for length, *_ in batch.ends[batch.first : batch.first + len(trajectories)]]
        if config.turns.credit == "turn" and self.player is not None:
            found = turn_advantages(
                trajectories, config.group_size, config.turns.turn_discount, scale=config.advantage_scale,
                ddof=config.advantage_ddof, eps=config.advantage_eps,
            )  # fmt: skip
            advantages_N = joined(found)
        else:
            rewards_B = batch.rewards.total_B
            # in float64, so that float32 rewards give the nearest float32
            of = _advantages_of_known if rewards_B.isnan().any() else compute_batch_group_advantages
            found_B = of(
                rewards_B.double().numpy(), config.group_size, ddof=config.advantage_ddof, eps=config.advantage_eps,
                scale=config.advantage_scale,
            )  # fmt: skip
            advantages_B = torch.from_numpy(found_B).to(rewards_B.dtype)
            own_B = advantages_B[batch.first : batch.first + len(trajectories)]
            advantages_N = own_B.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
        sequences = [one for first in trajectories for one in (first, *first.others)]
        lengths = [one.rollout_logps_t.size(0) for one in sequences if one.rollout_logps_t is not None]
        for sequence, advantages_t in zip(sequences, advantages_N.split(lengths), strict=True):
            sequence.advantages_t = advantages_t
        if config.replay_routing and isinstance(routers := self.policy.routers, Routers):
            routers.counts.clear()  # drop the counts of other forwards than the updates'
        if config.importance_cap is not None:
            self._weigh_by_importance(sequences, lengths, config.importance_cap)

    def _weigh_by_importance(
        self, trajectories: Sequence[Trajectory], lengths: list[int], cap: float | tuple[float, float]
    ) -> None:
        """Fill importance_t with π_old/π_rollout, truncated to the bounds or masked outside of them."""
        low, high = cap if isinstance(cap, (tuple, list)) else (0.0, cap)
        sampled_N, trained_N = sampled_and_trained(trajectories)
        ratios_N = (trained_N - sampled_N).exp()
        weights_N = ratios_N.clamp(low, high)
        if self.config.importance_mode == "mask":
            weights_N = ratios_N.masked_fill(weights_N != ratios_N, 0.0)
        for trajectory, importance_t in zip(trajectories, weights_N.split(lengths), strict=True):
            trajectory.importance_t = importance_t

    def metrics_of(self, trajectories: Sequence[Trajectory]) -> Metrics:
        """Return the share of groups without signal; with replay_routing also how often routers would choose other
        experts.
        """
        metrics = {"reward/zero_std_fraction": self._fraction_without_signal(trajectories)}
        if self.config.replay_routing and isinstance(routers := self.policy.routers, Routers):
            counts_2: Any = torch.stack(routers.counts).sum(0) if routers.counts else (0, 0)
            metrics["routing/changed_fraction"] = Mean(*counts_2)
        return metrics

    def _fraction_without_signal(self, trajectories: Sequence[Trajectory]) -> Mean:
        without_P = without_signal(trajectories, self.config.group_size)
        return Mean(int(without_P.sum()), len(without_P))


def without_signal(trajectories: Sequence[Trajectory], group_size: int) -> torch.Tensor:
    """Return [P] bool: True where all rewards of a group are equal, so that its advantages are 0."""
    groups_PG = torch.tensor([one.reward for one in trajectories]).view(-1, group_size)
    smallest_P = groups_PG.nan_to_num(nan=torch.inf).amin(1)  # NaN: a reward that failed
    return groups_PG.nan_to_num(nan=-torch.inf).amax(1) <= smallest_P


def _advantages_of_known(rewards_B: np.ndarray, group_size: int, *, ddof: int, eps: float, scale: str) -> np.ndarray:
    """Return [B] advantages where some rewards are NaN, which failed: 0 for those, and the others' without them."""
    found_B = np.zeros_like(rewards_B)
    for start in range(0, len(rewards_B), group_size):
        there = start + np.flatnonzero(~np.isnan(rewards_B[start : start + group_size]))
        if len(there) > max(ddof, 1):
            own = "group" if scale == "group" else "none"
            found_B[there] = compute_batch_group_advantages(rewards_B[there], len(there), ddof=ddof, eps=eps, scale=own)
    known_N = rewards_B[~np.isnan(rewards_B)]
    return found_B / (known_N.std(ddof=ddof) + eps) if scale == "batch" and len(known_N) > ddof else found_B
