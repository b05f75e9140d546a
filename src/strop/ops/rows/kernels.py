"""Triton kernels on rows of logits: the log-prob of a row's token, losses, and the row's gradient.

One program is one row. A row is read as tiles of LANES × PER elements, PER being the 16 bytes one lane loads at once:

    | edge | lane 0: PER elements | lane 1: PER | … | tile after tile | last tile, lanes masked | edge |

A row need not begin at a multiple of 16 bytes (V = 50257). Its first and last few elements, fewer than PER on either side,
are one small masked load. All other loads and stores are whole and aligned, and need no mask.

Each lane keeps the maximum and the sum of its own elements, and rescales the sum once per tile, not once per element. With
about one exponential per element the kernel is limited by memory, not by the exponential unit. The maximum is subtracted
before the temperature is applied, so a common offset of the logits costs no precision.

The gradient processes the tiles in reverse order, because the last ones read are still in the cache. Its stores bypass the
cache.

Names: x logits, m maximum, s Σ exp, t Σ exp·(x − m), each relative to m; `scale` = log₂e / temperature, so that
exp((x − m)/temperature) = exp2((x − m)·scale). Everything is float32 inside, offsets of rows are 64-bit.
"""

import triton
import triton.language as tl

from strop.ops.rows.launch import Launcher

LOWEST = tl.constexpr(-3.4028234663852886e38)  # not −inf: −inf − (−inf) is NaN, and a banned token stays exp(−inf) = 0
FAR = tl.constexpr(-1e30)  # exp is 0 below it; replaces −inf where 0·(−inf) would be NaN
ALL_NAN = tl.constexpr(tl.PropagateNan.ALL)  # NaN stays NaN: the minimum of NaN and a bound would be the bound
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
HEADROOM = tl.constexpr(40.0)  # the largest power of 2 of an exponential: sums and products of them stay in range


@triton.jit
def merge(x, m, s, t, scale, ENTROPY: tl.constexpr):
    """Return the lanes' m, s, t [LANES], updated with the tile x [LANES, PER]."""
    new = tl.maximum(m, tl.max(x, 1))
    shrink = tl.exp2((m - new) * scale)
    d = (x - new[:, None]) * scale
    e = tl.exp2(d)
    if ENTROPY:
        t = (t + s * tl.maximum((m - new) * scale, FAR)) * shrink + tl.sum(e * tl.maximum(d, FAR), 1)
    s = s * shrink + tl.sum(e, 1)
    return new, s, t


@triton.jit
def _join(m, s, t, other_m, other_s, other_t, scale):
    """Return the statistics of two sets of elements together."""
    new = tl.maximum(m, other_m)
    down, other_down = (m - new) * scale, (other_m - new) * scale
    mine, others = tl.exp2(down), tl.exp2(other_down)
    t = (t + s * tl.maximum(down, FAR)) * mine + (other_t + other_s * tl.maximum(other_down, FAR)) * others
    return new, s * mine + other_s * others, t


@triton.jit
def _edge_offsets(before, V, PER: tl.constexpr):
    """Return offsets and mask of the elements outside whole lanes: `before` at the row's start, the rest at its end."""
    j = tl.arange(0, 2 * PER)
    after = tl.maximum(V - before, 0) % PER
    offsets = tl.where(j < PER, j, V - after + (j - PER))
    return offsets, (j < tl.minimum(before, V)) | ((j >= PER) & (j < PER + after))


@triton.jit
def _row_stats(
    x_ptr, before, V, scale, ENTROPY: tl.constexpr, EVICTION: tl.constexpr,
    LANES: tl.constexpr, PER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return m, s, t of a whole row that begins at x_ptr; `before` elements come before the first 16-byte boundary.

    STAGES tiles are loaded ahead.
    """
    lane = tl.arange(0, LANES)
    tile = lane[:, None] * PER + tl.arange(0, PER)[None, :]
    m = tl.full([LANES], LOWEST, tl.float32)
    s = tl.zeros([LANES], tl.float32)
    t = tl.zeros([LANES], tl.float32)
    body_ptr = tl.multiple_of(x_ptr + before, 16)
    lanes = tl.maximum(V - before, 0) // PER
    tiles = lanes // LANES
    for k in tl.range(tiles, num_stages=STAGES):
        x = tl.load(body_ptr + k * (LANES * PER) + tile, eviction_policy=EVICTION).to(tl.float32)
        m, s, t = merge(x, m, s, t, scale, ENTROPY)
    if tiles * LANES < lanes:
        rest = (lane < lanes - tiles * LANES)[:, None]
        x = tl.load(body_ptr + tiles * (LANES * PER) + tile, mask=rest, other=-float("inf")).to(tl.float32)
        m, s, t = merge(x, m, s, t, scale, ENTROPY)
    if lanes * PER < V:
        offsets, inside = _edge_offsets(before, V, PER)
        x = tl.load(x_ptr + offsets, mask=inside, other=-float("inf")).to(tl.float32)
        top = tl.maximum(tl.max(x, 0), LOWEST)
        d = (x - top) * scale
        e = tl.exp2(d)
        first = lane == 0  # the edges' statistics join lane 0
        edge_s, edge_t = tl.where(first, tl.sum(e, 0), 0.0), tl.where(first, tl.sum(e * tl.maximum(d, FAR), 0), 0.0)
        m, s, t = _join(m, s, t, tl.where(first, top, LOWEST), edge_s, edge_t, scale)
    top = tl.max(m, 0)
    down = (m - top) * scale
    shrink = tl.exp2(down)
    return top, tl.sum(s * shrink, 0), tl.sum((t + s * tl.maximum(down, FAR)) * shrink, 0)


@triton.jit
def _gradient(x, is_target, top, log2_sum, scale, d_logp, d_entropy, entropy, ENTROPY: tl.constexpr):
    """Return d_logp·(onehot − p) − d_entropy·p·(log p + H); d_logp and d_entropy already include 1/temperature."""
    log2_p = (x - top) * scale - log2_sum
    p = tl.exp2(log2_p)
    if ENTROPY:
        d_p = d_logp + d_entropy * (tl.maximum(log2_p, FAR) * LN2 + entropy)
    else:
        d_p = d_logp
    return tl.where(is_target, d_logp, 0.0) - p * d_p


@triton.jit
def _write_gradient(
    x_ptr, dx_ptr, before, V, target, top, log2_sum, scale, d_logp, d_entropy, entropy,
    ENTROPY: tl.constexpr, LANES: tl.constexpr, PER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the row's gradient; dx_ptr may be x_ptr. Both rows have the same offset from a 16-byte boundary."""
    lane = tl.arange(0, LANES)
    tile = lane[:, None] * PER + tl.arange(0, PER)[None, :]
    body_ptr, d_body_ptr = tl.multiple_of(x_ptr + before, 16), tl.multiple_of(dx_ptr + before, 16)
    dtype = dx_ptr.dtype.element_ty
    body_target = (target - before).to(tl.int32)  # 64 bits would double the cost of the comparison
    lanes = tl.maximum(V - before, 0) // PER
    tiles = lanes // LANES
    if lanes * PER < V:
        offsets, inside = _edge_offsets(before, V, PER)
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        dx = _gradient(x, offsets == body_target + before, top, log2_sum, scale, d_logp, d_entropy, entropy, ENTROPY)
        tl.store(dx_ptr + offsets, dx.to(dtype), mask=inside)
    if tiles * LANES < lanes:
        rest = (lane < lanes - tiles * LANES)[:, None]
        offset = tiles * (LANES * PER) + tile
        x = tl.load(body_ptr + offset, mask=rest, other=0.0).to(tl.float32)
        dx = _gradient(x, offset == body_target, top, log2_sum, scale, d_logp, d_entropy, entropy, ENTROPY)
        tl.store(d_body_ptr + offset, dx.to(dtype), mask=rest, cache_modifier=".cs")
    for i in tl.range(tiles, num_stages=STAGES):
        offset = (tiles - 1 - i) * (LANES * PER) + tile
        x = tl.load(body_ptr + offset, eviction_policy="evict_first").to(tl.float32)
        dx = _gradient(x, offset == body_target, top, log2_sum, scale, d_logp, d_entropy, entropy, ENTROPY)
        tl.store(d_body_ptr + offset, dx.to(dtype), cache_modifier=".cs")


@triton.jit
def _highest(pointers, inside):
    return tl.max(tl.load(pointers, mask=inside, other=-float("inf")).to(tl.float32))


@triton.jit
def _exponentiate(pointers, inside, base, scale):
    """Overwrite x with exp2((x − base)·scale) and return it."""
    x = tl.load(pointers, mask=inside, other=-float("inf")).to(tl.float32)
    e = tl.exp2((x - base) * scale)
    tl.debug_barrier()  # every warp loads these few elements: all must have read before one writes
    tl.store(pointers, e.to(pointers.dtype.element_ty), mask=inside)
    return e


@triton.jit
def _multiply(pointers, inside, factor):
    e = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    tl.store(pointers, (e * factor).to(pointers.dtype.element_ty), mask=inside)


@triton.jit
def _write_exponentials(x_ptr, before, V, base, scale, LANES: tl.constexpr, PER: tl.constexpr):
    """Overwrite the row with exp2((x − base)·scale), in one pass. Return the base and the row's sum.

    The maximum is known only after the whole row was read. A base slightly below it is enough: the largest of the given one
    (an element, or LOWEST), of the row's first elements and of those outside whole tiles. A lane that finds an element
    above base + headroom stops writing. Then a second pass uses the row's maximum as the base, and scales down what was
    written.
    """
    lane = tl.arange(0, LANES)
    tile = lane[:, None] * PER + tl.arange(0, PER)[None, :]
    body_ptr = tl.multiple_of(x_ptr + before, 16)
    lanes = tl.maximum(V - before, 0) // PER
    tiles = lanes // LANES
    has_rest, rest_ptr = tiles * LANES < lanes, body_ptr + tiles * (LANES * PER) + tile
    rest = tile < (lanes - tiles * LANES) * PER
    has_edges = lanes * PER < V
    edges, at_edge = _edge_offsets(before, V, PER)
    base = tl.maximum(base, _highest(x_ptr + lane, lane < V))
    if has_rest:
        base = tl.maximum(base, _highest(rest_ptr, rest))
    if has_edges:
        base = tl.maximum(base, _highest(x_ptr + edges, at_edge))

    s = tl.zeros([LANES], tl.float32)
    if has_rest:
        s += tl.sum(_exponentiate(rest_ptr, rest, base, scale), 1)
    if has_edges:
        s += tl.where(lane == 0, tl.sum(_exponentiate(x_ptr + edges, at_edge, base, scale), 0), 0.0)
    highest = tl.zeros([LANES], tl.float32) + (base + HEADROOM / scale)
    done = tl.zeros([LANES], tl.int32)
    for k in range(tiles):
        x = tl.load(body_ptr + k * (LANES * PER) + tile).to(tl.float32)
        e = tl.exp2((x - base) * scale)
        fits = tl.max(x, 1) <= highest
        highest = tl.where(fits, highest, float("nan"))  # the lane writes nothing more
        done += fits.to(tl.int32)
        s += tl.where(fits, tl.sum(e, 1), 0.0)
        e = e.to(x_ptr.dtype.element_ty)
        tl.store(body_ptr + k * (LANES * PER) + tile, e, mask=fits[:, None])

    if tl.min(done, 0) < tiles:
        top = tl.zeros([LANES], tl.float32) + base
        for k in range(tiles):
            x = tl.load(body_ptr + k * (LANES * PER) + tile).to(tl.float32)
            top = tl.where(k < done, top, tl.maximum(top, tl.max(x, 1)))
        raised = tl.max(top, 0)
        shrink = tl.exp2((base - raised) * scale)
        s *= shrink
        for k in range(tiles):
            x = tl.load(body_ptr + k * (LANES * PER) + tile).to(tl.float32)
            e = tl.where((k < done)[:, None], x * shrink, tl.exp2((x - raised) * scale))
            s += tl.where(k < done, 0.0, tl.sum(e, 1))
            tl.store(body_ptr + k * (LANES * PER) + tile, e.to(x_ptr.dtype.element_ty))
        _multiply(rest_ptr, rest, shrink)
        _multiply(x_ptr + edges, at_edge, shrink)
        base = raised
    return base, tl.sum(s, 0)


@triton.jit
def _write_zeros(dx_ptr, before, V, LANES: tl.constexpr, PER: tl.constexpr):
    lane = tl.arange(0, LANES)
    tile = lane[:, None] * PER + tl.arange(0, PER)[None, :]
    zero = tl.zeros([LANES, PER], dx_ptr.dtype.element_ty)
    body_ptr = tl.multiple_of(dx_ptr + before, 16)
    lanes = tl.maximum(V - before, 0) // PER
    for first in range(0, lanes, LANES):
        tl.store(body_ptr + first * PER + tile, zero, mask=(lane < lanes - first)[:, None], cache_modifier=".cs")
    offsets, inside = _edge_offsets(before, V, PER)
    tl.store(dx_ptr + offsets, tl.zeros([2 * PER], dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def row_start(row, T, stride_B, stride_T):
    """Return the offset of a row; rows are [B, T] with any two strides, such as those of logits[:, :-1]."""
    return (row // T) * stride_B + (row % T) * stride_T


@triton.jit
def _before(misaligned, start, PER: tl.constexpr):
    """Return the number of elements before the row's first 16-byte boundary. misaligned: that of the tensor's start after one"""
    return ((PER - (misaligned + start) % PER) % PER).to(tl.int32)


@triton.jit
def _read_target(x_ptr, target, V):
    """Return the target's logit; NaN for a target outside the vocabulary, which is not read."""
    inside = (target >= 0) & (target < V)
    x = tl.load(x_ptr + target, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, x, float("nan"))


@Launcher
def logp_kernel(
    x_ptr, id_ptr, mask_ptr, logp_ptr, top_ptr, sum_ptr, entropy_ptr,
    T: tl.int32, V: tl.int32, first_id: tl.int32, vocabulary: tl.int32,
    stride_B: tl.int64, stride_T: tl.int64, misaligned: tl.int32, scale: tl.float32,
    MASKED: tl.constexpr, STATS: tl.constexpr, ENTROPY: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    LANES: tl.constexpr, PER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write logp = (x[id] − m)/temperature − log s, and H = log s − t/s; the row has the ids `first_id` to `first_id + V`.

    A vocabulary may come in several blocks, one launch each. Between launches the outputs hold the results so far (x[id] in
    logp, m in top, s in sum, t in entropy), and the last block finishes them (log₂ s in sum).
    """
    row = tl.program_id(0).to(tl.int64)
    if MASKED:
        if tl.load(mask_ptr + row) == 0:
            if LAST:
                tl.store(logp_ptr + row, 0.0)
                if STATS:
                    tl.store(top_ptr + row, 0.0)
                    tl.store(sum_ptr + row, 0.0)
                if ENTROPY:
                    tl.store(entropy_ptr + row, 0.0)
            return
    start = row_start(row, T, stride_B, stride_T)
    x_ptr += start
    target = tl.load(id_ptr + row).to(tl.int64)
    # load what the end needs before the row, so that its latency is hidden
    here = (target >= first_id) & (target < first_id + V)
    picked = tl.load(x_ptr + (target - first_id), mask=here, other=0.0).to(tl.float32)
    other_m, other_s, other_t = LOWEST, 0.0, 0.0
    if FIRST:
        # the first block; an id outside the vocabulary stays NaN through all blocks
        picked = tl.where((target >= 0) & (target < vocabulary), picked, float("nan"))
    else:
        other_m, other_s = tl.load(top_ptr + row), tl.load(sum_ptr + row)
        if ENTROPY:
            other_t = tl.load(entropy_ptr + row)
        picked = tl.where(here, picked, tl.load(logp_ptr + row))
    before = _before(misaligned, start, PER)
    m, s, t = _row_stats(x_ptr, before, V, scale, ENTROPY, "evict_first", LANES, PER, STAGES)
    if not FIRST:
        m, s, t = _join(m, s, t, other_m, other_s, other_t, scale)
    if LAST:
        log2_sum = tl.log2(s)
        picked = ((picked - m) * scale - log2_sum) * LN2
        t = (log2_sum - t / s) * LN2
        s = log2_sum
    tl.store(logp_ptr + row, picked)
    if STATS:
        tl.store(top_ptr + row, m)
        tl.store(sum_ptr + row, s)
    if ENTROPY:
        tl.store(entropy_ptr + row, t)


@Launcher
def logp_bwd_kernel(
    x_ptr, dx_ptr, id_ptr, mask_ptr, top_ptr, sum_ptr, entropy_ptr, d_logp_ptr, d_entropy_ptr,
    T: tl.int32, V: tl.int32, first_id: tl.int32, vocabulary: tl.int32,
    stride_B: tl.int64, stride_T: tl.int64, misaligned: tl.int32, scale: tl.float32,
    MASKED: tl.constexpr, ENTROPY: tl.constexpr, LANES: tl.constexpr, PER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write dx = d_logp·(onehot − p)/temperature − d_entropy·p·(log p + H)/temperature."""
    row = tl.program_id(0).to(tl.int64)
    start = row_start(row, T, stride_B, stride_T)
    x_ptr += start
    dx_ptr += start
    if MASKED:
        if tl.load(mask_ptr + row) == 0:
            _write_zeros(dx_ptr, _before(misaligned, start, PER), V, LANES, PER)
            return
    target = tl.load(id_ptr + row).to(tl.int64)
    d_logp = tl.load(d_logp_ptr + row) * (scale * LN2)
    d_logp = tl.where((target >= 0) & (target < vocabulary), d_logp, float("nan"))
    d_entropy, entropy = 0.0, 0.0
    if ENTROPY:
        d_entropy, entropy = tl.load(d_entropy_ptr + row) * (scale * LN2), tl.load(entropy_ptr + row)
    _write_gradient(
        x_ptr, dx_ptr, _before(misaligned, start, PER), V, target - first_id, tl.load(top_ptr + row),
        tl.load(sum_ptr + row), scale, d_logp, d_entropy, entropy, ENTROPY, LANES, PER, STAGES,
    )  # fmt: skip


@triton.jit
def _k3(d):
    """Return exp(d) − d − 1, computed without cancellation."""
    series = 1.0 / 3628800
    series = series * d + 1.0 / 362880
    series = series * d + 1.0 / 40320
    series = series * d + 1.0 / 5040
    series = series * d + 1.0 / 720
    series = series * d + 1.0 / 120
    series = series * d + 1.0 / 24
    series = series * d + 1.0 / 6
    series = series * d + 0.5
    return tl.where(tl.abs(d) < 0.5, series * d * d, tl.exp(d) - d - 1)


@triton.jit
def clipped_surrogate(logp, log_ratio, advantage, low, high, delta):
    """Return −min(r·A, clip(r)·A), r = exp(log_ratio) at most delta if A < 0, and its derivative by logp: −A·r, 0 if clipped."""
    ratio = tl.exp(log_ratio)
    raised = tl.maximum(ratio, low, propagate_nan=ALL_NAN)
    below_delta = tl.minimum(raised, delta, propagate_nan=ALL_NAN)
    bounded = tl.where(advantage < 0, below_delta, tl.minimum(ratio, high, propagate_nan=ALL_NAN))
    cut = (bounded < ratio) | (bounded > ratio)  # a NaN is not
    return -advantage * bounded, tl.where(cut, 0.0, -advantage * ratio)


@triton.jit
def clipped_weight(logp, log_ratio, advantage, low, high, delta):
    """Return −min(r, high)·A·logp, whose weight has no gradient (CISPO), and its derivative by logp."""
    d_logp = -advantage * tl.minimum(tl.exp(log_ratio), high, propagate_nan=ALL_NAN)
    return d_logp * logp, d_logp


@triton.jit
def soft_gate(logp, log_ratio, advantage, low, high, delta):
    """Return −4/τ·σ(τ·(r − 1))·A, τ = high for A > 0, else low (SAPO), and its derivative by logp: −4·A·σ·(1 − σ)·r."""
    heat = tl.where(advantage > 0, high, low)
    ratio = tl.exp(tl.minimum(log_ratio, 60.0, propagate_nan=ALL_NAN))  # keeps the ratio finite where the gate is flat
    gate = tl.sigmoid(heat * (ratio - 1))
    other = tl.sigmoid(-heat * (ratio - 1))
    return -4.0 / heat * gate * advantage, -4.0 * advantage * gate * other * ratio


@triton.jit
def negative_logp(logp, log_ratio, advantage, low, high, delta):
    """Return −logp (SFT) and its derivative."""
    return -logp, tl.where(logp == logp, -1.0, logp)


@Launcher
def policy_loss_kernel(
    x_ptr, dx_ptr, id_ptr, mask_ptr, old_ptr, ref_ptr, advantage_ptr, weight_ptr, logp_ptr, terms_ptr, factor_ptr,
    stride_terms: tl.int32, rows_per_advantage: tl.int32, V: tl.int32, T: tl.int32,
    stride_B: tl.int64, stride_T: tl.int64, misaligned: tl.int32,
    scale: tl.float32, low: tl.float32, high: tl.float32, delta: tl.float32, beta: tl.float32,
    TOKEN_LOSS: tl.constexpr, MASKED: tl.constexpr, ON_POLICY: tl.constexpr, KL: tl.constexpr, GRADIENT: tl.constexpr,
    FACTORED: tl.constexpr, LANES: tl.constexpr, PER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write a row's term of a policy loss, and its gradient.

    terms [3, N]: weight·(loss + beta·kl), weight·loss, weight·kl. The coefficient of the gradient needs only the row:
    dx = weight·d(loss + beta·kl)/d logp · (onehot − p)/temperature. The rows of a sequence may share an advantage and a
    weight.

    FACTORED overwrites x in one pass with the gradient except for a factor of the row: dx = factor·e, with
    e = exp(x − base) off the target, −Σ e of all others on it, and factor = −d_logp/Σ e.
    """
    row = tl.program_id(0).to(tl.int64)
    start = row_start(row, T, stride_B, stride_T)
    x_ptr += start
    if GRADIENT:
        dx_ptr += start
    if MASKED:
        if tl.load(mask_ptr + row) == 0:
            tl.store(logp_ptr + row, 0.0)
            for i in tl.static_range(3):
                tl.store(terms_ptr + i * stride_terms + row, 0.0)
            if GRADIENT:
                _write_zeros(dx_ptr, _before(misaligned, start, PER), V, LANES, PER)
            return
    target = tl.load(id_ptr + row).to(tl.int64)
    before = _before(misaligned, start, PER)
    # load what the loss needs before the row, so that its latency is hidden
    picked = _read_target(x_ptr, target, V)
    owner = row // rows_per_advantage
    advantage, weight = tl.load(advantage_ptr + owner), tl.load(weight_ptr + owner)
    old, ref = 0.0, 0.0
    if not ON_POLICY:
        old = tl.load(old_ptr + row)
    if KL > 0:
        ref = tl.load(ref_ptr + row)
    eviction: tl.constexpr = "evict_last" if GRADIENT else ""
    if FACTORED:
        top, total = _write_exponentials(x_ptr, before, V, tl.maximum(picked, LOWEST), scale, LANES, PER)
    else:
        top, total, _ = _row_stats(x_ptr, before, V, scale, False, eviction, LANES, PER, STAGES)
    log2_sum = tl.log2(total)
    logp = ((picked - top) * scale - log2_sum) * LN2

    log_ratio = logp - old
    if ON_POLICY:
        log_ratio = tl.where(logp == logp, 0.0, logp)  # 0 also for −inf, NaN for NaN
    loss, d_loss = TOKEN_LOSS(logp, log_ratio, advantage, low, high, delta)
    kl, d_kl = 0.0, 0.0
    if KL > 0:
        d = ref - logp
        if KL == 1:  # k1 = −d
            kl, d_kl = -d, 1.0
        elif KL == 2:  # k2 = d²/2
            kl, d_kl = 0.5 * d * d, -d
        else:  # k3 = exp(d) − d − 1
            kl = _k3(d)
            d_kl = tl.where(tl.abs(d) < 0.5, -(kl + d), 1 - tl.exp(d))
    beta_kl, beta_d_kl = tl.where(beta == 0, 0.0, beta * kl), tl.where(beta == 0, 0.0, beta * d_kl)  # 0·inf is NaN
    tl.store(logp_ptr + row, logp)
    tl.store(terms_ptr + row, weight * (loss + beta_kl))
    tl.store(terms_ptr + stride_terms + row, weight * loss)
    tl.store(terms_ptr + 2 * stride_terms + row, weight * kl)
    if GRADIENT:
        d_logp = weight * (d_loss + beta_d_kl) * (scale * LN2)
        if FACTORED:
            tl.store(factor_ptr + row, -d_logp / total)
            others = total - tl.exp2((picked - top) * scale)
            tl.debug_barrier()  # the target's exponential is written
            tl.store(x_ptr + target, (-others).to(x_ptr.dtype.element_ty), mask=(target >= 0) & (target < V))
        else:
            _write_gradient(
                x_ptr, dx_ptr, before, V, target, top, log2_sum, scale, d_logp, 0.0, 0.0, False, LANES, PER, STAGES
            )
