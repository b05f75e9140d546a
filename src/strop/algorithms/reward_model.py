"""RewardModel: a number for a completion, learned from pairs (Bradley and Terry 1952; arXiv 2203.02155).

    loss = −log σ(r(chosen) − r(rejected) − margin) + center_coef·(r(chosen) + r(rejected))²

the mean over pairs. The model is a sequence classifier of transformers with one label, before and after; r is its number for
prompt and completion, EOS included. `ModelReward` makes a reward function of one.

B pairs, 2B lines: the chosen ones, then the rejected ones.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch.nn.functional import logsigmoid

from strop._checks import check_count, check_number, is_conversation
from strop._tensors import on_host
from strop.algorithms.dpo import DPO
from strop.config import RewardModelConfig
from strop.data.batch import TokenBatch, Trajectory, on_device, split
from strop.data.tokenize import encode_completion, encode_prompt
from strop.models import load_model
from strop.models.scorer import Scorer, as_scorer
from strop.training.state import Sum

NUM_BINS = 10  # of the calibration error


class Compared(NamedTuple):
    """A pair, and by how much the chosen one is to be better at least."""

    chosen: Trajectory
    rejected: Trajectory
    margin: float


class PairScores(NamedTuple):
    """The loss of some pairs as their share of the batch's, and their rewards."""

    loss: torch.Tensor
    chosen_B: torch.Tensor
    rejected_B: torch.Tensor


class RewardModel(DPO):
    """A reward model from pairs.

    reward = RewardModel(model="Qwen/Qwen2.5-0.5B", learning_rate=1e-5)     # or a …ForSequenceClassification
    metrics = reward.train_step(prompt, chosen, rejected)                   # or reward.train(dataset)
    grpo = GRPO(model=policy, reward_fn=reward.reward_fn(), …)
    """

    Config = RewardModelConfig  # type: ignore[assignment]
    config: RewardModelConfig  # type: ignore[assignment]
    policy: Scorer
    scores: ClassVar[bool] = True

    def setup(self, ref_model: Any) -> None:
        if ref_model is not None:
            raise ValueError(
                f"ref_model must be None, found a {type(ref_model).__name__}: RewardModel has no reference"
            )

    def train_step(
        self, prompt: Any, chosen: Any, rejected: Any, margin: Any = None, *, prompt_mask: Any = None
    ) -> dict[str, float]:
        """One training step on B pairs, given as to `DPO.train_step`. margin: B numbers; None, for all or in one, is 0."""
        pairs = self._pairs(prompt, chosen, rejected, prompt_mask)
        margins = margin.tolist() if hasattr(margin, "tolist") else [None] * len(pairs) if margin is None else margin
        if not isinstance(margins, (list, tuple)) or len(margins) != len(pairs):
            found = len(margins) if isinstance(margins, (list, tuple)) else repr(margins)
            raise ValueError(f"margin must have {len(pairs)} rows as prompt has, found {found}")
        rows = [
            _compared(pair, margin, f"pair {i}") for i, (pair, margin) in enumerate(zip(pairs, margins, strict=True))
        ]
        return self.run_step(lambda: self._step(rows))

    def prepare(self, rows: Sequence[Any], name: str = "dataset") -> list[Compared]:  # type: ignore[override]
        """A column `margin` is optional."""
        pairs = super().prepare(rows, name)
        return [
            _compared(pair, row.get("margin"), f"{name}[{i}]")
            for i, (pair, row) in enumerate(zip(pairs, rows, strict=True))
        ]

    def evaluate_on(self, rows: list[Any]) -> dict[str, float]:
        mine, results = self.share(len(rows)), []
        own = rows[mine.start : mine.stop]
        for part in self.eval_batches(own, _lengths(own)):
            with self.autocast():
                results.append(self._pair_scores(part, len(rows)))
        margins = [margin for result in results for margin in (result.chosen_B - result.rejected_B).tolist()]
        metrics = {"loss": Sum(sum(on_host([result.loss for result in results]))), **self._metrics(results)}
        error = calibration_error(torch.tensor(self.of_all(margins), dtype=torch.float64))
        return metrics | {"preference/calibration_error": error}

    def reward_fn(self) -> "ModelReward":
        """The model as it is now, for GRPO and others: it is not copied, so train one of the two at a time."""
        return ModelReward(self.policy)

    # ---- inside ----

    def _step(self, pairs: list[Any]) -> dict[str, float]:
        mine = self.share(len(pairs))
        own = pairs[mine.start : mine.stop]
        parts = self.micro_batches(own, _lengths(own))
        update = self.update(functools.partial(self._pair_scores, part, len(pairs)) for part in parts)
        self.count_tokens(sum(_lengths(own)))
        return update | self._metrics(update.parts)

    def _pair_scores(self, pairs: Sequence[Compared], num_pairs: int) -> PairScores:
        lines = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
        scores_2B = self.policy.scores(TokenBatch.of(lines, self.policy.device))[: len(lines)]  # of no line: none
        chosen_B, rejected_B = scores_2B.view(2, -1)
        margin_B = on_device(torch.tensor([pair.margin for pair in pairs], dtype=chosen_B.dtype), chosen_B.device)
        losses_B = -logsigmoid(chosen_B - rejected_B - margin_B)
        if self.config.center_coef:
            losses_B = losses_B + self.config.center_coef * (chosen_B + rejected_B).square()
        return PairScores(losses_B.sum() / num_pairs, chosen_B.detach(), rejected_B.detach())

    def _metrics(self, results: Sequence[PairScores]) -> dict[str, Any]:
        """Over all pairs of the micro-batches. The std takes the mean of all processes, so the rewards go to the host."""
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
    """A reward function: the model's number for each prompt with its completion. Batched, on the model's device, frozen.

    reward_fn = ModelReward("runs/reward/final")

    model        a folder, a name, a …ForSequenceClassification or a `Scorer`
    tokenizer    its own, where it has none; texts and conversations are encoded by it and its chat template, whatever
                 tokenizer the policy has. Without one, prompts and completions are ids
    num_tokens   at most so many in one forward
    """

    __name__ = "reward_model"

    def __init__(self, model: Any, tokenizer: Any = None, *, device: Any = None, num_tokens: int = 16384):
        check_count(num_tokens, "num_tokens", low=1)
        if isinstance(model, (str, Path)):
            model, loaded = load_model(model, device=device, scores=True)
            tokenizer = loaded if tokenizer is None else tokenizer
        self.policy, self.num_tokens = as_scorer(model, tokenizer), num_tokens

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        if len(prompts) != len(completions):
            raise ValueError(
                f"completions must be one for each of the {len(prompts)} prompts, found {len(completions)}"
            )
        lines = [self._line(*both) for both in zip(prompts, completions, strict=True)]
        for i, line in enumerate(lines):
            self.policy.check_ids(line.ids_T, f"prompt and completion {i}")
        parts = split(range(len(lines)), [len(line) for line in lines], 0, self.num_tokens, padded=self.policy.pads)
        found: dict[int, float] = {}
        with self.policy.evaluating():
            for part in parts:
                batch = TokenBatch.of([lines[i] for i in part], self.policy.device)
                found |= zip(part, self.policy.scores(batch).tolist(), strict=True)
        return [found[i] for i in range(len(lines))]

    def _line(self, prompt: Any, completion: Any) -> Trajectory:
        """Cut from the left where it is longer than the model reads: its end is what is judged."""
        tokenizer, limit = self.policy.tokenizer, self.policy.max_length
        if is_conversation(prompt) and isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        ids = encode_prompt(prompt, tokenizer) + encode_completion(prompt, completion, tokenizer)[0]
        return Trajectory.of([], ids if limit is None else ids[-limit:])


def _compared(pair: Any, margin: Any, where: str) -> Compared:
    margin = 0.0 if margin is None else margin
    check_number(margin, f"{where}: margin")
    return Compared(pair[0], pair[1], float(margin))


def _lengths(pairs: Sequence[Compared]) -> list[int]:
    return [len(pair.chosen) + len(pair.rejected) for pair in pairs]


def calibration_error(margins_B: torch.Tensor) -> float:
    """How far confidence and accuracy are apart: of pairs in bins of σ(|margin|), Σ share·|accuracy − mean confidence|."""
    confidence_B, right_B = margins_B.abs().sigmoid(), (margins_B > 0).double()
    bin_B = ((confidence_B - 0.5) * 2 * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    apart = torch.zeros(NUM_BINS, dtype=torch.float64, device=margins_B.device)
    return apart.index_add(0, bin_B, right_B - confidence_B).abs().sum().item() / max(len(margins_B), 1)
