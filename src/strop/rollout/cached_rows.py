"""Caches of rows that continue later. The next turn of a conversation then reads only its new tokens.

    cached = CachedRows()
    generate(policy, prompts, sampling, addresses=…, cached=cached.of([0, 1, 2]))      # three conversations begin
    generate(policy, longer, sampling, addresses=…, cached=cached.of([0, 2]))          # two of them continue

A row's prompt must begin with its last prompt and the completion drawn for it. The weights must be the same.

Shapes: R rows read together, M new tokens per row, T tokens in all, K key heads, D head dimension.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from strop.models.attention import Pass, Rule, in_one_dtype, masked_attention
from strop.rollout.slots import Prefill, States, in_slots

CHUNK = 2048  # maximum tokens of a prompt read at once


@dataclass
class CachedRows:
    """The cached rows of an engine, between two calls.

    rows   the cached values of each row, by the row's number
    now    the row numbers that the prompts of the next call continue
    """

    rows: dict[int, Any] = field(default_factory=dict)
    now: Sequence[int] = ()

    def of(self, now: Sequence[int]) -> "CachedRows":
        """Return the same cache for a call with these rows."""
        return CachedRows(self.rows, now)

    def part(self, first: int, end: int) -> "CachedRows":
        return self.of(self.now[first:end])

    def num_tokens(self, row: int) -> int:
        """Return how many tokens of the row are cached."""
        if row not in self.rows:
            return 0
        cache, at = self.rows[row]  # a tensor and states, or a cache of strop's MoE and a row of it
        return cache.shape[2] if isinstance(cache, torch.Tensor) else int(cache.lengths_B[at])

    def bytes_per_token(self, row: int) -> int:
        """Return how many bytes a token of the row takes; 0 if it is not known."""
        cache, _ = self.rows.get(row, (None, None))
        return cache[:, :, :1].numel() * cache.itemsize if isinstance(cache, torch.Tensor) else 0


@dataclass
class Extend(Pass):
    """New tokens of rows, right-padded, that follow the tokens in the cache.

    starts_R, lengths_R   first slot of each row, and number of slots already filled
    ends_R                number of slots filled after this pass; `longest` is the maximum
    tokens_N, slots_N     indices of the real tokens among the R·M tokens, and their slots
    """

    kv: torch.Tensor
    starts_R: torch.Tensor
    lengths_R: torch.Tensor
    ends_R: torch.Tensor
    tokens_N: torch.Tensor
    slots_N: torch.Tensor
    longest: int

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, rule: Rule) -> torch.Tensor:
        size, kv = v.shape[3], self.kv[layer]
        q, k, v = in_slots(kv.shape[-1], *in_one_dtype(q, k, v))
        both = torch.stack((k, v)).transpose(2, 3).flatten(1, 2)
        kv.index_copy_(1, self.slots_N, both[:, self.tokens_N])
        i_T = torch.arange(self.longest, device=q.device)
        positions_RM1 = (self.lengths_R[:, None] + torch.arange(q.shape[2], device=q.device))[..., None]
        mask_RMT = i_T <= positions_RM1
        if rule.window:
            mask_RMT &= i_T > positions_RM1 - rule.window
        if rule.chunk:
            mask_RMT &= i_T // rule.chunk == positions_RM1 // rule.chunk
        # slots of other rows may hold NaN, which a mask does not remove: read the row's first slot instead
        slots_RT = self.starts_R[:, None] + i_T * (i_T < self.ends_R[:, None])
        keys, values = (kv[side][slots_RT].transpose(1, 2) for side in (0, 1))
        return masked_attention(q, keys, values, mask_RMT[:, None], rule).transpose(1, 2)[..., :size]


def read_on(engine: Any, prompts: Sequence[torch.Tensor], round_: Any, cached: CachedRows, most: int) -> None:
    """Fill the prompts' slots. Cached rows are copied, equal new prompts are read once, all other tokens are read.

    most   maximum number of tokens read together, padding included
    """
    starts = round_.prefix_starts
    first: dict[tuple[int, ...], int] = {}
    twins, going = {}, {}
    for i, (prompt, row) in enumerate(zip(prompts, cached.now, strict=True)):
        if row in cached.rows:
            kv, states = cached.rows[row]
            round_.kv[:, :, starts[i] : starts[i] + kv.shape[2]] = kv
            for key, state in states.items():
                round_.states[key][i] = state
            going[i] = kv.shape[2]
        elif (twin := first.setdefault(tuple(prompt.tolist()), i)) != i:
            twins[i] = twin
    engine._prefill(prompts, round_, skip={*twins, *going})
    for i, twin in twins.items():
        size = len(prompts[i]) - 1
        round_.kv[:, :, starts[i] : starts[i] + size] = round_.kv[:, :, starts[twin] : starts[twin] + size]
        for of_prompts in round_.states.values():
            of_prompts[i] = of_prompts[twin]
    if round_.states:
        read_chunks(engine, prompts, round_, going, most)
        return
    left = sorted((i for i in going if going[i] < len(prompts[i]) - 1), key=lambda i: len(prompts[i]))
    while left:
        part = left[-max(1, most // len(prompts[left[-1]])) :]
        left = left[: -len(part)]
        _extend(engine, round_, part, [prompts[i][going[i] : -1] for i in part], [going[i] for i in part])


def read_chunks(engine: Any, prompts: Sequence[torch.Tensor], round_: Any, have: dict[int, int], most: int) -> None:
    """Read all but the last token of these prompts, for models with states.

    `have` is how many tokens were already read.
    """
    rows = list(have)
    left = [len(prompts[i]) - 1 - have[i] for i in rows]
    for size, some, done in chunks_of(left, most, whole=not engine.continues):
        part = [rows[r] for r in some]
        begun = [have[i] + more for i, more in zip(part, done, strict=True)]
        new = [prompts[i][first : first + size] for i, first in zip(part, begun, strict=True)]
        _extend(engine, round_, part, new, begun)


def chunks_of(left: Sequence[int], most: int, whole: bool = False) -> Iterator[tuple[int, list[int], list[int]]]:
    """Yield (number of tokens, rows, tokens that each row has already read) until no row has tokens left.

    A state belongs to a row's last token, so no row may be read with padding at its end. Rows therefore read chunks of
    equal size together: the smallest remaining length if there are few different lengths, else powers of two, largest
    first.

    whole   read only whole rows; rows of equal length are read together
    """
    done = [0] * len(left)
    while todo := [row for row in range(len(left)) if done[row] < left[row]]:
        sizes = {left[row] - done[row] for row in todo}
        bits = max(sizes).bit_length()
        size = max(sizes) if whole else min(CHUNK, min(sizes) if len(sizes) <= bits else 1 << (bits - 1))
        rows = [row for row in todo if left[row] - done[row] >= size]
        for first in range(0, len(rows), max(1, most // size)):
            some = rows[first : first + max(1, most // size)]
            yield size, some, [done[row] for row in some]
        for row in rows:
            done[row] += size


def _extend(engine: Any, round_: Any, part: Sequence[int], new: Sequence[torch.Tensor], have: Sequence[int]) -> None:
    """Read the new tokens of these prompts. `have` is how many tokens of each prompt were read before."""
    device, starts = engine.device, [round_.prefix_starts[i] for i in part]
    M = max(map(len, new))
    ids_RM = torch.zeros(len(part), M, dtype=torch.int64)
    for r, ids in enumerate(new):
        ids_RM[r, : len(ids)] = ids
    tokens_N = torch.cat([torch.arange(len(ids)) + r * M for r, ids in enumerate(new)]).to(device)
    places = zip(new, starts, have, strict=True)
    slots_N = torch.cat([torch.arange(len(ids)) + start + first for ids, start, first in places]).to(device)
    ends = [first + len(ids) for ids, first in zip(new, have, strict=True)]
    starts_R, have_R, ends_R = torch.tensor([starts, have, ends], device=device)
    longest = max(ends)
    pass_: Pass = Extend(round_.kv, starts_R, have_R, ends_R, tokens_N, slots_N, longest)
    if engine.exact:
        pass_ = engine.reading(starts, have, [len(ids) for ids in new])
    elif not any(have):
        pass_ = Prefill(round_.kv, tokens_N, slots_N)
    part_R = torch.tensor(part, device=device)
    pass_.states = States({key: one[part_R] for key, one in round_.states.items()})
    positions_RM = (have_R[:, None] + torch.arange(M, device=device)).clamp(max=longest - 1)
    engine.layers.read(pass_, ids_RM.to(device), positions_RM, with_logits=False)
    for key, one in round_.states.items():
        one[part_R] = pass_.states.by_key[key]
    if round_.record is not None:
        round_.record.read_prompts(tokens_N, slots_N)


def store(prompts: Sequence[torch.Tensor], lengths: Sequence[int], round_: Any, cached: CachedRows, width: int) -> None:
    """Store keys, values and states of every row, without its last two tokens.

    The last drawn token was never read. The one before it is left out because an ended row is read again there.
    """
    begin = sum(len(prompt) - 1 for prompt in prompts)
    for i, (row, prompt, length) in enumerate(zip(cached.now, prompts, lengths, strict=True)):
        start, own = round_.prefix_starts[i], begin + i * width
        parts = round_.kv[:, :, start : start + len(prompt) - 1], round_.kv[:, :, own : own + length - 1]
        cached.rows[row] = torch.cat(parts, 2), {key: kept[i].clone() for key, kept in round_.kept.items()}
