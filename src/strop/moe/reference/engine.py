"""The reference engine: the contract of `strop.moe.engine` in NumPy.

Shapes: B rows, T columns, N real tokens, S capacity of a cache, K key/value heads, C channels of a head, V vocabulary.
"""

import numpy as np

from strop.moe.engine import Arrays, KVCache, MoEEngine, SavedForward, SavedLogps
from strop.moe.reference.cross_entropy import cross_entropy, cross_entropy_bwd
from strop.moe.reference.layout import layout_of
from strop.moe.reference.logps import logps, logps_bwd
from strop.moe.reference.model import backward, forward, head, hidden_states


class NumpyCache(KVCache):
    def __init__(self, layers: list[tuple[np.ndarray, np.ndarray]], lengths_B: np.ndarray):
        self.layers = layers  # keys_BSKC and values_BSKC of each layer
        self.lengths_B = lengths_B
        self.capacity = layers[0][0].shape[1]

    def select_rows(self, rows: np.ndarray) -> "NumpyCache":
        return NumpyCache([(keys[rows], values[rows]) for keys, values in self.layers], self.lengths_B[rows])

    def copy_row(self, to, source, row):
        length = source.lengths_B[row]
        for mine, other in zip(self.layers, source.layers, strict=True):
            for states_BSKC, from_BSKC in zip(mine, other, strict=True):
                states_BSKC[to, :length] = from_BSKC[row, :length]
        self.lengths_B[to] = length


class NumpyEngine(MoEEngine):
    name = "numpy"

    def forward(self, tokens_BT, attention_mask_BT=None):
        tokens_N, layout = _real_tokens(tokens_BT, attention_mask_BT)
        h_ND, _, _ = hidden_states(self.params, self.config, tokens_N, layout, keep=False)
        logits_NV, _ = head(self.params, h_ND)
        return _with_padding(logits_NV, tokens_BT, attention_mask_BT)

    def forward_saved(self, tokens_BT, attention_mask_BT=None):
        tokens_N, layout = _real_tokens(tokens_BT, attention_mask_BT)
        logits_NV, aux, saved = forward(self.params, self.config, tokens_N, layout)
        return SavedForward(_with_padding(logits_NV, tokens_BT, attention_mask_BT), aux, (saved, attention_mask_BT))

    def backward(self, saved, dlogits_BTV, daux_loss=0.0, out=None):
        state, attention_mask_BT = saved.state
        grads = backward(_without_padding(dlogits_BTV, attention_mask_BT), daux_loss, state)
        return _written(grads, out)

    def logps(self, tokens_BT, counts_BT, attention_mask_BT=None, *, temperature=1.0):
        tokens_N, layout = _real_tokens(tokens_BT, attention_mask_BT)
        counted_M, before_M = _counted(counts_BT, attention_mask_BT)
        h_ND, _, _ = hidden_states(self.params, self.config, tokens_N, layout, keep=False)
        logits_MV, _ = head(self.params, h_ND[before_M])
        logps_M, entropy_M, _ = logps(logits_MV, tokens_N[counted_M], temperature)
        return _spread(logps_M, counts_BT), _spread(entropy_M, counts_BT)

    def logps_saved(self, tokens_BT, counts_BT, attention_mask_BT=None, *, temperature=1.0):
        tokens_N, layout = _real_tokens(tokens_BT, attention_mask_BT)
        logits_NV, _, saved = forward(self.params, self.config, tokens_N, layout)
        counted_M, before_M = _counted(counts_BT, attention_mask_BT)
        logps_M, entropy_M, logps_saved = logps(logits_NV[before_M], tokens_N[counted_M], temperature)
        state = saved, logps_saved, before_M, logits_NV.shape, counts_BT
        return SavedLogps(_spread(logps_M, counts_BT), _spread(entropy_M, counts_BT), state)

    def logps_backward(self, saved, dlogps_BT, dentropy_BT=None, out=None):
        state, logps_saved, before_M, shape_NV, counts_BT = saved.state
        dlogps_M = dlogps_BT[counts_BT]
        dentropy_M = np.zeros_like(dlogps_M) if dentropy_BT is None else dentropy_BT[counts_BT]
        dlogits_MV = logps_bwd(dlogps_M, dentropy_M, logps_saved)
        dlogits_NV = np.zeros(shape_NV, dlogits_MV.dtype)
        dlogits_NV[before_M] = dlogits_MV
        return _written(backward(dlogits_NV, 0.0, state), out)

    def loss_and_grads(self, tokens_BT, targets_BT, target_mask_BT=None, attention_mask_BT=None, out=None):
        tokens_N, layout = _real_tokens(tokens_BT, attention_mask_BT)
        targets_N = _without_padding(targets_BT, attention_mask_BT)
        counts_BT = np.ones(tokens_BT.shape, bool) if target_mask_BT is None else target_mask_BT
        counts_N = _without_padding(counts_BT, attention_mask_BT)
        logits_NV, aux, saved = forward(self.params, self.config, tokens_N, layout)
        ce, ce_saved = cross_entropy(logits_NV, targets_N, counts_N)
        loss = ce + self.config.aux_loss_coef * aux                         # L = CE + α·aux
        grads = backward(cross_entropy_bwd(ce_saved), self.config.aux_loss_coef, saved)
        return loss, _written(grads, out)

    def new_cache(self, num_rows, capacity):
        config, dtype = self.config, next(iter(self.params.values())).dtype
        shape_BSKC = (num_rows, capacity, config.num_kv_heads, config.head_dim)
        layers = [(np.zeros(shape_BSKC, dtype), np.zeros(shape_BSKC, dtype)) for _ in range(config.num_layers)]
        return NumpyCache(layers, np.zeros(num_rows, np.int64))

    def prefill(self, tokens_BT, attention_mask_BT, cache):
        tokens_N, layout = _real_tokens(tokens_BT, attention_mask_BT, cache.lengths_B)
        h_ND, _, _ = hidden_states(self.params, self.config, tokens_N, layout, cache.layers, keep=False)
        lengths_B = np.bincount(layout.rows_N)
        cache.lengths_B = cache.lengths_B + lengths_B
        return head(self.params, h_ND[np.cumsum(lengths_B) - 1])[0]


def _real_tokens(tokens_BT, attention_mask_BT, held_B=None):
    """Return the real tokens [N] and their layout.

    held_B   the number of tokens of each row that a cache already holds
    """
    B, T = tokens_BT.shape
    lengths_B = np.full(B, T) if attention_mask_BT is None else attention_mask_BT.sum(1)
    first_B = np.zeros_like(lengths_B) if held_B is None else held_B
    return _without_padding(tokens_BT, attention_mask_BT), layout_of(lengths_B, first_B)


def _without_padding(x_BT, attention_mask_BT):
    """Return x without padding, (B, T, …) → (N, …), row by row as in `layout_of`."""
    return x_BT.reshape(-1, *x_BT.shape[2:]) if attention_mask_BT is None else x_BT[attention_mask_BT]


def _with_padding(logits_NV, tokens_BT, attention_mask_BT):
    shape_BTV = (*tokens_BT.shape, logits_NV.shape[-1])
    if attention_mask_BT is None:
        return logits_NV.reshape(shape_BTV)
    logits_BTV = np.zeros(shape_BTV, logits_NV.dtype)
    logits_BTV[attention_mask_BT] = logits_NV
    return logits_BTV


def _counted(counts_BT, attention_mask_BT):
    """Return the indices of the scored tokens, and of the tokens before them: without padding, the index − 1."""
    counted_M = np.nonzero(_without_padding(counts_BT, attention_mask_BT))[0]
    return counted_M, counted_M - 1


def _spread(values_M, counts_BT):
    values_BT = np.zeros(counts_BT.shape)
    values_BT[counts_BT] = values_M
    return values_BT


def _written(grads: Arrays, out: Arrays | None) -> Arrays:
    if out is None:
        return grads
    for name, grad in grads.items():
        out[name][...] = grad
    return out
