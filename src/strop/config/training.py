"""Options that every trainer has: the optimiser, the run, LoRA."""

from dataclasses import dataclass, field

from strop._checks import check_number
from strop.config.base import Config, choice, count, number

QUANTIZED = ("nf4", "int8")
OPTIMIZERS = ("adamw", "adamw8bit", "paged_adamw8bit", "muon", "sgd", "adafactor")


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Config):
    """The optimiser and its schedule.

    optimizer           adamw, adamw8bit, paged_adamw8bit, muon, sgd or adafactor
    offload_optimizer   keep the optimiser's states in the host's memory; a step takes longer
    learning_rate       the highest learning rate, after the warm-up
    weight_decay        weight decay of matrices; norms and biases have none
    betas, eps          AdamW's own; sgd and adafactor have none
    max_grad_norm       a larger gradient is scaled down to this norm; 0 is off
    warmup_steps        the learning rate rises linearly over this many steps
    schedule            the learning rate after the warm-up: constant, or linear or cosine down to min_learning_rate
    min_learning_rate   the learning rate at the last step of a linear or cosine schedule
    """

    optimizer: str = choice("adamw", OPTIMIZERS)
    offload_optimizer: bool = False
    learning_rate: float = number(1e-5, 0)
    weight_decay: float = number(0.0, 0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = number(1e-8, 0, open_low=True)
    max_grad_norm: float = number(1.0, 0)
    warmup_steps: int = count(0)
    schedule: str = choice("constant", ("constant", "linear", "cosine"))
    min_learning_rate: float = number(0.0, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.offload_optimizer and self.optimizer == "paged_adamw8bit":
            raise ValueError("offload_optimizer must be False with paged_adamw8bit, which moves its states by itself")
        if not isinstance(self.betas, (tuple, list)):
            raise TypeError(f"betas must be two numbers, found {self.betas!r}")
        if len(self.betas) != 2:
            raise ValueError(f"betas must be two numbers, found {self.betas}")
        for beta in self.betas:
            check_number(beta, "betas", 0, 1, open_high=True)
        object.__setattr__(self, "betas", tuple(map(float, self.betas)))  # torch refuses (0.9, 0)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """How a run goes, whatever the algorithm. `*_every` counts steps; 0 is off.

    batch_size              rows of the dataset in one step
    micro_batch_size        the most sequences (or pairs) in one forward pass; 0 is no limit. Changes memory, not the result
    micro_batch_tokens      the most tokens in one forward pass, padding included; 0 is no limit. Four times as many in
                            scoring and in fused layers, which need less memory. Changes memory, not the result
    num_steps               training ends after this many steps; 0 lets num_epochs decide
    num_epochs              training ends after this many passes over the data, if num_steps is 0
    seed                    seed of the data's order, of sampling and of the first LoRA weights
    shuffle                 every epoch has the rows in another order
    curriculum              easy rows first in every epoch: a column of numbers, or file.py:function, which returns the
                            difficulty of a row. Rows of equal difficulty keep the shuffled order
    autocast                "bf16" computes forward passes in bfloat16 and keeps weights in float32; None is off
    shard                   under torchrun: "none" keeps all weights in every process, "full" a shard in each
    gradient_checkpointing  compute activations again in the backward pass: less memory, more time
    compile                 torch.compile the model
    share_prefixes          a prefix that several sequences begin with, such as the prompt of a group, is read once: "auto" on
                            a CPU, "always", or "never". Changes memory and time, not the result
    dropout                 False turns the model's dropout off, so that policy and reference are the same function
    log_every               log metrics every so many steps
    eval_every              evaluate every so many steps, besides before the first and after the last
    save_every              write a checkpoint every so many steps, besides at the end
    keep_checkpoints        how many of the newest checkpoints are kept; 0 keeps all
    samples_every           show samples on a terminal and write them to the run folder every so many steps
    """

    batch_size: int = count(8, low=1)
    micro_batch_size: int = count(0)
    micro_batch_tokens: int = count(6144)
    num_steps: int = count(0)
    num_epochs: int = count(1)
    seed: int = count(0)
    shuffle: bool = True
    curriculum: str | None = None
    autocast: str | None = choice(None, ("bf16", None))
    shard: str = choice("none", ("none", "full"))
    gradient_checkpointing: bool = False
    compile: bool = False
    share_prefixes: str = choice("auto", ("auto", "always", "never"))
    dropout: bool = False
    log_every: int = count(1)
    eval_every: int = count(0)
    save_every: int = count(0)
    keep_checkpoints: int = count(2)
    samples_every: int = count(10)


@dataclass(frozen=True, kw_only=True)
class LoRAConfig(Config):
    """Low-rank adapters through peft.

    r                the rank, which is the size of the adapters
    alpha            adapters are scaled by alpha / r
    target_modules   names of the linear layers to adapt, or "all-linear"
    merge            write the whole model, with the adapters merged in, to final/ besides final/adapter
    """

    r: int = count(16, low=1)
    alpha: float = number(32.0, 0, open_low=True)
    target_modules: str | tuple[str, ...] = "all-linear"
    merge: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(Config):
    """The parts every algorithm has. `lora` is off unless given: lora={"r": 16}.

    quantize   with lora: keep the frozen weights of linear layers as 4-bit (nf4) or 8-bit (int8) numbers; None is off
    """

    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)
    lora: LoRAConfig | None = None
    quantize: str | None = choice(None, (*QUANTIZED, None))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantize is not None and self.lora is None:
            why = "without lora, which is what is trained on quantised weights"
            raise ValueError(f"quantize must be None {why}, found {self.quantize!r}")
        if self.quantize is not None and self.run.shard == "full":
            raise ValueError(f"quantize must be None with shard='full', found {self.quantize!r}")

    def without_effect(self) -> list[str]:
        """Return a sentence for each option that is set but has no effect; trainers issue them as warnings."""
        check = getattr(getattr(self, "loss", None), "without_effect", None)
        return [] if check is None else check()
