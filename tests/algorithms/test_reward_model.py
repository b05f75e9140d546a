"""RewardModel: the model's own rewards, by hand, what is saved, as a reward function, bad input."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import Letters, read_padded
from tiny_qwen2 import tiny_qwen2
from trained_models import Bigram, tiny_moe

from strop.algorithms.grpo import GRPO
from strop.algorithms.reward_model import ModelReward, RewardModel, RewardModelConfig, calibration_error


def classifier(**changes):
    return tiny_qwen2("ForSequenceClassification", num_labels=1, **changes)


def random_rows(num_rows, seed=0):
    draw = torch.Generator().manual_seed(seed)

    def ids(low, high):
        length = int(torch.randint(low, high, (1,), generator=draw))
        return torch.randint(2, 32, (length,), generator=draw).tolist()

    return [{"prompt": ids(2, 5), "chosen": ids(1, 6), "rejected": ids(1, 6), "margin": i / 4} for i in range(num_rows)]


def columns(rows):
    return [[row[name] for row in rows] for name in ("prompt", "chosen", "rejected", "margin")]


# ---- values ----


@pytest.mark.parametrize("packs", [True, False])
def test_rewards_are_the_models_own(packs):
    model, reward = classifier(), RewardModel(model=classifier())
    if not packs:
        read_padded(reward.policy)
    assert reward.policy.packs == packs
    prompts, completions = [[5, 6, 7], [8, 9]], [[3, 1], [4, 4, 4, 1]]
    found = reward.reward_fn()([torch.tensor(p) for p in prompts], [torch.tensor(c) for c in completions])
    wanted = [model(torch.tensor([p + c])).logits.item() for p, c in zip(prompts, completions, strict=True)]
    assert found == pytest.approx(wanted, abs=1e-5)


def test_the_loss_by_hand():
    """−log σ(r_c − r_r − margin) + 0.1·(r_c + r_r)²; accuracy and margin of the rewards themselves."""
    rows = random_rows(3)
    reward = RewardModel(model=classifier(), learning_rate=0.0, center_coef=0.1)
    score = reward.reward_fn()
    chosen, rejected = (score([r["prompt"] for r in rows], [r[name] for r in rows]) for name in ("chosen", "rejected"))
    terms = [
        math.log1p(math.exp(-(c - r - row["margin"]))) + 0.1 * (c + r) ** 2
        for c, r, row in zip(chosen, rejected, rows, strict=True)
    ]
    metrics = reward.train_step(*columns(rows))
    assert metrics["loss"] == pytest.approx(sum(terms) / 3, abs=1e-5)
    assert metrics["preference/accuracy"] == sum(c > r for c, r in zip(chosen, rejected, strict=True)) / 3
    assert metrics["preference/margin"] == pytest.approx((sum(chosen) - sum(rejected)) / 3, abs=1e-5)
    assert metrics["reward/mean"] == pytest.approx((sum(chosen) + sum(rejected)) / 6, abs=1e-5)


def test_margins_of_any_kind():
    rows = random_rows(4)
    prompt, chosen, rejected, margin = columns(rows)
    found = set()
    for margins in (margin, np.array(margin), torch.tensor(margin), [None, *margin[1:]]):  # the first is 0
        found.add(RewardModel(model=classifier()).train_step(prompt, chosen, rejected, margins)["loss"])
    assert len(found) == 1


def test_calibration_by_hand():
    """Confidences 0.8 three times, two of them right, and 0.55 once, right: (|2 − 2.4| + |1 − 0.55|) / 4."""
    logit = lambda p: math.log(p / (1 - p))  # noqa: E731
    margins = torch.tensor([logit(0.8), logit(0.8), -logit(0.8), logit(0.55)], dtype=torch.float64)
    assert calibration_error(margins) == pytest.approx((0.4 + 0.45) / 4)


# ---- invariances ----


# ---- runs ----


def test_a_classifier_goes_in_and_out(tmp_path):
    """A causal LM's folder becomes one with a new head, the same each time; what training saves is read by transformers."""
    from transformers import AutoModelForSequenceClassification

    tiny_qwen2().save_pretrained(tmp_path / "causal")
    heads = [RewardModel(model=tmp_path / "causal").module.score.weight.detach().clone() for _ in range(2)]
    assert torch.equal(*heads)
    reward = RewardModel(model=tmp_path / "causal", learning_rate=1e-2, batch_size=4)
    reward.train(random_rows(8), num_steps=2, output_dir=tmp_path / "run")
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "final")
    assert saved.config.num_labels == 1
    prompt, completion = [5, 6], [7, 8, 1]
    wanted = saved(torch.tensor([prompt + completion])).logits.item()
    assert ModelReward(tmp_path / "run" / "final")([prompt], [completion]) == pytest.approx([wanted], abs=1e-5)
    assert reward.reward_fn()([prompt], [completion]) == pytest.approx([wanted], abs=1e-5)


def test_it_is_a_reward_function_for_grpo():
    """The policy's texts are read by the reward model's own tokenizer."""
    reward_fn = ModelReward(classifier(), Letters())
    grpo = GRPO(model=tiny_qwen2(), tokenizer=Letters(), reward_fn=reward_fn, max_new_tokens=4, group_size=2)
    metrics = grpo.train_step(["ab", "cd"])
    shown = [(sample["prompt"], sample["completion"]) for sample in grpo.samples]
    wanted = reward_fn([prompt for prompt, _ in shown], [completion for _, completion in shown])
    assert metrics["reward/reward_model"] == metrics["reward/mean"] == pytest.approx(sum(wanted) / 4, rel=1e-5)
    assert all(param.grad is None for param in reward_fn.policy.model.parameters())


def test_long_texts_are_cut_from_the_left():
    reward_fn = ModelReward(classifier())
    assert reward_fn([[2] * 100], [[3, 4]]) == pytest.approx(reward_fn([[2] * 62], [[3, 4]]), abs=1e-6)


def test_the_example_learns():
    path = Path(__file__).resolve().parents[2] / "examples" / "reward_model.py"
    spec = importlib.util.spec_from_file_location("reward_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    last = module.main(num_steps=160)
    assert last["eval/preference/accuracy"] > 0.8
    assert last["eval/preference/calibration_error"] < 0.2


# ---- bad input ----

FAR = {"prompt": [2], "chosen": [3], "rejected": [4], "margin": "far"}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: RewardModelConfig(center_coef=-1.0), ValueError, "center_coef must be finite and at least 0"),
        (lambda: RewardModelConfig(max_length=1), ValueError, "max_length must be at least 2"),
        (lambda: RewardModel(model=tiny_qwen2()), TypeError, "model must be a ForSequenceClassification of transformers with one label"),
        (lambda: RewardModel(model=tiny_qwen2("ForSequenceClassification", num_labels=3)), TypeError, "ForSequenceClassification with 3 labels"),
        (lambda: RewardModel(model=Bigram()), TypeError, "found a Bigram"),
        (lambda: RewardModel(model=tiny_moe()), TypeError, "found a MoEForCausalLM"),
        (lambda: RewardModel(model="moe:tiny"), ValueError, "model must be one of transformers to score sequences"),
        (lambda: RewardModel(model=classifier(), ref_model=classifier()), ValueError, "RewardModel has no reference"),
        (lambda: RewardModel(model=classifier()).train_step([[2]], [[3]], [[4]], [1.0, 2.0]), ValueError, "margin must have 1 rows"),
        (lambda: RewardModel(model=classifier()).train_step([[2]], [[3]], [[4]], 1.0), ValueError, "margin must have 1 rows as prompt has"),
        (lambda: RewardModel(model=classifier()).train_step([[2]], [[3]], [[4]], ["far"]), TypeError, "pair 0: margin must be a number, found str"),
        (lambda: RewardModel(model=classifier()).prepare([{"prompt": [2]}]), ValueError, "RewardModel needs preference"),
        (lambda: ModelReward(classifier())([[2], [3]], [[4]]), ValueError, "completions must be one for each of the 2 prompts, found 1"),
        (lambda: ModelReward(classifier())([[2], [3]], [[4], [99]]), ValueError, "prompt and completion 1 must hold ids from 0 to 31, found 99"),
        (lambda: RewardModel(model=classifier()).prepare([FAR]), TypeError, "dataset[0]: margin must be a number, found str"),
    ],
)  # fmt: skip
def test_mistakes(make, error, message):
    with pytest.raises(error) as raised:
        make()
    assert message in str(raised.value)
