"""Triton kernels of a decode step: attention of one new token over the slots of its row, and drawing the next token.

What changes from rollout to rollout (where the cache is, how long completions may be) is read from a `table` in the GPU's
memory and not passed: a captured step stays right when the cache is freed and made anew, and for any lengths.

    table   address of kv, slots of kv; addresses of uniforms_BT, tokens_BT, logps_BT, and their T

Names: N rows of the step, R query heads of a key head, D head dimension, V vocabulary. kv is [layer, 2, slot, head, D].
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NO_SCORE = tl.constexpr(-1e30)  # below every real score; finite, for −inf − (−inf) is NaN


@triton.jit
def _capped(scores, softcap, SOFTCAP: tl.constexpr):
    if SOFTCAP:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # softcap·tanh(scores/softcap)
    return scores


@triton.jit(do_not_specialize=["layer", "window"])
def attend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, stats_ptr, prefix_start_ptr, prefix_length_ptr, suffix_start_ptr,
    step_ptr, table_ptr, layer, q_row, q_head, k_row, k_head, v_row, v_head, scale, softcap, window,
    HEADS: tl.constexpr, R: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """softmax(q·Kᵀ·scale)·V of a row's new token, for the R query heads of one key head and one part of the keys.

    The row's keys lie in two runs of slots: the prompt's, which its group shares, and its own. The new token's key and
    value come from k_ptr and v_ptr and are written to the row's next slot by the last part.
    """
    n, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    r, d, s = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)
    kind = out_ptr.dtype.element_ty
    step = tl.load(step_ptr)
    prefix = tl.load(prefix_length_ptr + n)
    prefix_start, suffix_start = tl.load(prefix_start_ptr + n), tl.load(suffix_start_ptr + n)
    total = prefix + step
    first = 0
    if WINDOW:
        first = tl.maximum(total + 1 - window, 0)
    part = tl.cdiv(tl.cdiv(total - first, SPLITS), BLOCK_S) * BLOCK_S
    begin = first + split * part
    end = tl.minimum(begin + part, total)

    keys_ptr = tl.load(table_ptr).to(tl.pointer_type(kind))
    num_slots = tl.load(table_ptr + 1)
    keys_ptr = tl.multiple_of(keys_ptr + layer.to(tl.int64) * 2 * num_slots * HEADS * D, 16)
    values_ptr = tl.multiple_of(keys_ptr + num_slots * HEADS * D, 16)
    here = (r[:, None] < R) & (d[None, :] < D)
    q = tl.load(q_ptr + n * q_row + (head * R + r[:, None]) * q_head + d[None, :], mask=here, other=0.0).to(kind)

    m = tl.full([BLOCK_R], NO_SCORE, tl.float32)
    total_weight = tl.zeros([BLOCK_R], tl.float32)
    out = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_S):
        i = start + s
        slot = tl.where(i < prefix, prefix_start + i, suffix_start + i - prefix).to(tl.int64)
        at = slot[:, None] * (HEADS * D) + head * D + d[None, :]
        there = (i[:, None] < end) & (d[None, :] < D)
        k = tl.load(keys_ptr + at, mask=there, other=0.0)
        v = tl.load(values_ptr + at, mask=there, other=0.0)
        scores = _capped(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, softcap, SOFTCAP)
        scores = tl.where(i[None, :] < end, scores, NO_SCORE)
        new_m = tl.maximum(m, tl.max(scores, 1))
        shrink = tl.exp2((m - new_m) * LOG2E)
        p = tl.where(i[None, :] < end, tl.exp2((scores - new_m[:, None]) * LOG2E), 0.0)
        total_weight = total_weight * shrink + tl.sum(p, 1)
        out = out * shrink[:, None] + tl.dot(p.to(kind), v, input_precision=PRECISION)
        m = new_m

    if split == SPLITS - 1:  # the new token
        k = tl.load(k_ptr + n * k_row + head * k_head + d, mask=d < D, other=0.0).to(kind)
        v = tl.load(v_ptr + n * v_row + head * v_head + d, mask=d < D, other=0.0).to(kind)
        mine = (suffix_start + step).to(tl.int64) * (HEADS * D) + head * D + d
        tl.store(keys_ptr + mine, k, mask=d < D)
        tl.store(values_ptr + mine, v, mask=d < D)
        score = _capped(tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale, softcap, SOFTCAP)
        new_m = tl.maximum(m, score)
        shrink, p = tl.exp2((m - new_m) * LOG2E), tl.exp2((score - new_m) * LOG2E)
        total_weight = total_weight * shrink + p
        out = out * shrink[:, None] + p[:, None] * v.to(tl.float32)[None, :]
        m = new_m

    if SPLITS == 1:
        at = (n * HEADS * R + head * R + r[:, None]) * D + d[None, :]
        tl.store(out_ptr + at, (out / total_weight[:, None]).to(kind), mask=here)
    else:
        row = (n * HEADS * R + head * R + r) * SPLITS + split
        tl.store(partial_ptr + row[:, None] * D + d[None, :], out, mask=here)
        tl.store(stats_ptr + row * 2, m, mask=r < R)
        tl.store(stats_ptr + row * 2 + 1, total_weight, mask=r < R)


@triton.jit
def join_kernel(partial_ptr, stats_ptr, out_ptr, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_D: tl.constexpr):
    """One query head's parts made one: out = Σ partial·exp(m − max) / Σ weight·exp(m − max)."""
    row = tl.program_id(0)
    d, split = tl.arange(0, BLOCK_D), tl.arange(0, SPLITS)
    m = tl.load(stats_ptr + (row * SPLITS + split) * 2)
    weight = tl.load(stats_ptr + (row * SPLITS + split) * 2 + 1)
    share = tl.exp2((m - tl.max(m, 0)) * LOG2E)
    partial = tl.load(partial_ptr + (row * SPLITS + split)[:, None] * D + d[None, :], mask=d[None, :] < D, other=0.0)
    out = tl.sum(partial * share[:, None], 0) / tl.sum(weight * share, 0)
    tl.store(out_ptr + row * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def sums_kernel(logits_ptr, row_stride, V, scale, max_ptr, sum_ptr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """Of one chunk of a row: its maximum, and Σ exp((x − maximum)·scale)."""
    n, chunk = tl.program_id(0), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + n.to(tl.int64) * row_stride + at, mask=at < V, other=-float("inf")).to(tl.float32)
    m = tl.maximum(tl.max(x, 0), NO_SCORE)
    tl.store(max_ptr + n * CHUNKS + chunk, m)
    tl.store(sum_ptr + n * CHUNKS + chunk, tl.sum(tl.exp2((x - m) * (scale * LOG2E)), 0))


@triton.jit
def pick_kernel(
    logits_ptr, row_stride, V, scale, max_ptr, sum_ptr, token_ptr, finished_ptr, row_ptr, step_ptr, eos_ptr, table_ptr,
    CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr, CHUNK: tl.constexpr, NUM_EOS: tl.constexpr,
    GREEDY: tl.constexpr,
):  # fmt: skip
    """Draw a row's token: the first whose cumulative probability exceeds the row's uniform; greedy: the first maximum.

    The chunk first, from the chunks' sums, then the token in it. Writes token and log-prob to (row, step) of the outputs.
    """
    n = tl.program_id(0)
    row, step = tl.load(row_ptr + n), tl.load(step_ptr)
    uniforms_ptr = tl.load(table_ptr + 2).to(tl.pointer_type(tl.float32))
    tokens_ptr = tl.load(table_ptr + 3).to(tl.pointer_type(tl.int64))
    logps_ptr = tl.load(table_ptr + 4).to(tl.pointer_type(tl.float32))
    at = row * tl.load(table_ptr + 5) + step

    c, i = tl.arange(0, CHUNKS_PADDED), tl.arange(0, CHUNK)
    m = tl.load(max_ptr + n * CHUNKS + c, mask=c < CHUNKS, other=NO_SCORE)
    s = tl.load(sum_ptr + n * CHUNKS + c, mask=c < CHUNKS, other=0.0)
    top = tl.max(m, 0)
    weight = s * tl.exp2((m - top) * (scale * LOG2E))
    total = tl.sum(weight, 0)
    if GREEDY:
        chunk = tl.min(tl.where(m == top, c, 0x7FFFFFFF), 0)
        chunk = tl.where(chunk < CHUNKS, chunk, 0)
        before, target = 0.0, 0.0
    else:
        target = tl.load(uniforms_ptr + at) * total
        upto = tl.cumsum(weight, 0)
        chunk = tl.min(tl.where((upto > target) & (weight > 0), c, CHUNKS_PADDED), 0)
        last = tl.max(tl.where(weight > 0, c, 0), 0)  # where rounding leaves the target beyond the end
        chunk = tl.minimum(chunk, last)
        before = tl.sum(tl.where(c < chunk, weight, 0.0), 0)
    j = chunk * CHUNK + i
    x = tl.load(logits_ptr + n.to(tl.int64) * row_stride + j, mask=j < V, other=-float("inf")).to(tl.float32)
    if GREEDY:
        token = tl.min(tl.where(x == top, i, CHUNK), 0)
        token = tl.where(token < CHUNK, token, 0)  # of logits that are NaN none is the maximum; an id it must be
    else:
        e = tl.exp2((x - top) * (scale * LOG2E))
        token = tl.min(tl.where((before + tl.cumsum(e, 0) > target) & (e > 0), i, CHUNK), 0)
        token = tl.minimum(token, tl.max(tl.where(e > 0, i, 0), 0))
    chosen = tl.sum(tl.where(i == token, x, 0.0), 0)
    token = (chunk * CHUNK + token).to(tl.int64)

    is_end = tl.sum((tl.load(eos_ptr + tl.arange(0, NUM_EOS)) == token).to(tl.int32), 0) > 0
    tl.store(token_ptr + n, token)
    tl.store(finished_ptr + n, tl.load(finished_ptr + n) | is_end.to(tl.int8))
    tl.store(tokens_ptr + at, token)
    tl.store(logps_ptr + at, (chosen - top) * scale - tl.log2(total) * LN2)
