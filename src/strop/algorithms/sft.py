"""SFT: imitate given completions. loss = −(1/N) Σ log π(token), over the N loss tokens of the batch.

Loss tokens are the completion in rows with a prompt and a completion, the assistant's turns in conversations, and all
tokens but the first in whole texts.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from strop._checks import is_conversation
from strop._types import Array, Texts
from strop.config import SFTConfig
from strop.data.batch import TokenBatch, Trajectory
from strop.data.inputs import Ids, as_dicts, completion_rows, is_written, prompt_rows
from strop.data.offline import Limits, as_array
from strop.data.tokenize import LossMask, encode_rows
from strop.losses import NLL
from strop.training.trainer import Trainer


class SFT(Trainer):
    """Supervised fine-tuning.

    sft = SFT(model=model, learning_rate=1e-4)
    metrics = sft.train_step(prompt, completion)      # or sft.train(dataset)
    """

    Config = SFTConfig
    config: SFTConfig
    formats = ("prompt_completion", "language_modeling")

    def train_step(
        self, prompt: Texts, completion: Texts | None = None, *, prompt_mask: Array | None = None
    ) -> dict[str, float]:
        """Train on a batch; return the metrics.

        prompt        token ids (B, P), lists of ids of unequal lengths, or with a tokenizer texts or conversations
        completion    the same, (B, C), up to the first EOS; None trains on whole texts, given as prompt
        prompt_mask   (B, P), 0 at padding; without it the pad id at both ends of a prompt is padding
        """
        return self.run_step(lambda: self._step(self._trajectories(prompt, completion, prompt_mask)))

    def prepare(self, rows: Sequence[Any], name: str = "dataset") -> list[Trajectory]:
        """Return a trajectory for each row."""
        self.check_columns(rows, name)
        limits, encoded = self._limits, encode_rows(rows, self.tokenizer, name, self.config.assistant_only)
        return [
            self._trajectory(as_array(prompt), as_array(completion), f"{name}[{i}]", limits, loss_mask)
            for i, (prompt, completion, loss_mask) in enumerate(encoded)
        ]

    def step_on(self, rows: list[Any]) -> dict[str, float]:
        return self._step(rows if isinstance(rows[0], Trajectory) else self.prepare(rows, "rows"))

    def evaluate_on(self, rows: list[Any]) -> dict[str, float]:
        num_tokens, mine = sum(row.num_loss_tokens for row in rows), self.share(len(rows))
        own, loss = rows[mine.start : mine.stop], 0.0
        for part in self.eval_batches(own, [len(row) for row in own]):
            with self.autocast():
                loss += self.policy.loss(self._batch(part, num_tokens), NLL()).loss.item()
        loss = self.world.total(loss)
        return {"loss": loss, "perplexity": float(torch.tensor(loss, dtype=torch.float64).exp())}

    # ---- inside ----

    def _step(self, trajectories: list[Trajectory]) -> dict[str, float]:
        num_tokens, mine = sum(one.num_loss_tokens for one in trajectories), self.share(len(trajectories))
        own = trajectories[mine.start : mine.stop]
        lengths = [len(one) for one in own]
        batches = [self._batch(part, num_tokens) for part in self.micro_batches(own, lengths)]
        update = self.update(functools.partial(self.policy.loss, batch, NLL()) for batch in batches)
        self.count_tokens(sum(lengths))
        return update | {"completion/length": num_tokens / len(trajectories)}

    def _batch(self, trajectories: Sequence[Trajectory], num_tokens: int) -> TokenBatch:
        """Return a part of a batch with num_tokens loss tokens. The losses of the parts add up to the batch's."""
        weights = [NLL().weight(one.num_loss_tokens, num_tokens, 0) for one in trajectories]
        return TokenBatch.of(trajectories, self.policy.device, weights=weights, dtype=self.policy.loss_dtype)

    @property
    def _limits(self) -> Limits:
        return Limits(self.policy.check_ids, self.policy.max_length, self.config.max_length)

    def _trajectories(self, prompt: Texts, completion: Texts | None, prompt_mask: Array | None) -> list[Trajectory]:
        """Return a trajectory for each row of `train_step`'s arguments."""
        if is_written(prompt, "prompt", prompt_mask):
            alone = "messages" if is_conversation(prompt[0]) else "text"
            columns = {alone: prompt} if completion is None else {"prompt": prompt, "completion": completion}
            return self.prepare(as_dicts(columns), "rows")
        padding, limits = self.policy.padding(self.config.pad_id), self._limits
        prompts = prompt_rows(prompt, "prompt", prompt_mask, *padding)
        if completion is None:
            return [self._trajectory(row[:0], row, f"row {i}", limits) for i, row in enumerate(prompts)]
        completions = completion_rows(completion, "completion", len(prompts), *padding)
        pairs = zip(prompts, completions, strict=True)
        return [self._trajectory(*pair, f"row {i}", limits) for i, pair in enumerate(pairs)]

    def _trajectory(
        self, prompt: Ids, completion: Ids, where: str, limits: Limits, loss_mask: LossMask | None = None
    ) -> Trajectory:
        """Return the completion after its prompt. Raise if it has nothing to learn or does not fit."""
        if len(completion) <= (len(prompt) == 0):  # nothing predicts the first token of a text
            wanted = (
                "the completion must have at least one token" if len(prompt) else "a text must have at least two tokens"
            )
            raise ValueError(f"{where}: {wanted}, found {len(completion)}")
        for ids in (prompt, completion):
            limits.check(ids, where)
        return limits.trajectory(prompt, completion, where, loss_mask)
