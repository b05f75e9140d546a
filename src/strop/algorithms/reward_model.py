"""RewardModel: learns from pairs to give a completion a score (Bradley and Terry 1952; arXiv 2203.02155).

    loss = −log σ(r(chosen) − r(rejected) − margin) + center_coef·(r(chosen) + r(rejected))²

averaged over pairs. The model is a transformers sequence classifier with one label, before and after training; r is
its output for prompt and completion, EOS included. `ModelReward` makes a reward function of it.

B pairs, 2B trajectories: the chosen ones, then the rejected ones.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch.nn.functional import logsigmoid

from strop._checks import check_count, check_number, is_conversation
from strop._types import Array, Texts, Tokenizer
from strop.config import RewardModelConfig
from strop.data.batch import TokenBatch, Trajectory, on_device, shared_prefixes, split
from strop.data.formats import column_counts
from strop.data.offline import Limits, Pair, num_tokens_of, pairs_of_columns, pairs_of_rows
from strop.data.tokenize import encode_row
from strop.models import load_model
from strop.models.scorer import Scorer, as_scorer
from strop.training.trainer import Metrics, Sum, Trainer, on_host

NUM_BINS = 10  # bins of the calibration error


class PairScores(NamedTuple):
    """The loss of some pairs as their share of the batch's, and their rewards."""

    loss: torch.Tensor
    chosen_B: torch.Tensor
    rejected_B: torch.Tensor


class RewardModel(Trainer):
    """A reward model learned from pairs.

    reward = RewardModel(model="Qwen/Qwen2.5-0.5B", learning_rate=1e-5)     # or a …ForSequenceClassification
    metrics = reward.train_step(prompt, chosen, rejected)                   # or reward.train(dataset)
    grpo = GRPO(model=policy, reward_fn=reward.reward_fn(), …)
    """

    Config = RewardModelConfig
    config: RewardModelConfig
    formats = ("preference",)
    policy: Scorer
    scores: ClassVar[bool] = True

    def train_step(
        self, prompt: Texts, chosen: Texts, rejected: Texts, margin: object = None, *, prompt_mask: Array | None = None
    ) -> dict[str, float]:
        """Train on B pairs; return the metrics.

        prompt             token ids (B, P), lists of ids of unequal lengths, or with a tokenizer texts or conversations
        chosen, rejected   the same, (B, C) and (B, R); tokens after the first EOS are ignored
        margin             the wanted least difference of each pair's rewards: B numbers; None, for all or for one, is 0
        prompt_mask        (B, P), 0 at padding; without it the pad id at both ends of a prompt is padding
        """
        padding = self.policy.padding(self.config.pad_id)
        pairs = pairs_of_columns(prompt, chosen, rejected, prompt_mask, self.tokenizer, padding, self._limits)
        margins = margin.tolist() if hasattr(margin, "tolist") else [None] * len(pairs) if margin is None else margin
        if not isinstance(margins, (list, tuple)) or len(margins) != len(pairs):
            found = len(margins) if isinstance(margins, (list, tuple)) else repr(margins)
            raise ValueError(f"margin must have {len(pairs)} rows as prompt has, found {found}")
        for i, (pair, value) in enumerate(zip(pairs, margins, strict=True)):
            pair[0].row = {"margin": as_margin(value, f"pair {i}")}
        return self.run_step(lambda: self._step(pairs))

    def check_columns(self, rows: Sequence[Any], name: str) -> None:
        super().check_columns(rows, name)
        if column_counts(rows).get("margin"):
            for i, row in enumerate(rows):
                as_margin(row.get("margin"), f"{name}[{i}]")

    def prepare(self, rows: Sequence[Any], name: str = "dataset") -> list[Pair]:
        """Return a pair of trajectories for each row. The margin, an optional column, is in the chosen one's `row`."""
        self.check_columns(rows, name)
        pairs = pairs_of_rows(rows, self.tokenizer, self._limits, name)
        for i, (pair, row) in enumerate(zip(pairs, rows, strict=True)):
            pair[0].row = {"margin": as_margin(row.get("margin"), f"{name}[{i}]")}
        return pairs

    def step_on(self, rows: list[Any]) -> dict[str, float]:
        return self._step(rows if isinstance(rows[0], tuple) else self.prepare(rows, "rows"))

    def evaluate_on(self, rows: list[Any]) -> dict[str, float]:
        mine, results = self.share(len(rows)), []
        own = rows[mine.start : mine.stop]
        for part in self.eval_batches(own, num_tokens_of(own, self.shares_prefixes)):
            with self.autocast():
                results.append(self._pair_scores(part, len(rows)))
        margins = [margin for result in results for margin in (result.chosen_B - result.rejected_B).tolist()]
        metrics = {"loss": Sum(sum(on_host([result.loss for result in results]))), **self._metrics(results)}
        error = calibration_error(torch.tensor(self.of_all(margins), dtype=torch.float64))
        return metrics | {"preference/calibration_error": error}

    def reward_fn(self) -> "ModelReward":
        """Return the present model as a reward function for GRPO and others.

        It is not copied: train one of the two at a time.
        """
        return ModelReward(self.policy)

    # ---- inside ----

    @property
    def _limits(self) -> Limits:
        return Limits(self.policy.check_ids, self.policy.max_length, self.config.max_length)

    def _step(self, pairs: list[Pair]) -> dict[str, float]:
        mine = self.share(len(pairs))
        own = pairs[mine.start : mine.stop]
        parts = self.micro_batches(own, num_tokens_of(own, self.shares_prefixes))
        update = self.update(functools.partial(self._pair_scores, part, len(pairs)) for part in parts)
        self.count_tokens(sum(num_tokens_of(own)))
        return update | self._metrics(update.parts)

    def _pair_scores(self, pairs: Sequence[Pair], num_pairs: int) -> PairScores:
        trajectories = [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]
        batch = TokenBatch.of(trajectories, self.policy.device)
        scores_2B = self.policy.scores(batch)[: len(trajectories)]  # an empty batch has no scores
        chosen_B, rejected_B = scores_2B.view(2, -1)
        margin_B = on_device(
            torch.tensor([chosen.row["margin"] for chosen, _ in pairs], dtype=chosen_B.dtype), chosen_B.device
        )
        losses_B = -logsigmoid(chosen_B - rejected_B - margin_B)
        if self.config.center_coef:
            losses_B = losses_B + self.config.center_coef * (chosen_B + rejected_B).square()
        return PairScores(losses_B.sum() / num_pairs, chosen_B.detach(), rejected_B.detach())

    def _metrics(self, results: Sequence[PairScores]) -> Metrics:
        """Return metrics over all pairs. The std needs the mean over all processes, so the rewards go to the host."""
        pairs = [pair for r in results for pair in zip(r.chosen_B.tolist(), r.rejected_B.tolist(), strict=True)]
        pairs_B2 = torch.tensor(self.of_all(pairs), dtype=torch.float64)
        chosen_B, rejected_B = pairs_B2.unbind(1)
        return {
            "preference/accuracy": (chosen_B > rejected_B).double().mean(),
            "preference/margin": (chosen_B - rejected_B).mean(),
            "reward/mean": pairs_B2.mean(),
            "reward/std": pairs_B2.std(correction=0),
        }


class ModelReward:
    """A reward function: the frozen model's score of each prompt with its completion. Batched, on the model's device.

    reward_fn = ModelReward("runs/reward/final")

    model        a folder, a name, a …ForSequenceClassification or a `Scorer`
    tokenizer    a tokenizer if the model has none. Texts and conversations are encoded by it and its chat template,
                 whatever tokenizer the policy has. Without one, prompts and completions are ids
    num_tokens   maximum number of tokens in one forward
    """

    __name__ = "reward_model"

    def __init__(self, model: Any, tokenizer: Tokenizer | None = None, *, device: Any = None, num_tokens: int = 16384):
        check_count(num_tokens, "num_tokens", low=1)
        if isinstance(model, (str, Path)):
            model, loaded = load_model(model, device=device, scores=True)
            tokenizer = loaded if tokenizer is None else tokenizer
        self.policy, self.num_tokens = as_scorer(model, tokenizer), num_tokens

    @torch.no_grad()
    def __call__(self, prompts: Sequence[object], completions: Sequence[object]) -> list[float]:
        if len(prompts) != len(completions):
            raise ValueError(
                f"completions must be one for each of the {len(prompts)} prompts, found {len(completions)}"
            )
        trajectories = [self._trajectory(*both) for both in zip(prompts, completions, strict=True)]
        for i, trajectory in enumerate(trajectories):
            self.policy.check_ids(trajectory.ids_T, f"prompt and completion {i}")
        lengths = [len(one) for one in trajectories]
        groups = shared_prefixes(trajectories) if self.policy.shares else ()
        parts = split(range(len(lengths)), lengths, 0, self.num_tokens, padded=self.policy.pads, groups=groups)
        found: dict[int, float] = {}
        with self.policy.evaluating():
            for part in parts:
                batch = TokenBatch.of([trajectories[i] for i in part], self.policy.device)
                found |= zip(part, self.policy.scores(batch).tolist(), strict=True)
        return [found[i] for i in range(len(trajectories))]

    def _trajectory(self, prompt: object, completion: object) -> Trajectory:
        """Return prompt and completion as a trajectory.

        If the model cannot read it all, its beginning is cut: the end is judged.
        """
        tokenizer, limit = self.policy.tokenizer, self.policy.max_length
        if is_conversation(prompt) and isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        prompt_ids, completion_ids, _ = encode_row({"prompt": prompt, "completion": completion}, tokenizer)
        ids = prompt_ids + completion_ids
        return Trajectory.of([], ids if limit is None else ids[-limit:])


def as_margin(margin: Any, where: str) -> float:
    """Return the wanted least difference of a pair's rewards as a float; None is 0."""
    margin = 0.0 if margin is None else margin
    check_number(margin, f"{where}: margin")
    return float(margin)


def calibration_error(margins_B: torch.Tensor) -> float:
    """Return Σ share·|accuracy − mean confidence| over bins of the confidence σ(|margin|)."""
    confidence_B, right_B = margins_B.abs().sigmoid(), (margins_B > 0).double()
    bin_B = ((confidence_B - 0.5) * 2 * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    apart = torch.zeros(NUM_BINS, dtype=torch.float64, device=margins_B.device)
    return apart.index_add(0, bin_B, right_B - confidence_B).abs().sum().item() / max(len(margins_B), 1)
