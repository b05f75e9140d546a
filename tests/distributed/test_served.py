"""Processes that share a rollout server train as one process with that server does, whichever way the weights get there."""

import contextlib
import threading

import pytest
from test_equality import read, work
from tiny_models import llama

from strop.models import as_policy
from strop.rollout.serving import Serving, make_server

NAMES = ["served", "served-again", "served-lora"]


@contextlib.contextmanager
def serving():
    server = make_server(Serving(as_policy(llama(eos_token_id=3)), "tiny", True), port=0)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def trained(folder, size, shard, monkeypatch):
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        monkeypatch.setenv("STROP_TEST_SERVERS", " ".join(stack.enter_context(serving()) for _ in NAMES))
        work(folder, size, [f"{shard}/{name}" for name in NAMES])
    return [read(folder / shard / f"{name}.safetensors") for name in NAMES]


def test_two_processes_share_a_server(tmp_path, monkeypatch):
    wanted = trained(tmp_path / "alone", 1, "none", monkeypatch)
    for shard in ("none", "full"):
        found = trained(tmp_path / shard, 2, shard, monkeypatch)
        for (steps, weights), (wanted_steps, wanted_weights) in zip(found, wanted, strict=True):
            for step, wanted_step in zip(steps, wanted_steps, strict=True):
                assert step == pytest.approx(wanted_step, rel=1e-4, abs=1e-5)
            for name, weight in weights.items():
                assert (weight - wanted_weights[name]).abs().max() < 1e-5
