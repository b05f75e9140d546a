"""Callbacks: what happens beside the training. The events come from `Trainer`, so each works with every algorithm.

on_train_begin(trainer)            train() starts, everything is set up
on_step_begin(trainer)             before each step, of train() and of train_step() alike
on_step_end(trainer, metrics)      after it; trainer.state.step counts it already
on_evaluate(trainer, metrics)      after an evaluation
on_save(trainer, path)             after a checkpoint
on_train_end(trainer, history)     train() ends, also when interrupted
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strop.algorithms.state import History
    from strop.algorithms.trainer import Trainer


class Callback:
    """Does nothing at every event; a subclass overrides what it wants."""

    def on_train_begin(self, trainer: "Trainer") -> None: ...

    def on_step_begin(self, trainer: "Trainer") -> None: ...

    def on_step_end(self, trainer: "Trainer", metrics: dict[str, float]) -> None: ...

    def on_evaluate(self, trainer: "Trainer", metrics: dict[str, float]) -> None: ...

    def on_save(self, trainer: "Trainer", path: str) -> None: ...

    def on_train_end(self, trainer: "Trainer", history: "History") -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: plain JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
