"""strop eval: a model's rewards with their interval."""

import json
from pathlib import Path

import pytest

from strop.sample_metrics import interval

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_intervals_by_hand():
    """Wilson's interval of 8 in 10: 0.490 to 0.943 (Brown, Cai, DasGupta 2001)."""
    found = interval([1.0] * 8 + [0.0] * 2)
    assert (found["mean"], found["interval"]) == (0.8, "wilson")
    assert (found["low"], found["high"]) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert interval([0.0] * 10)["low"] == pytest.approx(0, abs=1e-12)
    assert interval([0.0] * 10)["high"] == pytest.approx(0.2775, abs=1e-4)
    found = interval([float(i) for i in range(100)])
    assert found["interval"] == "bootstrap"
    half = 1.96 * 28.87 / 10
    assert (found["low"], found["high"]) == pytest.approx((49.5 - half, 49.5 + half), abs=0.5)


def test_a_model_on_a_task_and_on_own_data(strop):
    code, _, err = strop("train", "sft", "--model", "moe:tiny", "--task", "addition", "--num-steps", 1, "--num-rows", 64,
                         "--num-eval-rows", 0, "--output", "run", "--set", "task_options.digits=1")  # fmt: skip
    assert code == 0, err
    code, out, err = strop(
        "eval", "run/final", "--task", "addition", "--set", "task_options.digits=1", "--num-rows", 9, "--batch-size", 4
    )
    assert code == 0, err
    assert out.startswith("reward: ")
    assert "] right, of 9\n" in out
    Path("rows.csv").write_text("question,label\n1+1=,2\n2+2=,4\n3+1=,4\n")
    Path("mine.py").write_text("def one(completions, answer):\n    assert list(answer)[0] in '24'\n    return [0.25] * len(answer)\n"
                               "def half(completions):\n    return [0.5] * len(completions)\n")  # fmt: skip
    code, out, err = strop("eval", "run/final", "--data", "rows.csv", "--map", "prompt=question,answer=label", "--reward", "mine.py:one",
                           "--reward", "mine.py:half", "--json", "--max-new-tokens", 3)  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    assert (found["num_rows"], found["rewards"]["one"]["mean"], found["rewards"]["half"]["mean"]) == (3, 0.25, 0.5)
    code, _, err = strop("eval", "run/final", "--data", "rows.csv", "--map", "prompt=question")
    assert (code, "eval needs a reward" in err) == (1, True)


def test_task_with_few_problems_is_evaluated_on_all_of_them(strop):
    """Addition of one digit holds out 9 problems, sorting of three letters 66; the default is 200."""
    code, _, err = strop("train", "sft", "--model", "moe:tiny", "--task", "addition", "--num-steps", 1, "--num-rows", 64,
                         "--num-eval-rows", 0, "--output", "run", "--set", "task_options.digits=1")  # fmt: skip
    assert code == 0, err
    code, out, err = strop("eval", "run/final", "--task", "addition", "--set", "task_options.digits=1")
    assert code == 0, err
    assert out.endswith("right, of 9\n")
    assert "-0.0%" not in out
    code, _, err = strop("eval", "run/final", "--task", "addition", "--set", "task_options.digits=1", "--num-rows", 10)
    assert (code, "limit must be at most 9" in err) == (1, True), (
        "a number that was asked for is not lowered in silence"
    )
    Path("rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 300)
    code, out, err = strop("eval", "run/final", "--data", "rows.jsonl", "--task", "addition", "--max-new-tokens", 1,
                           "--set", "task_options.digits=1")  # fmt: skip
    assert (code, out.endswith("of 200\n")) == (0, True), err


def test_ends_of_an_interval_are_probabilities():
    """Of 66 wrong ones Wilson's lower end is -7e-18 in floating point, which printed as -0.0%."""
    for n in range(1, 400):
        wrong, right = interval([0.0] * n), interval([1.0] * n)
        assert 0 <= wrong["low"] < 1e-15
        assert 1 - 1e-15 < right["high"] <= 1
        assert f"{wrong['low']:.1%}" == "0.0%"
