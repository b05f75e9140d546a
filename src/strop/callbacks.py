"""What happens beside the training; the classes are those of `strop.training.callbacks`."""

from strop.training.callbacks import (
    BestCheckpoint,
    Callback,
    CheckpointCallback,
    EarlyStopping,
    EvaluationCallback,
    ProgressBar,
    SampleTable,
)

__all__ = [
    "BestCheckpoint",
    "Callback",
    "CheckpointCallback",
    "EarlyStopping",
    "EvaluationCallback",
    "ProgressBar",
    "SampleTable",
]
