"""Where metrics go; the classes are those of `strop.training.logging`."""

from strop.training.logging import (
    ConsoleLogger,
    JSONLLogger,
    Logger,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
    read_metrics,
)

__all__ = [
    "ConsoleLogger",
    "JSONLLogger",
    "Logger",
    "TensorBoardLogger",
    "TrackioLogger",
    "WandbLogger",
    "read_metrics",
]
