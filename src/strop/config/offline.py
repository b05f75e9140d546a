"""Options of the algorithms that learn from a dataset's completions: SFT, DPO, KTO, RewardModel."""

from dataclasses import dataclass, field

from strop._checks import check_count, check_number
from strop.config.preference_losses import PreferenceRule, UnpairedRule
from strop.config.training import OptimConfig, TrainerConfig


@dataclass(frozen=True, kw_only=True)
class SFTConfig(TrainerConfig):
    """Options of SFT.

    max_length       the most tokens of a sequence: longer ones are cut; None cuts nothing
    assistant_only   train on the assistant's turns of conversations only; off: on every token of `messages` and of completions
    pad_id           the padding id in what train_step is given; None takes the tokenizer's or the model's
    """

    max_length: int | None = None
    assistant_only: bool = True
    pad_id: int | None = None
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=2e-5))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length is not None:
            check_count(self.max_length, "max_length", low=2)


@dataclass(frozen=True, kw_only=True)
class DPOConfig(TrainerConfig):
    """Options of DPO.

    max_length        the most tokens of prompt and completion together: longer completions are cut; None cuts nothing
    pad_id            the padding id in what train_step is given; None takes the tokenizer's or the model's
    """

    max_length: int | None = None
    pad_id: int | None = None
    loss: PreferenceRule = field(default_factory=PreferenceRule)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-6))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length is not None:
            check_count(self.max_length, "max_length", low=2)


@dataclass(frozen=True, kw_only=True)
class KTOConfig(TrainerConfig):
    """Options of KTO.

    max_length   the most tokens of prompt and completion together: longer completions are cut; None cuts nothing
    pad_id       the padding id in what train_step is given; None takes the tokenizer's or the model's
    """

    max_length: int | None = None
    pad_id: int | None = None
    loss: UnpairedRule = field(default_factory=UnpairedRule)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-6))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length is not None:
            check_count(self.max_length, "max_length", low=2)
        if self.loss.loss_type == "kto" and self.run.batch_size < 2:
            raise ValueError("batch_size must be at least 2 for 'kto', whose KL needs another row, found 1")


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(TrainerConfig):
    """Options of RewardModel.

    center_coef   weight of the square of a pair's summed rewards, which keeps rewards around 0; 0 is off, 0.01 is usual
    max_length    the most tokens of prompt and completion together: longer completions are cut; None cuts nothing
    pad_id        the padding id in what train_step is given; None takes the tokenizer's or the model's
    """

    center_coef: float = 0.0
    max_length: int | None = None
    pad_id: int | None = None
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-5))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.center_coef, "center_coef", low=0.0)
        if self.max_length is not None:
            check_count(self.max_length, "max_length", low=2)
