"""The KV cache of a rollout as slots, and attention over them.

A slot holds one token's key and value in every layer. A row's tokens lie in two runs of slots: its prompt's, which all
samples of the prompt share, and its own. Rows of any lengths need no padding, and rows that end are dropped without
moving a key.

    | prompt 0 | prompt 1, longer | … | row 0: max_new_tokens | row 1: max_new_tokens | …

The last token of a prompt is not in the prompt's slots: it is the first token a row decodes. Reading the prompts
therefore needs no logits, and every token is drawn by the same step.

Layers of linear attention, Mamba and short convolutions have states instead of keys and values. A state has a fixed
size and cannot be shared, so every sample of a prompt begins with a copy of the prompt's state. transformers' layers
read and write their states through the cache; ours passes them the states of the pass's rows.

Shapes: N rows of a step, P prompts read together, T tokens, H query heads, K key heads, D head dimension, S slots; C
channels of a convolution.
"""

import functools
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import pad

from strop.models.attention import (
    Packed,
    Pass,
    Rule,
    Unsupported,
    attention_of_rows,
    current_pass,
    in_one_dtype,
    masked_attention,
)

Key = tuple[str, int, int]  # "conv" or "recurrent", the layer, and the number of the state in the layer


@dataclass(frozen=True)
class CacheShape:
    """The contents of one slot: num_heads keys and values, with per_head query heads each.

    head_dim   the larger of a key's and a value's size
    """

    num_layers: int
    num_heads: int
    per_head: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_slot(self) -> int:
        return self.num_layers * 2 * self.num_heads * self.head_dim * self.dtype.itemsize


@dataclass
class States:
    """The states of the rows of a pass, [N, ..] each. A layer without an entry begins with zeros."""

    by_key: dict[Key, torch.Tensor] = field(default_factory=dict)

    def convolve(self, key: Key, new_NCT: torch.Tensor, width: int) -> torch.Tensor:
        """Store the last inputs of a convolution; return the previous ones followed by the new ones."""
        before_NCW = self.by_key.get(key)
        if before_NCW is None:
            before_NCW = self.by_key[key] = new_NCT.new_zeros(*new_NCT.shape[:-1], width)
        inputs = torch.cat([before_NCW, new_NCT], -1)
        before_NCW.copy_(inputs[..., -width:])
        return inputs

    def replace(self, key: Key, new: torch.Tensor) -> torch.Tensor:
        """Store a recurrent state, in the memory of the previous one."""
        before = self.by_key.setdefault(key, new)
        return before if before is new else before.copy_(new)

    def empty(self, num_rows: int) -> dict[Key, torch.Tensor]:
        """Return states of zeros for num_rows rows."""
        return {key: one.new_zeros(num_rows, *one.shape[1:]) for key, one in self.by_key.items()}

    @property
    def num_bytes(self) -> int:
        """The bytes of one row's states."""
        return sum(one[0].nbytes for one in self.by_key.values())


@dataclass
class Rows:
    """The rows of a decode step; tensors on the device, [N] each.

    token          next token to read     row        the row's index in the outputs
    finished       1 after its end        step       number of tokens it has decoded
    prefix_start, prefix_length, suffix_start   its slots
    states         [N, ..] each
    """

    token_N: torch.Tensor
    row_N: torch.Tensor
    finished_N: torch.Tensor
    prefix_start_N: torch.Tensor
    prefix_length_N: torch.Tensor
    suffix_start_N: torch.Tensor
    step_N: torch.Tensor
    states: dict[Key, torch.Tensor] = field(default_factory=dict)

    PER_ROW = ("token_N", "row_N", "finished_N", "prefix_start_N", "prefix_length_N", "suffix_start_N", "step_N")

    @classmethod
    def empty(cls, size: int, device: torch.device, states: States | None = None) -> "Rows":
        """Return `size` rows of zeros. states: those of one row, for the shapes."""

        def new(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        long, int32 = torch.int64, torch.int32
        return cls(
            token_N=new(long, size), row_N=new(long, size), finished_N=new(torch.int8, size),
            prefix_start_N=new(int32, size), prefix_length_N=new(int32, size), suffix_start_N=new(int32, size),
            step_N=new(int32, size), states={} if states is None else states.empty(size),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.token_N)

    def first(self, size: int) -> "Rows":
        """Return the first `size` rows, in the same memory."""
        return self._part(slice(size))

    def after(self, size: int) -> "Rows":
        """Return the rows after the first `size`, in the same memory."""
        return self._part(slice(size, None))

    def _part(self, which: slice) -> "Rows":
        columns = {name: getattr(self, name)[which] for name in self.PER_ROW}
        return Rows(**columns, states={key: one[which] for key, one in self.states.items()})

    def since(self, window: int, chunk: int) -> "Rows":
        """Return the rows without the tokens that a layer with this window or chunk no longer sees; 0 is no bound."""
        position_N = self.prefix_length_N + self.step_N
        first_N = (position_N + 1 - window).clamp(min=0) if window else torch.zeros_like(position_N)
        if chunk:
            first_N = first_N.maximum(position_N // chunk * chunk)
        of_prefix_N = first_N.minimum(self.prefix_length_N)
        of_suffix_N = first_N - of_prefix_N
        return replace(
            self, prefix_start_N=self.prefix_start_N + of_prefix_N, prefix_length_N=self.prefix_length_N - of_prefix_N,
            suffix_start_N=self.suffix_start_N + of_suffix_N, step_N=self.step_N - of_suffix_N,
        )  # fmt: skip

    def keep(self, indices_M: torch.Tensor) -> None:
        """Move these rows to the front, in this order."""
        for column in (*(getattr(self, name) for name in self.PER_ROW), *self.states.values()):
            column[: len(indices_M)] = column[indices_M]


@dataclass
class Seen(Pass):
    """Attention of whole rows that records its inputs: for each layer shape and dtype of the keys, the rule, and
    queries, keys and values.
    """

    shapes: dict[int, tuple[int, int, int, torch.dtype]] = field(default_factory=dict)
    rules: dict[int, Rule] = field(default_factory=dict)
    given: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, rule: Rule) -> torch.Tensor:
        q, k, v = in_one_dtype(q, k, v)
        self.shapes[layer] = k.shape[1], k.shape[3], v.shape[3], k.dtype
        self.rules[layer], self.given[layer] = rule, (q, k, v)
        return attention_of_rows(q, k, v, rule)


def in_slots(size: int, *states: torch.Tensor) -> list[torch.Tensor]:
    """Return queries, keys and values padded to the size of a slot. The zeros change no score and no other output."""
    return [one if one.shape[-1] == size else pad(one, (0, size - one.shape[-1])) for one in states]


@dataclass
class Prefill(Pass):
    """Prompts, right-padded, read into their slots.

    tokens_M, slots_M   indices of the real tokens among the P·T tokens, and their slots
    cu_seqlens          row boundaries, for the kernel that needs no planning time for each new shape
    """

    kv: torch.Tensor
    tokens_M: torch.Tensor
    slots_M: torch.Tensor
    cu_seqlens: torch.Tensor | None = None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, rule: Rule) -> torch.Tensor:
        q, k, v = in_one_dtype(q, k, v)
        both = torch.stack(in_slots(self.kv.shape[-1], k, v)).transpose(2, 3).flatten(1, 2)
        self.kv[layer].index_copy_(1, self.slots_M, both[:, self.tokens_M])
        P, T, D = q.shape[0], q.shape[2], q.shape[3]
        if self.cu_seqlens is None or D % 8 or D > 256 or v.shape[3] != D:
            return attention_of_rows(q, k, v, rule)
        q, k, v = (states.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for states in (q, k, v))
        return Packed([T] * P, self.cu_seqlens).attend(q, k, v, layer, rule).unflatten(1, (P, T))[0]


@dataclass
class Decode(Pass):
    """A pass that reads one token of every row, in torch: the reference of the kernel.

    longest   the most tokens of a row so far, the new one included
    slots     what `_slots` has found
    """

    kv: torch.Tensor
    rows: Rows
    longest: int = 0
    slots: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, rule: Rule) -> torch.Tensor:
        size, kv = v.shape[3], self.kv[layer]
        q, k, v = in_slots(kv.shape[-1], *in_one_dtype(q, k, v))
        slots_NT, bias_N11T = self._slots(rule.window, rule.chunk)
        kv.index_copy_(1, self._new_slots_N, torch.stack((k[:, :, 0], v[:, :, 0])))
        both = kv.index_select(1, slots_NT.view(-1)).view(2, *slots_NT.shape, *kv.shape[2:]).transpose(2, 3)
        out = masked_attention(q, both[0], both[1], bias_N11T, rule).transpose(1, 2)
        return out if out.shape[-1] == size else out[..., :size]

    @functools.cached_property
    def _new_slots_N(self) -> torch.Tensor:
        return (self.rows.suffix_start_N + self.rows.step_N).long()

    def _slots(self, window: int, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots that layers with this window or chunk read, and −∞ where there is none, else 0."""
        if (window, chunk) not in self.slots:
            longest = min(size for size in (self.longest, window, chunk) if size)
            rows = self.rows if longest == self.longest else self.rows.since(window, chunk)
            i_T, prefix_N1 = torch.arange(longest, device=rows.token_N.device), rows.prefix_length_N[:, None]
            slots_NT = i_T + torch.where(
                i_T < prefix_N1, rows.prefix_start_N[:, None], rows.suffix_start_N[:, None] - prefix_N1
            )
            none_NT = i_T > prefix_N1 + rows.step_N[:, None]
            # an unwritten slot may hold NaN, and 0·NaN is NaN: read the first slot instead
            bias_NT = torch.zeros(none_NT.shape, dtype=self.kv.dtype, device=none_NT.device)
            bias_NT.masked_fill_(none_NT, -torch.inf)
            self.slots[window, chunk] = slots_NT.masked_fill_(none_NT, 0), bias_NT[:, None, None]
        return self.slots[window, chunk]


@dataclass
class OneRow(Pass):
    """A pass over the tokens of several rows as one row, for layers that ask the cache how many tokens came before.

    before_N   the position of each token, less its index in the row
    """

    inner: Pass
    num_rows: int
    before_N: torch.Tensor

    def __post_init__(self) -> None:
        self.places = self.inner.places

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, rule: Rule) -> torch.Tensor:
        q, k, v = (one[0].unflatten(1, (self.num_rows, -1)).transpose(0, 1) for one in (q, k, v))
        return self.inner.attend(q, k, v, layer, rule).flatten(0, 1)[None]


class AsksForLength(Unsupported):
    """A layer asks the cache for its length, which has one answer only where all tokens are in one row."""


def slot_cache() -> object:
    """Return a transformers cache that passes keys and values on to `attention`, and gives layers the states of the
    pass.
    """
    from transformers import Cache

    class SlotCache(Cache):
        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
        ) -> Any:
            return key_states, value_states

        def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
            return query_length, 0

        def get_query_offset(self, layer_idx: int = 0) -> int:
            return 0

        def get_seq_length(self, layer_idx: int | None = None, **kwargs: object) -> Any:
            if layer_idx is None:
                return 0  # positions are always given
            if not isinstance(current_pass(), OneRow):  # as in Llama 4, whose scale depends on a token's position
                raise AsksForLength("its attention asks the cache for its length")
            return current_pass().before_N

        def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
            return current_pass().states.by_key.get(("conv", layer_idx, state_idx))

        def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
            return current_pass().states.by_key.get(("recurrent", layer_idx, state_idx))

        def update_conv_state(
            self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
        ) -> torch.Tensor:
            width = kwargs.get("conv_kernel_size") or conv_states.shape[-1]
            return current_pass().states.convolve(("conv", layer_idx, state_idx), conv_states, width)

        def update_recurrent_state(
            self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
        ) -> torch.Tensor:
            return current_pass().states.replace(("recurrent", layer_idx, state_idx), recurrent_states)

        def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
            return any(layer_idx in (None, layer) for _, layer, _ in current_pass().states.by_key)

        def is_recording_past(self, layer_idx: int) -> bool:
            return False

    class LayersBefore520(list[Any]):
        """The states of each layer, as transformers before 5.20 looks them up."""

        def __getitem__(self, layer_idx: object) -> Any:
            found: dict[str, dict[int, torch.Tensor]] = {"conv": {}, "recurrent": {}}
            for (kind, layer, index), state in current_pass().states.by_key.items():
                if layer == layer_idx:
                    found[kind][index] = state
            return SimpleNamespace(record_past=False, conv_states=found["conv"], recurrent_states=found["recurrent"])

    return SlotCache(layers=LayersBefore520())
