"""strop's attention for the layers of transformers: they call `attention`, which calls the current pass.

A rollout's pass reads and writes its cache (`strop.rollout.slots`); training's pass reads packed sequences without padding
(`Packed`). The model's own modules do the rest. Which keys a query sees is learned once, from the mask functions of
transformers (`seen_by`); afterwards no masks are built.

Shapes: P rows, N tokens of several sequences, T tokens of a row, H query heads, K key heads, D head dimension.
"""

import contextlib
import functools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import dropout, pad, scaled_dot_product_attention

PADDED = 1.25  # the largest ratio of a row's length to its sequence's
NAME = "strop"  # of this attention in transformers' registry


class Pass(ABC):
    """One forward of the model, with its way to compute attention. In a rollout it reads and writes the KV cache.

    places   layer → its index among the layers with keys; None if all layers have keys
    states   recurrent states of the rows, for layers that have them: see `strop.rollout.slots`
    """

    places: Mapping[int, int] | None = None
    states: Any = None

    @abstractmethod
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, rule: "Rule") -> torch.Tensor:
        """Return attention's output: q [P, H, T, D], k and v [P, K, T, D] → [P, T, H, D]."""


@dataclass(frozen=True)
class Rule:
    """The rule for attention weights: softmax(softcap(q·k·scaling)) over the last `window` tokens; 0 is no limit.

    dropout   dropout probability of the weights, in training
    chunk     a token sees only tokens of its own chunk of this length; 0 is no chunks
    sinks     [H]: scores of a key without a value that every query sees; None if there is none
    """

    scaling: float
    window: int = 0
    softcap: float = 0.0
    dropout: float = 0.0
    chunk: int = 0
    sinks: torch.Tensor | None = field(default=None, compare=False)


class InRows(NamedTuple):
    """The layout of packed tokens as right-padded rows, grouped by row length.

    counts, sizes   number of rows and of places in each group
    token_M         index of the token at each place; any index at padding, which earlier tokens do not see
    place_N         place of each token
    """

    counts: list[int]
    sizes: list[int]
    token_M: torch.Tensor
    place_N: torch.Tensor


@dataclass
class Packed(Pass):
    """A pass over packed sequences: they follow each other in one row, and each attends only to itself.

    lengths      lengths of the sequences, on the host
    cu_seqlens   their boundaries, on the device
    rules        rules of the layers that have attended
    memory       buffers that the layers share: see `models.layers`
    """

    lengths: Sequence[int]
    cu_seqlens: torch.Tensor
    rules: dict[int, Rule] = field(default_factory=dict)
    memory: dict[object, Any] = field(default_factory=dict)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, rule: Rule) -> torch.Tensor:
        self.rules[layer] = rule
        if rule.chunk:
            return self._in_chunks(rule.chunk).attend(q, k, v, layer, replace(rule, chunk=0))
        q, k, v = in_one_dtype(q, k, v)
        if self.has_kernel(q, v, rule) and not rule.dropout:
            return self._by_kernel(q, k, v, rule)
        if not rule.dropout and not (q.is_cuda and self._in_rows):  # on a GPU the indices would have to be copied
            return self._as_rows(q, k, v, rule)
        apart = zip(*(states.split(list(self.lengths), 2) for states in (q, k, v)), strict=True)
        return torch.cat([attention_of_rows(a_q, a_k, a_v, rule) for a_q, a_k, a_v in apart], 1)

    def has_kernel(self, q: torch.Tensor, v: torch.Tensor, rule: Rule) -> bool:
        """Return whether `flash` computes attention by this rule."""
        return has_kernel(q, rule)

    def _as_rows(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
        """Return attention computed on padded rows of similar lengths: one call per sequence costs the host far more."""
        rows, states = self._in_rows, [one[0].transpose(0, 1) for one in (q, k, v)]  # [N, heads, D]
        if rows is None:
            return self._rows_of(len(self.lengths), states, rule)[None]
        parts = zip(*(one.index_select(0, rows.token_M).split(rows.sizes) for one in states), strict=True)
        found = [self._rows_of(count, part, rule) for count, part in zip(rows.counts, parts, strict=True)]
        return torch.cat(found).index_select(0, rows.place_N)[None]

    def _rows_of(self, count: int, states: Sequence[torch.Tensor], rule: Rule) -> torch.Tensor:
        """Return the output [M, H, D] of M tokens in `count` rows of one length."""
        q, k, v = (one.unflatten(0, (count, -1)).transpose(1, 2) for one in states)
        return attention_of_rows(q, k, v, rule).flatten(0, 1)

    def _in_chunks(self, size: int) -> "Packed":
        """Return the pass in which each chunk of a sequence is a sequence."""
        if ("chunks", size) not in self.memory:
            lengths = [min(size, length - start) for length in self.lengths for start in range(0, length, size)]
            cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(self.cu_seqlens.device)
            self.memory["chunks", size] = Packed(lengths, cu_seqlens)
        return self.memory["chunks", size]

    @functools.cached_property
    def _in_rows(self) -> "InRows | None":
        """The layout as padded rows; None if all rows have one length."""
        row_of: dict[int, int] = {}  # sequence length → row length, the longest first
        for length in sorted(set(self.lengths), reverse=True):
            longest = next(reversed(row_of.values()), length)
            row_of[length] = longest if longest <= PADDED * length else length
        if len(row_of) == 1:
            return None
        counts = dict(sorted(Counter(row_of[length] for length in self.lengths).items(), reverse=True))
        lengths_S, rows_S = torch.tensor(self.lengths), torch.tensor([row_of[length] for length in self.lengths])
        order_S = rows_S.argsort(descending=True, stable=True)
        ends_S = rows_S[order_S].cumsum(0)
        starts_S = torch.empty_like(ends_S).index_copy_(0, order_S, ends_S - rows_S[order_S])
        place_N = torch.arange(sum(self.lengths)) + (starts_S - lengths_S.cumsum(0) + lengths_S).repeat_interleave(
            lengths_S
        )
        token_M = torch.zeros(int(ends_S[-1]), dtype=torch.int64).index_copy_(0, place_N, torch.arange(len(place_N)))
        return InRows([*counts.values()], [T * count for T, count in counts.items()], token_M, place_N)

    def _by_kernel(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
        """Call the operator behind `torch.nn.attention.varlen`; through its Python wrapper a step takes a quarter longer."""
        q_NHD, k_NKD, v_NKD = (states[0].transpose(0, 1) for states in (q, k, v))
        out_NHD, *_ = self.flash(q_NHD, k_NKD, v_NKD, rule)
        return out_NHD[None]

    def flash(self, q_NHD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, rule: Rule) -> list[torch.Tensor]:
        """Return the output, and the other tensors that the backward needs."""
        limits, options = self._for_flash(rule)
        return list(torch.ops.aten._flash_attention_forward(q_NHD, k_NKD, v_NKD, *limits, False, **options)[:4])

    def flash_bwd(self, d_out: torch.Tensor, *forward: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, ...]:
        """Return the gradients of q, k and v. forward   q, k, v, then the results of `flash`"""
        *states, rng_state, unused = forward
        limits, options = self._for_flash(rule)
        return torch.ops.aten._flash_attention_backward(d_out, *states, *limits, rng_state, unused, **options)

    def _for_flash(self, rule: Rule) -> tuple[tuple[object, ...], dict[str, object]]:
        longest = max(self.lengths)
        window = {"window_size_left": rule.window - 1, "window_size_right": 0} if rule.window else {}
        return (self.cu_seqlens, self.cu_seqlens, longest, longest, 0.0, True), {"scale": rule.scaling, **window}


def has_kernel(q: torch.Tensor, rule: Rule) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and not rule.softcap and rule.sinks is None


def attention_of_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Return causal attention of right-padded rows."""
    T = q.shape[2]
    bounded = any(size and size < T for size in (rule.window, rule.chunk))
    if not rule.softcap and rule.sinks is None and not bounded:
        out = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=rule.scaling, enable_gqa=True, dropout_p=rule.dropout
        )
        return out.transpose(1, 2)
    i_T = torch.arange(T, device=q.device)
    mask_TT = i_T <= i_T[:, None]
    if rule.window:
        mask_TT &= i_T > i_T[:, None] - rule.window
    if rule.chunk:
        mask_TT &= i_T // rule.chunk == i_T[:, None] // rule.chunk
    return masked_attention(q, k, v, mask_TT, rule).transpose(1, 2)


def masked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Return attention [P, H, T, D] under a mask: True or 0 where a key is seen, False or −∞ where not."""
    if rule.sinks is not None:  # a zero key and a zero value, with the sink as its bias
        k, v = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1))
        P, H, T = q.shape[:3]
        sinks_PHT1 = rule.sinks.to(q.dtype)[:, None, None].expand(P, -1, T, 1)
        mask = torch.cat([_bias(mask, q.dtype).expand(P, H, T, -1), sinks_PHT1], -1)
    if not rule.softcap:
        if q.shape[2] == 1 and mask.shape[1] == 1:  # the queries of one key head as tokens, which is faster
            P, H, _, D = q.shape
            grouped = q.reshape(P, k.shape[1], -1, D)
            out = scaled_dot_product_attention(grouped, k, v, mask, rule.dropout, scale=rule.scaling)
            return out.reshape(P, H, 1, -1)
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=rule.scaling, enable_gqa=True, dropout_p=rule.dropout
        )
    k, v = (states.repeat_interleave(q.shape[1] // states.shape[1], 1) for states in (k, v))
    scores = rule.softcap * torch.tanh(q @ k.transpose(2, 3) * (rule.scaling / rule.softcap))
    weights = (scores + _bias(mask, scores.dtype)).softmax(-1, dtype=torch.float32)
    return dropout(weights.to(q.dtype), rule.dropout) @ v


def _bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask as numbers to add to scores."""
    if mask.is_floating_point():
        return mask
    return torch.zeros((), dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)


def in_one_dtype(*states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the states in one dtype: autocast's, if it is on. Without the cast, rotated queries and keys are float32."""
    kind = states[0].device.type
    if not torch.is_autocast_enabled(kind):
        return states
    dtype = torch.get_autocast_dtype(kind)
    return tuple(one.to(dtype) for one in states)


# ---- as an attention of transformers ----

_current: ContextVar[Pass] = ContextVar("_current")  # per thread: another thread may run another model


def current_pass() -> Any:
    return _current.get()


@contextlib.contextmanager
def current(pass_: Pass) -> Iterator[None]:
    """Compute the model's attention by this pass."""
    token = _current.set(pass_)
    try:
        yield
    finally:
        _current.reset(token)


class Unsupported(Exception):
    """The model's attention or layers need something that strop does not support."""


HARMLESS = {"is_causal", "position_ids", "cache_position", "output_attentions", "use_cache", "output_hidden_states",
            "output_router_logits", "return_dict", "position_embeddings", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
            "max_length_k", "seq_idx", "num_items_in_batch", "logits_to_keep"}  # fmt: skip


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: "torch.Tensor | Span | None",
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    s_aux: torch.Tensor | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Return the current pass's attention. The signature is that of transformers' attention functions."""
    for name, found in others.items():
        if name not in HARMLESS and found is not None and found is not False:
            raise Unsupported(f"its attention has {name}")
    if attention_mask is not None and not isinstance(attention_mask, Span):
        raise Unsupported("it makes an attention mask of its own")
    if getattr(module, "is_causal", True) is not True:
        raise Unsupported("its attention is not causal")
    if softcap and s_aux is not None:
        raise Unsupported("its attention has both a softcap and sinks")
    span = attention_mask or Span(sliding_window or 0)
    rule = (
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        span.window,
        softcap or 0.0,
        float(dropout),
        span.chunk,
        s_aux,
    )
    attend = _attend_opaque if torch.compiler.is_compiling() else _attend
    return attend(query, key, value, module.layer_idx, *rule), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scaling: float,
    window: int,
    softcap: float,
    dropout: float,
    chunk: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    rules, are_known = _rules.get()
    if are_known:
        rule = rules[layer]
        if rule.dropout != dropout or rule.sinks is not sinks:
            rule = replace(rule, dropout=dropout, sinks=sinks)
    else:
        rule = Rule(scaling, window, softcap, dropout, chunk, sinks)
        if rules.setdefault(layer, rule) != rule:
            raise Unsupported("one of its layers attends in two ways")
    pass_ = current_pass()
    return pass_.attend(query, key, value, layer if pass_.places is None else pass_.places[layer], rule)


_attend_opaque = torch.library.custom_op("strop::attend", _attend, mutates_args=())
"""The same for torch.compile, which is not to look inside: the cache is none of the graph's tensors."""


@_attend_opaque.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rule: object) -> torch.Tensor:
    rows, heads, tokens, _ = query.shape
    return value.new_empty(rows, tokens, heads, value.shape[-1])


# ---- which keys a query sees ----

LEARNING = "strop_learning"  # the name while masks are learned from transformers' mask functions
_rules: ContextVar[tuple[dict[int, Rule], bool]] = ContextVar("_rules")  # the layers' rules, and whether known


@dataclass(frozen=True)
class Span:
    """A stand-in for a mask: a token sees earlier tokens within a window or its chunk; 0 is no bound."""

    window: int = 0
    chunk: int = 0


def seen_by(*_: object, mask_function: Callable[..., object], **others: object) -> Span | None:
    """Return the span of the mask that transformers would build from this function; None is plain causal.

    Raise Unsupported if the function is unknown. The pass itself separates the sequences of a row.
    """
    bounds = _bounds(mask_function)
    if "causal" not in bounds:
        raise Unsupported("its mask is not causal")
    return Span(bounds.get("window", 0), bounds.get("chunk", 0)) if len(bounds) > 1 else None


def _bounds(function: Any) -> dict[str, int]:
    from transformers import masking_utils as masks

    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    inside = {name: cell.cell_contents for name, cell in cells}
    known: dict[object, dict[str, int]] = {
        masks.causal_mask_function.__code__: {"causal": 1},
        masks.packed_sequence_mask_function(torch.zeros(0)).__code__: {},
        masks.sliding_window_overlay(1).__code__: {"window": inside.get("sliding_window", 0)},
        masks.chunked_overlay(1, torch.zeros(0)).__code__: {"chunk": inside.get("chunk_size", 0)},
    }
    if function.__code__ in known:
        return known[function.__code__]
    if function.__code__ is not masks.and_masks().__code__:
        raise Unsupported(f"its mask is of a kind that is not known, {function.__qualname__}")
    bounds: dict[str, int] = {}
    for name, size in (pair for part in inside["mask_functions"] for pair in _bounds(part).items()):
        if bounds.setdefault(name, size) != size:
            raise Unsupported(f"its mask has a {name} of {size} tokens and one of {bounds[name]}")
    return bounds


@contextlib.contextmanager
def attending(
    model: Any, modules: Sequence[nn.Module] | None = None, rules: dict[int, Rule] | None = None
) -> Iterator[None]:
    """Make the model's attention layers call `attention`.

    modules   all modules of the model, if already listed
    rules     rules of its layers; None learns them from the masks that transformers would build
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    name = LEARNING if rules is None else NAME
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(LEARNING, seen_by)
    known = [vars(module) for module in (model.modules() if modules is None else modules)]
    configs = {id(found["config"]): found["config"] for found in known if "config" in found}.values()
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = name
    token = _rules.set(({}, False) if rules is None else (rules, True))
    try:
        yield
    finally:
        _rules.reset(token)
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation


@contextlib.contextmanager
def reading(
    modules: Sequence[nn.Module],
    pass_: Pass,
    within: Callable[[], contextlib.AbstractContextManager[object]],
    rules: dict[int, Rule] | None,
) -> Iterator[None]:
    """Make the model of these modules attend by this pass, inside the context `within()`. rules: see `attending`"""

    @contextlib.contextmanager
    def all_of_it() -> Iterator[None]:
        with attending(modules[0], modules, rules), current(pass_), within():
            yield

    with also_again(modules, all_of_it):
        yield


@contextlib.contextmanager
def also_again(
    modules: Sequence[Any], within: Callable[[], contextlib.AbstractContextManager[object]]
) -> Iterator[None]:
    """Enter `within()` here, and again whenever gradient checkpointing recomputes a layer in the backward.

    modules   all modules of the model; to list them takes as long as a few of its layers
    """
    checkpointed = [module for module in modules if "_gradient_checkpointing_func" in vars(module)]
    before = [module._gradient_checkpointing_func for module in checkpointed]

    def again(checkpoint: Callable[..., object], layer: Callable[..., object], *arguments: object) -> Any:
        def once_more(*arguments: object) -> object:
            with within():
                return layer(*arguments)

        return checkpoint(once_more, *arguments)

    for module, checkpoint in zip(checkpointed, before, strict=True):
        module._gradient_checkpointing_func = functools.partial(again, checkpoint)
    try:
        with within():
            yield
    finally:
        for module, checkpoint in zip(checkpointed, before, strict=True):
            module._gradient_checkpointing_func = checkpoint
