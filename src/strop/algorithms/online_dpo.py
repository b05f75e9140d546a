"""Online DPO (arXiv 2402.04792): sample two completions of each prompt, judge them, learn from the pair with DPO."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from strop._types import Json
from strop.algorithms.dpo import DPO, Pair, counts_of
from strop.algorithms.on_policy import OnPolicy, WholeBatch
from strop.config import OnlineDPOConfig
from strop.data.batch import TokenBatch, Trajectory, joined, on_device
from strop.data.inputs import check_below
from strop.data.offline import num_tokens_of
from strop.environments.setup import CONVERSATION_COLUMNS
from strop.rewards import reward_columns, sample_table
from strop.rollout.generate import completion_metrics
from strop.training.trainer import Mean, Metrics


class OnlineDPO(OnPolicy, DPO):  # type: ignore[misc]  # takes prompts where DPO takes pairs
    """DPO on pairs that the policy samples itself.

    online = OnlineDPO(model=model, preference_fn=preference_fn, beta=0.1, max_new_tokens=64)
    metrics = online.train_step(prompts)        # or online.train(dataset)

    preference_fn   takes pairs (a, b), texts or id tensors, and returns 0 if a is better, 1 if b is. Further parameters
                    are filled with prompts or columns of the dataset by name: preference_fn(pairs, answer)
    reward_fn       instead of preference_fn: a reward function or several. The higher reward is better; a tie teaches
                    nothing
    environment, tools   as in GRPO; an environment's rewards are added to reward_fn's, or replace them. preference_fn
                    then gets pairs of last replies; `conversations`, `replies` and `environments` are pairs too
    """

    Config = OnlineDPOConfig
    config: OnlineDPOConfig

    def __init__(
        self, *, preference_fn: object = None, reward_fn: object = None, environment: object = None, tools: object = None,
        **arguments: Any,
    ):  # fmt: skip
        if preference_fn is not None and reward_fn is not None:
            raise ValueError("OnlineDPO needs a preference_fn or a reward_fn, found both")
        if preference_fn is None and reward_fn is None and environment is None:
            raise ValueError("OnlineDPO needs a preference_fn, a reward_fn or an environment, found none")
        super().__init__(
            reward_fn=reward_fn, preference_fn=preference_fn, environment=environment, tools=tools, **arguments
        )
        config = self.config
        if self.player is not None and config.turns.credit != "trajectory":
            warnings.warn("credit has no effect: a pair is of whole trajectories", stacklevel=2)
        if self.player is not None and config.max_length is not None:
            warnings.warn("max_length has no effect with an environment: max_tokens is what limits it", stacklevel=2)
        if preference_fn is not None and config.reward_weights is not None:
            warnings.warn("reward_weights have no effect: preference_fn gives no rewards", stacklevel=2)

    @property
    def num_samples(self) -> int:
        return 2

    def checked(self, prompts: list[Trajectory], name: str) -> list[Trajectory]:
        check_below(self.config.max_length, prompts, name)
        return prompts

    def evaluate_on(self, rows: list[Any]) -> Metrics:
        """Return DPO's metrics on pairs sampled from the present policy."""
        trajectories: list[Trajectory] = []
        with self.sampling():
            for part in self.parts_of_all(len(rows), self.config.run.batch_size):
                with self.phase("generate"), self.autocast():
                    how = self.config.sampling, 2, self.seed_of("evaluation")
                    trajectories += self.complete([rows[i] for i in part], *how, part)
        self.judged(self.reward, trajectories)
        batch, pairs = self.whole_batch(trajectories, 0), _ordered(self.cut(trajectories))
        metrics = {} if batch.rewards is None else batch.rewards.metrics
        metrics |= (
            completion_metrics(batch.ends) | _ties(pairs, trajectories) | self.judged(self.own_metrics, trajectories)
        )
        counts = self._counts_of_all(pairs)
        return metrics | (self._evaluate(pairs, counts) if counts[0] else {})

    # ---- a step ----

    def score(self, trajectories: Sequence[Trajectory]) -> None:
        """Fill ref_logps_t of all pairs, also of later ties, on a GPU while the host judges.

        The host does not wait for it.
        """
        if self.reference is None:
            return
        pairs = list(zip(trajectories[::2], trajectories[1::2], strict=True))
        with self.phase("score"), self.autocast(), torch.no_grad():
            for part in self.micro_batches(pairs, num_tokens_of(pairs, self.shares_prefixes)):
                some = [one for pair in part for one in pair]
                batch = TokenBatch.of(self.cut(some), self.policy.device)
                for trajectory, logps_t in zip(some, batch.split(self.reference.logps(batch)), strict=True):
                    trajectory.ref_logps_t = logps_t

    def reward(self, trajectories: Sequence[Trajectory]) -> list[Json]:
        """Fill `rewards` and `reward`; return the samples.

        With preference_fn the reward of the preferred completion is 1, of the other 0; both have 0.5 if they tie, and NaN if
        the call failed.
        """
        if self.preference is None:
            return super().reward(trajectories)
        with self.phase("reward"):
            rows = reward_columns(trajectories, self.policy.tokenizer)
            columns = {
                name: list(zip(values[::2], values[1::2], strict=True)) if name in CONVERSATION_COLUMNS else values[::2]
                for name, values in rows.items()
                if name not in ("completions", "completion_ids")
            }
            completions = rows["completions"]
            if not all(one.rewards for one in trajectories):
                better = self.preference(list(zip(completions[::2], completions[1::2], strict=True)), columns)
                for i, trajectory in enumerate(trajectories):
                    trajectory.reward = 1 - abs(better[i // 2] - i % 2)
                    trajectory.rewards = {self.preference.name: trajectory.reward}
            return sample_table(rows, preferred=[one.reward == 1 for one in trajectories])

    def learn(self, trajectories: Sequence[Trajectory], batch: WholeBatch) -> Metrics:
        """Update the weights by DPO's loss on the pairs that do not tie; return the metrics."""
        pairs = _ordered(self.cut(trajectories))
        metrics, counts = _ties(pairs, trajectories), self._counts_of_all(pairs)
        if not counts[0]:  # all pairs tie: nothing to learn
            return metrics | {"loss": 0.0}
        return metrics | self._learn(pairs, counts, None if self.reference is None else _ref_sums(pairs))

    def cut(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the trajectories to learn from, cut at max_length. Conversations are not cut."""
        most = None if self.player is not None else self.config.max_length
        if most is None:
            return list(trajectories)
        return [one if len(one) <= most else _first_tokens(one, most) for one in trajectories]

    def _counts_of_all(self, pairs: list[Pair]) -> tuple[int, int]:
        """Return the numbers of pairs and of chosen tokens of all processes."""
        num_pairs, num_tokens = (int(self.world.total(count)) for count in counts_of(pairs))
        return num_pairs, num_tokens


def _first_tokens(whole: Trajectory, most: int) -> Trajectory:
    return replace(whole, ids_T=whole.ids_T[:most], loss_mask_T=whole.loss_mask_T[:most], rollout_logps_t=None)


def _ordered(trajectories: Sequence[Trajectory]) -> list[Pair]:
    """Return (chosen, rejected) of each pair with different rewards."""
    pairs = zip(trajectories[::2], trajectories[1::2], strict=True)
    return [(a, b) if a.reward > b.reward else (b, a) for a, b in pairs if a.reward > b.reward or a.reward < b.reward]


def _ref_sums(pairs: Sequence[Pair]) -> torch.Tensor:
    """Return [P, 2], the reference's log-probs of each pair's completions."""
    rows = [one.ref_logps_t for pair in pairs for one in pair if one.ref_logps_t is not None]
    logps_n = joined(rows)
    index_n = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(row) for row in rows], dtype=torch.int64))
    return logps_n.new_zeros(len(rows)).index_add(0, on_device(index_n, logps_n.device), logps_n).view(-1, 2)


def _ties(pairs: Sequence[Pair], trajectories: Sequence[Trajectory]) -> Metrics:
    num_pairs = len(trajectories) // 2
    return {"preference/tied_fraction": Mean(num_pairs - len(pairs), num_pairs)}
