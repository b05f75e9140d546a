"""`Scorer`: a sequence classifier with one label as algorithms see it, a number for each sequence.

The number is the head's of the hidden state of the sequence's last token. Batches are read packed where the model can, as
`Policy` reads them.

Shapes: S sequences, N tokens; H hidden.
"""

import functools
from dataclasses import replace

import torch
from torch import nn

from strop._types import Tokenizer
from strop.data.batch import TokenBatch
from strop.models.kinds import base_model, is_classifier, unwrapped
from strop.models.policy import Policy, forward_arguments, last_hidden_state


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
        self.scores_tokens = False
        """Whether a token's score is asked for too, as a critic's is: it must not depend on what comes after it."""

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

    def _try_hugging_face(self) -> None:
        """Fill in how rows are read; ValueError for a model that scores every token and looks ahead."""
        self.no_hidden_because = self.no_fusing_because = "it is a sequence classifier"
        rows = self._try_reading(self.decoder, last_hidden_state)
        if self.scores_tokens:
            states = functools.partial(self._read_padded, self.decoder, part=last_hidden_state)
            self.check_causality(rows.batch, lambda one: states(one)[one.places_n])
