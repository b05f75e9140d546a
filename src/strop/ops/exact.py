"""Batch-invariant matrix product y = x·wᵀ + bias + onto: a row's result does not depend on the other rows, bit for bit.

BLAS libraries choose their tiles, and the split of the sum over K, by the number of rows. Here each element has one
float32 accumulator. Blocks of BLOCK_K products are added to it from first to last, and it is rounded once, at the end.
The tile size does not change a sum as long as a Hopper GPU uses the same instruction for all tiles (wgmma: 64 rows for
four warps). Attention is in `strop.models.exact`.

Shapes: M rows of x and y, K columns of x and w, N rows of w and columns of y.
"""

import torch
import triton
import triton.language as tl

from strop.ops.rows.launch import Launcher

PROGRAMS = 132  # the minimum: one per multiprocessor of an H200
GROUP = 8  # row tiles that run together and read the same columns of w, which then stay in the cache

# dtype → (BLOCK_K, [(tile rows, tile columns, warps, pipeline stages)]); the first with enough programs is used
TILES = {
    torch.float32: (32, [(64, 64, 4, 2)]),  # no tensor cores: TF32 would round the inputs
    None: (64, [(128, 128, 8, 4), (64, 128, 4, 4), (64, 64, 4, 6), (64, 32, 4, 8)]),
}
INTERPRETED_TILES = [(64, 128, 4, 1)]  # one tiling only: NumPy's order of summation depends on the shape


@triton.jit
def multiplied(a, b, onto, PRECISION: tl.constexpr):
    """Return onto + a·b in float32."""
    if PRECISION == "wide":  # Triton's interpreter knows no bfloat16: it multiplies the bits
        return tl.dot(a.to(tl.float32), b.to(tl.float32), onto, input_precision="ieee")
    return tl.dot(a, b, onto, input_precision=PRECISION)


@Launcher
def product_kernel(
    x_ptr, w_ptr, bias_ptr, onto_ptr, y_ptr, M: tl.int32,
    K: tl.constexpr, N: tl.constexpr, Y_STRIDE: tl.constexpr, BIAS: tl.constexpr, ONTO: tl.constexpr,
    PRECISION: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the product."""
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    first = program // (GROUP * tiles_n) * GROUP
    size = tl.minimum(tl.cdiv(M, BLOCK_M) - first, GROUP)
    within = program % (GROUP * tiles_n)
    first_m, first_n = ((first + within % size) * BLOCK_M).to(tl.int64), (within // size * BLOCK_N).to(tl.int64)
    m, n, i = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    # Rows and columns after the last read the tile's first, and are not stored. `tl.multiple_of` works for sums of a pointer
    # and an offset, not for arguments; without it Triton loads one number at a time.
    x_at = tl.multiple_of(x_ptr + first_m * K, 16) + tl.where(first_m + m < M, m, 0)[:, None] * K + i[None, :]
    w_at = tl.multiple_of(w_ptr + first_n * K, 16) + tl.where(first_n + n < N, n, 0)[:, None] * K + i[None, :]
    m, n = first_m + m, first_n + n

    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            x, w = tl.load(x_at + start), tl.load(w_at + start)
        else:
            x = tl.load(x_at + start, mask=i[None, :] < K - start, other=0.0)
            w = tl.load(w_at + start, mask=i[None, :] < K - start, other=0.0)
        sums = multiplied(x, tl.trans(w), sums, PRECISION)

    here = (m < M)[:, None] & (n < N)[None, :]
    if BIAS:
        sums += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ONTO:
        sums += tl.load(onto_ptr + m[:, None] * N + n[None, :], mask=here, other=0.0).to(tl.float32)
    tl.store(y_ptr + m[:, None] * Y_STRIDE + n[None, :], sums.to(y_ptr.dtype.element_ty), mask=here)


def product(
    x_MK: torch.Tensor,
    w_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    onto: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x @ wᵀ + bias + onto in the dtype of `onto`, or of x without it. Rows of `out` may have gaps."""
    x_MK, (M, K), N = whole(x_MK), x_MK.shape, len(w_NK)
    if out is None:
        out = torch.empty(M, N, dtype=x_MK.dtype if onto is None else onto.dtype, device=x_MK.device)
    block_k, tiles = TILES[x_MK.dtype if x_MK.dtype in TILES else None]
    y_MN = out
    if product_kernel.interpreted:  # the interpreter truncates where a GPU rounds
        tiles, y_MN = INTERPRETED_TILES, torch.empty(M, N)
    numbers = [-(-M // rows) * -(-N // columns) for rows, columns, *_ in tiles]
    which = next((i for i, number in enumerate(numbers) if number >= PROGRAMS), len(tiles) - 1)
    block_m, block_n, warps, stages = tiles[which]
    if M:
        product_kernel(
            numbers[which], x_MK, whole(w_NK), x_MK if bias_N is None else bias_N.contiguous(),
            x_MK if onto is None else whole(onto), y_MN, M, num_warps=warps, K=K, N=N, Y_STRIDE=y_MN.stride(0),
            BIAS=bias_N is not None, ONTO=onto is not None,
            PRECISION=precision(x_MK.dtype), GROUP=GROUP, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
            STAGES=stages,
        )  # fmt: skip
    return out if y_MN is out else out.copy_(y_MN)


def precision(dtype: torch.dtype) -> str:
    """Return the kernel's precision mode for this dtype: plain float32, or tensor cores for 16 bits."""
    if dtype == torch.float32:
        return "ieee"
    return "wide" if product_kernel.interpreted else "tf32"


def whole(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor, copied if needed, contiguous and aligned to 16 bytes, as the kernels need it."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
