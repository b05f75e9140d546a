"""Five steps of every algorithm, alone or under torchrun: the metrics of each step and the weights afterwards, in a folder.

`main(FOLDER, SHARD/CASE, …)` writes them under these names, such as none/sft and full/sft. See tests/preloaded.py.
"""

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_models import PlainModel, llama, mixtral, moe, qwen2
from tiny_qwen2 import tiny_qwen2

import strop.distributed
from strop import DPO, GRPO, KTO, PPO, SFT, Distill, OnlineDPO, RewardModel
from strop.distributed import whole, world
from strop.environments import Environment, Turn
from strop.losses import PREFERENCE_LOSS_TYPES

EOS = 3
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12], [4, 13], [14, 15], [16, 17, 18, 19, 20], [21]]
# batches that four processes share unevenly, and one with fewer rows than processes
BATCHES = [PROMPTS[:5], PROMPTS[2:], PROMPTS[:2], PROMPTS, PROMPTS[1:6]]
LONG = [[(prompt * 40)[:40] for prompt in batch] for batch in BATCHES]  # which completions share


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


def grpo(model=double, batches=BATCHES, **options):
    known = {"reward_fn": reward, "group_size": 3, "max_new_tokens": 6, "learning_rate": 3e-3, "kl_coef": 0.05}
    options = {"micro_batch_tokens": 40, "old_logps": "rollout", **known, **options}
    return lambda **more: (GRPO(model=model(), **options, **more), [{"prompts": batch} for batch in batches])


def sft(model=double, **options):
    rows = [{"prompt": batch, "completion": [[*p[::-1], 6, EOS] for p in batch]} for batch in BATCHES]
    return lambda **more: (SFT(model=model(), learning_rate=3e-3, micro_batch_tokens=16, **options, **more), rows)


def dpo(model=double, **options):
    rows = [{"prompt": b, "chosen": [[*p, EOS] for p in b], "rejected": [[6, 7, EOS]] * len(b)} for b in BATCHES]
    return lambda **more: (DPO(model=model(), learning_rate=3e-3, micro_batch_size=2, **options, **more), rows)


def online(model=double, **options):
    made = {"reward_fn": reward, "max_new_tokens": 5, "learning_rate": 3e-3, "micro_batch_size": 2} | options
    return lambda **more: (OnlineDPO(model=model(), **made, **more), [{"prompts": batch} for batch in BATCHES])


class Turns(Environment):
    """One to three turns, by the prompt, so that processes do not end together."""

    def reset(self, row):
        self.left = 1 + row["prompt"][0] % 3
        return row["prompt"]

    def step(self, reply):
        self.left -= 1
        return Turn([5, 6, len(reply)], reward=float(sum(reply) % 5), done=not self.left, info={"said": len(reply)})


def kto(**options):
    rows = [{"prompt": b, "completion": [[*p, EOS] for p in b], "label": [sum(p) % 2 == 0 for p in b]} for b in BATCHES]
    return lambda **more: (KTO(model=double(), learning_rate=3e-3, micro_batch_size=2, **options, **more), rows)


def classifier():
    return tiny_qwen2("ForSequenceClassification", num_labels=1).double()


def reward_model(**options):
    rows = [
        {"prompt": b, "chosen": [[*p, EOS] for p in b], "rejected": [[6, 7, EOS]] * len(b), "margin": [0.5] * len(b)}
        for b in BATCHES
    ]
    return lambda **more: (
        RewardModel(model=classifier(), learning_rate=3e-3, micro_batch_size=2, **options, **more),
        rows,
    )


def ppo(model=double, critic=lambda: None, **options):
    made = {"reward_fn": reward, "max_new_tokens": 5, "learning_rate": 3e-3, "micro_batch_size": 2} | options
    made = {"old_logps": "rollout", "critic_learning_rate": 3e-3, "minibatch_size": 3, "inner_epochs": 2} | made
    batches = [{"prompts": batch} for batch in BATCHES]
    return lambda **more: (PPO(model=model(), critic=critic(), **made, **more), batches)


def distill(model=double, **options):
    made = {"max_new_tokens": 5, "learning_rate": 3e-3, "micro_batch_size": 2, "on_policy": 0.6} | options
    rows = [{"prompts": [{"prompt": p, "completion": [*p, EOS]} for p in batch]} for batch in BATCHES]
    return lambda **more: (Distill(model=model(), teacher=model(seed=1), **made, **more), rows)


def served(number, **options):
    """The same model as the test's servers have, by the one of this number."""
    return lambda **more: grpo(
        lambda: llama(eos_token_id=EOS), rollout_server=os.environ["STROP_TEST_SERVERS"].split()[number], **options
    )(**more)


CASES = {
    "sft": sft(),
    "sft-tied": sft(lambda: double(tie_word_embeddings=True), gradient_checkpointing=True),
    "sft-plain": sft(lambda: double(PlainModel)),
    "sft-float32": sft(lambda: qwen2(eos_token_id=EOS, tie_word_embeddings=True)),
    "sft-bf16": sft(lambda: qwen2(eos_token_id=EOS), autocast="bf16", gradient_checkpointing=True),
    "sft-lora-bf16": sft(lambda: llama(eos_token_id=EOS), autocast="bf16", lora={"r": 2}),
    "grpo-float32": grpo(lambda: qwen2(eos_token_id=EOS)),
    "grpo-routing-float32": grpo(lambda: mixtral(eos_token_id=EOS), replay_routing=True, minibatch_size=8),
    "sft-lora": sft(lambda: double(llama), lora={"r": 2}),
    "dpo": dpo(),
    "grpo": grpo(),
    "grpo-tied": grpo(lambda: double(tie_word_embeddings=True), loss_type="dapo"),
    "grpo-bnpo": grpo(loss_type="bnpo", minibatch_size=4, inner_epochs=2),
    "grpo-dr": grpo(loss_type="dr_grpo", advantage_scale="none", mask_truncated=True),
    "grpo-batch": grpo(loss_type="dapo", advantage_scale="batch", old_logps="recompute"),
    "grpo-cispo": grpo(loss_type="cispo", clip_eps=(0.2, 2.0), importance_cap=1.5, old_logps="auto"),
    "grpo-sequence": grpo(importance_level="sequence", entropy_coef=0.01, top_k=12, old_logps="auto"),
    "grpo-prefixes-float32": grpo(lambda: double(max_length=128), LONG, micro_batch_tokens=170, old_logps="recompute"),
    "grpo-again": grpo(reward_fn=rarely, resample_rounds=2),
    "grpo-luspo": grpo(loss_type="luspo", kl_estimator="k1", entropy_coef=0.01, entropy_target=2.9, advantage="gdpo"),
    "grpo-cov": grpo(
        loss_type="kl_cov", cov_fraction=0.3, top_entropy_quantile=0.6, inner_epochs=2, advantage="reinforce++"
    ),
    "grpo-sapo": grpo(loss_type="sapo", kl_estimator="k2", old_logps="recompute", importance_cap=(0.5, 2.0)),
    "grpo-geometric": grpo(importance_level="geometric", minibatch_size=4, inner_epochs=2, kl_coef=0.0),
    "grpo-turns": grpo(reward_fn=None, environment=Turns, turns={"credit": "turn"}, max_new_tokens=3),
    "grpo-lora": grpo(lambda: double(llama), lora={"r": 2}),
    "grpo-plain": grpo(lambda: double(PlainModel)),
    "online": online(),
    "online-float32": online(lambda: qwen2(eos_token_id=EOS)),
    "online-turns": online(reward_fn=None, environment=Turns, max_new_tokens=3),
    "dpo-float32": dpo(lambda: qwen2(eos_token_id=EOS)),
    "dpo-lora-bf16": dpo(lambda: llama(eos_token_id=EOS), autocast="bf16", lora={"r": 2}),
    "dpo-all": dpo(loss_type=list(PREFERENCE_LOSS_TYPES), label_smoothing=0.1),
    "kto": kto(undesirable_weight=2.0),
    "kto-bco": kto(loss_type="bco"),
    "kto-apo": kto(loss_type="apo_zero_unpaired"),
    "reward": reward_model(center_coef=0.1),
    "ppo": ppo(),
    "ppo-critic": ppo(critic=classifier),
    "distill": distill(),
    "distill-jsd": distill(divergence="jsd", on_policy=1.0),
    "distill-sampled": distill(divergence="sampled", on_policy=1.0),
    "distill-teacher": distill(divergence="forward_kl", off_policy="teacher"),
    "distill-plain": distill(lambda **more: double(PlainModel, **more), divergence="jsd"),
    "ppo-lora": ppo(lambda: double(llama), lora={"r": 2}, mask_truncated=True),
    "grpo-vespo": grpo(loss_type="vespo", stale_kl=0.1, minibatch_size=4, inner_epochs=2),
    "online-ties": online(reward_fn=seldom),
    "grpo-moe": grpo(lambda: moe(eos_token_id=EOS)),
}
WHOLE = ("grpo-moe",)  # it has no shards
TIMES = ("tokens_per_second", "environment/seconds", "eval/environment/seconds")
# each with a server of its own
SERVED = {
    "served": served(0, importance_cap=2.0, old_logps="auto"),
    "served-again": served(1, reward_fn=rarely, resample_rounds=1),
    "served-turns": served(4, environment=Turns, reward_fn=None, max_new_tokens=3),
    "served-lora": served(2, lora={"r": 2}, sync="lora"),
    "served-distill": lambda **more: distill(
        lambda **changes: llama(eos_token_id=EOS, **changes), rollout_server=os.environ["STROP_TEST_SERVERS"].split()[3]
    )(**more),
}


def main(folder, *names):
    if world().size == 4:  # two processes gather a model's layers together, four each on its own
        strop.distributed.TOGETHER = 1
    for name in names:
        shard, _, case = name.partition("/")
        trainer, batches = (CASES | SERVED)[case](shard=shard)
        steps = [trainer.train_step(**batch) for batch in batches]
        steps.append(trainer.evaluate(evaluation_rows(trainer)))
        weights = {key: whole(param.detach()).clone() for key, param in trainer.module.named_parameters()}
        if world().is_first:
            keep = [{k: v for k, v in step.items() if k not in TIMES and "time/" not in k} for step in steps]
            file = Path(folder, f"{name}.safetensors")
            file.parent.mkdir(exist_ok=True)
            save_file(weights, file, {"steps": json.dumps(keep)})


def evaluation_rows(trainer):
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    if trainer.name == "SFT":
        return [row | {"completion": [6, EOS]} for row in rows]
    if trainer.name == "KTO":
        return [row | {"completion": [6, EOS], "label": len(row["prompt"]) > 1} for row in rows]
    if trainer.name == "Distill":
        return [row | {"completion": [6, EOS]} for row in rows]
    if trainer.name in ("DPO", "RewardModel"):
        return [row | {"chosen": [6, EOS], "rejected": [7, 8, EOS]} for row in rows]
    return rows
