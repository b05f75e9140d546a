"""A small training loop: AdamW with gradient clipping, a warm-up + cosine schedule and a progress bar."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from strop._checks import as_count, as_number
from strop._types import Array, Json
from strop.moe.model import MoETransformer
from strop.moe.optim import AdamW, clip_scale, global_norm, warmup_cosine


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of a training step: the loss before the update, and grad_norm before clipping."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    seconds: float
    tokens_per_second: float


def next_token_batches(
    tokens: Array, *, batch_size: int, seq_len: int, seed: int = 0
) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches of random windows of one long row of ids without end: tokens (B, T), and targets shifted by one."""
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or len(tokens) <= seq_len:
        raise ValueError(f"tokens must be one row of more than seq_len={seq_len} ids, found shape {tokens.shape}")
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(tokens) - seq_len, batch_size)
        windows = tokens[starts[:, None] + np.arange(seq_len + 1)]
        yield {"tokens": windows[:, :-1], "targets": windows[:, 1:]}


def fit(
    model: MoETransformer,
    batches: Iterable[Json],
    *,
    num_steps: int,
    learning_rate: float = 3e-3,
    min_learning_rate: float = 0.0,
    warmup_steps: int = 0,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    max_grad_norm: float = 1.0,
    optimizer: AdamW | None = None,
    on_step: Callable[[StepMetrics], None] | None = None,
    progress: bool | None = None,
) -> list[StepMetrics]:
    """Train for num_steps batches and return the metrics of each step.

    batches        dicts of arguments for `loss_and_grads`: tokens, targets, and optionally mask, attention_mask
    max_grad_norm  gradients with a larger norm are scaled down to this norm; math.inf is no limit
    optimizer      an optimizer of this model to continue with, keeping its moments and settings (the learning rate
                   still comes from here); None creates one
    on_step        called after each update
    progress       a progress bar; None shows it on a terminal only
    """
    as_count(num_steps, "num_steps", 1)
    as_number(max_grad_norm, "max_grad_norm", 0, open_low=True, finite=False)
    if optimizer is not None and any(optimizer.params.get(name) is not param for name, param in model.params.items()):
        raise ValueError("optimizer must be made with the params of this model, found others")
    if optimizer is None:
        update = model.engine.adamw_update_all
        optimizer = AdamW(
            model.params, learning_rate=learning_rate, betas=betas, weight_decay=weight_decay, update=update
        )
    history: list[StepMetrics] = []
    grads = None
    batch_iterator = iter(batches)
    with _progress_bar(num_steps, progress) as advance:
        for step in range(num_steps):
            batch = next(batch_iterator, None)
            if batch is None:
                raise ValueError(f"batches must hold num_steps={num_steps} batches, found {step}")
            started = time.perf_counter()
            lr = warmup_cosine(
                step, learning_rate=learning_rate, total_steps=num_steps, warmup_steps=warmup_steps,
                min_learning_rate=min_learning_rate,
            )  # fmt: skip
            loss, grads = model.loss_and_grads(**batch, out=grads)
            norm = global_norm(grads)
            if not math.isfinite(loss) or not math.isfinite(norm):
                raise FloatingPointError(
                    f"step {step}: the loss is {loss} and the gradient norm {norm}; nothing was updated"
                )
            optimizer.step(grads, learning_rate=lr, grad_scale=clip_scale(norm, max_grad_norm))
            seconds = time.perf_counter() - started
            history.append(StepMetrics(step, loss, norm, lr, seconds, np.size(batch["tokens"]) / seconds))
            advance(history[-1])
            if on_step is not None:
                on_step(history[-1])
    return history


@contextmanager
def _progress_bar(num_steps: int, wanted: bool | None) -> Iterator[Callable[[StepMetrics], None]]:
    from rich.console import Console  # imported here, so that importing strop.moe stays light
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    shown = console.is_terminal if wanted is None else wanted
    columns = (
        TextColumn("step"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not shown) as bar:
        task = bar.add_task("", total=num_steps)
        yield lambda metrics: bar.update(
            task, advance=1, description=f"loss {metrics.loss:.4f}  {metrics.tokens_per_second:,.0f} tokens/s"
        )
