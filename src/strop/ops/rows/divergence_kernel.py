"""The Triton kernel of a student's row and a teacher's: their divergence, and its gradient by the student's logits.

One program is one row, which is visited three times: for the normalisers of both distributions, for the sums, for the
gradient. Formulas are in `strop.losses.divergence`. Everything is float32 inside, offsets of rows are 64-bit.
"""

import triton
import triton.language as tl

from strop.ops.rows.kernels import LOWEST
from strop.ops.rows.launch import Launcher


@triton.jit
def _log_add(a, b):
    """log(exp a + exp b); finite where both are −inf, so that no difference of it is NaN."""
    a, b = tl.maximum(a, LOWEST), tl.maximum(b, LOWEST)
    e = tl.exp(-tl.abs(a - b))
    u = 1 + e
    # log(1 + e) right to the last bits: what rounding took off u is put back by the quotient
    return tl.maximum(a, b) + tl.where(u == 1, e, tl.log(u) * (e / (u - 1)))


@Launcher
def divergence_kernel(
    x_ptr, y_ptr, weight_ptr, found_ptr,
    V: tl.int32, cooled: tl.float32, beta: tl.float32, log_beta: tl.float32, log_rest: tl.float32,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x the student's logits, y the teacher's; cooled = 1/temperature, log_rest = log(1 − beta).

    The gradient, times the row's weight, is left in x's place.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * V
    y_ptr += row * V
    lane = tl.arange(0, BLOCK)

    x_top = tl.full([BLOCK], LOWEST, tl.float32)
    y_top = tl.full([BLOCK], LOWEST, tl.float32)
    x_sum = tl.zeros([BLOCK], tl.float32)
    y_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        inside = start + lane < V
        x = tl.load(x_ptr + start + lane, mask=inside, other=-float("inf")).to(tl.float32) * cooled
        y = tl.load(y_ptr + start + lane, mask=inside, other=-float("inf")).to(tl.float32) * cooled
        x_new, y_new = tl.maximum(x_top, x), tl.maximum(y_top, y)
        x_sum = x_sum * tl.exp(x_top - x_new) + tl.exp(x - x_new)
        y_sum = y_sum * tl.exp(y_top - y_new) + tl.exp(y - y_new)
        x_top, y_top = x_new, y_new
    x_most, y_most = tl.max(x_top, 0), tl.max(y_top, 0)
    x_log = tl.log(tl.sum(x_sum * tl.exp(x_top - x_most), 0))
    y_log = tl.log(tl.sum(y_sum * tl.exp(y_top - y_most), 0))

    of_student = tl.zeros([BLOCK], tl.float32)  # Σ p·g
    of_teacher = tl.zeros([BLOCK], tl.float32)  # Σ q·(log q − log m), or of the forward KL − log p
    for start in range(0, V, BLOCK):
        inside = start + lane < V
        log_p = tl.load(x_ptr + start + lane, mask=inside, other=-float("inf")).to(tl.float32) * cooled - x_most - x_log
        log_q = tl.load(y_ptr + start + lane, mask=inside, other=-float("inf")).to(tl.float32) * cooled - y_most - y_log
        p, q = tl.exp(log_p), tl.exp(log_q)
        if FORWARD:
            of_teacher += tl.where(q == 0, 0.0, q * (log_q - log_p))
        elif REVERSE:
            of_student += tl.where(p == 0, 0.0, p * (log_p - log_q))
        else:
            log_m = _log_add(log_p + log_rest, log_q + log_beta)
            of_student += tl.where(p == 0, 0.0, p * (1 - beta) * (log_p - log_m))
            of_teacher += tl.where(q == 0, 0.0, q * beta * (log_q - log_m))
    student_sum = tl.sum(of_student, 0)
    tl.store(found_ptr + row, student_sum + tl.sum(of_teacher, 0))

    if GRADIENT:
        factor = tl.load(weight_ptr + row) * cooled
        for start in range(0, V, BLOCK):
            inside = start + lane < V
            log_p = (
                tl.load(x_ptr + start + lane, mask=inside, other=-float("inf")).to(tl.float32) * cooled - x_most - x_log
            )
            log_q = (
                tl.load(y_ptr + start + lane, mask=inside, other=-float("inf")).to(tl.float32) * cooled - y_most - y_log
            )
            p = tl.exp(log_p)
            if FORWARD:
                dx = p - tl.exp(log_q)
            else:
                g = log_p - log_q
                if not REVERSE:
                    g = (1 - beta) * (log_p - _log_add(log_p + log_rest, log_q + log_beta))
                dx = tl.where(p == 0, 0.0, p * (g - student_sum))
            tl.store(x_ptr + start + lane, (factor * dx).to(x_ptr.dtype.element_ty), mask=inside)
