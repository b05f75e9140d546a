"""Triton kernels of a decode step: the operations between the products of a layer, attention of one new token over the
slots of its row, and drawing the next token.

Values that change from rollout to rollout (the address of the cache, the longest completion) are read from a `table` in
GPU memory, not passed as arguments. A captured step therefore stays valid when the cache is allocated anew, for any
lengths.

    table   address of kv, slots of kv; addresses of uniforms_BT, tokens_BT, logps_BT, and their T; of the rotation's
            [T, 2, D]

Names: N rows of the step, H hidden, F width of the MLP, R query heads of a key head, D head dimension, V vocabulary.
kv is [layer, 2, slot, head, D].
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NO_SCORE = tl.constexpr(-1e30)  # below every real score; finite, for −inf − (−inf) is NaN


# ---- between the products ----


@triton.jit(do_not_specialize=["add"])
def add_norm_kernel(
    x_ptr, update_ptr, weight_ptr, y_ptr, H, eps, offset, add, OFFSET: tl.constexpr, BLOCK: tl.constexpr
):
    """x ← x + update;  y = x / √(mean x² + eps) · (weight + offset), of one row. Rounded where transformers rounds."""
    n = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    here = h < H
    x = tl.load(x_ptr + n * H + h, mask=here, other=0.0)
    weight = tl.load(weight_ptr + h, mask=here, other=0.0).to(tl.float32)
    if add != 0:
        update = tl.load(update_ptr + n * H + h, mask=here, other=0.0)
        x = (x.to(tl.float32) + update.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + n * H + h, x, mask=here)
    x = x.to(tl.float32)

    normed = x * tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    if OFFSET:
        weight += offset
    else:
        normed = normed.to(x_ptr.dtype.element_ty).to(tl.float32)

    tl.store(y_ptr + n * H + h, (normed * weight).to(y_ptr.dtype.element_ty), mask=here)


@triton.jit
def _rounded(x, kind: tl.constexpr, ROUND: tl.constexpr):
    """As the model rounds between two operations, where it computes in 16 bits."""
    return x.to(kind).to(tl.float32) if ROUND else x


@triton.jit
def _rotated(
    at, here, rotation_ptr, weight_ptr, eps, offset, d, D: tl.constexpr, NORM: tl.constexpr, ROUND: tl.constexpr
):  # fmt: skip
    """x·cos ∓ (its other half)·sin of heads [.., D] at addresses `at`, normed before where the model does so."""
    kind: tl.constexpr = at.dtype.element_ty
    other = tl.where(d < D // 2, d + D // 2, d - D // 2)
    x = tl.load(at, mask=here, other=0.0).to(tl.float32)
    y = tl.load(at - d + other, mask=here, other=0.0).to(tl.float32)
    if NORM:
        r = tl.rsqrt(tl.sum(x * x, -1, keep_dims=True) / D + eps)
        x_weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32) + offset
        y_weight = tl.load(weight_ptr + other, mask=d < D, other=0.0).to(tl.float32) + offset
        x = _rounded(_rounded(x * r, kind, ROUND) * x_weight, kind, ROUND)
        y = _rounded(_rounded(y * r, kind, ROUND) * y_weight, kind, ROUND)
    cos = tl.load(rotation_ptr + d, mask=here, other=0.0)
    sin = tl.load(rotation_ptr + D + d, mask=here, other=0.0)
    return _rounded(x * cos, kind, ROUND) + _rounded(y * tl.where(d < D // 2, -sin, sin), kind, ROUND)


@triton.jit
def rotate_kernel(
    qkv_ptr, position_ptr, table_ptr, q_weight_ptr, k_weight_ptr, eps, offset, ALL: tl.constexpr, Q: tl.constexpr,
    QK: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, ROUND: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Queries and keys of one token, in place. ALL heads are Q of queries, the keys' up to QK, and the values'."""
    n = tl.program_id(0).to(tl.int64)
    e, d = tl.arange(0, BLOCK_E)[:, None], tl.arange(0, BLOCK_D)[None, :]
    here = (e < QK) & (d < D)
    at = qkv_ptr + n * (ALL * D) + e * D + d
    rotation_ptr = tl.load(table_ptr + 6).to(tl.pointer_type(tl.float32)) + tl.load(position_ptr + n) * (2 * D)
    weight_ptr = tl.where(e < Q, q_weight_ptr, k_weight_ptr)

    x = _rotated(at, here, rotation_ptr, weight_ptr, eps, offset, d, D, NORM, ROUND)

    tl.debug_barrier()  # a head's other half is read before it is written
    tl.store(at, x.to(qkv_ptr.dtype.element_ty), mask=here)


@triton.jit
def gate_kernel(gate_up_ptr, out_ptr, F, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """activation(gate)·up, of one block of a row."""
    n = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kind = out_ptr.dtype.element_ty
    x = tl.load(gate_up_ptr + n * 2 * F + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + n * 2 * F + F + f, mask=f < F, other=0.0).to(tl.float32)

    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:  # gelu_tanh: ½·x·(1 + tanh z) = x·sigmoid(2·z)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))

    tl.store(out_ptr + n * F + f, (x.to(kind).to(tl.float32) * up).to(kind), mask=f < F)


# ---- attention ----


@triton.jit
def _capped(scores, softcap, SOFTCAP: tl.constexpr):
    if SOFTCAP:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # softcap·tanh(scores/softcap)
    return scores


@triton.jit
def _over_keys(
    q, begin, end, keys_ptr, values_ptr, prefix, prefix_start, suffix_start, head, scale, softcap,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of the tokens from begin to end of a row: max of the scores, Σ exp(score − max), and Σ exp(score − max)·v."""
    d, s = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)
    m = tl.full([BLOCK_M], NO_SCORE, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
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
        weight = weight * shrink + tl.sum(p, 1)
        out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        m = new_m
    return m, weight, out


@triton.jit(do_not_specialize=["layer", "window", "splits", "parts"])
def attend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, stats_ptr, prefix_start_ptr, prefix_length_ptr, suffix_start_ptr,
    step_ptr, table_ptr, layer, q_row, q_head, k_row, k_head, v_row, v_head, scale, softcap, window, splits, parts,
    q_weight_ptr, k_weight_ptr, eps, offset,
    HEADS: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    ROTATE: tl.constexpr, NORM: tl.constexpr, ROUND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """softmax(q·Kᵀ·scale)·V of a row's new token, for the R query heads of one key head and one part of the keys.

    The row's keys lie in two runs of slots: the prompt's, which its group shares, and its own. The new token's key and
    value come from k_ptr and v_ptr and are written to the row's next slot by the last part. ROTATE: query and key come
    straight from the product, and are normed and rotated here. More `parts` than `splits`: the first ones are the
    prompt's, by prefix_kernel, and only the row's own keys are left.
    """
    n, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    r, d = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    kind = out_ptr.dtype.element_ty
    step = tl.load(step_ptr + n)
    prefix = tl.load(prefix_length_ptr + n)
    prefix_start, suffix_start = tl.load(prefix_start_ptr + n), tl.load(suffix_start_ptr + n)
    total = prefix + step
    first = 0
    if WINDOW:
        first = tl.maximum(total + 1 - window, 0)
    first = tl.where(parts > splits, prefix, first)
    part = tl.cdiv(tl.cdiv(total - first, splits), BLOCK_S) * BLOCK_S
    begin = first + split * part
    end = tl.minimum(begin + part, total)

    keys_ptr = tl.load(table_ptr).to(tl.pointer_type(kind))
    num_slots = tl.load(table_ptr + 1)
    keys_ptr = tl.multiple_of(keys_ptr + layer.to(tl.int64) * 2 * num_slots * HEADS * D, 16)
    values_ptr = tl.multiple_of(keys_ptr + num_slots * HEADS * D, 16)
    here = (r[:, None] < R) & (d[None, :] < D)
    q_at = q_ptr + n * q_row + (head * R + r[:, None]) * q_head + d[None, :]
    k_at = k_ptr + n * k_row + head * k_head + d
    rotation_ptr = tl.load(table_ptr + 6).to(tl.pointer_type(tl.float32)) + total.to(tl.int64) * (2 * D)
    if ROTATE:
        q = _rotated(q_at, here, rotation_ptr, q_weight_ptr, eps, offset, d[None, :], D, NORM, ROUND).to(kind)
    else:
        q = tl.load(q_at, mask=here, other=0.0).to(kind)

    m, weight, out = _over_keys(
        q, begin, end, keys_ptr, values_ptr, prefix, prefix_start, suffix_start, head, scale, softcap,
        HEADS, D, BLOCK_R, BLOCK_D, BLOCK_S, SOFTCAP, PRECISION,
    )  # fmt: skip
    if split == splits - 1:  # the new token
        if ROTATE:
            k = _rotated(k_at, d < D, rotation_ptr, k_weight_ptr, eps, offset, d, D, NORM, ROUND).to(kind)
        else:
            k = tl.load(k_at, mask=d < D, other=0.0).to(kind)
        v = tl.load(v_ptr + n * v_row + head * v_head + d, mask=d < D, other=0.0).to(kind)
        mine = (suffix_start + step).to(tl.int64) * (HEADS * D) + head * D + d
        tl.store(keys_ptr + mine, k, mask=d < D)
        tl.store(values_ptr + mine, v, mask=d < D)
        score = _capped(tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale, softcap, SOFTCAP)
        new_m = tl.maximum(m, score)
        shrink, p = tl.exp2((m - new_m) * LOG2E), tl.exp2((score - new_m) * LOG2E)
        weight = weight * shrink + p
        out = out * shrink[:, None] + p[:, None] * v.to(tl.float32)[None, :]
        m = new_m

    head_row = n * HEADS * R + head * R + r
    if parts == 1:
        tl.store(out_ptr + head_row[:, None] * D + d[None, :], (out / weight[:, None]).to(kind), mask=here)
    else:
        row = head_row * parts + (parts - splits) + split
        tl.store(partial_ptr + row[:, None] * D + d[None, :], out, mask=here)
        tl.store(stats_ptr + row * 2, m, mask=r < R)
        tl.store(stats_ptr + row * 2 + 1, weight, mask=r < R)


@triton.jit(do_not_specialize=["layer", "splits", "parts"])
def prefix_kernel(
    q_ptr, partial_ptr, stats_ptr, tile_start_ptr, tile_rows_ptr, prefix_start_ptr, prefix_length_ptr, step_ptr, table_ptr,
    layer, q_row, q_head, scale, softcap, splits, parts, q_weight_ptr, eps, offset,
    HEADS: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, SOFTCAP: tl.constexpr, ROTATE: tl.constexpr,
    NORM: tl.constexpr, ROUND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One part of a prompt's keys, read once for all rows of a tile: neighbours of one prompt, R query heads each."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_rows = tl.load(tile_rows_ptr + tile)
    if num_rows == 0:
        return
    m_, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    kind = q_ptr.dtype.element_ty
    first = tl.load(tile_start_ptr + tile)
    prefix, prefix_start = tl.load(prefix_length_ptr + first), tl.load(prefix_start_ptr + first)
    mine = m_ < num_rows * R
    n = tl.where(mine, first + m_ // R, first)
    part = tl.cdiv(tl.cdiv(prefix, splits), BLOCK_S) * BLOCK_S
    begin = split * part
    end = tl.minimum(begin + part, prefix)

    keys_ptr = tl.load(table_ptr).to(tl.pointer_type(kind))
    num_slots = tl.load(table_ptr + 1)
    keys_ptr = tl.multiple_of(keys_ptr + layer.to(tl.int64) * 2 * num_slots * HEADS * D, 16)
    values_ptr = tl.multiple_of(keys_ptr + num_slots * HEADS * D, 16)
    here = mine[:, None] & (d[None, :] < D)
    q_at = q_ptr + (n * q_row + (head * R + m_ % R) * q_head)[:, None] + d[None, :]
    position = (prefix + tl.load(step_ptr + n)).to(tl.int64)
    rotation_ptr = tl.load(table_ptr + 6).to(tl.pointer_type(tl.float32)) + position[:, None] * (2 * D)
    if ROTATE:
        q = _rotated(q_at, here, rotation_ptr, q_weight_ptr, eps, offset, d[None, :], D, NORM, ROUND).to(kind)
    else:
        q = tl.load(q_at, mask=here, other=0.0)

    m, weight, out = _over_keys(
        q, begin, end, keys_ptr, values_ptr, prefix, prefix_start, 0, head, scale, softcap,
        HEADS, D, BLOCK_M, BLOCK_D, BLOCK_S, SOFTCAP, PRECISION,
    )  # fmt: skip

    row = (n * HEADS * R + head * R + m_ % R) * parts + split
    tl.store(partial_ptr + row[:, None] * D + d[None, :], out, mask=here)
    tl.store(stats_ptr + row * 2, m, mask=mine)
    tl.store(stats_ptr + row * 2 + 1, weight, mask=mine)


@triton.jit(do_not_specialize=["parts"])
def join_kernel(
    partial_ptr, stats_ptr, out_ptr, parts, D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """One query head's parts made one: out = Σ partial·exp(m − max) / Σ weight·exp(m − max)."""
    row = tl.program_id(0)
    d, part = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P)
    m = tl.load(stats_ptr + (row * parts + part) * 2, mask=part < parts, other=NO_SCORE)
    weight = tl.load(stats_ptr + (row * parts + part) * 2 + 1, mask=part < parts, other=0.0)
    share = tl.exp2((m - tl.max(m, 0)) * LOG2E)
    here = (part[:, None] < parts) & (d[None, :] < D)
    partial = tl.load(partial_ptr + (row * parts + part)[:, None] * D + d[None, :], mask=here, other=0.0)
    out = tl.sum(partial * share[:, None], 0) / tl.sum(weight * share, 0)
    tl.store(out_ptr + row * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


# ---- the draw ----


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

    The chunk first, from the chunks' sums, then the token in it. Writes token and log-prob to (row, step) of the outputs,
    and goes to the next step, unless the row has ended: by an EOS, or for its length.
    """
    n = tl.program_id(0)
    row, step = tl.load(row_ptr + n), tl.load(step_ptr + n)
    length = tl.load(table_ptr + 5)
    uniforms_ptr = tl.load(table_ptr + 2).to(tl.pointer_type(tl.float32))
    tokens_ptr = tl.load(table_ptr + 3).to(tl.pointer_type(tl.int64))
    logps_ptr = tl.load(table_ptr + 4).to(tl.pointer_type(tl.float32))
    at = row * length + step

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

    going = tl.load(finished_ptr + n) == 0  # a row that ended before stays where it is
    is_end = tl.sum((tl.load(eos_ptr + tl.arange(0, NUM_EOS)) == token).to(tl.int32), 0) > 0
    goes_on = going & (is_end == 0) & (step + 1 < length)
    tl.store(token_ptr + n, token)
    tl.store(finished_ptr + n, (goes_on == 0).to(tl.int8))
    tl.store(step_ptr + n, step + goes_on.to(tl.int32))
    tl.store(tokens_ptr + at, token, mask=going)
    tl.store(logps_ptr + at, (chosen - top) * scale - tl.log2(total) * LN2, mask=going)
