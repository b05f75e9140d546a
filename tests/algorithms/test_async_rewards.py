"""Async reward functions run together, with a limit; calls are repeated, limited in time, and may be left out."""

import asyncio
import math
import sys
import time

import numpy as np
import pytest
import torch
from test_grpo import PROMPTS, make_grpo
from tiny_models import moe

from strop.algorithms.grpo import _by_group
from strop.algorithms.online_dpo import OnlineDPO
from strop.config import RewardCalls
from strop.primitives import compute_batch_group_advantages
from strop.rewards import PreferenceFunction, RewardError, RewardFunctions, async_calls, functions

ROWS = {
    "completions": ["aa", "b", ""],
    "prompts": ["first", "second", "third"],
    "completion_ids": [[1, 1], [2], []],
    "prompt_ids": [[9], [8], [7]],
    "answer": ["aa", "x", ""],
}
LEFT_OUT = RewardCalls(on_reward_error="leave_out")


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """The pauses before repeated calls, which are not made."""
    found = []
    monkeypatch.setattr(async_calls, "pause_before", lambda attempt: found.append(attempt) or 0.0)
    return found


def judged(*judges, timeout=None, calls=None):
    return RewardFunctions(list(judges), None, timeout, calls=calls)(ROWS)


# ---- what they are given, and when they run ----


def test_an_async_function_of_all_completions():
    async def right(completions, answer):
        await asyncio.sleep(0)
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    class Judge:
        async def __call__(self, completions):
            return [len(c) for c in completions]

    found = judged(right, Judge())
    assert found.columns["right"].tolist() == [1, 0, 1]
    assert found.columns["Judge"].tolist() == [2, 1, 0]
    assert found.total_B.tolist() == [3, 1, 1]


def test_an_async_function_of_one_completion_is_called_for_each():
    seen = []

    async def right(completion, prompt, answer, completion_ids):
        seen.append((completion, prompt, answer, completion_ids))
        return float(completion == answer)

    assert judged(right).total_B.tolist() == [1, 0, 1]
    assert seen == [("aa", "first", "aa", [1, 1]), ("b", "second", "x", [2]), ("", "third", "", [])]


def test_an_async_function_of_one_pair():
    async def longer(pair, prompt, **rest):
        assert prompt == "p"
        return 0.5 if len(pair[0]) == len(pair[1]) else len(pair[1]) > len(pair[0])

    pairs = [("a", "bb"), ("ccc", "d"), ("e", "f")]
    assert PreferenceFunction(longer)(pairs, {"prompts": ["p"] * 3, "answer": [1, 2, 3]}) == [1, 0, 0.5]


def test_parameters_are_checked_before_anything_is_sampled():
    async def asks(completion, answr):
        return 0.0

    with pytest.raises(RewardError, match="asks for 'answr', which is no column of the rows; did you mean 'answer'"):
        RewardFunctions(asks).check([{"prompt": "a", "answer": "b"}], "data")

    async def right(completion, answer):
        return 0.0

    with pytest.raises(RewardError, match=r"data\[1\] must have the column 'answer'"):
        RewardFunctions(right).check([{"prompt": "a", "answer": "b"}, {"prompt": "a"}], "data")


def test_functions_overlap():
    """Two async ones, and a plain one that sleeps: together as long as one."""

    async def first(completions):
        await asyncio.sleep(0.3)
        return [1.0] * 3

    async def second(completion):
        await asyncio.sleep(0.3)
        return 2.0

    def third(completions):
        time.sleep(0.3)
        return [3.0] * 3

    start = time.monotonic()
    assert judged(first, third, second).total_B.tolist() == [6, 6, 6]
    assert time.monotonic() - start < 0.6


@pytest.mark.parametrize("limit", [1, 2])
def test_so_many_calls_run_at_the_same_time(limit):
    running, most = 0, 0

    async def slow(completion):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return 0.0

    judged(slow, calls=RewardCalls(reward_concurrency=limit))
    assert most == limit


def test_a_client_of_the_function_stays_open_from_step_to_step():
    loops = []

    async def asks(completion):
        loops.append(asyncio.get_running_loop())
        return 0.0

    judged(asks)
    judged(asks)
    assert len(set(loops)) == 1


# ---- calls that fail ----


async def fails_on_b(completion):
    return 1.0 if completion != "b" else 1 / 0


async def late_on_b(completion):
    await asyncio.sleep(0 if completion != "b" else 9)
    return 1.0


async def exits_on_b(completion):
    return 1.0 if completion != "b" else sys.exit(0)


FAILING = [
    (fails_on_b, "fails_on_b raised ZeroDivisionError: division by zero at .*line.*(completion 1, prompt 'second')"),
    (late_on_b, r"late_on_b must return within timeout=0.2 seconds, found it still running \(completion 1, prompt 'second'\)"),
    (exits_on_b, r"exits_on_b raised ExitError: sys.exit\(0\) was called at .*completion 1"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "message"), FAILING)
def test_a_call_that_fails_stops_the_run_and_names_the_completion(function, message):
    start = time.monotonic()
    with pytest.raises(RewardError, match=message):
        judged(function, timeout=0.2)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(("function", "message"), FAILING)
def test_a_call_that_fails_is_left_out(function, message):
    with pytest.warns(UserWarning, match=f"{message}.*left out of the loss"):
        found = judged(function, lambda completions: [5.0] * 3, timeout=0.2, calls=LEFT_OUT)
    assert found.total_B.nan_to_num(nan=-1).tolist() == [6, -1, 6]
    assert found.columns["lambda"].tolist() == [5, 5, 5]
    assert found.shown["reward"] == [6, None, 6]
    assert found.metrics["reward/mean"] == 6
    assert found.metrics["reward/std"] == 0
    assert found.metrics["reward/failed_fraction"] == pytest.approx(1 / 3)


def test_where_every_call_fails_the_run_stops():
    async def fails(completion):
        raise OSError("no network")

    with (
        pytest.warns(UserWarning, match="no network"),
        pytest.raises(RewardError, match=r"no completion has a reward: .*no network"),
    ):
        judged(fails, calls=LEFT_OUT)


@pytest.mark.parametrize("calls", [RewardCalls(), LEFT_OUT])
def test_a_wrong_value_is_never_left_out(calls):
    async def wrong(completion):
        return None

    with pytest.raises(RewardError, match=r"must return numbers, found None \(completion 0"):
        judged(wrong, calls=calls)
    with pytest.raises(RewardError, match="must return finite numbers, found nan"):
        judged(lambda completions: [math.nan] * 3, calls=calls)


def test_calls_are_made_again(pauses):
    counts = {}

    async def fails_twice(completion):
        counts[completion] = counts.get(completion, 0) + 1
        if completion == "b" and counts["b"] < 3:
            raise OSError
        return 1.0

    def also(completions):
        counts["all"] = counts.get("all", 0) + 1
        if counts["all"] < 3:
            raise OSError
        return [1.0] * 3

    assert judged(fails_twice, also, calls=RewardCalls(reward_retries=2)).total_B.tolist() == [2, 2, 2]
    assert counts == {"aa": 1, "b": 3, "": 1, "all": 3}
    assert sorted(pauses) == [0, 0, 0, 1, 1, 2, 2]
    counts.clear()
    with pytest.raises(RewardError, match="OSError"):
        judged(also, calls=RewardCalls(reward_retries=1))


def test_the_pauses(monkeypatch):
    monkeypatch.undo()
    assert [async_calls.pause_before(attempt) for attempt in (0, 1, 2, 3, 4, 99)] == [0, 0.5, 1, 2, 4, 30]


def test_a_plain_function_that_fails_is_left_out():
    def fails(completions):
        raise OSError("no network")

    with pytest.warns(UserWarning, match="no network"), pytest.raises(RewardError, match="no completion has a reward"):
        judged(fails, calls=LEFT_OUT)


def test_a_call_that_blocks_all_others_is_an_error(monkeypatch):
    monkeypatch.setattr(functions, "GRACE", 0.1)

    async def blocks(completion):
        time.sleep(1)
        return 1.0

    with pytest.raises(RewardError, match=r"blocks must return .* it blocks all other async calls: it must await"):
        judged(blocks, timeout=0.1)

    async def good(completion):
        return 1.0

    assert judged(good, timeout=0.1).total_B.tolist() == [1, 1, 1]  # in a new loop


def test_calls_that_were_begun_end_with_an_error_of_another_function():
    ended = []

    async def slow(completion):
        try:
            await asyncio.sleep(9)
        finally:
            ended.append(completion)

    def fails(completions):
        time.sleep(0.1)
        raise OSError

    with pytest.raises(RewardError, match="OSError"):
        judged(slow, fails)
    end = time.monotonic() + 5
    while len(ended) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    assert sorted(ended) == ["", "aa", "b"]


# ---- in training ----


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_advantages_without_those_that_failed(scale, ddof):
    rewards = torch.tensor([1.0, 2.0, 4.0, 0.5, 0.5, 3.0, 9.0, 1.0]).double().numpy()
    how = {"ddof": ddof, "eps": 1e-4, "scale": scale}
    full = compute_batch_group_advantages(rewards, 4, **how)
    assert _by_group(rewards, ~np.isnan(rewards), 4, **how) == pytest.approx(full, rel=1e-12)
    rewards[[1, 4, 5, 6]] = math.nan  # of the second group one is left
    found = _by_group(rewards, ~np.isnan(rewards), 4, **how)
    assert found[[1, 4, 5, 6, 7]].tolist() == [0] * 5
    known = rewards[[0, 2, 3]] - rewards[[0, 2, 3]].mean()
    std = {"group": known.std(ddof=ddof) + 1e-4, "batch": rewards[[0, 2, 3, 7]].std(ddof=ddof) + 1e-4, "none": 1.0}
    assert found[[0, 2, 3]] == pytest.approx(known / std[scale], rel=1e-12)


def test_completions_without_a_reward_are_left_out_of_the_loss():
    """Those that end in an odd id fail. None of their tokens is in a batch of the loss."""
    seen = []

    async def even(completion):
        if completion[-1] % 2:
            raise OSError("odd")
        return float(completion.sum())

    grpo = make_grpo(moe(), reward_fn=even, group_size=4, on_reward_error="leave_out", kl_coef=0.0)
    loss_on = grpo.loss_on
    grpo.loss_on = lambda part: seen.extend(part) or loss_on(part)
    with pytest.warns(UserWarning, match="odd"):
        metrics = grpo.train_step(PROMPTS)
    failed = [sample["reward"] is None for sample in grpo.samples]
    assert 0 < sum(failed) < len(failed)
    assert metrics["reward/failed_fraction"] == sum(failed) / len(failed)
    assert len(seen) == len(failed) - sum(failed)
    assert all(one.ids_T[-1] % 2 == 0 and math.isfinite(one.reward) for one in seen)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["reward/mean"] == pytest.approx(sum(one.reward for one in seen) / len(seen))


def test_groups_without_signal_are_those_whose_known_rewards_are_equal():
    from strop.algorithms.grpo import without_signal
    from strop.data.batch import Trajectory

    def group(*rewards):
        return [Trajectory.of([1], [2], reward=reward) for reward in rewards]

    rows = [*group(1.0, 1.0), *group(1.0, math.nan), *group(math.nan, math.nan), *group(-1.0, 2.0)]
    assert without_signal(rows, 2).tolist() == [True, True, True, False]


def test_pairs_without_a_preference_are_left_out():
    async def judge(pair, prompt):
        if prompt[0] == PROMPTS[0][0]:
            raise OSError("no answer")
        return 0.5 if prompt[0] == PROMPTS[1][0] else 1

    dpo = OnlineDPO(model=moe(), preference_fn=judge, max_new_tokens=4, on_reward_error="leave_out")
    with pytest.warns(UserWarning, match="no answer"):
        metrics = dpo.train_step(PROMPTS)
    assert metrics["preference/tied_fraction"] == 0.5
    assert [sample["preferred"] for sample in dpo.samples] == [False] * 4 + [False, True] * 2
    assert math.isfinite(metrics["loss"])


@pytest.mark.parametrize("options", [{"credit": "turn"}])
def test_what_needs_every_reward_refuses_to_leave_some_out(options):
    from strop.config import GRPOConfig, PPOConfig

    with pytest.raises(ValueError, match='on_reward_error must be "raise"'):
        GRPOConfig.from_options({"on_reward_error": "leave_out", **options})
    with pytest.raises(ValueError, match='on_reward_error must be "raise"'):
        PPOConfig.from_options({"on_reward_error": "leave_out"})
