"""The programs in examples/ do what they say."""

import importlib.util
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_custom_loop_learns_to_count(capsys):
    rewards = load("custom_loop").train(steps=25)
    assert rewards[0] < 0.15  # a sixteenth by chance
    assert sum(rewards[-3:]) / 3 > 0.8
    assert "step  24   reward 0." in capsys.readouterr().out


def test_custom_loop_rewards_by_hand():
    example = load("custom_loop")
    tokens = torch.tensor([[14, 15, 0, 1, 3], [2, 2, 2, 2, 2]])
    assert example.reward(tokens).tolist() == [0.75, 0.0]


def test_custom_loop_samples_what_it_scores():
    """Token by token with the state kept, or all at once: the same hidden states."""
    example = load("custom_loop")
    torch.manual_seed(0)
    model = example.Model()
    tokens = example.sample(model, torch.tensor([3, 9]))
    assert tokens.shape == (2, 1 + example.T)
    whole, _ = model(tokens)
    state, steps = None, []
    for t in range(tokens.shape[1]):
        hidden, state = model(tokens[:, t : t + 1], state)
        steps.append(hidden)
    torch.testing.assert_close(torch.cat(steps, 1), whole)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.stem)
def test_every_example_is_documented(path):
    pages = [*EXAMPLES.parent.glob("*.md"), *EXAMPLES.parent.glob("docs/**/*.md")]
    assert any(f"examples/{path.name}" in page.read_text(encoding="utf-8") for page in pages)
