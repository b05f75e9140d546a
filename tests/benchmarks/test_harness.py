"""The harness on work of known length, so that a wrong ratio, order or statistic shows."""

import copy
import json
import time

import numpy as np
import pytest

from benchmarks import harness
from benchmarks.harness import Case, Contender, Method


def test_ratio_of_known_work():
    short = Contender(name="short", function=time.sleep, args=(0.001,))
    long = Contender(name="long", function=time.sleep, args=(0.03,))
    found = harness.measure(
        Case(work="sleep", labels={}, contenders=[short, long]), Method(rounds=5, sample_seconds=1e-3)
    )
    ratio = found["ratios"]["long"]
    assert ratio["low"] <= ratio["value"] <= ratio["high"]
    assert 2 < ratio["value"] < 45  # 30, less what a busy machine adds to both
    assert ratio["verdict"] == "faster"
    backwards = harness.measure(
        Case(work="sleep", labels={}, contenders=[long, short]), Method(rounds=5, sample_seconds=1e-3)
    )
    assert backwards["ratios"]["short"]["verdict"] == "slower"


def test_statistics_by_hand():
    found = harness.statistics([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (found["median_ns"], found["iqr_ns"], found["p95_ns"]) == (3.0, 2.0, 4.8)
    assert found["samples_ns"] == [4.0, 1.0, 2.0, 3.0, 5.0]


def test_equal_contenders_are_called_equal():
    rng = np.random.default_rng(0)
    a, b = rng.normal(100, 10, (2, 31))
    assert harness.ratio(a, b)["verdict"] == "same"
    assert harness.ratio(2 * a, b)["verdict"] == "faster"
    assert harness.ratio([5.0] * 4, [10.0] * 4) == {"value": 0.5, "low": 0.5, "high": 0.5, "verdict": "slower"}


def test_contenders_take_turns():
    order = []
    contenders = [Contender(name=n, function=lambda n=n: (order.append(n), time.sleep(1e-3)), args=()) for n in "abc"]
    harness.measure(Case(work="turns", labels={}, contenders=contenders), Method(rounds=7, sample_seconds=1e-4))
    turns = "".join(order[-42:])
    assert turns[::2] == turns[1::2]  # an untimed and a timed stretch each
    rounds = [turns[start : start + 6 : 2] for start in range(0, 42, 6)]
    assert {"".join(sorted(names)) for names in rounds} == {"abc"}
    assert len(set(rounds)) > 2  # nobody always comes after the same one


def test_samples_are_of_the_bare_call():
    """A call with positional and keyword arguments reaches the function as written."""
    seen = []
    contender = Contender(name="x", function=lambda *a, **k: seen.append((a, k)), args=(1, 2), kwargs={"c": 3})
    contender.timer().timeit(2)
    assert seen == [((1, 2), {"c": 3})] * 2


def test_a_contender_that_does_other_work_stops_the_run():
    wrong = Contender(name="wrong", function=lambda: np.array([1.0, 2.5]), args=(), expected=np.array([1.0, 2.0]))
    with pytest.raises(RuntimeError, match="contender wrong does not do the same work"):
        harness.measure(Case(work="w", labels={}, contenders=[wrong]), Method(rounds=3))
    shape = Contender(name="shape", function=lambda: np.ones((2, 1)), args=(), expected=np.ones(2))
    with pytest.raises(RuntimeError, match="contender shape"):
        shape.check()


def test_lists_are_compared_whole():
    right = Contender(name="right", function=lambda: [[0, 2], [1]], args=(), expected=[[0, 2], [1]])
    right.check()
    with pytest.raises(RuntimeError, match="contender wrong"):
        Contender(name="wrong", function=lambda: [[0], [2, 1]], args=(), expected=[[0, 2], [1]]).check()


def test_method_is_checked():
    with pytest.raises(ValueError, match="rounds must be at least 3 for an interval, found 2"):
        Method(rounds=2)


@pytest.fixture
def found():
    found = harness.header("suite", Method(rounds=3), "strop bench suite")
    contenders = [Contender(name=n, function=int, args=()) for n in "ab"]
    found["cases"] = [harness.measure(Case(work="w", labels={}, contenders=contenders), Method(rounds=3))]
    return found


def test_result_records_what_a_reader_needs(found, tmp_path):
    assert {"commit", "machine", "threads", "versions", "method", "created", "command"} <= found.keys()
    assert found["machine"]["cpu"]
    assert found["threads"]["strop"] >= 1
    assert found["versions"]["numpy"] == np.__version__
    path = tmp_path / "deep" / "result.json"
    harness.save(found, path)
    assert harness.load(path) == json.loads(json.dumps(found))
    samples = [line for line in path.read_text().splitlines() if "samples_ns" in line]
    assert len(samples) == 2
    assert samples[0].count(",") >= 2  # one line holds them all


def test_a_result_must_be_that_of_its_samples(found, tmp_path):
    path = tmp_path / "result.json"

    def refused(change, message):
        changed = copy.deepcopy(found)
        change(changed)
        path.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message) as raised:
            harness.load(path)
        assert str(path) in str(raised.value)

    refused(lambda f: f.update(schema=99), "schema must be 1, found 99")
    refused(
        lambda f: f["cases"][0]["contenders"]["a"].update(median_ns=1.0),
        "the median of a in w is not that of its samples",
    )
    refused(lambda f: f["cases"][0]["ratios"]["b"].update(value=77.0), "the ratio of b in w is not that of its samples")
    refused(lambda f: f.pop("cases"), "KeyError: 'cases'")
    path.write_text("[]")
    with pytest.raises(ValueError, match="is not a result of the harness"):
        harness.load(path)


def test_commit_outside_a_repository(monkeypatch):
    monkeypatch.setattr(harness.shutil, "which", lambda name: None)
    assert harness.commit() == {"id": None, "clean": None}


def test_the_primitives_suite_measures_the_same_work_on_all_sides():
    """Every contender's result is right; the rows are those the documents promise."""
    from benchmarks.suites import primitives

    cases = primitives.cases()
    for case in cases:
        for contender in case.contenders:
            if case.labels["primitive"] != "packing":
                assert contender.expected is not None
                contender.check()
    rows = {(c.labels["primitive"], c.labels["shape"], c.labels["dtype"]) for c in cases}
    for dtype in ("float32", "float64"):
        assert {("advantages", s, dtype) for s in ("16×4", "64×8", "256×16", "1024×32")} <= rows
        kl = ("1×128", "1×512", "1×2048", "1×8192", "32×128", "32×512", "32×2048")
        assert {(k, s, dtype) for k in ("k3 KL", "token KL") for s in kl} <= rows
