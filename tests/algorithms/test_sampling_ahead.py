"""`max_staleness` without a server: a copy of the model samples ahead of training, in threads of the trainer's queue."""

import itertools
import json
import random
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from environments.games import OfIds
from tiny_models import llama
from trained_models import Bigram, SignalAt, tiny_moe, weights_of

from strop import GRPO, PPO, Distill, OnlineDPO
from strop.config import ServerConfig
from strop.data.batch import RewardedTurn, TokenBatch, Trajectory
from strop.environments import Environment, Turn
from strop.models import as_policy
from strop.rewards import RewardError
from strop.rollout.generate import Captured
from strop.training.checkpoint_header import CheckpointError
from strop.training.trajectory_queue import Group, StepNeeds, TrajectoryQueue, packed, unpacked

ROWS = [{"prompt": [2 + i, 3]} for i in range(7)]
OPTIONS = {"group_size": 4, "max_new_tokens": 6, "batch_size": 2, "num_steps": 8, "learning_rate": 1e-2, "kl_coef": 0.0,
           "importance_cap": 2.0}  # fmt: skip


def low(completion_ids):
    return [float((ids < 10).float().mean()) for ids in completion_ids]


def late(completion_ids):
    """The same after a random delay, of which no result may depend."""
    time.sleep(random.random() * 0.03)
    return low(completion_ids)


class Late(OfIds):
    def step(self, reply):
        time.sleep(random.random() * 0.01)
        return super().step(reply)


def grpo(max_staleness, reward_fn=low, **options):
    return GRPO(model=tiny_moe(), reward_fn=reward_fn, max_staleness=max_staleness, **OPTIONS | options)


def watched(trainer):
    """Return lists that fill with the weights before each step and the trajectories of each step."""
    weights, rollouts, step, score = [], [], trainer.step, trainer.score

    def watch_step(prompts):
        weights.append({name: value.clone() for name, value in trainer.module.state_dict().items()})
        return step(prompts)

    trainer.step = watch_step
    trainer.score = lambda lines: (rollouts.append(lines), score(lines))[1]
    return weights, rollouts


# ---- the schedule ----


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_a_step_takes_completions_of_the_weights_that_the_schedule_says(max_staleness):
    """Those of step s were drawn with the weights of step max(0, s - k): bit for bit the log-probs of these weights."""
    trainer = grpo(max_staleness)
    weights, rollouts = watched(trainer)
    steps = trainer.train(ROWS, progress=False).steps
    other = as_policy(tiny_moe())
    for number, rollout in enumerate(rollouts):
        version = max(0, number - max_staleness)
        assert {one.versions for one in rollout} == {(version,)}
        other.inner.load_state_dict(weights[version])
        with torch.no_grad():
            wanted = other.logps(TokenBatch.of(rollout))
        assert torch.cat([one.rollout_logps_t for one in rollout]).equal(wanted)
    assert [step["staleness/mean"] for step in steps] == [min(n, max_staleness) for n in range(8)]
    assert [step["staleness/max"] for step in steps] == [min(n, max_staleness) for n in range(8)]
    assert not any(step["staleness/dropped_groups"] for step in steps)
    assert steps[0]["mismatch_kl"] == 0
    assert all(step["mismatch_kl"] > 0 for step in steps[1:])  # of importance_cap: against the weights that train
    assert steps[1]["time/generate"] >= 0


def test_the_prompts_are_those_of_a_run_that_waits():
    """The same rows in the same steps, and in the first step the same completions: draws depend on seed and step."""
    seen = []
    for max_staleness in (0, 2):
        trainer = grpo(max_staleness)
        _, rollouts = watched(trainer)
        trainer.train(ROWS, progress=False)
        assert len(rollouts[3]) == 4  # the last batch of an epoch of seven rows
        seen.append([[one.prompt_ids.tolist() for one in lines] for lines in rollouts])
        seen.append([one.ids_T.tolist() for one in rollouts[0]])
    assert seen[0] == seen[2]
    assert seen[1] == seen[3]


def test_without_staleness_nothing_is_ahead():
    """No queue, no thread, no metric: the step is the one there was."""
    before = threading.active_count()
    trainer = grpo(0)
    steps = trainer.train(ROWS, progress=False).steps
    assert trainer.queue is None
    assert threading.active_count() == before
    assert not any(name.startswith("staleness") for name in steps[-1])


ALGORITHMS = {
    "rewards": lambda **more: grpo(2, late, **more),
    "turns": lambda **more: grpo(2, late, environment=Late, **more),
    "by turn": lambda **more: grpo(1, None, environment=Late, credit="turn", **more),
    "resampled": lambda **more: grpo(2, lambda completion_ids: [round(r) for r in late(completion_ids)], resample_rounds=2, **more),
    "ppo": lambda **more: PPO(
        model=llama(), reward_fn=late, max_staleness=2, max_new_tokens=6, batch_size=2, num_steps=8, learning_rate=1e-2,
        **more,
    ),
    "online dpo": lambda **more: OnlineDPO(
        model=tiny_moe(), preference_fn=prefer, max_staleness=2, max_new_tokens=6, batch_size=2, num_steps=8,
        learning_rate=1e-2, **more,
    ),
    "distill": lambda **more: Distill(
        model=tiny_moe(), teacher=Bigram(), max_staleness=2, max_new_tokens=6, batch_size=2, num_steps=8,
        learning_rate=1e-2, on_policy=0.6, **more,
    ),
}  # fmt: skip
WITH_COMPLETIONS = [{**row, "completion": [4 + i, 5, 1]} for i, row in enumerate(ROWS)]


def prefer(pairs):
    time.sleep(random.random() * 0.03)
    return [0 if a.sum() > b.sum() else 1 for a, b in pairs]


@pytest.mark.parametrize("which", ALGORITHMS)
def test_results_do_not_depend_on_how_long_things_take(which):
    found = []
    for _ in range(2):
        trainer = ALGORITHMS[which]()
        history = trainer.train(WITH_COMPLETIONS, progress=False)
        assert history.steps[-1]["staleness/max"] > 0
        found.append((weights_of(trainer), trainer.samples, [step["loss"] for step in history.steps]))
    assert found[0][0].equal(found[1][0])
    assert found[0][1:] == found[1][1:]
    assert found[0][1]


# ---- resume ----


class Once(OfIds):
    """Counts how often each row is played."""

    played: list = []  # noqa: RUF012

    def reset(self, row):
        self.played.append(row["prompt"][0])
        return super().reset(row)


@pytest.mark.parametrize("which", ALGORITHMS)
def test_resuming_is_exact(which, tmp_path):
    """What was sampled ahead, with its rewards, is in the checkpoint: of weights that are no more."""
    make = ALGORITHMS[which]
    whole, half = make(), make(callbacks=[SignalAt(3)])
    steps = whole.train(WITH_COMPLETIONS, progress=False).steps
    assert half.train(WITH_COMPLETIONS, progress=False).interrupted
    half.save(tmp_path / "half.pt")
    given = {"teacher": Bigram()} if which == "distill" else {
        "preference_fn": prefer} if which == "online dpo" else {"reward_fn": whole.functions or None}  # fmt: skip
    if whole.player is not None:
        given["environment"] = Late
    resumed = type(half).from_checkpoint(tmp_path / "half.pt", **given)
    assert resumed.queue.state(3)[0].keys() == half.queue.state(3)[0].keys()
    rest = resumed.train(WITH_COMPLETIONS, progress=False).steps
    assert weights_of(resumed).equal(weights_of(whole))
    assert resumed.samples == whole.samples
    assert [untimed(one) for one in rest] == [untimed(one) for one in steps[3:]]


def untimed(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith("time/") and "second" not in name}


def test_nothing_is_played_twice(tmp_path):
    """Over an interruption and a resume every trajectory of the run is played once."""
    Once.played.clear()
    half = grpo(3, None, environment=Once, callbacks=[SignalAt(3)])
    half.train(ROWS, progress=False, output_dir=tmp_path)
    again = grpo(3, None, environment=Once)
    again.train(ROWS, progress=False, output_dir=tmp_path, resume=True)
    whole, Once.played = Once.played, []
    grpo(3, None, environment=Once).train(ROWS, progress=False)
    assert sorted(whole) == sorted(Once.played)


def test_a_reward_that_fails_ahead_is_told_at_its_step_and_its_group_is_sampled_again(tmp_path):
    calls = []

    def fails(completion_ids):
        calls.append(1)
        if len(calls) == 4:
            raise OSError("the judge is out")
        return low(completion_ids)

    fails.__name__ = "low"
    trainer = grpo(2, fails)
    with pytest.raises(RewardError, match="the judge is out") as raised:
        trainer.train(ROWS, progress=False, output_dir=tmp_path)
    assert trainer.state.step == 3  # of the fourth batch; the three before it were trained on
    assert "the run up to step 3 is in" in raised.value.__notes__[0]
    state = trainer.queue.state(3)
    assert state[1]["again"] == [(3, 0)]  # the last batch of the epoch has one row
    resumed = grpo(2)
    rest = resumed.train(ROWS, progress=False, output_dir=tmp_path, resume=True, allow_changes=True).steps
    assert len(rest) == 8
    trainer.train(ROWS, progress=False)  # the same trainer goes on too
    assert weights_of(trainer).equal(weights_of(resumed))


def test_groups_with_the_rewards_of_other_functions_are_sampled_again(tmp_path):
    def other(completion_ids):
        return low(completion_ids)

    half = grpo(2, callbacks=[SignalAt(3)])
    half.train(ROWS, progress=False, output_dir=tmp_path)
    resumed = grpo(2, other)
    steps = resumed.train(ROWS, progress=False, output_dir=tmp_path, resume=True, allow_changes=True).steps
    assert [step["staleness/max"] for step in steps[3:]] == [0, 1, 2, 2, 2]


def test_a_step_that_fails_is_given_the_same_completions_again():
    trainer, failed = grpo(1), []
    _, rollouts = watched(trainer)
    learn = trainer.learn

    def fails_once(lines, batch):
        if trainer.state.step == 2 and not failed:
            failed.append(1)
            raise OSError("once")
        return learn(lines, batch)

    trainer.learn = fails_once
    with pytest.raises(OSError, match="once"):
        trainer.train(ROWS, progress=False)
    trainer.train(ROWS, progress=False)
    assert [one.ids_T.tolist() for one in rollouts[2]] == [one.ids_T.tolist() for one in rollouts[3]]
    whole = grpo(1)
    whole.train(ROWS, progress=False)
    assert weights_of(trainer).equal(weights_of(whole))


def test_another_run_and_train_step_take_nothing_of_the_queue():
    trainer = grpo(2, callbacks=[SignalAt(2)])
    assert trainer.train(ROWS, progress=False).interrupted
    _, rollouts = watched(trainer)
    trainer.train_step([[9, 9]])
    assert {one.prompt_ids.tolist()[0] for one in rollouts[0]} == {9}
    with torch.no_grad():  # with the weights as they were before the step
        assert rollouts[0][0].versions == (2,)
    trainer.callbacks.clear()
    trainer.goes_on = False
    other = [{"prompt": [12 + i, 3]} for i in range(7)]
    trainer.train(other, num_steps=3, progress=False)
    assert {one.prompt_ids.tolist()[0] for lines in rollouts[1:] for one in lines} <= set(range(12, 19))


def test_evaluation_uses_the_present_weights_and_changes_nothing():
    plain, evaluated = grpo(2), grpo(2)
    plain.train(ROWS, progress=False)
    history = evaluated.train(ROWS, eval_dataset=ROWS, progress=False)
    assert weights_of(plain).equal(weights_of(evaluated))
    here = grpo(0)
    here.module.load_state_dict(evaluated.module.state_dict())
    assert history.evaluations[-1]["eval/reward/mean"] == here.evaluate(ROWS)["eval/reward/mean"]


# ---- order="throughput" ----


def throughput(max_staleness, reward_fn=low, **options):
    return grpo(max_staleness, reward_fn, order="throughput", **options)


def test_throughput_trains_on_every_prompt_once():
    trainer = throughput(2, late)
    _, rollouts = watched(trainer)
    steps = trainer.train([{"prompt": [2 + i, 3]} for i in range(16)], progress=False, num_epochs=1).steps
    starts = [one.prompt_ids.tolist()[0] for lines in rollouts for one in lines[::4]]
    dropped = sum(step["staleness/dropped_groups"] for step in steps)
    assert len(starts) == 16
    assert len(set(starts)) + dropped >= 16
    assert max(step["staleness/max"] for step in steps) <= 2


class Waits(Environment):
    """In the second batch it answers when the trainer has made a step with the first."""

    def reset(self, row):
        self.number, self.count = next(Waits.numbers), 0
        return row["prompt"]

    def step(self, reply):
        self.count += 1
        sampler = Waits.trainer.sampler
        while self.count == 1 and 8 <= self.number < 16 and sampler._offered is sampler.held:
            time.sleep(0.001)
        return Turn([5], reward=float(len(reply)), done=self.count == 2)


def test_a_conversation_goes_on_with_newer_weights_and_says_which():
    """Turn by turn: the log-probs of each turn are those of the weights that `versions` names."""
    trainer = Waits.trainer = throughput(2, None, environment=Waits, num_steps=4, max_new_tokens=12)
    Waits.numbers = itertools.count()
    weights, rollouts = watched(trainer)
    trainer.train(ROWS, progress=False)
    lines = [one for lines in rollouts for one in lines]
    assert {(0, 0), (0, 1)} <= {one.versions for one in lines}
    other = as_policy(tiny_moe())
    for one in lines:
        assert len(one.versions) == len(one.turns)
        start = 0
        for version, turn in zip(one.versions, one.turns, strict=True):
            other.inner.load_state_dict(weights[version])
            with torch.no_grad():
                wanted = other.logps(TokenBatch.of([one]))
            part = slice(start, start + turn.num_tokens)
            assert one.rollout_logps_t[part].equal(wanted[part])
            start += turn.num_tokens


def make_queue(order="throughput", max_staleness=1, num_samples=1, **options):
    """A queue whose samples say which prompt they are of."""

    def sample(number, prompts, places, captured):
        lines = [Trajectory.of([number], [place], versions=(captured.version,)) for place in places]
        return [one for one in lines for _ in range(num_samples)], {}

    config = ServerConfig(max_staleness=max_staleness, order=order)
    return TrajectoryQueue(sample, lambda lines: ([{} for _ in lines], {}), config, num_samples, **options)


def fill(queue, wanted, version):
    while (due := queue.wait(wanted)) is not None:
        queue.begin(due.number, [None] * wanted.num_groups, range(wanted.num_groups), Captured(None, version))


def test_old_groups_are_dropped_and_others_begun_in_their_places():
    queue = make_queue(max_staleness=1)
    fill(queue, StepNeeds(0, 0, 9, 2), 0)
    assert len(queue.take(StepNeeds(0, 0, 9, 2))) == 2
    fill(queue, StepNeeds(3, 3, 9, 2), 3)  # as if two steps had been made meanwhile
    assert queue.num_dropped == 2
    groups = queue.take(StepNeeds(3, 3, 9, 2))
    assert [group.version for group in groups] == [3, 3]
    assert [group.trajectories[0].ids_T.tolist() for group in groups] == [[3, 0], [3, 1]]


def test_a_group_that_is_ready_does_not_wait_for_a_slow_one():
    release = threading.Event()

    def sample(number, prompts, places, captured):
        if (number, places[0]) == (0, 0):
            release.wait(20)
        return [Trajectory.of([number], [place], versions=(captured.version,)) for place in places], {}

    config = ServerConfig(max_staleness=1, order="throughput")
    queue = TrajectoryQueue(sample, lambda lines: ([{}] * len(lines), {}), config, 1, apart=True, num_threads=4)
    fill(queue, StepNeeds(0, 0, 9, 2), 0)
    taken = [group.trajectories[0].ids_T.tolist() for group in queue.take(StepNeeds(0, 0, 9, 2))]
    assert [0, 0] not in taken
    release.set()
    fill(queue, StepNeeds(1, 1, 9, 2), 1)
    taken += [group.trajectories[0].ids_T.tolist() for group in queue.take(StepNeeds(1, 1, 9, 2))]
    assert len({tuple(one) for one in taken}) == 4  # each once


# ---- agents ----


def guessing(row, client):
    """Two calls, the second of which continues the first."""
    body = {"model": "any", "prompt": row["prompt"], "max_tokens": 4, "return_token_ids": True}
    request = urllib.request.Request(
        f"{client.base_url}/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {client.api_key}"},
    )  # fmt: skip
    time.sleep(random.random() * 0.02)
    with urllib.request.urlopen(request, timeout=60) as answer:
        choice = json.loads(answer.read())["choices"][0]
    body["prompt"] = [*row["prompt"], *choice["token_ids"], 7]
    request.data = json.dumps(body).encode()
    with urllib.request.urlopen(request, timeout=60) as answer:
        return float(len(json.loads(answer.read())["choices"][0]["token_ids"]))


def test_agents_are_played_ahead(tmp_path):
    """Deterministic, and resumed exactly; every call says its version."""
    pytest.importorskip("starlette")
    options = {"reward_fn": low, "agent": guessing, "num_steps": 5, "group_size": 2}
    whole, half = (grpo(2, callbacks=more, **options) for more in ([], [SignalAt(2)]))
    _, rollouts = watched(whole)
    whole.train(ROWS, progress=False)
    assert all(len(one.versions) == 2 for lines in rollouts for one in lines)
    assert [{min(one.versions) for one in lines} for lines in rollouts] == [{0}, {0}, {0}, {1}, {2}]
    half.train(ROWS, progress=False, output_dir=tmp_path)
    resumed = grpo(2, **options)
    resumed.train(ROWS, progress=False, output_dir=tmp_path, resume=True)
    assert weights_of(resumed).equal(weights_of(whole))


# ---- groups as tensors ----


def groups():
    one = Trajectory.of(
        [2, 3], [4, 5, 1], [True, False, True], rollout_logps_t=torch.tensor([-0.5, -0.25]), finish="length", versions=(3, 4),
        turns=[RewardedTurn(1, 0.5), RewardedTurn(1, -1.0)], info={"turns/mean": 2.0}, failure="late", rewards={"r": 1.5},
        reward=1.5, constrained=True,
    )  # fmt: skip
    one.others = [Trajectory.of([7], [8], rollout_logps_t=torch.tensor([-1.0]), versions=(3,))]
    two = Trajectory.of([6], [4, 1], reward=float("nan"), rewards={"r": float("nan")})
    two.routing_TLk = torch.arange(6).view(3, 1, 2)
    return {
        (4, 1): Group([one], [{"prompt": "a", "completion": ["b"]}], {"x": (1.0, 2), "y": (3.0,)}),
        (5, 0): Group([two], [{}], {}),
    }


def anything(ids, name):
    pass


def test_groups_come_back_from_tensors_as_they_were():
    found = unpacked(packed(groups()), Path("p"), anything)
    assert found.keys() == groups().keys()
    for key, group in groups().items():
        assert found[key].samples == group.samples
        for one, other in zip(group.trajectories, found[key].trajectories, strict=True):
            pairs = [(one, other), *zip(one.others, other.others, strict=True)]
            for mine, theirs in pairs:
                for name, value in vars(mine).items():
                    own = getattr(theirs, name)
                    if isinstance(value, torch.Tensor):
                        assert value.equal(own)
                        assert value.dtype == own.dtype
                    elif name != "others":
                        assert repr(value) == repr(own), name
    assert unpacked(packed({}), Path("p"), anything) == {}


def spoiled(name, change):
    tensors = packed(groups())
    tensors[name] = change(tensors[name])
    return tensors


def about(change):
    def changed(tensor):
        facts = json.loads(bytes(tensor.tolist()))
        change(facts)
        return torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)

    return spoiled("about", changed)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: spoiled("ids", lambda t: t[:-1]), "do not fit each other"),
        (lambda: spoiled("ids", lambda t: t.float()), "do not fit each other"),
        (lambda: spoiled("mask", lambda t: t.long()), "do not fit each other"),
        (lambda: spoiled("lengths", lambda t: t[:1]), "do not fit each other"),
        (lambda: spoiled("lengths", lambda t: t - 5), "do not fit each other"),
        (lambda: spoiled("lengths", lambda t: t + 5), "split_with_sizes"),
        (lambda: spoiled("lengths", lambda t: t + torch.tensor([0, 0, 9])), "must have"),
        (lambda: spoiled("logps", lambda t: t.long()), "do not fit each other"),
        (lambda: spoiled("logps", lambda t: -t), "at most 0"),
        (lambda: spoiled("logps", lambda t: t * float("nan")), "at most 0"),
        (lambda: spoiled("mask", lambda t: ~t), "must have"),
        (lambda: spoiled("about", lambda t: t[:-1]), "Expecting"),
        (lambda: about(lambda a: a[0].pop("key")), "must have 'key'"),
        (lambda: about(lambda a: a[0].update(key=[1, -1])), "two counts"),
        (lambda: about(lambda a: a[0]["sequences"][0].update(versions=["x"])), "whole number"),
        (lambda: about(lambda a: a[0]["sequences"][0].update(turns=[[1]])), "two numbers"),
        (lambda: about(lambda a: a[0]["sequences"][0].update(num_others=9)), "sequences"),
        (lambda: about(lambda a: a[0]["sequences"][0].update(more=9)), "no 'more'"),
        (lambda: about(lambda a: a[1]["sequences"].clear()), "do not fit each other"),
        (lambda: about(lambda a: a[1]["sequences"][0].update(routed=False, reward="1")), "a number"),
    ],
)  # fmt: skip
def test_spoiled_tensors_of_a_queue_are_refused(make, told):
    with pytest.raises((ValueError, RuntimeError), match=told):
        unpacked(make(), Path("p"), anything)


def test_a_checkpoint_with_other_groups_is_refused(tmp_path):
    trainer = grpo(1, callbacks=[SignalAt(2)])
    trainer.train(ROWS, progress=False)
    state, samples = trainer.queue.state, trainer.queue.num_samples
    for change, told in (
        (lambda tensors: tensors | {"ids": tensors["ids"] + 100}, "must hold ids from 0 to 19"),
        (lambda tensors: packed({(9, i): group for i in range(9) for group in groups().values()}), "at most 6 groups"),
        (
            lambda tensors: packed({(9, 9): Group(groups()[4, 1].trajectories, [], {})}),
            f"must have {samples} trajectories",
        ),
    ):
        trainer.queue.state = lambda step, change=change: (change(state(step)[0]), state(step)[1])
        trainer.save(tmp_path / "spoiled.pt")
        with pytest.raises(CheckpointError, match=told):
            GRPO.from_checkpoint(tmp_path / "spoiled.pt", reward_fn=low)


# ---- options ----


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"order": "throughput"}, 'order must be "deterministic" without max_staleness, found'),
        ({"rollout_device": "cpu"}, "rollout_device must be None without max_staleness, found 'cpu'"),
        ({"rollout_device": "cpu", "max_staleness": 1, "rollout_server": "http://a"}, "must be None with a rollout_server"),
        ({"max_staleness": 1, "order": "fast"}, "order must be one of"),
        ({"max_staleness": -1}, "max_staleness must be at least 0"),
    ],
)  # fmt: skip
def test_options_check_themselves(options, told):
    with pytest.raises(ValueError, match=told):
        ServerConfig(**options)


def test_what_cannot_be_sampled_ahead_is_refused():
    with pytest.raises(ValueError, match="max_staleness must be 0 with exact"):
        grpo(1, exact=True)
    with pytest.raises(ValueError, match='off_policy must be "dataset" with max_staleness'):
        Distill(model=tiny_moe(), teacher=tiny_moe(), on_policy=0.5, off_policy="teacher", max_staleness=1)


def test_a_copy_on_another_device_is_named():
    trainer = grpo(1, rollout_device="cpu")
    assert trainer.sampler.policy.device.type == "cpu"
    assert trainer.sampler.policy is not trainer.policy
    with pytest.raises((RuntimeError, ValueError)):
        GRPO(model=Bigram(), reward_fn=low, max_staleness=1, rollout_device="cuda:7", max_new_tokens=4)
