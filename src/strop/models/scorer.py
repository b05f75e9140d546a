"""`Scorer`: the interface of a sequence classifier with one label, which gives one scalar for each sequence.

The scalar is the head's output for the hidden state of the sequence's last token. Batches are read packed if the model
supports it, as in `Policy`.

Shapes: S sequences, N tokens; H hidden.
"""

import functools
from dataclasses import replace

import torch
from torch import nn

from strop._types import Tokenizer
from strop.data.batch import TokenBatch
from strop.models import trial
from strop.models.kinds import base_model, is_classifier, unwrapped
from strop.models.policy import Policy, forward_arguments, last_hidden_state


def as_scorer(model: object, tokenizer: Tokenizer | None = None) -> "Scorer":
    """Return a Scorer of the model. A Scorer is returned as it is; its tokenizer is filled in if it had none."""
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
        self.arguments = forward_arguments(inner)
        self.decoder: nn.Module = inner.base_model
        self.scores_tokens = False
        """Whether a token's score is asked for too, as a critic's is: it must not depend on what comes after it."""

    def scores(self, batch: TokenBatch) -> torch.Tensor:
        """Return the scores [S], differentiable, in float32 (float64 for a float64 model)."""
        # read the last token's state, not the state that predicts it
        return self.token_scores(replace(batch, places_n=batch.cu_seqlens[1:].long() - 1))

    def token_scores(self, batch: TokenBatch) -> torch.Tensor:
        """Return the scores [n] of the states that predict the tokens of the loss."""
        if self.shards is not None and not self.shards.are_whole:
            return self.shards.read(lambda: self.token_scores(batch))
        hidden_nH = self._at_places(self.decoder, batch, last_hidden_state)
        return base_model(unwrapped(self.model)).score(hidden_nH)[:, 0].to(self.loss_dtype)

    def fill_in_reading(self) -> None:
        """Fill in how rows are read. Raise a ValueError if tokens are scored and the model is not causal."""
        self.no_hidden_because = self.no_fusing_because = "it is a sequence classifier"
        rows = trial.try_reading(self, self.decoder, last_hidden_state)
        if self.scores_tokens:
            states = functools.partial(self.read_padded, self.decoder, part=last_hidden_state)
            self.check_causality(rows.batch, lambda one: states(one)[one.places_n])
