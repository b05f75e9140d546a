"""A run that was stopped, however rudely, and resumed is the run that was not."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import killed_run
import pytest
import torch
from safetensors.torch import load_file
from tiny_qwen2 import tiny_qwen2
from trained_models import SignalAt, tiny_moe, weights_of

from strop.algorithms.dpo import DPO
from strop.algorithms.sft import SFT
from strop.callbacks import Callback, EarlyStopping
from strop.logging import read_metrics
from strop.training.checkpoint import CheckpointError

PAIRS = [{"prompt": [2 + i % 7, 3], "chosen": [4 + i, 1], "rejected": [5, 6 + i % 5, 1]} for i in range(10)]
ROWS = [{"prompt": [2 + i % 7, 3], "completion": [4 + i, 1]} for i in range(10)]
OPTIONS = {"batch_size": 3, "learning_rate": 1e-2, "schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1}


def dpo_qwen2(**more):
    return DPO(model=tiny_qwen2(attention_dropout=0.2), dropout=True, **OPTIONS, **more)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_write_a_checkpoint_and_stop_cleanly(number, tmp_path, capsys):
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    sft = SFT(model=tiny_moe(), callbacks=[SignalAt(3, number)], **OPTIONS)
    history = sft.train(ROWS, num_steps=6, output_dir=tmp_path)
    assert (history.interrupted, history.signal, sft.state.step) == (True, number, 3)
    assert Path(history.checkpoint).name == "step-00000003.safetensors"
    assert not (tmp_path / "final").exists()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert "SFT interrupted after step 3 of 6; checkpoint" in capsys.readouterr().err
    again = SFT(model=tiny_moe(), **OPTIONS)
    assert not again.train(ROWS, num_steps=6, output_dir=tmp_path, resume=True).interrupted
    whole = SFT(model=tiny_moe(), **OPTIONS)
    whole.train(ROWS, num_steps=6)
    assert torch.equal(weights_of(again), weights_of(whole))


class Failure(Exception):
    pass


class FailAt(Callback):
    """Fails once, before step `step` has done anything, or at its end."""

    def __init__(self, step, event):
        self.step, self.event = step, event

    def on_step_begin(self, trainer):
        torch.rand(3)
        if self.event == "begin" and trainer.state.step == self.step - 1:
            self.event = None
            raise Failure

    def on_step_end(self, trainer, metrics):
        if self.event == "end" and trainer.state.step == self.step:
            raise Failure


@pytest.mark.parametrize("event", ["begin", "end"])
def test_a_failed_step_loses_nothing(event, tmp_path):
    """No save_every: the checkpoint is written because of the failure, and going on gives the undisturbed run."""
    first = dpo_qwen2(callbacks=[FailAt(3, event)])
    with pytest.raises(Failure) as caught:
        first.train(PAIRS, num_steps=5, output_dir=tmp_path)
    done = 2 if event == "begin" else 3
    assert f"the run up to step {done} is in" in caught.value.__notes__[0]
    second = dpo_qwen2(callbacks=[FailAt(99, event)])
    second.train(PAIRS, num_steps=5, output_dir=tmp_path, resume=True)
    whole = dpo_qwen2(callbacks=[FailAt(99, event)])
    whole.train(PAIRS, num_steps=5)
    assert torch.equal(weights_of(second), weights_of(whole))


class FullDisk(Callback):
    """From step 3 on nothing can be written: no checkpoint, and with `logs` no metrics either."""

    def __init__(self, monkeypatch, logs=False):
        self.monkeypatch, self.logs = monkeypatch, logs

    def on_step_begin(self, trainer):
        if trainer.state.step == 2:

            def fails(*_):
                raise OSError("step-3 could not be written: I/O error: No space left on device (os error 28)")

            def fails_too(*_):
                raise OSError(28, "No space left on device", "metrics.jsonl")

            self.monkeypatch.setattr("strop.training.checkpoint.save", fails)
            if self.logs:
                trainer.log = fails_too


@pytest.mark.parametrize(("logs", "save_every"), [(False, 1), (True, 2), (True, 0)])
def test_a_full_disk_is_told_once(logs, save_every, tmp_path, monkeypatch):
    """The error is what failed first; its note does not say the same again, but from where the run can go on."""
    sft = SFT(model=tiny_moe(), save_every=save_every, callbacks=[FullDisk(monkeypatch, logs)], **OPTIONS)
    with pytest.raises(OSError, match="No space left on device") as caught:
        sft.train(ROWS, num_steps=5, output_dir=tmp_path)
    (note,) = caught.value.__notes__
    assert "No space" not in note
    newest = tmp_path / "checkpoints" / "step-00000002.safetensors"
    where = (
        f"; resume=True goes on from the newest, {newest}"
        if save_every
        else ", and there is no earlier one: see save_every"
    )
    assert note == f"no checkpoint of this step could be written{where}"


def test_a_rescue_that_fails_for_another_reason_tells_it(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError("the disk is full")

    sft = SFT(model=tiny_moe(), save_every=2, callbacks=[FailAt(3, "begin")], **OPTIONS)
    sft.callbacks[0].on_save = lambda *_: monkeypatch.setattr("strop.training.checkpoint.save", fails)
    with pytest.raises(Failure) as caught:
        sft.train(ROWS, num_steps=5, output_dir=tmp_path)
    newest = tmp_path / "checkpoints" / "step-00000002.safetensors"
    assert caught.value.__notes__ == [
        f"no checkpoint of this step could be written: the disk is full; resume=True goes on from the newest, {newest}"
    ]


def test_lines_after_the_checkpoint_are_dropped(tmp_path):
    """Killed at step 5 with its last checkpoint at 4: step 5 is logged once in the end, and a half line is no line."""
    first = SFT(model=tiny_moe(), save_every=2, callbacks=[FailAt(5, "end")], **OPTIONS)
    with pytest.raises(Failure):
        first.train(ROWS, num_steps=8, output_dir=tmp_path)
    (tmp_path / "checkpoints" / "step-00000005.safetensors").unlink()  # a kill would not have left it
    assert [entry["step"] for entry in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    second = SFT(model=tiny_moe(), save_every=2, **OPTIONS)
    history = second.train(ROWS, num_steps=8, output_dir=tmp_path, resume=True)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [entry["step"] for entry in lines] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [entry["step"] for entry in history.steps] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert all(a["time"] < b["time"] for a, b in itertools.pairwise(lines))
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["algorithm"] == "SFT"
    assert about["config"]["run"]["batch_size"] == 3
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000006.safetensors", "step-00000008.safetensors",
    ]  # fmt: skip


def test_what_a_kill_left_half_written_is_removed(tmp_path):
    SFT(model=tiny_moe(), **OPTIONS).train(ROWS, num_steps=1, output_dir=tmp_path)
    (tmp_path / "checkpoints" / ".step-00000002.safetensors.77.tmp").write_bytes(b"half")
    (tmp_path / ".final.x1" / "model").mkdir(parents=True)
    SFT(model=tiny_moe(), **OPTIONS).train(ROWS, num_steps=2, output_dir=tmp_path, resume=True)
    assert sorted(path.name for path in tmp_path.rglob(".*")) == []


def test_nothing_is_begun_anew_where_every_checkpoint_is_damaged(tmp_path):
    SFT(model=tiny_moe(), save_every=2, **OPTIONS).train(ROWS, num_steps=4, output_dir=tmp_path)
    for path in (tmp_path / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    with (
        pytest.warns(UserWarning, match="is cut off"),
        pytest.raises(CheckpointError, match="none of the 2 checkpoints"),
    ):
        SFT(model=tiny_moe(), save_every=2, **OPTIONS).train(ROWS, num_steps=6, output_dir=tmp_path, resume=True)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4


def test_a_run_of_another_algorithm_is_named(tmp_path):
    SFT(model=tiny_moe(), **OPTIONS).train(ROWS, num_steps=1, output_dir=tmp_path)
    with pytest.raises(CheckpointError, match="must be a checkpoint of DPO, found one of SFT"):
        DPO(model=tiny_moe(), batch_size=2).train(PAIRS, num_steps=1, output_dir=tmp_path, resume=True)


def test_callbacks_go_on_where_they_were(tmp_path):
    def make():
        stopping = EarlyStopping("loss", patience=1000)
        return SFT(model=tiny_moe(), callbacks=[stopping], **OPTIONS), stopping

    sft, stopping = make()
    sft.train(ROWS, num_steps=4, output_dir=tmp_path)
    again, resumed = make()
    again.train(ROWS, num_steps=4, output_dir=tmp_path, resume=True)
    assert resumed.best == stopping.best is not None
    assert resumed.num_bad == stopping.num_bad


def test_a_finished_run_resumed_does_nothing_more_and_can_be_extended(tmp_path, capsys):
    sft = SFT(model=tiny_moe(), **OPTIONS)
    sft.train(ROWS, num_steps=4, output_dir=tmp_path)
    same = SFT(model=tiny_moe(), **OPTIONS)
    assert "SFT is at step 4 of 4" not in capsys.readouterr().err
    assert len(same.train(ROWS, num_steps=4, output_dir=tmp_path, resume=True).steps) == 4
    assert torch.equal(weights_of(same), weights_of(sft))
    assert "SFT is at step 4 of 4: nothing left to do" in capsys.readouterr().err
    longer = SFT(model=tiny_moe(), **OPTIONS)
    longer.train(ROWS, num_steps=6, output_dir=tmp_path, resume=True)
    assert longer.state.step == 6


def test_what_a_resumed_run_may_not_change(tmp_path):
    SFT(model=tiny_moe(), **OPTIONS).train(ROWS, num_steps=1, output_dir=tmp_path)
    with pytest.raises(ValueError, match="output_dir must not hold a run"):
        SFT(model=tiny_moe(), **OPTIONS).train(ROWS, num_steps=1, output_dir=tmp_path)
    other = SFT(model=tiny_moe(), **{**OPTIONS, "batch_size": 2})
    with pytest.raises(ValueError, match=r"run.batch_size must be 3 as in the run of .*, found 2"):
        other.train(ROWS, num_steps=1, output_dir=tmp_path, resume=True)
    with pytest.raises(ValueError, match=r"dataset must have 10 rows as when the run began, found 9"):
        SFT(model=tiny_moe(), **OPTIONS).train(ROWS[1:], num_steps=1, output_dir=tmp_path, resume=True)
    with pytest.raises(ValueError, match="output_dir must be given with resume=True"):
        other.train(ROWS, resume=True)


def test_ten_kills(tmp_path):
    """SIGKILL at ten random moments, each time resumed: the final weights are those of the run left in peace."""
    killed_run.train(tmp_path / "whole", resume=False)
    program = Path(killed_run.__file__)
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "killed"), "10"], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout.split() == ["10", "0"], done.stdout + done.stderr
    whole, killed = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("whole", "killed"))
    assert whole.keys() == killed.keys()
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    steps = [entry["step"] for entry in read_metrics(tmp_path / "killed" / "metrics.jsonl")]
    assert steps == list(range(1, killed_run.NUM_STEPS + 1))


def test_a_step_that_failed_is_taken_again_without_a_folder_too():
    whole, broken = (SFT(model=tiny_moe(), **OPTIONS) for _ in range(2))
    broken.callbacks = FailAt(3, "begin")
    whole.train(ROWS, num_steps=5)
    with pytest.raises(Failure):
        broken.train(ROWS, num_steps=5)
    broken.train(ROWS, num_steps=5)
    assert torch.equal(weights_of(whole), weights_of(broken))


def test_callbacks_and_loggers_put_in_later_are_checked():
    sft = SFT(model=tiny_moe(), **OPTIONS)
    sft.loggers, sft.callbacks = None, [FailAt(3, "begin")]
    assert sft.loggers == []
    with pytest.raises(TypeError, match=r"logger must have log\(metrics, step\), found a str"):
        sft.loggers = "wandb"
    with pytest.raises(TypeError, match=r"callbacks must be of strop\.callbacks\.Callback, found int"):
        sft.callbacks = 5
    sft.goes_on = True
    assert sft.goes_on
