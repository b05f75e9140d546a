"""PPO: reinforcement learning with a critic (arXiv 1707.06347), for language models as in arXiv 2203.02155.

A step: sample completions and reward them. The reward of a token is −kl_coef·(log π_old − log π_ref); the last token
also gets the completion's reward. The critic's values give advantages by generalised advantage estimation;
returns = advantages + values. Then several updates are made on

    policy_loss(log π, log π_old, advantages) + value_coef·½·max((V − R)², (V_clipped − R)²)

where V_clipped stays within value_clip of the values before the updates.

B completions, T tokens.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from strop._types import Json, State
from strop.algorithms.on_policy import PolicyGradient, WholeBatch, check_rewarded
from strop.algorithms.reward_model import ModelReward
from strop.config import PPOConfig
from strop.data.batch import TokenBatch, Trajectory
from strop.losses import PolicyLoss
from strop.models import Policy
from strop.models.critic import Critic
from strop.models.kinds import shares
from strop.primitives import compute_gae
from strop.training.optimizers import make_optimizer
from strop.training.trainer import Metrics, Sum, Update, can_skip, not_finite


class PPO(PolicyGradient):
    """Proximal policy optimisation.

    ppo = PPO(model=model, reward_fn=reward_fn, kl_coef=0.05, learning_rate=1e-6, max_new_tokens=128)
    metrics = ppo.train_step(prompts)          # or ppo.train(dataset)

    reward_fn   a function or several; see `strop.rewards`
    critic      None: a value head on the policy's hidden states; or a sequence classifier with one label: a module, a
                folder or a name
    """

    Config = PPOConfig
    config: PPOConfig

    def __init__(self, *, reward_fn: object = None, critic: object = None, **arguments: Any):
        check_rewarded("PPO", arguments, "a reward_fn", reward_fn, arguments.get("environment"))
        super().__init__(reward_fn=reward_fn, **arguments)
        self.critic = Critic(self.policy, critic, self.config.run)
        for function in self.functions:
            if isinstance(function, ModelReward) and shares(function.policy.model, self.critic.module):
                raise ValueError(
                    "critic must not be the model that gives the rewards, which would change: load it twice"
                )
        self.world.make_same(self.critic.module)
        self.critic_optim = replace(self.config.optim, learning_rate=self.config.critic_learning_rate)
        self.critic_optimizer = make_optimizer(self.critic.module, self.critic_optim)
        self._value_losses: list[torch.Tensor] = []  # of the step's micro-batches

    @property
    def readers(self) -> list[Policy]:
        return super().readers if self.critic.scorer is None else [*super().readers, self.critic.scorer]

    # ---- a step ----

    def score(self, trajectories: Sequence[Trajectory]) -> None:
        """Fill old_logps_t, ref_logps_t and values_t."""
        super().score(trajectories)
        with self.phase("score"), self.autocast(), torch.no_grad():
            for part, batch in self.scoring_batches(trajectories):
                values_n = self.policy.reading(functools.partial(self._values, batch)).to(self.policy.loss_dtype)
                for trajectory, values_t in zip(part, batch.split(values_n), strict=True):
                    trajectory.values_t = values_t

    def _values(self, batch: TokenBatch) -> torch.Tensor:
        return self.critic.values(batch, self._head(batch))

    def _head(self, batch: TokenBatch) -> Any:
        """Return the policy's hidden states if the critic reads them, else None."""
        return self.policy.hidden(batch) if self.critic.scorer is None else None

    def advantages(self, trajectories: Sequence[Trajectory], batch: WholeBatch) -> None:
        """Fill advantages_t and returns_t, on the host, where the rewards are."""
        config, lengths = self.config, [one.num_loss_tokens for one in trajectories]
        values_BT = _padded([one.values_t for one in trajectories])
        rewards_BT = torch.zeros_like(values_BT)
        if self.reference is not None:
            old_BT, ref_BT = (
                _padded([getattr(one, name) for one in trajectories]) for name in ("old_logps_t", "ref_logps_t")
            )
            rewards_BT -= config.kl_coef * (old_BT - ref_BT)
        last_B = [length - 1 for length in lengths]
        rewards_BT[range(len(trajectories)), last_B] += torch.tensor([one.reward for one in trajectories]).double()
        mask_BT = torch.arange(values_BT.shape[1]) < torch.tensor(lengths).long()[:, None]
        advantages_BT = compute_gae(rewards_BT, values_BT, gamma=config.gamma, lam=config.lam, mask=mask_BT)
        returns_BT = advantages_BT + values_BT
        if config.whiten:  # by mean and standard deviation over the tokens of all processes
            num_tokens_B = self.loss_tokens(batch)
            own_B = torch.tensor(num_tokens_B[batch.first : batch.first + len(trajectories)]).bool()
            counted_N = advantages_BT[mask_BT & own_B[:, None]]
            number = max(sum(num_tokens_B), 1)
            mean = self.world.total(counted_N.sum().item()) / number
            squares = self.world.total((counted_N - mean).square().sum().item())
            advantages_BT = (advantages_BT - mean) / ((squares / number) ** 0.5 + 1e-8)
        dtype = self.policy.loss_dtype
        for i, (trajectory, length) in enumerate(zip(trajectories, lengths, strict=True)):
            trajectory.advantages_t = advantages_BT[i, :length].to(dtype)
            trajectory.returns_t = returns_BT[i, :length].to(dtype)

    def learn(self, trajectories: Sequence[Trajectory], batch: WholeBatch) -> Metrics:
        """Update policy and critic; return the metrics."""
        self._value_losses, metrics, before = [], self._value_metrics(trajectories), self.state.updates
        metrics |= super().learn(trajectories, batch)
        losses, num_updates = self._value_losses or [torch.zeros(())], self.state.updates - before
        return metrics | {"value/loss": Sum(torch.stack(losses).sum(dtype=self.sum_dtype) / num_updates)}

    def _value_metrics(self, trajectories: Sequence[Trajectory]) -> Metrics:
        """Return metrics before the updates: the mean value, and the share of the returns' variance that the values
        explain.
        """
        values = [value for one in trajectories if one.values_t is not None for value in one.values_t.tolist()]
        returns = [value for one in trajectories if one.returns_t is not None for value in one.returns_t.tolist()]
        pairs_N2 = torch.tensor(self.of_all(list(zip(values, returns, strict=True))), dtype=torch.float64)
        values_N, returns_N = pairs_N2.unbind(1)
        spread, left = returns_N.var(correction=0), (returns_N - values_N).var(correction=0)
        explained = 0.0 if spread == 0 else 1 - (left / spread).item()
        return {"value/mean": values_N.mean().item(), "value/explained_variance": explained}

    def loss_on(self, trajectories: Sequence[Trajectory]) -> PolicyLoss:
        """Return the loss of policy and critic on these trajectories, each token with its weight."""
        return self.policy.reading(functools.partial(self._loss_on, trajectories))

    def _loss_on(self, trajectories: Sequence[Trajectory]) -> PolicyLoss:
        config, batch = self.config, self.batch_of(trajectories)
        head = self._head(batch)
        result = self.policy.loss(batch, self.rule, temperature=config.sampling.temperature, head=head)
        before_n, returns_n = batch.values_n, batch.returns_n
        assert batch.weights_n is not None
        assert before_n is not None
        assert returns_n is not None
        values_n = self.critic.values(batch, head).to(returns_n.dtype)
        errors_n = (values_n - returns_n).square()
        if config.value_clip is not None:
            moved_n = (values_n - before_n).clamp(-config.value_clip, config.value_clip)
            errors_n = torch.maximum(errors_n, (before_n + moved_n - returns_n).square())
        value_loss = (batch.weights_n * errors_n).sum() / 2
        self._value_losses.append(value_loss.detach())
        loss = result.loss + config.value_coef * value_loss
        return PolicyLoss(loss, result.policy_loss, result.kl, lambda: result.metrics)

    def update(self, losses: Any, **options: Any) -> Update:
        """Update the policy, then the critic. One backward made the gradients of both."""
        self.critic_optimizer.zero_grad(set_to_none=True)
        update = super().update(losses, **options)
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

    # ---- checkpoints ----

    def extra_state(self) -> State:
        tensors, values = super().extra_state()
        return tensors | {f"critic/{name}": tensor for name, tensor in self._critic_state().items()}, values

    def load_extra_state(self, tensors: dict[str, torch.Tensor], values: Json) -> None:
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


def _padded(rows: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return [B, T] float64 on the host, padded with zeros."""
    if not rows:  # a process without completions
        return torch.zeros(0, 0, dtype=torch.float64)
    return pad_sequence([row.detach().cpu().double() for row in rows if row is not None], batch_first=True)
