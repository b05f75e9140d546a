"""Rollouts across turns: what is read is what was drawn and said, whatever the model and whoever is late."""

import functools
import sys
import threading
import time

import numpy as np
import pytest
import torch
from games import Echo, OfIds, Slow, SlowAsync
from tiny_models import Letters, every_kind, llama, moe, qwen2

from strop.environments import Environment, EnvironmentFailure, Player, Turn, TurnsConfig
from strop.models import as_policy
from strop.rollout import Sampler, Sampling

SAMPLING = Sampling(max_new_tokens=4)
ROWS = [{"prompt": "ab"}, {"prompt": "dab"}, {"prompt": "f"}]


def play(environment, model=None, rows=ROWS, num_samples=2, seed=0, sampling=SAMPLING, tokenizer=None, **turns):
    policy = as_policy(moe(eos_token_id=3) if model is None else model, tokenizer)
    return Player(environment, Sampler(policy), policy, TurnsConfig(**turns))(rows, sampling, num_samples, seed)


class LettersOnly(Letters):
    """Any id has a letter: what the model may draw is never no text."""

    chat_template = None

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(i + 96) for i in ids if not (skip_special_tokens and i in (0, 3)))


@every_kind
def test_ids_read_are_ids_drawn_and_said(make):
    """Log-probs of every turn are those of one forward over the whole trajectory."""
    model = make(eos_token_id=3, max_length=64)
    found = play(Echo, model, tokenizer=LettersOnly(), num_samples=3)
    assert len(found) == 9
    tokens = LettersOnly()
    for line in found:
        environment, spans = line.shown["environments"], [turn.num_tokens for turn in line.turns]
        said = iter(environment.heard)
        ids, drawn = line.ids_T.tolist(), line.loss_mask_T.tolist()
        assert sum(drawn) == sum(spans) == len(line.rollout_logps_t)
        text = tokens.encode(environment.row["prompt"])
        for turn, span in enumerate(spans):
            assert ids[: len(text)] == text
            text += ids[len(text) : len(text) + span]
            reply = next(said)
            if turn + 1 < len(spans):
                text += tokens.encode(f"b{reply[:2]}b")
        assert ids == text
    policy = as_policy(model)
    with torch.no_grad(), policy.evaluating():
        for line in found:
            from strop.data.batch import TokenBatch

            wanted = policy.logps(TokenBatch.of([line]))
            torch.testing.assert_close(line.rollout_logps_t, wanted, rtol=0, atol=2e-6)


def test_on_the_moe_log_probs_are_those_of_training_bit_for_bit():
    from strop.data.batch import TokenBatch

    policy = as_policy(moe(eos_token_id=3), LettersOnly())
    found = Player(Echo, Sampler(policy), policy, TurnsConfig())(ROWS, SAMPLING, 4, 0)
    with torch.no_grad():
        for line in found:
            assert line.rollout_logps_t.equal(policy.logps(TokenBatch.of([line])))


@pytest.mark.parametrize("environment", [Slow, SlowAsync], ids=["threads", "asyncio"])
def test_delays_change_no_id(environment):
    rows = [{"prompt": "abcdefgh"[i % 8 :][:3]} for i in range(16)]
    plain, late = (play(one, rows=rows, num_samples=4, tokenizer=LettersOnly()) for one in (Echo, environment))
    assert len(plain) == 64
    assert [ids.tolist() for ids in plain.completion_ids] == [ids.tolist() for ids in late.completion_ids]
    assert all(a.equal(b) for a, b in zip(plain.logps, late.logps, strict=True))
    assert plain.finish_reasons == late.finish_reasons


def test_a_row_alone_draws_what_it_draws_among_others():
    among = play(Echo, tokenizer=LettersOnly())
    policy = as_policy(moe(eos_token_id=3), LettersOnly())
    alone = Player(Echo, Sampler(policy), policy, TurnsConfig())(ROWS[1:2], SAMPLING, 2, 0, [1])
    assert [ids.tolist() for ids in alone.completion_ids] == [ids.tolist() for ids in among.completion_ids[2:4]]


def test_samples_and_turns_have_their_own_random_numbers():
    found = play(OfIds, moe(), rows=[{"prompt": [5, 6, 7]}], num_samples=8, tokenizer=None)
    turns = [tuple(ids[:4].tolist()) for ids in found.completion_ids]
    assert len(set(turns)) > 4


def test_finish_reasons_are_told_apart():
    sampling = Sampling(max_new_tokens=2, temperature=0.0)
    endless = moe()  # no EOS: every turn is cut
    assert set(play(Echo, endless, tokenizer=Unending(), sampling=sampling).finish_reasons) == {"length"}
    ends = moe(eos_token_id=list(range(30)))
    assert set(play(Echo, ends, tokenizer=LettersOnly()).finish_reasons) == {"environment"}
    assert set(play(Echo, ends, tokenizer=LettersOnly(), max_turns=2).finish_reasons) == {"turns"}
    short = play(Echo, ends, tokenizer=LettersOnly(), max_tokens=9)
    assert set(short.finish_reasons) == {"length"}
    assert all(len(line) <= 9 for line in short)
    assert all(line.loss_mask_T[-1] for line in short)  # what was heard and not answered is left out


class Unending(LettersOnly):
    eos_token_id = None


def test_metrics():
    ends = moe(eos_token_id=list(range(30)))
    found = play(Echo, ends, tokenizer=LettersOnly()).metrics
    said = found.pop("environment/said")
    assert 0 <= said <= 3
    assert found.pop("environment/seconds") > 0
    assert found["turns/mean"] == found["completion/length"] == 3
    assert found["turns/given_tokens"] == pytest.approx(2 * 2 + said * 2 / 3, abs=0.3)
    assert (found["turns/truncated_fraction"], found["environment/failed_fraction"]) == (0, 0)


# ---- faults ----


def failing(what, method="step", after=1):
    class Failing(Echo):
        def reset(self, row):
            if method == "reset" and row["prompt"] == "dab":
                return what()
            return super().reset(row)

        def step(self, reply):
            turn = super().step(reply)
            if method == "step" and self.row["prompt"] == "dab" and len(self.heard) == after:
                return what()
            return turn

    return Failing


def raises():
    raise KeyError("x")


def hangs():
    time.sleep(60)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        (raises, r"Failing.step raised KeyError: 'x' \(trajectory 2, turn 1, row {'prompt': 'dab'}\)"),
        (lambda: None, r"Failing.step: it must return a Turn, found None \(trajectory 2"),
        (lambda: ("b", 1.0, False), "must return a Turn, found \\('b'"),
        (lambda: Turn("b", reward=float("nan")), "finite reward, found nan"),
        (lambda: Turn("b", reward="1"), "finite reward, found '1'"),
        (lambda: Turn("b", done=None), "done is True or False, found None"),
        (lambda: Turn(""), "that has messages or is done, found neither"),
        (lambda: Turn([{"role": "user", "content": "b"}]), "messages must be a str as the first were"),
        (lambda: Turn("b", info={"x": "y"}), "info has finite numbers, found x 'y'"),
        (lambda: Turn("b", info={"x": float("inf")}), "info has finite numbers, found x inf"),
        (lambda: Turn("b", info={"seconds": 1}), "info does not use the reserved name 'seconds'"),
        (lambda: Turn("b", info=[1]), r"info is a dict of numbers, found \[1\]"),
        (lambda: Turn(3), "messages are a list, a text or ids, found 3"),
        (lambda: Turn({"role": "user", "content": "b"}), "messages are a list, a text or ids, found {'role'"),
        (lambda: Turn("é"), "messages must hold ids from 0 to 29, found 137"),
        (lambda: sys.exit(0), r"Failing.step raised SystemExit: 0 \(trajectory 2"),
    ],
)
def test_a_wrong_step_stops_the_run_with_the_row_named(what, match):
    model = moe(eos_token_id=list(range(30)))
    with pytest.raises(EnvironmentFailure, match=match):
        play(failing(what), model, tokenizer=LettersOnly())


def test_on_error_end_gives_the_error_reward():
    model = moe(eos_token_id=list(range(30)))
    found = play(failing(raises, after=2), model, tokenizer=LettersOnly(), on_error="end", error_reward=-5.0)
    assert found.metrics["environment/failed_fraction"] == pytest.approx(1 / 3)
    assert [line.turns[-1].reward for line in found[2:4]] == [-5.0, -5.0]
    assert [len(line.turns) for line in found] == [3, 3, 2, 2, 3, 3]
    assert set(found.finish_reasons) == {"environment"}


def test_what_an_environment_gave_before_it_failed_stays_out():
    """Ids the model does not have are not in the trajectory that "end" leaves."""
    model = moe(eos_token_id=list(range(30)))
    found = play(failing(lambda: Turn("bé")), model, tokenizer=LettersOnly(), on_error="end")
    assert [len(line.turns) for line in found] == [3, 3, 1, 1, 3, 3]
    assert all(line.loss_mask_T[-1] for line in found)


def test_nothing_is_asked_of_an_environment_that_is_done():
    """It says `done` in every turn, as a number of numpy's: the first ends it, and nobody asks again."""
    asked = []

    class Done(Echo):
        def step(self, reply):
            asked.append(id(self))
            return Turn("b", reward=1.0, done=np.bool_(True))

    found = play(Done, moe(eos_token_id=list(range(30))), tokenizer=LettersOnly())
    assert len(asked) == len(set(asked)) == 6
    assert [[turn.reward for turn in line.turns] for line in found] == [[1.0]] * 6


def test_a_function_may_make_environments_with_stops_of_their_own():
    class Stopping(Echo):
        stop_ids = tuple(range(30))

        def __init__(self, turns):
            self.turns = turns

    found = play(functools.partial(Stopping, 2), moe(), tokenizer=LettersOnly())
    assert [[turn.num_tokens for turn in line.turns] for line in found] == [[1, 1]] * 6


def test_seconds_are_those_in_the_environment():
    """Not those until the model has time to listen."""

    class Slow(Sampler):
        def next_turn(self, *given):
            time.sleep(0.1)
            return super().next_turn(*given)

    policy = as_policy(moe(eos_token_id=list(range(30))), LettersOnly())
    start = time.monotonic()
    found = Player(SlowAsync, Slow(policy), policy, TurnsConfig())(ROWS, SAMPLING, 2, 0)
    assert 0.001 < found.metrics["environment/seconds"] < time.monotonic() - start - 0.3  # three turns of the model's


def test_a_reset_that_fails_always_stops():
    """There is nothing to train on."""
    with pytest.raises(EnvironmentFailure, match=r"Failing.reset raised KeyError.*trajectory 2, turn 0"):
        play(failing(raises, "reset"), tokenizer=LettersOnly(), on_error="end")
    with pytest.raises(EnvironmentFailure, match="the first messages must have at most 60 tokens"):
        play(Echo, rows=[{"prompt": "a" * 61}], tokenizer=LettersOnly())


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_a_hanging_environment_is_abandoned(kind):
    class Hanging(Echo):
        def step(self, reply):
            if self.row["prompt"] == "dab":
                hangs()
            return super().step(reply)

    class HangingAsync(Echo):
        async def step(self, reply):
            import asyncio

            if self.row["prompt"] == "dab":
                await asyncio.sleep(60)
            return Echo.step(self, reply)

    environment = Hanging if kind == "threads" else HangingAsync
    start = time.monotonic()
    with pytest.raises(
        EnvironmentFailure, match=r"step must return within environment_timeout=0.2 seconds, found it still"
    ):
        play(environment, tokenizer=LettersOnly(), environment_timeout=0.2)
    assert time.monotonic() - start < 40
    found = play(environment, tokenizer=LettersOnly(), environment_timeout=0.2, on_error="end")
    assert found.metrics["environment/failed_fraction"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("on_error", ["raise", "end"])
def test_an_async_one_that_never_awaits_or_exits_does_not_stop_the_others(on_error, monkeypatch):
    """It blocks the event loop that all share: those calls are late, and the next have a loop of their own."""
    monkeypatch.setattr("strop.environments.play.GRACE", 0.1)
    release = threading.Event()

    class Blocking(Echo):
        async def step(self, reply):
            if self.row["prompt"] == "dab" and not release.is_set():
                release.wait(20)
            if self.row["prompt"] == "f":
                sys.exit(1)
            return Echo.step(self, reply)

    try:
        if on_error == "raise":
            with pytest.raises(EnvironmentFailure, match=r"environment_timeout=0.1 seconds|raised SystemExit: 1"):
                play(Blocking, tokenizer=LettersOnly(), environment_timeout=0.1)
        else:
            policy = as_policy(moe(eos_token_id=list(range(30))), LettersOnly())
            turns = TurnsConfig(environment_timeout=0.1, on_error="end")
            player = Player(Blocking, Sampler(policy), policy, turns)
            first = player(ROWS, SAMPLING, 1, 0)
            assert first[1].failure.endswith("found it still running")
            release.set()
            second = player(ROWS, SAMPLING, 1, 0)
            assert [bool(line.failure) for line in second] == [False, False, True]
            assert "raised SystemExit: 1" in second[2].failure
    finally:
        release.set()


def test_environment_workers_limits_concurrency():
    running, most, together = [], [], threading.Barrier(2, timeout=60)

    class Counting(Echo):
        def step(self, reply):
            running.append(1)
            most.append(len(running))
            if not self.heard:
                together.wait()  # for another, however slow the machine
            running.pop()
            return super().step(reply)

    play(Counting, tokenizer=LettersOnly(), environment_workers=2)
    assert max(most) == 2


@pytest.mark.parametrize(
    ("environment", "match"),
    [
        (3, "environment must be a class, or a function that makes one"),
        (type("NoStep", (), {"reset": lambda self, row: "a"}), "NoStep must have reset.* and step.*found no step"),
        (Echo(), "environment must be a class, or a function that makes one for each trajectory, found a Echo"),
    ],
)
def test_invalid_environments_are_refused(environment, match):
    with pytest.raises(TypeError, match=match):
        play(environment)


def test_an_environment_without_reset_begins_with_the_prompt():
    class Bare(Environment):
        def step(self, reply):
            return Turn(done=True, reward=1.0)

    assert play(Bare, tokenizer=LettersOnly()).prompt_ids[0].tolist() == [1, 2]
    with pytest.raises(EnvironmentFailure, match="row must have a prompt for Bare"):
        play(Bare, rows=[{"secret": 3}], tokenizer=LettersOnly())


class Counting(Sampler):
    """Counts the rows of every call, and forgets what was kept if it is told so."""

    def __init__(self, policy, forgets=False):
        super().__init__(policy)
        self.asked, self.forgets = [], forgets

    def next_turn(self, prompts, sampling, seed, addresses, cached):
        self.asked.append(len(prompts))
        if self.forgets:
            return self(prompts, sampling, 1, seed, addresses)
        return super().next_turn(prompts, sampling, seed, addresses, cached)


def test_each_turn_is_one_call_for_all_that_are_ready():
    policy = as_policy(llama(eos_token_id=3), LettersOnly())
    sampler = Counting(policy)
    found = Player(Echo, sampler, policy, TurnsConfig())(ROWS, SAMPLING, 2, 0)
    assert sum(sampler.asked) == sum(len(line.turns) for line in found)
    assert sampler.asked[0] == 6


@pytest.mark.parametrize(
    "make",
    [
        llama,
        qwen2,
        lambda **options: qwen2(sliding_window=4, use_sliding_window=True, max_window_layers=0, **options),
        moe,
    ],
    ids=["llama", "qwen2", "window", "moe"],
)
def test_a_kept_cache_gives_what_reading_everything_again_gives(make, monkeypatch):
    """The same ids in every turn, log-probs within rounding; on the MoE the same bits. Slots hold anything at first."""
    from strop.rollout.decoding import Engine

    begin = Engine.begin

    def begin_with_nan(*given):
        round_, rows = begin(*given)
        round_.kv.fill_(torch.nan)
        return round_, rows

    monkeypatch.setattr(Engine, "begin", begin_with_nan)
    model = make(eos_token_id=list(range(0, 30, 3)), max_length=64)
    policy = as_policy(model, LettersOnly())
    turns = TurnsConfig(max_turns=3)
    kept, again = (
        Player(Echo, Counting(policy, forgets), policy, turns)(ROWS, SAMPLING, 4, 1) for forgets in (False, True)
    )
    assert max(len(line.turns) for line in kept) == 3
    assert [ids.tolist() for ids in kept.completion_ids] == [ids.tolist() for ids in again.completion_ids]
    for a, b in zip(kept.logps, again.logps, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0.0 if make is moe else 2e-6)


def test_of_a_further_turn_only_the_new_tokens_are_read(monkeypatch):
    """All once, of every later turn the last two drawn again, and up to four steps of rows that have ended."""
    from strop.rollout import decoding

    policy = as_policy(llama(eos_token_id=list(range(30)), max_length=64), LettersOnly())
    play_one = Player(Echo, Sampler(policy), policy, TurnsConfig())
    play_one(ROWS[:1], SAMPLING, 1, 0)  # the engine is made, and tried
    seen, read = [], decoding.read

    def counting(layers, pass_, ids, *given, **options):
        seen.append(ids.numel())
        return read(layers, pass_, ids, *given, **options)

    monkeypatch.setattr(decoding, "read", counting)
    found = play_one([{"prompt": "abcdefgh" * 4}], SAMPLING, 1, 0)
    (line,) = found
    assert len(found[0].turns) == 3
    assert len(line) - 1 <= sum(seen) <= len(line) + 3 * (2 + 4) < 3 * 32


def test_of_a_further_turn_the_moe_reads_only_the_new_tokens(monkeypatch):
    """Of every later turn the last token drawn and what was heard; of equal prompts all but the last token once."""
    policy = as_policy(moe(eos_token_id=list(range(30))), LettersOnly())
    engine, seen = policy.model.moe.engine, []

    def counted(method, real):
        def call(tokens_BT, mask_BT, *given, **options):
            seen.append(tokens_BT.size if mask_BT is None else int(mask_BT.sum()))
            return real(tokens_BT, mask_BT, *given, **options)

        monkeypatch.setattr(engine, method, call)

    counted("prefill", engine.prefill)
    counted("complete", engine.complete)
    found = Player(Echo, Sampler(policy), policy, TurnsConfig())([{"prompt": "abcdefgh" * 4}], SAMPLING, 3, 0)
    assert [len(line.turns) for line in found] == [3, 3, 3]
    read = [len(line) - line.loss_mask_T.nonzero()[0].item() for line in found]  # behind the prompt
    assert sum(seen) == 31 + sum(1 + n - 1 for n in read)


def test_nothing_is_kept_of_trajectories_that_ended(monkeypatch):
    """Nor does a call of a row that ended early hold the memory of the others."""
    kept = []

    class Watching(Sampler):
        def next_turn(self, prompts, sampling, seed, addresses, now):
            found = super().next_turn(prompts, sampling, seed, addresses, now)
            kept.append((now.rows, set(now.rows)))
            return found

    policy = as_policy(moe(eos_token_id=list(range(30))), LettersOnly())
    Player(Echo, Watching(policy), policy, TurnsConfig())(ROWS, SAMPLING, 2, 0)
    assert kept[0][1] == set(range(6))
    assert kept[-1][0] == {}


def test_threads_and_event_loops_of_a_pool_end(monkeypatch):
    import asyncio
    import gc

    from strop.environments import pool as module

    monkeypatch.setattr(module, "IDLE_SECONDS", 0.1)
    before = set(threading.enumerate())
    pool = module.Pool(8)

    async def later():
        await asyncio.sleep(0.01)

    for _ in range(20):
        pool.submit(time.sleep, 0.001).result()
    pool.submit(later).result()
    ours = set(threading.enumerate()) - before
    assert len(ours) == 2  # one call at a time needs one thread, and there is the event loop
    del pool
    gc.collect()
    for thread in ours:
        thread.join(20)
        assert not thread.is_alive()
