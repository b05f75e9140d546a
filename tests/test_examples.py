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


def test_grpo_loop_learns(capsys, monkeypatch):
    """A few small steps: the reward rises already."""
    example = load("grpo_loop")
    monkeypatch.setattr(example, "PROMPTS", 32)
    before, after = example.main(seed=0, sft_steps=90, grpo_steps=26)
    assert 0.4 < before < 0.9
    assert after > 0.5
    lines = capsys.readouterr().out.splitlines()
    rewards = [float(line.split("reward ")[1].split()[0]) for line in lines if line.startswith("step")]
    assert len(rewards) == 2  # of the first and the last step
    assert rewards[1] > rewards[0] + 0.1


def test_grpo_loop_scores_what_was_sampled():
    """The ratio of its update is 1: the log-probs of the rollout are those of the training forward."""
    example = load("grpo_loop")
    task = example.tasks.get("sorting", length=3)
    config = example.MoEConfig(vocab_size=len(task.tokenizer), max_seq_len=16, eos_token_id=task.tokenizer.eos_token_id)
    model = example.MoEForCausalLM(example.MoETransformer(config))
    prompts = [task.tokenizer.encode(text) for text in ("312>", "55>")]
    rollout = model.moe.generate(prompts, num_samples=3, max_new_tokens=4, seed=1)
    ids_BT, mask_BT = example.right_padded([p for p in prompts for _ in range(3)], rollout.completions)
    assert mask_BT.sum(1).tolist() == rollout.lengths_B.tolist()
    logps_BT = example.score(model, ids_BT, mask_BT)
    assert (logps_BT != 0).equal(mask_BT)
    for row, (start, length) in enumerate(zip([4] * 3 + [3] * 3, rollout.lengths_B.tolist(), strict=True)):
        scored = logps_BT[row, start : start + length]
        torch.testing.assert_close(scored, torch.from_numpy(rollout.logps_BT[row, :length]).float())


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.stem)
def test_every_example_is_documented(path):
    pages = [*EXAMPLES.parent.glob("*.md"), *EXAMPLES.parent.glob("docs/**/*.md")]
    assert any(f"examples/{path.name}" in page.read_text(encoding="utf-8") for page in pages)
