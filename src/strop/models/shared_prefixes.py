"""Attention of a batch in which a prefix that sequences share stands once: see `strop.data.batch.SharedPrefixes`.

Every segment attends to itself, and what follows a prefix attends to the prefix too. The two parts i are joined by their
log-sum-exp:

    out = Σ_i exp(lse_i − lse)·out_i        lse = log Σ_i exp(lse_i)

The backward of a part is that of flash attention, given the joined out and lse: the weights are exp(score − lse).

Shapes: M tokens, of which L follow a prefix; H query heads, K key heads, D numbers of a head.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any

import torch

from strop._types import Context
from strop.data.batch import TokenBatch, on_device
from strop.models.attention import Packed, Rule, has_kernel, in_one_dtype
from strop.ops.head import first_order


class WithPrefixes(Packed):
    """A pass over a batch with shared prefixes."""

    def __init__(self, batch: TokenBatch):
        super().__init__(batch.lengths, batch.cu_seqlens)
        assert batch.prefixes is not None
        lengths, self._token_M, self._place_N, alone = batch.prefixes
        self._alone = Packed(alone.lengths, alone.cu_seqlens)
        of_prefixes, of_later = zip(*lengths, strict=True)
        ends = [[0, *accumulate(part)] for part in (of_prefixes, of_later)]
        cu_prefix, cu_later = on_device(torch.tensor(ends, dtype=torch.int32), batch.device)
        self._limits = cu_later, cu_prefix, max(of_later), max(of_prefixes), 0.0, False
        self._prefix, self._later = slice(sum(of_prefixes)), slice(sum(of_prefixes), sum(of_prefixes + of_later))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, rule: Rule) -> torch.Tensor:
        self.rules[layer] = rule
        q, k, v = (one[0].transpose(0, 1) for one in in_one_dtype(q, k, v))
        if self.has_kernel(q, v, rule):
            return PrefixAttention.apply(self, rule, q, k, v)[None]
        # each sequence by itself: the prefix's states are copied, and autograd sums their gradients
        q, k, v = (one.index_select(0, self._place_N).transpose(0, 1)[None] for one in (q, k, v))
        return self._alone.attend(q, k, v, layer, rule).index_select(1, self._token_M)

    def has_kernel(self, q: torch.Tensor, v: torch.Tensor, rule: Rule) -> bool:
        longest = max(self._alone.lengths)
        if rule.dropout or any(size and size < longest for size in (rule.window, rule.chunk)):
            return False
        if q.device.type == "cpu":
            return not rule.softcap and rule.sinks is None and q.shape[-1] == v.shape[-1]
        return has_kernel(q, rule)

    def flash(self, q_MHD: torch.Tensor, k_MKD: torch.Tensor, v_MKD: torch.Tensor, rule: Rule) -> list[torch.Tensor]:
        forward: Any = torch.ops.aten._flash_attention_forward if q_MHD.is_cuda else flash_on_cpu
        prefix, later, scale = self._prefix, self._later, rule.scaling
        out_MHD, lse_HM, *rest = forward(q_MHD, k_MKD, v_MKD, *self._own_limits, False, scale=scale)[:4]
        parts = [out_MHD[later], lse_HM[:, later]]
        parts += forward(q_MHD[later], k_MKD[prefix], v_MKD[prefix], *self._limits, False, scale=scale)[:2]
        own_LHD, own_HL, more_LHD, more_HL = parts
        lse_HL = torch.logaddexp(own_HL, more_HL)
        shares = ((one_HL - lse_HL).exp().T[..., None] for one_HL in (own_HL, more_HL))
        own_LHD.copy_(own_LHD * next(shares) + more_LHD * next(shares))
        own_HL.copy_(lse_HL)
        return [out_MHD, lse_HM, *rest]

    def flash_bwd(self, d_out: torch.Tensor, *forward: Any, rule: Rule) -> tuple[torch.Tensor, ...]:
        backward: Any = torch.ops.aten._flash_attention_backward if d_out.is_cuda else flash_on_cpu_bwd
        q_MHD, k_MKD, v_MKD, out_MHD, lse_HM, rng_state, unused = forward
        prefix, later, rest = self._prefix, self._later, (rng_state, unused)
        dq, dk, dv = backward(d_out, *forward[:5], *self._own_limits, *rest, scale=rule.scaling)
        more = backward(
            d_out[later], q_MHD[later], k_MKD[prefix], v_MKD[prefix], out_MHD[later], lse_HM[:, later].contiguous(),
            *self._limits, *rest, scale=rule.scaling,
        )  # fmt: skip
        for gradient, part, added in zip((dq, dk, dv), (later, prefix, prefix), more, strict=True):
            gradient[part] += added
        return dq, dk, dv

    @property
    def _own_limits(self) -> tuple[object, ...]:
        """Of the attention of each segment to itself."""
        longest = max(self.lengths)
        return self.cu_seqlens, self.cu_seqlens, longest, longest, 0.0, True


class PrefixAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, pass_: WithPrefixes, rule: Rule, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        found = pass_.flash(q, k, v, rule)
        ctx.save_for_backward(q, k, v, *found)
        ctx.pass_, ctx.rule = pass_, rule
        return found[0]

    @staticmethod
    def backward(ctx: Context, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            gradients = ctx.pass_.flash_bwd(d_out, *ctx.saved_tensors, rule=ctx.rule)
        return first_order(None, None, *gradients)


# ---- flash attention of packed sequences on a CPU, with the arguments of torch's operators on a GPU ----


def flash_on_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, *options: Any, scale: float
) -> tuple[torch.Tensor, torch.Tensor, None, None]:  # fmt: skip
    """Return out [N, H, D], lse [H, N], and None for a state of random numbers. Sequences of one length are one call."""
    _, _, dropout, causal, _ = options
    found = [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*part, dropout, causal, scale=scale)
        for part in _of_one_length((q, k, v), (cu_q, cu_k, cu_k))
    ]
    out, lse = zip(*found, strict=True)
    return _packed(out), torch.cat([one.transpose(0, 1).flatten(1) for one in lse], 1), None, None


def flash_on_cpu_bwd(
    d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    cu_q: torch.Tensor, cu_k: torch.Tensor, *options: Any, scale: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the gradients of q, k and v."""
    _, _, dropout, causal, *_ = options
    parts = _of_one_length((d_out, q, k, v, out, lse.T[..., None]), (cu_q, cu_q, cu_k, cu_k, cu_q, cu_q))
    found = [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *states, lse[..., 0].contiguous(), dropout, causal, scale=scale
        )
        for *states, lse in parts
    ]
    return tuple(map(_packed, zip(*found, strict=True)))


def _of_one_length(states: Sequence[torch.Tensor], boundaries: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield parts of the states as [P, heads, T, D]: consecutive sequences of equal lengths.

    boundaries   where the sequences of each state begin and end
    """
    lengths = zip(*(cu.diff().tolist() for cu in boundaries), strict=True)
    at = [0] * len(states)
    for sizes, some in groupby(lengths):
        count = len(list(some))
        yield [
            one[first : first + count * size].unflatten(0, (count, size)).transpose(1, 2)
            for one, first, size in zip(states, at, sizes, strict=True)
        ]
        at = [first + count * size for first, size in zip(at, sizes, strict=True)]


def _packed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return [N, heads, D] of parts [P, heads, T, D]."""
    return torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])
