"""The contract between `MoETransformer` and its engines, which are subclasses of `MoEEngine`.

The model checks every input, so an engine may rely on these:

    tokens_BT            int64, C-contiguous, every id in [0, V), B ≥ 1, 1 ≤ T
    attention_mask_BT    None (all real), or bool, C-contiguous, at least one True in each row; False is padding
    params               {name: array} exactly as `config.parameter_shapes()` names, orders and shapes them,
                         C-contiguous, all float32 or all float64

**Parameters** are held by reference. The optimiser and torch change them in place between calls, so an engine keeps
no copy of a weight. They do not change between a `forward_saved` and its `backward`, which may read them.

**Padding** may be anywhere (left, right, between). A padded row has the results of the row without padding: positions
count real tokens from 0, a query sees the real tokens up to itself, the router's load counts real tokens only. Logits at
padding are 0, and `dlogits` is ignored there. A row has at most `config.max_seq_len` real tokens.

**Router ties.** Among equal probabilities the expert with the lower index is chosen first.

**Log-probs.** counts_BT is bool, C-contiguous, True only at real tokens, never at the first of its row. These tokens
are scored with the arithmetic of `sample`, so a drawn token gets the log-prob it was drawn with, bit for bit. Elsewhere
log-probs and entropies are 0, and their gradients are ignored.

**Gradients** are {name: array} of every parameter (zeros if it had no effect), in its dtype and shape. With `out` they
overwrite those arrays, and `out` is returned.

Shapes: B rows, T columns, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from strop.moe.config import MoEConfig
from strop.moe.optim import adamw_update_all
from strop.moe.sampling import sample

Arrays = dict[str, np.ndarray]


@dataclass
class SavedForward:
    """The results of a forward and the data for its backward. Any number may exist; each serves one `backward`."""

    logits_BTV: np.ndarray
    aux_loss: float  # N·Σ fᵢ·Pᵢ, without its coefficient
    state: Any  # private to the engine


@dataclass
class SavedLogps:
    """Log-probs and the data for their backward, with the rules of `SavedForward`."""

    logps_BT: np.ndarray  # float64, like entropy_BT
    entropy_BT: np.ndarray
    state: Any


class KVCache(ABC):
    """The keys and values of B rows. Row b holds `lengths_B[b]` real tokens; padding is never stored."""

    lengths_B: np.ndarray  # int64
    capacity: int  # the maximum number of tokens per row

    @abstractmethod
    def select_rows(self, rows: np.ndarray) -> "KVCache":
        """Return a new cache of the given rows (int64, in that order, repeats allowed)."""

    @abstractmethod
    def copy_row(self, to: int, source: "KVCache", row: int) -> None:
        """Copy a row of another cache of this engine, of any capacity, to the row `to`."""


class MoEEngine(ABC):
    """The computation with a model's parameters. The module's docstring has the contract."""

    name: ClassVar[str]
    dtypes: ClassVar[tuple[type, ...]] = (np.float32, np.float64)
    """Parameter dtypes the engine computes in; the model refuses others with a clear error."""

    def __init__(self, config: MoEConfig, params: Arrays):
        self.config = config
        self.params = params

    @abstractmethod
    def forward(self, tokens_BT: np.ndarray, attention_mask_BT: np.ndarray | None = None) -> np.ndarray:
        """Return logits_BTV in the parameters' dtype, a new array that the caller owns. Save nothing for a backward."""

    @abstractmethod
    def forward_saved(self, tokens_BT: np.ndarray, attention_mask_BT: np.ndarray | None = None) -> SavedForward:
        """Return the logits, the auxiliary loss and the data for `backward`. The caller may overwrite the logits."""

    @abstractmethod
    def backward(
        self, saved: SavedForward, dlogits_BTV: np.ndarray, daux_loss: float = 0.0, out: Arrays | None = None
    ) -> Arrays:
        """Return the gradients of Σ dlogits·logits + daux_loss·aux_loss."""

    @abstractmethod
    def logps(
        self,
        tokens_BT: np.ndarray,
        counts_BT: np.ndarray,
        attention_mask_BT: np.ndarray | None = None,
        *,
        temperature: float = 1.0,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return log-probs of the counts_BT tokens under softmax(logits / temperature), and entropies, float64 (B, T).

        Logits of other tokens are not computed. Nothing is saved for a backward.
        """

    @abstractmethod
    def logps_saved(
        self,
        tokens_BT: np.ndarray,
        counts_BT: np.ndarray,
        attention_mask_BT: np.ndarray | None = None,
        *,
        temperature: float = 1.0,
    ) -> SavedLogps:
        """Return the results of `logps` and the data for `logps_backward`."""

    @abstractmethod
    def logps_backward(
        self,
        saved: SavedLogps,
        dlogps_BT: np.ndarray,
        dentropy_BT: np.ndarray | None = None,
        out: Arrays | None = None,
    ) -> Arrays:
        """Return the gradients of Σ dlogps·logps + Σ dentropy·entropy. Both are float64; dentropy_BT=None is 0."""

    @abstractmethod
    def loss_and_grads(
        self,
        tokens_BT: np.ndarray,
        targets_BT: np.ndarray,
        target_mask_BT: np.ndarray | None = None,
        attention_mask_BT: np.ndarray | None = None,
        out: Arrays | None = None,
    ) -> tuple[float, Arrays]:
        """Return the mean cross-entropy over the unmasked targets + aux_loss_coef·aux_loss, and its gradients.

        targets_BT is int64, with any value where target_mask_BT (bool or None) is False. target_mask_BT is already
        False at padding. Without any target the cross-entropy is 0.
        """

    @abstractmethod
    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """Return an empty cache with room for `capacity` tokens in each row."""

    @abstractmethod
    def prefill(self, tokens_BT: np.ndarray, attention_mask_BT: np.ndarray | None, cache: KVCache) -> np.ndarray:
        """Append each row's real tokens to the cache in place; it has room. Return logits_BV after the last token."""

    def decode(self, tokens_B: np.ndarray, cache: KVCache) -> np.ndarray:
        """Append one token per row to the cache in place, and return logits_BV after it."""
        return self.prefill(np.ascontiguousarray(tokens_B[:, None]), None, cache)

    adamw_update_all: Callable[..., None] = staticmethod(adamw_update_all)
    """Updates the parameters. An engine may update all arrays in one pass."""

    sample: Callable[..., tuple[np.ndarray, np.ndarray]] = staticmethod(sample)
    """Draws tokens. An engine may fuse the steps of `strop.moe.sampling.sample`."""

    def complete(
        self,
        tokens_BT: np.ndarray,
        attention_mask_BT: np.ndarray | None,
        uniforms_BT: np.ndarray,
        *,
        capacity: int,
        num_samples: int,
        eos: np.ndarray,
        pad: int,
        temperature: float,
        top_k: int,
        top_p: float,
        cache: KVCache | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return num_samples completions of each prompt, in consecutive rows: new tokens_BT, their logps_BT, lengths_B.

        uniforms_BT has one row per completion and one column per token. `capacity` is the number of tokens of the
        longest row, including those in the cache. A row ends after a token of `eos` (int64); the rest of it is `pad`
        and 0. If a cache is given, num_samples is 1 and the prompts continue its rows; afterwards it holds all of each
        row except the last token. An engine may override this loop.
        """
        num_rows, max_new_tokens = uniforms_BT.shape
        new_BT = np.full((num_rows, max_new_tokens), pad, np.int64)
        logps_BT = np.zeros((num_rows, max_new_tokens))
        lengths_B = np.empty(num_rows, np.int64)
        kept, cache = cache, self.new_cache(len(tokens_BT), capacity) if cache is None else cache
        logits = self.prefill(tokens_BT, attention_mask_BT, cache)
        if num_samples > 1:
            fan_out = np.repeat(np.arange(len(tokens_BT)), num_samples)
            logits, cache = logits[fan_out], cache.select_rows(fan_out)
        active = np.arange(num_rows)  # the unfinished rows, in the order of the cache
        for step in range(max_new_tokens):
            tokens, logps = self.sample(
                logits, uniforms_BT[active, step], temperature=temperature, top_k=top_k, top_p=top_p
            )
            new_BT[active, step], logps_BT[active, step] = tokens, logps
            ends = (tokens[:, None] == eos).any(1) | (step + 1 == max_new_tokens)
            lengths_B[active[ends]] = step + 1
            if kept is not None:
                for at in np.nonzero(ends)[0].tolist():
                    kept.copy_row(active[at], cache, at)
            going = np.nonzero(~ends)[0]
            if not going.size:
                break
            if ends.any():
                active, tokens, cache = active[going], tokens[going], cache.select_rows(going)
            logits = self.decode(tokens, cache)
        return new_BT, logps_BT, lengths_B
