"""What happens beside the training; the classes are those of `strop.training.callbacks`."""

from strop.training.callbacks import (
    Callback,
    CheckpointCallback,
    EarlyStopping,
    EvaluationCallback,
    ProgressBar,
    SampleTable,
)

__all__ = ["Callback", "CheckpointCallback", "EarlyStopping", "EvaluationCallback", "ProgressBar", "SampleTable"]
