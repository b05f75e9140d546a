"""Rollouts of several turns: the model and the environments alternate until each trajectory ends.

    player = Player(GuessANumber, sampler, policy, TurnsConfig(max_turns=8))
    trajectories = player(rows, sampling, num_samples=8, seed=0)            # a Rollout: a list of trajectories

Rows whose environment has answered sample their next turn together. They do not wait for the others, which join a later
batch. What a row samples depends on the seed, the row and its own tokens, not on the other rows of its batch.
"""

import concurrent.futures
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from strop._types import Row
from strop.config import TurnsConfig
from strop.data.batch import RewardedTurn, Trajectory
from strop.environments.base import Turn, as_environment, as_turn
from strop.environments.dialogue import Chat
from strop.environments.pool import Answer, Late, Pool
from strop.environments.tools import Tools
from strop.models import Policy
from strop.rollout.cached_rows import CachedRows
from strop.rollout.generate import Rollout, Sampler
from strop.rollout.sampling import Sampling

LINGER = 0.005  # seconds to wait for more environments after the first answer, for larger batches
GRACE = 5.0  # seconds beyond a call's timeout; if no call has answered by then, an `async def` blocks the event loop


class EnvironmentFailure(ValueError):
    """An environment raised, exceeded its time limit, or returned an invalid answer."""


@dataclass
class _Episode:
    """A trajectory that is being played; `rewards` has one entry per turn."""

    environment: Any
    dialogue: Any = None
    rewards: list[float] = field(default_factory=list)
    info: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    failure: str = ""
    finish: str = ""

    def trajectory(self, row: Row) -> Trajectory:
        """Return the trajectory with its turns, its numbers for metrics, and its environment for reward functions."""
        trajectory: Trajectory = self.dialogue.trajectory(self.finish)
        trajectory.row, trajectory.failure = row, self.failure
        trajectory.turns = [RewardedTurn(*one) for one in zip(self.dialogue.spans, self.rewards, strict=True)]
        trajectory.shown = {**trajectory.shown, "environments": _own(self.environment)}
        trajectory.info = {
            "turns/mean": len(trajectory.turns),
            "turns/truncated_fraction": float(self.finish == "turns"),
            "turns/given_tokens": len(trajectory) - trajectory.num_prompt - trajectory.num_loss_tokens,
            "environment/seconds": self.seconds,
            "environment/failed_fraction": float(bool(self.failure)),
            **{f"environment/{name}": value for name, value in self.info.items()},
        }
        return trajectory


def _own(environment: object) -> Any:
    """Return the user's object: the environment, or the object whose methods are the tools."""
    held = environment.held if isinstance(environment, Tools) else None
    return environment if held is None else held


class Player:
    """Plays environments with a policy.

    environment   a class, or a function that makes an environment for each trajectory
    sampler       samples the turns, in this process or on servers
    """

    reward_name = "environment"

    def __init__(self, environment: Any, sampler: Sampler, policy: Policy, config: TurnsConfig):
        self.make = as_environment(environment)
        self.name = getattr(environment, "__name__", type(environment).__name__)
        self.sampler, self.policy, self.config = sampler, policy, config
        known = environment if hasattr(environment, "tools") else environment()  # a function: look at what it makes
        tools = getattr(known, "tools", None)
        self.chat = Chat(policy.tokenizer, tools, config.rewritten_turns, policy.check_ids, policy.eos_ids)
        self.ends = (*getattr(known, "stop_ids", ()), *self.chat.ends)
        self.pool = Pool(config.environment_workers, config.environment_timeout)

    def __call__(
        self, rows: Sequence[Row], sampling: Sampling, num_samples: int, seed: int,
        addresses: Sequence[int] | None = None,
    ) -> Rollout:  # fmt: skip
        """Play num_samples trajectories of each row, next to each other. addresses: see `generate`."""
        start = time.perf_counter()
        ends = tuple(dict.fromkeys((*sampling.stop_ids, *self.ends)))
        each = [(row, address << 40 | sample << 16) for row, address in zip(rows, addresses or range(len(rows)), strict=True)
                for sample in range(num_samples)]  # fmt: skip
        play = _Play(self, each, replace(sampling, stop_ids=ends), seed)
        play.run()
        trajectories = [episode.trajectory(row) for episode, (row, _) in zip(play.episodes, each, strict=True)]
        return Rollout(trajectories, time.perf_counter() - start, play.engine)


class _Play:
    """A call of a player: B trajectories, each waiting for its environment, ready to sample, or ended.

    each   row and address of every trajectory; turn t takes its random numbers from address + t
    """

    def __init__(self, player: Player, each: Sequence[tuple[Row, int]], sampling: Sampling, seed: int):
        self.player, self.sampling, self.seed = player, sampling, seed
        self.rows, self.addresses = [row for row, _ in each], [address for _, address in each]
        self.episodes = [_Episode(player.make()) for _ in each]
        self.ended: set[int] = set()
        self.waiting: dict[Answer, int] = {}
        self.engine, self.cached = "", CachedRows()
        limits = (limit for limit in (player.policy.max_length, player.config.max_tokens) if limit is not None)
        self.room = max(min(limits, default=math.inf) - sampling.max_new_tokens, 0)  # the most tokens before a turn

    def run(self) -> None:
        for i, (row, episode) in enumerate(zip(self.rows, self.episodes, strict=True)):
            self._ask(i, episode.environment.reset, dict(row))
        while self.waiting:
            ready = sorted(i for i in self._answered() if i not in self.ended)
            if ready:
                self._draw(ready)

    # ---- the model's turn ----

    def _draw(self, ready: list[int]) -> None:
        prompts = [torch.tensor(self.episodes[i].dialogue.ids) for i in ready]
        addresses = [self.addresses[i] + len(self.episodes[i].dialogue.spans) for i in ready]
        drawn = self.player.sampler.next_turn(prompts, self.sampling, self.seed, addresses, self.cached.of(ready))
        self.engine = drawn.engine
        for i, trajectory in zip(ready, drawn, strict=True):
            episode, ids = self.episodes[i], trajectory.completion_ids.tolist()
            special_tokens = getattr(episode.environment, "special_tokens", False)
            reply = episode.dialogue.draw(ids, trajectory.rollout_logps_t, special_tokens, trajectory.versions)
            episode.finish = "length" if trajectory.finish == "length" else ""
            self._ask(i, episode.environment.step, reply)

    # ---- the environment's ----

    def _ask(self, i: int, function: Callable[..., object], *arguments: object) -> None:
        self.waiting[self.player.pool.submit(function, *arguments)] = i

    def _answered(self) -> list[int]:
        """Wait for at least one environment; return the trajectories whose environment has answered."""
        found: list[int] = []
        limit = self.player.config.environment_timeout
        patience = None if limit is None else limit + GRACE
        while self.waiting:
            done, _ = concurrent.futures.wait(self.waiting, patience, concurrent.futures.FIRST_COMPLETED)
            if found and not done:
                break
            if not done:  # every call has a time limit, and none came back: all are late
                self.player.pool.forget_loop()
            for answer, i in sorted(self.waiting.items(), key=lambda one: one[1]):
                if answer in done or not done:
                    del self.waiting[answer]
                    self.episodes[i].seconds += answer.seconds
                    self._hear(i, answer)
                    found.append(i)
            patience = LINGER
        return found

    def _hear(self, i: int, future: Answer) -> None:
        """Handle an environment's answer, or its failure."""
        method = "reset" if self.episodes[i].dialogue is None else "step"
        who = f"{self.player.name}.{method}"
        error = future.exception() if future.done() else Late()
        if isinstance(error, Late):
            limit = self.player.config.environment_timeout
            what = f"{who} must return within environment_timeout={limit:g} seconds, found it still running"
            return self._fail(i, error, what)
        if error is not None:
            return self._fail(i, error, f"{who} raised {type(error).__name__}: {' '.join(str(error).split())}")
        try:
            answer = future.result()
            return self._begin(i, answer) if method == "reset" else self._take(i, as_turn(answer))
        except Exception as wrong:
            return self._fail(i, wrong, f"{who}: {wrong}")

    def _take(self, i: int, turn: Turn) -> None:
        episode, config = self.episodes[i], self.player.config
        episode.rewards.append(turn.reward)
        for name, value in turn.info.items():
            episode.info[name] = episode.info.get(name, 0.0) + value
        if episode.finish == "length":  # the turn was cut, so nothing can follow it
            self._end(i, "length")
        elif turn.done:
            self._end(i, "environment")
        elif len(episode.dialogue.spans) == config.max_turns:
            self._end(i, "turns")
        elif not episode.dialogue.hear(turn.messages, self.room):
            self._end(i, "length")

    def _end(self, i: int, finish: str) -> None:
        self.episodes[i].finish = finish
        self.ended.add(i)
        self.cached.rows.pop(i, None)

    def _begin(self, i: int, first: object) -> None:
        dialogue = self.player.chat.begin(first, self.rows[i])
        if len(dialogue.ids) > self.room:
            why = f"so that max_new_tokens={self.sampling.max_new_tokens} have room behind them"
            found = f"found {len(dialogue.ids)}"
            raise ValueError(f"the first messages must have at most {self.room} tokens, {why}, {found}")
        self.episodes[i].dialogue = dialogue

    def _fail(self, i: int, error: BaseException, what: str) -> None:
        """Raise; with on_error="end", end the trajectory with error_reward instead."""
        episode, config = self.episodes[i], self.player.config
        if config.on_error == "raise" or episode.dialogue is None:
            turn = 0 if episode.dialogue is None else len(episode.dialogue.spans)
            raise EnvironmentFailure(f"{what} (trajectory {i}, turn {turn}, row {shortened(self.rows[i])})") from error
        episode.failure = what
        episode.rewards = [*episode.rewards[: len(episode.dialogue.spans) - 1], config.error_reward]
        self._end(i, "environment")


def shortened(row: Row, length: int = 80) -> str:
    text = repr(dict(row))
    return text if len(text) <= length else f"{text[: length - 20]} … {text[-16:]}"
