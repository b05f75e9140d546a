"""Advantages from rewards, in torch on any device: relative to a group's rewards, or per token with a critic.

    group_advantages   (r − mean) / (std + eps)                GRPO, arXiv 2402.03300; as in the primitives
    rloo_advantages    r − mean of the others in the group     RLOO, arXiv 2402.14740
    gae_advantages     Σ (γλ)^k·δ over the tokens from t on    GAE, arXiv 1506.02438; as strop.compute_gae

The arithmetic is float64, so float32 rewards give the correctly rounded float32. Equal rewards give exactly 0, and so
does a group of one. NaN or infinity among the rewards raises an error on the CPU. On a GPU, where a check would wait
for the device, the whole group becomes NaN.

Shapes: B rewards in P groups of G, padded if group sizes differ; for GAE B sequences of T tokens in chunks of C.
"""

import itertools
from collections.abc import Sequence

import torch

from strop._checks import as_count, check_choice, check_number
from strop._tensors import FLOATS, as_completion_mask, can_look, check_floats, check_like, check_tensor
from strop.config.on_policy import ADVANTAGE_SCALES

GAE_CHUNK = 64  # tokens per chunk, whose advantages are one matrix product
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def group_advantages(
    rewards: torch.Tensor,
    *,
    samples_per_prompt: int | None = None,
    group_boundaries: torch.Tensor | Sequence[int] | None = None,
    ddof: int = 0,
    eps: float = 0.0,
    scale: str = "group",
) -> torch.Tensor:
    """Return (r − mean of its group) / (std + eps), [B].

    rewards              [B], groups one after another; floats, integers or booleans
    samples_per_prompt   the size of every group, or
    group_boundaries     start and end of the groups: 0 first, B last, strictly increasing; [0, 2, 5] is rewards 0–1
                         and 2–4. A list or a CPU tensor; a CUDA tensor makes the CPU wait
    ddof, eps            0 and 0.0 follow the paper, 1 and 1e-4 follow TRL
    scale                the divisor of the centred rewards: "group" is each group's std + eps, "batch" that of all
                         rewards, "none" is 1

    returns              [B] float32 (float64 for float64), without gradient
    """
    values_B = _as_rewards(rewards)
    ddof = as_count(ddof, "ddof", 0)
    check_number(eps, "eps", 0)
    check_choice(scale, "scale", ADVANTAGE_SCALES)
    if (samples_per_prompt is None) == (group_boundaries is None):
        found = "neither" if group_boundaries is None else "both"
        raise ValueError(f"exactly one of samples_per_prompt and group_boundaries must be given, found {found}")
    sizes = (
        _equal_sizes(len(values_B), samples_per_prompt)
        if group_boundaries is None
        else _sizes_between(group_boundaries, len(values_B))
    )
    _check_ddof(ddof, sizes, scale)
    if not sizes:
        return _like_rewards(values_B, rewards)

    groups = _Groups(sizes, values_B.device)
    centred_PG = groups.centred(values_B)
    if scale == "none":
        return _like_rewards(groups.flat(centred_PG), rewards)
    if scale == "group":
        std = _std(centred_PG, groups.size_P1, ddof, dim=1)
    else:
        from_first_B = values_B - values_B[0]
        std = _std(from_first_B - from_first_B.mean(), len(values_B), ddof, dim=0)
    # equal rewards give exactly 0, even if the divisor is 0
    scaled_PG = torch.where(centred_PG == 0, centred_PG, centred_PG / (std + eps))
    return _like_rewards(groups.flat(scaled_PG), rewards)


def rloo_advantages(rewards: torch.Tensor, samples_per_prompt: int) -> torch.Tensor:
    """Return each reward minus the mean of the other rewards in its group, [B]; 0 for a group of one.

    rewards              [B], groups one after another; floats, integers or booleans
    samples_per_prompt   the size of every group
    returns              [B] float32 (float64 for float64), without gradient
    """
    values_B = _as_rewards(rewards)
    sizes = _equal_sizes(len(values_B), samples_per_prompt)
    groups = _Groups(sizes, values_B.device)
    # r − (Σ − r)/(G − 1) = (r − mean)·G/(G − 1), which is exactly 0 for equal rewards
    factor = samples_per_prompt / max(samples_per_prompt - 1, 1)
    return _like_rewards(groups.flat(groups.centred(values_B)) * factor, rewards)


@torch.no_grad()
def gae_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    completion_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the GAE advantage of each token, [B, T], as `strop.compute_gae` does, for tensors on any device.

        δ_t = r_t + γ·V_{t+1} − V_t        A_t = δ_t + γλ·A_{t+1}

    rewards, values   [B, T] the reward of each token, and the critic's value before it
    completion_mask   [B, T]; tokens with mask 0 are skipped as if absent, and have the advantage 0
    returns           [B, T] float32 (float64 for float64); advantages + values are the returns
    """
    check_floats(rewards, "rewards")
    if rewards.ndim != 2:
        raise ValueError(f"rewards must have shape [B, T], found {list(rewards.shape)}")
    check_like(values, "values", rewards, "rewards")
    for name, number in (("gamma", gamma), ("lam", lam)):
        check_number(number, name, 0, 1)
    counts_BT = torch.ones_like(rewards, dtype=torch.bool)
    if completion_mask is not None:
        counts_BT = as_completion_mask(completion_mask, rewards, "rewards")
    order_BT = counts_BT.byte().argsort(dim=1, descending=True, stable=True)  # unmasked tokens first
    r_BT, v_BT = (x.double().masked_fill(~counts_BT, 0.0).gather(1, order_BT) for x in (rewards, values))
    delta_BT = r_BT - v_BT
    delta_BT[:, :-1] += gamma * v_BT[:, 1:]
    # A_t = Σ_{s≥t} (γλ)^(s−t)·δ_s within the chunk, plus (γλ)^(C−t)·A at the start of the next chunk
    steps_C = torch.arange(GAE_CHUNK + 1, device=rewards.device)
    decay_C = torch.tensor(gamma * lam, dtype=torch.float64, device=rewards.device) ** steps_C
    apart_CC = steps_C[:-1, None] - steps_C[:-1]
    decay_CC = decay_C[apart_CC.clamp(min=0)].masked_fill(apart_CC < 0, 0.0)
    found_BT, next_B1 = torch.zeros_like(delta_BT), torch.zeros_like(delta_BT[:, :1])
    for start in reversed(range(0, delta_BT.shape[1], GAE_CHUNK)):
        part = delta_BT[:, start : start + GAE_CHUNK]
        size = part.shape[1]
        found = part @ decay_CC[:size, :size] + next_B1 * decay_C[1 : size + 1].flip(0)
        found_BT[:, start : start + size], next_B1 = found, found[:, :1]
    back_BT = torch.zeros_like(found_BT).scatter(1, order_BT, found_BT).masked_fill(~counts_BT, 0.0)
    return back_BT.to(torch.float64 if rewards.dtype == torch.float64 else torch.float32)


class _Groups:
    """Groups of known sizes as the rows of one matrix, without waiting for the device.

    place_B    the position of each reward in the flattened matrix; None if all groups have the same size
    """

    def __init__(self, sizes: list[int], device: torch.device) -> None:
        self.shape = len(sizes), max(sizes, default=1)
        self.place_B: torch.Tensor | None = None
        self.size_P1: torch.Tensor | int = self.shape[1]
        if sum(sizes) < self.shape[0] * self.shape[1]:
            starts = range(0, self.shape[0] * self.shape[1], self.shape[1])
            places = [start + i for start, size in zip(starts, sizes, strict=True) for i in range(size)]
            self.place_B = torch.tensor(places).to(device, non_blocking=True)
            self.size_P1 = torch.tensor(sizes).to(device, non_blocking=True)[:, None]

    def centred(self, values_B: torch.Tensor) -> torch.Tensor:
        """Return each reward minus its group's mean, [P, G], with 0 in the padding."""
        rows, columns = self.shape
        # subtract the first reward before the mean, so equal rewards give exactly 0 although the mean is rounded
        if self.place_B is None:
            values_PG = values_B.view(rows, columns)
            from_first_PG = values_PG - values_PG[:, :1]
            return from_first_PG - from_first_PG.mean(1, keepdim=True)
        padded_PG = values_B.new_zeros(rows * columns).index_copy(0, self.place_B, values_B).view(rows, columns)
        padding_PG = padded_PG.new_ones(rows * columns).index_fill(0, self.place_B, 0.0).view(rows, columns).bool()
        from_first_PG = (padded_PG - padded_PG[:, :1]).masked_fill(padding_PG, 0.0)
        mean_P1 = from_first_PG.sum(1, keepdim=True) / self.size_P1
        return (from_first_PG - mean_P1).masked_fill(padding_PG, 0.0)

    def flat(self, values_PG: torch.Tensor) -> torch.Tensor:
        values = values_PG.reshape(-1)
        return values if self.place_B is None else values.index_select(0, self.place_B)


def _std(centred: torch.Tensor, count: torch.Tensor | int, ddof: int, dim: int) -> torch.Tensor:
    """Return √(Σ c² / (count − ddof)), scaled so that the squares neither overflow nor underflow."""
    largest = centred.abs().amax(dim, keepdim=True)
    unit = centred / torch.where(largest > 0, largest, torch.ones_like(largest))
    # divide by at least 1: for a group of one the sum is 0 anyway
    divisor = (count - ddof).clamp(min=1) if isinstance(count, torch.Tensor) else max(count - ddof, 1)
    return largest * (unit.square().sum(dim, keepdim=True) / divisor).sqrt()


def _as_rewards(rewards: torch.Tensor) -> torch.Tensor:
    check_rewards(rewards)
    return rewards.detach().double()


def check_rewards(rewards: torch.Tensor | None) -> None:
    check_tensor(rewards, "rewards")
    assert rewards is not None
    if rewards.dtype not in FLOATS + INTEGERS:
        raise TypeError(f"rewards must be floats or integers, found {rewards.dtype}")
    if rewards.ndim != 1:
        raise ValueError(f"rewards must have shape [B], found {list(rewards.shape)}")
    if can_look(rewards) and not (finite := rewards.isfinite()).all():
        at = int((~finite).nonzero()[0])
        raise ValueError(f"rewards must be finite, found {rewards[at].item()} at index {at}")


def _like_rewards(values_B: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    return values_B if rewards.dtype == torch.float64 else values_B.float()


def check_group_size(num_rewards: int, samples_per_prompt: object) -> int:
    size = as_count(samples_per_prompt, "samples_per_prompt", 1)
    if num_rewards % size:
        raise ValueError(f"rewards must have a multiple of samples_per_prompt={size} elements, found {num_rewards}")
    return size


def _equal_sizes(num_rewards: int, samples_per_prompt: object) -> list[int]:
    size = check_group_size(num_rewards, samples_per_prompt)
    return [size] * (num_rewards // size)


def _sizes_between(group_boundaries: torch.Tensor | Sequence[int], num_rewards: int) -> list[int]:
    if isinstance(group_boundaries, torch.Tensor):
        if group_boundaries.dtype not in INTEGERS[:-1]:
            raise TypeError(f"group_boundaries must be integers, found {group_boundaries.dtype}")
        if group_boundaries.ndim != 1:
            raise ValueError(f"group_boundaries must be one-dimensional, found shape {list(group_boundaries.shape)}")
        group_boundaries = group_boundaries.tolist()
    if not isinstance(group_boundaries, Sequence) or isinstance(group_boundaries, str):
        raise TypeError(f"group_boundaries must be a tensor or a list, found {type(group_boundaries).__name__}")
    found = [as_count(boundary, f"group_boundaries[{i}]", 0) for i, boundary in enumerate(group_boundaries)]
    sizes = [end - start for start, end in itertools.pairwise(found)]
    if not found or found[0] != 0 or found[-1] != num_rewards or min(sizes, default=1) < 1:
        shown = found if len(found) <= 16 else f"[{', '.join(map(str, found[:8]))}, …, {found[-1]}]"
        raise ValueError(
            f"group_boundaries must start at 0, end at {num_rewards} and increase strictly for {num_rewards} rewards, "
            f"found {shown}"
        )
    return sizes


def _check_ddof(ddof: int, sizes: list[int], scale: str) -> None:
    if scale == "none":
        return
    # a group of one is 0 by definition
    compared = [size for size in sizes if size > 1]
    if not compared:
        return
    smallest = min(compared) if scale == "group" else sum(sizes)
    if ddof >= smallest:
        raise ValueError(f"ddof must be below the {smallest} rewards of a {scale}, found {ddof}")
