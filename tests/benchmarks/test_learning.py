"""The suite `learning`: what it keeps of a run, and what the pages make of it."""

import json

import pytest

torch = pytest.importorskip("torch")

from results import result_of  # noqa: E402 (after the skip)

from benchmarks import ROOT, training  # noqa: E402 (after the skip)
from benchmarks.harness import Method  # noqa: E402
from benchmarks.pages import learning as page  # noqa: E402
from benchmarks.suites import learning  # noqa: E402
from strop.algorithms.grpo import GRPO  # noqa: E402
from strop.cli.train import gather  # noqa: E402

ACCURACY = "eval/reward/right_number"
TINY = {
    "model": "moe:tiny", "model_options": {"hidden_dim": 16, "num_layers": 1, "max_seq_len": 16}, "task": "addition",
    "task_options": {"digits": 1}, "reward": f"{ROOT}/examples/rewards/arithmetic.py:right_number", "num_rows": 20,
    "num_eval_rows": 5, "group_size": 2, "kl_coef": 0.1, "max_new_tokens": 3,
    "run": {"batch_size": 4, "num_steps": 4, "eval_every": 2},
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    (tmp_path / "tiny.yaml").write_text(json.dumps(TINY))
    return tmp_path / "tiny.yaml"


def test_every_metric_of_every_step_is_kept(config, capfd):
    found = learning.grpo(config, ACCURACY, settings=("num_steps=3", "samples_every=1")).measure(Method())
    assert found["training"]["steps"] == [1, 2, 3]
    assert found["evaluations"]["steps"] == [0, 2, 3]
    assert len(found["evaluations"][ACCURACY]) == 3
    assert {len(column) for column in found["training"].values()} == {3}
    assert {"reward/mean", "kl", "entropy_estimate", "completion/length", "time/step", "time/generate"} <= found[
        "training"
    ].keys()
    assert found["labels"]["num_eval_rows"] == 5
    assert found["config"]["run"]["num_steps"] == 3
    assert found["config"]["task_options"] == {"digits": 1}
    assert "gguf_file" not in found["config"]  # nothing was said of it
    assert "step      2  eval/reward/mean" in capfd.readouterr().err
    assert [sample["step"] for sample in found["samples"]] == [1, 1, 3, 3]
    assert found["samples"][0]["reward"] <= found["samples"][1]["reward"]
    assert found["samples"][0]["prompt"].endswith("=")
    header, rows = learning.summary([found])
    accuracies = found["evaluations"][ACCURACY]
    assert header[1:3] == ["held-out problems solved, first", "last"]
    assert [row[:3] for row in rows] == [[f"GRPO as {config}", f"{accuracies[0]:.1%}", f"{accuracies[-1]:.1%}"]]


def test_an_environment_is_the_task(tmp_path):
    game = f"{ROOT}/examples/environments/guess.py:GuessANumber"
    options = {name: TINY[name] for name in ("model", "num_rows", "num_eval_rows", "group_size", "run")}
    options |= {"model_options": {"hidden_dim": 16, "num_layers": 1, "max_seq_len": 64}, "environment": game,
                "turns": {"max_turns": 2}, "max_new_tokens": 1}  # fmt: skip
    (tmp_path / "game.yaml").write_text(json.dumps(options))
    case = learning.grpo(tmp_path / "game.yaml", "eval/reward/environment", settings=("num_steps=2",))
    found = case.measure(Method())
    assert found["labels"]["task"] == game
    assert len(found["evaluations"]["eval/reward/environment"]) == 2
    assert {sample["step"] for sample in found["samples"]} == {1, 2}  # of the first step and the last


def test_without_held_out_rows_there_is_nothing_to_show(config):
    with pytest.raises(ValueError, match="must have held-out rows: num_eval_rows above 0"):
        learning.grpo(config, ACCURACY, settings=("num_eval_rows=0",)).measure(Method())


@pytest.mark.parametrize(
    ("path", "accuracy"), learning.ACCURACIES.items(), ids=lambda value: getattr(value, "stem", "")
)
def test_the_examples_are_what_is_measured(path, accuracy):
    """Their options exist, and so do those that differ without a GPU; the accuracy is a reward of theirs."""
    job, options = gather(GRPO.Config, ROOT / path, learning.ON_A_CPU)
    assert job.model == "smollm2"
    assert (options.run.batch_size, options.run.autocast) == (2, None)
    assert gather(GRPO.Config, ROOT / path)[1].run.num_steps >= 40
    rewards = [job.reward] if isinstance(job.reward, str) else job.reward
    assert accuracy.removeprefix("eval/reward/") in [name.partition(":")[2] for name in rewards]


def test_columns_have_a_place_for_what_a_step_does_not_tell():
    found = training.columns([{"step": 1, "kl": 0.12345678}, {"step": 2, "loss": 1.0}])
    assert found == {"steps": [1, 2], "kl": [0.123457, None], "loss": [None, 1.0]}


@pytest.fixture
def result():
    training = {
        "steps": [1, 2, 3, 4], "reward/mean": [0.1, 0.3, 0.5, 0.7], "reward/right_number": [0.1, 0.3, 0.5, 0.7],
        "kl": [0.0, None, 0.01, 0.02], "time/step": [30.0] * 4, "time/generate": [15.0] * 4, "memory": [2e9, 3e9, 3e9, 3e9],
    }  # fmt: skip
    held_out = {"steps": [0, 2, 4], ACCURACY: [0.2, 0.4, 0.75], "eval/completion/length": [4.5, 4.0, 4.25]}
    case = {
        "work": "GRPO", "labels": {"num_eval_rows": 100, "accuracy": ACCURACY}, "training": training, "evaluations": held_out,
        "config": {"run": {"batch_size": 32}, "group_size": 16, "optim": {"learning_rate": 1e-5}},
    }  # fmt: skip
    return result_of(case, versions={"torch": "2.11.0"}, gpu={"name": "A GPU"})


def test_the_table(result, monkeypatch):
    monkeypatch.setattr(page, "FIRST_AND_LAST", 2)
    text = page.learning_table(result)
    assert "| held-out problems solved, greedy | 20.0% [13%, 29%] | 75.0% [66%, 82%] |" in text
    assert "| length of those answers, tokens | 4.5 | 4.2 |" in text
    assert "| reward of sampled answers | 0.200 | 0.600 |" in text
    assert "| KL to the model before training, a token | 0.0000 | 0.0150 |" in text  # of what the steps told
    assert "groups" not in text  # no step told of them
    assert (
        "32 prompts × 16 answers a step, learning rate 1e-05, 2.0 min of training (generate 50%), peak memory 3 GB."
        in text
    )
    assert "A GPU, driver unknown; A CPU" in text
    assert "commit 012345678;" in text


def test_the_table_of_conversations(result):
    case = result["cases"][0]
    case["evaluations"] |= {
        "eval/environment/tool_calls": [0.1, 0.5, 1.0],
        "eval/environment/failed_calls": [0.1, 0.2, 0.0],
    }
    case["training"] |= {"environment/tool_calls": [0.0, 1.0, 1.0, 1.5]}
    ask, answer = {"role": "user", "content": "2 * 3?"}, {"role": "assistant", "content": "six\n  it is"}
    sample = {
        "step": 1,
        "prompt": [{"role": "system", "content": "hidden"}, ask],
        "completion": [answer],
        "reward": 0.5,
    }
    case["samples"] = [sample, sample | {"reward": 1.0}, sample | {"step": 4}, sample | {"step": 4}]
    text = page.calculator_table(result)
    assert "| calls for one of those answers | 0.10 | 1.00 |" in text
    assert "| calls for a sampled answer | 0.88 | 0.88 |" in text
    assert text.endswith(
        "The worst sample of step 4, rewarded with 0.5:\n\n```\nuser: 2 * 3?\nassistant: six it is\n```\n"
    )
    assert text.count("The worst sample") == 2
    assert "hidden" not in text


def test_the_sentence(result):
    text = page.learning_summary(result)
    assert (
        "100 held-out problems are right in 20.0% [13%, 29%] before and in 75.0% [66%, 82%] after 4 steps, 2.0 min"
        in text
    )
    assert "on one A GPU." in text


@pytest.mark.parametrize(
    ("share", "count", "low", "high"), [(0.5, 100, 0.4038, 0.5962), (0.0, 10, 0.0, 0.2775), (1.0, 10, 0.7225, 1.0)]
)
def test_intervals_are_wilsons(share, count, low, high):
    """Values of statsmodels' proportion_confint(method="wilson")."""
    assert page._interval(share, count) == pytest.approx((low, high), abs=1e-4)
