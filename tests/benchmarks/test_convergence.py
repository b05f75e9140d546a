"""The convergence suite: the language is what it says, and a few steps of it."""

import dataclasses

import numpy as np
import pytest

from benchmarks.harness import Method
from benchmarks.suites import convergence
from benchmarks.suites.convergence import Language, held_out_loss, largest_difference
from strop.moe import MoEConfig

SMALL = MoEConfig(hidden_dim=16, head_dim=8, num_heads=2, intermediate_dim=16, vocab_size=40, aux_loss_coef=0.0)


def test_the_language_follows_its_rules():
    language = Language(seed=3)
    rows = language.rows(6, 50, seed=0)
    assert rows.shape == (6, 51)
    for row in rows:
        for before, last, following in zip(row, row[1:], row[2:], strict=False):
            assert following in language.successors_SSK[before, last]
    assert np.array_equal(rows, language.rows(6, 50, seed=0))
    assert not np.array_equal(rows, language.rows(6, 50, seed=1))


def test_entropy_rate():
    """Of equal successors it is log K; of any it is the loss of one who knows the language, on many rows."""
    even = Language(seed=0)
    even.probs_SSK[:] = 0.25
    assert even.entropy_rate() == pytest.approx(np.log(4))
    language = Language(seed=0)
    rows = language.rows(400, 200, seed=5)
    before, last, following = rows[:, :-2], rows[:, 1:-1], rows[:, 2:]
    chosen = (language.successors_SSK[before, last] == following[..., None]) * language.probs_SSK[before, last]
    assert -np.log(chosen.sum(-1)).mean() == pytest.approx(language.entropy_rate(), abs=0.01)


def test_held_out_loss_by_hand():
    """The first position, which knows one token only, does not count."""
    logits = np.log(np.array([[[0.9, 0.1], [0.5, 0.5], [0.25, 0.75]]]))
    assert held_out_loss(logits, np.array([[1, 0, 1]])) == pytest.approx(-(np.log(0.5) + np.log(0.75)) / 2)


def test_curves_of_a_few_steps(monkeypatch):
    monkeypatch.setattr(convergence, "TINY", SMALL)
    monkeypatch.setattr(
        convergence, "MEMORISE", dataclasses.replace(convergence.MEMORISE, batch=2, seq_len=8, num_steps=12)
    )
    monkeypatch.setattr(
        convergence, "LANGUAGE", dataclasses.replace(convergence.LANGUAGE, batch=2, seq_len=8, num_steps=20)
    )
    pytest.importorskip("threadpoolctl")
    cases = [c for c in convergence.cases() if "compiled" not in c.work]
    assert {c.labels["task"] for c in cases} == {"memorise", "language"}
    measured = [case.measure(Method()) for case in cases]
    for found in measured:
        assert found["losses"][-1] < found["losses"][0]
        assert len(found["losses"]) == len(found["steps"])
    assert measured[0]["steps"] == list(range(12))
    assert next(m for m in measured if m["labels"]["task"] == "language")["steps"] == [0, 10, 20]
    assert largest_difference(measured, "memorise") < 1e-4
    assert largest_difference(measured, "language") < 1e-3
    header, rows = convergence.summary(measured)
    assert all(len(row) == len(header) for row in rows)


def test_largest_difference_by_hand():
    curves = [{"labels": {"task": "t"}, "losses": losses} for losses in ([3.0, 2.0], [3.5, 2.0], [3.25, 1.0])]
    assert largest_difference(curves, "t") == 1.0
