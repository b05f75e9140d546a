"""GRPO: reinforcement learning from rewards compared within a group (arXiv 2402.03300), and its relatives.

A step: sample group_size completions of each prompt; reward them; the advantage of a completion is its reward relative
to its group; score them with the frozen reference; then one or several updates on

    policy_loss(log π, log π_old, advantages) + kl_coef·KL(π ‖ π_ref)

with the formulas of `strop.losses.policy_loss`. log π_old are the log-probs the completions were sampled with.

B completions, P prompts, T tokens. Completions of a prompt are adjacent.
"""

import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from strop.algorithms.online import (
    Prompt,
    as_prompts,
    prompts_of_dataset,
    repeated,
    reward_rows,
    rollout_metrics,
    sample_table,
    seed_of,
)
from strop.algorithms.trainer import Trainer
from strop.config import Config, OptimConfig, TrainerConfig, check_count, check_option, check_range
from strop.data.collate import SequenceBatch, collate
from strop.losses import (
    ADVANTAGE_SCALES,
    IMPORTANCE_LEVELS,
    KL_ESTIMATORS,
    POLICY_LOSS_TYPES,
    PolicyLoss,
    clip_bounds,
    group_advantages,
    kl_estimate,
    policy_loss,
)
from strop.models import counted
from strop.ops import linear_grpo_loss
from strop.rewards import RewardFunctions, Rewards, check_timeout
from strop.rollout import Rollout, Sampling, generate

OLD_LOGPS = ("auto", "rollout", "recompute")


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig(Config):
    """Which loss; see `strop.losses.policy_loss`.

    clip_eps    ε or (low, high); None is 0.2, and for cispo (0.2, 5.0)
    delta       an upper bound of the ratio where the advantage is negative; None is none
    """

    loss_type: str = "grpo"
    importance_level: str = "token"
    clip_eps: float | tuple[float, float] | None = None
    delta: float | None = None
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("loss_type", self.loss_type, POLICY_LOSS_TYPES)
        check_option("importance_level", self.importance_level, IMPORTANCE_LEVELS)
        check_option("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        check_range("entropy_coef", self.entropy_coef, low=0.0)
        clip_bounds(self.clip, self.delta, self.loss_type)

    @property
    def clip(self) -> float | tuple[float, float]:
        if self.clip_eps is not None:
            return self.clip_eps
        return (0.2, 5.0) if self.loss_type == "cispo" else 0.2


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(TrainerConfig):
    """Options of GRPO. batch_size counts prompts, micro_batch_size and minibatch_size completions.

    group_size          completions of each prompt
    kl_coef             of the KL to the reference; 0 needs no reference
    inner_epochs        passes over a step's completions
    minibatch_size      completions of one update, drawn anew in every pass; 0 is all of them
    advantage_scale     what centred rewards are divided by: "group" (the group's std), "batch" (that of all) or "none"
    advantage_ddof, advantage_eps   of the std: 1 and 1e-4 are TRL's, 0 and 0 the paper as written
    mask_truncated      completions without an end count for nothing
    resample_rounds     how often prompts whose rewards are all equal are sampled again
    old_logps           "rollout": those of sampling; "recompute": of a forward before the first update; "auto": the
                        rollout's, unless top_k or top_p cut its distribution
    reward_weights      of several reward functions; None is 1 for each
    reward_timeout      seconds for one call of a reward function; None waits
    pad_id              the padding in prompts of ids; None is what tokenizer or model say
    """

    group_size: int = 8
    kl_coef: float = 0.04
    inner_epochs: int = 1
    minibatch_size: int = 0
    advantage_scale: str = "group"
    advantage_ddof: int = 1
    advantage_eps: float = 1e-4
    mask_truncated: bool = False
    resample_rounds: int = 0
    old_logps: str = "auto"
    reward_weights: tuple[float, ...] | None = None
    reward_timeout: float | None = None
    pad_id: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    loss: PolicyLossConfig = PolicyLossConfig()
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-6))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("group_size", self.group_size, low=2)
        check_range("kl_coef", self.kl_coef, low=0.0)
        check_count("inner_epochs", self.inner_epochs, low=1)
        for name in ("minibatch_size", "advantage_ddof", "resample_rounds"):
            check_count(name, getattr(self, name))
        check_option("advantage_scale", self.advantage_scale, ADVANTAGE_SCALES)
        check_range("advantage_eps", self.advantage_eps, low=0.0)
        if self.advantage_ddof >= self.group_size:
            raise ValueError(f"advantage_ddof must be below group_size={self.group_size}, found {self.advantage_ddof}")
        check_option("old_logps", self.old_logps, OLD_LOGPS)
        check_timeout(self.reward_timeout, "reward_timeout")
        if self.sampling.greedy:
            raise ValueError("temperature must be above 0: greedy completions of a prompt are all the same, found 0")

    @property
    def recomputes(self) -> bool:
        return self.old_logps == "recompute" or (self.old_logps == "auto" and self.sampling.cuts)


@dataclass
class Experience:
    """A rollout with all that its updates need. Per completion; log-probs are 1-D, one a token.

    counts_B    False where a completion counts for nothing (truncated, if those are masked)
    ref_logps   None without a reference
    """

    rollout: Rollout
    advantages_B: torch.Tensor
    counts_B: torch.Tensor
    old_logps: list[torch.Tensor]
    ref_logps: list[torch.Tensor] | None = None

    def __len__(self) -> int:
        return len(self.rollout)

    def num_tokens(self, indices: Sequence[int]) -> int:
        """Tokens that count among these completions."""
        return sum(len(self.rollout.completion_ids[i]) for i in indices if self.counts_B[i])


class GRPO(Trainer):
    """Group-relative policy optimisation.

    grpo = GRPO(model=model, reward_fn=reward_fn, group_size=8, kl_coef=0.04, learning_rate=1e-6, max_new_tokens=128)
    metrics = grpo.train_step(prompts)          # or grpo.train(dataset)

    reward_fn   a function or several; see `strop.rewards`
    """

    Config = GRPOConfig
    config: GRPOConfig

    def __init__(self, *, reward_fn: Any = None, **arguments: Any):
        if reward_fn is None:
            raise ValueError(f"{type(self).__name__} needs a reward_fn, found None")
        super().__init__(**arguments)
        self.rewards = RewardFunctions(reward_fn, self.config.reward_weights, self.config.reward_timeout)

    def setup(self, ref_model: Any) -> None:
        if self.config.kl_coef:
            self.reference = self.policy.reference(ref_model)
        elif ref_model is not None:
            warnings.warn("ref_model has no effect: kl_coef is 0", stacklevel=4)

    def train_step(self, prompts: Any, *, prompt_mask: Any = None, **columns: Any) -> dict[str, float]:
        """One step on a batch of prompts: sampling, rewards, updates.

        prompts       ids (B, P), lists of ids, texts, conversations, or rows with a "prompt"
        prompt_mask   (B, P), 0 at padding; without it padding is what equals the pad id at a prompt's sides
        columns       for reward functions, each with one entry a prompt: train_step(prompts, answer=answers)
        """
        batch = as_prompts(prompts, self.policy, mask=prompt_mask, pad_id=self.config.pad_id, columns=columns)
        return self.run_step(lambda: self._step(batch))

    def prepare(self, rows: Sequence[Any], name: str = "dataset") -> list[Prompt]:
        return prompts_of_dataset(rows, self, name)

    def step_on(self, rows: list[Any]) -> dict[str, float]:
        return self._step(rows if isinstance(rows[0], Prompt) else self.prepare(rows, "rows"))

    def evaluate_on(self, rows: list[Any]) -> dict[str, float]:
        """Rewards of greedy completions, one a prompt."""
        sampling = Sampling(max_new_tokens=self.config.sampling.max_new_tokens, temperature=0.0,
                            stop_ids=self.config.sampling.stop_ids)  # fmt: skip
        size = self.config.run.batch_size * self.config.group_size
        totals, columns, rollouts = [], [], []
        for start in range(0, len(rows), size):
            prompts = rows[start : start + size]
            with self.autocast():
                rollouts.append(generate(self.policy, [p.ids for p in prompts], sampling, seed=0))
            rewards = self.rewards(reward_rows(prompts, rollouts[-1], self.policy))
            totals.append(rewards.total_B)
            columns.append(rewards.columns)
        joined = {name: torch.cat([part[name] for part in columns]) for name in self.rewards.names}
        rollout = rollouts[0]
        for other in rollouts[1:]:
            rollout = rollout.joined(other)
        return reward_metrics(Rewards(torch.cat(totals), joined)) | rollout_metrics(rollout)

    # ---- a step ----

    def _step(self, prompts: list[Prompt]) -> dict[str, float]:
        rollout, rewards, metrics = self._sample(prompts)
        experience = self._experience(rollout, rewards.total_B)
        metrics |= self._learn(experience)
        self.count_tokens(sum(len(prompt) + len(completion) for prompt, completion in rollout.rows))
        return metrics | {"mean_reward": metrics["reward/mean"], "mean_kl": metrics.get("kl", 0.0)}

    def _sample(self, prompts: list[Prompt]) -> tuple[Rollout, Rewards, dict[str, float]]:
        """Completions with rewards; groups without signal sampled again, as often as wanted."""
        size = self.config.group_size
        rollout, rewards = self._sample_once(prompts, 0)
        first = without_signal(rewards.total_B, size)
        flat = first
        for attempt in range(1, self.config.resample_rounds + 1):
            again = flat.nonzero().flatten().tolist()
            if not again:
                break
            new_rollout, new_rewards = self._sample_once([prompts[i] for i in again], attempt)
            rollout, rewards = _with_groups_replaced(rollout, rewards, again, new_rollout, new_rewards, size)
            flat = without_signal(rewards.total_B, size)
        rows = reward_rows(repeated(prompts, size), rollout, self.policy)
        self.samples = sample_table(rows, reward=rewards.total_B.tolist())
        metrics = reward_metrics(rewards) | rollout_metrics(rollout)
        metrics["reward/zero_std_fraction"] = flat.double().mean().item()
        if self.config.resample_rounds:
            metrics["reward/resampled_fraction"] = first.double().mean().item()
        return rollout, rewards, metrics

    def _sample_once(self, prompts: list[Prompt], attempt: int) -> tuple[Rollout, Rewards]:
        config = self.config
        seed = seed_of(config.run.seed, self.state.step, attempt)
        with self.phase("generate"), self.autocast():
            rollout = generate(
                self.policy, [p.ids for p in prompts], config.sampling, num_samples=config.group_size, seed=seed
            )
        with self.phase("reward"):
            rewards = self.rewards(reward_rows(repeated(prompts, config.group_size), rollout, self.policy))
        return rollout, rewards

    def _experience(self, rollout: Rollout, rewards_B: torch.Tensor) -> Experience:
        config = self.config
        advantages_B = group_advantages(
            rewards_B, samples_per_prompt=config.group_size, ddof=config.advantage_ddof, eps=config.advantage_eps,
            scale=config.advantage_scale,
        )  # fmt: skip
        ended_B = torch.tensor([reason == "eos" for reason in rollout.finish_reasons])
        counts_B = ended_B if config.mask_truncated else torch.ones_like(ended_B)
        old_logps, ref_logps = rollout.logps, None
        with self.phase("score"), self.autocast(), torch.no_grad():
            if config.recomputes:
                old_logps = self._scores(rollout, self.policy)
            if self.reference is not None:
                ref_logps = self._scores(rollout, self.reference)
        return Experience(rollout, advantages_B, counts_B, old_logps, ref_logps)

    def _scores(self, rollout: Rollout, scorer: Any) -> list[torch.Tensor]:
        """Log-probs of every completion's tokens, on the CPU."""
        scores: list[torch.Tensor] = []
        for part in self.micro_batches(rollout.rows):
            batch = self._collate(part)
            logps_BT = scorer.logps(batch, temperature=self.config.sampling.temperature)
            lengths = [len(completion) for _, completion in part]
            scores += logps_BT[batch.completion_mask_BT].cpu().split(lengths)
        return scores

    # ---- learning ----

    def _learn(self, experience: Experience) -> dict[str, float]:
        """The updates on a rollout, and the means of what they measured."""
        meter, updates = PolicyMeter(), []
        for number, indices in enumerate(self._minibatches(len(experience))):
            results: list[tuple[PolicyLoss, int]] = []
            updates.append(self.update(self._losses(experience, indices, results)))
            for result, num_tokens in results:
                meter.add(result.metrics, num_tokens, first=number == 0)
        names = updates[0].keys()
        metrics = {name: sum(update[name] for update in updates) / len(updates) for name in names}
        return metrics | meter.metrics() | self._entropy(experience, meter) | self._mismatch(experience, meter)

    def _minibatches(self, num_completions: int) -> Iterator[list[int]]:
        """Indices of the completions of each update. The order is drawn from the run's seed, the step and the pass."""
        size = self.config.minibatch_size or num_completions
        for epoch in range(self.config.inner_epochs):
            order = list(range(num_completions))
            if size < num_completions:
                random.Random(seed_of(self.config.run.seed, self.state.step, "order", epoch)).shuffle(order)
            for start in range(0, num_completions, size):
                yield order[start : start + size]

    def _losses(
        self, experience: Experience, indices: list[int], results: list[tuple[PolicyLoss, int]]
    ) -> Iterator[Any]:
        """A function for the loss of each micro-batch; they sum up to the loss of these completions."""
        num_tokens = experience.num_tokens(indices)
        for part in self.micro_batches([i for i in indices if experience.counts_B[i]]):

            def loss_of(part: Sequence[int] = part) -> torch.Tensor:
                result = self.loss_on(experience, part, num_tokens=num_tokens, num_sequences=len(indices))
                results.append((result, experience.num_tokens(part)))
                return result.loss

            yield loss_of

    def loss_on(
        self, experience: Experience, indices: Sequence[int], *, num_tokens: int, num_sequences: int
    ) -> PolicyLoss:
        """The loss of these completions as their share of a batch with so many tokens and sequences."""
        config, rollout = self.config, experience.rollout
        batch = self._collate([(rollout.prompt_ids[i], rollout.completion_ids[i]) for i in indices])
        mask_BT = counted(batch)
        options: dict[str, Any] = {
            "ref_logps": None if experience.ref_logps is None else _aligned(experience.ref_logps, indices, mask_BT),
            "loss_type": config.loss.loss_type,
            "importance_level": config.loss.importance_level,
            "clip_eps": config.loss.clip,
            "delta": config.loss.delta,
            "beta": config.kl_coef,
            "kl_estimator": config.loss.kl_estimator,
            "entropy_coef": config.loss.entropy_coef,
            "max_completion_length": config.sampling.max_new_tokens,
            "num_tokens": num_tokens,
            "num_sequences": num_sequences,
        }
        old_BT = _aligned(experience.old_logps, indices, mask_BT)
        advantages_B = experience.advantages_B[list(indices)].to(mask_BT.device)
        temperature = config.sampling.temperature
        if (head := self.policy.hidden(batch)) is not None:
            hidden_BTH, weight, bias = head
            return linear_grpo_loss(
                hidden_BTH, weight, batch.input_ids_BT, old_BT, None, mask_BT, bias=bias, advantages=advantages_B,
                temperature=temperature, **options,
            )  # fmt: skip
        logps_BT, entropy_BT = self.policy.logps(batch, temperature=temperature, entropy=True)
        return policy_loss(logps_BT, old_BT, advantages_B, mask_BT, entropy=entropy_BT, **options)

    def _collate(self, rows: Sequence[Any]) -> SequenceBatch:
        return collate(rows, self.policy.pad_id, self.policy.device)

    # ---- metrics ----

    def _entropy(self, experience: Experience, meter: "PolicyMeter") -> dict[str, float]:
        """Exact where the loss has it; else estimated by the samples: the mean of −log π over the tokens drawn."""
        if "entropy" in meter.metrics():
            return {}
        return {"entropy": -torch.cat(experience.rollout.logps).double().mean().item()}

    def _mismatch(self, experience: Experience, meter: "PolicyMeter") -> dict[str, float]:
        """How far the log-probs of sampling are from those of training with the same weights; 0 if they are the same."""
        if not self.config.recomputes:
            return meter.first()
        sampled, trained = torch.cat(experience.rollout.logps), torch.cat(experience.old_logps)
        ratio = (trained - sampled).exp().max().item()
        return {"mismatch_kl": kl_estimate(sampled, trained).mean().item(), "mismatch_ratio_max": ratio}


class PolicyMeter:
    """Means over tokens, and extremes, of what `PolicyLoss.metrics` tells of micro-batches."""

    NAMES: ClassVar = {"kl": "kl", "entropy": "entropy", "clip_fraction": "clip_fraction", "ratio_mean": "ratio/mean"}

    def __init__(self) -> None:
        self._parts: list[tuple[dict[str, float], int, bool]] = []

    def add(self, metrics: dict[str, torch.Tensor], num_tokens: int, first: bool) -> None:
        self._parts.append(({name: value.item() for name, value in metrics.items()}, num_tokens, first))

    def metrics(self) -> dict[str, float]:
        parts = [(values, weight) for values, weight, _ in self._parts if weight]
        known = [name for name in self.NAMES if parts and name in parts[0][0]]
        found = {self.NAMES[name]: _mean(parts, name) for name in known}
        found["ratio/max"] = max((values["ratio_max"] for values, _ in parts), default=1.0)
        return found

    def first(self) -> dict[str, float]:
        """Of the first update alone, before any weight has changed."""
        parts = [(values, weight) for values, weight, first in self._parts if first and weight]
        if not parts:
            return {}
        largest = max(values["ratio_max"] for values, _ in parts)
        return {"mismatch_kl": _mean(parts, "approx_kl"), "mismatch_ratio_max": largest}


def _mean(parts: list[tuple[dict[str, float], int]], name: str) -> float:
    return sum(values[name] * weight for values, weight in parts) / sum(weight for _, weight in parts)


def reward_metrics(rewards: Rewards) -> dict[str, float]:
    total_B = rewards.total_B.double()
    found = {"reward/mean": total_B.mean().item(), "reward/std": total_B.std(correction=0).item()}
    return found | {f"reward/{name}": column.double().mean().item() for name, column in rewards.columns.items()}


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


def _aligned(logps: Sequence[torch.Tensor], indices: Sequence[int], mask_BT: torch.Tensor) -> torch.Tensor:
    """Log-probs of these completions where the batch has their tokens, 0 elsewhere."""
    values_N = torch.cat([logps[i] for i in indices]).to(mask_BT.device)
    return values_N.new_zeros(mask_BT.shape).masked_scatter(mask_BT, values_N)
