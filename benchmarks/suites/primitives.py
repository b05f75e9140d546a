"""CPU primitives: strop against NumPy, the torch code TRL uses, and rlox where installed.

Same dtype and same work on both sides, sums included. Two things to know when reading the rlox column: its advantages exist
in float64 only, so in float32 rows it is given a float64 copy made beforehand (labelled); and its k3 has the arguments
exchanged (see strop.primitives.kl), so it is called with them exchanged and all contenders return the same numbers.
"""

import importlib
import importlib.util
import warnings
from types import ModuleType
from typing import Any

import numpy as np

import strop
from benchmarks.harness import Case, Contender

ADVANTAGE_SHAPES = [(16, 4), (64, 8), (256, 16), (1024, 32)]
GAE_SHAPES = [(32, 128), (64, 512), (256, 1024)]
KL_SHAPES = [(1, 128), (1, 512), (1, 2048), (1, 8192), (32, 128), (32, 512), (32, 2048)]
DTYPES = [np.float64, np.float32]


def _optional(name: str) -> ModuleType | None:
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.import_module(name)
    except ImportError as error:
        warnings.warn(
            f"{name} is installed but does not import, so it is left out: {error}", RuntimeWarning, stacklevel=2
        )
        return None


def cases() -> list[Case]:
    torch, rlox = _optional("torch"), _optional("rlox")
    rng = np.random.default_rng(0)
    found = [_advantages(torch, rlox, rng, dtype, shape) for dtype in DTYPES for shape in ADVANTAGE_SHAPES]
    for estimator in ("k3", "token"):
        found += [_kl(torch, rlox, rng, estimator, dtype, shape) for dtype in DTYPES for shape in KL_SHAPES]
    found += [_gae(torch, rng, dtype, shape) for dtype in DTYPES for shape in GAE_SHAPES]
    return found + _packing(rlox, rng)


def advantages_numpy(rewards: np.ndarray, group_size: int) -> np.ndarray:
    grouped = rewards.reshape(-1, group_size)
    return ((grouped - grouped.mean(1, keepdims=True)) / grouped.std(1, keepdims=True)).ravel()


def advantages_torch(rewards: Any, group_size: int) -> Any:
    """Mean and std of each group, repeated to the rewards' shape: TRL's convention (ddof=1, eps=1e-4)."""
    grouped = rewards.view(-1, group_size)
    mean = grouped.mean(dim=1).repeat_interleave(group_size, dim=0)
    std = grouped.std(dim=1).repeat_interleave(group_size, dim=0)
    return (rewards - mean) / (std + 1e-4)


def _advantages(torch: Any, rlox: Any, rng: np.random.Generator, dtype: type, shape: tuple[int, int]) -> Case:
    groups, size = shape
    rewards: np.ndarray = rng.standard_normal(groups * size).astype(dtype)
    plain = advantages_numpy(rewards.astype(np.float64), size)
    contenders = [
        Contender(name="strop", function=strop.compute_batch_group_advantages, args=(rewards, size), expected=plain),
        Contender(name="numpy", function=advantages_numpy, args=(rewards, size), expected=plain),
    ]
    if torch:
        as_trl = advantages_torch(torch.from_numpy(rewards.astype(np.float64)), size)
        contenders.append(
            Contender(name="torch", function=advantages_torch, args=(torch.from_numpy(rewards), size), expected=as_trl)
        )
    if rlox:
        contenders.append(
            Contender(
                name="rlox",
                function=rlox.compute_batch_group_advantages,
                args=(rewards.astype(np.float64), size),
                expected=plain,
            )
        )
    labels = {"primitive": "advantages", "shape": f"{groups}×{size}", "dtype": np.dtype(dtype).name}
    if rlox and dtype is np.float32:
        labels["note"] = "rlox: float64"
    return Case(work=f"advantages {groups}×{size}", labels=labels, contenders=contenders)


def k3_numpy(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    d = q - p
    return (np.exp(d) - d - 1).sum(-1)


def token_numpy(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return (np.exp(p) * (p - q)).sum(-1)


def k3_torch(torch: Any, p: Any, q: Any) -> Any:
    """As TRL writes it: the difference is taken twice."""
    return (torch.exp(q - p) - (q - p) - 1).sum(-1)


def token_torch(torch: Any, p: Any, q: Any) -> Any:
    return (torch.exp(p) * (p - q)).sum(-1)


def _kl(torch: Any, rlox: Any, rng: np.random.Generator, estimator: str, dtype: type, shape: tuple[int, int]) -> Case:
    """Log-probs of a policy a little way from its reference."""
    rows, length = shape
    p: np.ndarray = rng.uniform(-6, 0, shape).astype(dtype)
    q: np.ndarray = (p + 0.2 * rng.standard_normal(shape)).astype(dtype)
    k3 = estimator == "k3"
    ours = strop.compute_batch_token_kl_schulman if k3 else strop.compute_batch_token_kl
    expected = (k3_numpy if k3 else token_numpy)(p.astype(np.float64), q.astype(np.float64))
    contenders = [
        Contender(name="strop", function=ours, args=(p, q), expected=expected),
        Contender(
            name="numpy", function=k3_numpy if k3 else token_numpy, args=(p, q), expected=expected, tolerance=1e-3
        ),
    ]
    if torch:
        function = k3_torch if k3 else token_torch
        tensors = (torch, torch.from_numpy(p), torch.from_numpy(q))
        contenders.append(Contender(name="torch", function=function, args=tensors, expected=expected, tolerance=1e-3))
    if rlox:
        name = "compute_batch_token_kl_schulman" if k3 else "compute_batch_token_kl"
        function = getattr(rlox, name if dtype is np.float64 else f"{name}_f32")
        a, b = (q, p) if k3 else (p, q)
        args = (a.ravel(), b.ravel(), length)
        contenders.append(Contender(name="rlox", function=function, args=args, expected=expected, tolerance=1e-3))
    labels = {"primitive": f"{estimator} KL", "shape": f"{rows}×{length}", "dtype": np.dtype(dtype).name}
    return Case(work=f"{estimator} KL {rows}×{length}", labels=labels, contenders=contenders)


def gae_torch(torch: Any, rewards: Any, values: Any, mask: Any) -> Any:
    """The loop over tokens, all sequences at once; γ = 1 and λ = 0.95, masked tokens left out."""
    found = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        counts = mask[:, t]
        advantage = rewards[:, t] + next_value - values[:, t] + 0.95 * next_advantage
        found[:, t] = torch.where(counts, advantage, 0.0)
        next_advantage = torch.where(counts, advantage, next_advantage)
        next_value = torch.where(counts, values[:, t], next_value)
    return found


def gae_strop(rewards: np.ndarray, values: np.ndarray, mask: np.ndarray) -> Any:
    return strop.compute_gae(rewards, values, mask=mask)


def _gae(torch: Any, rng: np.random.Generator, dtype: type, shape: tuple[int, int]) -> Case:
    """Of completions of different lengths."""
    from strop.primitives.gae import _gae_numpy as twin

    rewards: np.ndarray = rng.standard_normal(shape).astype(dtype)
    values: np.ndarray = rng.standard_normal(shape).astype(dtype)
    mask = np.arange(shape[1]) < rng.integers(1, shape[1] + 1, (shape[0], 1))
    expected = twin(rewards, values, 1.0, 0.95, mask)
    contenders = [
        Contender(name="strop", function=gae_strop, args=(rewards, values, mask), expected=expected),
        Contender(name="numpy", function=twin, args=(rewards, values, 1.0, 0.95, mask), expected=expected),
    ]
    if torch:
        tensors = (torch, *map(torch.from_numpy, (rewards, values, mask)))
        contenders.append(Contender(name="torch", function=gae_torch, args=tensors, expected=expected, tolerance=1e-3))
    labels = {"primitive": "GAE", "shape": f"{shape[0]}×{shape[1]}", "dtype": np.dtype(dtype).name}
    return Case(work=f"GAE {shape[0]}×{shape[1]}", labels=labels, contenders=contenders)


def pack_and_collate(sequences: list[np.ndarray], max_length: int) -> dict[str, Any]:
    return strop.collate_packed(sequences, strop.pack_sequences(sequences, max_length), pad_to=max_length)


def _packing(rlox: Any, rng: np.random.Generator) -> list[Case]:
    from strop.primitives.packing import _first_fit_decreasing as twin

    many, lengths = rng.integers(1, 2049, 1_000_000), rng.integers(1, 2049, 20_000)
    ours = strop.pack_sequences
    found = [
        Case(
            work="pack 20,000 lengths",
            labels={
                "primitive": "packing",
                "shape": "20,000 lengths",
                "dtype": "int64",
                "note": "numpy: strop's own twin",
            },
            contenders=[
                Contender(name="strop", function=ours, args=(lengths, 4096), expected=twin(lengths, 4096)),
                Contender(name="numpy", function=twin, args=(lengths, 4096)),
            ],
        ),
        Case(
            work="pack 1,000,000 lengths",
            labels={"primitive": "packing", "shape": "1,000,000 lengths", "dtype": "int64"},
            contenders=[Contender(name="strop", function=ours, args=(many, 4096))],
        ),
    ]
    sequences = [rng.integers(0, 50_000, n) for n in rng.integers(16, 513, 1000)]
    contenders = [Contender(name="strop", function=pack_and_collate, args=(sequences, 2048))]
    if rlox:
        words = [s.astype(np.uint32) for s in sequences]
        contenders.append(Contender(name="rlox", function=rlox.pack_sequences, args=(words, 2048)))
    labels = {
        "primitive": "packing",
        "shape": "1,000 sequences, collated",
        "dtype": "int64",
        "note": "rlox: other layout",
    }
    return [*found, Case(work="pack and collate 1,000 sequences", labels=labels, contenders=contenders)]
