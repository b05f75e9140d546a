"""Loggers for metrics; the classes of `strop.training.logging`."""

from strop.training.logging import ConsoleLogger as ConsoleLogger
from strop.training.logging import JSONLLogger as JSONLLogger
from strop.training.logging import Logger as Logger
from strop.training.logging import TensorBoardLogger as TensorBoardLogger
from strop.training.logging import TrackioLogger as TrackioLogger
from strop.training.logging import WandbLogger as WandbLogger
from strop.training.logging import read_metrics as read_metrics
