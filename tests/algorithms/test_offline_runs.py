"""SFT, DPO, KTO and RewardModel keep the numbers of recorded runs: 3 steps in float64, from texts and conversations.

`python tests/algorithms/test_offline_runs.py` records them anew, which only a deliberate change of the numbers needs.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

RECORDED = Path(__file__).with_suffix(".json")
ALLOWED = {
    "rel": 2e-6,
    "abs": 1e-6,
}  # transformers computes the angles of rotary positions in float32: by the CPU's cosine
WORDS = ["ab", "cab", "dad", "abcd", "2+2=4", "bad cab", "ha", "fed", "cd. ab", "gab!"]


def says(role, text):
    return {"role": role, "content": text}


def conversation(i):
    turns = [says("system", WORDS[i % 3])] if i % 4 == 0 else []
    for k in range(1 + i % 3):
        turns += [says("user", WORDS[(i + k) % 10]), says("assistant", WORDS[(3 * i + 2 * k) % 10])]
    return turns


def sft_rows():
    return [{"messages": conversation(i)} for i in range(14)]


def sft_text_rows():
    return [{"prompt": WORDS[i % 10] + " ", "completion": WORDS[(i * 7 + 1) % 10]} for i in range(14)]


def preference_rows():
    texts = [
        {"prompt": [says("user", WORDS[i % 10])], "chosen": [says("assistant", WORDS[(i + 3) % 10])],
         "rejected": [says("assistant", WORDS[(i + 5) % 10]), says("user", "a"), says("assistant", "b")][: 1 + 2 * (i % 2)]}
        for i in range(14)
    ]  # fmt: skip
    return [row | {"margin": i / 7} for i, row in enumerate(texts)]


def unpaired_rows():
    return [row | {"label": i % 3 != 0} for i, row in enumerate(sft_text_rows())]


def model_of(name):
    from tiny_models import llama
    from tiny_qwen2 import tiny_qwen2

    if name == "reward_model":
        return tiny_qwen2(
            "ForSequenceClassification", num_labels=1, vocab_size=60, max_position_embeddings=256
        ).double()
    return llama(vocab_size=60, max_length=256).double()


def trainers():
    from strop import DPO, KTO, SFT, RewardModel

    options = {"learning_rate": 1e-3, "batch_size": 4, "num_steps": 3, "seed": 5, "micro_batch_tokens": 120}
    return {
        "sft": (SFT, options, sft_rows()),
        "sft_all_tokens": (SFT, {**options, "assistant_only": False, "max_length": 24}, sft_rows()),
        "sft_text": (SFT, options, sft_text_rows()),
        "dpo": (DPO, {**options, "beta": 0.3}, preference_rows()),
        "ipo": (DPO, {**options, "loss_type": "ipo"}, preference_rows()),
        "kto": (KTO, {**options, "beta": 0.3}, unpaired_rows()),
        "bco": (KTO, {**options, "loss_type": "bco"}, unpaired_rows()),
        "reward_model": (RewardModel, {**options, "center_coef": 0.01}, preference_rows()),
    }


def run(name):
    from tiny_tokenizers import hugging_face
    from trained_models import weights_of

    kind, options, rows = trainers()[name]
    trainer = kind(model=model_of(name), tokenizer=hugging_face(bos=True), **options)
    history = trainer.train(rows, eval_dataset=rows[:5], progress=False)
    unlike = ("time/", "tokens_per_second", "time")
    steps = [{key: value for key, value in step.items() if not key.startswith(unlike)} for step in history.steps]
    evals = [
        {key: value for key, value in found.items() if not key.startswith(unlike)} for found in history.evaluations
    ]
    weights = weights_of(trainer)
    cosines = torch.arange(len(weights), dtype=torch.float64).cos()
    return {
        "steps": steps,
        "evals": evals,
        "weights": {
            "norm": weights.norm().item(),
            "with_cosines": (weights * cosines).sum().item(),
            "some": weights[:: len(weights) // 40].tolist(),
        },
    }


@pytest.mark.parametrize("name", trainers())
def test_a_recorded_run_is_repeated(name):
    recorded, found = json.loads(RECORDED.read_text(encoding="utf-8"))[name], run(name)
    assert len(found["steps"]) == 3
    assert len(found["evals"]) >= 2
    for part in ("steps", "evals"):
        for step, wanted in zip(found[part], recorded[part], strict=True):
            assert step.keys() == wanted.keys()
            assert step == pytest.approx(wanted, **ALLOWED)
    for key, wanted in recorded["weights"].items():
        assert found["weights"][key] == pytest.approx(wanted, **ALLOWED)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    RECORDED.write_text(json.dumps({name: run(name) for name in trainers()}, indent=1) + "\n")
