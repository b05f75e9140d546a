"""GRPO: reinforcement learning from rewards compared within a group (arXiv 2402.03300), and its relatives.

A step: sample group_size completions of each prompt; reward them; the advantage of a completion is its reward relative
to its group; score them with the frozen reference; then one or several updates on

    policy_loss(log π, log π_old, advantages) + kl_coef·KL(π ‖ π_ref)

with the formulas of `strop.losses.policy_loss`. log π_old are the log-probs the completions were sampled with.

B completions, P prompts, T tokens. Completions of a prompt are adjacent.
"""

import functools
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from strop import _trl
from strop.config import GRPOConfig
from strop.data.batch import TokenBatch, Trajectory, joined, on_device
from strop.data.inputs import Prompt, as_prompts, prompts_of_dataset, repeated, reward_rows
from strop.environments.credit import EpisodeRewards, turn_advantages
from strop.environments.of_trainer import checked_rows, player, rows_of
from strop.losses import PolicyLoss, kl_estimate
from strop.models import unwrapped
from strop.models.routing import Routers
from strop.primitives import compute_batch_group_advantages
from strop.rewards import RewardFunctions, Rewards, sample_table
from strop.rollout import ENDED, Rollout, Sampling, checked_prompts, completion_metrics
from strop.rollout.sampler import sampler
from strop.training.state import Largest, Mean
from strop.training.trainer import Trainer


@dataclass
class Experience:
    """A rollout with all that its updates need. Per completion of this process; log-probs and weights are 1-D, one a token.

    counted     of every completion of the batch, also those of other processes: its tokens that count, 0 where it counts
                for nothing (truncated, if those are masked)
    first       which of them is this process's first
    per_token   advantages of tokens, where turns have their own; None: advantages_B
    ref_logps   None without a reference
    weights     of truncated importance sampling; None weights nothing
    """

    rollout: Rollout
    advantages_B: torch.Tensor
    counted: list[int]
    old_logps: list[torch.Tensor]
    ref_logps: list[torch.Tensor] | None = None
    weights: list[torch.Tensor] | None = None
    first: int = 0
    per_token: list[torch.Tensor] | None = None

    @functools.cached_property
    def trajectories(self) -> list[Trajectory]:
        return self.rollout.trajectories

    def __len__(self) -> int:
        return len(self.rollout)

    def own(self, indices: Sequence[int]) -> list[int]:
        """Of these completions of the batch those of this process that count, by their number here."""
        return [i - self.first for i in indices if 0 <= i - self.first < len(self) and self.counted[i]]

    def num_tokens(self, part: Sequence[int]) -> int:
        """Tokens that count among these of this process."""
        return sum(self.counted[self.first + i] for i in part)


class Scores(NamedTuple):
    """Log-probs of a rollout's completions, by the weights before the updates and by the reference."""

    old_logps: list[torch.Tensor]
    ref_logps: list[torch.Tensor] | None


class PolicyMeter:
    """Means over tokens, and extremes, of what `PolicyLoss.metrics` tells of micro-batches. Stays on the device."""

    NAMES: ClassVar = ("kl", "entropy", "clip_fraction", "ratio/mean")

    def __init__(self) -> None:
        self._parts: list[tuple[dict[str, torch.Tensor], int, bool]] = []

    def add(self, metrics: dict[str, torch.Tensor], num_tokens: int, first: bool) -> None:
        """Of a micro-batch with so many tokens that count; `first`: of the first update, before any weight has changed."""
        if num_tokens:
            self._parts.append((metrics, num_tokens, first))

    def metrics(self) -> dict[str, Any]:
        parts = [(values, weight) for values, weight, _ in self._parts]
        known = [name for name in self.NAMES if parts and name in parts[0][0]]
        found = dict(zip(known, _means(parts, known), strict=True))
        return found | {"ratio/max": _largest(parts)}

    def first(self) -> dict[str, Any]:
        """Of the first update alone."""
        parts = [(values, weight) for values, weight, first in self._parts if first]
        if not parts:
            return {}
        return {"mismatch_kl": _means(parts, ["approx_kl"])[0], "mismatch_ratio_max": _largest(parts)}


Parts = Sequence[tuple[dict[str, torch.Tensor], int]]


def _means(parts: Parts, names: Sequence[str]) -> list[Mean]:
    if not names:
        return []
    sums: Any = sum(torch.stack([values[name] for name in names]).double() * weight for values, weight in parts)
    return [Mean(one, sum(weight for _, weight in parts)) for one in sums.unbind()]


def _largest(parts: Parts) -> Largest:
    return Largest(torch.stack([values["ratio/max"] for values, _ in parts]).max() if parts else 1.0)


class GRPO(Trainer):
    """Group-relative policy optimisation.

    grpo = GRPO(model=model, reward_fn=reward_fn, group_size=8, kl_coef=0.04, learning_rate=1e-6, max_new_tokens=128)
    metrics = grpo.train_step(prompts)          # or grpo.train(dataset)

    reward_fn     a function or several; see `strop.rewards`
    environment   a class of `strop.environments` for more than one turn, whose rewards are added to reward_fn's
    tools         functions the model may call, in place of an environment
    """

    Config = GRPOConfig
    config: GRPOConfig

    def __init__(self, *, reward_fn: Any = None, environment: Any = None, tools: Any = None, **arguments: Any):
        for name in arguments.keys() & {"reward_funcs", "environment_factory"}:
            raise ValueError(f"{name!r} is no option of {type(self).__name__}; {_trl.hint(name)}")
        if reward_fn is None and environment is None:
            or_environment = " or an environment" if hasattr(self.Config(), "turns") else ""
            raise ValueError(f"{type(self).__name__} needs a reward_fn{or_environment}, found none")
        super().__init__(**arguments)
        config = self.config
        self.sampler = sampler(self, config.server, config.replay_routing)
        self.rewards: Any = None
        if reward_fn is not None:
            self.rewards = RewardFunctions(reward_fn, config.reward_weights, config.reward_timeout, config.find_failing)
        self.player = player(self, environment, tools)
        if self.player is not None:
            if config.replay_routing:
                raise ValueError("replay_routing must be False with an environment or tools, found True")
            self.any_format = True
            if config.turns.credit == "turn" and config.advantage_scale == "batch" and self.world.size > 1:
                raise ValueError('advantage_scale must be "group" or "none" with credit="turn" in several processes')
            self.rewards = EpisodeRewards(self.rewards, self.player)

    @property
    def functions(self) -> list[Any]:
        return self.rewards.functions

    def setup(self, ref_model: Any) -> None:
        if self.config.replay_routing and isinstance(self.policy.routers, str):  # asked before weights lie in shards
            name = type(unwrapped(self.policy.model)).__name__
            raise ValueError(f"replay_routing must be False for this {name}: {self.policy.routers}")
        if self.config.exact:
            with self.autocast():
                self.policy.be_exact()
        if self.config.kl_coef:
            self.reference = self.policy.reference(ref_model)
        elif ref_model is not None:
            warnings.warn("ref_model has no effect: kl_coef is 0", stacklevel=4)

    def train_step(self, prompts: Any, *, prompt_mask: Any = None, **columns: Any) -> dict[str, float]:
        """One step on a batch of prompts: sampling, rewards, updates.

        prompts       ids (B, P), lists of ids, texts, conversations, or rows with a "prompt"
        prompt_mask   (B, P), 0 at padding; without it the pad id at both ends of a prompt is padding
        columns       columns for reward functions, one entry per prompt: train_step(prompts, answer=answers)
        """
        if self.player is not None:
            batch = rows_of(prompts, columns, "prompts")
        else:
            batch = as_prompts(
                prompts,
                self.policy.tokenizer,
                self.policy.padding(self.config.pad_id),
                mask=prompt_mask,
                columns=columns,
            )
        return self.run_step(lambda: self._step(batch))

    def prepare(self, rows: Sequence[Any], name: str = "dataset") -> list[Prompt]:
        if self.player is not None:
            return checked_rows(rows, name, self.rewards)
        prompts = prompts_of_dataset(
            rows, self.policy.tokenizer, self.policy.padding(self.config.pad_id), name, self.name
        )
        self.rewards.check(rows, name)
        checked_prompts(self.policy, [prompt.ids for prompt in prompts], self.config.sampling, name)
        return prompts

    def step_on(self, rows: list[Any]) -> dict[str, float]:
        return self._step(rows if isinstance(rows[0], Prompt) else self.prepare(rows, "rows"))

    def evaluate_on(self, rows: list[Any]) -> dict[str, float]:
        """Rewards of greedy completions, one a prompt."""
        sampling = Sampling(max_new_tokens=self.config.sampling.max_new_tokens, temperature=0.0,
                            stop_ids=self.config.sampling.stop_ids)  # fmt: skip
        size = self.config.run.batch_size * self.config.group_size
        mine = self.share(len(rows))
        rollouts: list[Rollout] = []
        rewards: list[Rewards] = []
        with self.sampler.ready():
            for start in range(
                mine.start, mine.start - (-len(rows) // self.world.size), size
            ):  # alike in all processes
                prompts = rows[start : min(start + size, mine.stop)]
                with self.autocast():
                    rollouts.append(self._sample(prompts, sampling, 1, 0))
                given = reward_rows(prompts, rollouts[-1], self.policy.tokenizer)
                rewards.append(self.rewards(given, rollouts[-1]))
        found = Rewards.joined(rewards, self.rewards.names).over(self.world)
        return found.metrics | completion_metrics(self.of_all([end for rollout in rollouts for end in rollout.ends]))

    def extra_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors, values = self.sampler.state()
        return tensors, {**values, "share": [self.world.rank, self.world.size]} if values else {}

    def load_extra_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        if values and values.pop("share", [0, 1]) == [
            self.world.rank,
            self.world.size,
        ]:  # else begun anew: the prompts are others
            self.sampler.load_state(tensors, values)

    # ---- a step ----

    def _step(self, prompts: list[Prompt]) -> dict[str, float]:
        mine = self.share(len(prompts))
        prompts, scores = prompts[mine.start : mine.stop], None
        metrics: dict[str, Any] = {}
        with self.sampler.ready():
            rollout = self._generate(prompts, mine, 0)
            if self.config.resample_rounds:  # the rewards come first: they say which completions stay
                _, rewards = self._reward(prompts, rollout)
                metrics["reward/resampled_fraction"] = self._share_without_signal(rewards.total_B)
                rollout, rewards = self._sampled_again(prompts, mine, rollout, rewards)
        if self.config.resample_rounds:
            rows = reward_rows(repeated(prompts, self.config.group_size), rollout, self.policy.tokenizer)
        else:
            scores = self._score(rollout)  # on a GPU while the host, which does not wait for it, runs the rewards
            rows, rewards = self._reward(prompts, rollout)
        self.samples = sample_table(rows, **rewards.shown)
        ends, everyones = self.of_all(rollout.ends), rewards.over(self.world)
        metrics |= everyones.metrics | completion_metrics(ends)
        metrics["reward/zero_std_fraction"] = self._share_without_signal(rewards.total_B)
        first = mine.start * self.config.group_size
        experience = self._experience(rollout, everyones.total_B, scores, ends, first)
        metrics |= self._learn(experience)
        self.count_tokens(sum(map(len, experience.trajectories)))
        return metrics | {"mean_reward": metrics["reward/mean"], "mean_kl": metrics.get("kl", 0.0)}

    def _generate(self, prompts: list[Prompt], addresses: Sequence[int], attempt: int) -> Rollout:
        """addresses: the prompts' places in the batch."""
        step, how = self.state.step, (self.config.sampling, self.config.group_size)
        with self.phase("generate"), self.autocast():
            rollout = self._sample(prompts, *how, self.seed_of(step, attempt), addresses)
            if self.config.server.max_staleness and not attempt and (rows := self.run.upcoming(self.config.run)):
                ahead = self.share(len(rows))
                self.sampler.ahead([rows[i].ids for i in ahead], *how, self.seed_of(step + 1, 0), ahead)
            return rollout

    def _sample(self, prompts: Sequence[Prompt], *how: Any) -> Rollout:
        """how: sampling, number of samples, seed and addresses"""
        if self.player is not None:
            return self.player([prompt.columns for prompt in prompts], *how)
        return self.sampler([prompt.ids for prompt in prompts], *how)

    def _reward(self, prompts: list[Prompt], rollout: Rollout) -> tuple[dict[str, list[Any]], Rewards]:
        """What the reward functions are given, and what they give."""
        with self.phase("reward"):
            rows = reward_rows(repeated(prompts, self.config.group_size), rollout, self.policy.tokenizer)
            return rows, self.rewards(rows, rollout)

    def _sampled_again(
        self, prompts: list[Prompt], addresses: Sequence[int], rollout: Rollout, rewards: Rewards
    ) -> tuple[Rollout, Rewards]:
        """Groups without signal exchanged for new ones, as often as wanted."""
        size = self.config.group_size
        for attempt in range(1, self.config.resample_rounds + 1):
            again = without_signal(rewards.total_B, size).nonzero().flatten().tolist()
            if not self.of_all(again):  # all processes go on while one has to: they may share a server
                break
            chosen = [prompts[i] for i in again]
            new_rollout = self._generate(chosen, [addresses[i] for i in again], attempt)
            _, new_rewards = self._reward(chosen, new_rollout)
            rollout, rewards = _with_groups_replaced(rollout, rewards, again, new_rollout, new_rewards, size)
        return rollout, rewards

    def _share_without_signal(self, rewards_B: torch.Tensor) -> Mean:
        without_P = without_signal(rewards_B, self.config.group_size)
        return Mean(int(without_P.sum()), len(without_P))

    # ---- scoring ----

    def _score(self, rollout: Rollout) -> Scores:
        """Old and reference log-probs of every completion's tokens, on the policy's device, which is not waited for."""
        with self.phase("score"), self.autocast(), torch.no_grad():
            recomputes, reference = self.config.recomputes, self.reference
            batches = self._batches(rollout) if recomputes or reference is not None else []
            if recomputes:
                old_logps = self._logps_by(self.policy, batches)
            else:
                lengths = [len(logps) for logps in rollout.logps]
                old_logps = list(on_device(joined(rollout.logps), self.policy.device).split(lengths))
            ref_logps = None if reference is None else self._logps_by(reference, batches)
        return Scores(old_logps, ref_logps)

    def _batches(self, rollout: Rollout) -> list[tuple[list[int], TokenBatch]]:
        """Micro-batches: which of the completions, and their tokens. Without activations to keep they may be larger."""
        lines = rollout.trajectories
        scorers = [self.policy, *([] if self.reference is None else [self.reference.policy])]
        lean = all(scorer.scores_leanly for scorer in scorers)
        parts = self.micro_batches(range(len(lines)), [len(line) for line in lines], lean=lean)
        return [(part, TokenBatch.of([lines[i] for i in part], self.policy.device)) for part in parts]

    def _logps_by(self, scorer: Any, batches: Sequence[tuple[Sequence[int], TokenBatch]]) -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for part, batch in batches:
            logps_n = scorer.logps(batch, temperature=self.config.sampling.temperature)
            found |= zip(part, batch.split(logps_n), strict=True)
        return [found[i] for i in sorted(found)]

    def _experience(
        self, rollout: Rollout, rewards_B: torch.Tensor, scores: Scores | None = None,
        ends: list[tuple[int, str]] | None = None, first: int = 0,
    ) -> Experience:  # fmt: skip
        """rewards_B, ends: of the whole batch, in which this process's completions begin at `first`."""
        config = self.config
        # in float64, so that float32 rewards give the nearest float32
        advantages_B = compute_batch_group_advantages(
            rewards_B.double(), config.group_size, ddof=config.advantage_ddof, eps=config.advantage_eps,
            scale=config.advantage_scale,
        ).to(rewards_B.dtype)  # fmt: skip
        counted = [
            length if why in ENDED or not config.mask_truncated else 0 for length, why, *_ in ends or rollout.ends
        ]
        old_logps, ref_logps = scores or self._score(rollout)
        own_B = advantages_B[first : first + len(rollout)]
        experience = Experience(rollout, own_B, counted, old_logps, ref_logps, first=first)
        if config.importance_cap is not None:
            sampled_N, trained_N = _sampled_and_trained(experience)
            ratios_N, cap = (trained_N - sampled_N).exp(), config.importance_cap
            low, high = cap if isinstance(cap, (tuple, list)) else (0.0, cap)
            weights_N = ratios_N.clamp(low, high)
            if config.importance_mode == "mask":
                weights_N = ratios_N.masked_fill(weights_N != ratios_N, 0.0)
            experience.weights = list(weights_N.split([len(logps) for logps in rollout.logps]))
        if config.turns.credit == "turn" and self.player is not None:
            experience.per_token = self._turn_advantages(rollout, rewards_B[first : first + len(rollout)])
        return experience

    def _turn_advantages(self, rollout: Any, rewards_B: torch.Tensor) -> list[torch.Tensor]:
        config = self.config
        return turn_advantages(
            rollout.episodes, rewards_B, config.group_size, config.turns.turn_discount,
            scale=config.advantage_scale, ddof=config.advantage_ddof, eps=config.advantage_eps,
        )  # fmt: skip

    # ---- learning ----

    def _learn(self, experience: Experience) -> dict[str, Any]:
        """The updates on a rollout, and the means of what they measured."""
        meter, updates = PolicyMeter(), []
        routers = self.policy.routers if self.config.replay_routing else None
        if isinstance(routers, Routers):
            routers.counts.clear()
        for number, indices in enumerate(self._minibatches(len(experience.counted))):
            parts, num_tokens = self._parts(experience, indices), sum(experience.counted[i] for i in indices)
            updates.append(
                self.update(
                    functools.partial(self.loss_on, experience, part, num_tokens=num_tokens, num_sequences=len(indices))
                    for part in parts
                )
            )
            for part, result in zip(parts, updates[-1].parts, strict=True):
                meter.add(result.metrics, experience.num_tokens(part), first=number == 0)
        metrics = {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
        drawn_N = joined(experience.rollout.logps).double()
        metrics |= meter.metrics() | {"entropy_estimate": Mean(-drawn_N.sum().item(), len(drawn_N))}
        if isinstance(routers, Routers):
            counts_2: Any = torch.stack(routers.counts).sum(0) if routers.counts else (0, 0)
            metrics["routing/changed_fraction"] = Mean(*counts_2)
        return metrics | self._mismatch(experience, meter)

    def _parts(self, experience: Experience, indices: list[int]) -> list[list[int]]:
        """Micro-batches of those of these completions that are this process's and count."""
        counting = experience.own(indices)
        return self.micro_batches(counting, [len(experience.trajectories[i]) for i in counting])

    def _minibatches(self, num_completions: int) -> Iterator[list[int]]:
        """Indices of the completions of each update. The order is drawn from the run's seed, the step and the pass."""
        size = self.config.minibatch_size or num_completions
        for epoch in range(self.config.inner_epochs):
            order = list(range(num_completions))
            if size < num_completions:
                random.Random(self.seed_of(self.state.step, "order", epoch)).shuffle(order)
            for start in range(0, num_completions, size):
                yield order[start : start + size]

    def loss_on(
        self, experience: Experience, indices: Sequence[int], *, num_tokens: int, num_sequences: int
    ) -> PolicyLoss:
        """The loss of these completions as their share of a batch with so many tokens and sequences."""
        batch = self._batch(experience, indices, num_tokens, num_sequences)
        return self.policy.loss(batch, self.config.rule, temperature=self.config.sampling.temperature)

    def _batch(self, experience: Experience, indices: Sequence[int], num_tokens: int, num_sequences: int) -> TokenBatch:
        lines = [experience.trajectories[i] for i in indices]
        weights = [self.config.rule.weight(line.num_loss_tokens, num_tokens, num_sequences) for line in lines]
        batch = TokenBatch.of(
            lines, self.policy.device, weights=weights, advantages=experience.advantages_B[list(indices)].tolist(),
            dtype=self.policy.loss_dtype,
        )  # fmt: skip

        def of_these(values: Sequence[torch.Tensor]) -> torch.Tensor:
            return on_device(joined([values[i] for i in indices]), self.policy.device)

        batch.old_logps_n = of_these(experience.old_logps)
        batch.ref_logps_n = None if experience.ref_logps is None else of_these(experience.ref_logps)
        if experience.per_token is not None:
            batch.advantages_n = of_these(experience.per_token).to(batch.advantages_n)
        if experience.weights is not None:
            weights_n = of_these(experience.weights)
            if self.config.rule.loss_type == "vespo":  # they go into the product of the sequence's ratios
                batch.old_logps_n = batch.old_logps_n - weights_n.clamp(min=1e-8).log()
            else:  # the policy's term is linear in the advantage; KL and entropy have none
                batch.advantages_n = batch.advantages_n * weights_n  # type: ignore[operator]
        return batch

    # ---- metrics ----

    def _mismatch(self, experience: Experience, meter: PolicyMeter) -> dict[str, Any]:
        """How far the log-probs of sampling are from those of training with the same weights; 0 if they are the same."""
        if not self.config.recomputes:
            return meter.first()
        sampled_N, trained_N = _sampled_and_trained(experience)
        ratios_N, num_tokens = (trained_N - sampled_N).exp(), len(trained_N)
        if not num_tokens:
            return {}
        found: dict[str, Any] = {"mismatch_kl": Mean(kl_estimate(sampled_N, trained_N).double().sum(), num_tokens)}
        found["mismatch_ratio_max"] = Largest(ratios_N.max())
        if experience.weights is not None:
            weights_N = torch.cat(experience.weights)
            found["importance/mean"] = Mean(weights_N.double().sum(), num_tokens)
            found["importance/capped_fraction"] = Mean((weights_N != ratios_N).sum(), num_tokens)
        return found


def without_signal(rewards_B: torch.Tensor, group_size: int) -> torch.Tensor:
    """[P] whether all rewards of a group are equal, so that its advantages are 0."""
    groups_PG = rewards_B.view(-1, group_size)
    return (groups_PG == groups_PG[:, :1]).all(1)


def _with_groups_replaced(
    rollout: Rollout, rewards: Rewards, groups: list[int], new_rollout: Rollout, new_rewards: Rewards, size: int
) -> tuple[Rollout, Rewards]:
    """These groups exchanged for the new ones, in the new ones' order."""
    sources = list(range(len(rollout)))
    for number, group in enumerate(groups):
        for member in range(size):
            sources[group * size + member] = len(rollout) + number * size + member
    joined = rollout.joined(new_rollout).select(sources)

    def pick(old_B: torch.Tensor, new_B: torch.Tensor) -> torch.Tensor:
        return torch.cat([old_B, new_B])[sources]

    columns = {name: pick(column_B, new_rewards.columns[name]) for name, column_B in rewards.columns.items()}
    return joined, Rewards(pick(rewards.total_B, new_rewards.total_B), columns)


def _sampled_and_trained(experience: Experience) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] and [N] log-probs of every token, of sampling and of the training forward with the same weights."""
    trained_N = joined(experience.old_logps)
    return on_device(joined(experience.rollout.logps), trained_N.device).to(trained_N.dtype), trained_N
