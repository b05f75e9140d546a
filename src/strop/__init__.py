"""strop: LLM post-training. The primitives are here and need only NumPy. The algorithms (`from strop import GRPO`) are
imported when they are first used, because they need torch."""

import importlib
from typing import TYPE_CHECKING, Any

from strop import _trl
from strop._compiled import get_num_threads, set_num_threads
from strop.primitives import (
    collate_packed,
    compute_batch_group_advantages,
    compute_batch_token_kl,
    compute_batch_token_kl_f32,
    compute_batch_token_kl_schulman,
    compute_batch_token_kl_schulman_f32,
    compute_gae,
    compute_group_advantages,
    compute_token_kl,
    compute_token_kl_f32,
    compute_token_kl_schulman,
    compute_token_kl_schulman_f32,
    pack_sequences,
)

if TYPE_CHECKING:  # for checkers and editors; at run time `__getattr__` brings them
    from strop.algorithms.best_of_n import BestOfN as BestOfN
    from strop.algorithms.distill import Distill as Distill
    from strop.algorithms.dpo import DPO as DPO
    from strop.algorithms.grpo import GRPO as GRPO
    from strop.algorithms.kto import KTO as KTO
    from strop.algorithms.online_dpo import OnlineDPO as OnlineDPO
    from strop.algorithms.ppo import PPO as PPO
    from strop.algorithms.reward_model import RewardModel as RewardModel
    from strop.algorithms.sft import SFT as SFT

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "collate_packed",
    "compute_batch_group_advantages",
    "compute_batch_token_kl",
    "compute_batch_token_kl_f32",
    "compute_batch_token_kl_schulman",
    "compute_batch_token_kl_schulman_f32",
    "compute_gae",
    "compute_group_advantages",
    "compute_token_kl",
    "compute_token_kl_f32",
    "compute_token_kl_schulman",
    "compute_token_kl_schulman_f32",
    "get_num_threads",
    "pack_sequences",
    "set_num_threads",
]

_ALGORITHMS = {
    "BestOfN": "best_of_n",
    "DPO": "dpo",
    "Distill": "distill",
    "GRPO": "grpo",
    "KTO": "kto",
    "OnlineDPO": "online_dpo",
    "PPO": "ppo",
    "RewardModel": "reward_model",
    "SFT": "sft",
}


def __getattr__(name: str) -> Any:
    if name not in _ALGORITHMS:
        if told := _trl.class_hint(name):
            raise ImportError(told)  # of an AttributeError `from strop import …` would not show the message
        raise AttributeError(f"module 'strop' has no attribute {name!r}")
    return getattr(importlib.import_module(f"strop.algorithms.{_ALGORITHMS[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_ALGORITHMS])
