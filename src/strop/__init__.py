"""strop: LLM post-training. This module has the primitives, which need only NumPy. The algorithms
(`from strop import GRPO`) need torch and are imported when they are first used."""

import importlib
import re
from typing import TYPE_CHECKING, Any

from strop import _trl, primitives
from strop._compiled import get_num_threads, set_num_threads
from strop.primitives import *  # noqa: F403

if TYPE_CHECKING:  # for type checkers and editors; at run time `__getattr__` imports them
    from strop.algorithms.best_of_n import BestOfN as BestOfN
    from strop.algorithms.distill import Distill as Distill
    from strop.algorithms.dpo import DPO as DPO
    from strop.algorithms.grpo import GRPO as GRPO
    from strop.algorithms.kto import KTO as KTO
    from strop.algorithms.online_dpo import OnlineDPO as OnlineDPO
    from strop.algorithms.ppo import PPO as PPO
    from strop.algorithms.reward_model import RewardModel as RewardModel
    from strop.algorithms.rloo import RLOO as RLOO
    from strop.algorithms.sft import SFT as SFT

__version__ = "0.1.0"

__all__ = ["__version__", "get_num_threads", "set_num_threads"]
__all__ += primitives.__all__
_ALGORITHMS = ("BestOfN", "DPO", "Distill", "GRPO", "KTO", "OnlineDPO", "PPO", "RLOO", "RewardModel", "SFT")


def __getattr__(name: str) -> Any:
    if name not in _ALGORITHMS:
        if told := _trl.class_hint(name):
            raise ImportError(told)  # `from strop import …` hides the message of an AttributeError
        raise AttributeError(f"module 'strop' has no attribute {name!r}")
    module = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()  # OnlineDPO is in online_dpo.py
    return getattr(importlib.import_module(f"strop.algorithms.{module}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_ALGORITHMS])
