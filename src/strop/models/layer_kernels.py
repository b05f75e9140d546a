"""Norm, rotation and gate of a decoder layer, each one Triton kernel forward and one backward.

All arithmetic is float32 and is rounded once, at the store. Offsets are 64-bit. Sizes and strides are compile-time constants,
numbers of tokens are not: a model's kernels are compiled once for all lengths. Rows begin at multiples of 16 bytes.

Shapes: N tokens, H hidden, F the width of the gate; heads of D numbers, Q + K + K of them in a row of qkv.
"""

import torch
import triton
import triton.language as tl

from strop.ops.rows.launch import aligned

NORM_PROGRAMS = 528  # in a norm's backward: four per multiprocessor of an H200, each with its own partial sum of dw
NORM_TILE = 2048  # numbers that one program of a norm holds, at least a row
GATE_BLOCK = 1024


# ---- h = x + a, r = (mean h² + eps)^-½, n = w·h·r; of rows, or of the heads in them ----


@triton.jit
def _tile(
    start, end, stride: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return offsets and mask of ROWS rows, in tokens that are `stride` apart."""
    row, i = start + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at = (row // HEADS) * stride + (row % HEADS) * H
    return at[:, None] + i[None, :], (row[:, None] < end) & (i[None, :] < H)


@aligned
def norm_kernel(
    x_ptr, a_ptr, w_ptr, h_ptr, n_ptr, r_ptr, num_rows: tl.int32, eps: tl.float32,
    ADD: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, X_STRIDE: tl.constexpr, N_STRIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * ROWS
    row, i = start + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at, here = _tile(start, num_rows, X_STRIDE, HEADS, H, ROWS, BLOCK)
    h = tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32)
    if ADD:
        h += tl.load(a_ptr + at, mask=here, other=0.0).to(tl.float32)
        h = h.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + at, h, mask=here)
        h = h.to(tl.float32)
    w = tl.load(w_ptr + i, mask=i < H, other=0.0).to(tl.float32)

    r = tl.rsqrt(tl.sum(h * h, 1) / H + eps)
    n = w[None, :] * h * r[:, None]

    tl.store(r_ptr + row, r, mask=row < num_rows)
    at, here = _tile(start, num_rows, N_STRIDE, HEADS, H, ROWS, BLOCK)
    tl.store(n_ptr + at, n.to(n_ptr.dtype.element_ty), mask=here)


@aligned
def norm_bwd_kernel(
    dn_ptr, past_ptr, h_ptr, w_ptr, r_ptr, dh_ptr, n_ptr, dw_ptr, num_rows: tl.int32, rows_each: tl.int32,
    PAST: tl.constexpr, AGAIN: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr,
    DN_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of `rows_each` rows, their sum of the weight's gradient, and with AGAIN their recomputed norm."""
    program, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    first = program * rows_each
    end = tl.minimum(first + rows_each, num_rows)
    w = tl.load(w_ptr + i, mask=i < H, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)
    for start in range(first, end, ROWS):
        row = start + tl.arange(0, ROWS)
        at, here = _tile(start, end, DN_STRIDE, HEADS, H, ROWS, BLOCK)
        dn = tl.load(dn_ptr + at, mask=here, other=0.0).to(tl.float32)
        at, here = _tile(start, end, H_STRIDE, HEADS, H, ROWS, BLOCK)
        h = tl.load(h_ptr + at, mask=here, other=0.0).to(tl.float32)
        r = tl.load(r_ptr + row, mask=row < end, other=0.0)

        hr = h * r[:, None]
        dw += tl.sum(dn * hr, 0)  # dL/dw = Σ dn·h·r
        d_hr = dn * w[None, :]
        via_r = tl.sum(d_hr * hr, 1) / H
        dh = r[:, None] * (d_hr - hr * via_r[:, None])  # direct path − path through r
        if PAST:
            dh += tl.load(past_ptr + at, mask=here, other=0.0).to(tl.float32)

        tl.store(dh_ptr + at, dh.to(dh_ptr.dtype.element_ty), mask=here)
        if AGAIN:
            n = w[None, :] * h * r[:, None]
            tl.store(n_ptr + at, n.to(n_ptr.dtype.element_ty), mask=here)
    tl.store(dw_ptr + program * H + i, dw, mask=i < H)


def norm(x, w, eps, dtype, a=None, n=None):
    """Return (h = x + a or x, its norm, r) for x [N, H] or [N, heads, D]; the tokens may be strided."""
    (heads, H), num_rows = _heads(x), x.numel() // x.shape[-1]
    rows, block = _norm_tile(H)
    h = x if a is None else torch.empty_like(x, dtype=torch.promote_types(x.dtype, a.dtype))
    n = torch.empty(x.shape, dtype=dtype, device=x.device) if n is None else n
    r = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    norm_kernel(
        -(-num_rows // rows), x, x if a is None else a, w, h, n, r, num_rows, eps, num_warps=_warps(rows * block),
        ADD=a is not None, HEADS=heads, H=H, X_STRIDE=x.stride(0), N_STRIDE=n.stride(0), ROWS=rows, BLOCK=block,
    )  # fmt: skip
    return h, n, r


def norm_bwd(dn, h, w, r, dh, past=None, n=None):
    """Return dw. Write the gradient of h, plus the residual gradient `past`, into dh, and the recomputed norm into n."""
    (heads, H), num_rows = _heads(h), len(r)
    rows, block = _norm_tile(H)
    rows_each = -(-max(-(-num_rows // NORM_PROGRAMS), 1) // rows) * rows
    programs = -(-num_rows // rows_each)
    dw = torch.empty(programs, H, dtype=torch.float32, device=h.device)
    norm_bwd_kernel(
        programs, dn, dh if past is None else past, h, w, r, dh, dh if n is None else n, dw, num_rows, rows_each,
        num_warps=_warps(rows * block), PAST=past is not None, AGAIN=n is not None, HEADS=heads, H=H,
        DN_STRIDE=dn.stride(0), H_STRIDE=h.stride(0), ROWS=rows, BLOCK=block,
    )  # fmt: skip
    return dw.sum(0)


def _heads(x) -> tuple[int, int]:
    return (x.shape[1], x.shape[2]) if x.ndim == 3 else (1, x.shape[1])


def _norm_tile(H: int) -> tuple[int, int]:
    block = _power_of_2(H)
    return max(1, NORM_TILE // block), block


def _power_of_2(number: int) -> int:
    """Return the next power of 2. Triton's own function takes as long as a launch."""
    return 1 << (number - 1).bit_length()


def _warps(numbers: int) -> int:
    return min(max(numbers // 512, 4), 16)


# ---- rotation: y₁ = x₁·cos₁ − x₂·sin₁, y₂ = x₂·cos₂ + x₁·sin₂, of the halves of a head ----


@aligned
def rotate_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    BACKWARD: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, Q_OUT_STRIDE: tl.constexpr, K_OUT_STRIDE: tl.constexpr,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate the heads of q and k; one program per token."""
    token, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    half: tl.constexpr = D // 2
    here = d < half
    cos_ptr, sin_ptr = cos_ptr + token * D + d, sin_ptr + token * D + d
    cos_1, cos_2 = tl.load(cos_ptr, mask=here), tl.load(cos_ptr + half, mask=here)
    sin_1, sin_2 = tl.load(sin_ptr, mask=here), tl.load(sin_ptr + half, mask=here)
    angles = (cos_1.to(tl.float32), cos_2.to(tl.float32), sin_1.to(tl.float32), sin_2.to(tl.float32))
    if BACKWARD:  # dx₁ = dy₁·cos₁ + dy₂·sin₂, dx₂ = dy₂·cos₂ − dy₁·sin₁
        angles = (angles[0], angles[1], -angles[3], -angles[2])
    _rotate(q_ptr + token * Q_STRIDE, q_out_ptr + token * Q_OUT_STRIDE, angles, d, Q, D, Q_BLOCK)
    _rotate(k_ptr + token * K_STRIDE, k_out_ptr + token * K_OUT_STRIDE, angles, d, K, D, K_BLOCK)


@triton.jit
def _rotate(x_ptr, y_ptr, angles, d, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    head = tl.arange(0, BLOCK)
    at = head[:, None] * D + d[None, :]
    here = (head[:, None] < HEADS) & (d[None, :] < D // 2)
    cos_1, cos_2, sin_1, sin_2 = angles
    x_1 = tl.load(x_ptr + at, mask=here).to(tl.float32)
    x_2 = tl.load(x_ptr + at + D // 2, mask=here).to(tl.float32)
    y_1 = x_1 * cos_1[None, :] - x_2 * sin_1[None, :]
    y_2 = x_2 * cos_2[None, :] + x_1 * sin_2[None, :]
    tl.store(y_ptr + at, y_1.to(y_ptr.dtype.element_ty), mask=here)
    tl.store(y_ptr + at + D // 2, y_2.to(y_ptr.dtype.element_ty), mask=here)


def rotate(q, k, cos, sin, into, backward=False):
    """Rotate q [N, Q, D] and k [N, K, D] by the angles of cos and sin [.., N, D]; write them to `into`, which may be q and k."""
    (N, Q, D), K = q.shape, k.shape[1]
    rotate_kernel(
        N, q, k, cos, sin, *into, num_warps=4, BACKWARD=backward, Q=Q, K=K, D=D,
        Q_STRIDE=q.stride(0), K_STRIDE=k.stride(0),
        Q_OUT_STRIDE=into[0].stride(0), K_OUT_STRIDE=into[1].stride(0),
        Q_BLOCK=_power_of_2(Q), K_BLOCK=_power_of_2(K), BLOCK=_power_of_2(D // 2),
    )  # fmt: skip


# ---- gate: a = g·σ(g)·u, of rows [g, u] ----


@aligned
def gate_kernel(gu_ptr, a_ptr, F: tl.constexpr, BLOCK: tl.constexpr):
    """Write a = g·σ(g)·u; one program per block of a token's row."""
    row, at, here = _gate_block(F, BLOCK)
    g = tl.load(gu_ptr + row * 2 * F + at, mask=here).to(tl.float32)
    u = tl.load(gu_ptr + row * 2 * F + F + at, mask=here).to(tl.float32)
    a = g * tl.sigmoid(g) * u
    tl.store(a_ptr + row * F + at, a.to(a_ptr.dtype.element_ty), mask=here)


@aligned
def gate_bwd_kernel(a_ptr, gu_ptr, d_gu_ptr, F: tl.constexpr, BLOCK: tl.constexpr):
    """Write the gradient of [g, u]; `a_ptr` holds da and is overwritten by the recomputed a."""
    row, at, here = _gate_block(F, BLOCK)
    da = tl.load(a_ptr + row * F + at, mask=here).to(tl.float32)
    g = tl.load(gu_ptr + row * 2 * F + at, mask=here).to(tl.float32)
    u = tl.load(gu_ptr + row * 2 * F + F + at, mask=here).to(tl.float32)

    s = tl.sigmoid(g)
    a = g * s * u
    du = da * g * s
    dg = da * u * s * (1 + g * (1 - s))  # d(g·σ)/dg = σ + g·σ·(1 − σ)

    tl.store(a_ptr + row * F + at, a.to(a_ptr.dtype.element_ty), mask=here)
    dtype = d_gu_ptr.dtype.element_ty
    tl.store(d_gu_ptr + row * 2 * F + at, dg.to(dtype), mask=here)
    tl.store(d_gu_ptr + row * 2 * F + F + at, du.to(dtype), mask=here)


@triton.jit
def _gate_block(F: tl.constexpr, BLOCK: tl.constexpr):
    blocks: tl.constexpr = (F + BLOCK - 1) // BLOCK
    program = tl.program_id(0).to(tl.int64)
    at = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    return program // blocks, at, at < F


def gate(gu_N2F):
    N, F = gu_N2F.shape[0], gu_N2F.shape[1] // 2
    a_NF = torch.empty(N, F, dtype=gu_N2F.dtype, device=gu_N2F.device)
    gate_kernel(N * -(-F // GATE_BLOCK), gu_N2F, a_NF, num_warps=4, F=F, BLOCK=GATE_BLOCK)
    return a_NF


def gate_bwd(da_NF, gu_N2F):
    """Return (d_gu, a). The recomputed a overwrites da."""
    N, F = da_NF.shape
    d_gu_N2F = torch.empty_like(gu_N2F)
    gate_bwd_kernel(N * -(-F // GATE_BLOCK), da_NF, gu_N2F, d_gu_N2F, num_warps=4, F=F, BLOCK=GATE_BLOCK)
    return d_gu_N2F, da_NF
