"""Launchers of the kernels of a decode step."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from strop.models.attention import Pass, Rule
from strop.rollout import kernels
from strop.rollout.slots import CacheShape, Rows, in_slots

CHUNK = 4096  # logits per program
PROGRAMS = 264  # target number of programs: two for each of an H200's 132 multiprocessors
MAX_SPLITS = 16
TILE = 64  # maximum query heads that read a shared prompt's keys together
SHARED_FROM = 512  # tokens of a prompt; for shorter ones another kernel costs more than reading keys again
KEYS_AT_ONCE, ATTENTION_WARPS = 64, 4
KEYS_OF_A_PART = 512  # minimum for splitting a row's keys: joining the parts is one more kernel
KEYS_OF_A_JOINED_PART = 128  # minimum if parts are joined anyway
GATE_BLOCK = 1024  # elements of a row per program


def compile_together(device: torch.device, launches: Sequence[Callable[[], object]]) -> None:
    """Run each launch in its own thread: most of a kernel's compile time is spent waiting for other programs."""

    def run(launch: Callable[[], object]) -> None:
        torch.cuda.set_device(device)
        launch()

    with ThreadPoolExecutor(len(launches)) as threads:
        list(threads.map(run, launches))


def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
    kernel[grid](*arguments, **constants)


def compile_only(kernel: Any, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
    kernel.warmup(*arguments, grid=grid, **constants)


# ---- between the products of a layer: the kernels of `steps.FusedLayers` ----


def add_norm(x_NH: torch.Tensor, update_NH: torch.Tensor | None, norm: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the norm of x + update. The sum is written to x."""
    N, H = x_NH.shape
    y_NH = torch.empty(N, H, dtype=dtype, device=x_NH.device)
    block = triton.next_power_of_2(H)
    kernels.add_norm_kernel[(N,)](
        x_NH, x_NH if update_NH is None else update_NH, norm.weight, y_NH, H, norm.eps, float(norm.offset),
        int(update_NH is not None), OFFSET=norm.offset != 0, BLOCK=block, num_warps=warps_for(block),
    )  # fmt: skip
    return y_NH


def rotate(
    qkv_NED: torch.Tensor,
    positions_N: torch.Tensor,
    table: torch.Tensor,
    num_key_heads: int,
    norms: object,
    rounds: bool,
) -> None:
    """Rotate queries and keys in place, after their norms if there are any.

    rounds   round to the dtype of qkv between operations, as a 16-bit model does
    """
    N, E, D = qkv_NED.shape
    block_e, block_d = triton.next_power_of_2(E - num_key_heads), triton.next_power_of_2(D)
    kernels.rotate_kernel[(N,)](
        qkv_NED, positions_N, table, *head_norms(norms, table), ALL=E, Q=E - 2 * num_key_heads, QK=E - num_key_heads, D=D,
        NORM=norms is not None, ROUND=rounds, BLOCK_E=block_e, BLOCK_D=block_d, num_warps=warps_for(block_e * block_d),
    )  # fmt: skip


def head_norms(norms: Any, nothing: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Return the kernel arguments of the norms of q and k: their weights, eps and offset."""
    if norms is None:
        return nothing, nothing, 0.0, 0.0
    q_norm, k_norm = norms
    return q_norm.weight, k_norm.weight, q_norm.eps, float(q_norm.offset)


def gated(gate_up_NF: torch.Tensor, activation: str) -> torch.Tensor:
    N, F = gate_up_NF.shape[0], gate_up_NF.shape[1] // 2
    out_NF = torch.empty(N, F, dtype=gate_up_NF.dtype, device=gate_up_NF.device)
    grid = N, triton.cdiv(F, GATE_BLOCK)
    kernels.gate_kernel[grid](gate_up_NF, out_NF, F, ACTIVATION=activation, BLOCK=GATE_BLOCK, num_warps=4)
    return out_NF


def warps_for(elements: int) -> int:
    return min(max(elements // 256, 1), 16)


# ---- attention and the draw ----


@dataclass(frozen=True)
class Parts:
    """The division of a step's attention into parts; each division has its own graph.

    splits              parts of the keys of a row that reads its prompt by itself
    own, of_prompt      parts of a row's own keys and of the prompt's, if rows share it; 0 if they do not
    tile, num_tiles     query heads of one tile over a shared prompt, and maximum number of tiles
    """

    splits: int = 1
    own: int = 0
    of_prompt: int = 0
    tile: int = 0
    num_tiles: int = 0


def parts_of(
    num_rows: int, shape: CacheShape, longest_prefix: int, max_new_tokens: int, num_prompts: int, num_samples: int
) -> Parts:
    """Return a division in powers of two that fills the GPU with programs.

    No part has only a few keys, since joining the parts is one more kernel.
    """
    programs, group = num_rows * shape.num_heads, min(num_samples, max(1, TILE // shape.per_head))
    splits = num_splits(programs, longest_prefix + max_new_tokens, KEYS_OF_A_PART)
    if group == 1 or longest_prefix < SHARED_FROM:
        return Parts(splits)
    own = num_splits(programs, max_new_tokens, KEYS_OF_A_JOINED_PART)
    of_prompt = num_splits(programs // group, longest_prefix, KEYS_OF_A_JOINED_PART)
    tile = triton.next_power_of_2(max(group * shape.per_head, 16))
    num_tiles = triton.next_power_of_2(
        num_prompts + num_rows // (tile // shape.per_head)
    )  # or more: each prompt may have one tile that is not full
    return Parts(splits, own, of_prompt, tile, min(num_rows, num_tiles))


def num_splits(num_programs: int, num_keys: int, least: int) -> int:
    """Return the number of splits, so that each part has at least `least` keys."""
    splits = 1
    while splits < MAX_SPLITS and num_programs * splits < PROGRAMS and num_keys > least * splits:
        splits *= 2
    return splits


def tiles_of(prompt_N: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Return (first row, number of rows) of each tile: neighbours with one prompt, at most `most` rows."""
    tiles: list[tuple[int, int]] = []
    for n, prompt in enumerate(prompt_N):
        first, count = tiles[-1] if tiles else (0, most)
        if count < most and prompt == prompt_N[first]:
            tiles[-1] = first, count + 1
        else:
            tiles.append((n, 1))
    return tiles


@dataclass
class KernelDecode(Pass):
    """`slots.Decode` by kernels, which read the address of the cache from the table.

    tiles_CN   first row and number of rows of each tile; 0 rows after the last tile
    run        runs a kernel, or only compiles it
    in_chunks  chunk → the rows without earlier chunks
    """

    table: torch.Tensor
    rows: Rows
    shape: CacheShape
    parts: Parts
    tiles_CN: torch.Tensor
    run: Callable[..., object] = launch
    in_chunks: dict[int, Rows] = field(default_factory=dict)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, rule: Rule) -> torch.Tensor:
        qkv = in_slots(self.shape.head_dim, q, k, v)
        how = {"ROTATE": False, "NORM": False, "ROUND": False}
        return self._attend(qkv, layer, rule, None, how)[..., : v.shape[3]]

    def attend_unrotated(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, rule: Rule, norms: object, rounds: bool
    ) -> torch.Tensor:
        """Attend with query and key as the matrix product gave them; the kernel norms and rotates them."""
        how = {"ROTATE": True, "NORM": norms is not None, "ROUND": rounds}
        return self._attend((q, k, v), layer, rule, norms, how)

    def _attend(
        self, qkv: Sequence[torch.Tensor], layer: int, rule: Rule, norms: object, how: dict[str, bool]
    ) -> torch.Tensor:
        q, k, v = qkv
        rows, shape, parts = self.rows, self.shape, self.parts
        if rule.chunk:
            if rule.chunk not in self.in_chunks:
                self.in_chunks[rule.chunk] = rows.since(0, rule.chunk)
            rows = self.in_chunks[rule.chunk]
        N, H, _, D = q.shape
        shares = parts.of_prompt > 0 and not rule.window and not rule.chunk
        splits = parts.own if shares else parts.splits
        if rule.sinks is not None:  # sinks need the sums of the weights, which only parts store
            splits = max(2, splits)
        num_parts = splits + (parts.of_prompt if shares else 0)
        out_NTHD = torch.empty(N, 1, H, D, dtype=shape.dtype, device=q.device)
        num_partial = N * H * num_parts if num_parts > 1 else 0
        partial, stats = (torch.empty(num_partial, size, dtype=torch.float32, device=q.device) for size in (D, 2))
        q = q.to(shape.dtype)
        q, k, v = (states if states.stride(3) == 1 else states.contiguous() for states in (q, k, v))
        q_weight, k_weight, eps, offset = head_norms(norms, self.table)
        block_d = triton.next_power_of_2(max(D, 16))
        shared = {
            "HEADS": shape.num_heads, "R": shape.per_head, "D": D, "BLOCK_D": block_d,
            "BLOCK_S": KEYS_AT_ONCE if block_d <= 128 else KEYS_AT_ONCE // 2, "SOFTCAP": rule.softcap > 0, **how,
            "PRECISION": "ieee" if shape.dtype == torch.float32 else "tf32", "num_warps": ATTENTION_WARPS,
        }  # fmt: skip
        if shares:
            self.run(
                kernels.prefix_kernel, (parts.num_tiles, shape.num_heads, parts.of_prompt),
                q, partial, stats, *self.tiles_CN, rows.prefix_start_N, rows.prefix_length_N, rows.step_N, self.table,
                layer, q.stride(0), q.stride(1), rule.scaling, rule.softcap, parts.of_prompt, num_parts,
                q_weight, eps, offset, BLOCK_M=parts.tile, **shared,
            )  # fmt: skip
        self.run(
            kernels.attend_kernel, (N, shape.num_heads, splits),
            q, k, v, out_NTHD, partial, stats, rows.prefix_start_N, rows.prefix_length_N, rows.suffix_start_N, rows.step_N,
            self.table, layer, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            rule.scaling, rule.softcap, rule.window, splits, num_parts, q_weight, k_weight, eps, offset,
            BLOCK_R=triton.next_power_of_2(max(shape.per_head, 16)), WINDOW=rule.window > 0, **shared,
        )  # fmt: skip
        if num_parts > 1:
            self.run(
                kernels.join_kernel, (N * H,), partial, stats, out_NTHD, num_parts, D=D, BLOCK_P=2 * MAX_SPLITS,
                BLOCK_D=block_d, num_warps=1,
            )  # fmt: skip
        if rule.sinks is not None:  # scale by Σ exp(scores) / (Σ exp(scores) + exp(sink))
            score, weight = stats.view(N, H, num_parts, 2).unbind(-1)
            logsumexp_NH = (score + weight.log()).logsumexp(-1)
            share_NH = (logsumexp_NH - rule.sinks.float()).sigmoid()
            return (out_NTHD * share_NH[:, None, :, None]).to(shape.dtype)
        return out_NTHD


def pick(
    logits_NV: torch.Tensor, rows: Rows, eos: torch.Tensor, table: torch.Tensor, scale: float, greedy: bool
) -> None:
    """Draw every row's next token from softmax(logits·scale) and write it to the outputs.

    len(eos) is a power of two.
    """
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
