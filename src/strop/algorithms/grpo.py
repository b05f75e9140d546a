"""GRPO: reinforcement learning from rewards compared within a group (arXiv 2402.03300), and its relatives.

A step: sample group_size completions of each prompt; reward them; compute each completion's advantage, its reward
relative to its group; score them with the frozen reference; then make one or several updates on

    policy_loss(log π, log π_old, advantages) + kl_coef·KL(π ‖ π_ref)

with the formulas of `strop.losses.policy_loss`. log π_old are the log-probs the completions were sampled with.

B completions, P prompts, T tokens. Completions of a prompt are adjacent.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from strop.algorithms.on_policy import PolicyGradient, WholeBatch, check_rewarded, sampled_and_trained
from strop.config import GRPOConfig
from strop.config.on_policy import WITH_STD
from strop.data.batch import Trajectory, joined
from strop.environments.credit import turn_advantages
from strop.losses.importance import Sequences, accepted, bounded_weights
from strop.models import unwrapped
from strop.models.routing import Routers
from strop.primitives import compute_batch_group_advantages, compute_group_advantages, compute_pass_at_k_advantages
from strop.rewards import Rewards
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
        self._importance: Metrics = {}

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
            again = self._without_signal(trajectories).nonzero().flatten().tolist()
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
        """Fill advantages_t; with importance_cap or importance_reject also importance_t."""
        config = self.config
        assert batch.rewards is not None
        if config.turns.credit == "turn" and self.player is not None:
            found = turn_advantages(
                trajectories, config.group_size, config.turns.turn_discount, scale=config.group_scale,
                ddof=config.advantage_ddof, eps=config.advantage_eps,
            )  # fmt: skip
            advantages_N = joined(found)
        else:
            lengths_B = self.loss_tokens(batch) if config.advantage.startswith("reinforce") else []
            found_B = advantages_of(config, batch.rewards, np.array(lengths_B, dtype=np.int64))
            advantages_B = torch.from_numpy(found_B).to(batch.rewards.total_B.dtype)
            own = slice(batch.first, batch.first + len(trajectories))
            num_tokens_B = torch.tensor([length for length, *_ in batch.ends[own]], dtype=torch.int64)
            advantages_N = advantages_B[own].repeat_interleave(num_tokens_B)
        sequences = [one for first in trajectories for one in (first, *first.others)]
        lengths = [one.rollout_logps_t.size(0) for one in sequences if one.rollout_logps_t is not None]
        for sequence, advantages_t in zip(sequences, advantages_N.split(lengths), strict=True):
            sequence.advantages_t = advantages_t
        if config.replay_routing and isinstance(routers := self.policy.routers, Routers):
            routers.counts.clear()  # drop the counts of other forwards than the updates'
        if config.importance_cap is not None or config.importance_reject is not None:
            self._weigh_by_importance(sequences, lengths)

    def _weigh_by_importance(self, trajectories: Sequence[Trajectory], lengths: list[int]) -> None:
        """Fill importance_t with π_old/π_rollout within the bounds of importance_cap, and 0 for what is rejected."""
        config = self.config
        sampled_N, trained_N = sampled_and_trained(trajectories)
        log_ratio_N = trained_N - sampled_N
        sequences, weights_N = Sequences(lengths, log_ratio_N.device), torch.ones_like(log_ratio_N)
        self._importance = {}
        if (cap := config.importance_cap) is not None:
            low, high = cap if isinstance(cap, (tuple, list)) else (0.0, cap)
            by_sequence = config.importance_mode.startswith("sequence")
            ratios_N = (sequences.reduced(log_ratio_N, "seq_sum") if by_sequence else log_ratio_N).exp()
            weights_N = bounded_weights(ratios_N, low, high, config.importance_mode)
            self._importance["importance/capped_fraction"] = Mean((weights_N != ratios_N).sum(), len(weights_N))
        if config.importance_reject is not None:
            assert config.importance_reject_bounds is not None
            kept_N = accepted(log_ratio_N, sequences, config.importance_reject, config.importance_reject_bounds)
            weights_N = weights_N.masked_fill(~kept_N, 0.0)
            self._importance["importance/rejected_fraction"] = Mean((~kept_N).sum(), len(kept_N))
        self._importance["importance/mean"] = Mean(weights_N.sum(dtype=self.sum_dtype), len(weights_N))
        for trajectory, importance_t in zip(trajectories, weights_N.split(lengths), strict=True):
            trajectory.importance_t = importance_t

    def metrics_of(self, trajectories: Sequence[Trajectory]) -> Metrics:
        """Return the share of groups without signal; with replay_routing also how often routers would choose other
        experts.
        """
        metrics = {"reward/zero_std_fraction": self._fraction_without_signal(trajectories), **self._importance}
        if self.config.replay_routing and isinstance(routers := self.policy.routers, Routers):
            counts_2: Any = torch.stack(routers.counts).sum(0) if routers.counts else (0, 0)
            metrics["routing/changed_fraction"] = Mean(*counts_2)
        return metrics

    def _without_signal(self, trajectories: Sequence[Trajectory]) -> torch.Tensor:
        return without_signal(trajectories, self.config.group_size, each=self.config.advantage == "gdpo")

    def _fraction_without_signal(self, trajectories: Sequence[Trajectory]) -> Mean:
        without_P = self._without_signal(trajectories)
        return Mean(int(without_P.sum()), len(without_P))


def without_signal(trajectories: Sequence[Trajectory], group_size: int, each: bool = False) -> torch.Tensor:
    """Return [P] bool: True where all rewards of a group are equal, with `each` those of every function."""
    rewards = [list(one.rewards.values()) if each else [one.reward] for one in trajectories]
    groups_PGK = torch.tensor(rewards).view(-1, group_size, len(rewards[0]) if rewards else 1)
    smallest_PK = groups_PGK.nan_to_num(nan=torch.inf).amin(1)  # NaN: a reward that failed
    return (groups_PGK.nan_to_num(nan=-torch.inf).amax(1) <= smallest_PK).all(1)


def advantages_of(config: GRPOConfig, rewards: Rewards, lengths_B: np.ndarray) -> np.ndarray:
    """Return the advantage of each completion, [B] float64; 0 where the reward is NaN, which failed.

    lengths_B   number of loss tokens, for reinforce++, which counts each token once
    """
    std: Any = {"ddof": config.advantage_ddof, "eps": config.advantage_eps}
    total_B = rewards.total_B.double().numpy()  # in float64, so that float32 rewards give the nearest float32
    known_B = ~np.isnan(total_B)
    scale = {"scale": config.group_scale} | (std if config.advantage in WITH_STD else {})
    if config.advantage == "reinforce++":
        return compute_group_advantages(np.where(known_B, total_B, 0.0), lengths=lengths_B, **std)
    if config.advantage == "pass@k":
        return _by_group(total_B, known_B, config.group_size, _best_of, k=config.pass_k or config.group_size)
    if config.advantage == "gdpo":
        weights = config.reward_weights or [1.0] * len(rewards.columns)
        columns = (column_B.double().numpy() for column_B in rewards.columns.values())
        each = [_by_group(column_B, known_B, config.group_size, **scale) for column_B in columns]
        sum_B = sum(weight * found_B for weight, found_B in zip(weights, each, strict=True))
        return compute_group_advantages(sum_B, lengths=known_B.astype(np.int64), **std)
    found_B = _by_group(total_B, known_B, config.group_size, **scale)
    if config.advantage == "reinforce++_baseline":
        return compute_group_advantages(found_B, lengths=lengths_B, **std)
    return found_B


def _by_group(
    rewards_B: np.ndarray, known_B: np.ndarray, group_size: int,
    of: Callable[..., np.ndarray] = compute_batch_group_advantages, **options: Any,
) -> np.ndarray:  # fmt: skip
    """Return [B] advantages `of` the groups; where rewards are unknown, 0 for those, and the others' without them."""
    if known_B.all():
        return of(rewards_B, group_size, **options)
    by_batch = options.get("scale") == "batch"
    found_B = np.zeros_like(rewards_B)
    for start in range(0, len(rewards_B), group_size):
        there = start + np.flatnonzero(known_B[start : start + group_size])
        if len(there) > max(options.get("ddof", 0), 1):
            found_B[there] = of(rewards_B[there], len(there), **options | ({"scale": "none"} if by_batch else {}))
    if by_batch and known_B.sum() > options["ddof"]:
        found_B /= rewards_B[known_B].std(ddof=options["ddof"]) + options["eps"]
    return found_B


def _best_of(rewards: np.ndarray, group_size: int, *, k: int) -> np.ndarray:
    """Return advantages for pass@k; of fewer than k completions, for the best of all."""
    return compute_pass_at_k_advantages(rewards, group_size, k=min(k, group_size))
