"""The suite `algorithms`: every algorithm takes a step in it, and what the pages make of the curves."""

from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from results import result_of

from benchmarks.harness import Method
from benchmarks.pages import algorithms as page
from benchmarks.suites import algorithms


@pytest.fixture
def small(monkeypatch):
    """Few problems, and SFT that stops at once."""
    for name, value in {"NUM_TRAIN": 200, "NUM_CHECKED": 4, "NUM_TEST": 8}.items():
        monkeypatch.setattr(algorithms, name, value)
    monkeypatch.setattr(algorithms.StopWhenSolved, "on_step_end", lambda self, trainer, metrics: trainer.stop("enough"))


@pytest.mark.parametrize("algorithm", algorithms.TRAININGS)
@pytest.mark.usefixtures("small")
def test_a_run_of_each(algorithm):
    found = algorithms.learns(algorithm, seed=1, num_steps=2).measure(Method())
    assert found["steps"] == [0, 1, 2]
    assert len(found["scores"]) == 3
    assert all(0 <= score <= 1 for score in found["scores"])
    assert found["measure"] == ("right of two answers" if algorithm == "RewardModel" else "solved")
    assert algorithms.summary([found])[1][0][0] == f"{algorithm} learns to sort, seed 1"


def test_sft_ends_where_enough_is_solved():
    shares, stopped = iter([0.1, 0.39, 0.4]), []
    trainer = SimpleNamespace(policy=SimpleNamespace(model=None), state=SimpleNamespace(step=0), stop=stopped.append)
    enough = algorithms.StopWhenSolved(SimpleNamespace(solved=lambda model, rows: next(shares), checked_rows=[]), 0.4)
    for step in range(1, 16):
        trainer.state.step = step
        enough.on_step_end(trainer, {})
        assert bool(stopped) == (step == 15)


def case_of(algorithm, seed, scores, measure="solved"):
    return {
        "labels": {"algorithm": algorithm, "seed": seed, "num_steps": 10}, "measure": measure, "steps": [0, 10],
        "scores": scores, "cpu_seconds": 3.0 + seed,
    }  # fmt: skip


def test_the_table():
    result = result_of(
        case_of("SFT", 0, [0.0, 0.9]), case_of("SFT", 1, [0.1, 0.8]), case_of("RewardModel", 0, [0.5, 1.0], "right of two answers")
    )  # fmt: skip
    text = page.algorithms_table(result)
    assert "| SFT | 10 | problems solved | 0%, 10% | 90%, 80% | 4 s |" in text
    assert "| RewardModel | 10 | right answer preferred | 50% | 100% | 3 s |" in text
