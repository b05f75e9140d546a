"""JSON mode: replies that match a JSON schema, because only tokens that may follow are drawn.

llguidance computes the allowed tokens. A row with a grammar draws one token per turn, and the model reads the whole row
again for it, without a cache. JSON mode is therefore for short replies.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from strop._install import missing
from strop._types import Json, Tokenizer
from strop.data.batch import TokenBatch, Trajectory
from strop.models import Policy
from strop.rollout.sampling import Sampling, draw

BLANKS = r" |\n[ \t]{0,64}|"  # between parts of JSON; limited, since a model could add blanks for ever
MOST_KEPT = 64  # grammars cached by one server; requests with equal schemas are decoded together


class Grammars:
    """Makes grammars for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int | None, eos_ids: Sequence[int]) -> None:
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise ValueError(
                f"response_format needs a fast tokenizer of transformers, found a {type(tokenizer).__name__}"
            )
        _llguidance()
        from llguidance.hf import from_tokenizer

        self.vocab_size = vocab_size or len(tokenizer)  # type: ignore[arg-type]
        self._tokens: Any = from_tokenizer(tokenizer, n_vocab=self.vocab_size, eos_token=list(eos_ids) or None)  # type: ignore[arg-type]
        self._made = functools.lru_cache(maxsize=MOST_KEPT)(lambda schema: Grammar(self, json.loads(schema)))

    def of_schema(self, schema: Json) -> "Grammar":
        """Return the grammar of a JSON schema. Raise ValueError if llguidance cannot follow it."""
        return self._made(json.dumps(schema))


class Grammar:
    """The rules for a reply. Each reply has its own matcher."""

    def __init__(self, grammars: Grammars, schema: Json) -> None:
        llguidance = _llguidance()
        self._tokens, self.vocab_size = grammars._tokens, grammars.vocab_size
        self._rules = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": BLANKS})
        if error := llguidance.LLMatcher.validate_grammar(self._rules, self._tokens):
            raise ValueError(f"response_format must have a schema that can be followed: {' '.join(error.split()):.200}")

    def matcher(self) -> Any:
        """Return a new matcher, which follows one reply from its beginning."""
        return _llguidance().LLMatcher(self._tokens, self._rules)

    def allowed(self, matchers: Sequence[Any]) -> torch.Tensor:
        """Return [B, V] bool: the tokens that may follow in each reply."""
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        bits = allocate_token_bitmask(len(matchers), self.vocab_size)
        for row, matcher in enumerate(matchers):
            fill_next_token_bitmask(matcher, bits, row)
        flags = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(flags[:, : self.vocab_size].astype(bool))


def draw_allowed(
    policy: Policy,
    prompts: Sequence[torch.Tensor],
    grammar: Grammar,
    matchers: Sequence[Any],
    sampling: Sampling,
    uniforms_B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw each row's next token among those its matcher allows, and advance the matchers.

    Returns ids [B, 1], and their log-probs [B, 1] under the distribution over allowed tokens.
    """
    batch = TokenBatch.of([Trajectory.of(ids_T, ids_T[:1]) for ids_T in prompts], policy.device)
    logits_BV = policy.logits(batch).float()  # of the token after each row; the loss token is a placeholder
    allowed_BV = grammar.allowed(matchers).to(logits_BV.device)
    logits_BV = logits_BV.masked_fill(~allowed_BV, -torch.inf)
    ids_B, logps_B = draw(logits_BV, uniforms_B.to(logits_BV.device), sampling)
    for matcher, token in zip(matchers, ids_B.tolist(), strict=True):
        if not matcher.consume_token(token):
            raise RuntimeError(f"the grammar does not take a token that it allows: {matcher.get_error()}")
    return ids_B[:, None].cpu(), logps_B[:, None].cpu()


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise missing("response_format", "llguidance", "serve") from None
    return llguidance
