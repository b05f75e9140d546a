"""DPO: learn from pairs in which one completion is better than the other (arXiv 2305.18290), and its relatives.

    loss = preference_loss(log π(chosen), log π(rejected), log π_ref(chosen), log π_ref(rejected))

with the formulas of `strop.losses.preference_loss`. A completion's log-prob is the sum over its tokens up to its EOS;
the prompt's tokens never count.

B pairs, 2B trajectories: the chosen completions, then the rejected ones.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from strop._types import Array, Texts
from strop.config import DPOConfig
from strop.data.batch import TokenBatch, on_device
from strop.data.offline import Limits, Pair, num_tokens_of, pairs_of_columns, pairs_of_rows
from strop.losses import PreferenceLoss
from strop.losses.preference import pairs_loss
from strop.ops.head import widened
from strop.training.trainer import Mean, Metrics, Sum, Trainer, on_host


class DPO(Trainer):
    """Preference optimisation on pairs.

    dpo = DPO(model=model, ref_model=ref, beta=0.1, learning_rate=1e-4)
    metrics = dpo.train_step(prompt, chosen, rejected)      # or dpo.train(dataset)
    """

    Config = DPOConfig
    config: DPOConfig
    formats = ("preference",)

    def setup(self, ref_model: object) -> None:
        if self.config.loss.needs_reference:
            self.reference = self.policy.reference(ref_model)
        elif ref_model is not None:
            warnings.warn(f"ref_model has no effect: {self.config.loss.loss_type} has no reference", stacklevel=4)

    def train_step(
        self, prompt: Texts, chosen: Texts, rejected: Texts, *, prompt_mask: Array | None = None
    ) -> dict[str, float]:
        """Train on B pairs; return the metrics.

        prompt             token ids (B, P), lists of ids of unequal lengths, or with a tokenizer texts or conversations
        chosen, rejected   the same, (B, C) and (B, R); tokens after the first EOS are ignored
        prompt_mask        (B, P), 0 at padding; without it the pad id at both ends of a prompt is padding
        """
        return self.run_step(lambda: self._step(self._pairs(prompt, chosen, rejected, prompt_mask)))

    def prepare(self, rows: Sequence[object], name: str = "dataset") -> list[Pair]:
        """Return a pair of trajectories for each row."""
        self.check_columns(rows, name)
        return pairs_of_rows(rows, self.tokenizer, self._limits, name)

    def step_on(self, rows: list[Any]) -> dict[str, float]:
        return self._step(rows if isinstance(rows[0], tuple) else self.prepare(rows, "rows"))

    def evaluate_on(self, rows: list[Any]) -> dict[str, float]:
        mine = self.share(len(rows))
        return self._evaluate(rows[mine.start : mine.stop], counts_of(rows))

    def _evaluate(self, own: list[Pair], counts: tuple[int, int]) -> Metrics:
        """Return the metrics of this process's pairs, as their share of a dataset with these numbers of pairs and
        chosen tokens.
        """
        results = []
        for pairs in self.eval_batches(own, num_tokens_of(own, self.shares_prefixes)):
            with self.autocast():
                batch = self._batch(pairs)
                ref_logps_B2 = None if self.reference is None else _sums(self.reference.logps(batch), batch)
                results.append(self._loss(batch, ref_logps_B2, counts))
        return {"loss": Sum(sum(on_host([result.loss for result in results]))), **_metrics(results)}

    # ---- inside ----

    def _step(self, pairs: list[Pair]) -> dict[str, float]:
        mine = self.share(len(pairs))
        return self._learn(pairs[mine.start : mine.stop], counts_of(pairs))

    def _learn(
        self, pairs: list[Pair], counts: tuple[int, int], ref_logps_P2: torch.Tensor | None = None
    ) -> dict[str, float]:
        """Update on this process's pairs of a batch; `counts` are the batch's numbers of pairs and chosen tokens.

        ref_logps_P2   the reference's log-probs of (chosen, rejected) of each pair; None computes them
        """
        batches = self._batches(pairs)
        if ref_logps_P2 is None:
            ref_logps_P2 = self._reference_logps(batches)

        def of_these(part: list[int]) -> torch.Tensor | None:
            if ref_logps_P2 is None:
                return None
            return ref_logps_P2[on_device(torch.tensor(part).long(), ref_logps_P2.device)]

        update = self.update(functools.partial(self._loss, batch, of_these(part), counts) for part, batch in batches)
        self.count_tokens(sum(num_tokens_of(pairs)))
        return update | _metrics(update.parts)

    def _batches(self, pairs: Sequence[Pair]) -> list[tuple[list[int], TokenBatch]]:
        """Return the micro-batches: indices of their pairs, and the batch of their trajectories."""
        parts = self.micro_batches(range(len(pairs)), num_tokens_of(pairs, self.shares_prefixes))
        return [(part, self._batch([pairs[i] for i in part])) for part in parts]

    def _reference_logps(self, batches: Sequence[tuple[list[int], TokenBatch]]) -> torch.Tensor | None:
        """Return [P, 2], the reference's log-probs of each pair's two completions, in the order of the pairs; None
        without one.

        The host does not wait for the device.
        """
        if self.reference is None:
            return None
        with self.phase("score"), self.autocast():
            found = [_sums(self.reference.logps(batch), batch) for part, batch in batches]
            order = torch.tensor([i for part, _ in batches for i in part]).argsort()
            return torch.cat(found)[on_device(order, found[0].device)] if found else torch.zeros(0, 2)

    def _loss(self, batch: TokenBatch, ref_logps_B2: torch.Tensor | None, counts: tuple[int, int]) -> PreferenceLoss:
        """Return the loss of a part of a batch with these counts. The losses of the parts add up to the batch's."""
        logps_B2 = _sums(self.policy.logps(batch), batch)
        lengths = on_device(torch.tensor(batch.num_loss_tokens_S).long(), batch.device).view(2, -1)
        refs = (None, None) if ref_logps_B2 is None else ref_logps_B2.unbind(1)
        return pairs_loss(
            self.config.loss, logps_B2[:, 0], logps_B2[:, 1], refs[0], refs[1], lengths[0], lengths[1], *counts
        )

    def _batch(self, pairs: Sequence[Pair]) -> TokenBatch:
        return TokenBatch.of([chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs], self.policy.device)

    @property
    def _limits(self) -> Limits:
        return Limits(self.policy.check_ids, self.policy.max_length, self.config.max_length)

    def _pairs(self, prompt: Texts, chosen: Texts, rejected: Texts, prompt_mask: Array | None) -> list[Pair]:
        padding = self.policy.padding(self.config.pad_id)
        return pairs_of_columns(prompt, chosen, rejected, prompt_mask, self.tokenizer, padding, self._limits)


def _sums(logps_n: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Return [B, 2], the log-probs of (chosen, rejected)."""
    return batch.sums(logps_n).view(2, -1).T


def counts_of(pairs: Sequence[Pair]) -> tuple[int, int]:
    """Return the numbers of pairs and of chosen loss tokens. A batch's losses are divided by them."""
    return len(pairs), sum(chosen.num_loss_tokens for chosen, _ in pairs)


def _metrics(results: Sequence[PreferenceLoss]) -> Metrics:
    """Return means over all pairs of the micro-batches, on the device."""
    if not results:
        return {}
    chosen_B = widened(torch.cat([result.chosen_rewards for result in results]))
    rejected_B = widened(torch.cat([result.rejected_rewards for result in results]))
    found = {
        "preference/accuracy": chosen_B > rejected_B,
        "preference/margin": chosen_B - rejected_B,
        "rewards/chosen": chosen_B,
        "rewards/rejected": rejected_B,
    }
    return {name: Mean(values_B.sum(), len(values_B)) for name, values_B in found.items()}
