"""Metrics of several completions per prompt: by hand, in training, and by the command."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from tiny_qwen2 import tiny_qwen2

from strop import GRPO
from strop.sample_metrics import answer_of, majority, pass_at, sample_metrics


def test_pass_at_k_is_the_share_of_all_choices_of_k_that_hold_a_right_one():
    right_PK = np.random.default_rng(0).integers(0, 2, (20, 7)).astype(float)
    for k in range(1, 8):
        wanted = [np.mean([max(chosen) for chosen in combinations(row, k)]) for row in right_PK]
        np.testing.assert_allclose(pass_at(right_PK, k), wanted, atol=1e-12)


def test_majority_by_hand():
    rewards_PK = np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 0.5], [0.0, 0.0, 1.0]])
    answers = ["4", "5", "4", "a", "b", "c", "x", "x", "y"]
    assert majority(rewards_PK, answers).tolist() == [1.0, 0.5, 0.0], "three tied answers count a third each"


def test_names_of_metrics():
    names = list(sample_metrics(np.eye(6), ["a"] * 36))
    assert names == ["mean@6", "maj@6", "pass@1", "pass@2", "pass@4", "pass@6"]
    assert list(sample_metrics(np.full((2, 2), 0.5), ["a"] * 4)) == ["mean@2", "maj@2"], "pass@k is for 0 and 1"


def test_answer_of_a_completion():
    assert answer_of(" 12 ") == "12"
    assert answer_of("so 3, no: #### 12", r"#### (\d+)") == "12"
    assert answer_of("1 or 2", r"\d") == "2"
    assert answer_of("none", r"\d") != answer_of("none", r"\d"), "without an answer there is none to share"


def last_is_odd(completions):
    return [float(ids[-1] % 2) for ids in completions]


def test_an_evaluation_in_training_with_several_samples_and_named_sets():
    trainer = GRPO(
        model=tiny_qwen2(), reward_fn=last_is_odd, group_size=2, max_new_tokens=6, num_eval_samples=4, batch_size=2
    )
    rows = [{"prompt": [5, 6, 7]}, {"prompt": [8, 9]}, {"prompt": [4]}]
    history = trainer.train(rows, eval_dataset={"short": rows[1:], "all": rows}, num_steps=1)
    first, last = history.evaluations[0], history.evaluations[-1]
    assert (first["step"], last["step"]) == (0, 1)
    for name in ("short", "all"):
        assert last[f"eval/{name}/pass@1"] == pytest.approx(last[f"eval/{name}/mean@4"])
        assert last[f"eval/{name}/pass@1"] <= last[f"eval/{name}/pass@2"] <= last[f"eval/{name}/pass@4"]
        assert last[f"eval/{name}/pass@4/low"] <= last[f"eval/{name}/pass@4"] <= last[f"eval/{name}/pass@4/high"]
    assert 0 < last["eval/all/mean@4"] < 1, "sampled, not greedy"
    again = trainer.evaluate(rows)
    assert again["eval/pass@4"] == trainer.evaluate(rows)["eval/pass@4"], "the same draws each time"


@pytest.mark.usefixtures("elsewhere")
def test_eval_with_samples_on_several_sets(strop):
    options = ["--task", "addition", "--set", "task_options.digits=1"]
    code, _, err = strop("train", "sft", "--model", "moe:tiny", *options, "--num-steps", 1, "--num-rows", 64,
                         "--num-eval-rows", 0, "--output", "run")  # fmt: skip
    assert code == 0, err
    code, out, err = strop("eval", "run/final", *options, "--num-rows", 9, "--samples", 4)
    assert code == 0, err
    assert [line.split(":")[0] for line in out.splitlines()] == [
        f"reward/{name}" for name in ("mean@4", "maj@4", "pass@1", "pass@2", "pass@4")
    ]
    for name in "ab":
        Path(f"{name}.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 2)
    code, out, err = strop(
        "eval", "run/final", "--data", "x=a.jsonl", "--data", "y=b.jsonl", *options, "--json", "--samples", 2
    )
    assert code == 0, err
    found = [json.loads(line) for line in out.splitlines()]
    assert [one["set"] for one in found] == ["x", "y"]
    assert found[0]["rewards"] == found[1]["rewards"]
    code, _, err = strop("eval", "run/final", "--data", "x=a.jsonl", "--data", "b.jsonl", *options)
    assert (code, "either all or none of the files must have names" in err) == (1, True)
    code, _, err = strop("eval", "run/final", *options, "--samples", 2, "--temperature", 0)
    assert (code, "temperature must be above 0 with several samples" in err) == (1, True)
    code, _, err = strop("train", "grpo", "--model", "run/final", *options, "--eval-data", "x=a.jsonl", "--eval-data", "y=b.jsonl",
                         "--num-eval-samples", 2, "--num-steps", 1, "--group-size", 2, "--output", "rl")  # fmt: skip
    assert code == 0, err
    last = [json.loads(line) for line in Path("rl/metrics.jsonl").read_text().splitlines()][-1]
    assert {"eval/x/pass@2", "eval/y/maj@2", "eval/x/mean@2/high"} <= last.keys()
