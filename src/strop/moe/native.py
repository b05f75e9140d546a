"""The engine in C++ (native/moe): `strop.moe.engine` implemented by the compiled module.

The logits of a token are the same, bit for bit, in every batch, with any padding and number of threads, and from
prefill or decoding with the cache.

Shapes: B rows, T columns, V vocabulary.
"""

from typing import Any

import numpy as np

from strop import _compiled
from strop.moe.config import MoEConfig
from strop.moe.engine import Arrays, KVCache, MoEEngine, SavedForward, SavedLogps

native: Any = _compiled.native  # `strop.moe.engines` loads this engine only if it is built

_SIZES = (
    "num_layers", "hidden_dim", "num_heads", "num_kv_heads", "head_dim", "num_experts", "top_k", "intermediate_dim",
    "vocab_size", "max_seq_len", "rms_norm_eps", "rope_theta", "tie_embeddings",
)  # fmt: skip
_ENGINES = {np.dtype(np.float32): "MoEEngineF32", np.dtype(np.float64): "MoEEngineF64"}


class NativeCache(KVCache):
    def __init__(self, rows, lengths_B: np.ndarray, capacity: int):
        self.rows = rows  # the compiled cache object
        self.lengths_B = lengths_B
        self.capacity = capacity

    def select_rows(self, rows: np.ndarray) -> "NativeCache":
        return NativeCache(self.rows.select_rows(rows), self.lengths_B[rows], self.capacity)

    def copy_row(self, to, source, row):
        self.rows.copy_row(int(to), source.rows, int(row), int(source.lengths_B[row]))
        self.lengths_B[to] = source.lengths_B[row]


class NativeEngine(MoEEngine):
    name = "native"

    def __init__(self, config: MoEConfig, params: Arrays):
        super().__init__(config, params)
        self.arrays = list(params.values())  # keeps the arrays alive: the compiled engine holds their addresses
        self.dtype = self.arrays[0].dtype
        sizes = {name: getattr(config, name) for name in _SIZES}
        self.compiled = getattr(native, _ENGINES[self.dtype])(**sizes, params=self.arrays)

    def forward(self, tokens_BT, attention_mask_BT=None):
        logits_BTV = self._logits(tokens_BT, attention_mask_BT)
        self.compiled.forward(tokens_BT, attention_mask_BT, logits_BTV)
        return logits_BTV

    def forward_saved(self, tokens_BT, attention_mask_BT=None):
        logits_BTV = self._logits(tokens_BT, attention_mask_BT)
        state = self.compiled.forward_saved(tokens_BT, attention_mask_BT, logits_BTV)
        return SavedForward(logits_BTV, self.compiled.aux_loss(state), state)

    def backward(self, saved, dlogits_BTV, daux_loss=0.0, out=None):
        grads = self._grads(out)
        dlogits_BTV = np.ascontiguousarray(dlogits_BTV, self.dtype)
        self.compiled.backward(saved.state, dlogits_BTV, daux_loss, [grads[name] for name in self.params])
        return grads

    def logps(self, tokens_BT, counts_BT, attention_mask_BT=None, *, temperature=1.0):
        logps_BT, entropy_BT = np.zeros(tokens_BT.shape), np.zeros(tokens_BT.shape)
        self.compiled.logps(tokens_BT, attention_mask_BT, counts_BT, temperature, logps_BT, entropy_BT)
        return logps_BT, entropy_BT

    def logps_saved(self, tokens_BT, counts_BT, attention_mask_BT=None, *, temperature=1.0):
        logps_BT, entropy_BT = np.zeros(tokens_BT.shape), np.zeros(tokens_BT.shape)
        state = self.compiled.logps_saved(tokens_BT, attention_mask_BT, counts_BT, temperature, logps_BT, entropy_BT)
        return SavedLogps(logps_BT, entropy_BT, state)

    def logps_backward(self, saved, dlogps_BT, dentropy_BT=None, out=None):
        grads = self._grads(out)
        dlogps_BT, dentropy_BT = (
            None if d_BT is None else np.ascontiguousarray(d_BT, np.float64) for d_BT in (dlogps_BT, dentropy_BT)
        )
        self.compiled.logps_backward(saved.state, dlogps_BT, dentropy_BT, [grads[name] for name in self.params])
        return grads

    def loss_and_grads(self, tokens_BT, targets_BT, target_mask_BT=None, attention_mask_BT=None, out=None):
        grads = self._grads(out)
        given = tokens_BT, targets_BT, target_mask_BT, attention_mask_BT, self.config.aux_loss_coef
        loss = self.compiled.loss_and_grads(*given, [grads[name] for name in self.params])
        return loss, grads

    def new_cache(self, num_rows, capacity):
        return NativeCache(self.compiled.new_cache(num_rows, capacity), np.zeros(num_rows, np.int64), capacity)

    def prefill(self, tokens_BT, attention_mask_BT, cache):
        logits_BV = np.empty((len(tokens_BT), self.config.vocab_size), self.dtype)
        self.compiled.prefill(tokens_BT, attention_mask_BT, cache.rows, cache.lengths_B, logits_BV)
        cache.lengths_B = cache.lengths_B + _num_tokens(tokens_BT, attention_mask_BT)
        return logits_BV

    @staticmethod
    def sample(logits_BV, uniforms_B, *, temperature, top_k, top_p):
        tokens_B, logps_B = np.empty(len(logits_BV), np.int64), np.empty(len(logits_BV))
        native.moe_sample(logits_BV, uniforms_B, temperature, top_k, top_p, tokens_B, logps_B)
        return tokens_B, logps_B

    def complete(
        self, tokens_BT, attention_mask_BT, uniforms_BT, *, capacity, num_samples, eos, pad, temperature, top_k, top_p,
        cache=None,
    ):  # fmt: skip
        new_BT, logps_BT = np.full(uniforms_BT.shape, pad, np.int64), np.zeros(uniforms_BT.shape)
        lengths_B = np.empty(len(uniforms_BT), np.int64)
        self.compiled.generate(
            tokens_BT, attention_mask_BT, capacity, num_samples, temperature, top_k, top_p, eos, uniforms_BT,
            new_BT, logps_BT, lengths_B, *((None, None) if cache is None else (cache.rows, cache.lengths_B)),
        )  # fmt: skip
        if cache is not None:
            cache.lengths_B = cache.lengths_B + _num_tokens(tokens_BT, attention_mask_BT) + lengths_B - 1
        return new_BT, logps_BT, lengths_B

    @staticmethod
    def adamw_update_all(params, grads, ms, vs, *, weight_decays, step, lr, beta1, beta2, eps, grad_scale=1.0):
        update = native.moe_adamw_f32 if params[0].dtype == np.float32 else native.moe_adamw_f64
        update(params, grads, ms, vs, weight_decays, step, lr, beta1, beta2, eps, grad_scale)

    def _logits(self, tokens_BT, attention_mask_BT):
        """Return memory for the logits, with 0 at padding."""
        make = np.empty if attention_mask_BT is None else np.zeros
        return make((*tokens_BT.shape, self.config.vocab_size), self.dtype)

    def _grads(self, out):
        return {name: np.empty_like(array) for name, array in self.params.items()} if out is None else out


def _num_tokens(tokens_BT, attention_mask_BT):
    """Return the number of real tokens of each row, or one number for all rows."""
    return tokens_BT.shape[1] if attention_mask_BT is None else attention_mask_BT.sum(1)
