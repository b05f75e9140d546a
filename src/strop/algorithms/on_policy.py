"""The base of algorithms that learn from the policy's own completions: sample → score → reward → advantages → learn.

A step makes trajectories of its prompts and fills their fields, in this order:

    sample      ids_T, loss_mask_T, rollout_logps_t, finish, row        here, by servers, or with an environment
    score       old_logps_t, ref_logps_t                                on a GPU, while the host continues
    reward      rewards, reward
    advantages  advantages_t
    learn       weight; one or several updates

`OnPolicy` implements the step; algorithms override its parts. `PolicyGradient` is the base of GRPO and PPO: old and
reference log-probs, minibatches, and the loss of a `PolicyRule`.

B completions of the whole batch, of which this process may have a part; completions of a prompt are adjacent.
"""

import contextlib
import functools
import itertools
import random
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch

from strop import _trl
from strop._types import Array, Json, State, Texts
from strop.algorithms.entropy import EntropyBonus, keep_uncertain, mark_covariant
from strop.data.batch import TokenBatch, Trajectory, joined, on_device, with_others
from strop.data.inputs import as_prompts, prompts_of_dataset
from strop.environments.credit import EnvironmentRewards
from strop.environments.setup import checked_rows, environment_rows, trainers_player
from strop.losses import PolicyLoss, kl_estimate
from strop.models import Policy
from strop.rewards import (
    MetricsFunctions,
    PreferenceFunction,
    RewardFunctions,
    Rewards,
    reward_columns,
    sample_table,
)
from strop.rewards.functions import is_async
from strop.rollout.generate import ENDED, Captured, End, checked_prompts, completion_metrics, ends_of
from strop.rollout.sampling import Sampling
from strop.rollout.server_sampler import make_sampler
from strop.sample_metrics import answer_of, interval, sample_metrics
from strop.training.trainer import Largest, Mean, Metrics, Sum, Trainer, Update
from strop.training.trajectory_queue import Group, StepNeeds, TrajectoryQueue

MAX_THREADS = 256  # which sample groups one by one
Result = TypeVar("Result")


class WholeBatch(NamedTuple):
    """Facts that each process needs about the completions of all processes; its own begin at `first`."""

    ends: list[End]
    rewards: Rewards | None
    first: int


class OnPolicy(Trainer):
    """The base of algorithms that learn from the policy's own completions.

    reward_fn      a function or several; see `strop.rewards`
    preference_fn  a function that compares pairs, instead of rewards
    environment    a class of `strop.environments` for several turns; its rewards are added to reward_fn's
    tools          functions the model may call, instead of an environment
    agent          function(row, client) that talks to the model over HTTP, instead of an environment; see
                   `strop.environments.recorder`
    metrics_fn     a function or several; their numbers are logged and are no reward
    """

    config: Any
    formats = ("prompt_only",)
    first_attempt: ClassVar[tuple[int, ...]] = ()  # appended to the step in the seed of its first rollout

    def __init__(
        self, *, reward_fn: object = None, preference_fn: object = None, environment: object = None, tools: object = None,
        agent: object = None, metrics_fn: object = None, **arguments: Any,
    ):  # fmt: skip
        super().__init__(**arguments)
        config = self.config
        self.samples_in_16_bits = getattr(config, "rollout_dtype", None) is not None
        if self.samples_in_16_bits:
            _check_rollout_dtype(self.policy)
        self.sampler = make_sampler(self, config.server, getattr(config, "replay_routing", False))
        self.led = self.world.size > 1 and bool(config.server.urls)  # the first process samples for all
        self.in_order = config.server.order == "deterministic"
        self.present: Captured | None = None  # the weights of an evaluation that goes through the queue
        self.rewards: RewardFunctions | EnvironmentRewards | None = None
        self.preference: PreferenceFunction | None = None
        if reward_fn is not None:
            judging = config.reward_timeout, config.find_failing, config.calls
            self.rewards = RewardFunctions(reward_fn, config.reward_weights, *judging)
        if preference_fn is not None:
            judging = config.reward_timeout, config.find_failing, config.calls
            self.preference = PreferenceFunction(preference_fn, *judging)
        timeout = getattr(config, "reward_timeout", None)
        self.metrics_fn = None if metrics_fn is None else MetricsFunctions(metrics_fn, timeout)
        self.player = trainers_player(self, environment, tools, agent)
        self.environments = [one for one in (environment, agent, *_listed(tools)) if one is not None]
        self.any_format = self.player is not None
        if self.player is not None and self.preference is None:
            self.rewards = EnvironmentRewards(self.rewards, self.player)
        self.queue = self._make_queue() if config.server.max_staleness else None

    @property
    def num_samples(self) -> int:
        """The number of completions per prompt."""
        return 1

    @property
    def functions(self) -> list[Any]:
        if self.preference is not None:
            return [self.preference.function]
        return [] if self.rewards is None else self.rewards.functions

    @property
    def judges(self) -> list[Any]:
        """What reads the completions of a step: reward functions or a preference function, and metrics_fn."""
        return [one for one in (self.rewards or self.preference, self.metrics_fn) if one is not None]

    # ---- prompts ----

    def train_step(self, prompts: Texts, *, prompt_mask: Array | None = None, **columns: Any) -> dict[str, float]:
        """Train on a batch of prompts (sampling, rewards, updates); return the metrics.

        prompts       ids (B, P), lists of ids, texts, conversations, or rows with a "prompt"
        prompt_mask   (B, P), 0 at padding; without it the pad id at both ends of a prompt is padding
        columns       columns for reward functions, one entry per prompt: train_step(prompts, answer=answers)
        """
        if self.player is not None:
            batch = environment_rows(prompts, columns, "prompts")
        else:
            padding = self.policy.padding(self.config.pad_id)
            batch = as_prompts(prompts, self.policy.tokenizer, padding, mask=prompt_mask, columns=columns)
            batch = self.checked(batch, "prompts")
        return self.run_step(self.step, batch)

    def check_columns(self, rows: Sequence[Any], name: str) -> None:
        super().check_columns(rows, name)
        for judge in self.judges:
            judge.check(rows, name)

    def prepare(self, rows: Sequence[Any], name: str = "dataset") -> list[Trajectory]:
        if self.player is not None:
            return checked_rows(rows, name, self.judges)
        padding = self.policy.padding(self.config.pad_id)
        prompts = prompts_of_dataset(rows, self.policy.tokenizer, padding, name, self.name)
        for judge in self.judges:
            judge.check(rows, name)
        checked_prompts(self.policy, [prompt.ids_T for prompt in prompts], self.config.sampling, name)
        return self.checked(prompts, name)

    def checked(self, prompts: list[Trajectory], name: str) -> list[Trajectory]:
        """Return the prompts in the form the algorithm needs. Raise for a prompt it cannot use."""
        return prompts

    # ---- a step ----

    def step_on(self, rows: list[Any]) -> Metrics:
        return self.step(self._prompts(rows))

    def _prompts(self, rows: list[Any]) -> list[Trajectory]:
        """Return rows of the dataset as prompts."""
        return rows if isinstance(rows[0], Trajectory) else self.prepare(rows, "rows")

    def step(self, prompts: list[Trajectory]) -> Metrics:
        """Train on this process's share of the prompts; return the metrics."""
        mine = self.share(len(prompts))
        ahead = self.queue if self.queue is not None and self.run.has_rows else None
        if ahead is not None:
            trajectories, metrics = self.take(ahead, len(prompts), mine)
            self.score(trajectories)
        else:
            with self.sampling():
                trajectories, metrics = self.sample(prompts[mine.start : mine.stop], mine, self.state.step)
            self.score(trajectories)
            self.samples = [sample for sample in self.judged(self.reward, trajectories) if sample]
        batch = self.whole_batch(trajectories, mine.start * self.num_samples)
        metrics |= {} if batch.rewards is None else batch.rewards.metrics
        metrics |= completion_metrics(batch.ends)
        self.advantages(trajectories, batch)
        if ahead is None:
            metrics |= self.judged(self.own_metrics, trajectories)
        return metrics | self.learn(trajectories, batch) | self.metrics_of(trajectories)

    def sample(
        self, prompts: Sequence[Trajectory], addresses: Sequence[int], step: int
    ) -> tuple[list[Trajectory], Metrics]:
        """Return num_samples completions of each prompt, and metrics.

        addresses: the prompts' positions in the batch of this step.
        """
        trajectories = self.draw(prompts, addresses, step)
        return trajectories, self.resample(trajectories, prompts, addresses, step)

    def resample(
        self, trajectories: list[Trajectory], prompts: Sequence[Trajectory], addresses: Sequence[int], step: int
    ) -> Metrics:
        """Replace completions without a learning signal; return metrics of that. By default all are kept."""
        return {}

    def score(self, trajectories: Sequence[Trajectory]) -> None:
        """Fill old_logps_t, ref_logps_t or other fields that the loss reads. The host does not wait for the device."""

    def reward(self, trajectories: Sequence[Trajectory]) -> list[Json]:
        """Fill `rewards` and `reward` of trajectories without rewards; return one entry of `self.samples` for each."""
        if self.rewards is None:
            return []
        with self.phase("reward"):
            columns = reward_columns(trajectories, self.policy.tokenizer)
            if not all(one.rewards for one in trajectories):
                self.rewards(columns, trajectories).fill(trajectories)
            return sample_table(columns, **Rewards.of(trajectories, self.rewards.names).shown)

    def own_metrics(self, trajectories: Sequence[Trajectory]) -> Metrics:
        """Return the numbers of metrics_fn, and those that reward functions keep, such as a judge's tokens."""
        found: Metrics = {}
        if judge := self.rewards or self.preference:
            found |= {name: Sum(value) for name, value in judge.take_metrics().items()}
        if self.metrics_fn is not None and trajectories:
            with self.phase("reward"):
                numbers = self.metrics_fn(reward_columns(trajectories, self.policy.tokenizer))
            found |= {f"metrics/{name}": Mean(*pair) for name, pair in numbers.items()}
        return found

    def whole_batch(self, trajectories: Sequence[Trajectory], first: int) -> WholeBatch:
        """Return the facts that all processes need about each other's completions."""
        rewards = None if self.rewards is None else Rewards.of(trajectories, self.rewards.names).over(self.world)
        return WholeBatch(self.of_all(ends_of(trajectories)), rewards, first)

    def advantages(self, trajectories: Sequence[Trajectory], batch: WholeBatch) -> None:
        """Fill advantages_t."""

    def learn(self, trajectories: Sequence[Trajectory], batch: WholeBatch) -> Metrics:
        """Update the weights; return the metrics."""
        raise NotImplementedError(f"{self.name} has no learn")

    def metrics_of(self, trajectories: Sequence[Trajectory]) -> Metrics:
        """Return the algorithm's own metrics, after the updates."""
        return {}

    # ---- sampling ----

    def draw(
        self, prompts: Sequence[Trajectory], addresses: Sequence[int], step: int, *attempt: int
    ) -> list[Trajectory]:
        """Return the rollout of a step."""
        seed = self.seed_of(step, *(attempt or self.first_attempt))
        with self.phase("generate"), self.autocast():
            return self.complete(prompts, self.config.sampling, self.num_samples, seed, addresses)

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Return a context in which `complete` samples with the weights as they are."""
        if self.queue is None:
            with self.sampler.ready():
                yield
        else:
            self.present = self.sampler.capture(self.state.step)
            if not self.in_order:
                self.sampler.offer(self.present)
            yield

    def complete(
        self, prompts: Sequence[Trajectory], sampling: Sampling, num_samples: int, seed: int,
        addresses: Sequence[int] | None = None,
    ) -> list[Trajectory]:  # fmt: skip
        """Return num_samples completions of each prompt, or conversations with its environment.

        All processes call this, and the first one samples for all if they share servers. A thread of the queue calls it alone.
        """
        how = sampling, num_samples, seed
        if self.queue is not None and self.queue.is_here:
            return self._complete(prompts, *how, addresses)
        if not self.led:
            return self._complete_now(prompts, *how, addresses)
        everyones = self.world.gathered((list(prompts), list(addresses or range(len(prompts)))))

        def parts() -> list[list[Trajectory]]:
            all_prompts, all_addresses = (
                [one for some in both for one in some] for both in zip(*everyones, strict=True)
            )
            found = self._complete_now(all_prompts, *how, all_addresses)
            if self.player is not None:  # environments stay in the process that played them, and so do their rewards
                self.reward(found)
                for one in found:
                    one.shown = {name: value for name, value in one.shown.items() if name != "environments"}
            left = iter(found)
            return [list(itertools.islice(left, len(some) * num_samples)) for some, _ in everyones]

        return self.world.from_first(parts)[self.world.rank]

    def _complete_now(self, *request: Any) -> list[Trajectory]:
        """Return the completions, with max_staleness by a thread of the queue, after those that it has begun."""
        if self.queue is None:
            return self._complete(*request)

        def call() -> list[Trajectory]:
            assert self.present is not None
            self.sampler.use(self.present)
            with self.autocast():
                return self._complete(*request)

        return self.queue.call(call)

    def _complete(
        self, prompts: Sequence[Trajectory], sampling: Sampling, num_samples: int, seed: int,
        addresses: Sequence[int] | None = None,
    ) -> list[Trajectory]:  # fmt: skip
        lower = self.samples_in_16_bits
        with torch.autocast(self.policy.device.type, torch.bfloat16) if lower else contextlib.nullcontext():
            if self.player is not None:
                return self.player([prompt.row for prompt in prompts], sampling, num_samples, seed, addresses)
            trajectories = self.sampler(
                [prompt.prompt_ids for prompt in prompts], sampling, num_samples, seed, addresses
            )
        for i, trajectory in enumerate(trajectories):
            prompt = prompts[i // num_samples]
            trajectory.row, trajectory.shown = prompt.row, prompt.shown
        return trajectories

    def judged(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Return function(*arguments), which calls the user's functions: with max_staleness in the queue's thread for them."""
        return function(*arguments) if self.queue is None else self.queue.call(function, *arguments, rewards=True)

    def parts_of_all(self, num_rows: int, size: int) -> Iterator[range]:
        """Yield this process's rows of a dataset in parts.

        Every process yields as many parts, since they may share a server.
        """
        mine = self.share(num_rows)
        for start in range(mine.start, mine.start + -(-num_rows // self.world.size), size):
            yield range(start, max(start, min(start + size, mine.stop)))

    def evaluate_on(self, rows: list[Any]) -> Metrics:
        """Return the rewards of one greedy completion per prompt, or of several sampled ones with `sample_metrics`."""
        sampling, num_samples = self.config.sampling, self.config.num_eval_samples
        if num_samples == 1:
            sampling = Sampling(max_new_tokens=sampling.max_new_tokens, temperature=0.0, stop_ids=sampling.stop_ids)
        trajectories: list[Trajectory] = []
        answers: list[Hashable] = []
        assert self.rewards is not None
        with self.sampling():
            for part in self.parts_of_all(len(rows), self.config.run.batch_size * self.num_samples):
                with self.autocast():
                    found = self.complete([rows[i] for i in part], sampling, num_samples, 0, part)
                columns = reward_columns(found, self.policy.tokenizer)
                if not all(one.rewards for one in found):
                    self.judged(self.rewards, columns, found).fill(found)
                answers += map(answer_of, columns["completions"])
                trajectories += found
        batch = self.whole_batch(trajectories, 0)
        assert batch.rewards is not None
        metrics = batch.rewards.metrics | completion_metrics(batch.ends)
        metrics |= self.judged(self.own_metrics, trajectories)
        if num_samples == 1:
            return metrics
        answers, rewards_PK = self.of_all(answers), batch.rewards.total_B.double().numpy().reshape(-1, num_samples)
        known_P = ~np.isnan(rewards_PK).any(1)  # prompts without a failed reward
        answers = [answer for i, answer in enumerate(answers) if known_P[i // num_samples]]
        for name, values in sample_metrics(rewards_PK[known_P], answers).items():
            of = interval(values.tolist())
            metrics |= {name: of["mean"], f"{name}/low": of["low"], f"{name}/high": of["high"]}
        return metrics

    # ---- sampling ahead ----

    def _make_queue(self) -> TrajectoryQueue:
        """Return the queue. With order="throughput" servers sample every prompt by itself, else those of a step together."""
        server = self.config.server
        apart = server.order == "throughput" and bool(server.urls) and not hasattr(self.player, "agent")
        num_threads = min(MAX_THREADS, (server.max_staleness + 1) * self.config.run.batch_size) if apart else 1
        all_async = all(map(is_async, self.functions))  # plain functions are called one after the other
        return TrajectoryQueue(
            self._sample_ahead, self._reward_ahead, server, self.num_samples, apart=apart, num_threads=num_threads,
            num_reward_threads=num_threads if all_async else 1,
        )  # fmt: skip

    def _sample_ahead(
        self, number: int, prompts: Sequence[Trajectory], addresses: Sequence[int], captured: Captured
    ) -> tuple[list[Trajectory], Metrics]:
        """Sample with these weights, with order="throughput" with the newest. Called by a thread of the queue."""
        if self.in_order:
            self.sampler.use(captured)
        else:
            self.sampler.take_up()
        return self.sample(prompts, addresses, number)

    def _reward_ahead(self, trajectories: Sequence[Trajectory]) -> tuple[list[Json], Metrics]:
        """Fill the rewards; return samples and metrics. Called by a thread of the queue."""
        return self.reward(trajectories), self.own_metrics(trajectories)

    def take(self, queue: TrajectoryQueue, num_prompts: int, mine: range) -> tuple[list[Trajectory], Metrics]:
        """Return this process's share of the trajectories of a step from the queue, and metrics; begin what is due."""
        state, run = self.state, self.config.run
        queue.begin_run(self.run.num_runs)
        needs = StepNeeds(
            self.run.number(state, run), state.step, state.total_steps, num_prompts if self.led else len(mine)
        )
        with self.phase("generate"):
            is_due = (not self.led or self.world.is_first) and queue.due(needs) is not None
            captured = self.sampler.capture(state.step) if self.world.any(is_due or not self.in_order) else None
            if captured is not None and not self.in_order:
                self.sampler.offer(captured)

            def ready() -> list[Group]:
                while (due := queue.wait(needs)) is not None:
                    assert captured is not None
                    prompts = self._prompts(self.run.rows_of(due.number, state, run))
                    places = due.places or (range(len(prompts)) if self.led else self.share(len(prompts)))
                    queue.begin(due.number, [prompts[i] for i in places], places, captured)
                return queue.take(needs)

            shares = self.world.gathered(mine)
            groups = self.world.from_first(lambda: _cut(ready(), shares))[self.world.rank] if self.led else ready()
        self.samples = [sample for group in groups for sample in group.samples if sample]
        trajectories = [one for group in groups for one in group.trajectories]
        ages = [state.step - version for one in with_others(trajectories) for version in one.versions]
        metrics: Metrics = {
            "staleness/mean": Mean(sum(ages), len(ages)), "staleness/max": Largest(max(ages, default=0)),
            "staleness/dropped_groups": Sum(queue.num_dropped),
        }  # fmt: skip
        queue.num_dropped = 0
        for name in dict.fromkeys(name for group in groups for name in group.metrics):
            parts = [group.metrics[name] for group in groups if name in group.metrics]
            sums = [sum(values) for values in zip(*parts, strict=True)]
            metrics[name] = Mean(*sums) if len(sums) == 2 else Sum(*sums)
        return trajectories, metrics

    def extra_state(self) -> State:
        """Return what was sampled ahead."""
        if self.queue is None:
            return {}, {}
        tensors, values = self.queue.state(self.state.step)
        return tensors, {**values, "share": self._share} if values else {}

    def load_extra_state(self, tensors: dict[str, torch.Tensor], values: Json) -> None:
        # another share has other prompts, which are begun anew
        fits = values.pop("share", None) == self._share and (not self.led or self.world.is_first)
        if self.queue is not None and fits:
            most = (self.queue.max_staleness + 2) * self.config.run.batch_size
            judge = self.rewards or self.preference
            names = [judge.name] if isinstance(judge, PreferenceFunction) else [] if judge is None else judge.names
            self.queue.load_state(tensors, values, most, {*names}, self.policy.check_ids)

    @property
    def _share(self) -> list[int]:
        """The part of the prompts that this process samples ahead."""
        return [0, 1] if self.led else [self.world.rank, self.world.size]


def _cut(groups: list[Group], shares: Sequence[range]) -> list[list[Group]]:
    return [groups[share.start : share.stop] for share in shares]


def _check_rollout_dtype(policy: Policy) -> None:
    """Raise for strop's MoE, which samples in float32. Warn on a CPU that has no 16-bit products."""
    if policy.kind == "moe":
        raise ValueError(
            "rollout_dtype must be None for strop's MoE, whose engine computes in float32, found 'bfloat16'"
        )
    if policy.device.type == "cpu" and not (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    ):
        warnings.warn(
            "rollout_dtype='bfloat16' takes longer than None on this CPU, which has neither AVX512-BF16 nor AMX",
            stacklevel=4,
        )


def _listed(tools: object) -> list[Any]:
    return list(tools) if isinstance(tools, (list, tuple)) else [tools]


class PolicyMeter:
    """Means over tokens, and extremes, of `PolicyLoss.metrics` of micro-batches. The values stay on the device."""

    NAMES: ClassVar = ("kl", "entropy", "clip_fraction", "ratio/mean")

    def __init__(self, sum_dtype: torch.dtype) -> None:
        self.sum_dtype = sum_dtype
        self._parts: list[tuple[dict[str, torch.Tensor], int, bool]] = []

    def add(self, metrics: dict[str, torch.Tensor], num_tokens: int, first: bool) -> None:
        """Add a micro-batch's metrics. `first` is True in the first update, before any weight has changed."""
        if num_tokens:
            self._parts.append((metrics, num_tokens, first))

    def metrics(self) -> Metrics:
        parts = [(values, weight) for values, weight, _ in self._parts]
        known = [name for name in self.NAMES if parts and name in parts[0][0]]
        found = dict(zip(known, self._means(parts, known), strict=True))
        return found | {"ratio/max": _largest(parts)}

    def first(self) -> Metrics:
        """Return the metrics of the first update alone."""
        parts = [(values, weight) for values, weight, first in self._parts if first]
        if not parts:
            return {}
        return {"mismatch_kl": self._means(parts, ["approx_kl"])[0], "mismatch_ratio_max": _largest(parts)}

    def _means(self, parts: "Parts", names: Sequence[str]) -> list[Mean]:
        if not names:
            return []
        stacked = ((torch.stack([values[name] for name in names]), weight) for values, weight in parts)
        sums: Any = sum(values_M.to(self.sum_dtype) * weight for values_M, weight in stacked)
        return [Mean(one, sum(weight for _, weight in parts)) for one in sums.unbind()]


Parts = Sequence[tuple[dict[str, torch.Tensor], int]]


def _largest(parts: Parts) -> Largest:
    return Largest(torch.stack([values["ratio/max"] for values, _ in parts]).max() if parts else 1.0)


class PolicyGradient(OnPolicy):
    """The base of GRPO and PPO: updates on log-prob ratios and advantages, with a `PolicyRule`."""

    first_attempt = (0,)

    @property
    def num_samples(self) -> int:
        return self.config.group_size

    def setup(self, ref_model: object) -> None:
        self.rule, self.recomputes = self.config.rule, self.config.recomputes
        if self.config.exact:
            with self.autocast():
                self.policy.be_exact()
        self.bonus = (
            None if self.config.entropy.entropy_target is None else EntropyBonus(self.config.entropy, self.rule)
        )
        if self.config.kl_coef:
            self.reference = self.policy.reference(ref_model)
        elif ref_model is not None:
            warnings.warn("ref_model has no effect: kl_coef is 0", stacklevel=5)

    def score(self, trajectories: Sequence[Trajectory]) -> None:
        """Fill old_logps_t, ref_logps_t and entropies_t on the policy's device. The host does not wait for it."""
        trajectories, entropy = with_others(trajectories), self.config.entropy.top_entropy_quantile < 1
        with self.phase("score"), self.autocast(), torch.no_grad():
            recomputes, reference = self.recomputes or self._constrained(trajectories), self.reference
            scores = recomputes or entropy or reference is not None
            for part, batch in self.scoring_batches(trajectories) if scores else ():
                if recomputes or entropy:
                    found: Any = self.policy.logps(batch, temperature=self.config.sampling.temperature, entropy=entropy)
                    logps_n, entropies_n = found if entropy else (found, found)
                    rows = zip(part, batch.split(logps_n), batch.split(entropies_n), strict=True)
                    for trajectory, logps_t, entropies_t in rows:
                        trajectory.old_logps_t, trajectory.entropies_t = logps_t, entropies_t if entropy else None
                if reference is not None:
                    logps_n = reference.logps(batch, temperature=self.config.sampling.temperature)
                    for trajectory, logps_t in zip(part, batch.split(logps_n), strict=True):
                        trajectory.ref_logps_t = logps_t
            if not recomputes:
                for trajectory in trajectories:
                    trajectory.old_logps_t = trajectory.rollout_logps_t

    def _constrained(self, trajectories: Sequence[Trajectory]) -> bool:
        """Return whether an agent drew with a grammar, in any process, so that its log-probs are not the policy's own."""
        if self.player is None or self.config.old_logps != "auto":
            return False
        return self.world.any(any(one.constrained for one in trajectories))

    def scoring_batches(self, trajectories: Sequence[Trajectory]) -> Iterator[tuple[list[Trajectory], TokenBatch]]:
        """Yield micro-batches and their tokens.

        They may be larger than an update's, since no activations are stored.
        """
        scorers = [self.policy, *([] if self.reference is None else [self.reference.policy])]
        lean = all(scorer.scores_leanly for scorer in scorers)
        for part in self.micro_batches(trajectories, [len(one) for one in trajectories], lean=lean):
            yield part, TokenBatch.of(part, self.policy.device)

    def learn(self, trajectories: Sequence[Trajectory], batch: WholeBatch) -> Metrics:
        """Update the weights once per minibatch; return the means of the updates' metrics."""
        meter, num_tokens_B = PolicyMeter(self.sum_dtype), self.loss_tokens(batch)
        self.choose_tokens(trajectories, num_tokens_B[batch.first : batch.first + len(trajectories)])
        updates: list[Update] = []
        for chosen in self.minibatches(len(num_tokens_B)):
            # this process's trajectories, without those that have no loss tokens
            here = [(i - batch.first, num_tokens_B[i]) for i in chosen]
            own = [trajectories[i] for i, counts in here if counts and 0 <= i < len(trajectories)]
            self.weigh(own, sum(num_tokens_B[i] for i in chosen), len(chosen))
            own = with_others(own)
            parts = self.micro_batches(own, [len(one) for one in own])
            losses = (functools.partial(self.loss_on, part) for part in parts)
            updates.append(self.update(losses, has_signal=not updates and self._has_signal(own)))
            for part, result in zip(parts, updates[-1].parts, strict=True):
                meter.add(result.metrics, sum(one.num_loss_tokens for one in part), first=len(updates) == 1)
            if self.bonus is not None:
                sums = [(float(result.metrics["entropy"]), sum(one.num_loss_tokens for one in part))
                        for part, result in zip(parts, updates[-1].parts, strict=True)]  # fmt: skip
                total, num = (
                    self.world.total(sum(values)) for values in ((e * n for e, n in sums), (n for _, n in sums))
                )
                self.bonus.follow(total / max(num, 1))
        metrics = {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
        trajectories = with_others(trajectories)
        drawn_N = joined([one.rollout_logps_t for one in trajectories if one.rollout_logps_t is not None])
        drawn = drawn_N.sum(dtype=self.sum_dtype).item()
        metrics |= meter.metrics() | {"entropy_estimate": Mean(-drawn, len(drawn_N))}
        metrics |= self._mismatch(trajectories) if self.recomputes else meter.first()
        self.count_tokens(sum(map(len, trajectories)))
        assert batch.rewards is not None
        if self.bonus is not None:
            metrics["entropy_coef"] = self.bonus.coefficient
        return metrics | {
            "mean_reward": batch.rewards.mean,
            "mean_kl": metrics.get("kl", 0.0),
        }

    def choose_tokens(self, trajectories: Sequence[Trajectory], num_tokens_B: Sequence[int]) -> None:
        """Fill what chooses tokens of this step's updates: advantages_t by entropies, marked_t by covariances."""
        quantile = self.config.entropy.top_entropy_quantile
        if quantile == 1 and not self.rule.type.marks:
            return
        sequences = with_others([one for one, num in zip(trajectories, num_tokens_B, strict=True) if num])
        if self.rule.type.marks:
            mark_covariant(sequences, self.rule, self.seed_of(self.state.step, "marks"), self.world)
        if quantile < 1:
            keep_uncertain(sequences, quantile, self.world)

    def _has_signal(self, trajectories: Sequence[Trajectory]) -> bool:
        """Return whether the first update must have a gradient: an advantage is not 0, and no ratio is clipped."""
        fresh = self.recomputes or not self.config.server.max_staleness
        rows = [one.advantages_t for one in trajectories if one.advantages_t is not None and one.importance_t is None]
        found = fresh and bool(joined(rows).any())
        return found if self.world.size == 1 else self.world.any(found)

    def loss_tokens(self, batch: WholeBatch) -> list[int]:
        """Return [B], the number of loss tokens of each completion; 0 if its reward failed, or it is truncated and masked."""
        masks = self.config.mask_truncated
        failed_B = [False] * len(batch.ends) if batch.rewards is None else batch.rewards.failed_B.tolist()
        ends = zip(batch.ends, failed_B, strict=True)
        return [0 if failed or (masks and why not in ENDED) else length for (length, why, _), failed in ends]

    def minibatches(self, num_completions: int) -> Iterator[list[int]]:
        """Yield the indices of the completions of each update.

        Their order is drawn from the run's seed, the step and the epoch.
        """
        size = self.config.minibatch_size or num_completions
        for epoch in range(self.config.inner_epochs):
            order = list(range(num_completions))
            if size < num_completions:
                random.Random(self.seed_of(self.state.step, "order", epoch)).shuffle(order)
            for start in range(0, num_completions, size):
                yield order[start : start + size]

    def weigh(self, trajectories: Sequence[Trajectory], num_tokens: int, num_sequences: int) -> None:
        """Fill `weight`, the share of each token in an update on num_tokens tokens and num_sequences sequences.

        All sequences of an episode count together as one: each has its share of the tokens.
        """
        for trajectory in trajectories:
            parts = (trajectory, *trajectory.others)
            weight = self.rule.weight(sum(one.num_loss_tokens for one in parts), num_tokens, num_sequences)
            for one in parts:
                one.weight = weight

    def loss_on(self, trajectories: Sequence[Trajectory]) -> PolicyLoss:
        """Return the loss of these trajectories, each token with its weight."""
        rule, temperature = self.rule if self.bonus is None else self.bonus.rule, self.config.sampling.temperature
        return self.policy.loss(
            self.batch_of(trajectories), rule, temperature=temperature, entropy=self.bonus is not None
        )

    def extra_state(self) -> State:
        tensors, values = super().extra_state()
        return tensors, values | ({} if self.bonus is None else {"entropy_bonus": self.bonus.state})

    def load_extra_state(self, tensors: dict[str, torch.Tensor], values: Json) -> None:
        state = values.pop("entropy_bonus", None)
        if self.bonus is not None and state is not None:
            self.bonus.state = state
        super().load_extra_state(tensors, values)

    def batch_of(self, trajectories: Sequence[Trajectory]) -> TokenBatch:
        """Return the batch of an update, with all fields that the loss reads."""
        batch = TokenBatch.of(
            trajectories, self.policy.device, dtype=self.policy.loss_dtype,
            weights=[one.weight for one in trajectories],
            fields=("old_logps", "ref_logps", "values", "returns", "advantages", "importance", "marked"),
        )  # fmt: skip
        if batch.importance_n is not None:
            assert batch.old_logps_n is not None
            assert batch.advantages_n is not None
            if self.rule.loss_type == "vespo":  # vespo: the weight is a factor of the sequence's product of ratios
                batch.old_logps_n = batch.old_logps_n - batch.importance_n.clamp(min=1e-8).log()
            else:  # the policy's term is linear in the advantage; KL and entropy do not contain it
                batch.advantages_n = batch.advantages_n * batch.importance_n
        return batch

    def _mismatch(self, trajectories: Sequence[Trajectory]) -> Metrics:
        """Return the distance between log-probs in sampling and in training with the same weights; 0 if equal."""
        sampled_N, trained_N = sampled_and_trained(trajectories)
        if not len(sampled_N):
            return {}
        ratios_N, num_tokens = (trained_N - sampled_N).exp(), len(trained_N)
        found: Metrics = {"mismatch_kl": Mean(kl_estimate(sampled_N, trained_N).sum(dtype=self.sum_dtype), num_tokens)}
        found["mismatch_ratio_max"] = Largest(ratios_N.max())
        return found


def sampled_and_trained(trajectories: Sequence[Trajectory]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two [N]: every token's log-prob in sampling, and in the training forward with the same weights."""
    trained_N = joined([one.old_logps_t for one in trajectories if one.old_logps_t is not None])
    sampled_N = joined([one.rollout_logps_t for one in trajectories if one.rollout_logps_t is not None])
    return on_device(sampled_N, trained_N.device).to(trained_N.dtype), trained_N


def check_rewarded(name: str, arguments: Mapping[str, object], needed: str, *given: object) -> None:
    """Raise if a trainer is given no rewards, or is given them under TRL's name for the argument."""
    for argument in arguments.keys() & {"reward_funcs", "environment_factory"}:
        raise ValueError(f"{argument!r} is no option of {name}; {_trl.hint(argument)}")
    if all(one is None for one in given):
        raise ValueError(f"{name} needs {needed}, found none")
