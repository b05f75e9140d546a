"""A reward model learns from pairs which order of five digits is the right one, and is then a reward function.

    python examples/reward_model.py

A new Qwen2 of 90,000 weights reads the characters of examples/data/sorting_preferences.jsonl. No
download, 12 s on one CPU core.
"""

import json
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from strop import tasks
from strop.algorithms.reward_model import RewardModel

DATA = Path(__file__).parent / "data" / "sorting_preferences.jsonl"


def make_model(tokenizer):
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32, num_labels=1, **ids,
    )  # fmt: skip
    return Qwen2ForSequenceClassification(config)


def main(seed=0, num_steps=300):
    torch.manual_seed(seed)
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    tokenizer = tasks.load_task("sorting").tokenizer
    reward = RewardModel(
        model=make_model(tokenizer), tokenizer=tokenizer, learning_rate=3e-3, center_coef=0.01, batch_size=32,
        schedule="cosine", seed=seed,
    )  # fmt: skip
    history = reward.train(rows[:448], eval_dataset=rows[448:], num_steps=num_steps, progress=False)
    for evaluation in (history.evaluations[0], history.evaluations[-1]):
        print({name: round(value, 3) for name, value in evaluation.items() if name != "step"})
    reward_fn = reward.reward_fn()
    for completion, value in zip(("02569", "02596"), reward_fn(["95260>"] * 2, ["02569", "02596"]), strict=True):
        print(f"95260>{completion}   reward {value:.2f}")
    return history.evaluations[-1]


if __name__ == "__main__":
    main()
