"""Callbacks: the events in their order, for train() and train_step() and for every algorithm, and each callback's deed."""

import contextlib
import io
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from trained_models import tiny_moe, weights_of

from strop.algorithms.dpo import DPO
from strop.algorithms.grpo import GRPO
from strop.algorithms.sft import SFT
from strop.callbacks import (
    BestCheckpoint,
    Callback,
    CheckpointCallback,
    EarlyStopping,
    EvaluationCallback,
    ProgressBar,
    SampleTable,
)
from strop.logging import ConsoleLogger
from strop.training.callbacks import doing

ROWS = [{"prompt": [2 + i], "completion": [3 + i, 1]} for i in range(4)]
PAIRS = [{"prompt": [2 + i], "chosen": [3 + i, 1], "rejected": [9, 1]} for i in range(4)]


class Events(Callback):
    """Writes every event down."""

    def __init__(self):
        self.seen = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda trainer, *rest: self.seen.append((name.removeprefix("on_"), trainer.state.step))
        return super().__getattribute__(name)


@pytest.mark.parametrize(("algorithm", "rows"), [(SFT, ROWS), (DPO, PAIRS)])
def test_the_events_of_train(algorithm, rows, tmp_path):
    events = Events()
    trainer = algorithm(model=tiny_moe(), callbacks=[events], batch_size=4, eval_every=2, save_every=2)
    trainer.train(rows, eval_dataset=rows, num_steps=3, output_dir=tmp_path)
    assert events.seen == [
        ("train_begin", 0), ("evaluate", 0),
        ("step_begin", 0), ("step_end", 1),
        ("step_begin", 1), ("step_end", 2), ("evaluate", 2), ("save", 2),
        ("step_begin", 2), ("step_end", 3), ("evaluate", 3),
        ("train_end", 3), ("save", 3),
    ]  # fmt: skip


def test_the_events_of_train_step():
    events = Events()
    SFT(model=tiny_moe(), callbacks=[events]).train_step([[2, 3]], [[4, 1]])
    assert events.seen == [("step_begin", 0), ("step_end", 1)]


@pytest.mark.parametrize("algorithm", [SFT, DPO])
def test_checkpoint_and_evaluation_act_in_train_step_too(algorithm, tmp_path):
    rows = ROWS if algorithm is SFT else PAIRS
    evaluation = EvaluationCallback(rows, every=2)
    trainer = algorithm(model=tiny_moe(), callbacks=[evaluation, CheckpointCallback(tmp_path, every=2, keep=1)])
    batch = [[row[name] for row in rows] for name in rows[0]]
    for _ in range(5):
        trainer.train_step(*batch)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004.safetensors"]
    assert [entry["step"] for entry in trainer.history.evaluations] == [2, 4]
    again = algorithm.from_checkpoint(tmp_path / "step-00000004.safetensors")
    again.train_step(*batch)
    assert torch.equal(weights_of(again), weights_of(trainer))


@pytest.mark.parametrize(
    ("metric", "values", "stops_at"),
    [("loss", [3, 2, 2.5, 2.1, 1], 4), ("reward/mean", [1, 2, 1.5, 1.9, 9], 4), ("loss", [5, 4, 3, 2, 1], 5)],
)
def test_early_stopping(metric, values, stops_at):
    """Two looks in a row without a better value; a loss should fall, a reward rise."""

    class Scripted(SFT):
        def step_on(self, rows):
            return {metric: float(values[self.state.step])}

    trainer = Scripted(model=tiny_moe(), callbacks=[EarlyStopping(metric, patience=2)], batch_size=4)
    history = trainer.train(ROWS, num_steps=5)
    assert trainer.state.step == stops_at
    assert (history.stop_reason is not None) == (stops_at < 5)
    assert not history.interrupted


def test_early_stopping_on_an_evaluation_and_on_a_metric_that_is_not_there():
    stopping = EarlyStopping("eval/loss", patience=1, min_delta=100.0)
    trainer = SFT(model=tiny_moe(), callbacks=[stopping], batch_size=4, eval_every=1)
    history = trainer.train(ROWS, eval_dataset=ROWS, num_steps=5)
    assert trainer.state.step == 1
    assert "eval/loss has not improved on" in history.stop_reason
    wrong = SFT(model=tiny_moe(), callbacks=[EarlyStopping("los")], batch_size=4)
    with pytest.raises(ValueError, match=r"metric must be one that SFT gives, found 'los'; known are .*loss"):
        wrong.train(ROWS, num_steps=1)


def test_the_remaining_time_of_steps_longer_than_half_a_minute(monkeypatch):
    """From the first step on, counted down within a step, evaluations before the first step left out."""
    clock = [1000.0]
    monkeypatch.setattr("strop.training.callbacks.time", SimpleNamespace(monotonic=lambda: clock[0]), raising=False)
    shown = []

    class Slow(SFT):
        def step_on(self, rows):
            if self.state.step == 1:
                clock[0] += 10
                shown.append(left())
            clock[0] += 590 if self.state.step == 1 else 600
            return {"loss": 1.0}

    class Looks(Callback):
        def on_train_begin(self, trainer):
            clock[0] += 77

        def on_step_end(self, trainer, metrics):
            shown.append(left())

    def left():
        return next(cells for cells in rows_of(bar) if cells[0].startswith("Slow"))[3]

    def rows_of(bar):
        table = bar._progress.make_tasks_table(bar._progress.tasks)
        return [[str(cell) for cell in row] for row in zip(*(column.cells for column in table.columns), strict=True)]

    bar = ProgressBar(show=True)
    trainer = Slow(model=tiny_moe(), callbacks=[bar, Looks()], batch_size=4)
    trainer.train(ROWS, num_steps=4, progress=False)
    assert shown == ["0:30:00", "0:29:50", "0:20:00", "0:10:00", "0:00:00"]


def test_the_sample_table(tmp_path, capsys):
    table = SampleTable(every=2, num_rows=1, path=tmp_path / "samples.jsonl", show=True)
    trainer = SFT(model=tiny_moe(), callbacks=[table], batch_size=4)
    trainer.samples = [{"prompt": "1+1=", "completion": "[red]2", "reward": 1.0}, {"prompt": "x", "completion": "y"}]
    trainer.train(ROWS, num_steps=3)
    text = (tmp_path / "samples.jsonl").read_text()
    sample = '"prompt": "1+1=", "completion": "[red]2", "reward": 1.0}\n'
    assert text == "".join(f'{{"step": {step}, {sample}' for step in (1, 2, 3))  # the first and the last step always
    shown = capsys.readouterr()
    assert shown.out == ""  # which is for what a program gives, not for what it tells on the way
    assert "step 2" in shown.err
    assert "[red]2" in shown.err  # a completion is text, never markup
    quiet = SFT(model=tiny_moe(), callbacks=[SampleTable(every=1)], batch_size=4)
    quiet.samples = [{"prompt": "p", "completion": "c"}]
    quiet.train(ROWS, num_steps=1, progress=False)
    assert capsys.readouterr().err == ""


def test_nothing_in_a_sample_table_steers_the_terminal(capsys):
    """Texts, names of columns and calls of tools: escapes are shown by their numbers, and markup is text."""
    call = [{"type": "function", "function": {"name": "search", "arguments": {"query": "\x1b[2J"}}}]
    turns = [{"role": "assistant", "content": None, "tool_calls": call}, {"role": "tool", "content": "3\x1b]0;t\x07"}]
    trainer = SFT(model=tiny_moe(), callbacks=[SampleTable(every=1, show=True)], batch_size=4)
    trainer.samples = [{"prompt": "q\u202e", "completion": turns, "reward/[red]\x1b[31m": 1.0}]
    trainer.train(ROWS, num_steps=1, progress=False)
    shown = capsys.readouterr().err
    assert not set(shown) & {"\x1b", "\x07", "\u202e"}
    flat = "".join(shown.split())
    assert "search" in flat
    assert "None" not in flat
    assert "[red]" in flat


def test_samples_are_of_several_prompts(tmp_path):
    """Those of a prompt are neighbours: the first eight would all be of one."""
    table = SampleTable(every=1, num_rows=3, path=tmp_path / "samples.jsonl", show=False)
    trainer = SFT(model=tiny_moe(), callbacks=[table], batch_size=4)
    trainer.samples = [{"prompt": prompt, "completion": i} for prompt in "abc" for i in range(4)]
    trainer.train(ROWS, num_steps=1)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["completion"]) for row in rows] == [("a", 0), ("b", 0), ("c", 0)]


def test_train_shows_samples_on_a_terminal_and_nowhere_else(tmp_path, monkeypatch):
    """With the bar, with a run folder and without one; progress=False is quiet on a terminal too."""

    class Sampling(SFT):
        def step_on(self, rows):
            said = "\x1b[2J" + 900 * "y"
            self.samples = [{"prompt": [{"role": "user", "content": f"x{i}"}], "completion": said} for i in range(9)]
            return super().step_on(rows)

    for progress, is_terminal, expected in [(None, True, True), (None, False, False), (False, True, False)]:
        for folder in (None, tmp_path / f"{progress}{is_terminal}"):
            err = io.StringIO()
            err.isatty = lambda is_terminal=is_terminal: is_terminal
            monkeypatch.setattr(sys, "stderr", err)
            trainer = Sampling(model=tiny_moe(), batch_size=4, samples_every=3)
            trainer.train(ROWS, num_steps=4, output_dir=folder, progress=progress)
            for step, is_due in ((1, True), (2, False), (3, True), (4, True)):  # the first and the last step always
                assert (f"step {step}" in err.getvalue()) == (expected and is_due)
            if expected:
                assert "x3" in err.getvalue()
                assert "x4" not in err.getvalue()  # four of them are enough to look at
                assert "\x1b[2J" not in err.getvalue()  # what a model says does not wipe the screen
                assert "characters)" in err.getvalue()
            if folder is not None:
                samples = (folder / "samples.jsonl").read_text().splitlines()
                assert len(samples) == 24  # eight of each of the three steps
                assert 900 * "y" in samples[0]


def test_the_progress_bar(monkeypatch):
    shown = {}
    for show in (True, None):
        err = io.StringIO()
        monkeypatch.setattr(sys, "stderr", err)
        SFT(model=tiny_moe(), callbacks=[ProgressBar(show=show)], batch_size=4).train(ROWS, num_steps=3, progress=False)
        shown[show] = err.getvalue()
    assert "3/3" in shown[True]
    assert "loss" in shown[True]
    assert (
        shown[None].splitlines()[0].startswith("SFT 1/3  0:00:0")
    )  # not a terminal: lines, the first and the last step's
    assert [line.split()[1] for line in shown[None].splitlines()] == ["1/3", "3/3"]


def test_lines_in_a_file_are_left_to_a_logger(monkeypatch):
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    SFT(model=tiny_moe(), logger=ConsoleLogger(file=io.StringIO()), batch_size=4).train(ROWS, num_steps=3)
    assert err.getvalue() == ""


def test_the_checkpoint_of_the_best_evaluation_is_kept(tmp_path):
    values = iter([3.0, 1.0, 2.0, 1.0])

    class Scripted(SFT):
        def evaluate_on(self, rows):
            return {"loss": next(values)}

    best = BestCheckpoint(tmp_path, "eval/loss")
    sft = Scripted(model=tiny_moe(), callbacks=[best], batch_size=4, eval_every=1)
    sft.train(ROWS, eval_dataset=ROWS, num_steps=3)
    assert best.best == 1.0
    kept = Scripted.from_checkpoint(tmp_path / "best.safetensors", callbacks=[again := BestCheckpoint(tmp_path)])
    assert (kept.state.step, again.best) == (1, 1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["best.safetensors"]
    assert BestCheckpoint(tmp_path, "eval/reward/mean").higher_is_better
    with pytest.raises(ValueError, match="metric must be one of an evaluation, eval/…, found 'loss'"):
        BestCheckpoint(tmp_path, "loss")
    with pytest.raises(ValueError, match="metric must be one that SFT gives, found 'eval/zebra'; known are eval/loss"):
        SFT(model=tiny_moe(), callbacks=[BestCheckpoint(tmp_path, "eval/zebra")], batch_size=4).train(
            ROWS, eval_dataset=ROWS, num_steps=1
        )


def test_the_bar_says_what_is_being_done(tmp_path):
    seen = []

    class Looks(GRPO):
        @contextlib.contextmanager
        def phase(self, name):
            with super().phase(name):
                seen.append(doing(self))
                yield

        def evaluate_on(self, rows):
            seen.append(doing(self))
            return {"loss": 0.0}

        def extra_state(self):
            seen.append("before saving" if self.doing == "saving" else "elsewhere")
            return super().extra_state()

    rows = [{"prompt": [2, 3]}] * 4
    grpo = Looks(
        model=tiny_moe(), reward_fn=lambda completions: [0.0] * len(completions), batch_size=2, max_new_tokens=2
    )
    assert doing(grpo) == ""
    grpo.train(rows, eval_dataset=rows, num_steps=1, output_dir=tmp_path)
    assert {"sampling", "rewarding", "learning", "evaluating", "before saving"} <= set(seen)
    assert doing(grpo) == ""


class Notebook:
    """In place of IPython.display: its outputs, and how often one was changed."""

    def __init__(self):
        self.outputs, self.num_updates = [], 0

    def display(self, data, raw, display_id):
        self.outputs.append(data)
        return self

    def update(self, data, raw):
        self.outputs[-1] = data
        self.num_updates += 1


def test_a_notebook_gets_one_line_that_changes(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ipykernel", object())
    monkeypatch.setattr(ProgressBar, "NOTEBOOK_SECONDS", -1.0)
    shown = Notebook()
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    SFT(model=tiny_moe(), batch_size=4).train(ROWS, num_steps=3)
    [output] = shown.outputs
    assert shown.num_updates == 2
    assert output["text/plain"].startswith("SFT 3/3  0:00:00  loss ")
    monkeypatch.setattr(ProgressBar, "NOTEBOOK_SECONDS", 60.0)
    SFT(model=tiny_moe(), batch_size=4).train(ROWS, num_steps=3)
    assert len(shown.outputs) == 2
    assert shown.num_updates == 3  # the last step is always told
    SFT(model=tiny_moe(), batch_size=4).train(ROWS, num_steps=2, progress=False)
    assert len(shown.outputs) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("every", [0, -1, 1.5])
def test_wrong_arguments(every, tmp_path):
    for make in (
        lambda: CheckpointCallback(tmp_path, every),
        lambda: EvaluationCallback(ROWS, every),
        lambda: SampleTable(every),
    ):
        with pytest.raises(ValueError, match="every must be a whole number of at least 1"):
            make()
    with pytest.raises(ValueError, match="patience must be at least 1"):
        EarlyStopping(patience=0)
