"""Grammars: replies that match a JSON schema or are tool calls, because only tokens that may follow are drawn.

llguidance computes the tokens that may follow. Every engine takes a `Matcher` for each row that has a grammar, sets the
logits of all other tokens to −inf before it draws, and advances the matcher. Log-probs are therefore those of the
distribution over the allowed tokens.

Shapes: N rows of a step, V vocabulary, W words of 32 bits.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from strop._install import missing
from strop._types import Json, Tokenizer

BLANKS = r" |\n[ \t]{0,64}|"  # between parts of JSON; limited, since a model could add blanks for ever
MOST_KEPT = 64  # grammars cached by one server


class Grammars:
    """Makes grammars for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int | None, eos_ids: Sequence[int]) -> None:
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise ValueError(f"needs a fast tokenizer of transformers, found a {type(tokenizer).__name__}")
        _llguidance()
        from llguidance.hf import from_tokenizer

        self.vocab_size = vocab_size or len(tokenizer)  # type: ignore[arg-type]
        self._tokens: Any = from_tokenizer(tokenizer, n_vocab=self.vocab_size, eos_token=list(eos_ids) or None)  # type: ignore[arg-type]
        self._made = functools.lru_cache(maxsize=MOST_KEPT)(functools.partial(Grammar, self))

    def of_schema(self, schema: Json) -> "Grammar":
        """Return the grammar of a JSON schema. Raise ValueError if llguidance cannot follow it."""
        make = _llguidance().LLMatcher.grammar_from_json_schema
        return self._made(make(json.dumps(schema), overrides={"whitespace_pattern": BLANKS}))

    def of_rules(self, rules: str) -> "Grammar":
        """Return the grammar of rules in llguidance's form of Lark. Raise ValueError if llguidance cannot follow it."""
        return self._made(_llguidance().LLMatcher.grammar_from_lark(rules))


class Grammar:
    """The rules for a reply. Each reply has its own matcher."""

    def __init__(self, grammars: Grammars, rules: str) -> None:
        make = _llguidance().LLMatcher
        self.vocab_size, error = grammars.vocab_size, make.validate_grammar(rules, grammars._tokens)
        if not error:
            self._first = make(grammars._tokens, rules)
            first = self.matcher()  # some limits of llguidance show only at the first token
            first.write_allowed(np.empty((1, -(-self.vocab_size // 32)), np.int32), 0)
            error = first.error
        if error:
            raise ValueError(f"must have a schema that can be followed: {_short(error)}")

    def matcher(self) -> "Matcher":
        """Return a new matcher, which follows one reply from its beginning."""
        return Matcher(self._first.deep_copy(), self.vocab_size)


class Matcher:
    """Follows one reply in its grammar.

    num_tokens   number of tokens taken
    ended        True if no token may follow
    error        why the grammar cannot be followed further, such as a limit of llguidance; "" if it can
    """

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher, self.vocab_size = matcher, vocab_size
        self.num_tokens, self.error = 0, ""

    @property
    def ended(self) -> bool:
        return bool(self.error) or self._matcher.is_stopped()

    def write_allowed(self, bits_NW: np.ndarray, row: int) -> None:
        """Set the bits of the tokens that may follow, in this row of the array."""
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, bits_NW, row)
        if self._matcher.is_error():
            self._fail()
            bits_NW[row] = -1

    def take(self, token: int) -> None:
        """Advance by a token of the reply."""
        if not self.error and not self._matcher.consume_token(token):
            self._fail()
        self.num_tokens += 1

    def _fail(self) -> None:
        self.error = f"the grammar cannot be followed further: {_short(self._matcher.get_error())}"


Matchers = Sequence[Matcher | None]  # one per row; None for a row that may hold any text


def allowed_bits(matchers: Matchers) -> torch.Tensor:
    """Return [N, W] int32, a bit for each token that may follow. Rows without a matcher have all bits set."""
    vocab_size = next(one.vocab_size for one in matchers if one is not None)
    bits_NW = np.full((len(matchers), -(-vocab_size // 32)), -1, np.int32)
    for row, matcher in enumerate(matchers):
        if matcher is not None:
            matcher.write_allowed(bits_NW, row)
    return torch.from_numpy(bits_NW)


def bits_along(matcher: Matcher, ids: Sequence[int]) -> torch.Tensor:
    """Return [n, W] int32, the bits of the tokens that could stand at each of these n places. Advances the matcher."""
    bits = []
    for token in ids:
        bits.append(allowed_bits([matcher]))
        matcher.take(token)
    return torch.cat(bits)


def restricted(logits_NV: torch.Tensor, bits_NW: torch.Tensor) -> torch.Tensor:
    """Return the logits with −inf for tokens that may not follow."""
    bytes_NC = bits_NW.view(torch.uint8)
    bits_NC8 = bytes_NC[..., None] >> torch.arange(8, dtype=torch.uint8, device=bits_NW.device)
    return logits_NV.masked_fill((bits_NC8 & 1).flatten(1)[:, : logits_NV.shape[1]] == 0, -torch.inf)


def take(matchers: Matchers, tokens: Sequence[int]) -> list[int]:
    """Advance the matchers by the tokens drawn; return the rows whose replies have ended."""
    ended = []
    for row, (matcher, token) in enumerate(zip(matchers, tokens, strict=True)):
        if matcher is not None:
            matcher.take(token)
            if matcher.ended:
                ended.append(row)
    return ended


def _short(error: str) -> str:
    return f"{' '.join(error.partition('<state>')[0].split()):.200}"


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise missing("response_format or a forced call", "llguidance", "serve") from None
    return llguidance
