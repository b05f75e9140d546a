"""The suite `demo`: what it keeps of a demo, and what the pages make of it."""

import pytest

pytest.importorskip("torch")

from results import result_of

from benchmarks.harness import Method
from benchmarks.pages import demo as page
from benchmarks.suites import demo


@pytest.fixture(scope="module")
def measured():
    return demo.demo(3, "--steps=2", "--sft-steps=2").measure(Method())


def test_scores_curves_and_seconds_are_kept(measured):
    assert measured["work"] == "strop demo --seed 3"
    assert measured["training"]["steps"] == [1, 2]
    assert measured["evaluations"]["steps"] == [0, 2]
    assert measured["evaluations"]["eval/accuracy"][0] == pytest.approx(measured["before"]["greedy"])
    assert measured["evaluations"]["eval/accuracy"][-1] == pytest.approx(measured["after"]["greedy"])
    assert set(measured["seconds"]) == {"Data", "Supervised", "GRPO", "Comparison"}
    assert demo.summary([measured])[1][0][0] == "strop demo --seed 3"


def test_the_pages():
    case = {
        "labels": {"seed": 0, "num_held_out": 500, "best_of": 8},
        "before": {"greedy": 0.4, "sampled": 0.1, "best_of": 0.5},
        "after": {"greedy": 0.98, "sampled": 0.97, "best_of": 1.0},
        "seconds": {"SFT": 10.0, "GRPO": 31.4},
    }
    other = case | {"before": case["before"] | {"greedy": 0.46}, "after": case["after"] | {"greedy": 0.994}}
    text = page.demo_summary(result_of(case, other))
    assert "On 2 seeds the model solves 40 to 46 % of 500 held-out problems" in text
    assert "98 to 99 % after GRPO, in at most 41 seconds on 2 CPU cores" in text
    table = page.demo_table(result_of(case))
    assert "| 0 | greedy | 40.0% | 98.0% | 41 s |" in table
    assert "| 0 | best of 8 | 50.0% | 100.0% |  |" in table
