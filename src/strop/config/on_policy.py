"""Options of the algorithms that sample their own completions: GRPO, PPO, Distill, OnlineDPO."""

import functools
from dataclasses import dataclass, field, replace

from strop._checks import check_choice, check_count, check_number, check_timeout
from strop.config.offline import DPOConfig
from strop.config.policy_losses import PolicyRule
from strop.config.sampling import Sampling, ServerConfig, TurnsConfig
from strop.config.training import OptimConfig, TrainerConfig

ADVANTAGE_SCALES = ("group", "batch", "none")
OLD_LOGPS = ("auto", "rollout", "recompute")
IMPORTANCE_MODES = ("truncate", "mask")
BETAS = {"reverse_kl": 1.0, "forward_kl": 0.0}
DIVERGENCES = (*BETAS, "jsd", "sampled")
SOURCES = ("dataset", "teacher")


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(TrainerConfig):
    """Options of GRPO. batch_size counts prompts, micro_batch_size and minibatch_size completions.

    group_size          completions sampled for each prompt
    kl_coef             weight of the KL to the reference (β in the formula); 0 needs no reference
    inner_epochs        passes over the completions of a step
    minibatch_size      completions in one update, drawn anew in every pass; 0 is all of them
    advantage_scale     divide centred rewards by the std of the "group" or of the "batch", or by nothing: "none"
    advantage_ddof      the std of advantages divides by n - ddof: 1 as TRL does, 0 as the paper says
    advantage_eps       added to the std of advantages: 1e-4 as TRL does, 0 as the paper says
    mask_truncated      leave completions that max_new_tokens cut off out of the loss
    resample_rounds     how often prompts whose rewards are all equal are sampled again
    importance_cap      importance sampling for a sampler whose probabilities differ from the training forward's: weight the
                        policy term of each token by w = π_old/π_rollout, at most this cap, or within a pair (low, high).
                        π_old is then recomputed. None is off
    importance_mode     outside the bounds of importance_cap: "truncate" w to them, or "mask" the token (w = 0)
    old_logps           log-probs of the old policy: "rollout" takes those of sampling, "recompute" those of a forward
                        before the first update; "auto" is "rollout" unless top_k, top_p or importance_cap are used
    replay_routing      use the experts chosen in the rollout in the training forward too, for Mixture-of-Experts models
    exact               make the log-probs of sampling and training equal bit for bit, which takes longer: sums have one order
                        in both. For Hugging Face models of the common kind on a GPU; strop's MoE does so anyway
    reward_weights      one weight for each of several reward functions; None is 1 for each
    reward_timeout      seconds for one call of a reward function; None waits forever
    find_failing        call a reward function that raised again, one completion at a time, to name the one that fails
    pad_id              the padding id in prompts given as ids; None takes the tokenizer's or the model's
    """

    group_size: int = 8
    kl_coef: float = 0.04
    inner_epochs: int = 1
    minibatch_size: int = 0
    advantage_scale: str = "group"
    advantage_ddof: int = 1
    advantage_eps: float = 1e-4
    mask_truncated: bool = False
    resample_rounds: int = 0
    importance_cap: float | tuple[float, float] | None = None
    importance_mode: str = "truncate"
    old_logps: str = "auto"
    replay_routing: bool = False
    exact: bool = False
    reward_weights: tuple[float, ...] | None = None
    reward_timeout: float | None = None
    find_failing: bool = False
    pad_id: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    server: ServerConfig = field(default_factory=ServerConfig)
    turns: TurnsConfig = field(default_factory=TurnsConfig)
    loss: PolicyRule = field(default_factory=PolicyRule)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-6))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self.group_size, "group_size", low=2)
        check_number(self.kl_coef, "kl_coef", low=0.0)
        check_count(self.inner_epochs, "inner_epochs", low=1)
        for name in ("minibatch_size", "advantage_ddof", "resample_rounds"):
            check_count(getattr(self, name), name)
        check_choice(self.advantage_scale, "advantage_scale", ADVANTAGE_SCALES)
        check_number(self.advantage_eps, "advantage_eps", low=0.0)
        if self.advantage_ddof >= self.group_size:
            raise ValueError(f"advantage_ddof must be below group_size={self.group_size}, found {self.advantage_ddof}")
        check_choice(self.importance_mode, "importance_mode", IMPORTANCE_MODES)
        if self.importance_cap is not None:
            pair = self.importance_cap if isinstance(self.importance_cap, (tuple, list)) else (0.0, self.importance_cap)
            if len(pair) != 2:
                raise ValueError(f"importance_cap must be one number or a pair (low, high), found {len(pair)} numbers")
            check_number(pair[0], "importance_cap", low=0.0, high=1.0)
            check_number(pair[1], "importance_cap", low=1.0)
        check_choice(self.old_logps, "old_logps", OLD_LOGPS)
        if self.old_logps == "rollout" and self.importance_cap is not None:
            raise ValueError(
                'old_logps must be "auto" or "recompute" with importance_cap, which weighs recomputed log-probs against '
                'the rollout\'s, found "rollout"'
            )
        if self.replay_routing and self.server.urls:
            raise ValueError(
                "replay_routing must be False with rollout_server, which does not say which experts it chose"
            )
        if self.replay_routing and self.run.compile:
            raise ValueError("replay_routing must be False with compile=True, found True")
        check_exact(self)
        check_timeout(self.reward_timeout, "reward_timeout")
        if self.sampling.greedy:
            raise ValueError("temperature must be above 0: greedy completions of a prompt are all the same, found 0")

    def without_effect(self) -> list[str]:
        idle = self.importance_mode != type(self).importance_mode and self.importance_cap is None
        told = ["importance_mode has no effect: it is for importance_cap, found None"] if idle else []
        return told + super().without_effect()

    @functools.cached_property
    def rule(self) -> PolicyRule:
        """The loss with what the rest of the config says of it."""
        return replace(self.loss, beta=self.kl_coef, max_completion_length=self.sampling.max_new_tokens)

    @functools.cached_property
    def recomputes(self) -> bool:
        """Whether old log-probs come from a forward of their own."""
        differs = self.sampling.cuts or self.importance_cap is not None
        return self.old_logps == "recompute" or (self.old_logps == "auto" and differs)


def check_exact(config: "GRPOConfig | PPOConfig") -> None:
    """Raise for options that cannot be exact, whatever the model."""
    run = config.run
    for name, wanted, found in (
        ("rollout_server", None, config.server.rollout_server), ("lora", None, config.lora), ("shard", "none", run.shard),
        ("compile", False, run.compile), ("dropout", False, run.dropout),
    ):  # fmt: skip
        if config.exact and found != wanted:
            raise ValueError(
                f"{name} must be {wanted!r} with exact, for its sums have an order of their own, found {found!r}"
            )


@dataclass(frozen=True, kw_only=True)
class PPOConfig(TrainerConfig):
    """Options of PPO. batch_size counts prompts, micro_batch_size and minibatch_size completions.

    group_size            completions sampled for each prompt
    kl_coef               weight of the KL that is subtracted from the rewards; 0 needs no reference
    gamma                 γ, the discount of later rewards
    lam                   λ of the advantage estimation: 1 trusts the rewards, 0 the critic
    whiten                bring advantages to mean 0 and std 1 over the tokens of the step
    value_coef            weight of the critic's loss
    value_clip            how far a value may move from what it was before the step's updates; None does not clip
    critic_learning_rate  the critic's own learning rate, with the policy's schedule
    inner_epochs          passes over the completions of a step
    minibatch_size        completions in one update, drawn anew in every pass; 0 is all of them
    old_logps             log-probs of the old policy: "rollout", "recompute" or "auto", as in GRPO
    exact                 make the log-probs of sampling and training equal bit for bit, as in GRPO
    mask_truncated        leave completions that max_new_tokens cut off out of the loss
    reward_weights        one weight for each of several reward functions; None is 1 for each
    reward_timeout        seconds for one call of a reward function; None waits forever
    find_failing          call a reward function that raised again, one completion at a time, to name the one that fails
    pad_id                the padding id in prompts given as ids; None takes the tokenizer's or the model's
    """

    group_size: int = 1
    kl_coef: float = 0.05
    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    value_coef: float = 0.1
    value_clip: float | None = 0.2
    critic_learning_rate: float = 1e-5
    inner_epochs: int = 4
    minibatch_size: int = 0
    old_logps: str = "auto"
    exact: bool = False
    mask_truncated: bool = False
    reward_weights: tuple[float, ...] | None = None
    reward_timeout: float | None = None
    find_failing: bool = False
    pad_id: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    server: ServerConfig = field(default_factory=ServerConfig)
    loss: PolicyRule = field(default_factory=lambda: PolicyRule(loss_type="dapo"))
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-6))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("group_size", "inner_epochs"):
            check_count(getattr(self, name), name, low=1)
        check_count(self.minibatch_size, "minibatch_size")
        for name in ("kl_coef", "value_coef", "critic_learning_rate"):
            check_number(getattr(self, name), name, low=0.0)
        for name in ("gamma", "lam"):
            check_number(getattr(self, name), name, 0, 1)
        if self.value_clip is not None:
            check_number(self.value_clip, "value_clip", 0, open_low=True)
        check_choice(self.old_logps, "old_logps", OLD_LOGPS)
        check_exact(self)
        check_timeout(self.reward_timeout, "reward_timeout")
        if self.sampling.greedy:
            raise ValueError("temperature must be above 0, for a greedy completion has no ratio to learn from, found 0")

    @functools.cached_property
    def rule(self) -> PolicyRule:
        """The loss; the KL is in the rewards."""
        return replace(self.loss, max_completion_length=self.sampling.max_new_tokens)

    @functools.cached_property
    def recomputes(self) -> bool:
        """Whether old log-probs come from a forward of their own."""
        return self.old_logps == "recompute" or (self.old_logps == "auto" and self.sampling.cuts)


@dataclass(frozen=True, kw_only=True)
class DistillConfig(TrainerConfig):
    """Options of Distill.

    divergence   "reverse_kl", "forward_kl", "jsd", or "sampled": the reverse KL at the sampled token, as a policy gradient
    beta         for jsd: near 0 it behaves like the forward KL, near 1 like the reverse
    on_policy    the probability that the student writes the completion of a row itself
    off_policy   where the other completions come from: "dataset" (its column completion) or "teacher" (which samples)
    pad_id       the padding id in prompts given as ids; None takes the tokenizer's or the model's
    """

    divergence: str = "reverse_kl"
    beta: float = 0.5
    on_policy: float = 1.0
    off_policy: str = "dataset"
    pad_id: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    server: ServerConfig = field(default_factory=ServerConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-5))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.divergence, "divergence", DIVERGENCES)
        check_number(self.beta, "beta", 0, 1, open_low=True, open_high=True)
        check_number(self.on_policy, "on_policy", 0, 1)
        check_choice(self.off_policy, "off_policy", SOURCES)
        if self.divergence == "sampled" and (self.on_policy < 1 or self.sampling.cuts or self.sampling.greedy):
            raise ValueError(
                "divergence must not be 'sampled' unless all completions are drawn from the student's whole distribution: "
                "on_policy 1, temperature above 0, no top_k or top_p"
            )

    def without_effect(self) -> list[str]:
        idle = self.beta != type(self).beta and self.divergence != "jsd"
        return [f"beta has no effect: it is for divergence='jsd', found {self.divergence!r}"] if idle else []

    @property
    def from_dataset(self) -> bool:
        """Whether rows need completions."""
        return self.on_policy < 1 and self.off_policy == "dataset"


@dataclass(frozen=True, kw_only=True)
class OnlineDPOConfig(DPOConfig):
    """Options of OnlineDPO: those of DPO, and

    reward_weights    one weight for each of several reward functions; None is 1 for each
    reward_timeout    seconds for one call of preference_fn or a reward function; None waits forever
    find_failing      call a function that raised again, one completion or pair at a time, to name the one that fails
    """

    reward_weights: tuple[float, ...] | None = None
    reward_timeout: float | None = None
    find_failing: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    turns: TurnsConfig = field(default_factory=TurnsConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_timeout(self.reward_timeout, "reward_timeout")
        if self.sampling.greedy:
            raise ValueError("temperature must be above 0: two greedy completions are the same, found 0")
