"""Loggers: what they write, several at once, and that a failing one stops the run."""

import io
import json
import sys
import types

import pytest
from trained_models import tiny_moe

from strop.algorithms.sft import SFT
from strop.logging import ConsoleLogger, JSONLLogger, TensorBoardLogger, TrackioLogger, WandbLogger, read_metrics
from strop.training.logging import drop_after
from strop.training.state import History

ROWS = [{"prompt": [2 + i], "completion": [3 + i, 1]} for i in range(4)]


def test_the_console_writes_means_every_so_many_steps():
    out = io.StringIO()
    logger = ConsoleLogger(log_interval=2, file=out)
    for step, loss in enumerate([1.0, 2.0, 5.0, 6.0, 100.0], 1):
        logger.log({"time": 1.0, "loss": loss, "reward/mean": 0.5, "time/forward": 3.0}, step)
    logger.log({"eval/loss": 0.25}, 5)
    assert out.getvalue().splitlines() == [
        "step      2  loss 1.5  reward/mean 0.5",
        "step      4  loss 5.5  reward/mean 0.5",
        "step      5  eval/loss 0.25",
    ]


def test_the_console_goes_to_standard_output(capsys):
    ConsoleLogger(metrics=("grad_norm",)).log({"loss": 1.0, "grad_norm": 2.0}, 7)
    assert capsys.readouterr().out == "step      7  grad_norm 2\n"


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True])
def test_a_wrong_interval(wrong):
    with pytest.raises(ValueError, match="log_interval must be a whole number of at least 1"):
        ConsoleLogger(log_interval=wrong)


def test_jsonl(tmp_path):
    logger = JSONLLogger(tmp_path / "deep" / "metrics.jsonl")
    logger.log({"time": 0.5, "loss": 1.25}, 1)
    lines = (tmp_path / "deep" / "metrics.jsonl").read_text().splitlines()  # at once, not at the end
    assert [json.loads(line) for line in lines] == [{"step": 1, "time": 0.5, "loss": 1.25}]
    logger.close()
    JSONLLogger(tmp_path / "deep" / "metrics.jsonl").log({"loss": 1.0}, 2)  # goes on, does not overwrite
    assert [entry["step"] for entry in read_metrics(tmp_path / "deep" / "metrics.jsonl")] == [1, 2]


def test_drop_after(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    assert drop_after(path, 2) == [{"step": 1}, {"step": 2}]
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert drop_after(tmp_path / "none.jsonl", 2) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard's own imports
def test_tensorboard(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.log({"loss": 1.5, "reward/mean": 0.25}, 3)
    logger.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(3, 1.5)]
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(3, 0.25)]


def test_wandb(monkeypatch):
    calls = []

    class Run:
        def log(self, metrics, step):
            calls.append((metrics, step))

        def finish(self):
            calls.append("finished")

    fake = types.ModuleType("wandb")
    fake.init = lambda **options: calls.append(options) or Run()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    logger = WandbLogger(project="strop")
    logger.log({"loss": 1.0}, 4)
    logger.close()
    assert calls == [{"project": "strop"}, ({"loss": 1.0}, 4), "finished"]


def test_trackio(monkeypatch, capsys):
    calls = []
    fake = types.ModuleType("trackio")
    fake.init = lambda **options: calls.append(options)
    fake.log = lambda metrics, step: calls.append((metrics, step))
    fake.finish = lambda: print("bye") or calls.append("finished")
    monkeypatch.setitem(sys.modules, "trackio", fake)
    logger = TrackioLogger(name="a")
    logger.log({"time": 2.0, "loss": 1.0}, 4)  # trackio renames a column `time` with a warning
    logger.close()
    assert calls == [{"project": "strop", "name": "a"}, ({"seconds": 2.0, "loss": 1.0}, 4), "finished"]
    assert capsys.readouterr() == ("", "bye\n")  # standard output is for the run's folder
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ImportError, match="TrackioLogger needs trackio: pip install trackio"):
        TrackioLogger()


def test_a_package_that_is_there_but_broken_is_told_from_one_that_is_not(monkeypatch, tmp_path):
    (tmp_path / "trackio.py").write_text("import surely_not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(ImportError, match="installed but cannot be imported: No module named 'surely_not_installed'"):
        TrackioLogger()


def test_missing_packages_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="WandbLogger needs wandb: pip install wandb"):
        WandbLogger()


def test_several_at_once_and_as_often_as_the_config_says(tmp_path):
    out = io.StringIO()
    loggers = [ConsoleLogger(file=out), JSONLLogger(tmp_path / "a.jsonl"), JSONLLogger(tmp_path / "b.jsonl")]
    sft = SFT(model=tiny_moe(), logger=loggers, log_every=2, batch_size=2)
    history = sft.train(ROWS, num_steps=5, output_dir=tmp_path / "run")
    a, b, own = (read_metrics(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "run/metrics.jsonl"))
    assert a == b == own
    assert [entry["step"] for entry in a] == [2, 4]
    assert a[0]["loss"] == history.steps[1]["loss"]
    assert len(out.getvalue().splitlines()) == 2
    assert sft.loggers == loggers  # the run's own went with it


def test_a_logger_that_fails_stops_the_run():
    class Broken:
        def log(self, metrics, step):
            raise ConnectionError("the server is gone")

        def close(self):
            pass

    with pytest.raises(ConnectionError, match="the server is gone"):
        SFT(model=tiny_moe(), logger=Broken(), batch_size=2).train(ROWS, num_steps=3)


def test_names_of_metrics_do_not_steer_the_terminal(capsys):
    ConsoleLogger(metrics=("reward/\x1b[2J",)).log({"reward/\x1b[2J": 1.0}, 1)
    ConsoleLogger().log({"eval/\x1b]0;t\x07": 1.0}, 1)
    shown = capsys.readouterr().out
    assert "reward/\\x1b[2J 1" in shown
    assert not set(shown) & {"\x1b", "\x07"}


def test_a_history_is_one_line_and_can_be_drawn(monkeypatch):
    steps = [{"step": i, "time": 1.0, "loss": 1 / i, "grad_norm": 2.0} for i in range(1, 1001)]
    history = History(steps=steps, evaluations=[{"step": 1000, "eval/loss": 0.5}])
    assert repr(history) == "History(1,000 steps, 1 evaluations, loss 0.001, eval/loss 0.5)"
    with monkeypatch.context() as absent:
        absent.setitem(sys.modules, "matplotlib", None)
        absent.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ImportError, match=r"^history.plot\(\) needs matplotlib: pip install matplotlib$"):
            history.plot()
    with pytest.raises(ValueError, match="metrics must be some of loss, grad_norm, eval/loss, found nothing"):
        pytest.importorskip("matplotlib") and history.plot("nothing")
    figure = history.plot()
    drawn = {axis.get_title(): axis.lines[0].get_xydata().tolist() for axis in figure.axes}
    assert list(drawn) == ["loss", "eval/loss"]
    assert drawn["loss"][:2] == [[1, 1.0], [2, 0.5]]
    assert drawn["eval/loss"] == [[1000, 0.5]]


def test_a_trainer_is_one_line():
    trainer = SFT(model=tiny_moe(), batch_size=4)
    assert repr(trainer) == f"SFT({type(trainer.module).__name__}, step 0)"
