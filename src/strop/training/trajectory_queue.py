"""Completions that are sampled and rewarded ahead of training and wait for their step: `max_staleness`.

    queue = TrajectoryQueue(sample, reward, config, num_samples=8)
    while (due := queue.wait(needs)) is not None:                 # until the groups of the step are ready
        queue.begin(due.number, prompts, places, captured)         # with the weights that were captured at this step
    groups = queue.take(needs)

Threads of the queue sample and call reward functions while the caller trains. A group is a prompt's completions, with their
rewards; its number says for which step its prompt is meant.

order="deterministic"   the prompts of the next max_staleness steps are begun before each step. One thread samples them,
                        step by step. So those of step s have the weights of step max(first, s − max_staleness), however
                        long each takes.
order="throughput"      as many groups are begun, but a step takes those that are ready first. Groups of weights older than
                        max_staleness steps are dropped, and further prompts are begun in their places.

Groups in the queue are part of a checkpoint, which waits for those that are being sampled.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from strop._contexts import contained
from strop._types import Json, State
from strop.config import ServerConfig
from strop.data.batch import RewardedTurn, Trajectory, joined, with_others
from strop.environments.pool import Pool
from strop.rollout.generate import Captured
from strop.training.checkpoint_header import COUNT, EACH, TEXT, TEXT_OR_NONE, TREE, Kind, check, loads

Key = tuple[int, int]  # the number of the batch of the dataset that a group's prompt is from, and its place there
Sample = Callable[[int, Sequence[Trajectory], Sequence[int], Captured], tuple[list[Trajectory], Json]]
Reward = Callable[[Sequence[Trajectory]], tuple[list[Json], Json]]


class StepNeeds(NamedTuple):
    """What a step takes: num_groups groups. `number` counts the batches of the dataset, and `step` the steps."""

    number: int
    step: int
    total_steps: int
    num_groups: int


class Due(NamedTuple):
    """Prompts that must be begun: of the batch with this number all, or those at these places."""

    number: int
    places: list[int] | None = None


@dataclass
class Group:
    """The completions of one prompt.

    samples   one for each completion, for `Trainer.samples`
    metrics   of sampling and rewards; if several groups were sampled together, the first has them
    """

    trajectories: list[Trajectory]
    samples: list[Json]
    metrics: Json

    @property
    def version(self) -> int | None:
        """The oldest version of the weights that sampled it; None if it was not sampled."""
        return min((version for one in with_others(self.trajectories) for version in one.versions), default=None)

    def is_old(self, oldest: int) -> bool:
        return self.version is not None and self.version < oldest

    def copy(self) -> "Group":
        """Return a copy whose fields a step can fill: a step that fails asks for the group again."""
        copies = [copy(one) for one in self.trajectories]
        for one in copies:
            one.others = [copy(other) for other in one.others]
        return Group(copies, self.samples, self.metrics)


class TrajectoryQueue:
    """See the module.

    sample    (number, prompts, places, captured) → trajectories and metrics; in the queue's threads
    reward    trajectories → samples and metrics; fills the rewards; in the queue's threads
    apart     sample every group by itself, in one of num_threads threads; else those of a step together
    num_dropped   groups that were too old, since the last `take`
    """

    def __init__(
        self, sample: Sample, reward: Reward, config: ServerConfig, num_samples: int, *, apart: bool = False,
        num_threads: int = 1, num_reward_threads: int = 1,
    ):  # fmt: skip
        self._sample, self._reward = sample, reward
        self.max_staleness, self.num_samples, self.apart = config.max_staleness, num_samples, apart
        self.in_order = config.order == "deterministic"
        self._samplers, self._rewarders = Pool(num_threads, None), Pool(num_reward_threads, None)
        self._changed, self._here = threading.Condition(), threading.local()
        self.begin_run(0)

    def begin_run(self, run: int) -> None:
        """Forget everything, unless this is the run that the groups are of."""
        if getattr(self, "_run", None) == run:
            return
        with self._changed:
            self._run, self._next, self.num_dropped = run, 0, 0
            self._num_in_progress = 0
            self._done: dict[Key, Group] = {}  # in the order in which they became ready
            self._failed: list[tuple[list[Key], BaseException]] = []
            self._again: list[Key] = []  # failed, and their error was raised
            self._taken: tuple[int, dict[Key, Group]] = -1, {}

    @property
    def is_here(self) -> bool:
        """True in a thread of the queue while it works."""
        return getattr(self._here, "works", False)

    def call(self, function: Callable[..., Any], *arguments: object, rewards: bool = False) -> Any:
        """Return function(*arguments), called after what was begun before by a thread that samples or one for rewards."""
        return (self._rewarders if rewards else self._samplers).submit(self._work, function, *arguments).result()

    # ---- the caller's side ----

    def due(self, needs: StepNeeds) -> Due | None:
        """Return prompts that must be begun in this step, or None."""
        if self._again:
            number = self._again[0][0]
            return Due(number, [place for other, place in self._again if other == number])
        num_steps = min(self.max_staleness + 1, needs.total_steps - needs.step)
        number, num_groups = max(self._next, needs.number), self._num_in_progress + len(self._done)
        num_due = needs.number + num_steps - number if self.in_order else num_steps * needs.num_groups - num_groups
        return Due(number) if num_due > 0 else None

    def begin(self, number: int, prompts: Sequence[Trajectory], places: Sequence[int], captured: Captured) -> None:
        """Begin to sample completions of these prompts, at these places of their batch, with the captured weights."""
        with self._changed:
            self._next = max(self._next, number + 1)
            self._again = [key for key in self._again if key[0] != number]
            self._num_in_progress += len(prompts)
        size = 1 if self.apart else max(len(prompts), 1)
        for first in range(0, len(prompts), size):
            some = prompts[first : first + size], places[first : first + size]
            self._samplers.submit(self._sample_some, self._run, number, *some, captured)

    def wait(self, needs: StepNeeds) -> Due | None:
        """Wait until the step's groups are ready and return None, or return prompts that must be begun first."""
        with self._changed:
            while self._taken[0] != needs.step:
                self._drop(needs)
                for failure in self._failed:
                    keys, error = failure
                    if not self.in_order or keys[0][0] == needs.number:
                        self._failed.remove(failure)
                        self._again += keys
                        raise error
                if (due := self.due(needs)) is not None:
                    return due
                if len(self._ready(needs)) >= needs.num_groups:
                    break
                self._changed.wait()
        return None

    def take(self, needs: StepNeeds) -> list[Group]:
        """Return the step's groups, which are ready; the same ones if the step failed and is done again."""
        with self._changed:
            if self._taken[0] != needs.step:
                chosen = self._ready(needs)[: needs.num_groups]
                self._taken = needs.step, {key: self._done.pop(key) for key in chosen}
        return [group.copy() for group in self._taken[1].values()]

    def _ready(self, needs: StepNeeds) -> list[Key]:
        """Return the groups that the step may take."""
        return sorted(key for key in self._done if key[0] == needs.number) if self.in_order else list(self._done)

    def _drop(self, needs: StepNeeds) -> None:
        """Drop groups that are too old."""
        for key, group in list(self._done.items()):
            if group.is_old(needs.step - self.max_staleness):
                del self._done[key]
                self.num_dropped += 1

    # ---- the queue's threads ----

    def _work(self, function: Callable[..., Any], *arguments: object) -> Any:
        self._here.works = True
        try:
            with contained():
                return function(*arguments)
        finally:
            self._here.works = False

    def _sample_some(
        self, run: int, number: int, prompts: Sequence[Trajectory], places: Sequence[int], captured: Captured
    ) -> None:
        keys = [(number, place) for place in places]
        if run != self._run:
            return
        try:
            drawn = self._work(self._sample, number, prompts, places, captured)
        except BaseException as error:
            self._end(run, keys, error)
        else:
            self._rewarders.submit(self._reward_some, run, keys, *drawn)

    def _reward_some(self, run: int, keys: list[Key], trajectories: list[Trajectory], metrics: Json) -> None:
        try:
            samples, more = self._work(self._reward, trajectories)
        except BaseException as error:
            self._end(run, keys, error)
            return
        for one in trajectories:  # for reward functions only; may hold environments, which are not to be kept
            one.row, one.shown = {}, {}
        groups = {}
        for i, key in enumerate(keys):
            part = slice(i * self.num_samples, (i + 1) * self.num_samples)
            groups[key] = Group(trajectories[part], samples[part], {} if i else metrics | more)
        self._end(run, keys, groups)

    def _end(self, run: int, keys: list[Key], found: dict[Key, Group] | BaseException) -> None:
        with self._changed:
            if run != self._run:
                return
            self._num_in_progress -= len(keys)
            if isinstance(found, BaseException):
                self._failed.append((keys, found))
            else:
                self._done |= found
            self._changed.notify_all()

    # ---- checkpoints ----

    def state(self, step: int) -> State:
        """Return what the queue holds before this step, once nothing is being sampled.

        Groups that failed are begun anew after a resume.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._num_in_progress)
            groups = (self._taken[1] if self._taken[0] == step else {}) | self._done
            again = [*self._again, *(key for keys, _ in self._failed for key in keys)]
        if not groups and not again:
            return {}, {}
        return packed(groups), {"next": self._next, "again": again}

    def load_state(
        self, tensors: dict[str, torch.Tensor], values: Json, most: int, names: set[str],
        check_ids: Callable[[torch.Tensor, str], None],
    ) -> None:  # fmt: skip
        """Restore a state after a check. Groups with rewards of other names are sampled again.

        most   how many groups there can be
        """
        path = Path("the queue")
        check(values, {"next": COUNT, "again": [KEY]}, path, "values")
        groups = unpacked(tensors, path, check_ids)
        if len(groups) + len(values["again"]) > most:
            raise ValueError(f"the queue must have at most {most} groups, found {len(groups) + len(values['again'])}")
        for key, group in groups.items():
            if len(group.trajectories) != self.num_samples or len(group.samples) not in (0, self.num_samples):
                raise ValueError(f"group {key} must have {self.num_samples} trajectories and as many samples")
        fits = {key for key, group in groups.items() if {*group.trajectories[0].rewards} == names}
        with self._changed:
            self._next, self._done = values["next"], {key: groups[key] for key in groups if key in fits}
            self._again = [tuple(key) for key in values["again"]] + [key for key in groups if key not in fits]


# ---- groups as tensors ----

NUMBER = Kind("a number", lambda v: isinstance(v, (int, float)) and not isinstance(v, bool))  # NaN: a failed reward
KEY = Kind("two counts", lambda v: isinstance(v, (list, tuple)) and len(v) == 2 and all(map(COUNT.fits, v)))
PAIR = Kind("two numbers", lambda v: isinstance(v, list) and len(v) == 2 and all(map(NUMBER.fits, v)))
MEAN_OR_SUM = Kind(
    "one or two numbers", lambda v: isinstance(v, list) and len(v) in (1, 2) and all(map(NUMBER.fits, v))
)
SEQUENCE = {
    "finish": TEXT_OR_NONE,
    "versions": [COUNT],
    "constrained": Kind("true or false", lambda v: isinstance(v, bool)),
    "turns": [PAIR],
    "info": {EACH: NUMBER},
    "failure": TEXT,
    "rewards": {EACH: NUMBER},
    "reward": NUMBER,
    "num_others": COUNT,
    "routed": Kind("true or false", lambda v: isinstance(v, bool)),
}
ABOUT = [{"key": KEY, "sequences": [SEQUENCE], "samples": [TREE], "metrics": {EACH: MEAN_OR_SUM}}]
LENGTHS = "lengths"  # [S, 3]: tokens, tokens with log-probs (−1 without any), tokens of the prompt


def packed(groups: dict[Key, Group]) -> dict[str, torch.Tensor]:
    """Return the groups as tensors: the tokens of all sequences, and the rest as the bytes of a JSON text."""
    about = []
    for key, group in groups.items():
        facts = [
            {"finish": one.finish, "versions": one.versions, "constrained": one.constrained, "turns": one.turns,
             "info": dict(one.info), "failure": one.failure, "rewards": one.rewards, "reward": one.reward,
             "num_others": len(one.others), "routed": one.routing_TLk is not None}
            for one in with_others(group.trajectories)
        ]  # fmt: skip
        about.append({"key": key, "sequences": facts, "samples": group.samples, "metrics": group.metrics})
    sequences = [one for group in groups.values() for one in with_others(group.trajectories)]
    logps = [one.rollout_logps_t for one in sequences]
    lengths = [(len(one), -1 if t is None else len(t), one.num_prompt) for one, t in zip(sequences, logps, strict=True)]
    routing = [one.routing_TLk for one in sequences if one.routing_TLk is not None]
    tensors = {
        "ids": joined([one.ids_T for one in sequences]).long(),
        "mask": joined([one.loss_mask_T for one in sequences]).bool(),
        "logps": joined([t.cpu() for t in logps if t is not None]),
        LENGTHS: torch.tensor(lengths, dtype=torch.int64).view(-1, 3),
        "about": torch.frombuffer(bytearray(json.dumps(about, default=str).encode()), dtype=torch.uint8),
    }
    return tensors | ({"routing": torch.cat(routing).cpu()} if routing else {})


def unpacked(
    tensors: dict[str, torch.Tensor], path: Path, check_ids: Callable[[torch.Tensor, str], None]
) -> dict[Key, Group]:
    """Return the groups in these tensors of a checkpoint, which is not trusted."""
    about = loads(bytes(tensors["about"].tolist()).decode())
    check(about, ABOUT, path, "about")
    sequences = _sequences(tensors, [facts for group in about for facts in group["sequences"]], check_ids)
    groups: dict[Key, Group] = {}
    for group in about:
        trajectories, left = [], [next(sequences) for _ in group["sequences"]]
        while left:
            facts, one = left.pop(0)
            num_others = facts["num_others"]
            if num_others > len(left):
                raise ValueError(f"an episode in the queue must have {num_others + 1} sequences, found {len(left) + 1}")
            one.others, left = [other for _, other in left[:num_others]], left[num_others:]
            trajectories.append(one)
        groups[tuple(group["key"])] = Group(trajectories, group["samples"], group["metrics"])
    return groups


def _sequences(
    tensors: dict[str, torch.Tensor], about: list[Json], check_ids: Callable[[torch.Tensor, str], None]
) -> Iterator[tuple[Json, Trajectory]]:
    """Yield each sequence and what is known of it, after a check of the tensors."""
    ids_N, mask_N, logps_M, lengths_S3 = (tensors[name] for name in ("ids", "mask", "logps", LENGTHS))
    kinds = [(ids_N, torch.int64, 1), (mask_N, torch.bool, 1), (lengths_S3, torch.int64, 2)]
    fits = all(tensor.dtype == dtype and tensor.ndim == ndim for tensor, dtype, ndim in kinds)
    fits = fits and logps_M.is_floating_point() and logps_M.ndim == 1 and lengths_S3.shape == (len(about), 3)
    fits = (
        fits and len(ids_N) == len(mask_N) and (not len(about) or bool((lengths_S3 >= torch.tensor([1, -1, 0])).all()))
    )
    if not fits:
        raise ValueError("the queue's tensors do not fit each other")
    num_tokens, num_logps, num_prompt = (column.tolist() for column in lengths_S3.unbind(1))
    check_ids(ids_N, "the queue")
    if not bool((logps_M <= 0).all()):
        raise ValueError("log-probs in the queue must be at most 0")
    rows = zip(ids_N.split(num_tokens), mask_N.split(num_tokens), strict=True)
    logps = iter(logps_M.split([count for count in num_logps if count >= 0]))
    routed = [length for facts, length in zip(about, num_tokens, strict=True) if facts["routed"]]
    routing = iter(tensors["routing"].split(routed) if routed else ())
    for facts, (ids_T, mask_T), count, start in zip(about, rows, num_logps, num_prompt, strict=True):
        if start > len(ids_T) or (count >= 0 and int(mask_T.sum()) != count):
            raise ValueError(f"a sequence in the queue must have {int(mask_T.sum())} log-probs, found {count}")
        yield facts, Trajectory(
            ids_T, mask_T, next(logps) if count >= 0 else None, num_prompt=start,
            routing_TLk=next(routing) if facts["routed"] else None, finish=facts["finish"],
            versions=tuple(facts["versions"]), constrained=facts["constrained"], info=facts["info"],
            turns=[RewardedTurn(int(num), reward) for num, reward in facts["turns"]], failure=facts["failure"],
            rewards=facts["rewards"], reward=facts["reward"],
        )  # fmt: skip
