"""Row functions on a GPU, which launch Triton kernels: those of `strop.ops.rows.torch_rows` and a few more.

Shapes: `[.., V]` logits with any leading dimensions; N their number of rows.
"""

import math
from typing import NamedTuple

import torch

from strop.losses.rules import NLL, TokenRule
from strop.ops.rows import (
    PolicyTerms,
    TokenValues,
    check_in_place,
    divergence_kernel,
    empty_gradient,
    kernels,
    small_kernels,
    strided_rows,
)
from strop.ops.rows.kernels import LOG2E

INTERPRETED = kernels.logp_kernel.interpreted


def bytes_per_logit(dtype: torch.dtype, entropy: bool = False, kept: bool = False) -> int:
    """Return the bytes of working memory per logit: only the logit itself."""
    return dtype.itemsize


_WIDE_RANGE = (torch.bfloat16,)  # dtypes that can hold exponentials before the maximum is known
_PER_LANE = 8  # 16-bit numbers per load
_SCALE_BLOCK = 8192
_SCALE_PROGRAMS = 1024  # enough to fill a GPU, few enough to be cheap when the factor is 1


class RowLayout(NamedTuple):
    """The memory layout of a tensor's rows: [B, T] rows with two strides, each of V contiguous elements."""

    N: int
    T: int
    V: int
    stride_B: int
    stride_T: int
    misaligned: int  # offset of the first element from a 16-byte boundary, in elements
    per: int  # elements per 16 bytes


def as_rows(logits: torch.Tensor) -> tuple[torch.Tensor, RowLayout]:
    """Return the logits and their layout. They are copied only if two strides cannot describe their rows."""
    found = _rows(logits)
    if found is None:
        logits = logits.contiguous()
        found = _rows(logits)
        assert found is not None
    return logits, found


def _rows(logits: torch.Tensor) -> RowLayout | None:
    V, size = logits.shape[-1], logits.element_size()
    misaligned, per = logits.data_ptr() % 16 // size, 16 // size
    if logits.is_contiguous():
        N = logits.numel() // V
        return RowLayout(N, max(N, 1), V, 0, V, misaligned, per)
    found = strided_rows(logits)
    if found is None:
        return None
    (B, stride_B), (T, stride_T) = found
    return RowLayout(B * T, max(T, 1), V, stride_B, stride_T, misaligned, per)


class Tiling(NamedTuple):
    """A kernel's block choice for a row; the numbers were the fastest on an H200.

    unroll   16-byte loads per thread and tile
    stages   pipeline stages: tiles in flight; more than one go through shared memory
    """

    warps: int
    unroll: int
    stages: int = 1

    def of(self, rows: RowLayout) -> dict[str, int]:
        lanes = 32 * self.warps * self.unroll
        return {"LANES": lanes, "PER": rows.per, "STAGES": self.stages, "num_warps": self.warps}


def _one_visit(V: int) -> Tiling:
    """Return the tiling for one pass: few warps, so that many rows are in flight, and prefetching for long rows."""
    if V >= 16384:
        return Tiling(4, 8, stages=3)
    return Tiling(4, 1) if V >= 1024 else Tiling(2, 1)


def _second_visit(V: int) -> Tiling:
    """Return the tiling for a pass that also writes."""
    return Tiling(4, 2, stages=3) if V >= 4096 else _one_visit(V)


def _two_visits(V: int) -> Tiling:
    """Return the tiling for two passes: more warps, so fewer rows are in flight and the second pass hits the cache."""
    if V >= 100_000:
        return Tiling(32, 1)
    if V >= 40_000:
        return Tiling(16, 2)
    return Tiling(8, 4) if V >= 16384 else Tiling(8 if V >= 4096 else 4, 1)


def _policy_tiling(V: int, gradient: bool, factored: bool) -> Tiling:
    if factored:
        return _in_and_out(V)
    return _two_visits(V) if gradient else _one_visit(V)


def _in_and_out(V: int) -> Tiling:
    """Return the tiling for one pass that overwrites its input; pipelining does not help there."""
    return Tiling(16, 1) if V >= 16384 else _one_visit(V)


def put_multiplied(
    values_nH: torch.Tensor, factors_n: torch.Tensor, out_NH: torch.Tensor, places_n: torch.Tensor | None
) -> None:
    """Multiply each row by its factor and write it to row `places_n` of `out_NH`; None: rows in order."""
    n, H = values_nH.shape
    assert out_NH.is_contiguous()
    if n:
        small_kernels.put_kernel(
            n, values_nH.contiguous(), factors_n, _or(places_n, factors_n), out_NH, H=H,
            PLACED=places_n is not None, BLOCK=min(1024, _power_of_2(H)),
        )  # fmt: skip


def logps(
    logits: torch.Tensor,
    ids_N: torch.Tensor,
    mask_N: torch.Tensor | None,
    temperature: float,
    entropy: bool,
    into: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None,
    block: tuple[int, int, int] | None = None,
    in_place: bool = False,
    way_back: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return log-probs [N], statistics [2, N] for the backward, entropies [N] or None.

    block      (first id, vocabulary, number of this block) if the logits are one of several blocks of the vocabulary;
               `into` has the results of earlier blocks
    in_place   has no effect here
    way_back   also return the statistics for a backward
    """
    logits, rows = as_rows(logits)
    first_id, vocabulary, number = block or (0, rows.V, 0)
    if into is None:
        device = logits.device
        logps_N = torch.empty(rows.N, device=device)
        stats_2N = torch.empty(2, rows.N, device=device) if way_back else None
        entropies_N = torch.empty(rows.N, device=device) if entropy else None
    else:
        logps_N, stats_2N, entropies_N = into
    top_N, sum_N = (logps_N, logps_N) if stats_2N is None else stats_2N.unbind()
    if rows.N:
        kernels.logp_kernel(
            rows.N,
            logits, ids_N.contiguous(), _or(mask_N, ids_N).contiguous(), logps_N, top_N, sum_N,
            _or(entropies_N, logps_N), rows.T, rows.V, first_id, vocabulary, rows.stride_B, rows.stride_T,
            rows.misaligned, _scale(temperature),
            MASKED=mask_N is not None, STATS=stats_2N is not None, ENTROPY=entropy, FIRST=number == 0,
            LAST=first_id + rows.V == vocabulary,
            **_one_visit(rows.V).of(rows),
        )  # fmt: skip
    return logps_N, stats_2N, entropies_N


def logps_bwd(
    logits: torch.Tensor,
    ids_N: torch.Tensor,
    mask_N: torch.Tensor | None,
    stats_2N: torch.Tensor,
    entropies_N: torch.Tensor,
    d_logps_N: torch.Tensor,
    d_entropies_N: torch.Tensor | None,
    temperature: float,
    in_place: bool,
    block: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Return the gradient of the logits; in_place writes it over them. block: (first id, vocabulary)."""
    given = logits
    logits, rows = as_rows(logits)
    out = _gradient_memory(given, logits, rows, in_place)
    first_id, vocabulary = block or (0, rows.V)
    if rows.N:
        kernels.logp_bwd_kernel(
            rows.N,
            logits, out, ids_N.contiguous(), _or(mask_N, ids_N).contiguous(), stats_2N[0], stats_2N[1],
            entropies_N, d_logps_N, _or(d_entropies_N, d_logps_N),
            rows.T, rows.V, first_id, vocabulary, rows.stride_B, rows.stride_T, rows.misaligned, _scale(temperature),
            MASKED=mask_N is not None, ENTROPY=d_entropies_N is not None,
            **_second_visit(rows.V).of(rows),
        )  # fmt: skip
    return out


def batch_coefficients(
    rewards_B: torch.Tensor,
    mask_BT: torch.Tensor,
    group_size: int,
    count_on_device: torch.Tensor | None,
    count: float,
    tokens: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages [B] and the weight of each sequence's tokens [B].

    weight = 1/(count·tokens); tokens=None uses the sequence's own length
    """
    B, T = mask_BT.shape
    device = mask_BT.device
    advantages_B, weights_B = torch.empty(B, device=device), torch.empty(B, device=device)
    if B:
        small_kernels.batch_kernel(
            B,
            rewards_B.contiguous(), mask_BT.contiguous(), _or(count_on_device, weights_B),
            advantages_B, weights_B, T, group_size, count, float(tokens or 0),
            COUNT_ON_DEVICE=count_on_device is not None, BY_LENGTH=tokens is None,
            BLOCK_G=_power_of_2(group_size), BLOCK_T=min(1024, _power_of_2(T)), num_warps=1,
        )  # fmt: skip
    return advantages_B, weights_B


def policy_terms(
    logits: torch.Tensor,
    tokens: TokenValues,
    temperature: float,
    rule: TokenRule,
    gradient: bool,
    in_place: bool,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
    factored: bool = False,
) -> PolicyTerms:
    """Return the terms of a policy loss and the gradient of the logits.

    tokens     its advantages and weights may be [B], one per N/B rows
    into       memory for the log-probs [N] and the terms [3, N]
    factored   the gradient may be returned without its row factors, which `factors_N` then has; saves a pass
    """
    ids_N, mask_N, old_logps_N, ref_logps_N, advantages, weights = tokens
    assert not factored or (gradient and in_place and mask_N is None), "exponentials are written over every row"
    given, device = logits, logits.device
    bounds = rule.bounds
    logits, rows = as_rows(logits)
    logps_N, terms_3N = into or (torch.empty(rows.N, device=device), torch.empty(3, rows.N, device=device))
    out = None
    if gradient:
        out = _gradient_memory(given, logits, rows, in_place)
    if rows.N == 0:
        return PolicyTerms(logps_N, terms_3N, out)
    factored = factored and logits.dtype in _WIDE_RANGE
    factors_N = torch.empty(rows.N, device=device) if factored else None
    kernels.policy_loss_kernel(
        rows.N,
        logits, _or(out, logits), ids_N.contiguous(), _or(mask_N, ids_N).contiguous(),
        _or(old_logps_N, weights).contiguous(), _or(ref_logps_N, weights).contiguous(), advantages.contiguous(),
        weights.contiguous(), logps_N, terms_3N, _or(factors_N, logps_N),
        terms_3N.stride(0), rows.N // advantages.shape[0], rows.V, rows.T, rows.stride_B, rows.stride_T, rows.misaligned,
        _scale(temperature), bounds.low, bounds.high, bounds.delta, rule.beta,
        TOKEN_LOSS=_kernel_of(rule),
        MASKED=mask_N is not None, ON_POLICY=old_logps_N is None,
        KL=0 if ref_logps_N is None else int(rule.kl_estimator[1]), GRADIENT=gradient,
        FACTORED=factored, **_policy_tiling(rows.V, gradient, factored).of(rows),
    )  # fmt: skip
    return PolicyTerms(logps_N, terms_3N, out, factors_N)


def _kernel_of(rule: TokenRule) -> object:
    """Return the Triton function that has the rule's formula and its derivative."""
    if isinstance(rule, NLL):
        return kernels.negative_logp
    assert rule.type.kernel is not None
    return getattr(kernels, rule.type.kernel)


def divergence_bytes(dtype: torch.dtype, teacher_dtype: torch.dtype) -> int:
    """Return the bytes of working memory per pair of student and teacher logits."""
    return dtype.itemsize + teacher_dtype.itemsize


def divergence(
    logits_NV: torch.Tensor, teacher_NV: torch.Tensor, weights_N: torch.Tensor, beta: float, temperature: float,
    gradient: bool,
) -> torch.Tensor:  # fmt: skip
    """Return `strop.losses.divergence` [N]. With `gradient`, overwrite the logits with weight·gradient."""
    assert logits_NV.is_contiguous()
    assert teacher_NV.is_contiguous()
    N, V = logits_NV.shape
    found_N = torch.empty(N, device=logits_NV.device)
    log_beta, log_rest = (math.log(share) if share else -math.inf for share in (beta, 1 - beta))
    if N:
        divergence_kernel.divergence_kernel(
            N, logits_NV, teacher_NV, weights_N.contiguous(), found_N, 1 / temperature, beta, log_beta, log_rest,
            num_warps=16, V=V, FORWARD=beta == 0, REVERSE=beta == 1, GRADIENT=gradient,
            LANES=min(512, _power_of_2(-(-V // _PER_LANE))), PER=_PER_LANE,
        )  # fmt: skip
    return found_N


def sums(terms_3N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss, and its policy and KL parts in one tensor [2]."""
    assert terms_3N.is_contiguous()
    total, policy_and_kl = terms_3N.new_empty(()), terms_3N.new_empty(2)
    small_kernels.sums_kernel(3, terms_3N, total, policy_and_kl, terms_3N.shape[1], BLOCK=4096, num_warps=8)
    return total, policy_and_kl


def scale_(gradient: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply the gradient in place by a factor on the device. If the factor is 1, the gradient is not read."""
    size = gradient.numel()
    if size and not gradient.is_contiguous():
        gradient, rows = as_rows(gradient)
        block = min(_SCALE_BLOCK, _power_of_2(rows.V))
        small_kernels.scale_rows_kernel(
            rows.N, gradient, factor, rows.V, rows.T, rows.stride_B, rows.stride_T, BLOCK=block, num_warps=8
        )
    elif size:
        programs = min(-(-size // _SCALE_BLOCK), _SCALE_PROGRAMS)
        small_kernels.scale_kernel(programs, gradient, factor, size, BLOCK=_SCALE_BLOCK, num_warps=8)


def _gradient_memory(given: torch.Tensor, logits: torch.Tensor, rows: RowLayout, in_place: bool) -> torch.Tensor:
    """Return the logits' own memory if in_place, else new memory; `given` are the logits before `as_rows`."""
    if not in_place:
        return empty_gradient(logits, rows.misaligned)
    check_in_place(given)
    return logits


def _power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def _scale(temperature: float) -> float:
    return LOG2E.value / temperature


def _or(tensor: torch.Tensor | None, otherwise: torch.Tensor) -> torch.Tensor:
    return otherwise if tensor is None else tensor
