"""Attention with a fixed order of sums, and a layer's operations with it and the matmuls of `strop.ops.exact`.

Keys are processed in blocks that begin at multiples of BLOCK_S in their sequence, from first to last. This order is the
same in decoding, prefill and training. A block that is fully masked for a query changes none of the query's bits: the
maximum stays, the accumulators are multiplied by 1, and 0 is added. So neither other queries nor the sequence's length
change a result.

Shapes: N queries of S sequences, Q query heads, K key heads, R = Q/K, D numbers of a head, W of a row of q, k and v.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from strop.models import layer_kernels as kernels
from strop.models.attention import Packed, Rule, Unsupported
from strop.ops.exact import multiplied, precision, product
from strop.ops.rows.launch import Launcher

LOG2E = 1.4426950408889634
NO_SCORE = tl.constexpr(-1e30)  # below every real score; finite, for −inf − (−inf) is NaN
BLOCK_M, BLOCK_S, WARPS = 64, 64, 4  # the same for all shapes: other tiles may sum a row in another order


@dataclass
class Runs:
    """Positions of each sequence's queries and keys in memory: [S] int32 each, on the device.

    start, count               index of its first query among all, and number of its queries; `most` is the largest count,
                               known to the host
    position                   position of its first query in the sequence
    prefix_start, prefix       index and number of its first keys; the others begin at suffix_start
    """

    start: torch.Tensor
    count: torch.Tensor
    position: torch.Tensor
    prefix_start: torch.Tensor
    prefix: torch.Tensor
    suffix_start: torch.Tensor
    most: int

    @classmethod
    def packed(cls, pass_: Packed) -> "Runs":
        """Return the runs of packed sequences, whose keys are stored where the queries are. Cached in the pass."""
        if "runs" not in pass_.memory:
            ends = pass_.cu_seqlens.to(torch.int32)
            start, zero = ends[:-1].contiguous(), torch.zeros_like(ends[:-1])
            pass_.memory["runs"] = cls(start, ends.diff(), zero, zero, zero, start, max(pass_.lengths))
        return pass_.memory["runs"]


@triton.jit
def cache_of(table_ptr, layer, SLOT: tl.constexpr, kind: tl.constexpr):
    """Return where a layer's keys and values begin in a rollout's cache [layer, 2, slots, SLOT]."""
    keys_ptr, num_slots = tl.load(table_ptr).to(tl.pointer_type(kind)), tl.load(table_ptr + 1)
    keys_ptr += layer.to(tl.int64) * 2 * num_slots * SLOT
    return keys_ptr, keys_ptr + num_slots * SLOT


@Launcher
def attend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, start_ptr, count_ptr, position_ptr, prefix_start_ptr, prefix_ptr,
    suffix_start_ptr, num_sequences: tl.int32, layer: tl.int32, window: tl.int32, scale: tl.float32,
    TABLE: tl.constexpr, Q_STRIDE: tl.constexpr, KV_STRIDE: tl.constexpr, HEADS: tl.constexpr, R: tl.constexpr,
    D: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write softmax(q·kᵀ·scale/log₂e)·v of a tile: BLOCK_M // R tokens of a sequence, for the R query heads of a key head.

    TABLE: keys and values are slots of a rollout's cache, whose address and size the table has (see strop.rollout.kernels).
    """
    tokens: tl.constexpr = BLOCK_M // R
    program = tl.program_id(0)
    head, row, tile = program % HEADS, program // HEADS % num_sequences, program // HEADS // num_sequences
    count = tl.load(count_ptr + row)
    if tile * tokens >= count:
        return
    kind: tl.constexpr = q_ptr.dtype.element_ty
    if TABLE:
        k_ptr, v_ptr = cache_of(table_ptr, layer, KV_STRIDE, kind)
    else:  # layer is 0; adding it makes a sum, because `tl.multiple_of` has no effect on an argument
        k_ptr, v_ptr = k_ptr + layer * 16, v_ptr + layer * 16
    k_ptr, v_ptr = tl.multiple_of(k_ptr, 16), tl.multiple_of(v_ptr, 16)
    m, d, s = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)
    token = tile * tokens + m // R
    here = ((m < tokens * R) & (token < count))[:, None] & (d[None, :] < D)
    start = tl.load(start_ptr + row).to(tl.int64)
    of_head = (head * R + m % R)[:, None] * D + d[None, :]
    q_ptr = tl.multiple_of(q_ptr + start * Q_STRIDE, 16)
    q = tl.load(q_ptr + token[:, None] * Q_STRIDE + of_head, mask=here, other=0.0)
    first = tl.load(position_ptr + row)
    position = first + token
    end = first + tl.minimum(tile * tokens + tokens, count)  # the end of the keys that queries of the tile see
    begin = 0
    if WINDOW:
        begin = tl.maximum(first + tile * tokens + 1 - window, 0) // BLOCK_S * BLOCK_S
    prefix, prefix_start = tl.load(prefix_ptr + row), tl.load(prefix_start_ptr + row)
    suffix_start = tl.load(suffix_start_ptr + row)

    top = tl.full([BLOCK_M], NO_SCORE, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for block in range(begin, end, BLOCK_S):
        i = block + s
        slot = tl.where(i < prefix, prefix_start + i, suffix_start + i - prefix).to(tl.int64)
        there = (i[:, None] < end) & (d[None, :] < D)
        key_at = slot[:, None] * KV_STRIDE + head * D + d[None, :]
        k = tl.load(k_ptr + key_at, mask=there, other=0.0)
        v = tl.load(v_ptr + key_at, mask=there, other=0.0)
        seen = i[None, :] <= position[:, None]
        if WINDOW:
            seen &= i[None, :] > position[:, None] - window
        scores = multiplied(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_S], tl.float32), PRECISION)
        scores = tl.where(seen, scores, NO_SCORE)
        new = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2((top - new) * scale)
        p = tl.where(seen, tl.exp2((scores - new[:, None]) * scale), 0.0)
        weight = tl.fma(weight, shrink, tl.sum(p, 1))  # explicit, because a compiler may or may not fuse the two
        out = multiplied(p.to(kind), v, out * shrink[:, None], PRECISION)
        top = new

    out_ptr = tl.multiple_of(out_ptr + start * (HEADS * R * D), 16)
    tl.store(out_ptr + token[:, None] * (HEADS * R * D) + of_head, (out / weight[:, None]).to(kind), mask=here)


def attend(
    q_NQD: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: Runs, rule: Rule, table: torch.Tensor | None = None,
    layer: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Return the output [N, Q, D]. Queries are strided views [.., heads, D] of qkv; without a table keys and values too."""
    (N, Q, D), K = q_NQD.shape, k.shape[1]
    if rule.softcap or Q // K > BLOCK_M:
        raise Unsupported("its scores are capped" if rule.softcap else f"{Q // K} of its query heads share a key head")
    out_NQD = torch.empty(N, Q, D, dtype=q_NQD.dtype, device=q_NQD.device)
    tiles = -(-runs.most // (BLOCK_M // (Q // K)))
    attend_kernel(
        tiles * len(runs.start) * K, q_NQD, k, v, out_NQD, runs.start if table is None else table, runs.start, runs.count,
        runs.position, runs.prefix_start, runs.prefix, runs.suffix_start, len(runs.start), layer, rule.window,
        rule.scaling * LOG2E, num_warps=WARPS, TABLE=table is not None, Q_STRIDE=q_NQD.stride(0),
        KV_STRIDE=k.stride(0) if table is None else K * D, HEADS=K, R=Q // K, D=D, WINDOW=rule.window > 0,
        PRECISION=precision(q_NQD.dtype), BLOCK_M=BLOCK_M, BLOCK_S=BLOCK_S, BLOCK_D=max(16, 1 << (D - 1).bit_length()),
    )  # fmt: skip
    return out_NQD


class Exact:
    """The operations of a layer with a fixed order of sums. Norms, rotation and gate of `layer_kernels` sum only over a row."""

    product = staticmethod(product)

    @staticmethod
    def add_norm(
        x_NH: torch.Tensor, a_NI: torch.Tensor, weight: torch.Tensor, w: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        h_NH = product(a_NI, weight, onto=x_NH)
        return h_NH, kernels.norm(h_NH, w, eps, dtype)[1]

    @staticmethod
    def add(h_NH: torch.Tensor, m_NF: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return product(m_NF, weight, onto=h_NH)

    @staticmethod
    def attend(
        pass_: Packed, rule: Rule, q_NQD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the output and no saved tensors: the backward recomputes attention by another kernel."""
        return attend(q_NQD, k_NKD, v_NKD, Runs.packed(pass_), rule), []
