"""The training data: `Trajectory`, a sequence of tokens, and `TokenBatch`, several trajectories packed.

A trajectory has a loss mask: True for tokens that the policy sampled or, in SFT, that the assistant wrote. A batch computes
on the host which hidden state predicts which token of the loss. So the device never searches a mask, and the host never
waits for the device.

Shapes: N tokens of S trajectories, n of them in the loss; rows of T tokens if a model needs them padded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from strop._types import Array, Row
from strop.primitives import pack_sequences

Item = TypeVar("Item")
Groups: TypeAlias = Sequence[tuple[int, list[int]]]  # the length of a prefix, and the trajectories that begin with it
# A prefix is read once if it has LEAST_SHARED tokens, and if so many of a batch's tokens are saved: in a tiny model fewer
# cost the host more than they save.
LEAST_SHARED, LEAST_SAVED, LEAST_SAVED_FRACTION = 32, 96, 0.125


class RewardedTurn(NamedTuple):
    """A turn of the model: the number of tokens it sampled, and the environment's reward for it."""

    num_tokens: int
    reward: float


@dataclass
class Trajectory:
    """One sequence of tokens, with its loss mask, rewards and scores.

    A step fills the fields in the order of their definition. A prompt is a trajectory without a completion: its num_prompt
    is its length. Fields that end in _t have one entry for each token of the loss (each True in loss_mask_T). ids, mask and
    advantages are on the host; scores of a model may be on its device.

    ids_T            prompt and completion; in a conversation also all later turns
    loss_mask_T      True for tokens of the loss; False for the first token, which no state predicts
    rollout_logps_t  log-probs under the sampling distribution; None if the tokens were not sampled
    finish           why sampling ended: "eos", "length", "turns" or "environment"; None if it was not sampled
    routing_TLk      experts chosen at each token by each of L routers, −1 where unknown; None if all are unknown
    versions         version of the weights that sampled each turn; empty if versions are not counted
    constrained      True if a grammar restricted what could be drawn: old log-probs need a forward
    num_prompt       number of tokens of ids_T before the first completion
    row              the row of the dataset it came from: columns for reward functions
    shown            further columns for reward functions: the prompt as text, a conversation
    turns            the model's turns in a conversation with an environment
    info             numbers from the environment, by metric name; a metric is the mean over trajectories
    failure          why the environment failed; empty if it did not
    others           further sequences of the same episode, where an agent rewrote its history: they share its reward
    rewards          reward function's name → its reward; `reward` is their weighted sum
    old_logps_t      log-probs under the weights before the update
    ref_logps_t      log-probs under the reference
    values_t         the critic's values before the update
    returns_t        the critic's targets
    advantages_t     the advantage of each token
    importance_t     factor of each token's policy term, π_old/π_rollout within bounds; None is 1
    entropies_t      entropies of the distributions before the update, if they choose tokens
    marked_t         True for tokens that Clip-Cov leaves out or KL-Cov holds back
    weight           the weight of each of its tokens in the loss
    """

    ids_T: torch.Tensor
    loss_mask_T: torch.Tensor
    rollout_logps_t: torch.Tensor | None = None
    finish: str | None = None
    routing_TLk: torch.Tensor | None = None
    versions: tuple[int, ...] = ()
    constrained: bool = False
    num_prompt: int = 0
    row: Row = field(default_factory=dict)
    shown: Row = field(default_factory=dict)
    turns: list[RewardedTurn] = field(default_factory=list)
    info: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    others: list["Trajectory"] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0
    old_logps_t: torch.Tensor | None = None
    ref_logps_t: torch.Tensor | None = None
    values_t: torch.Tensor | None = None
    returns_t: torch.Tensor | None = None
    advantages_t: torch.Tensor | None = None
    importance_t: torch.Tensor | None = None
    entropies_t: torch.Tensor | None = None
    marked_t: torch.Tensor | None = None
    weight: float = 1.0

    def __len__(self) -> int:
        return self.ids_T.size(0)  # ten times faster than len(), and called several times a step for every trajectory

    @property
    def prompt_ids(self) -> torch.Tensor:
        return self.ids_T[: self.num_prompt]

    @property
    def completion_ids(self) -> torch.Tensor:
        """All tokens after the prompt, including those of a conversation that the model did not sample."""
        return self.ids_T[self.num_prompt :]

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask_T.sum()) if self.rollout_logps_t is None else self.rollout_logps_t.size(0)

    @classmethod
    def of_prompt(cls, ids: Array, **known: Any) -> "Trajectory":
        """Return a prompt as a trajectory without a completion."""
        prompt = as_ids(ids, "prompt_ids")
        return cls(prompt, torch.zeros(len(prompt), dtype=torch.bool), num_prompt=len(prompt), **known)

    @classmethod
    def of(cls, prompt_ids: object, completion_ids: object, counts: object = None, **known: Any) -> "Trajectory":
        """Return prompt and completion. `counts` is the loss mask of the completion's tokens; None is all of them."""
        prompt, completion = as_ids(prompt_ids, "prompt_ids"), as_ids(completion_ids, "completion_ids")
        ids_T = torch.cat([prompt, completion])
        if not len(ids_T):
            raise ValueError("a trajectory must hold at least one token, found an empty prompt and an empty completion")
        loss_mask_T = torch.arange(len(ids_T)) >= max(len(prompt), 1)
        if counts is not None:
            loss_mask_T[len(prompt) :] &= torch.as_tensor(counts, dtype=torch.bool)[: len(completion)]
        return cls(ids_T, loss_mask_T, num_prompt=len(prompt), **known)


def with_others(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the trajectories, each followed by the further sequences of its episode."""
    return [part for one in trajectories for part in (one, *one.others)]


def sampled(
    prompts: Sequence[torch.Tensor], completions: Sequence[torch.Tensor], logps: Sequence[torch.Tensor]
) -> list[Trajectory]:
    """Return one trajectory for each prompt and its completion, with the completion's log-probs."""
    if not prompts:
        return []
    num_prompt = [prompt.size(0) for prompt in prompts]
    lengths = [start + completion.size(0) for start, completion in zip(num_prompt, completions, strict=True)]
    starts, lengths_S = torch.tensor(num_prompt), torch.tensor(lengths)
    ids_N = torch.cat([ids for pair in zip(prompts, completions, strict=True) for ids in pair])
    first_N = (lengths_S.cumsum(0) - lengths_S + starts).repeat_interleave(lengths_S)  # where its completion begins
    masks = (torch.arange(len(ids_N)) >= first_N).split(lengths)
    rows = zip(ids_N.split(lengths), masks, logps, num_prompt, strict=True)
    return [Trajectory(ids_T, mask_T, logps_t, num_prompt=start) for ids_T, mask_T, logps_t, start in rows]


class PaddedRows(NamedTuple):
    """A batch as right-padded rows, for models that cannot read packed ones. Padding does not change earlier tokens.

    index_N   index of each token of the batch in the S·T places of the rows
    """

    ids_ST: torch.Tensor
    mask_ST: torch.Tensor
    index_N: torch.Tensor

    def spread(self, values_N: torch.Tensor, padding: int) -> torch.Tensor:
        """Return [S·T, ..]: the batch's value of each token, and `padding` elsewhere."""
        spread = values_N.new_full((self.ids_ST.numel(), *values_N.shape[1:]), padding)
        return spread.index_copy(0, self.index_N, values_N)


class SharedPrefixes(NamedTuple):
    """The layout of a batch in which a prefix that trajectories share stands once.

    Its M tokens are first the prefixes, then what follows each of them, then the other trajectories.

    lengths   number of tokens of each prefix, and of all that follows it
    token_M   index of each token in the batch without sharing
    place_N   index of each token of that batch among the M
    alone     the batch without sharing
    """

    lengths: list[tuple[int, int]]
    token_M: torch.Tensor
    place_N: torch.Tensor
    alone: "TokenBatch"


@dataclass
class TokenBatch:
    """N tokens of several packed trajectories. Built on the host and moved to the device once.

    positions_N     position in the trajectory, from 0
    cu_seqlens      [S + 1] boundaries of the trajectories, int32; `lengths` has their lengths on the host
    places_n        index of the token whose hidden state predicts a token of the loss: the token before it
    targets_n       ids of the tokens of the loss
    sequence_n      index of their trajectory
    old_logps_n, ref_logps_n, values_n, returns_n, advantages_n, importance_n, marked_n, weights_n
                    aligned with places_n, as in `Trajectory`; None where not needed
    routing_NLk     experts to replay, −1 where the routers choose; None: the routers choose everywhere
    groups          trajectories that share a prefix, as `shared_prefixes` returns them; empty if routing is replayed, which
                    counts every token
    prefixes        the layout if shared prefixes stand once; `lengths` are then those of its segments
    """

    ids_N: torch.Tensor
    positions_N: torch.Tensor
    cu_seqlens: torch.Tensor
    lengths: list[int]
    places_n: torch.Tensor
    targets_n: torch.Tensor
    sequence_n: torch.Tensor
    num_loss_tokens_S: list[int]
    old_logps_n: torch.Tensor | None = None
    ref_logps_n: torch.Tensor | None = None
    values_n: torch.Tensor | None = None
    returns_n: torch.Tensor | None = None
    advantages_n: torch.Tensor | None = None
    importance_n: torch.Tensor | None = None
    marked_n: torch.Tensor | None = None
    weights_n: torch.Tensor | None = None
    routing_NLk: torch.Tensor | None = None
    groups: Groups = field(default_factory=list)
    prefixes: SharedPrefixes | None = None

    @classmethod
    def of(
        cls,
        trajectories: Sequence[Trajectory],
        device: torch.device | str = "cpu",
        *,
        dtype: torch.dtype = torch.float32,
        fields: Sequence[str] = (),
        **per_trajectory: Sequence[float],
    ) -> "TokenBatch":
        """Return a batch of the trajectories in this order. Without trajectories it is one token outside the loss.

        fields           names, without _t, of trajectory fields that the batch takes if they are filled
        per_trajectory   advantages, weights: one number per trajectory for all its tokens of the loss, in `dtype`
        """
        if not trajectories:  # a process without work must still run the model with the others, on one token
            nothing = Trajectory(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool))
            numbers: dict[str, Any] = {name: [0.0] for name in (*fields, *per_trajectory)}
            return replace(cls.of([nothing], device, dtype=dtype, **numbers), num_loss_tokens_S=[])
        lengths = [len(one) for one in trajectories]
        ids_N = torch.cat([one.ids_T for one in trajectories])
        counts_N = torch.cat([one.loss_mask_T for one in trajectories])
        ends_S = torch.tensor(lengths).cumsum(0)
        cu_seqlens = torch.cat([ends_S.new_zeros(1), ends_S])
        counts_N[cu_seqlens[:-1]] = False  # nothing predicts the first token of a sequence
        sequence_N = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        positions_N = torch.arange(len(ids_N)) - cu_seqlens[sequence_N]
        counted_n = counts_N.nonzero()[:, 0]
        sequence_n = sequence_N[counted_n]
        batch = cls(
            ids_N, positions_N, cu_seqlens.int(), lengths, counted_n - 1, ids_N[counted_n], sequence_n,
            torch.bincount(sequence_n, minlength=len(lengths)).tolist(),
        )  # fmt: skip
        for name, values in per_trajectory.items():
            setattr(batch, f"{name}_n", torch.as_tensor(values, dtype=dtype)[sequence_n])
        routing = [one.routing_TLk for one in trajectories if one.routing_TLk is not None]
        batch.groups = [] if routing else shared_prefixes(trajectories)
        if routing:
            if [len(one) for one in routing] != lengths:
                found = f"found {[len(one) for one in routing]} of {lengths} tokens"
                raise ValueError(f"routing must have one entry a token, in all trajectories or in none, {found}")
            batch.routing_NLk = torch.cat(routing)
        scored: dict[str, Any] = {}  # these are on the device already
        for name in fields:
            rows = [getattr(one, f"{name}_t") for one in trajectories]
            if rows[0] is not None:
                values_n = torch.cat(rows) if name != "advantages" else torch.cat(rows).to(dtype)
                if values_n.device.type == "cpu":
                    setattr(batch, f"{name}_n", values_n)
                else:
                    scored[f"{name}_n"] = values_n
        return replace(batch.to(device), **scored) if scored else batch.to(device)

    def __len__(self) -> int:
        """Return the number of trajectories."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.ids_N)

    @property
    def num_loss_tokens(self) -> int:
        return len(self.places_n)

    @property
    def device(self) -> torch.device:
        return self.ids_N.device

    def to(self, device: torch.device | str) -> "TokenBatch":
        """Return the batch on the device, moved by two asynchronous transfers, and one more for routing."""
        device = torch.device(device)
        if device.type == self.device.type and device.index in (None, self.device.index):
            return self
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        routing_NLk = tensors.pop("routing_NLk", None)
        moved: dict[str, Any] = {}
        for is_float in (False, True):
            some = {name: t for name, t in tensors.items() if t.is_floating_point() == is_float}
            if some:
                together = on_device(torch.cat([t.long() if not is_float else t for t in some.values()]), device)
                moved |= zip(some, together.split([len(t) for t in some.values()]), strict=True)
        moved["cu_seqlens"] = moved["cu_seqlens"].int()
        if routing_NLk is not None:
            moved["routing_NLk"] = on_device(routing_NLk, device)
        return replace(self, **moved)

    def padded(self, pad_id: int) -> PaddedRows:
        """Return the same tokens as right-padded rows."""
        longest = max(self.lengths)
        starts = torch.arange(0, len(self) * longest, longest).repeat_interleave(torch.tensor(self.lengths))
        index_N = on_device(starts, self.device) + self.positions_N
        ids_ST = self.ids_N.new_full((len(self) * longest,), pad_id).index_copy(0, index_N, self.ids_N)
        mask_ST = torch.zeros_like(ids_ST, dtype=torch.bool).index_fill(0, index_N, True)
        return PaddedRows(ids_ST.view(len(self), longest), mask_ST.view(len(self), longest), index_N)

    def only(self, sequences: Sequence[int]) -> tuple["TokenBatch", torch.Tensor]:
        """Return a batch of these trajectories for a forward, without fields of the loss, and the indices of their
        tokens among the n."""
        starts, firsts = ([0, *accumulate(sizes)] for sizes in (self.lengths, self.num_loss_tokens_S))
        lengths, counts = [self.lengths[s] for s in sequences], [self.num_loss_tokens_S[s] for s in sequences]
        tokens_M = torch.cat([torch.arange(starts[s], starts[s + 1]) for s in sequences])
        theirs_m = torch.cat([torch.arange(firsts[s], firsts[s + 1]) for s in sequences])
        ends = [0, *accumulate(lengths)]
        shifts = torch.tensor([new - starts[s] for new, s in zip(ends, sequences, strict=False)])
        sequence_m = torch.arange(len(sequences)).repeat_interleave(torch.tensor(counts))
        moved = on_device(torch.cat([tokens_M, theirs_m, shifts[sequence_m], sequence_m]), self.device)
        tokens_M, theirs_m, shifts_m, sequence_m = moved.split([len(tokens_M), *[len(theirs_m)] * 3])
        batch = TokenBatch(
            self.ids_N[tokens_M], self.positions_N[tokens_M], on_device(torch.tensor(ends, dtype=torch.int32), self.device),
            lengths, self.places_n[theirs_m] + shifts_m, self.targets_n[theirs_m], sequence_m, counts,
            routing_NLk=None if self.routing_NLk is None else self.routing_NLk[tokens_M],
            groups=_of_these(self.groups, sequences),
        )  # fmt: skip
        return batch, theirs_m

    def with_prefixes(self, groups: Groups) -> "TokenBatch":
        """Return a batch for a forward in which the prefix of each group of trajectories stands once."""
        starts, in_group = [0, *accumulate(self.lengths)], {i for _, rows in groups for i in rows}
        later = [sorted(rows, key=lambda i: self.lengths[i]) for _, rows in groups]  # those of one length together
        segments = [(starts[rows[0]], length) for length, rows in groups]  # first token of each, and number of tokens
        segments += [
            (starts[i] + length, self.lengths[i] - length)
            for (length, _), rows in zip(groups, later, strict=True)
            for i in rows
        ]
        segments += [(starts[i], self.lengths[i]) for i in range(len(self)) if i not in in_group]
        ends = [0, *accumulate(length for _, length in segments)]
        token_M, M = _spans(segments), np.arange(ends[-1])
        place_N = np.empty(self.num_tokens, dtype=np.int64)
        place_N[token_M] = M
        for first, (length, rows) in zip(ends, groups, strict=False):
            for i in rows:
                place_N[starts[i] : starts[i] + length] = M[first : first + length]
        indices = on_device(torch.from_numpy(np.concatenate([token_M, place_N, ends])), self.device)
        token_M, place_N, cu_seqlens = indices.split([len(M), len(place_N), len(ends)])
        sums = [(n, sum(self.lengths[i] - n for i in rows)) for n, rows in groups]
        return replace(
            self, ids_N=self.ids_N[token_M], positions_N=self.positions_N[token_M], cu_seqlens=cu_seqlens.int(),
            lengths=[length for _, length in segments], places_n=place_N[self.places_n],
            prefixes=SharedPrefixes(sums, token_M, place_N, self),
        )  # fmt: skip

    def sums(self, values_n: torch.Tensor) -> torch.Tensor:
        """Return [S]: the sum over each trajectory's tokens of the loss."""
        return values_n.new_zeros(len(self.num_loss_tokens_S)).index_add(0, self.sequence_n, values_n)

    def split(self, values_n: torch.Tensor) -> list[torch.Tensor]:
        """Return the values of each trajectory."""
        return list(values_n.split(self.num_loss_tokens_S))


def _spans(segments: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the indices start, start + 1, … of each (start, length), one segment after the other."""
    starts, lengths = np.array(segments, dtype=np.int64).T
    return np.arange(lengths.sum()) + (starts - lengths.cumsum() + lengths).repeat(lengths)


def shared_prefixes(trajectories: Sequence[Trajectory]) -> Groups:
    """Return groups of trajectories that begin with the same tokens; no groups if too few tokens would be saved.

    Groups are joined while this saves more tokens. Every trajectory keeps at least one token of its own.
    """
    rows = [one.ids_T.numpy() for one in trajectories]
    alike: dict[bytes, list[int]] = {}
    for i, row in enumerate(rows):
        if len(row) > LEAST_SHARED:
            alike.setdefault(row[:LEAST_SHARED].tobytes(), []).append(i)
    found = []
    for some in alike.values():
        # big-endian bytes are sorted as the ids are: rows that share most are neighbours
        order = sorted(some, key=lambda i: rows[i].astype(">i8").tobytes())
        group_of = {i: (len(rows[i]), [i]) for i in order}
        pairs = sorted(((num_equal(rows[i], rows[j]), i, j) for i, j in pairwise(order)), reverse=True)
        for num, i, j in pairs:
            (most, ours), (others_most, theirs) = group_of[i], group_of[j]
            both = ours + theirs
            if num * (len(both) - 1) > most * (len(ours) - 1) + others_most * (len(theirs) - 1):
                group_of.update(dict.fromkeys(both, (num, both)))
        found += [group for i, group in group_of.items() if len(group[1]) > 1 and group[1][0] == i]
    num_saved = sum(num * (len(group) - 1) for num, group in found)
    return found if num_saved >= max(LEAST_SAVED, LEAST_SAVED_FRACTION * sum(map(len, rows))) else []


def _of_these(groups: Groups, sequences: Sequence[int]) -> Groups:
    """Return the groups among these trajectories."""
    place = {s: i for i, s in enumerate(sequences)}
    found = [(length, [place[s] for s in rows if s in place]) for length, rows in groups]
    return [(length, rows) for length, rows in found if len(rows) > 1]


def num_equal(one: np.ndarray, other: np.ndarray) -> int:
    """Return how many tokens two rows begin with in common, at most all but the last of each."""
    num = min(len(one), len(other)) - 1
    differs = one[:num] != other[:num]
    return int(differs.argmax()) if differs.any() else num


def joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows concatenated; an empty tensor if there are none."""
    return torch.cat(list(rows)) if rows else torch.zeros(0)


def on_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return `tensor.to(device)`, copied asynchronously through pinned memory: a plain copy waits for the GPU."""
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def as_ids(ids: object, name: str) -> torch.Tensor:
    """Return token ids (a tensor, an array or a list) as 1-D int64 on the CPU."""
    if isinstance(ids, torch.Tensor) and ids.dtype == torch.int64 and ids.ndim == 1 and ids.device.type == "cpu":
        return ids  # fast path: ids of a rollout, many times a step
    try:
        tensor = ids.detach() if isinstance(ids, torch.Tensor) else torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError):  # text, None, rows of unequal lengths
        raise TypeError(f"{name} must hold token ids, found {ids!r:.60}") from None
    if tensor.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, found shape {list(tensor.shape)}")
    if tensor.numel() and (tensor.is_floating_point() or tensor.dtype == torch.bool):  # an empty list is a float tensor
        raise TypeError(f"{name} must hold integers, found {tensor.dtype}")
    return tensor.to("cpu", torch.int64)


# ---- micro-batches: parts under a budget of tokens, so that memory is bounded; the result does not depend on them ----


def split(
    items: Sequence[Item], lengths: Sequence[int], size: int = 0, num_tokens: int = 0, *, padded: bool = False,
    groups: Groups = (),
) -> list[list[Item]]:  # fmt: skip
    """Return the items in parts of at most `size` items and `num_tokens` tokens; 0 is no limit.

    lengths   number of tokens of each item
    padded    rows are padded to the longest: a part of n items has n · (its longest) tokens
    groups    of items that share a prefix, as `shared_prefixes` returns them: they stay together where they fit

    Items that fit together stay in one part, in their order. An item above the limit is a part of its own.
    """
    if groups:
        return _of_groups(items, lengths, size, num_tokens, groups)
    size = size or len(items)
    whole = len(items) * max(lengths, default=0) if padded else sum(lengths)
    if not items or (len(items) <= size and (not num_tokens or whole <= num_tokens)):
        return [list(items)] if items else []
    if padded or not num_tokens:
        parts = _of_like_lengths(lengths, size, num_tokens)
    else:
        bins = pack_sequences(list(lengths), max(num_tokens, *lengths))
        # make parts as even as possible, because the largest part determines the memory
        even = pack_sequences(list(lengths), max(-(-whole // len(bins)), *lengths))
        bins = even if len(even) == len(bins) else bins
        parts = [found[i : i + size] for found in bins for i in range(0, len(found), size)]
    return [[items[i] for i in part] for part in parts]


def _of_groups(
    items: Sequence[Item], lengths: Sequence[int], size: int, num_tokens: int, groups: Groups
) -> list[list[Item]]:
    """Return the parts if the prefix of a group counts once in each part. A group that is too large is cut."""
    units, num_read = [], []  # groups, their parts and single items, and the tokens that each of them has
    in_group = {i for _, rows in groups for i in rows}
    for prefix, rows in [*groups, *((0, [i]) for i in range(len(items)) if i not in in_group)]:
        own = [lengths[i] - prefix for i in rows]
        for part in split(range(len(rows)), own, size, num_tokens and max(num_tokens - prefix, 1)):
            units.append([rows[i] for i in part])
            num_read.append(prefix + sum(own[i] for i in part))
    parts = [[items[i] for unit in part for i in unit] for part in split(units, num_read, 0, num_tokens)]
    return [part[i : i + (size or len(part))] for part in parts for i in range(0, len(part), size or len(part))]


def _of_like_lengths(lengths: Sequence[int], size: int, num_tokens: int) -> list[list[int]]:
    """Return parts of similar lengths, the longest first: this needs little padding, and out-of-memory shows at once."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    parts = _cut(order, lengths, size, num_tokens)
    if num_tokens:  # make parts as even as possible, because the largest part determines the memory
        with_padding = sum(len(part) * lengths[part[0]] for part in parts)
        even = _cut(order, lengths, size, -(-with_padding // len(parts)))
        parts = even if len(even) == len(parts) else parts
    return parts


def _cut(order: Sequence[int], lengths: Sequence[int], size: int, num_tokens: int) -> list[list[int]]:
    """Return an order of falling lengths cut into parts. The first item of each part is its longest."""
    parts, start = [], 0
    while start < len(order):
        fitting = num_tokens // max(lengths[order[start]], 1) if num_tokens else size
        parts.append(list(order[start : start + max(1, min(size, fitting))]))
        start += len(parts[-1])
    return parts
