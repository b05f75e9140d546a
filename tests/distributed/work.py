"""Five steps of every algorithm, alone or under torchrun: the metrics of each step and the weights afterwards, in a folder.

python work.py FOLDER SHARD [CASE …]
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiny_models import PlainModel, llama, moe, qwen2

import strop.distributed
from strop import DPO, GRPO, SFT, OnlineDPO
from strop.distributed import whole, world

EOS = 3
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12], [4, 13], [14, 15], [16, 17, 18, 19, 20], [21]]
# batches that four processes share unevenly, and one with fewer rows than processes
BATCHES = [PROMPTS[:5], PROMPTS[2:], PROMPTS[:2], PROMPTS, PROMPTS[1:6]]


def reward(completions):
    return [float((ids * torch.arange(1, len(ids) + 1)).sum() % 7) for ids in completions]


def rarely(completions):
    """Mostly without signal: groups are sampled again."""
    return [float(ids[0] == 9) for ids in completions]


def seldom(completions):
    """Ties for most pairs, in some processes for all."""
    return [float(len(ids)) for ids in completions]


def double(make=qwen2, **changes):
    return make(eos_token_id=EOS, **changes).double()


def grpo(model=double, **options):
    options = {
        "reward_fn": reward,
        "group_size": 3,
        "max_new_tokens": 6,
        "learning_rate": 3e-3,
        "kl_coef": 0.05,
    } | options
    options = {"micro_batch_tokens": 40, "old_logps": "rollout"} | options
    return lambda **more: (GRPO(model=model(), **options, **more), [{"prompts": batch} for batch in BATCHES])


def sft(model=double, **options):
    rows = [{"prompt": batch, "completion": [[*p[::-1], 6, EOS] for p in batch]} for batch in BATCHES]
    return lambda **more: (SFT(model=model(), learning_rate=3e-3, micro_batch_tokens=16, **options, **more), rows)


def dpo(**options):
    rows = [{"prompt": b, "chosen": [[*p, EOS] for p in b], "rejected": [[6, 7, EOS]] * len(b)} for b in BATCHES]
    return lambda **more: (DPO(model=double(), learning_rate=3e-3, micro_batch_size=2, **options, **more), rows)


def online(**options):
    made = {"reward_fn": reward, "max_new_tokens": 5, "learning_rate": 3e-3, "micro_batch_size": 2} | options
    return lambda **more: (OnlineDPO(model=double(), **made, **more), [{"prompts": batch} for batch in BATCHES])


def served(**options):
    """The same model as the test's server has."""
    return grpo(lambda: llama(eos_token_id=EOS), rollout_server=os.environ.get("STROP_TEST_SERVER"), **options)


CASES = {
    "sft": sft(),
    "sft-tied": sft(lambda: double(tie_word_embeddings=True), gradient_checkpointing=True),
    "sft-plain": sft(lambda: double(PlainModel)),
    "sft-float32": sft(lambda: qwen2(eos_token_id=EOS, tie_word_embeddings=True)),
    "sft-bf16": sft(lambda: qwen2(eos_token_id=EOS), autocast="bf16", gradient_checkpointing=True),
    "sft-lora-bf16": sft(lambda: llama(eos_token_id=EOS), autocast="bf16", lora={"r": 2}),
    "grpo-float32": grpo(lambda: qwen2(eos_token_id=EOS)),
    "sft-lora": sft(lambda: double(llama), lora={"r": 2}),
    "dpo": dpo(),
    "dpo-ipo": dpo(loss_type="ipo"),
    "grpo": grpo(),
    "grpo-tied": grpo(lambda: double(tie_word_embeddings=True), loss_type="dapo"),
    "grpo-bnpo": grpo(loss_type="bnpo", minibatch_size=4, inner_epochs=2),
    "grpo-dr": grpo(loss_type="dr_grpo", advantage_scale="none", mask_truncated=True),
    "grpo-batch": grpo(loss_type="dapo", advantage_scale="batch", old_logps="recompute"),
    "grpo-cispo": grpo(loss_type="cispo", clip_eps=(0.2, 2.0), importance_cap=1.5, old_logps="auto"),
    "grpo-sequence": grpo(importance_level="sequence", entropy_coef=0.01, top_k=12, old_logps="auto"),
    "grpo-again": grpo(reward_fn=rarely, resample_rounds=2),
    "grpo-lora": grpo(lambda: double(llama), lora={"r": 2}),
    "grpo-plain": grpo(lambda: double(PlainModel)),
    "online": online(),
    "online-ties": online(reward_fn=seldom),
    "grpo-moe": grpo(lambda: moe(eos_token_id=EOS)),
}
# with the server that this variable names
SERVED = {
    "served": served(importance_cap=2.0, old_logps="auto"),
    "served-again": served(reward_fn=rarely, resample_rounds=1),
    "served-lora": served(lora={"r": 2}, sync="lora"),
}


def main(folder, shard, *names):
    torch.set_num_threads(1)
    if world().size == 4:  # two processes gather a model's layers together, four each on its own
        strop.distributed.TOGETHER = 1
    folder = Path(folder)
    for name in names or CASES:
        if shard == "full" and name == "grpo-moe":
            continue
        trainer, batches = (CASES | SERVED)[name](shard=shard)
        steps = [trainer.train_step(**batch) for batch in batches]
        steps.append(trainer.evaluate(evaluation_rows(trainer)))
        weights = {key: whole(param.detach()).clone() for key, param in trainer.module.named_parameters()}
        if world().is_first:
            keep = [
                {k: v for k, v in step.items() if not k.startswith("time/") and k != "tokens_per_second"}
                for step in steps
            ]
            save_file(weights, folder / f"{name}.safetensors", {"steps": json.dumps(keep)})


def evaluation_rows(trainer):
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    if trainer.name == "SFT":
        return [row | {"completion": [6, EOS]} for row in rows]
    if trainer.name == "DPO":
        return [row | {"chosen": [6, EOS], "rejected": [7, 8, EOS]} for row in rows]
    return rows


if __name__ == "__main__":
    main(*sys.argv[1:])
