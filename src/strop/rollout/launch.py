"""The kernels of a decode step, launched."""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from strop.models.attention import Pass, Rule
from strop.rollout import kernels
from strop.rollout.slots import CacheShape, Rows

CHUNK = 4096  # logits one program looks at
PROGRAMS = 264  # wanted at least: two for each of an H200's 132 multiprocessors
MAX_SPLITS = 8
KEYS_OF_A_PART = 512  # at least, where a row's keys are split: joining the parts is one more kernel
GATE_BLOCK = 1024  # elements of a row one program multiplies


# ---- between the products of a layer: the kernels of `steps.FusedLayers` ----


def add_norm(x_NH: torch.Tensor, update_NH: torch.Tensor | None, norm: Any, dtype: torch.dtype) -> torch.Tensor:
    """The norm of x + update; the sum is written over x."""
    N, H = x_NH.shape
    y_NH = torch.empty(N, H, dtype=dtype, device=x_NH.device)
    block = triton.next_power_of_2(H)
    kernels.add_norm_kernel[(N,)](
        x_NH, x_NH if update_NH is None else update_NH, norm.weight, y_NH, H, norm.eps, float(norm.offset),
        int(update_NH is not None), OFFSET=norm.offset != 0, BLOCK=block, num_warps=warps_for(block),
    )  # fmt: skip
    return y_NH


def rotate(
    qkv_NED: torch.Tensor, positions_N: torch.Tensor, table: torch.Tensor, num_key_heads: int, norms: Any
) -> None:
    N, E, D = qkv_NED.shape
    block_e, block = triton.next_power_of_2(E - num_key_heads), triton.next_power_of_2(D // 2)
    kernels.rotate_kernel[(N,)](
        qkv_NED, positions_N, table, *head_norms(norms, table), ALL=E, Q=E - 2 * num_key_heads, QK=E - num_key_heads, D=D,
        NORM=norms is not None, BLOCK_E=block_e, BLOCK=block, num_warps=warps_for(block_e * block),
    )  # fmt: skip


def head_norms(norms: Any, nothing: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Weights of the norms of q and k, their eps and offset, as arguments of a kernel."""
    return (norms[0].weight, norms[1].weight, norms[0].eps, float(norms[0].offset)) if norms else (nothing, nothing, 0.0, 0.0)


def gated(gate_up_NF: torch.Tensor, activation: str) -> torch.Tensor:
    N, F = gate_up_NF.shape[0], gate_up_NF.shape[1] // 2
    out_NF = torch.empty(N, F, dtype=gate_up_NF.dtype, device=gate_up_NF.device)
    grid = N, triton.cdiv(F, GATE_BLOCK)
    kernels.gate_kernel[grid](gate_up_NF, out_NF, F, ACTIVATION=activation, BLOCK=GATE_BLOCK, num_warps=4)
    return out_NF


def warps_for(elements: int) -> int:
    return min(max(elements // 256, 1), 16)


# ---- attention and the draw ----


@dataclass
class KernelDecode(Pass):
    """`slots.Decode` by a kernel. Where the cache is, the kernel reads from the table.

    longest   the most keys a row may have
    """

    table: torch.Tensor
    rows: Rows
    shape: CacheShape
    longest: int

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, rule: Rule) -> torch.Tensor:
        return self._attend(q, k, v, layer, rule, None, rotate=False)

    def attend_unrotated(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, rule: Rule, norms: Any
    ) -> torch.Tensor:
        """Query and key as the product gave them."""
        return self._attend(q, k, v, layer, rule, norms, rotate=True)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, rule: Rule, norms: Any, *, rotate: bool
    ) -> torch.Tensor:
        rows, shape = self.rows, self.shape
        N, H, _, D = q.shape
        per_head = H // shape.num_heads
        splits = num_splits(N * shape.num_heads, self.longest)
        out_NTHD = torch.empty(N, 1, H, D, dtype=shape.dtype, device=q.device)
        partial = stats = out_NTHD
        if splits > 1:
            partial = torch.empty(N * H * splits, D, dtype=torch.float32, device=q.device)
            stats = torch.empty(N * H * splits, 2, dtype=torch.float32, device=q.device)
        q, k, v = (states if states.stride(3) == 1 else states.contiguous() for states in (q, k, v))
        block_d = triton.next_power_of_2(max(D, 16))
        kernels.attend_kernel[(N, shape.num_heads, splits)](
            q, k, v, out_NTHD, partial, stats, rows.prefix_start_N, rows.prefix_length_N, rows.suffix_start_N, rows.step_N,
            self.table, layer, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            rule.scaling, rule.softcap, rule.window, *head_norms(norms, self.table),
            HEADS=shape.num_heads, R=per_head, D=D, SPLITS=splits,
            BLOCK_R=triton.next_power_of_2(max(per_head, 16)), BLOCK_D=block_d, BLOCK_S=64 if block_d <= 128 else 32,
            WINDOW=rule.window > 0, SOFTCAP=rule.softcap > 0, ROTATE=rotate, NORM=norms is not None,
            PRECISION="ieee" if shape.dtype == torch.float32 else "tf32", num_warps=4,
        )  # fmt: skip
        if splits > 1:
            kernels.join_kernel[(N * H,)](partial, stats, out_NTHD, D=D, SPLITS=splits, BLOCK_D=block_d, num_warps=1)
        return out_NTHD


def num_splits(num_programs: int, longest: int) -> int:
    """A power of two: parts of each row's keys, so that there are programs for the whole GPU; none for a few keys."""
    splits = 1
    while splits < MAX_SPLITS and num_programs * splits < PROGRAMS and longest > KEYS_OF_A_PART * splits:
        splits *= 2
    return splits


def pick(
    logits_NV: torch.Tensor, rows: Rows, eos: torch.Tensor, table: torch.Tensor, scale: float, greedy: bool
) -> None:
    """Draw every row's next token from softmax(logits·scale) and write it down. `eos` has a power of two of ids."""
    N, V = logits_NV.shape
    chunks = triton.cdiv(V, CHUNK)
    max_NC = torch.empty(N, chunks, dtype=torch.float32, device=logits_NV.device)
    sum_NC = torch.empty_like(max_NC)
    shared = (logits_NV, logits_NV.stride(0), V, scale, max_NC, sum_NC)
    kernels.sums_kernel[(N, chunks)](*shared, CHUNKS=chunks, CHUNK=CHUNK, num_warps=8)
    kernels.pick_kernel[(N,)](
        *shared, rows.token_N, rows.finished_N, rows.row_N, rows.step_N, eos, table,
        CHUNKS=chunks, CHUNKS_PADDED=triton.next_power_of_2(chunks), CHUNK=CHUNK, NUM_EOS=len(eos), GREEDY=greedy,
        num_warps=8,
    )  # fmt: skip
