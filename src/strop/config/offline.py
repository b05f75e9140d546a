"""Options of the algorithms that learn from a dataset's completions: SFT, DPO, KTO, RewardModel."""

from dataclasses import dataclass, field

from strop.config.base import count, number
from strop.config.preference_losses import PreferenceRule, UnpairedRule
from strop.config.training import OptimConfig, TrainerConfig


@dataclass(frozen=True, kw_only=True)
class OfflineConfig(TrainerConfig):
    """Options that these algorithms share.

    max_length   the most tokens of prompt and completion together: longer completions are cut; None cuts nothing
    pad_id       the padding id in what train_step is given; None takes the tokenizer's or the model's
    """

    max_length: int | None = count(None, low=2)
    pad_id: int | None = None
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-6))


@dataclass(frozen=True, kw_only=True)
class SFTConfig(OfflineConfig):
    """Options of SFT.

    max_length       the most tokens of a sequence: longer ones are cut; None cuts nothing
    assistant_only   train on the assistant's turns of conversations only; off: on every token of `messages` and of completions
    """

    assistant_only: bool = True
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=2e-5))


@dataclass(frozen=True, kw_only=True)
class DPOConfig(OfflineConfig):
    """Options of DPO."""

    loss: PreferenceRule = field(default_factory=PreferenceRule)


@dataclass(frozen=True, kw_only=True)
class KTOConfig(OfflineConfig):
    """Options of KTO."""

    loss: UnpairedRule = field(default_factory=UnpairedRule)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss.loss_type == "kto" and self.run.batch_size < 2:
            raise ValueError("batch_size must be at least 2 for 'kto', whose KL needs another row, found 1")


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(OfflineConfig):
    """Options of RewardModel.

    center_coef   weight of the square of a pair's summed rewards, which keeps rewards around 0; 0 is off, 0.01 is usual
    """

    center_coef: float = number(0.0, 0)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-5))
