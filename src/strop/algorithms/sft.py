"""SFT: imitate given completions. loss = −(1/N) Σ log π(token), over the N tokens of the batch that count.

Of rows with a prompt and a completion the completion counts; of conversations the assistant's turns; of whole texts
everything but the first token.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from strop._checks import is_conversation
from strop.config import SFTConfig
from strop.data.batch import TokenBatch, Trajectory
from strop.data.formats import check_rows
from strop.data.inputs import Ids, as_dicts, completion_rows, fit, is_written, prompt_rows
from strop.data.tokenize import encode_row, row_named
from strop.losses import NLL
from strop.training.trainer import Trainer


class SFT(Trainer):
    """Supervised fine-tuning.

    sft = SFT(model=model, learning_rate=1e-4)
    metrics = sft.train_step(prompt, completion)      # or sft.train(dataset)
    """

    Config = SFTConfig
    config: SFTConfig

    def train_step(self, prompt: Any, completion: Any = None, *, prompt_mask: Any = None) -> dict[str, float]:
        """One training step.

        prompt        token ids (B, P), lists of ids of unequal lengths, or with a tokenizer texts or conversations
        completion    the same, (B, C), up to the first EOS; None trains on whole texts, given as prompt
        prompt_mask   (B, P), 0 at padding; without it the pad id at both ends of a prompt is padding
        """
        return self.run_step(lambda: self._step(self._examples(prompt, completion, prompt_mask)))

    def prepare(self, rows: Sequence[Any], name: str = "dataset") -> list[Trajectory]:
        check_rows(rows, ["prompt_completion", "language_modeling"], where=name, what="SFT")
        examples = []
        for i, row in enumerate(rows):
            with row_named(f"{name}[{i}]"):
                prompt, completion, counts = encode_row(row, self.tokenizer, self.config.assistant_only)
            ids = torch.tensor(prompt).long(), torch.tensor(completion).long()
            examples.append(self._checked(*ids, f"{name}[{i}]", counts))
        return examples

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

    def _step(self, examples: list[Trajectory]) -> dict[str, float]:
        num_tokens, mine = sum(one.num_loss_tokens for one in examples), self.share(len(examples))
        own = examples[mine.start : mine.stop]
        lengths = [len(one) for one in own]
        batches = [self._batch(part, num_tokens) for part in self.micro_batches(own, lengths)]
        update = self.update(functools.partial(self.policy.loss, batch, NLL()) for batch in batches)
        self.count_tokens(sum(lengths))
        return update | {"completion/length": num_tokens / len(examples)}

    def _batch(self, examples: Sequence[Trajectory], num_tokens: int) -> TokenBatch:
        """A part of a batch with so many tokens that count: shares of the mean over them add up, however it is cut."""
        weights = [NLL().weight(one.num_loss_tokens, num_tokens, 0) for one in examples]
        return TokenBatch.of(examples, self.policy.device, weights=weights, dtype=self.policy.loss_dtype)

    def _examples(self, prompt: Any, completion: Any, prompt_mask: Any) -> list[Trajectory]:
        if is_written(prompt, "prompt", prompt_mask):
            alone = "messages" if is_conversation(prompt[0]) else "text"
            names = {alone if completion is None else "prompt": prompt, "completion": completion}
            return self.prepare(as_dicts({name: value for name, value in names.items() if value is not None}), "rows")
        padding = self.policy.padding(self.config.pad_id)
        prompts = prompt_rows(prompt, "prompt", prompt_mask, *padding)
        if completion is None:
            return [self._checked(row[:0], row, f"row {i}") for i, row in enumerate(prompts)]
        completions = completion_rows(completion, "completion", len(prompts), *padding)
        pairs = zip(prompts, completions, strict=True)
        return [self._checked(*pair, f"row {i}") for i, pair in enumerate(pairs)]

    def _checked(self, prompt: Ids, completion: Ids, where: str, counts: Any = None) -> Trajectory:
        if len(completion) <= (len(prompt) == 0):  # nothing predicts the first token of a text
            wanted = (
                "the completion must have at least one token" if len(prompt) else "a text must have at least two tokens"
            )
            raise ValueError(f"{where}: {wanted}, found {len(completion)}")
        self.policy.check_ids(torch.cat([prompt, completion]), where)
        completion = fit(prompt, completion, self.config.max_length, self.policy.max_length, where)
        return Trajectory.of(prompt, completion, counts)
