"""`Scorer`: a sequence classifier with one label as algorithms see it, a number for each sequence.

The number is the head's of the hidden state of the sequence's last token. Batches are read packed where the model can, as
`Policy` reads them.

Shapes: S sequences, N tokens; H hidden.
"""

from dataclasses import replace

import torch
from torch import nn

from strop._types import Tokenizer
from strop.data.batch import TokenBatch, Trajectory
from strop.models import trial
from strop.models.kinds import base_model, is_classifier, of_config, unwrapped
from strop.models.policy import Policy, forward_arguments, last_hidden_state, read_packed


def as_scorer(model: object, tokenizer: Tokenizer | None = None) -> "Scorer":
    """A Scorer over the model; a Scorer comes back as it is, with the tokenizer if it had none."""
    if not isinstance(model, Scorer):
        return Scorer(model, tokenizer)
    if model.tokenizer is None:
        model.tokenizer = tokenizer
    return model


class Scorer(Policy):
    """A `…ForSequenceClassification` of transformers with one label and a head called `score`, with or without peft."""

    def __init__(self, model: object, tokenizer: Tokenizer | None = None):
        super().__init__(model, tokenizer)
        inner = base_model(unwrapped(self.model))
        if not is_classifier(inner) or inner.config.num_labels != 1 or not hasattr(inner, "score"):
            labels = f" with {inner.config.num_labels} labels" if is_classifier(inner) else ""
            raise TypeError(
                f"model must be a ForSequenceClassification of transformers with one label and a head called score, "
                f"found a {type(inner).__name__}{labels}"
            )
        self.kind = "hf"
        self._arguments = forward_arguments(inner)
        self.decoder: nn.Module = inner.base_model

    def scores(self, batch: TokenBatch) -> torch.Tensor:
        """[S] in float32 (float64 in float64); differentiable."""
        # what is read is the last token, not one that predicts
        return self.token_scores(replace(batch, places_n=batch.cu_seqlens[1:].long() - 1))

    def token_scores(self, batch: TokenBatch) -> torch.Tensor:
        """[n] of the states that predict the tokens that count."""
        if self.shards is not None and not self.shards.are_whole:
            return self.shards.read(lambda: self.token_scores(batch))
        hidden_nH = self._at_places(self.decoder, batch, last_hidden_state)
        return base_model(unwrapped(self.model)).score(hidden_nH)[:, 0].to(self.loss_dtype)

    def _try(self) -> None:
        """On two short sequences: whether the model keeps them apart."""
        self._tried = True
        self.no_hidden_because = self.no_fusing_because = "it is a sequence classifier"
        inner = unwrapped(self.model)
        self._modules = list(inner.modules())
        ids = torch.arange(1, 13) % (self.vocab_size or 13)
        batch = TokenBatch.of([Trajectory.of(ids[:1], ids[1:5]), Trajectory.of(ids[5:6], ids[6:])], self.device)
        with trial.tried(inner, self.device):
            rows = batch.padded(self.pad_id)
            wanted_NH = last_hidden_state(self._call_rows(self.decoder, rows)).flatten(0, 1)
            rules = self._no_packing() or trial.packing(
                lambda: read_packed(self._modules, self.decoder, batch, last_hidden_state),
                of_config(self.config, "num_hidden_layers"),
                wanted_NH.index_select(0, rows.index_N),
            )
        self.no_packing_because = rules if isinstance(rules, str) else None
