"""train(): batches in a fixed order, events, interruption, the run folder."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from strop.algorithms.state import History

if TYPE_CHECKING:
    from strop.algorithms.trainer import Trainer


def train(
    trainer: "Trainer",
    dataset: Any,
    eval_dataset: Any,
    num_steps: int | None,
    num_epochs: int | None,
    output_dir: str | Path | None,
    resume: bool,
    progress: bool | None,
) -> History:
    """See `Trainer.train`."""
    run = trainer.config.run
    rows = trainer.prepare(dataset)
    if not len(rows):
        raise ValueError("dataset must have rows, found none")
    if run.batch_size > len(rows):
        raise ValueError(f"batch_size must be at most the dataset's {len(rows)} rows, found {run.batch_size}")
    epochs = run.num_epochs if num_epochs is None else num_epochs
    total = (run.num_steps if num_steps is None else num_steps) or epochs * -(-len(rows) // run.batch_size)
    trainer.state.total_steps = total
    trainer.history = history = History()
    trainer.fire("on_train_begin")
    for batch in batches(trainer, rows):
        if trainer.state.step >= total or trainer.stop_reason:
            break
        metrics = trainer.run_step(lambda batch=batch: trainer.step_on(batch))  # type: ignore[misc]
        history.steps.append({"step": trainer.state.step, **metrics})
    trainer.fire("on_train_end", history)
    return history


def batches(trainer: "Trainer", rows: Sequence[Any]) -> Iterator[list[Any]]:
    """Batches without end, from where the state stands. An epoch's order comes from (seed, epoch) alone."""
    state, run = trainer.state, trainer.config.run
    while True:
        order = epoch_order(len(rows), run.seed, state.epoch, run.shuffle)
        while state.position < len(rows):
            batch = [rows[index] for index in order[state.position : state.position + run.batch_size]]
            state.position += len(batch)
            yield batch
        state.epoch, state.position = state.epoch + 1, 0


def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    order = list(range(num_rows))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def evaluate(trainer: "Trainer", dataset: Any) -> dict[str, float]:
    """See `Trainer.evaluate`."""
    rows = list(trainer.prepare(dataset, "eval_dataset"))
    was_training = trainer.policy.model.training
    trainer.policy.model.eval()
    try:
        with torch.no_grad():
            metrics = trainer.evaluate_on(rows)
    finally:
        trainer.policy.model.train(was_training)
    return {f"eval/{name}": value for name, value in metrics.items()}
