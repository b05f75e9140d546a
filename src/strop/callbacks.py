"""Callbacks for trainers; the classes of `strop.training.callbacks`."""

from strop.training.callbacks import BestCheckpoint as BestCheckpoint
from strop.training.callbacks import Callback as Callback
from strop.training.callbacks import CheckpointCallback as CheckpointCallback
from strop.training.callbacks import EarlyStopping as EarlyStopping
from strop.training.callbacks import EvaluationCallback as EvaluationCallback
from strop.training.callbacks import ProgressBar as ProgressBar
from strop.training.callbacks import SampleTable as SampleTable
