"""The shape of a Mixture-of-Experts transformer: one frozen dataclass that checks itself.

Shapes: D hidden, H query heads, K key/value heads, C channels of a head, E experts, F intermediate, V vocabulary.
"""

import math
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import DTypeLike

from strop._checks import as_count, as_number, check_choice
from strop._types import Json

PRESETS: dict[str, Json] = {
    "tiny": {},  # the defaults below
    "small": {"hidden_dim": 256, "head_dim": 64, "intermediate_dim": 512},  # tiny, four times as wide
}


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Sizes and constants of a model; the defaults are the preset `tiny`.

    rope_alpha     NTK-aware scaling of RoPE: the base becomes rope_base·α^(d/(d−2)); 1 is off
    aux_loss_coef  weight of the load-balancing loss in `loss_and_grads`; 0 is off
    eos_token_id   one id or several; generation ends at any of them
    """

    hidden_dim: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 1
    head_dim: int = 16
    num_experts: int = 4
    top_k: int = 2
    intermediate_dim: int = 128
    vocab_size: int = 1000
    max_seq_len: int = 512
    rope_base: float = 10000.0
    rope_alpha: float = 1.0
    aux_loss_coef: float = 0.01
    tie_embeddings: bool = False
    rms_norm_eps: float = 1e-5
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            self._set(name, as_count(getattr(self, name), name, 1))
        for name in ("rope_base", "rope_alpha", "aux_loss_coef", "rms_norm_eps"):
            self._set(name, as_number(getattr(self, name), name, 0, open_low=name != "aux_loss_coef"))
        if not isinstance(self.tie_embeddings, bool):
            raise TypeError(f"tie_embeddings must be a bool, found {type(self.tie_embeddings).__name__}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads={self.num_kv_heads}, found {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even (RoPE rotates pairs of channels), found {self.head_dim}")
        if self.head_dim == 2 and self.rope_alpha != 1:
            raise ValueError(f"rope_alpha must be 1 for head_dim=2 (α^(d/(d−2)) is undefined), found {self.rope_alpha}")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k must be at most num_experts={self.num_experts}, found {self.top_k}")
        for name in ("bos_token_id", "pad_token_id", "eos_token_id"):
            token = getattr(self, name)
            if name == "eos_token_id" and isinstance(token, (list, tuple)):  # JSON gives a list
                self._set(name, tuple(self.check_token(one, name) for one in token))
            elif token is not None:
                self._set(name, self.check_token(token, name))

    def check_token(self, token: object, name: str) -> int:
        """Return `token` as an int; raise unless it is an id of this vocabulary."""
        token = as_count(token, name, 0)
        if token >= self.vocab_size:
            raise ValueError(f"{name} must be below vocab_size={self.vocab_size}, found {token}")
        return token

    def _set(self, name: str, value: object) -> None:
        """Set a field during construction, with NumPy numbers converted to Python's for JSON and the engines."""
        object.__setattr__(self, name, value)

    @classmethod
    def preset(cls, name: str, **changes: object) -> "MoEConfig":
        """Return the preset `tiny` or `small`, with the given fields changed."""
        check_choice(name, "preset", PRESETS)
        return replace(cls(), **{**PRESETS[name], **changes})

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        eos = self.eos_token_id
        return () if eos is None else eos if isinstance(eos, tuple) else (eos,)

    @property
    def rope_theta(self) -> float:
        """Return the base that RoPE uses after NTK-aware scaling: base·α^(d/(d−2))."""
        if self.rope_alpha == 1:
            return float(self.rope_base)
        return self.rope_base * self.rope_alpha ** (self.head_dim / (self.head_dim - 2))

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return {name: shape} of all parameters in forward order, with the names of transformers' Mixtral in memory.

        Matrices are (out, in): y = x·Wᵀ. `gate_up_proj` has F rows of the gate, then F rows of the up projection.
        With tied embeddings there is no `lm_head.weight`.
        """
        D, C, E, F, V = self.hidden_dim, self.head_dim, self.num_experts, self.intermediate_dim, self.vocab_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (D,)
            shapes[prefix + "self_attn.q_proj.weight"] = (self.num_heads * C, D)
            shapes[prefix + "self_attn.k_proj.weight"] = (self.num_kv_heads * C, D)
            shapes[prefix + "self_attn.v_proj.weight"] = (self.num_kv_heads * C, D)
            shapes[prefix + "self_attn.o_proj.weight"] = (D, self.num_heads * C)
            shapes[prefix + "post_attention_layernorm.weight"] = (D,)
            shapes[prefix + "mlp.gate.weight"] = (E, D)
            shapes[prefix + "mlp.experts.gate_up_proj"] = (E, 2 * F, D)
            shapes[prefix + "mlp.experts.down_proj"] = (E, D, F)
        shapes["model.norm.weight"] = (D,)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (V, D)
        return shapes

    def num_parameters(self, *, active: bool = False) -> int:
        """Return the number of parameters; with `active` only those that one token uses (top_k of the experts)."""
        count = sum(math.prod(shape) for shape in self.parameter_shapes().values())
        if active:
            per_expert = 3 * self.hidden_dim * self.intermediate_dim
            count -= self.num_layers * (self.num_experts - self.top_k) * per_expert
        return count

    def memory_bytes(self, batch: int, seq_len: int, *, training: bool = False, dtype: DTypeLike = np.float32) -> int:
        """Return an estimate of the peak memory of a forward, or of a training step with gradients and AdamW's moments.

        It includes weights, logits and the activations saved for the backward, but no small temporaries.
        """
        tokens, item = batch * seq_len, np.dtype(dtype).itemsize
        heads = self.num_heads * self.head_dim
        attention = 2 * heads + 2 * self.num_kv_heads * self.head_dim + 2 * self.num_heads * seq_len
        experts = self.top_k * (2 * self.hidden_dim + 4 * self.intermediate_dim)
        per_layer = 6 * self.hidden_dim + attention + self.num_experts + experts
        layers = self.num_layers if training else 1
        logits = self.vocab_size * (2 if training else 1)
        states = 4 if training else 1  # weights, gradients, two moments
        return item * (states * self.num_parameters() + tokens * (layers * per_layer + logits))

    def to_dict(self) -> Json:
        return {field.name: getattr(self, field.name) for field in fields(self)}


_SIZES = (
    "hidden_dim",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "num_experts",
    "top_k",
    "intermediate_dim",
    "vocab_size",
    "max_seq_len",
)
