"""Record what TRL's DPOTrainer, KTOTrainer and RewardTrainer do in four steps: the batches they took and the loss of each,
in trl_dpo_trajectory.json, trl_kto_trajectory.json and trl_reward_trajectory.json.

    PYTHONPATH=tests python tests/algorithms/make_trl_trajectory.py          # with trl==1.16 and its requirements installed

The weights come from a formula (tiny_qwen2.py) and the tokens are in the file: the test needs neither TRL nor a seed.
"""

import json
import random
import tempfile
from pathlib import Path

import datasets
import tokenizers
import torch
import transformers
import trl
from tiny_qwen2 import CONFIG, tiny_qwen2

NUM_STEPS, BATCH_SIZE, LEARNING_RATE, BETA = 4, 4, 1e-2, 0.1
RUNS = {"sigmoid": {}, "robust": {"label_smoothing": 0.1}, "ipo": {}}
KTO_RUNS = {"kto": {"desirable_weight": 1.5, "undesirable_weight": 0.7}, "apo_zero_unpaired": {}}


def make_tokenizer():
    """A word of t2 … t31 is a token; padding and end are 0 and 1."""
    words = {"<pad>": 0, "</s>": 1} | {f"t{i}": i for i in range(2, CONFIG["vocab_size"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def make_rows():
    draw = random.Random(0)

    def words(low, high):
        return " ".join(f"t{draw.randrange(2, CONFIG['vocab_size'])}" for _ in range(draw.randrange(low, high)))

    return [
        {"prompt": words(2, 6), "chosen": " " + words(2, 8), "rejected": " " + words(2, 8)}
        for _ in range(NUM_STEPS * BATCH_SIZE)
    ]


def labelled_rows():
    return [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": i % 3 != 0} for i, row in enumerate(make_rows())
    ]


class RecordingKTO(trl.KTOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        columns = (
            inputs["input_ids"],
            inputs["attention_mask"].bool(),
            inputs["completion_mask"].bool(),
            inputs["label"],
        )
        batch = [
            {"prompt": row[keep & ~count].tolist(), "completion": row[keep & count].tolist(), "label": bool(label)}
            for row, keep, count, label in zip(*columns, strict=True)
        ]
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self.recorded.append({"batch": batch, "loss": loss.item(), "kl": self._metrics["train"]["kl"][-1]})
        return loss


def compared_rows():
    """Whole texts; pairs of one prompt begin alike. Their first two tokens are what the test takes for the prompt."""
    rows = [{name: f"t2 t3 {row[name]}" for name in ("chosen", "rejected")} for row in make_rows()]
    return [{**row, "margin": 0.25 * (i % 4)} for i, row in enumerate(rows)]


class RecordingReward(trl.RewardTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        rows = [
            row[keep.bool()].tolist() for row, keep in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        ]
        half, margins = len(rows) // 2, inputs["margin"].tolist()
        batch = [
            {"prompt": a[:2], "chosen": a[2:], "rejected": b[2:], "margin": margin}
            for a, b, margin in zip(rows[:half], rows[half:], margins, strict=True)
        ]
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self.recorded.append({"batch": batch, "loss": loss.item()})
        return loss


class Recording(trl.DPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        mask, ids, counted = inputs["attention_mask"].bool(), inputs["input_ids"], inputs["completion_mask"].bool()
        rows = [
            {"prompt": row[keep & ~count].tolist(), "completion": row[keep & count].tolist()}
            for row, keep, count in zip(ids, mask, counted, strict=True)
        ]
        half = len(rows) // 2
        batch = [
            {"prompt": a["prompt"], "chosen": a["completion"], "rejected": b["completion"]}
            for a, b in zip(rows[:half], rows[half:], strict=True)
        ]
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self.recorded.append({"batch": batch, "loss": loss.item()})
        return loss


def record(config_class, trainer_class, rows, models=None, **options):
    models = models or {"model": tiny_qwen2(), "ref_model": tiny_qwen2()}
    if config_class is not trl.RewardConfig:
        options["beta"] = BETA
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        config = config_class(
            folder, learning_rate=LEARNING_RATE, per_device_train_batch_size=BATCH_SIZE, max_steps=NUM_STEPS,
            lr_scheduler_type="linear", warmup_steps=0, max_grad_norm=1.0, weight_decay=0.0, seed=0, report_to=[],
            save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False, logging_steps=1,
            adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, optim="adamw_torch", disable_tqdm=True,
            **options,
        )  # fmt: skip
        trainer = trainer_class(
            **models, args=config, train_dataset=datasets.Dataset.from_list(rows),
            processing_class=make_tokenizer(),
        )  # fmt: skip
        trainer.recorded = []
        trainer.train()
    return trainer.recorded


def main():
    shared = {
        "trl": trl.__version__,
        "model": CONFIG,
        "beta": BETA,
        "learning_rate": LEARNING_RATE,
        "schedule": "linear",
        "num_steps": NUM_STEPS,
    }
    dpo = {
        name: {"options": options, "steps": record(trl.DPOConfig, Recording, make_rows(), loss_type=[name], **options)}
        for name, options in RUNS.items()
    }
    kto = {
        name: {
            "options": options,
            "steps": record(trl.KTOConfig, RecordingKTO, labelled_rows(), loss_type=name, **options),
        }
        for name, options in KTO_RUNS.items()
    }
    options = {"center_rewards_coefficient": 0.05}
    models = {"model": tiny_qwen2("ForSequenceClassification", num_labels=1)}
    steps = record(trl.RewardConfig, RecordingReward, compared_rows(), models, **options)
    reward = {"reward": {"options": options, "steps": steps}}
    for file, runs in (
        ("trl_reward_trajectory.json", reward),
        ("trl_dpo_trajectory.json", dpo),
        ("trl_kto_trajectory.json", kto),
    ):
        Path(__file__).with_name(file).write_text(json.dumps({**shared, "runs": runs}) + "\n")
        for name, run in runs.items():
            print(name, [step["loss"] for step in run["steps"]])


if __name__ == "__main__":
    main()
