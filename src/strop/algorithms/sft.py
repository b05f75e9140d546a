"""SFT: imitate given completions. loss = −(1/N) Σ log π(token), over the N tokens of the batch that count.

Of rows with a prompt and a completion the completion counts; of whole texts everything but the first token. With
`packing` several sequences share a row, each attending only to itself: the same loss on fewer padded tokens.

B rows, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from strop.algorithms.inputs import Ids, as_dicts, as_rows, declared_pad_id, fit, is_written, until_eos, without_padding
from strop.algorithms.packing import check_packing, collate_rows
from strop.algorithms.trainer import Trainer
from strop.config import OptimConfig, TrainerConfig, check_count
from strop.data.collate import SequenceBatch
from strop.data.formats import is_conversation
from strop.models.policy import Head, counted
from strop.ops import linear_grpo_loss

Example = tuple[Ids, Ids]  # prompt, completion


@dataclass(frozen=True, kw_only=True)
class SFTConfig(TrainerConfig):
    """Options of SFT.

    max_length   sequences are cut to so many tokens; None cuts nothing. With packing also the length of a packed row.
    packing      several sequences in a row, for Hugging Face models that keep them apart
    pad_id       the padding in what train_step is given; None is what tokenizer or model say
    """

    max_length: int | None = None
    packing: bool = False
    pad_id: int | None = None
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=2e-5))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length is not None:
            check_count("max_length", self.max_length, low=2)


class SFT(Trainer):
    """Supervised fine-tuning.

    sft = SFT(model=model, learning_rate=1e-4)
    metrics = sft.train_step(prompt, completion)      # or sft.train(dataset)
    """

    Config = SFTConfig
    config: SFTConfig

    def setup(self, ref_model: Any) -> None:
        super().setup(ref_model)
        if self.config.packing:
            check_packing(self.policy)

    def train_step(self, prompt: Any, completion: Any = None, *, prompt_mask: Any = None) -> dict[str, float]:
        """One step on token ids: prompts (B, P) and completions (B, C), or whole texts alone, all of which count.

        Padding of prompts and texts is what equals the pad id at their sides, or what prompt_mask has 0 for. Completions
        end at their first EOS. With a tokenizer also lists of texts or conversations.
        """
        return self.run_step(lambda: self._step(self._examples(prompt, completion, prompt_mask)))

    def prepare(self, rows: Sequence[Any], name: str = "dataset") -> list[Example]:
        from strop.data.formats import check_rows
        from strop.data.tokenize import encode_row, row_named

        check_rows(rows, ["prompt_completion", "language_modeling"], where=name, what="SFT")
        examples = []
        for i, row in enumerate(rows):
            with row_named(f"{name}[{i}]"):
                prompt, completion = (torch.tensor(part).long() for part in encode_row(row, self.tokenizer))
            examples.append(self._checked(prompt, completion, f"{name}[{i}]"))
        return examples

    def step_on(self, rows: list[Any]) -> dict[str, float]:
        return self._step(rows if isinstance(rows[0], tuple) else self.prepare(rows, "rows"))

    def evaluate_on(self, rows: list[Any]) -> dict[str, float]:
        num_tokens = sum(_num_counted(row) for row in rows)
        loss = 0.0
        for part in self.eval_batches(rows, _lengths(rows)):
            with self.autocast():
                loss += self._loss(self._collate(part), num_tokens).item()
        return {"loss": loss, "perplexity": float(torch.tensor(loss, dtype=torch.float64).exp())}

    # ---- inside ----

    def _step(self, examples: list[Example]) -> dict[str, float]:
        num_tokens = sum(_num_counted(example) for example in examples)
        parts = [self._collate(part) for part in self.micro_batches(examples, _lengths(examples))]
        metrics = self.update(lambda batch=batch: self._loss(batch, num_tokens) for batch in parts)  # type: ignore[misc]
        self.count_tokens(sum(_lengths(examples)))
        return metrics | {"completion/length": num_tokens / len(examples)}

    def _loss(self, batch: SequenceBatch, num_tokens: int) -> torch.Tensor:
        """This part's share of the mean over all tokens of the batch: shares add up, however it is cut."""
        if torch.is_grad_enabled() and (head := self.policy.hidden(batch)) is not None:
            return learnable_nll(head, batch, num_tokens)
        return -self.policy.logps(batch).sum() / num_tokens

    def _collate(self, examples: Sequence[Example]) -> SequenceBatch:
        return collate_rows(examples, self.policy, self.config.packing, self.config.max_length)

    def _examples(self, prompt: Any, completion: Any, prompt_mask: Any) -> list[Example]:
        if is_written(prompt, "prompt", prompt_mask):
            alone = "messages" if is_conversation(prompt[0]) else "text"
            names = {alone if completion is None else "prompt": prompt, "completion": completion}
            return self.prepare(as_dicts({name: value for name, value in names.items() if value is not None}), "rows")
        pad_id = declared_pad_id(self.policy) if self.config.pad_id is None else self.config.pad_id
        eos_ids = self.policy.eos_ids
        prompts = as_rows(prompt, "prompt", prompt_mask)
        if prompt_mask is None:
            prompts = [without_padding(row, pad_id, eos_ids) for row in prompts]
        if completion is None:
            return [self._checked(row[:0], row, f"row {i}") for i, row in enumerate(prompts)]
        completions = [until_eos(row, pad_id, eos_ids) for row in as_rows(completion, "completion")]
        if len(completions) != len(prompts):
            raise ValueError(f"completion must have {len(prompts)} rows as prompt has, found {len(completions)}")
        pairs = zip(prompts, completions, strict=True)
        return [self._checked(*pair, f"row {i}") for i, pair in enumerate(pairs)]

    def _checked(self, prompt: Ids, completion: Ids, where: str) -> Example:
        if not _num_counted((prompt, completion)):
            wanted = (
                "the completion must have at least one token" if len(prompt) else "a text must have at least two tokens"
            )
            raise ValueError(f"{where}: {wanted}, found {len(completion)}")
        self.policy.check_ids(torch.cat([prompt, completion]), where)
        return prompt, fit(prompt, completion, self.config.max_length, self.policy.max_length, where)


def learnable_nll(head: Head, batch: SequenceBatch, num_tokens: int) -> torch.Tensor:
    """−Σ log π / num_tokens with its gradient made on the way: three products with the head's weight, where log-probs, which
    cannot know what comes back, take four.

    −A·log π with A = 1 is CISPO's loss on policy, its ratio being 1.
    """
    hidden_BTH, weight, bias = head
    return linear_grpo_loss(
        hidden_BTH, weight, batch.input_ids_BT, None, None, counted(batch), bias=bias,
        advantages=hidden_BTH.new_ones(len(hidden_BTH)), loss_type="cispo", clip_eps=(1.0, 1.0), num_tokens=num_tokens,
    ).loss  # fmt: skip


def _lengths(examples: Sequence[Example]) -> list[int]:
    return [len(prompt) + len(completion) for prompt, completion in examples]


def _num_counted(example: Example) -> int:
    """Tokens that something predicts: the first of a text is not."""
    prompt, completion = example
    return len(completion) - (len(prompt) == 0)
