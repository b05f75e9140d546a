"""Online DPO (arXiv 2402.04792): sample two completions of each prompt, ask which is better, learn from the pair with DPO."""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from strop.algorithms.dpo import DPO, Pair, counts_of
from strop.config import OnlineDPOConfig
from strop.data.batch import on_device
from strop.data.inputs import Prompt, as_prompts, check_below, prompts_of_dataset, repeated, reward_rows
from strop.environments.credit import EpisodeRewards
from strop.environments.of_trainer import OF_EPISODES, checked_rows, player, rows_of
from strop.rewards import PreferenceFunction, RewardFunctions, Rewards, sample_table
from strop.rollout import Rollout, checked_prompts, completion_metrics
from strop.rollout.sampler import sampler
from strop.training.state import Mean


class OnlineDPO(DPO):
    """DPO on pairs that the policy samples itself.

    online = OnlineDPO(model=model, preference_fn=preference_fn, beta=0.1, max_new_tokens=64)
    metrics = online.train_step(prompts)        # or online.train(dataset)

    preference_fn   takes pairs (a, b), texts or id tensors, and returns 0 if a is better, 1 if b is; by its
                    parameter names it may ask for prompts and the dataset's columns: preference_fn(pairs, answer); or
    reward_fn       a reward function or several: the higher reward is the better, and a tie teaches nothing
    environment, tools   as of GRPO; an environment's rewards are added to reward_fn's, or take its place. preference_fn
                    then gets pairs of last replies, and as `conversations`, `replies` and `environments` pairs too
    """

    Config = OnlineDPOConfig
    config: OnlineDPOConfig

    def __init__(
        self, *, preference_fn: Any = None, reward_fn: Any = None, environment: Any = None, tools: Any = None,
        **arguments: Any,
    ):  # fmt: skip
        if preference_fn is not None and reward_fn is not None:
            raise ValueError("OnlineDPO needs a preference_fn or a reward_fn, found both")
        if preference_fn is None and reward_fn is None and environment is None:
            raise ValueError("OnlineDPO needs a preference_fn, a reward_fn or an environment, found none")
        super().__init__(**arguments)
        config = self.config
        self.sampler = sampler(self, config.server)
        self.preference: PreferenceFunction | None = None
        self.rewards: Any = None
        self.player = player(self, environment, tools)
        self.any_format = self.player is not None
        if self.player is not None and config.turns.credit != "trajectory":
            warnings.warn("credit has no effect: a pair is of whole trajectories", stacklevel=2)
        if self.player is not None and config.max_length is not None:
            warnings.warn("max_length has no effect with an environment: max_tokens is what limits it", stacklevel=2)
        if reward_fn is not None:
            self.rewards = RewardFunctions(reward_fn, config.reward_weights, config.reward_timeout, config.find_failing)
        if self.player is not None and preference_fn is None:
            self.rewards = EpisodeRewards(self.rewards, self.player)
        if self.rewards is None:
            self.preference = PreferenceFunction(preference_fn, config.reward_timeout, config.find_failing)
            if config.reward_weights is not None:
                warnings.warn("reward_weights have no effect: preference_fn gives no rewards", stacklevel=2)

    @property
    def functions(self) -> list[Any]:
        return self.rewards.functions if self.rewards is not None else [self.preference.function]  # type: ignore[union-attr]

    def train_step(self, prompts: Any, *, prompt_mask: Any = None, **columns: Any) -> dict[str, float]:  # type: ignore[override]
        """One step on a batch of prompts, as `GRPO.train_step` takes them."""
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
        check_below(self.config.max_length, batch, "prompts")
        return self.run_step(lambda: self._online_step(batch))

    def prepare(self, rows: Sequence[Any], name: str = "dataset") -> list[Prompt]:  # type: ignore[override]
        judge = self.rewards or self.preference
        assert judge is not None
        if self.player is not None:
            return checked_rows(rows, name, judge)
        prompts = prompts_of_dataset(
            rows, self.policy.tokenizer, self.policy.padding(self.config.pad_id), name, self.name
        )
        judge.check(rows, name)
        checked_prompts(self.policy, [prompt.ids for prompt in prompts], self.config.sampling, name)
        check_below(self.config.max_length, prompts, name)
        return prompts

    def step_on(self, rows: list[Any]) -> dict[str, float]:
        return self._online_step(rows if isinstance(rows[0], Prompt) else self.prepare(rows, "rows"))

    def evaluate_on(self, rows: list[Any]) -> dict[str, float]:
        """DPO's metrics, on pairs sampled from the policy as it is."""
        mine = self.share(len(rows))
        rows = rows[mine.start : mine.stop]
        rollout, pairs = self._sampled_pairs(rows, mine, "evaluation")
        better, metrics, _ = self._judge(rows, rollout)
        told = [_ordered(pair, index) for pair, index in zip(pairs, better, strict=True) if index is not None]
        metrics |= completion_metrics(self.of_all(rollout.ends)) | _ties(better)
        counts = self._counts_of_all(told)
        return metrics | (self._evaluate(told, counts) if counts[0] else {})

    # ---- inside ----

    def _online_step(self, prompts: list[Prompt]) -> dict[str, float]:
        mine = self.share(len(prompts))
        prompts = prompts[mine.start : mine.stop]
        rollout, pairs = self._sampled_pairs(prompts, mine, self.state.step)
        # on a GPU while the host, which does not wait for it, judges the pairs; those that tie are scored in vain
        ref_logps_P2 = self._reference_logps(self._batches(pairs))
        with self.phase("reward"):
            better, metrics, self.samples = self._judge(prompts, rollout)
        metrics |= completion_metrics(self.of_all(rollout.ends)) | _ties(better)
        told = [(i, index) for i, index in enumerate(better) if index is not None]
        ordered = [_ordered(pairs[i], index) for i, index in told]
        counts = self._counts_of_all(ordered)
        if not counts[0]:  # every pair a tie: nothing to learn from
            return metrics | {"loss": 0.0}
        if ref_logps_P2 is not None:
            rows, chosen = on_device(torch.tensor(told).long().view(-1, 2), ref_logps_P2.device).T
            ref_logps_P2 = torch.stack([ref_logps_P2[rows, chosen], ref_logps_P2[rows, 1 - chosen]], 1)
        return metrics | self._learn(ordered, counts, ref_logps_P2)

    def _counts_of_all(self, pairs: list[Pair]) -> tuple[int, int]:
        """Pairs and chosen tokens of all processes."""
        num_pairs, num_tokens = (int(self.world.total(count)) for count in counts_of(pairs))
        return num_pairs, num_tokens

    def _sampled_pairs(self, prompts: list[Prompt], addresses: Sequence[int], step: Any) -> tuple[Rollout, list[Pair]]:
        """Completions, and as (first, second) for each prompt."""
        with self.phase("generate"), self.autocast(), self.sampler.ready():
            rollout = self._sample(prompts, addresses, step)
        if self.player is not None:
            lines = rollout.trajectories
            return rollout, list(zip(lines[::2], lines[1::2], strict=True))
        rows = zip(rollout.prompt_ids[::2], rollout.completion_ids[::2], rollout.completion_ids[1::2], strict=True)
        return rollout, [self._checked(*row, f"prompts[{i}]") for i, row in enumerate(rows)]

    def _sample(self, prompts: list[Prompt], addresses: Sequence[int], step: Any) -> Rollout:
        """Two completions of each; of a dataset's prompts so many at a time as training samples."""
        size, how = max(len(prompts), 1), (self.config.sampling, 2)
        most = size
        if step == "evaluation":
            size, most = self.config.run.batch_size, max(self.world.gathered(len(prompts)))
        rollouts: list[Rollout] = []
        for start in range(0, most, size):  # as often as in every other process
            some, seed = prompts[start : start + size], self.seed_of(step)
            if self.player is not None:
                rollouts.append(self.player([p.columns for p in some], *how, seed, addresses[start : start + size]))
            else:
                rollouts.append(self.sampler([p.ids for p in some], *how, seed, addresses[start : start + size]))
        if step != "evaluation" and self.config.server.max_staleness and (rows := self.run.upcoming(self.config.run)):
            ahead = self.share(len(rows))
            self.sampler.ahead([rows[i].ids for i in ahead], *how, self.seed_of(step + 1), ahead)
        return functools.reduce(Rollout.joined, rollouts or [Rollout([], [], [], [])])

    def extra_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return self.sampler.state()

    def load_extra_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        self.sampler.load_state(tensors, values)

    def _judge(
        self, prompts: list[Prompt], rollout: Rollout
    ) -> tuple[list[int | None], dict[str, float], list[dict[str, Any]]]:
        """Which of each two is the better (None: neither), metrics, and the table of samples."""
        rows = reward_rows(repeated(prompts, 2), rollout, self.policy.tokenizer)
        if self.rewards is not None:
            rewards: Rewards = self.rewards(rows, rollout)
            first_P, second_P = rewards.total_B.view(-1, 2).unbind(1)
            better = [
                None if tied else int(second)
                for tied, second in zip((first_P == second_P).tolist(), (second_P > first_P).tolist(), strict=True)
            ]
            return better, rewards.over(self.world).metrics, sample_table(rows, **rewards.shown)
        assert self.preference is not None
        completions = rows["completions"]
        columns = {
            name: list(zip(values[::2], values[1::2], strict=True)) if name in OF_EPISODES else values[::2]
            for name, values in rows.items()
            if name not in ("completions", "completion_ids")
        }
        preferred = self.preference(list(zip(completions[::2], completions[1::2], strict=True)), columns)
        chosen = torch.nn.functional.one_hot(torch.tensor(preferred).long(), 2).flatten().bool().tolist()
        return list(preferred), {}, sample_table(rows, preferred=chosen)


def _ordered(pair: Pair, better: int) -> Pair:
    """(chosen, rejected)."""
    return pair[better], pair[1 - better]


def _ties(better: Sequence[int | None]) -> dict[str, Any]:
    return {"preference/tied_fraction": Mean(better.count(None), len(better))}
