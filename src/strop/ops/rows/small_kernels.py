"""Small Triton kernels: a batch's advantages and weights, sums of loss terms, multiplication by factors.

Everything is float32 inside, offsets of rows are 64-bit.
"""

import triton.language as tl

from strop.ops.rows.kernels import row_start
from strop.ops.rows.launch import Launcher, aligned


@Launcher
def batch_kernel(
    reward_ptr, mask_ptr, count_ptr, advantage_ptr, weight_ptr,
    T: tl.int32, group_size: tl.int32, count: tl.float32, tokens: tl.float32,
    COUNT_ON_DEVICE: tl.constexpr, BY_LENGTH: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Write a sequence's advantage and the weight of its tokens in the loss; one program per sequence.

    advantage = (r − mean)/std of its group, as `strop.losses.group_advantages`; weight = 1/(count·tokens), or with
    BY_LENGTH 1/(count·length), as `strop.losses.token_weights`.
    """
    sequence = tl.program_id(0)
    if COUNT_ON_DEVICE:
        count = tl.load(count_ptr).to(tl.float32)
        count = tl.where(count > 0, count, 1.0)
    if BY_LENGTH:
        length = tl.zeros([BLOCK_T], tl.int32)
        for start in range(0, T, BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            counts = tl.load(mask_ptr + sequence.to(tl.int64) * T + t, mask=t < T, other=0)
            length += tl.where(counts != 0, 1, 0)
        tokens = tl.maximum(tl.sum(length, 0), 1).to(tl.float32)
    tl.store(weight_ptr + sequence, 1.0 / (count * tokens))
    g = tl.arange(0, BLOCK_G)
    first = (sequence // group_size) * group_size
    # subtract the first reward: equal rewards then give exactly 0, even if their mean is rounded
    r = tl.load(reward_ptr + first + g, mask=g < group_size, other=0).to(tl.float64)
    r = tl.where(g < group_size, r - tl.load(reward_ptr + first).to(tl.float64), 0.0)
    centred = tl.where(g < group_size, r - tl.sum(r, 0) / group_size, 0.0)
    std = tl.sqrt(tl.sum(centred * centred, 0) / group_size)
    mine = tl.sum(tl.where(g == sequence - first, centred, 0.0), 0)
    tl.store(advantage_ptr + sequence, tl.where(mine == 0, 0.0, mine / std).to(tl.float32))


@Launcher
def sums_kernel(terms_ptr, total_ptr, policy_and_kl_ptr, N: tl.int32, BLOCK: tl.constexpr):
    """Write the sums of terms [3, N], added in a fixed order; one program per sum."""
    i = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        total += tl.load(terms_ptr + i.to(tl.int64) * N + start + n, mask=start + n < N, other=0.0)
    if i == 0:
        tl.store(total_ptr, tl.sum(total, 0))
    else:
        tl.store(policy_and_kl_ptr + (i - 1), tl.sum(total, 0))


@aligned
def put_kernel(
    x_ptr, factor_ptr, place_ptr, out_ptr, H: tl.constexpr, PLACED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write out[place] = factor·x; one program per row."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factor_ptr + row)
    x_ptr += row * H
    if PLACED:
        out_ptr += tl.load(place_ptr + row) * H
    else:
        out_ptr += row * H
    for start in range(0, H, BLOCK):
        h = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + h, mask=h < H)
        tl.store(out_ptr + h, (factor * x).to(out_ptr.dtype.element_ty), mask=h < H)


@aligned
def scale_kernel(x_ptr, scale_ptr, size: tl.int64, BLOCK: tl.constexpr):
    """Multiply x by the scale in place; a scale of 1 reads and writes nothing."""
    scale = tl.load(scale_ptr).to(tl.float32)
    if scale == 1.0:
        return
    dtype = x_ptr.dtype.element_ty
    n = tl.arange(0, BLOCK)
    blocks = size // BLOCK
    for block in range(tl.program_id(0).to(tl.int64), blocks, tl.num_programs(0).to(tl.int64)):
        x = tl.load(x_ptr + block * BLOCK + n)
        tl.store(x_ptr + block * BLOCK + n, (x.to(tl.float32) * scale).to(dtype))
    if tl.program_id(0) == 0:
        rest = blocks * BLOCK + n
        x = tl.load(x_ptr + rest, mask=rest < size)
        tl.store(x_ptr + rest, (x.to(tl.float32) * scale).to(dtype), mask=rest < size)


@Launcher
def scale_rows_kernel(
    x_ptr, scale_ptr, V: tl.int32, T: tl.int32, stride_B: tl.int64, stride_T: tl.int64, BLOCK: tl.constexpr
):
    """Multiply rows by the scale in place, without touching what lies between them; one program per row."""
    scale = tl.load(scale_ptr).to(tl.float32)
    if scale == 1.0:
        return
    x_ptr += row_start(tl.program_id(0).to(tl.int64), T, stride_B, stride_T)
    for start in range(0, V, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offsets, mask=offsets < V)
        tl.store(x_ptr + offsets, (x.to(tl.float32) * scale).to(x_ptr.dtype.element_ty), mask=offsets < V)
