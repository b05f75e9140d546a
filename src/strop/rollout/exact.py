"""Rollouts whose log-probs equal the training forward's bit for bit: its layers (`models.layers.computed`) on slots.

New keys and values are written to their slots first; then every query attends over its slots, both in decode steps and
when prompts are read. The log-prob of a drawn token is that of `ops.rows.exact_rows`, from logits with the same memory
layout.

Shapes: P rows of T tokens, N = P·T; H hidden, D head dimension, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from strop.models.attention import Pass, Rule
from strop.models.exact import Exact, Runs, attend, cache_of
from strop.models.layers import computed, kernels
from strop.ops.head import ALL, Head
from strop.ops.rows import exact_rows
from strop.ops.rows.launch import Launcher
from strop.rollout.slots import Rows
from strop.rollout.steps import FusedLayers

# ---- kernels; they read from the engine's table what moves between rollouts: see kernels.py ----


@Launcher
def write_kernel(
    k_ptr, v_ptr, slot_ptr, table_ptr, layer: tl.int32, SIZE: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A token's key and value to its slot; to none where that is below 0."""
    n, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    slot = tl.load(slot_ptr + n)
    if slot < 0:
        return
    keys_ptr, values_ptr = cache_of(table_ptr, layer, SIZE, k_ptr.dtype.element_ty)
    tl.store(keys_ptr + slot * SIZE + i, tl.load(k_ptr + n * STRIDE + i, mask=i < SIZE), mask=i < SIZE)
    tl.store(values_ptr + slot * SIZE + i, tl.load(v_ptr + n * STRIDE + i, mask=i < SIZE), mask=i < SIZE)


@Launcher
def angles_kernel(position_ptr, table_ptr, cos_ptr, sin_ptr, D: tl.constexpr, BLOCK: tl.constexpr):
    """cos and sin of a token's position."""
    n, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at = tl.load(table_ptr + 6).to(tl.pointer_type(tl.float32)) + tl.load(position_ptr + n) * (2 * D) + d
    kind = cos_ptr.dtype.element_ty
    tl.store(cos_ptr + n * D + d, tl.load(at, mask=d < D).to(kind), mask=d < D)
    tl.store(sin_ptr + n * D + d, tl.load(at + D, mask=d < D).to(kind), mask=d < D)


@Launcher
def keep_kernel(logp_ptr, row_ptr, step_ptr, finished_ptr, table_ptr):
    """A drawn token's log-prob to its place, unless its row had ended before."""
    n = tl.program_id(0)
    at = tl.load(row_ptr + n) * tl.load(table_ptr + 5) + tl.load(step_ptr + n)
    into_ptr = tl.load(table_ptr + 4).to(tl.pointer_type(tl.float32))
    tl.store(into_ptr + at, tl.load(logp_ptr + n), mask=tl.load(finished_ptr + n) == 0)


# ---- the layers, and what they attend to ----


class ExactLayers(FusedLayers):
    """The layers of a model whose training layers are fused: its MLP is gated by SiLU and its norms have no offset."""

    def read(
        self, pass_: Pass, ids_PT: torch.Tensor, positions_PT: torch.Tensor, with_logits: bool = True
    ) -> torch.Tensor:
        """Return [P, V], the logits of the last column, with the attention of this pass."""
        P, T = ids_PT.shape
        x_NH, angles = self.embed(ids_PT).flatten(0, 1), self._angles(positions_PT.flatten())
        for index, layer in enumerate(self.layers):
            norms = layer.attention_norm, layer.mlp_norm, *(layer.head_norms or (None, None))
            heads = [len(layer.qkv.weight_EH) // self.head_dim - 2 * self.num_heads, self.num_heads, self.num_heads]
            joined = (*(one.weight_EH for one in (layer.qkv, layer.out, layer.gate_up, layer.down)), layer.qkv.bias_E)
            x_NH, *_ = computed(
                x_NH, *angles, _Attention(pass_, index, layer.rule, T), [norm and norm.eps for norm in norms],
                [norm and norm.weight for norm in norms], joined, heads, self.dtype,
            )  # fmt: skip
        if not with_logits:
            return x_NH
        last_PH = x_NH.unflatten(0, (P, T))[:, -1].contiguous()
        _, n_PH, _ = kernels.norm(last_PH, self.norm.weight, self.norm.eps, self.dtype)
        head = Head(self.head.weight_EH, self.head.bias_E, exact=True)
        return head.logits(n_PH, ALL, n_PH.new_empty(P * head.row))

    def _angles(self, positions_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        N, D, weight = len(positions_N), self.head_dim, self.embed.weight
        cos_ND, sin_ND = torch.empty(2, N, D, dtype=weight.dtype, device=weight.device)
        angles_kernel(N, positions_N, self.table, cos_ND, sin_ND, D=D, BLOCK=1 << (D - 1).bit_length())
        return cos_ND, sin_ND


@dataclass
class _Attention:
    """A layer's attention, with the interface that `computed` expects."""

    pass_: Any
    index: int
    rule: Rule
    num_tokens: int
    by = Exact

    def forward(self, *states: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        q, k, v = (one.unflatten(0, (-1, self.num_tokens)).transpose(1, 2) for one in states)
        return self.pass_.attend(q, k, v, self.index, self.rule).flatten(0, 1), []


@dataclass
class Slotted(Pass):
    """New tokens of rows, after the tokens in the cache.

    runs      the slots of the rows' queries and keys
    slots_N   slots of the new tokens; below 0 for padding
    """

    table: torch.Tensor
    runs: Runs
    slots_N: torch.Tensor

    @classmethod
    def decode(cls, table: torch.Tensor, rows: Rows) -> "Slotted":
        """Return the pass that reads one token of every row."""
        one = torch.ones_like(rows.step_N)
        runs = Runs(
            one.cumsum(0, dtype=torch.int32) - 1, one, rows.prefix_length_N + rows.step_N, rows.prefix_start_N,
            rows.prefix_length_N, rows.suffix_start_N, 1,
        )  # fmt: skip
        return cls(table, runs, (rows.suffix_start_N + rows.step_N).long())

    @classmethod
    def prompts(cls, table: torch.Tensor, starts: Sequence[int], have: Sequence[int], new: Sequence[int]) -> "Slotted":
        """Return the pass that reads new tokens of right-padded prompts.

        starts, have, new   of each prompt: its first slot, the slots already filled, the number of new tokens
        """
        P, T = len(new), max(new)
        queries, counts, positions, slots = torch.tensor([[p * T for p in range(P)], new, have, starts]).int()
        slots_PT = (slots + positions)[:, None] + torch.arange(T)
        slots_PT[torch.arange(T) >= counts[:, None]] = -1
        given = torch.stack([queries, counts, positions, slots, torch.zeros_like(slots)]).to(table.device)
        queries, counts, positions, slots, zero = given
        runs = Runs(queries, counts, positions, zero, zero, slots, T)
        return cls(table, runs, slots_PT.flatten().long().to(table.device))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, rule: Rule) -> torch.Tensor:
        P, T = q.shape[0], q.shape[2]
        q_NQD, k_NKD, v_NKD = (one.transpose(1, 2).flatten(0, 1) for one in (q, k, v))
        size, stride = k_NKD.shape[1] * k_NKD.shape[2], k_NKD.stride(0)
        block = 1 << (size - 1).bit_length()
        write_kernel(len(q_NQD), k_NKD, v_NKD, self.slots_N, self.table, layer, SIZE=size, STRIDE=stride, BLOCK=block)
        return attend(q_NQD, k_NKD, v_NKD, self.runs, rule, self.table, layer).unflatten(0, (P, T))


def pick(logits_NV: torch.Tensor, rows: Rows, eos: torch.Tensor, table: torch.Tensor, temperature: float) -> None:
    """Draw as `launch.pick` does, with training's log-prob. temperature: 0 is greedy."""
    from strop.rollout import launch

    step_N, finished_N, temperature_or_1 = rows.step_N.clone(), rows.finished_N.clone(), temperature or 1.0
    launch.pick(logits_NV, rows, eos, table, 1 / temperature_or_1, temperature == 0)
    logps_N, *_ = exact_rows.logps(logits_NV, rows.token_N, None, temperature_or_1, False)
    keep_kernel(len(logps_N), logps_N, rows.row_N, step_N, finished_N, table)
