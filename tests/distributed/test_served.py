"""Processes that share a rollout server train as one process with that server does, whichever way the weights get there."""

import contextlib

import pytest
import runs
from test_equality import read, work
from test_resume_processes import apart, launched
from tiny_models import llama

from strop.models import as_policy
from strop.rollout.openai_server import OpenAIServer
from strop.rollout.served_model import ServedModel
from strop.training.logging import read_metrics

NAMES = ["served", "served-again", "served-lora", "served-distill", "served-turns"]


@contextlib.contextmanager
def serving():
    """Rows are decoded alone, so that the bits of an answer do not depend on what else is asked."""
    served = ServedModel(as_policy(llama(eos_token_id=3)), "tiny", max_batch=1)
    server = OpenAIServer(served, allow_sync=True).start()
    try:
        yield server.url
    finally:
        server.stop()
        served.close()


@pytest.fixture
def servers(monkeypatch):
    """One for each of NAMES, and one for those who sample ahead."""
    with contextlib.ExitStack() as stack:
        monkeypatch.setenv("STROP_TEST_SERVERS", " ".join(stack.enter_context(serving()) for _ in range(6)))
        yield


def trained(folder, size, shards):
    work(folder, size, [f"{shard}/{name}" for shard in shards for name in NAMES])
    return {shard: [read(folder / shard / f"{name}.safetensors") for name in NAMES] for shard in shards}


def test_two_processes_share_a_server(tmp_path, servers):
    """With replicas, then with shards: the servers are brought the weights of the second run as they were those of the first."""
    wanted = trained(tmp_path, 1, ["none"])["none"]
    found = trained(tmp_path, 2, ["none", "full"])
    for (steps, weights), (wanted_steps, wanted_weights) in zip(found["none"] + found["full"], wanted * 2, strict=True):
        for step, wanted_step in zip(steps, wanted_steps, strict=True):
            assert step == pytest.approx(wanted_step, rel=1e-4, abs=1e-5)
        for name, weight in weights.items():
            assert (weight - wanted_weights[name]).abs().max() < 1e-5


def test_two_processes_ahead(tmp_path, servers):
    """As one process does, and resumed bit for bit: what was sampled ahead is in the checkpoint.

    By a server, by a server with an environment, and by a copy of the model in each process, of weights in shards.
    """
    plan, cases = [], {"ahead": "none", "turns_ahead": "none", "here_ahead": "full"}
    for case, shard in cases.items():
        runs.train(case, "none", tmp_path / f"{case}-alone", 4, False)
        through, then = f"{case}-through", f"{case}-then"
        plan += [
            [case, shard, through, 4, False],
            ["copy", through, then],
            ["forget", then],
            [case, shard, then, 4, True],
        ]
    launched(2, tmp_path, [*plan, ["copy", "ahead-through", "ahead-one"], ["forget", "ahead-one"]])
    runs.train("ahead", "none", tmp_path / "ahead-one", 4, True)  # one process goes on with the queue of two
    assert apart(tmp_path / "ahead-through", tmp_path / "ahead-one") < 1e-5
    ages = [entry["staleness/mean"] for entry in read_metrics(tmp_path / "ahead-one" / "metrics.jsonl")]
    assert ages == [0, 1, 1, 1]
    for case in cases:
        alone, through, then = (tmp_path / f"{case}-{how}" for how in ("alone", "through", "then"))
        assert apart(through, then) == 0
        assert apart(through, alone) < 1e-5
        wanted, found, again = (read_metrics(folder / "metrics.jsonl") for folder in (alone, through, then))
        for one, other, single in zip(found, again, wanted, strict=True):
            assert (one["loss"], one["mismatch_kl"]) == (other["loss"], other["mismatch_kl"])
            assert one["reward/mean"] == pytest.approx(single["reward/mean"])
            assert one["staleness/mean"] == single["staleness/mean"]
        assert any(entry["mismatch_kl"] > 1e-6 for entry in found)  # the completions are older than the weights
