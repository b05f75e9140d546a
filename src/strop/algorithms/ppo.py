"""PPO: reinforcement learning with a critic (arXiv 1707.06347), for language models as in arXiv 2203.02155.

A step: sample completions; reward them; the reward of a token is −kl_coef·(log π_old − log π_ref), and that of the last
token also the completion's reward; the critic's values give advantages by generalised advantage estimation and returns
= advantages + values; then several updates on

    policy_loss(log π, log π_old, advantages) + value_coef·½·max((V − R)², (V_clipped − R)²)

where V_clipped stays within value_clip of the values before the updates.

B completions, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from strop.algorithms.grpo import GRPO, Experience, Scores
from strop.algorithms.reward_model import ModelReward
from strop.config import PPOConfig
from strop.data.batch import TokenBatch, joined, on_device
from strop.data.inputs import Prompt
from strop.losses import PolicyLoss
from strop.models.critic import Critic
from strop.models.kinds import shares
from strop.primitives import compute_gae
from strop.rewards import sample_table
from strop.rollout import ENDED, Rollout, completion_metrics
from strop.training.optimiser import can_skip, make_optimizer
from strop.training.state import Sum, not_finite
from strop.training.trainer import Update


@dataclass
class Valued(Experience):
    """With the values before the updates, the advantages and the returns of every token, a 1-D tensor per completion."""

    values: list[torch.Tensor] = field(default_factory=list)
    advantages: list[torch.Tensor] = field(default_factory=list)
    returns: list[torch.Tensor] = field(default_factory=list)


class PPO(GRPO):
    """Proximal policy optimisation.

    ppo = PPO(model=model, reward_fn=reward_fn, kl_coef=0.05, learning_rate=1e-6, max_new_tokens=128)
    metrics = ppo.train_step(prompts)          # or ppo.train(dataset)

    reward_fn   a function or several; see `strop.rewards`
    critic      None: a value head on the policy's hidden states; or a sequence classifier with one label: a module, a
                folder or a name
    """

    Config = PPOConfig  # type: ignore[assignment]
    config: PPOConfig  # type: ignore[assignment]

    def __init__(self, *, critic: Any = None, **arguments: Any):
        super().__init__(**arguments)
        self.critic = Critic(self.policy, critic, self.config.run)
        for function in self.functions:
            if isinstance(function, ModelReward) and shares(function.policy.model, self.critic.module):
                raise ValueError(
                    "critic must not be the model that gives the rewards, which would change: load it twice"
                )
        self.world.make_same(self.critic.module)
        self.critic_optim = replace(self.config.optim, learning_rate=self.config.critic_learning_rate)
        self.critic_optimizer = make_optimizer(self.critic.module.named_parameters(), self.critic_optim)
        self._value_losses: list[torch.Tensor] = []  # of the micro-batches of the step

    def extra_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors, values = super().extra_state()
        return tensors | {f"critic/{name}": tensor for name, tensor in self._critic_state().items()}, values

    def load_extra_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        found = {name.removeprefix("critic/"): t for name, t in tensors.items() if name.startswith("critic/")}
        super().load_extra_state({name: t for name, t in tensors.items() if not name.startswith("critic/")}, values)
        weights = {name.removeprefix("model/"): t for name, t in found.items() if name.startswith("model/")}
        if weights.keys() != self.critic.module.state_dict().keys():
            raise ValueError("critic must be of the kind that was saved: give the same critic= (--critic) again")
        self.critic.module.load_state_dict(weights)
        for name, param in self.critic.module.named_parameters():
            below = f"optim/{name}/"
            state = {key.removeprefix(below): t.clone() for key, t in found.items() if key.startswith(below)}
            if state:
                moved = {
                    key: t if key == "step" and not param.is_cuda else t.to(param.device) for key, t in state.items()
                }
                self.critic_optimizer.state[param] = moved

    def _critic_state(self) -> dict[str, torch.Tensor]:
        names = {id(param): name for name, param in self.critic.module.named_parameters()}
        found = {f"model/{name}": tensor for name, tensor in self.critic.module.state_dict().items()}
        for param, state in self.critic_optimizer.state.items():
            found |= {f"optim/{names[id(param)]}/{key}": value for key, value in state.items()}
        return found

    # ---- a step ----

    def _step(self, prompts: list[Prompt]) -> dict[str, float]:
        mine = self.share(len(prompts))
        prompts = prompts[mine.start : mine.stop]
        with self.sampler.ready():
            rollout = self._generate(prompts, mine, 0)
        scores = self._score(rollout)
        rows, rewards = self._reward(prompts, rollout)
        self.samples = sample_table(rows, reward=rewards.total_B.tolist())
        ends, everyones = self.of_all(rollout.ends), rewards.over(self.world)
        first = mine.start * self.config.group_size
        experience = self._experience(rollout, everyones.total_B, scores, ends, first)
        metrics = everyones.metrics | completion_metrics(ends) | self._value_metrics(experience)
        metrics |= self._learn(experience)
        self.count_tokens(sum(map(len, experience.trajectories)))
        return metrics | {"mean_reward": metrics["reward/mean"], "mean_kl": metrics.get("kl", 0.0)}

    def _experience(
        self, rollout: Rollout, rewards_B: torch.Tensor, scores: Scores | None = None,
        ends: list[tuple[int, str]] | None = None, first: int = 0,
    ) -> Valued:  # fmt: skip
        """As GRPO's, with what the critic expects."""
        old_logps, ref_logps = scores or self._score(rollout)
        masked = self.config.mask_truncated
        counted = [length if why in ENDED or not masked else 0 for length, why in ends or rollout.ends]
        none_B, values = torch.zeros(len(rollout)), self._values(rollout)
        found = Valued(rollout, none_B, counted, old_logps, ref_logps, first=first, values=values)
        self._estimate(found, rewards_B[first : first + len(rollout)])
        return found

    @torch.no_grad()
    def _values(self, rollout: Rollout) -> list[torch.Tensor]:
        """Of every completion's tokens."""
        found: dict[int, torch.Tensor] = {}
        dtype = self.policy.loss_dtype
        with self.phase("score"), self.autocast():
            for part, batch in self._batches(rollout):
                values_n = self.policy.reading(lambda batch=batch: self.critic.values(batch, self._head(batch)))
                found |= zip(part, batch.split(values_n.to(dtype)), strict=True)
        return [found[i] for i in sorted(found)]

    def _head(self, batch: TokenBatch) -> Any:
        """The policy's hidden states, where the critic reads them."""
        return self.policy.hidden(batch) if self.critic.scorer is None else None

    def _estimate(self, experience: Valued, rewards_B: torch.Tensor) -> None:
        """Advantages and returns of every token. On the host, where the rewards are."""
        config, lengths = self.config, [len(ids) for ids in experience.rollout.completion_ids]
        values_BT = _padded(experience.values)
        rewards_BT = torch.zeros_like(values_BT)
        if experience.ref_logps is not None:
            rewards_BT -= config.kl_coef * (_padded(experience.old_logps) - _padded(experience.ref_logps))
        rewards_BT[range(len(lengths)), [length - 1 for length in lengths]] += rewards_B.double()
        mask_BT = torch.arange(values_BT.shape[1]) < torch.tensor(lengths).long()[:, None]
        advantages_BT = compute_gae(rewards_BT, values_BT, gamma=config.gamma, lam=config.lam, mask=mask_BT)
        returns_BT = advantages_BT + values_BT
        if config.whiten:  # by mean and std over the tokens of all processes
            counts_B = torch.tensor([experience.num_tokens([i]) > 0 for i in range(len(lengths))]).bool()
            counted_N = advantages_BT[mask_BT & counts_B[:, None]]
            number = max(sum(experience.counted), 1)
            mean = self.world.total(counted_N.sum().item()) / number
            squares = self.world.total((counted_N - mean).square().sum().item())
            advantages_BT = (advantages_BT - mean) / ((squares / number) ** 0.5 + 1e-8)
        dtype = self.policy.loss_dtype
        experience.advantages = [row[:n].to(dtype) for row, n in zip(advantages_BT, lengths, strict=True)]
        experience.returns = [row[:n].to(dtype) for row, n in zip(returns_BT, lengths, strict=True)]

    # ---- learning ----

    def _learn(self, experience: Experience) -> dict[str, Any]:
        self._value_losses = []
        metrics = super()._learn(experience)
        num_completions = len(experience.counted)
        num_updates = self.config.inner_epochs * -(-num_completions // (self.config.minibatch_size or num_completions))
        losses = self._value_losses or [torch.zeros(())]
        return metrics | {"value/loss": Sum(torch.stack(losses).double().sum() / num_updates)}

    def _value_metrics(self, experience: Valued) -> dict[str, float]:
        """Before the updates: the mean value, and the share of the returns' variance that the values explain."""
        pairs_N2 = torch.tensor(
            self.of_all(
                [
                    pair
                    for values, returns in zip(experience.values, experience.returns, strict=True)
                    for pair in zip(values.tolist(), returns.tolist(), strict=True)
                ]
            ),
            dtype=torch.float64,
        )
        values_N, returns_N = pairs_N2.unbind(1)
        spread, left = returns_N.var(correction=0), (returns_N - values_N).var(correction=0)
        explained = 0.0 if spread == 0 else 1 - (left / spread).item()
        return {"value/mean": values_N.mean().item(), "value/explained_variance": explained}

    def loss_on(
        self, experience: Experience, indices: Sequence[int], *, num_tokens: int, num_sequences: int
    ) -> PolicyLoss:
        """The loss of these completions as their share of a batch with so many tokens and sequences, the critic's too."""
        return self.policy.reading(lambda: self._loss_on(experience, indices, num_tokens, num_sequences))

    def _loss_on(
        self, experience: Experience, indices: Sequence[int], num_tokens: int, num_sequences: int
    ) -> PolicyLoss:
        assert isinstance(experience, Valued)
        config, device = self.config, self.policy.device
        batch = self._batch(experience, indices, num_tokens, num_sequences)
        advantages_n, returns_n, before_n = (
            on_device(joined([values[i] for i in indices]), device)
            for values in (experience.advantages, experience.returns, experience.values)
        )
        batch.advantages_n = advantages_n
        head = self._head(batch)
        result = self.policy.loss(batch, config.rule, temperature=config.sampling.temperature, head=head)
        values_n = self.critic.values(batch, head).to(returns_n.dtype)
        errors_n = (values_n - returns_n).square()
        if config.value_clip is not None:
            moved_n = (values_n - before_n).clamp(-config.value_clip, config.value_clip)
            errors_n = torch.maximum(errors_n, (before_n + moved_n - returns_n).square())
        assert batch.weights_n is not None
        value_loss = (batch.weights_n * errors_n).sum() / 2
        self._value_losses.append(value_loss.detach())
        loss = result.loss + config.value_coef * value_loss
        return PolicyLoss(loss, result.policy_loss, result.kl, lambda: result.metrics)

    def update(self, losses: Any) -> Update:
        """The policy's, and then the critic's, whose gradients the same backward made."""
        self.critic_optimizer.zero_grad(set_to_none=True)
        update = super().update(losses)
        with self.phase("update"):
            optimizer, limit = self.critic_optimizer, self.config.optim.max_grad_norm or float("inf")
            params = [param for group in optimizer.param_groups for param in group["params"]]
            self.world.sum_gradients(params)
            norm = torch.nn.utils.clip_grad_norm_(params, limit)
            if can_skip(optimizer):
                optimizer.found_inf = self.phases.note_unfit(norm)  # type: ignore[attr-defined]
            elif not norm.isfinite():
                raise not_finite({"loss": update["loss"], "grad_norm": norm.item()}, self.state.step)
            self.set_learning_rate(optimizer, self.critic_optim)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return update


def _padded(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """[B, T] float64 on the host."""
    if not rows:  # a process without completions
        return torch.zeros(0, 0, dtype=torch.float64)
    return pad_sequence([row.detach().double().cpu() for row in rows], batch_first=True)
