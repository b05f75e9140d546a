"""Caches of rows that go on later, so that of a conversation's next turn only the new tokens are read.

    cached = CachedRows()
    generate(policy, prompts, sampling, addresses=…, cached=cached.of([0, 1, 2]))      # three conversations begin
    generate(policy, longer, sampling, addresses=…, cached=cached.of([0, 2]))          # two of them go on

A row's prompt must begin with what its last prompt was and what it drew then. Weights must be the same.

Seen: R rows read together, M new tokens of each, T tokens in all, K key heads, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from strop.models.attention import Pass, Rule, in_one_dtype, masked_attention
from strop.rollout.slots import sides


@dataclass
class CachedRows:
    """What an engine keeps of rows between two calls.

    rows   what it keeps of each, by the row's number
    now    the numbers of the rows that the prompts of the next call continue
    """

    rows: dict[int, Any] = field(default_factory=dict)
    now: Sequence[int] = ()

    def of(self, now: Sequence[int]) -> "CachedRows":
        """Return the same cache for a call with these rows."""
        return CachedRows(self.rows, now)

    def part(self, first: int, end: int) -> "CachedRows":
        return self.of(self.now[first:end])


@dataclass
class Extend(Pass):
    """New tokens of rows, right-padded, behind what the cache holds of them.

    starts_R, lengths_R   where a row's slots begin, and how many are filled already
    ends_R                how many are with the new tokens; `longest` is the most
    tokens_N, slots_N     which of the R·M tokens are none of the padding, and where they go
    """

    kv: torch.Tensor
    starts_R: torch.Tensor
    lengths_R: torch.Tensor
    ends_R: torch.Tensor
    tokens_N: torch.Tensor
    slots_N: torch.Tensor
    longest: int

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, rule: Rule) -> torch.Tensor:
        q, k, v = in_one_dtype(q, k, v)
        kv = self.kv[layer]
        for side, states in sides(kv, k, v):
            side.index_copy_(0, self.slots_N, states.transpose(1, 2).flatten(0, 1)[self.tokens_N])
        i_T = torch.arange(self.longest, device=q.device)
        positions_RM1 = (self.lengths_R[:, None] + torch.arange(q.shape[2], device=q.device))[..., None]
        mask_RMT = i_T <= positions_RM1
        if rule.window:
            mask_RMT &= i_T > positions_RM1 - rule.window
        # the row's first slot in place of one that is not its own: that may hold NaN, which no mask takes back
        slots_RT = self.starts_R[:, None] + i_T * (i_T < self.ends_R[:, None])
        keys, values = (side[slots_RT].transpose(1, 2) for side, _ in sides(kv, k, v))
        return masked_attention(q, keys, values, mask_RMT[:, None], rule).transpose(1, 2)


def read_on(
    engine: Any, prompts: Sequence[torch.Tensor], round_: Any, cached: CachedRows, read: object, most: int
) -> None:
    """Fill the prompts' slots: what is cached is copied, equal new prompts are read once, the rest is read.

    most   tokens read together, padding included
    """
    starts = round_.prefix_starts
    first: dict[tuple[int, ...], int] = {}
    twins, going = {}, []
    for i, (prompt, row) in enumerate(zip(prompts, cached.now, strict=True)):
        if row in cached.rows:
            states = cached.rows[row]
            round_.kv[:, :, starts[i] : starts[i] + states.shape[2]] = states
            going.append((i, states.shape[2]))
        elif (twin := first.setdefault(tuple(prompt.tolist()), i)) != i:
            twins[i] = twin
    engine._prefill(prompts, round_, skip={*twins, *(i for i, _ in going)})
    for i, twin in twins.items():
        size = len(prompts[i]) - 1
        round_.kv[:, :, starts[i] : starts[i] + size] = round_.kv[:, :, starts[twin] : starts[twin] + size]
    going.sort(key=lambda one: len(prompts[one[0]]))
    while going:
        part = going[-max(1, most // len(prompts[going[-1][0]])) :]
        going = going[: -len(part)]
        _extend(engine, prompts, part, round_, read)


def _extend(
    engine: Any, prompts: Sequence[torch.Tensor], part: Sequence[tuple[int, int]], round_: Any, read: Any
) -> None:
    device, rows = engine.device, [(prompts[i][have:-1], round_.prefix_starts[i], have) for i, have in part]
    M = max(len(new) for new, _, _ in rows)
    ids_RM = torch.zeros(len(rows), M, dtype=torch.int64)
    for r, (new, _, _) in enumerate(rows):
        ids_RM[r, : len(new)] = new
    tokens_N = torch.cat([torch.arange(len(new)) + r * M for r, (new, _, _) in enumerate(rows)])
    slots_N = torch.cat([torch.arange(len(new)) + start + have for new, start, have in rows])
    starts, lengths, ends = zip(*((start, have, have + len(new)) for new, start, have in rows), strict=True)
    starts_R, lengths_R, ends_R = torch.tensor([starts, lengths, ends], device=device)
    longest = max(ends)
    pass_: Pass = Extend(round_.kv, starts_R, lengths_R, ends_R, tokens_N.to(device), slots_N.to(device), longest)
    if engine.exact:
        pass_ = engine.reading(starts, lengths, [len(new) for new, *_ in rows])
    positions_RM = (lengths_R[:, None] + torch.arange(M, device=device)).clamp(max=longest - 1)
    read(engine.layers, pass_, ids_RM.to(device), positions_RM, with_logits=False)


def store(prompts: Sequence[torch.Tensor], lengths: Sequence[int], round_: Any, cached: CachedRows, width: int) -> None:
    """Keys and values of every row so far: all but those of its last two tokens. The last drawn was never read, and a row
    that ended is read once more in the slot before."""
    begin = sum(len(prompt) - 1 for prompt in prompts)
    for i, (row, prompt, length) in enumerate(zip(cached.now, prompts, lengths, strict=True)):
        start, own = round_.prefix_starts[i], begin + i * width
        parts = round_.kv[:, :, start : start + len(prompt) - 1], round_.kv[:, :, own : own + length - 1]
        cached.rows[row] = torch.cat(parts, 2)
