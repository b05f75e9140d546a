"""The Triton kernel for a row of a student and one of a teacher: their divergence, and the gradient of the student's logits.

One program handles one row in three passes: the normalisers of both distributions, the sums, and the gradient. Formulas
are in `strop.losses.divergence`. Everything is float32 inside, offsets of rows are 64-bit.
"""

import triton
import triton.language as tl

from strop.ops.rows.kernels import LOG2E, LOWEST, merge
from strop.ops.rows.launch import aligned


@triton.jit
def _log_add(a, b):
    """Return log(exp a + exp b); finite if both are −inf, so that differences are not NaN."""
    a, b = tl.maximum(a, LOWEST), tl.maximum(b, LOWEST)
    e = tl.exp(-tl.abs(a - b))
    u = 1 + e
    # log(1 + e) to the last bits: the quotient corrects the rounding of u
    return tl.maximum(a, b) + tl.where(u == 1, e, tl.log(u) * (e / (u - 1)))


@triton.jit
def _log_probs(x_ptr, tile, V: tl.constexpr, cooled, most, log_sum):
    """Return log-probs. The maximum is subtracted first, which keeps more bits than subtracting the log-sum-exp at once."""
    return tl.load(x_ptr + tile, mask=tile < V, other=-float("inf")).to(tl.float32) * cooled - most - log_sum


@aligned
def divergence_kernel(
    x_ptr, y_ptr, weight_ptr, found_ptr, cooled: tl.float32, beta: tl.float32, log_beta: tl.float32, log_rest: tl.float32,
    V: tl.constexpr, FORWARD: tl.constexpr, REVERSE: tl.constexpr, GRADIENT: tl.constexpr, LANES: tl.constexpr,
    PER: tl.constexpr,
):  # fmt: skip
    """Write the divergence of a row; overwrite x with its gradient times the row's weight.

    x are the student's logits, y the teacher's; cooled = 1/temperature, log_rest = log(1 − beta). A tile is LANES · PER
    numbers.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * V
    y_ptr += row * V
    lanes = tl.arange(0, LANES)[:, None] * PER + tl.arange(0, PER)[None, :]

    x_top = tl.full([LANES], LOWEST, tl.float32)
    y_top = tl.full([LANES], LOWEST, tl.float32)
    x_sum = tl.zeros([LANES], tl.float32)
    y_sum = tl.zeros([LANES], tl.float32)
    scale = cooled * LOG2E
    for start in range(0, V, LANES * PER):
        tile = start + lanes
        x = tl.load(x_ptr + tile, mask=tile < V, other=-float("inf")).to(tl.float32)
        y = tl.load(y_ptr + tile, mask=tile < V, other=-float("inf")).to(tl.float32)
        x_top, x_sum, _ = merge(x, x_top, x_sum, x_sum, scale, False)
        y_top, y_sum, _ = merge(y, y_top, y_sum, y_sum, scale, False)
    x_most, y_most = tl.max(x_top, 0), tl.max(y_top, 0)
    x_log = tl.log(tl.sum(x_sum * tl.exp2((x_top - x_most) * scale), 0))
    y_log = tl.log(tl.sum(y_sum * tl.exp2((y_top - y_most) * scale), 0))
    x_most, y_most = x_most * cooled, y_most * cooled

    of_student = tl.zeros([LANES, PER], tl.float32)  # Σ p·g
    of_teacher = tl.zeros([LANES, PER], tl.float32)  # Σ q·(log q − log m), or of the forward KL − log p
    for start in range(0, V, LANES * PER):
        log_p = _log_probs(x_ptr, start + lanes, V, cooled, x_most, x_log)
        log_q = _log_probs(y_ptr, start + lanes, V, cooled, y_most, y_log)
        p, q = tl.exp(log_p), tl.exp(log_q)
        if FORWARD:
            of_teacher += tl.where(q == 0, 0.0, q * (log_q - log_p))
        elif REVERSE:
            of_student += tl.where(p == 0, 0.0, p * (log_p - log_q))
        else:
            log_m = _log_add(log_p + log_rest, log_q + log_beta)
            of_student += tl.where(p == 0, 0.0, p * (1 - beta) * (log_p - log_m))
            of_teacher += tl.where(q == 0, 0.0, q * beta * (log_q - log_m))
    student_sum = tl.sum(of_student)
    tl.store(found_ptr + row, student_sum + tl.sum(of_teacher))

    if GRADIENT:
        factor = tl.load(weight_ptr + row) * cooled
        for start in range(0, V, LANES * PER):
            tile = start + lanes
            log_p = _log_probs(x_ptr, tile, V, cooled, x_most, x_log)
            log_q = _log_probs(y_ptr, tile, V, cooled, y_most, y_log)
            p = tl.exp(log_p)
            if FORWARD:
                dx = p - tl.exp(log_q)
            else:
                g = log_p - log_q
                if not REVERSE:
                    g = (1 - beta) * (log_p - _log_add(log_p + log_rest, log_q + log_beta))
                dx = tl.where(p == 0, 0.0, p * (g - student_sum))
            tl.store(x_ptr + tile, (factor * dx).to(x_ptr.dtype.element_ty), mask=tile < V)
