"""Options of all algorithms: frozen dataclasses that check themselves. They need neither torch nor transformers."""

from strop.config.base import IN_TEXT, Config, hints_of, option_names, options_in, parse_number, part_of, unknown_option
from strop.config.offline import DPOConfig, KTOConfig, RewardModelConfig, SFTConfig
from strop.config.on_policy import DistillConfig, GRPOConfig, OnlineDPOConfig, PPOConfig
from strop.config.policy_losses import PolicyRule
from strop.config.preference_losses import PreferenceRule, UnpairedRule
from strop.config.sampling import Sampling, ServerConfig, TurnsConfig
from strop.config.training import QUANTIZED, LoRAConfig, OptimConfig, RunConfig, TrainerConfig

__all__ = [
    "IN_TEXT",
    "QUANTIZED",
    "Config",
    "DPOConfig",
    "DistillConfig",
    "GRPOConfig",
    "KTOConfig",
    "LoRAConfig",
    "OnlineDPOConfig",
    "OptimConfig",
    "PPOConfig",
    "PolicyRule",
    "PreferenceRule",
    "RewardModelConfig",
    "RunConfig",
    "SFTConfig",
    "Sampling",
    "ServerConfig",
    "TrainerConfig",
    "TurnsConfig",
    "UnpairedRule",
    "hints_of",
    "option_names",
    "options_in",
    "parse_number",
    "part_of",
    "unknown_option",
]
