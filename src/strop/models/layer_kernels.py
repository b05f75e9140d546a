"""Norm, rotation and gate of a decoder layer, each one Triton kernel forward and one backward.

Everything is float32 inside and is rounded once, where it is stored. Offsets are 64-bit. Sizes are constants of a kernel,
numbers of tokens are not: a model has its kernels compiled once, whatever the lengths.

Shapes: N tokens, H the width of a row, F that of the gate; Q query heads and K key heads of D numbers.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from strop.ops.autograd import first_order
from strop.ops.rows.launch import Launcher

NORM_PROGRAMS = 528  # of the backward: four for each of an H200's multiprocessors, each with its sum for the weight
TILE = 2048  # numbers that one program of a norm holds, at least a row
GATE_BLOCK = 2048


# ---- h = x + a, r = (mean h² + eps)^-½, n = w·h·r ----


@Launcher
def norm_kernel(
    x_ptr, a_ptr, w_ptr, h_ptr, n_ptr, r_ptr, N: tl.int32, eps: tl.float32,
    ADD: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, i, at, here = _tile(tl.program_id(0).to(tl.int64) * ROWS, N, H, ROWS, BLOCK)
    h = tl.load(tl.multiple_of(x_ptr, 16) + at, mask=here, other=0.0).to(tl.float32)
    if ADD:
        h += tl.load(tl.multiple_of(a_ptr, 16) + at, mask=here, other=0.0).to(tl.float32)
        h = h.to(h_ptr.dtype.element_ty)
        tl.store(tl.multiple_of(h_ptr, 16) + at, h, mask=here)
        h = h.to(tl.float32)
    w = tl.load(tl.multiple_of(w_ptr, 16) + i, mask=i < H, other=0.0).to(tl.float32)

    r = tl.rsqrt(tl.sum(h * h, 1) / H + eps)
    n = w[None, :] * h * r[:, None]

    tl.store(r_ptr + row, r, mask=row < N)
    tl.store(tl.multiple_of(n_ptr, 16) + at, n.to(n_ptr.dtype.element_ty), mask=here)


@Launcher
def norm_bwd_kernel(
    dn_ptr, dh_ptr, h_ptr, w_ptr, r_ptr, dx_ptr, dw_ptr, N: tl.int32, rows_each: tl.int32,
    WEIGHT: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of `rows_each` rows: their gradient, and their sum of the weight's."""
    program = tl.program_id(0).to(tl.int64)
    first = program * rows_each
    end = tl.minimum(first + rows_each, N)
    i = tl.arange(0, BLOCK)
    w = tl.load(tl.multiple_of(w_ptr, 16) + i, mask=i < H, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)
    for start in range(first, end, ROWS):
        row, i, at, here = _tile(start, end, H, ROWS, BLOCK)
        dn = tl.load(tl.multiple_of(dn_ptr, 16) + at, mask=here, other=0.0).to(tl.float32)
        dh = tl.load(tl.multiple_of(dh_ptr, 16) + at, mask=here, other=0.0).to(tl.float32)
        h = tl.load(tl.multiple_of(h_ptr, 16) + at, mask=here, other=0.0).to(tl.float32)
        r = tl.load(r_ptr + row, mask=row < end, other=0.0)

        hr = h * r[:, None]
        if WEIGHT:
            dw += tl.sum(dn * hr, 0)  # dL/dw = Σ dn·h·r
        d_hr = dn * w[None, :]
        via_r = tl.sum(d_hr * hr, 1) / H
        dx = r[:, None] * (d_hr - hr * via_r[:, None]) + dh  # direct path − path through r, + what came past the norm

        tl.store(tl.multiple_of(dx_ptr, 16) + at, dx.to(dx_ptr.dtype.element_ty), mask=here)
    if WEIGHT:
        tl.store(dw_ptr + program * H + i, dw, mask=i < H)


@triton.jit
def _tile(start, end, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows, columns, where they are, and which are there."""
    row, i = start + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    return row, i, row[:, None] * H + i[None, :], (row[:, None] < end) & (i[None, :] < H)


class AddNorm(torch.autograd.Function):
    """(h, n) of x and a, or of x alone: then h is x, whose gradient past the norm comes back through here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, a: torch.Tensor | None, w: torch.Tensor, eps: float, dtype: torch.dtype):
        x, H = whole(x), x.shape[-1]
        N, rows, block = x.numel() // H, *_norm_tile(H)
        h = x if a is None else torch.empty_like(x, dtype=torch.promote_types(x.dtype, a.dtype))
        n, r = torch.empty_like(x, dtype=dtype), x.new_empty(N, dtype=torch.float32)
        norm_kernel(
            -(-N // rows), x, x if a is None else whole(a), w, h, n, r, N, eps,
            num_warps=_warps(rows * block), ADD=a is not None, H=H, ROWS=rows, BLOCK=block,
        )  # fmt: skip
        ctx.save_for_backward(h, w, r)
        ctx.adds = a is not None
        return h, n

    @staticmethod
    @first_order
    def backward(ctx: Any, dh: torch.Tensor, dn: torch.Tensor):
        h, w, r = ctx.saved_tensors
        N, H, (rows, block) = len(r), h.shape[-1], _norm_tile(h.shape[-1])
        rows_each = -(-max(-(-N // NORM_PROGRAMS), 1) // rows) * rows
        programs = -(-N // rows_each)
        dx = torch.empty_like(h)
        dw = r.new_empty(programs if ctx.needs_input_grad[2] else 0, H)
        norm_bwd_kernel(
            programs, whole(dn), whole(dh), h, w, r, dx, dw, N, rows_each,
            num_warps=_warps(rows * block), WEIGHT=ctx.needs_input_grad[2], H=H, ROWS=rows, BLOCK=block,
        )  # fmt: skip
        return dx, dx if ctx.adds else None, dw.sum(0) if ctx.needs_input_grad[2] else None, None, None


def _norm_tile(H: int) -> tuple[int, int]:
    block = triton.next_power_of_2(H)
    return max(1, TILE // block), block


def _warps(numbers: int) -> int:
    return min(max(numbers // 512, 4), 16)


# ---- rotation: y₁ = x₁·cos₁ − x₂·sin₁, y₂ = x₂·cos₂ + x₁·sin₂, of the halves of a head ----


@Launcher
def rotate_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    BACKWARD: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a token."""
    token, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    half: tl.constexpr = D // 2
    here = d < half
    cos_ptr, sin_ptr = tl.multiple_of(cos_ptr, 16) + token * D + d, tl.multiple_of(sin_ptr, 16) + token * D + d
    cos_1, cos_2 = tl.load(cos_ptr, mask=here), tl.load(cos_ptr + half, mask=here)
    sin_1, sin_2 = tl.load(sin_ptr, mask=here), tl.load(sin_ptr + half, mask=here)
    if BACKWARD:  # dx₁ = dy₁·cos₁ + dy₂·sin₂, dx₂ = dy₂·cos₂ − dy₁·sin₁
        sin_1, sin_2 = -sin_2, -sin_1
    _rotate(q_ptr, q_out_ptr, token, cos_1, cos_2, sin_1, sin_2, d, Q, D, Q_BLOCK)
    _rotate(k_ptr, k_out_ptr, token, cos_1, cos_2, sin_1, sin_2, d, K, D, K_BLOCK)


@triton.jit
def _rotate(
    x_ptr, y_ptr, token, cos_1, cos_2, sin_1, sin_2, d, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    head = tl.arange(0, BLOCK)
    at = token * HEADS * D + head[:, None] * D + d[None, :]
    here = (head[:, None] < HEADS) & (d[None, :] < D // 2)
    x_1 = tl.load(tl.multiple_of(x_ptr, 16) + at, mask=here).to(tl.float32)
    x_2 = tl.load(tl.multiple_of(x_ptr, 16) + at + D // 2, mask=here).to(tl.float32)
    y_1 = x_1 * cos_1[None, :].to(tl.float32) - x_2 * sin_1[None, :].to(tl.float32)
    y_2 = x_2 * cos_2[None, :].to(tl.float32) + x_1 * sin_2[None, :].to(tl.float32)
    tl.store(tl.multiple_of(y_ptr, 16) + at, y_1.to(y_ptr.dtype.element_ty), mask=here)
    tl.store(tl.multiple_of(y_ptr, 16) + at + D // 2, y_2.to(y_ptr.dtype.element_ty), mask=here)


class Rotate(torch.autograd.Function):
    """q [.., Q, D] and k [.., K, D] at the angles of cos and sin [.., D]."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        cos, sin = whole(cos), whole(sin)
        ctx.save_for_backward(cos, sin)
        return _rotated(q, k, cos, sin, backward=False)

    @staticmethod
    @first_order
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor):
        return *_rotated(dq, dk, *ctx.saved_tensors, backward=True), None, None


def _rotated(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = whole(q), whole(k)
    out = torch.empty_like(q), torch.empty_like(k)
    Q, K, D = q.shape[-2], k.shape[-2], q.shape[-1]
    rotate_kernel(
        cos.numel() // D, q, k, cos, sin, *out, num_warps=4, BACKWARD=backward, Q=Q, K=K, D=D,
        Q_BLOCK=triton.next_power_of_2(Q), K_BLOCK=triton.next_power_of_2(K), BLOCK=triton.next_power_of_2(D // 2),
    )  # fmt: skip
    return out


# ---- gate: a = g·σ(g)·u ----


@Launcher
def gate_kernel(g_ptr, u_ptr, a_ptr, size: tl.int64, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(tl.multiple_of(g_ptr, 16) + at, mask=at < size).to(tl.float32)
    u = tl.load(tl.multiple_of(u_ptr, 16) + at, mask=at < size).to(tl.float32)
    a = g * tl.sigmoid(g) * u
    tl.store(tl.multiple_of(a_ptr, 16) + at, a.to(a_ptr.dtype.element_ty), mask=at < size)


@Launcher
def gate_bwd_kernel(da_ptr, g_ptr, u_ptr, dg_ptr, du_ptr, size: tl.int64, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    da = tl.load(tl.multiple_of(da_ptr, 16) + at, mask=at < size).to(tl.float32)
    g = tl.load(tl.multiple_of(g_ptr, 16) + at, mask=at < size).to(tl.float32)
    u = tl.load(tl.multiple_of(u_ptr, 16) + at, mask=at < size).to(tl.float32)
    s = tl.sigmoid(g)
    du = da * g * s
    dg = da * u * s * (1 + g * (1 - s))  # d(g·σ)/dg = σ + g·σ·(1 − σ)
    tl.store(tl.multiple_of(dg_ptr, 16) + at, dg.to(dg_ptr.dtype.element_ty), mask=at < size)
    tl.store(tl.multiple_of(du_ptr, 16) + at, du.to(du_ptr.dtype.element_ty), mask=at < size)


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: torch.Tensor, u: torch.Tensor):
        g, u = whole(g), whole(u)
        ctx.save_for_backward(g, u)
        a = torch.empty_like(g)
        gate_kernel(-(-g.numel() // GATE_BLOCK), g, u, a, g.numel(), num_warps=8, BLOCK=GATE_BLOCK)
        return a

    @staticmethod
    @first_order
    def backward(ctx: Any, da: torch.Tensor):
        g, u = ctx.saved_tensors
        dg, du = torch.empty_like(g), torch.empty_like(u)
        gate_bwd_kernel(
            -(-g.numel() // GATE_BLOCK), whole(da), g, u, dg, du, g.numel(), num_warps=8, BLOCK=GATE_BLOCK
        )
        return dg, du


def whole(x: torch.Tensor) -> torch.Tensor:
    """The tensor as the kernels read it: without gaps, on a boundary of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
