"""What a run remembers: where it stands, what it measured, how long each phase took.

A metric that several processes make up is a sum and a count until all have added theirs: `Mean`, `Sum`, `Largest`, `told`.
"""

import contextlib
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from strop._tensors import on_host
from strop._types import Json, State
from strop.distributed import World, world


@dataclass
class TrainState:
    """Where a run stands; all of it goes into a checkpoint.

    step          training steps done
    updates       optimiser steps done, of which a training step may have several
    epoch         passes over the dataset completed
    position      rows of the present epoch already used
    num_rows      of the dataset, whose order position and epoch refer to
    first_step    the step this run of train() began at, where the schedule begins
    total_steps   the step at which it ends, with the schedule; 0 if unknown
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


# the metrics that `history` shows by itself
SHOWN = ("loss", "reward/mean", "preference/accuracy", "kl", "eval/loss", "eval/accuracy", "eval/reward/mean")


@dataclass(repr=False)
class History:
    """What `train` returns. `steps` and `evaluations` hold the metrics, each with its "step"."""

    steps: list[Json] = field(default_factory=list)
    evaluations: list[Json] = field(default_factory=list)
    interrupted: bool = False
    signal: int | None = None
    stop_reason: str | None = None
    checkpoint: str | None = None

    def values(self, metric: str) -> list[float]:
        """One metric over the steps that have it."""
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
        """Draw these metrics by step, those of SHOWN if none is named, and return matplotlib's figure."""
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


class Phases:
    """Seconds by name of phase; a phase within another counts for the inner one only.

    On a GPU they are read off the GPU's own course, by events in its stream, and nothing is waited for: a phase lasts
    from the end of the GPU's work before it to the end of its own. Of what the host does meanwhile a phase has only
    the part that keeps the GPU idle, so that here too the phases add up to the step.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.failed: str | None = None  # the innermost phase an error came from
        self.num_tokens = 0  # that the step has read
        self.wanted_norm: torch.Tensor | None = None  # of a gradient that must not be 0
        self.num_draws = 0  # how often the model drew its dropout
        self.unfit: list[torch.Tensor] = []  # of its updates: 1 from the one on whose numbers are not finite
        self._gpu = device if device is not None and device.type == "cuda" else None
        self._spans: list[tuple[str, str | None, Any, Any]] = []  # name, the phase around it, begin, end
        self._open: list[str] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        around = self._open[-1] if self._open else None
        self._open.append(name)
        begin = self._mark()
        try:
            yield
        except BaseException:
            self.failed = self.failed or name
            raise
        finally:
            self._open.pop()
            self._spans.append((name, around, begin, self._mark()))

    @property
    def now(self) -> str:
        """The innermost phase that is going on; nothing between them."""
        return self._open[-1] if self._open else ""

    @property
    def seconds(self) -> dict[str, float]:
        """By name. Waits for the GPU."""
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)
        found: dict[str, float] = {}
        for name, around, begin, end in self._spans:
            taken = end - begin if self._gpu is None else begin.elapsed_time(end) / 1e3
            found[name] = found.get(name, 0.0) + taken
            if around is not None:
                found[around] = found.get(around, 0.0) - taken
        return found

    def metrics(self) -> dict[str, float]:
        """time/<name> of every phase, and on a GPU the most memory so far."""
        found = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        return found if self._gpu is None else found | {"memory": float(torch.cuda.max_memory_allocated(self._gpu))}

    def note_unfit(self, value: torch.Tensor) -> torch.Tensor:
        """1 if this value, or one before it in this step, is not finite, else 0; the device is not waited for."""
        unfit = (~value.isfinite()).float()
        self.unfit.append(torch.maximum(self.unfit[-1], unfit) if self.unfit else unfit)
        return self.unfit[-1]

    def anew(self) -> "Phases":
        """For the next step, on the same device."""
        return Phases(self._gpu)

    def _mark(self) -> float | torch.cuda.Event:
        if self._gpu is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._gpu))
        return event


def not_finite(found: "Metrics", step: int) -> FloatingPointError:
    return FloatingPointError(
        f"loss {found.get('loss')} and gradient norm {found.get('grad_norm')} must be finite; the weights are those of "
        f"step {step}, before this update"
    )


def no_gradient(step: int) -> RuntimeError:
    """Return the error of an update that cannot change anything although it should."""
    return RuntimeError(
        "the gradient must not be exactly 0 for all parameters while an advantage is not 0: the model's forward may run "
        "without gradients (no_grad, detach), or give every token it sampled the probability 1; the weights are those of "
        f"step {step}, before this update"
    )


# ---- metrics of several processes ----

Metrics: TypeAlias = Json  # by name: numbers, tensors, and the kinds below, which `told` makes numbers of


class Mean(NamedTuple):
    """Σ total / Σ number over the processes; left out where the number is 0."""

    total: Any
    number: float


class Sum(NamedTuple):
    value: Any


class Largest(NamedTuple):
    value: Any


KINDS = (Mean, Sum, Largest)


def told(
    metrics: Mapping[str, object], extra: list[torch.Tensor], world: World
) -> tuple[dict[str, float], list[float]]:
    """The metrics of all processes as numbers, and the host's copy of `extra`, in one wait for the device.

    A plain number or tensor is the same in every process already, or what counts where no process has a Mean.
    """
    flat = {(name, i): value for name, metric in metrics.items() for i, value in enumerate(_values(metric))}
    tensors = {key: value for key, value in flat.items() if isinstance(value, torch.Tensor)}
    values = on_host([*tensors.values(), *extra])
    flat |= zip(tensors, values, strict=False)
    here = {
        name: type(metric)(*(flat[name, i] for i in range(len(metric)))) if isinstance(metric, KINDS) else flat[name, 0]
        for name, metric in metrics.items()
    }
    everywhere = world.gathered(here) if world.size > 1 else [here]
    names = dict.fromkeys(name for one in everywhere for name in one)
    found = {name: _combined([one[name] for one in everywhere if name in one]) for name in names}
    return {name: value for name, value in found.items() if value is not None}, values[len(tensors) :]


def _values(metric: object) -> tuple[Any, ...]:
    return metric if isinstance(metric, KINDS) else (metric,)


def _combined(parts: list[Any]) -> Any:
    parts = [part for part in parts if isinstance(part, KINDS)] or parts
    if isinstance(parts[0], Largest):
        return max(part.value for part in parts)
    if isinstance(parts[0], Sum):
        return sum(part.value for part in parts)
    if not isinstance(parts[0], Mean):
        return parts[0]
    number = sum(part.number for part in parts)
    return sum(part.total for part in parts) / number if number else None


# ---- random numbers ----


def seed_everything(seed: int, rank: int = 0) -> None:
    """torch's generators, CUDA's too, differ from process to process, as the rows do that dropout falls on."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed + rank)


def get_rng() -> State:
    """The states of Python's, NumPy's, torch's and CUDA's global generators: tensors, and JSON values."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.asarray(keys, np.int64))}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states = [torch.cuda.get_rng_state()] if world().launched else torch.cuda.get_rng_state_all()
        tensors |= {f"cuda/{i}": state for i, state in enumerate(states)}
    values = {"python": [version, list(words), gauss], "numpy": [name, int(position), int(has_gauss), float(cached)]}
    return tensors, values


def check_rng(tensors: dict[str, torch.Tensor], values: Json) -> None:
    """Raise a ValueError if `set_rng` would not take these states; `values` fit the table of `checkpoint_header`."""
    cuda = {f"cuda/{i}" for i in range(len(tensors))}
    if not {"torch", "numpy"} <= tensors.keys() <= {"torch", "numpy"} | cuda:
        raise ValueError(f"rng must hold the states of torch, numpy and cuda/0 …, found {sorted(tensors)!r:.80}")
    keys = tensors["numpy"]
    if keys.dtype != torch.int64 or keys.shape != (624,) or not ((keys >= 0) & (keys < 2**32)).all():
        raise ValueError(f"rng/numpy must hold 624 words of 32 bits, found {list(keys.shape)} {keys.dtype}")
    for name in tensors.keys() & cuda:
        if tensors[name].dtype != torch.uint8 or tensors[name].ndim != 1:
            raise ValueError(f"rng/{name} must be bytes, found {list(tensors[name].shape)} {tensors[name].dtype}")
    try:
        torch.Generator().set_state(tensors["torch"])
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"rng/torch must be a state of torch's generator: {str(error).splitlines()[0]}") from None


def set_rng(tensors: dict[str, torch.Tensor], values: Json) -> None:
    """Put the global generators into the states `get_rng` gave."""
    version, words, gauss = values["python"]
    random.setstate((version, tuple(words), gauss))
    name, position, has_gauss, cached = values["numpy"]
    np.random.set_state((name, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    states = [tensors[f"cuda/{i}"] for i in range(len(tensors)) if f"cuda/{i}" in tensors]
    if states and torch.cuda.is_available() and world().launched:
        torch.cuda.set_rng_state(states[0])
    elif states and torch.cuda.device_count() == len(states):
        torch.cuda.set_rng_state_all(states)


@contextlib.contextmanager
def rng_kept() -> Iterator[None]:
    """What happens within leaves the global generators as they were."""
    tensors, values = get_rng()
    try:
        yield
    finally:
        set_rng(tensors, values)
