"""The state of a run: its position, its measured metrics, and the states of its random generators."""

import contextlib
import functools
import json
import math
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from strop import _compiled
from strop._types import Json, State
from strop.data.formats import PreparedRows
from strop.distributed import world
from strop.user_code import load_function


@dataclass
class TrainState:
    """The position of a run in its steps and data; all of it is written to checkpoints.

    step          training steps done
    updates       optimiser steps done; a training step may have several
    epoch         passes over the dataset completed
    position      rows of the current epoch already used
    num_rows      number of rows in the dataset
    first_step    step at which this train() and its learning-rate schedule began
    total_steps   step at which train() and the schedule end; 0 if unknown
    seconds       time spent training, over all resumptions
    """

    step: int = 0
    updates: int = 0
    epoch: int = 0
    position: int = 0
    num_rows: int = 0
    first_step: int = 0
    total_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    def to_dict(self) -> Json:
        return asdict(self)


# the metrics that a History shows by default
SHOWN = ("loss", "reward/mean", "preference/accuracy", "kl", "eval/loss", "eval/accuracy", "eval/reward/mean")


@dataclass(repr=False)
class History:
    """The result of `train`. `steps` and `evaluations` hold the metrics, each with its "step"."""

    steps: list[Json] = field(default_factory=list)
    evaluations: list[Json] = field(default_factory=list)
    interrupted: bool = False
    signal: int | None = None
    stop_reason: str | None = None
    checkpoint: str | None = None

    def values(self, metric: str) -> list[float]:
        """Return the values of a metric, from all steps and evaluations that have it."""
        return [metrics[metric] for metrics in (*self.steps, *self.evaluations) if metric in metrics]

    def __repr__(self) -> str:
        """Return one line for a notebook: how many steps, and the last metrics."""
        last = {name: value for entry in (*self.steps[-1:], *self.evaluations[-1:]) for name, value in entry.items()}
        shown = [f"{name} {last[name]:.4g}" for name in SHOWN if isinstance(last.get(name), (int, float))]
        counts = [
            f"{len(self.steps):,} steps",
            *([f"{len(self.evaluations):,} evaluations"] if self.evaluations else []),
        ]
        return f"History({', '.join([*counts, *shown, *(['interrupted'] if self.interrupted else [])])})"

    def plot(self, *metrics: str) -> Any:
        """Plot these metrics (by default those in SHOWN) against the step; return the matplotlib figure."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("history.plot() needs matplotlib: pip install matplotlib") from error
        entries = [*self.steps, *self.evaluations]
        known = list(dict.fromkeys(name for entry in entries for name in entry if name not in ("step", "time")))
        if missing := [name for name in metrics if name not in known]:
            raise ValueError(f"metrics must be some of {', '.join(known)}, found {', '.join(missing)}")
        names = list(metrics) or [name for name in SHOWN if name in known] or known[:4]
        if not names:
            raise ValueError("history must hold a step to plot, found none")
        columns = min(len(names), 3)
        rows = -(-len(names) // columns)
        figure = Figure(figsize=(4 * columns, 2.8 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flat
        for axis, name in zip(axes, names, strict=False):
            points = sorted((entry["step"], entry[name]) for entry in entries if entry.get(name) is not None)
            axis.plot(*zip(*points, strict=True), marker="o" if len(points) < 25 else None, markersize=3)
            axis.set(title=name, xlabel="step")
        for axis in axes:
            axis.set_axis_off()
        return figure


# ---- the order of rows ----


def difficulty_of(rows: PreparedRows, curriculum: str | None) -> list[float] | None:
    """Return the difficulty of each row: a column, or what a function file.py:function returns for the row."""
    if curriculum is None:
        return None
    before = rows.before
    if before is None or getattr(before, "on_disk", False):
        raise ValueError("curriculum must be None with rows that are read in parts (stream), which have no order")
    function = load_function(curriculum, "curriculum") if ":" in curriculum else None
    found = []
    for i, row in enumerate(before):
        value = row.get(curriculum) if function is None else function(row)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(
                f"curriculum needs a number for each row, found {value!r:.60} of rows[{i}] in {curriculum!r}"
            )
        found.append(float(value))
    return found


@functools.lru_cache(maxsize=2)  # a step may ask for its epoch's and the next
def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool) -> Sequence[int]:
    """Return the order of an epoch's rows, in 8 bytes a row: Python's `random.shuffle` of their indices."""
    draw = random.Random(f"{seed}/{epoch}")
    shuffled = getattr(_compiled.native, "shuffled", None)
    if shuffle and num_rows > 1_000 and shuffled is not None:
        return memoryview(shuffled(num_rows, draw.getstate()[1])).cast("q")
    order = array("q", range(num_rows))
    if shuffle:
        draw.shuffle(order)
    return order


# ---- random numbers ----


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed all global generators. torch's seed includes the rank: each process applies dropout to other rows."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed + rank)


GLOBAL = random, np.random, torch.default_generator  # the generators a run draws from, besides CUDA's


def get_rng(generators: tuple[Any, Any, Any] = GLOBAL) -> State:
    """Return the states of Python's, NumPy's, torch's and CUDA's global generators, as tensors and JSON values."""
    python, numpy, generator = generators
    version, words, gauss = python.getstate()
    name, keys, position, has_gauss, cached = numpy.get_state()
    tensors = {"torch": generator.get_state(), "numpy": torch.from_numpy(np.asarray(keys, np.int64))}
    if generators is GLOBAL and torch.cuda.is_available() and torch.cuda.is_initialized():
        states = [torch.cuda.get_rng_state()] if world().launched else torch.cuda.get_rng_state_all()
        tensors |= {f"cuda/{i}": state for i, state in enumerate(states)}
    values = {"python": [version, list(words), gauss], "numpy": [name, int(position), int(has_gauss), float(cached)]}
    return tensors, values


def check_rng(tensors: dict[str, torch.Tensor], values: Json) -> None:
    """Raise a ValueError unless new generators accept these states and return them unchanged."""
    cuda = {f"cuda/{i}" for i in range(len(tensors))}
    if not {"torch", "numpy"} <= tensors.keys() <= {"torch", "numpy"} | cuda:
        raise ValueError(f"rng must hold the states of torch, numpy and cuda/0 …, found {sorted(tensors)!r:.80}")
    for name in tensors.keys() & cuda:
        if tensors[name].dtype != torch.uint8 or tensors[name].ndim != 1:
            raise ValueError(f"rng/{name} must be bytes, found {list(tensors[name].shape)} {tensors[name].dtype}")
    trial = random.Random(), np.random.RandomState(), torch.Generator()
    try:
        set_rng(tensors, values, trial)
        given, taken = (tensors, values), get_rng(trial)
    except Exception as error:  # any error is possible, because the values may be anything
        told = " ".join(str(error).split())
        raise ValueError(
            f"rng must hold states that the generators take: {type(error).__name__}: {told:.200}"
        ) from None
    for name, tensor in taken[0].items():
        if given[0][name].dtype != tensor.dtype or not torch.equal(given[0][name], tensor):
            raise ValueError(f"rng/{name} must be a state of {name}'s generator, found other numbers")
    if json.dumps(given[1]) != json.dumps(taken[1]) or not 0 <= taken[1]["numpy"][1] <= len(taken[0]["numpy"]):
        raise ValueError("rng.python and rng.numpy must be states of these generators, found other numbers")


def set_rng(tensors: dict[str, torch.Tensor], values: Json, generators: tuple[Any, Any, Any] = GLOBAL) -> None:
    """Set the generators to states that `get_rng` returned."""
    python, numpy, generator = generators
    version, words, gauss = values["python"]
    python.setstate((version, tuple(words), gauss))
    name, position, has_gauss, cached = values["numpy"]
    numpy.set_state((name, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    generator.set_state(tensors["torch"])
    states = [tensors[f"cuda/{i}"] for i in range(len(tensors)) if f"cuda/{i}" in tensors]
    if generators is GLOBAL and states and torch.cuda.is_available() and world().launched:
        torch.cuda.set_rng_state(states[0])
    elif generators is GLOBAL and states and torch.cuda.device_count() == len(states):
        torch.cuda.set_rng_state_all(states)


@contextlib.contextmanager
def rng_kept() -> Iterator[None]:
    """Restore the states of the global generators on exit."""
    tensors, values = get_rng()
    try:
        yield
    finally:
        set_rng(tensors, values)
