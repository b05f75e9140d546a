"""`Critic`: a value for each token of the loss, from a head on the policy's hidden states or from a separate model.

Shapes: n tokens that count, H hidden.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from strop.config import RunConfig
from strop.data.batch import TokenBatch
from strop.models.kinds import shares
from strop.models.loading import load_model
from strop.models.policy import Policy
from strop.models.prepare import check_precision, prepared_model
from strop.models.scorer import Scorer, as_scorer
from strop.ops.linear import LMHead


class Critic:
    """The value function: a scalar for each token of the loss, computed from the state that predicts the token.

    given   None: a new linear head on the policy's hidden states, initialised to 0; else a sequence classifier with one
            label (a module, a folder or a name), whose head is applied at every token
    run     its dropout and gradient_checkpointing also apply to a separate critic model
    """

    def __init__(self, policy: Policy, given: object, run: RunConfig):
        self.scorer: Scorer | None = None
        if given is None:
            width = policy.hidden_size
            if width is None:
                raise ValueError(
                    f"critic must be given: there is no head to put on the policy's hidden states, for {policy.no_hidden_because}"
                )
            self.module: nn.Module = nn.Linear(width, 1, dtype=policy.loss_dtype, device=policy.device)
            nn.init.zeros_(self.module.weight)
            nn.init.zeros_(self.module.bias)
            return
        if isinstance(given, (str, Path)):
            given, _ = load_model(given, dtype=torch.float32, device=policy.device, scores=True)
        try:
            self.scorer = as_scorer(given)
        except TypeError as error:
            raise TypeError(str(error).replace("model", "critic", 1)) from None
        self.scorer.scores_tokens = True
        self.scorer.set_sharing(policy.share_prefixes)
        self.module = prepared_model(self.scorer, replace(run, compile=False), None)
        check_precision(self.module)
        if shares(policy.model, self.module):
            raise ValueError("critic must not share parameters with model, which has an optimiser of its own")
        if None not in (sizes := (policy.vocab_size, self.scorer.vocab_size)) and sizes[1] < sizes[0]:  # type: ignore[operator]
            raise ValueError(f"critic must know the model's {sizes[0]} tokens, found {sizes[1]}")

    def values(self, batch: TokenBatch, head: LMHead | None) -> torch.Tensor:
        """Return the values [n]. head   the policy's hidden states with its LM head, if the critic is a head on them"""
        if self.scorer is not None:
            return self.scorer.token_scores(batch.to(self.scorer.device)).to(batch.device)
        assert head is not None
        assert isinstance(self.module, nn.Linear)
        return self.module(head.hidden_NH.to(self.module.weight.dtype))[:, 0]
