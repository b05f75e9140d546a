"""Runs of train() that end, go on and are read again, alone or under torchrun.

`main(FOLDER, PLAN)` takes as PLAN a JSON list of [case, shard, run folder, number of steps, resume],
or ["copy", from, to], or ["forget", run folder]: its newest checkpoint. See tests/preloaded.py.
"""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import llama, qwen2
from work import Turns

from strop import GRPO, SFT
from strop.distributed import world

EOS = 3
DRAW = random.Random(0)
IDS = [[DRAW.randrange(4, 30) for _ in range(DRAW.randrange(1, 6))] for _ in range(11)]
ROWS = [{"prompt": ids, "completion": [*ids[::-1], EOS]} for ids in IDS]
OPTIONS = {"learning_rate": 3e-3, "batch_size": 3, "warmup_steps": 3, "keep_checkpoints": 2}


def reward(completions):
    return [float((ids * torch.arange(1, len(ids) + 1)).sum() % 7) for ids in completions]


def sometimes(completions, prompts):
    """Without signal for prompts of an odd length, whose places are filled by further prompts."""
    return [given * (len(prompt) % 2 == 0) for given, prompt in zip(reward(completions), prompts, strict=True)]


class Dropping(torch.nn.Module):
    """Draws random numbers in its forward: a resumed run needs the state of each process's generator."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed, self.head = torch.nn.Embedding(30, 6), torch.nn.Linear(6, 30)
        self.drop = torch.nn.Dropout(0.3)

    def forward(self, input_ids):
        return self.head(self.drop(torch.tanh(self.embed(input_ids))))


def sft(**options):
    return SFT(model=qwen2(eos_token_id=EOS, tie_word_embeddings=True).double(), **OPTIONS, **options)


def grpo(**options):
    model = qwen2(eos_token_id=EOS).double()
    more = {"group_size": 3, "max_new_tokens": 5, "kl_coef": 0.05, "old_logps": "rollout", "samples_every": 1,
            "fill_batch": True, "num_eval_samples": 2}  # fmt: skip
    return GRPO(model=model, reward_fn=sometimes, **more, **OPTIONS, **options)


def lora(**options):
    return SFT(model=llama(eos_token_id=EOS).double(), lora={"r": 2, "merge": True}, **OPTIONS, **options)


def drop(**options):
    return SFT(model=Dropping(), dropout=True, **OPTIONS, **options)


def ahead(**options):
    """One step ahead by a server; with batches of one prompt, of two processes the first has none."""
    model = llama(eos_token_id=EOS, dtype=torch.float32)
    more = {
        "group_size": 3,
        "max_new_tokens": 5,
        "kl_coef": 0.0,
        "importance_cap": 2.0,
        "max_staleness": 1,
        "reward_fn": reward,
    }
    server = {"rollout_server": os.environ["STROP_TEST_SERVERS"].split()[-1]}
    return GRPO(model=model, **server, **OPTIONS | {"batch_size": 1} | more | options)


def turns_ahead(**options):
    """Two steps ahead by a server, with an environment: the first process plays for all."""
    return ahead(environment=Turns, reward_fn=None, max_staleness=2, batch_size=3, **options)


def here_ahead(**options):
    """Two steps ahead by a copy of the model in every process."""
    model = qwen2(eos_token_id=EOS).double()
    more = {"group_size": 3, "max_new_tokens": 5, "kl_coef": 0.0, "importance_cap": 2.0, "max_staleness": 2}
    return GRPO(model=model, reward_fn=reward, **more, **OPTIONS, **options)


MAKERS = {"sft": sft, "grpo": grpo, "lora": lora, "drop": drop, "ahead": ahead, "turns_ahead": turns_ahead,
          "here_ahead": here_ahead}  # fmt: skip


def train(case, shard, folder, num_steps, resume):
    trainer = MAKERS[case](shard=shard, save_every=1)
    held_out = ROWS[:4] if case in ("sft", "grpo") else None
    trainer.train(ROWS, eval_dataset=held_out, num_steps=num_steps, output_dir=folder, resume=resume, progress=False)
    return trainer


def by_hand(folder, shard):
    """A checkpoint by trainer.save, made into a trainer again; both then learn the same."""
    trainer = sft(shard=shard)
    batch = {"prompt": IDS[:3], "completion": [row["completion"] for row in ROWS[:3]]}
    trainer.train_step(**batch)
    trainer.save(folder / f"by-hand-{shard}")
    trainer.save(folder / f"by-hand-{shard}")  # in place of the first
    others = [{"prompt": [2, 3], "completion": [4, 5 + (i == 55) * world().rank]} for i in range(100)]  # in one row
    for wrong in (
        lambda: trainer.train(ROWS[world().rank :]),
        lambda: trainer.train(others),
        lambda: trainer.train(ROWS, eval_dataset=others),
        lambda: sft(seed=world().rank),
    ):
        with pytest.raises(ValueError, match="must be the same in every process"):
            wrong()
    again = SFT.from_checkpoint(folder / f"by-hand-{shard}")
    assert again.config == trainer.config
    assert again.train_step(**batch)["loss"] == trainer.train_step(**batch)["loss"]
    trainer.save_pretrained(folder / f"one-{shard}")
    again.save_pretrained(folder / f"other-{shard}")


def main(folder, plan):
    torch.set_num_threads(1)
    folder = Path(folder)
    for case, *arguments in json.loads(plan):
        if case == "by-hand":
            by_hand(folder, arguments[0])
        elif case == "forget":
            checkpoints = folder / arguments[0] / "checkpoints"
            world().from_first(lambda path=checkpoints: shutil.rmtree(max(path.iterdir())))
        elif case == "copy":
            world().from_first(lambda names=arguments: shutil.copytree(*(folder / name for name in names)))
        else:
            shard, name, num_steps, resume = arguments
            train(case, shard, folder / name, num_steps, resume)
    if world().is_first:
        print("done")
