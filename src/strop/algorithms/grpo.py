"""GRPO: reinforcement learning from rewards compared within a group (arXiv 2402.03300), and its relatives.

A step: sample group_size completions of each prompt; reward them; the advantage of a completion is its reward relative
to its group; score them with the frozen reference; then one or several updates on

    policy_loss(log π, log π_old, advantages) + kl_coef·KL(π ‖ π_ref)

with the formulas of `strop.losses.policy_loss`. log π_old are the log-probs the completions were sampled with.

B completions, P prompts, T tokens. Completions of a prompt are adjacent.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from strop._checks import check_choice, check_count, check_number
from strop.algorithms.on_policy import PolicyGradient, WholeBatch, check_rewarded, sampled_and_trained
from strop.config import OptimConfig, TrainerConfig
from strop.data.batch import Trajectory, joined
from strop.environments.base import TurnsConfig
from strop.environments.credit import turn_advantages
from strop.losses import ADVANTAGE_SCALES, PolicyRule
from strop.models import unwrapped
from strop.models.routing import Routers
from strop.primitives import compute_batch_group_advantages
from strop.rewards import check_timeout
from strop.rollout import Sampling
from strop.rollout.server import ServerConfig
from strop.training.state import Mean

OLD_LOGPS = ("auto", "rollout", "recompute")
IMPORTANCE_MODES = ("truncate", "mask")


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

    @functools.cached_property
    def rule(self) -> PolicyRule:
        """The loss with what the rest of the config says of it."""
        return replace(self.loss, beta=self.kl_coef, max_completion_length=self.sampling.max_new_tokens)

    @functools.cached_property
    def recomputes(self) -> bool:
        """Whether old log-probs come from a forward of their own."""
        differs = self.sampling.cuts or self.importance_cap is not None
        return self.old_logps == "recompute" or (self.old_logps == "auto" and differs)


def check_exact(config: Any) -> None:
    """What cannot be exact, whatever the model."""
    run = config.run
    for name, wanted, found in (
        ("rollout_server", None, config.server.rollout_server), ("lora", None, config.lora), ("shard", "none", run.shard),
        ("compile", False, run.compile), ("dropout", False, run.dropout),
    ):  # fmt: skip
        if config.exact and found != wanted:
            raise ValueError(
                f"{name} must be {wanted!r} with exact, for its sums have an order of their own, found {found!r}"
            )


class GRPO(PolicyGradient):
    """Group-relative policy optimisation.

    grpo = GRPO(model=model, reward_fn=reward_fn, group_size=8, kl_coef=0.04, learning_rate=1e-6, max_new_tokens=128)
    metrics = grpo.train_step(prompts)          # or grpo.train(dataset)

    reward_fn     a function or several; see `strop.rewards`
    environment   a class of `strop.environments` for more than one turn, whose rewards are added to reward_fn's
    tools         functions the model may call, in place of an environment
    """

    Config = GRPOConfig
    config: GRPOConfig

    def __init__(self, *, reward_fn: Any = None, environment: Any = None, tools: Any = None, **arguments: Any):
        check_rewarded("GRPO", arguments, "a reward_fn or an environment", reward_fn, environment)
        super().__init__(reward_fn=reward_fn, environment=environment, tools=tools, **arguments)
        if self.player is not None and self.config.replay_routing:
            raise ValueError("replay_routing must be False with an environment or tools, found True")
        by_turn = self.player is not None and self.config.turns.credit == "turn"
        if by_turn and self.config.advantage_scale == "batch" and self.world.size > 1:
            raise ValueError('advantage_scale must be "group" or "none" with credit="turn" in several processes')

    def setup(self, ref_model: Any) -> None:
        if self.config.replay_routing and isinstance(self.policy.routers, str):  # asked before weights lie in shards
            name = type(unwrapped(self.policy.model)).__name__
            raise ValueError(f"replay_routing must be False for this {name}: {self.policy.routers}")
        super().setup(ref_model)

    def sample(
        self, prompts: Sequence[Trajectory], addresses: Sequence[int]
    ) -> tuple[list[Trajectory], dict[str, Any]]:
        """Return completions of the prompts; groups whose rewards are all equal are sampled again, as often as wanted."""
        lines, size = self.draw(prompts, addresses), self.num_samples
        if not self.config.resample_rounds:
            return lines, {}
        self.reward(lines)
        metrics = {"reward/resampled_fraction": self._fraction_without_signal(lines)}
        for attempt in range(1, self.config.resample_rounds + 1):
            again = without_signal(lines, size).nonzero().flatten().tolist()
            if not self.of_all(again):  # all processes go on while one has to: they may share a server
                break
            new = self.draw([prompts[i] for i in again], [addresses[i] for i in again], attempt)
            self.reward(new)
            for number, group in enumerate(again):
                lines[group * size : (group + 1) * size] = new[number * size : (number + 1) * size]
        return lines, metrics

    def advantages(self, lines: Sequence[Trajectory], batch: WholeBatch) -> None:
        """Fill advantages_t, and importance_t with importance_cap."""
        config = self.config
        assert batch.rewards is not None
        lengths = [line.num_loss_tokens for line in lines]
        if config.turns.credit == "turn" and self.player is not None:
            found = turn_advantages(
                lines, config.group_size, config.turns.turn_discount, scale=config.advantage_scale,
                ddof=config.advantage_ddof, eps=config.advantage_eps,
            )  # fmt: skip
            advantages_N = joined(found)
        else:
            rewards_B = batch.rewards.total_B
            # in float64, so that float32 rewards give the nearest float32
            advantages_B = compute_batch_group_advantages(
                rewards_B.double(), config.group_size, ddof=config.advantage_ddof, eps=config.advantage_eps,
                scale=config.advantage_scale,
            ).to(rewards_B.dtype)  # fmt: skip
            own_B = advantages_B[batch.first : batch.first + len(lines)]
            advantages_N = own_B.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
        for line, advantages_t in zip(lines, advantages_N.to(self.policy.loss_dtype).split(lengths), strict=True):
            line.advantages_t = advantages_t
        if config.importance_cap is not None:
            self._weigh_by_importance(lines, lengths, config.importance_cap)

    def _weigh_by_importance(
        self, lines: Sequence[Trajectory], lengths: list[int], cap: float | tuple[float, float]
    ) -> None:
        """Fill importance_t: π_old/π_rollout, truncated to the bounds or masked outside of them."""
        low, high = cap if isinstance(cap, (tuple, list)) else (0.0, cap)
        sampled_N, trained_N = sampled_and_trained(lines)
        ratios_N = (trained_N - sampled_N).exp()
        weights_N = ratios_N.clamp(low, high)
        if self.config.importance_mode == "mask":
            weights_N = ratios_N.masked_fill(weights_N != ratios_N, 0.0)
        for line, importance_t in zip(lines, weights_N.split(lengths), strict=True):
            line.importance_t = importance_t

    def learn(self, lines: Sequence[Trajectory], batch: WholeBatch) -> dict[str, Any]:
        """Update the weights; return the metrics."""
        routers = self.policy.routers if self.config.replay_routing else None
        if isinstance(routers, Routers):
            routers.counts.clear()
        metrics = {"reward/zero_std_fraction": self._fraction_without_signal(lines)} | super().learn(lines, batch)
        if isinstance(routers, Routers):
            counts_2: Any = torch.stack(routers.counts).sum(0) if routers.counts else (0, 0)
            metrics["routing/changed_fraction"] = Mean(*counts_2)
        return metrics

    def _fraction_without_signal(self, lines: Sequence[Trajectory]) -> Mean:
        without_P = without_signal(lines, self.num_samples)
        return Mean(int(without_P.sum()), len(without_P))


def without_signal(lines: Sequence[Trajectory], group_size: int) -> torch.Tensor:
    """[P] whether all rewards of a group are equal, so that its advantages are 0."""
    groups_PG = torch.tensor([line.reward for line in lines]).view(-1, group_size)
    return (groups_PG == groups_PG[:, :1]).all(1)
