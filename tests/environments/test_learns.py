"""examples/guess.yaml: from nothing to a search."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def guess():
    spec = importlib.util.spec_from_file_location("guess", ROOT / "examples/environments/guess.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_game_by_hand():
    game = guess().GuessANumber()
    assert game.reset({"low": 2, "high": 13, "secret": 11}) == "2D?"
    assert [game.step(digit).messages for digit in "7FA"] == ["+", "-", "+"]
    found = game.step("B")
    assert (found.reward, found.done, found.info) == (1.0, True, {"guesses": 1, "found": 1})
    assert game.step("+").done


def test_the_fewest_guesses_by_hand():
    module = guess()
    assert module.fewest(0, 0) == 1
    assert module.fewest(3, 5) == pytest.approx((1 + 2 + 2) / 3)
    assert module.fewest(0, 6) == pytest.approx((1 + 2 * 2 + 4 * 3) / 7)
    train, test = (module.GuessANumber.rows(split) for split in ("train", "test"))
    assert not [row for row in test if row in train]
    assert len(test) > 40


@pytest.mark.learning
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_guessing_is_learned_from_nothing(seed, tmp_path):
    """Of held-out ranges and secrets nearly all are found, in little more than the fewest guesses."""
    from strop.cli.job import load_data, load_eval_data, load_model_and_tokenizer, load_named
    from strop.cli.train import algorithm_class, gather

    grpo = algorithm_class("grpo")
    job, config = gather(grpo.Config, ROOT / "examples/guess.yaml", [f"seed={seed}", f"model_options.seed={seed}"])
    job = job.changed({"environment": str(ROOT / job.environment)})
    environment = load_named(job, "environment")
    model, tokenizer = load_model_and_tokenizer(job, environment)
    trainer = grpo(model=model, tokenizer=tokenizer, environment=environment, config=config)
    test = load_eval_data(job, environment)
    fewest = sum(guess().fewest(row["low"], row["high"]) for row in test) / len(test)
    before = trainer.evaluate(test)
    assert before["eval/environment/found"] < 0.3
    trainer.train(load_data(job, environment), progress=False)
    after = trainer.evaluate(test)
    assert after["eval/environment/found"] > 0.95
    assert after["eval/environment/guesses"] < fewest + 1


# ---- examples/calculator.yaml ----


def calculator():
    spec = importlib.util.spec_from_file_location("calculator", ROOT / "examples/environments/calculator.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_calculator_by_hand():
    from chat_templates import tokenizer

    from strop.environments.tools import ToolBox

    module = calculator()
    (row,) = module.Calculator.rows("test", 1)
    a, b = map(int, row["prompt"][-1]["content"].removeprefix("What is ").removesuffix("?").split(" * "))
    assert row["answer"] == str(a * b)
    box = ToolBox(module.Calculator, tokenizer("smollm2"))
    assert [tool["function"]["name"] for tool in box.tools] == ["multiply"]
    tools = box()
    assert tools.reset(row)[-1] == row["prompt"][-1]
    call = f'<tool_call>\n{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'
    assert tools.step(call).messages[0]["content"] == row["answer"]
    assert module.right([f"It is {a * b:,}.", "12"], [row["answer"]] * 2) == [1.0, 0.0]
    tool = {"role": "tool", "content": row["answer"]}
    assert module.called([[tool], [{"role": "tool", "content": "error: no"}], []]) == [1.0, 0.3, 0.0]


def test_the_calculators_options_are_known():
    from strop.algorithms.grpo import GRPOConfig
    from strop.cli.train import gather

    job, config = gather(GRPOConfig, ROOT / "examples/calculator.yaml")
    assert (config.turns.max_turns, config.reward_weights) == (3, (1.0, 0.2))
    assert all((ROOT / name.partition(":")[0]).is_file() for name in (job.environment, *job.reward))
