"""Options of the algorithms that sample their own completions: GRPO, PPO, Distill, OnlineDPO."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from strop._checks import check_number
from strop.config.base import Config, choice, count, number
from strop.config.offline import DPOConfig
from strop.config.policy_losses import PolicyRule
from strop.config.sampling import RewardCalls, Sampling, ServerConfig, TurnsConfig
from strop.config.training import OptimConfig, TrainerConfig

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "maxrl", "gdpo", "pass@k")
IMPORTANCE_MODES = ("truncate", "mask", "sequence_truncate", "sequence_mask")
REJECTIONS = tuple(f"{how}_{kl}" for how in ("token", "seq_sum", "seq_mean", "seq_max") for kl in ("k1", "k2", "k3"))
REJECTIONS = tuple(name for name in REJECTIONS if name != "seq_max_k1")
WITH_STD = ("grpo", "reinforce++", "reinforce++_baseline", "gdpo")  # advantages that are divided by a std
ADVANTAGE_SCALES = ("group", "batch", "none")
BETAS = {"reverse_kl": 1.0, "forward_kl": 0.0}
DIVERGENCES = (*BETAS, "jsd", "sampled")


@dataclass(frozen=True, kw_only=True)
class RewardOptions(TrainerConfig):
    """Options of the algorithms that call reward functions.

    reward_weights    one weight for each of several reward functions; None is 1 for each
    reward_timeout    seconds for one call of a reward function or of preference_fn; None waits forever
    find_failing      call a function that raised again, one completion or pair at a time, to name the one that fails
    rollout_dtype     "bfloat16" multiplies in 16 bits while sampling: faster on a GPU, and on CPUs with AVX512-BF16
                      or AMX. Log-probs of sampling and training then differ by rounding: see the metric mismatch_kl. None
                      samples as training computes
    num_eval_samples  completions of each held-out prompt: 1 is greedy; several are drawn as in training, and mean@k,
                      pass@k (rewards of 0 and 1) and maj@k are logged, each with its 95 % interval
    """

    reward_weights: tuple[float, ...] | None = None
    reward_timeout: float | None = number(None, 0, open_low=True)
    find_failing: bool = False
    rollout_dtype: str | None = choice(None, ("bfloat16", None))
    num_eval_samples: int = count(1, low=1)
    calls: RewardCalls = field(default_factory=RewardCalls)
    sampling: Sampling = field(default_factory=Sampling)
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rollout_dtype is not None and self.server.rollout_server is not None:
            raise ValueError("rollout_dtype must be None with rollout_server, which has a dtype of its own")


@dataclass(frozen=True, kw_only=True)
class EntropyConfig(Config):
    """Options by the entropy of the policy's distributions. entropy_coef is an option of the loss.

    top_entropy_quantile   train on this share of the tokens only, those with the largest entropies; 1 is all
    entropy_target         let the coefficient of the entropy bonus follow this entropy; None keeps it
    entropy_coef_delta     how far the coefficient moves after an update
    entropy_coef_min       the least it can be
    entropy_coef_max       the most it can be
    """

    top_entropy_quantile: float = number(1.0, 0, 1)
    entropy_target: float | None = number(None, 0)
    entropy_coef_delta: float = number(0.005, 0, open_low=True)
    entropy_coef_min: float = number(0.0, 0)
    entropy_coef_max: float = number(1.0, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.entropy_coef_min > self.entropy_coef_max:
            wanted = f"at most entropy_coef_max={self.entropy_coef_max}"
            raise ValueError(f"entropy_coef_min must be {wanted}, found {self.entropy_coef_min}")

    def without_effect(self) -> list[str]:
        """Return a sentence for each option that is set but has no effect."""
        names = ("entropy_coef_delta", "entropy_coef_min", "entropy_coef_max")
        changed = [name for name in names if getattr(self, name) != getattr(type(self), name)]
        return [
            f"{name} has no effect: it is for entropy_target, found None"
            for name in changed
            if self.entropy_target is None
        ]


@dataclass(frozen=True, kw_only=True)
class PolicyGradientConfig(RewardOptions):
    """Options that GRPO and PPO share. batch_size counts prompts, micro_batch_size and minibatch_size completions.

    minibatch_size      completions in one update, drawn anew in every pass; 0 is all of them
    mask_truncated      leave completions that max_new_tokens cut off out of the loss
    old_logps           log-probs of the old policy: "rollout" takes those of sampling, "recompute" those of a forward
                        before the first update; "auto" is "rollout" unless that is not the policy's own distribution, as
                        with top_k, top_p or importance_cap
    exact               make the log-probs of sampling and training equal bit for bit, which takes longer: sums have one order
                        in both. For Hugging Face models of the common kind on a GPU; strop's MoE does so anyway
    pad_id              the padding id in prompts given as ids; None takes the tokenizer's or the model's
    """

    minibatch_size: int = count(0)
    mask_truncated: bool = False
    old_logps: str = choice("auto", ("auto", "rollout", "recompute"))
    exact: bool = False
    pad_id: int | None = None
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    rule: ClassVar[PolicyRule]  # the loss with what the rest of the config says of it
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-6))

    def __post_init__(self) -> None:
        super().__post_init__()
        run = self.run
        for name, wanted, found in (
            ("rollout_server", None, self.server.rollout_server), ("rollout_dtype", None, self.rollout_dtype),
            ("lora", None, self.lora), ("shard", "none", run.shard),
            ("compile", False, run.compile), ("dropout", False, run.dropout), ("max_staleness", 0, self.server.max_staleness),
        ):  # fmt: skip
            if self.exact and found != wanted:
                why = "with exact, for its sums have an order of their own"
                raise ValueError(f"{name} must be {wanted!r} {why}, found {found!r}")
        if self.sampling.greedy:
            raise ValueError("temperature must be above 0: greedy completions of a prompt are all the same, found 0")

    def without_effect(self) -> list[str]:
        return self.entropy.without_effect() + super().without_effect()

    @functools.cached_property
    def recomputes(self) -> bool:
        """True if old log-probs are computed by a separate forward."""
        return self.old_logps == "recompute" or (self.old_logps == "auto" and self.sampling.cuts)


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(PolicyGradientConfig):
    """Options of GRPO.

    group_size          completions sampled for each prompt
    kl_coef             weight of the KL to the reference (β in the formula); 0 needs no reference
    inner_epochs        passes over the completions of a step
    advantage           how rewards become advantages: grpo, dr_grpo, rloo, reinforce++, reinforce++_baseline, maxrl, gdpo or
                        pass@k; docs/algorithms/grpo.md has the formulas
    pass_k              the k of pass@k; 0 is group_size
    advantage_scale     for grpo: divide centred rewards by the std of the "group" or of the "batch", or by nothing: "none"
    advantage_ddof      the std of advantages divides by n - ddof: 1 as TRL does, 0 as the paper says
    advantage_eps       added to the std of advantages: 1e-4 as TRL does, 0 as the paper says
    resample_rounds     how often prompts whose rewards are all equal are sampled again
    fill_batch          replace prompts whose rewards are all equal by further prompts of the dataset, until every prompt of
                        the batch has signal (DAPO's dynamic sampling, arXiv 2503.14476)
    fill_rounds         with fill_batch: how often further prompts are drawn for a step, at most
    importance_cap      importance sampling for a sampler whose probabilities differ from the training forward's: weight the
                        policy term of each token by w = π_old/π_rollout, at most this cap, or within a pair (low, high).
                        π_old is then recomputed. None is off
    importance_mode     outside the bounds of importance_cap: "truncate" w to them, or "mask" the token (w = 0);
                        "sequence_truncate" and "sequence_mask" take w of the whole completion, the product of its tokens'
    importance_reject   leave tokens or completions out of the policy term by how far π_old is from π_rollout: token_k1,
                        seq_mean_k1 (geometric mean) and others, named and defined as verl's rollout_rs. None is off
    importance_reject_bounds   of k1: (low, high) for π_rollout/π_old, or a number for (1/high, high); of k2, k3: the largest
    replay_routing      use the experts chosen in the rollout in the training forward too, for Mixture-of-Experts models
    """

    group_size: int = count(8, low=2)
    kl_coef: float = number(0.04, 0)
    inner_epochs: int = count(1, low=1)
    advantage: str = choice("grpo", ADVANTAGES)
    pass_k: int = count(0)
    advantage_scale: str = choice("group", ADVANTAGE_SCALES)
    advantage_ddof: int = count(1)
    advantage_eps: float = number(1e-4, 0)
    resample_rounds: int = count(0)
    fill_batch: bool = False
    fill_rounds: int = count(4, low=1)
    importance_cap: float | tuple[float, float] | None = None
    importance_mode: str = choice("truncate", IMPORTANCE_MODES)
    importance_reject: str | None = choice(None, (*REJECTIONS, None))
    importance_reject_bounds: float | tuple[float, float] | None = None
    replay_routing: bool = False
    turns: TurnsConfig = field(default_factory=TurnsConfig)
    loss: PolicyRule = field(default_factory=PolicyRule)
    group_scale: ClassVar[str]  # the `scale` of `compute_batch_group_advantages`

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.advantage_ddof >= self.group_size:
            raise ValueError(f"advantage_ddof must be below group_size={self.group_size}, found {self.advantage_ddof}")
        if self.pass_k == 1 or self.pass_k > self.group_size:
            raise ValueError(f"pass_k must be 0, or from 2 to group_size={self.group_size}, found {self.pass_k}")
        if self.turns.credit == "turn" and self.advantage not in ("grpo", "dr_grpo"):
            raise ValueError(f'advantage must be "grpo" or "dr_grpo" with credit="turn", found {self.advantage!r}')
        self._check_importance()
        if self.replay_routing and self.server.urls:
            raise ValueError("replay_routing must be False with rollout_server, which does not name its experts")
        if self.replay_routing and self.run.compile:
            raise ValueError("replay_routing must be False with compile=True, found True")
        if self.fill_batch and self.server.max_staleness:
            raise ValueError("fill_batch must be False with max_staleness, which samples the next step's prompts ahead")

        if self.calls.on_reward_error == "leave_out" and self.turns.credit == "turn":
            raise ValueError('on_reward_error must be "raise" with credit="turn", found "leave_out"')
        rule = replace(self.loss, beta=self.kl_coef, max_completion_length=self.sampling.max_new_tokens)
        object.__setattr__(self, "rule", rule)
        scales = {"grpo": self.advantage_scale, "gdpo": "group", "rloo": "leave_one_out", "maxrl": "mean"}
        object.__setattr__(self, "group_scale", scales.get(self.advantage, "none"))

    def _check_importance(self) -> None:
        """Raise unless the options of the correction between sampler and trainer fit together."""
        cap, bounds, criterion = self.importance_cap, self.importance_reject_bounds, self.importance_reject
        if cap is not None:
            low, high = _pair(cap, "importance_cap", 0.0)
            check_number(low, "importance_cap", low=0.0, high=1.0)
            check_number(high, "importance_cap", low=1.0)
        if criterion is not None:
            if bounds is None:
                raise ValueError(f"importance_reject_bounds must be given for {criterion!r}, found None")
            if not criterion.endswith("k1"):
                check_number(bounds, "importance_reject_bounds", low=0.0)
            elif isinstance(bounds, (tuple, list)):
                for one in _pair(bounds, "importance_reject_bounds", 0.0):
                    check_number(one, "importance_reject_bounds", low=0.0, open_low=True)
                if not bounds[0] <= bounds[1]:
                    raise ValueError(f"importance_reject_bounds must be (low, high), found {tuple(bounds)}")
            else:
                check_number(bounds, "importance_reject_bounds", low=1.0)
        for name, value in (("importance_cap", cap), ("importance_reject", criterion)):
            if self.old_logps == "rollout" and value is not None:
                why = "which compares recomputed log-probs with the rollout's"
                raise ValueError(f'old_logps must be "auto" or "recompute" with {name}, {why}, found "rollout"')
        if self.loss.loss_type == "vespo" and cap is not None and self.importance_mode.startswith("sequence"):
            why = "whose loss multiplies the weights of a sequence's tokens itself"
            raise ValueError(
                f"importance_mode must be 'truncate' or 'mask' for 'vespo', {why}, found {self.importance_mode!r}"
            )

    def without_effect(self) -> list[str]:
        idle = self.importance_mode != type(self).importance_mode and self.importance_cap is None
        told = ["importance_mode has no effect: it is for importance_cap, found None"] if idle else []
        if self.importance_reject_bounds is not None and self.importance_reject is None:
            told.append("importance_reject_bounds has no effect: it is for importance_reject, found None")
        if self.fill_rounds != type(self).fill_rounds and not self.fill_batch:
            told.append("fill_rounds has no effect: it is for fill_batch, found False")
        for name, used in (
            ("advantage_scale", ("grpo",)), ("advantage_ddof", WITH_STD), ("advantage_eps", WITH_STD), ("pass_k", ("pass@k",)),
        ):  # fmt: skip
            if getattr(self, name) != getattr(type(self), name) and self.advantage not in used:
                told.append(f"{name} has no effect: it is for advantage {' or '.join(used)}, found {self.advantage!r}")
        return told + super().without_effect()

    @functools.cached_property
    def recomputes(self) -> bool:
        """True if old log-probs are computed by a separate forward."""
        corrects = self.importance_cap is not None or self.importance_reject is not None
        return super().recomputes or (self.old_logps == "auto" and corrects)


def _pair(value: float | Sequence[float], name: str, low: float) -> tuple[float, float]:
    """Return the bounds (low, high) of an option that is a pair, or one number for the upper one."""
    pair = tuple(value) if isinstance(value, (tuple, list)) else (low, value)
    if len(pair) != 2:
        raise ValueError(f"{name} must be one number or a pair (low, high), found {len(pair)} numbers")
    return pair


@dataclass(frozen=True, kw_only=True)
class RLOOConfig(GRPOConfig):
    """Options of RLOO: those of GRPO, with the advantage rloo and the loss luspo, which divides by no length."""

    advantage: str = choice("rloo", ADVANTAGES)
    loss: PolicyRule = field(default_factory=lambda: PolicyRule(loss_type="luspo"))


@dataclass(frozen=True, kw_only=True)
class PPOConfig(PolicyGradientConfig):
    """Options of PPO.

    group_size            completions sampled for each prompt
    kl_coef               weight of the KL that is subtracted from the rewards; 0 needs no reference
    gamma                 γ, the discount of later rewards
    lam                   λ of the advantage estimation: 1 trusts the rewards, 0 the critic
    whiten                bring advantages to mean 0 and std 1 over the tokens of the step
    value_coef            weight of the critic's loss
    value_clip            how far a value may move from what it was before the step's updates; None does not clip
    critic_learning_rate  the critic's own learning rate, with the policy's schedule
    inner_epochs          passes over the completions of a step
    """

    group_size: int = count(1, low=1)
    kl_coef: float = number(0.05, 0)
    gamma: float = number(1.0, 0, 1)
    lam: float = number(0.95, 0, 1)
    whiten: bool = True
    value_coef: float = number(0.1, 0)
    value_clip: float | None = number(0.2, 0, open_low=True)
    critic_learning_rate: float = number(1e-5, 0)
    inner_epochs: int = count(4, low=1)
    loss: PolicyRule = field(default_factory=lambda: PolicyRule(loss_type="dapo"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.calls.on_reward_error == "leave_out":
            raise ValueError(
                'on_reward_error must be "raise": PPO needs the reward of every completion, found "leave_out"'
            )
        rule = replace(self.loss, max_completion_length=self.sampling.max_new_tokens)  # the KL is in the rewards
        object.__setattr__(self, "rule", rule)


@dataclass(frozen=True, kw_only=True)
class DistillConfig(TrainerConfig):
    """Options of Distill.

    divergence   "reverse_kl", "forward_kl", "jsd", or "sampled": the reverse KL at the sampled token, as a policy gradient
    beta         for jsd: near 0 it behaves like the forward KL, near 1 like the reverse
    on_policy    the probability that the student writes the completion of a row itself
    off_policy   where the other completions come from: "dataset" (its column completion) or "teacher" (which samples)
    pad_id       the padding id in prompts given as ids; None takes the tokenizer's or the model's
    """

    divergence: str = choice("reverse_kl", DIVERGENCES)
    beta: float = number(0.5, 0, 1, open_low=True, open_high=True)
    on_policy: float = number(1.0, 0, 1)
    off_policy: str = choice("dataset", ("dataset", "teacher"))
    pad_id: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    server: ServerConfig = field(default_factory=ServerConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-5))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.divergence == "sampled" and (self.on_policy < 1 or self.sampling.cuts or self.sampling.greedy):
            wanted = "all completions are drawn from the student's whole distribution"
            options = "on_policy 1, temperature above 0, no top_k or top_p"
            raise ValueError(f"divergence must not be 'sampled' unless {wanted}: {options}")
        if self.server.max_staleness and self.on_policy < 1 and self.off_policy == "teacher":
            raise ValueError('off_policy must be "dataset" with max_staleness, found "teacher"')

    def without_effect(self) -> list[str]:
        idle = self.beta != type(self).beta and self.divergence != "jsd"
        return [f"beta has no effect: it is for divergence='jsd', found {self.divergence!r}"] if idle else []

    @property
    def from_dataset(self) -> bool:
        """True if rows of the dataset need completions."""
        return self.on_policy < 1 and self.off_policy == "dataset"


@dataclass(frozen=True, kw_only=True)
class OnlineDPOConfig(DPOConfig, RewardOptions):
    """Options of OnlineDPO: those of DPO, of reward functions and of several turns."""

    turns: TurnsConfig = field(default_factory=TurnsConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampling.greedy:
            raise ValueError("temperature must be above 0: two greedy completions are the same, found 0")
