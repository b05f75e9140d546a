"""Options of all algorithms: frozen dataclasses that check themselves. They need neither torch nor transformers."""

from strop.config.base import Config as Config
from strop.config.offline import DPOConfig as DPOConfig
from strop.config.offline import KTOConfig as KTOConfig
from strop.config.offline import RewardModelConfig as RewardModelConfig
from strop.config.offline import SFTConfig as SFTConfig
from strop.config.on_policy import DistillConfig as DistillConfig
from strop.config.on_policy import EntropyConfig as EntropyConfig
from strop.config.on_policy import GRPOConfig as GRPOConfig
from strop.config.on_policy import OnlineDPOConfig as OnlineDPOConfig
from strop.config.on_policy import PPOConfig as PPOConfig
from strop.config.on_policy import RLOOConfig as RLOOConfig
from strop.config.policy_losses import PolicyRule as PolicyRule
from strop.config.preference_losses import PreferenceRule as PreferenceRule
from strop.config.preference_losses import UnpairedRule as UnpairedRule
from strop.config.sampling import RewardCalls as RewardCalls
from strop.config.sampling import Sampling as Sampling
from strop.config.sampling import ServerConfig as ServerConfig
from strop.config.sampling import TurnsConfig as TurnsConfig
from strop.config.training import QUANTIZED as QUANTIZED
from strop.config.training import LoRAConfig as LoRAConfig
from strop.config.training import OptimConfig as OptimConfig
from strop.config.training import RunConfig as RunConfig
from strop.config.training import TrainerConfig as TrainerConfig
