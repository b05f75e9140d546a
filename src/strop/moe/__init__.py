"""A Mixture-of-Experts transformer in NumPy with hand-written gradients, numerically equal to transformers' Mixtral."""

from strop.moe.config import MoEConfig
from strop.moe.engines import EngineUnavailable, available_engines, register_engine
from strop.moe.model import Generation, MoETransformer
from strop.moe.optim import AdamW
from strop.moe.train import fit

__all__ = [
    "AdamW",
    "EngineUnavailable",
    "Generation",
    "MoEConfig",
    "MoETransformer",
    "available_engines",
    "fit",
    "register_engine",
]
