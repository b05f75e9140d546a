"""Record three steps of every on-policy algorithm in float64: metrics, samples and the weights afterwards.

    PYTHONPATH=tests:tests/environments python tests/golden/make_recorded_runs.py      # writes recorded-runs.json

tests/algorithms/test_recorded_runs.py runs the same cases and compares. Write the file anew only when numbers are meant
to change, and say in the commit which and why.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "environments")]

from chat_templates import tokenizer  # noqa: E402
from test_tools import Counter  # noqa: E402
from tiny_models import llama  # noqa: E402
from tiny_qwen2 import tiny_qwen2  # noqa: E402
from trained_models import shifted  # noqa: E402

from strop import GRPO, PPO, BestOfN, Distill, OnlineDPO  # noqa: E402
from strop.environments.base import Environment, Turn  # noqa: E402
from strop.moe import MoEConfig, MoETransformer  # noqa: E402
from strop.moe.torch import MoEForCausalLM  # noqa: E402

PATH = Path(__file__).with_name("recorded-runs.json")
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]]
ROWS = [{"prompt": prompt, "answer": 16 + i, "completion": [20 + i, 6, 1]} for i, prompt in enumerate(PROMPTS)]
STEPS = 3
NOT_COMPARED = ("time/", "tokens_per_second", "environment/seconds", "eval/environment/seconds")


def hf(**changes):
    return tiny_qwen2(eos_token_id=[1, 2, 3, 4], **changes).double()


def moe(**changes):
    config = MoEConfig(
        vocab_size=32, hidden_dim=16, num_layers=2, num_heads=2, head_dim=8, num_experts=4, intermediate_dim=16,
        max_seq_len=64, eos_token_id=(1, 2, 3, 4), pad_token_id=0, **changes,
    )  # fmt: skip
    return MoEForCausalLM(MoETransformer(config, seed=3, dtype=np.float64))


def scorer():
    return tiny_qwen2("ForSequenceClassification", num_labels=1).double()


def near(completions, answer):
    return [
        float((torch.as_tensor(ids) - wanted).abs().double().mean().neg())
        for ids, wanted in zip(completions, answer, strict=True)
    ]


def brief(completion_ids):
    return [1.0 / len(ids) for ids in completion_ids]


def smaller(pairs):
    return [int(b.double().mean() < a.double().mean()) for a, b in pairs]


class Two(Environment):
    """Two turns, of which each is rewarded for what was said."""

    def reset(self, row):
        self.count = 0
        return row["prompt"]

    def step(self, reply):
        self.count += 1
        return Turn([4, 2], reward=float(sum(reply) % 5), done=self.count == 2, info={"said": len(reply)})


def grpo(make=hf, **options):
    known = {"group_size": 4, "max_new_tokens": 8, "kl_coef": 0.04, "learning_rate": 1e-2, "batch_size": 4}
    arguments = {"reward_fn": near} | known | options
    return GRPO(model=make(), ref_model=shifted(make()) if arguments["kl_coef"] else None, **arguments)


def ppo(make=hf, **options):
    known = {"max_new_tokens": 8, "learning_rate": 1e-2, "batch_size": 4, "critic_learning_rate": 1e-2}
    return PPO(model=make(), ref_model=shifted(make()), **({"reward_fn": near} | known | options))


def distill(make=hf, **options):
    known = {"max_new_tokens": 8, "learning_rate": 1e-2, "batch_size": 4}
    return Distill(model=make(), teacher=shifted(make()), **(known | options))


def online(make=hf, **options):
    known = {"max_new_tokens": 8, "learning_rate": 1e-2, "batch_size": 4}
    return OnlineDPO(model=make(), ref_model=shifted(make()), **(known | options))


def of_turns(**options):
    return grpo(environment=Two, **({"reward_fn": None, "kl_coef": 0.0, "max_new_tokens": 5} | options))


def with_tools():
    tokens = tokenizer("qwen")
    model = llama(vocab_size=len(tokens), max_length=1024).double()
    return GRPO(
        model=model, tokenizer=tokens, environment=Counter, kl_coef=0.0, group_size=4, max_new_tokens=12, batch_size=2,
        learning_rate=1e-2, reward_fn=lambda completions: [float(len(text)) for text in completions],
    )  # fmt: skip


TRAINERS = {
    "grpo": lambda: grpo(),
    "grpo, moe": lambda: grpo(moe),
    "grpo, several rewards": lambda: grpo(reward_fn=[near, brief], reward_weights=(1.0, 0.5)),
    "grpo, dapo, no kl, batch scale": lambda: grpo(loss_type="dapo", kl_coef=0.0, advantage_scale="batch", clip_eps=(0.2, 0.28)),
    "grpo, epochs and minibatches": lambda: grpo(inner_epochs=2, minibatch_size=6, micro_batch_size=2),
    "grpo, gspo": lambda: grpo(importance_level="sequence", inner_epochs=2, clip_eps=0.05),
    "grpo, vespo with importance": lambda: grpo(loss_type="vespo", importance_cap=2.0, top_k=8),
    "grpo, importance truncated": lambda: grpo(importance_cap=1.01, inner_epochs=2, top_p=0.9),
    "grpo, importance masked": lambda: grpo(importance_cap=(0.99, 1.01), importance_mode="mask", top_p=0.9),
    "grpo, recompute": lambda: grpo(old_logps="recompute", micro_batch_tokens=32, inner_epochs=2),
    "grpo, truncated masked": lambda: grpo(mask_truncated=True, max_new_tokens=4, loss_type="dapo"),
    "grpo, resampled": lambda: grpo(reward_fn=lambda completions: [float(len(ids) > 3) for ids in completions],
                                    resample_rounds=2, group_size=2),
    "grpo, entropy": lambda: grpo(entropy_coef=0.01, temperature=0.7, advantage_scale="none", advantage_ddof=0),
    "grpo, moe, replay": lambda: grpo(moe, inner_epochs=2, minibatch_size=8, kl_coef=0.0),
    "turns, credit of the trajectory": lambda: of_turns(),
    "turns, credit of each turn": lambda: of_turns(credit="turn", turn_discount=0.9, reward_fn=near_turns, inner_epochs=2),
    "turns, moe": lambda: of_turns(make=moe, kl_coef=0.02),
    "turns, tools": with_tools,
    "ppo": lambda: ppo(),
    "ppo, minibatches": lambda: ppo(inner_epochs=2, minibatch_size=2, group_size=2, mask_truncated=True, max_new_tokens=4),
    "ppo, moe": lambda: ppo(moe, whiten=False, value_clip=None, gamma=0.95, critic=scorer()),
    "ppo, critic": lambda: ppo(critic=scorer(), old_logps="recompute"),
    "distill": lambda: distill(),
    "distill, sampled": lambda: distill(divergence="sampled"),
    "distill, jsd, dataset": lambda: distill(divergence="jsd", beta=0.3, on_policy=0.5, micro_batch_size=2),
    "distill, forward, teacher": lambda: distill(divergence="forward_kl", on_policy=0.5, off_policy="teacher"),
    "distill, moe": lambda: distill(moe),
    "online dpo, preference": lambda: online(preference_fn=smaller),
    "online dpo, rewards": lambda: online(reward_fn=[near, brief], loss_type="ipo", micro_batch_size=2),
    "online dpo, moe": lambda: online(moe, reward_fn=near),
    "online dpo, turns": lambda: online(environment=Two, max_new_tokens=5),
}  # fmt: skip


def near_turns(completions, answer):
    return [float(len(ids) + wanted) for ids, wanted in zip(completions, answer, strict=True)]


def checksums(module):
    """Two sums over all weights: as they are, and times a wave, which tells places apart."""
    weights = torch.cat([param.detach().flatten().double() for _, param in sorted(module.named_parameters())])
    wave = torch.sin(torch.arange(len(weights), dtype=torch.float64))
    return [weights.sum().item(), (weights * wave).sum().item()]


def plain(value):
    return value.tolist() if isinstance(value, torch.Tensor) else value


def run(name):
    """What a case leaves behind, as JSON has it."""
    trainer = TRAINERS[name]()
    rows = [{"prompt": "Count.", "start": 3}, {"prompt": "Again."}] if name == "turns, tools" else ROWS
    history = trainer.train(rows, eval_dataset=rows[:2], num_steps=STEPS, progress=False)
    evaluated = trainer.evaluate(rows)
    kept = [
        {key: value for key, value in one.items() if not key.startswith(NOT_COMPARED)}
        for one in (*history.steps, evaluated)
    ]
    samples = [{key: plain(value) for key, value in one.items()} for one in trainer.samples]
    found = {"metrics": kept, "samples": samples, "weights": checksums(trainer.module)}
    if hasattr(trainer, "critic"):
        found["critic"] = checksums(trainer.critic.module)
    return json.loads(json.dumps(found))


def best_of_n(make, environment=None):
    """The same of Best-of-N, which trains nothing."""
    best = BestOfN(model=make(), reward_fn=near, n=4, max_new_tokens=6, seed=5, environment=environment)
    chosen = best.generate([row["prompt"] for row in ROWS], answer=[row["answer"] for row in ROWS])
    return {
        "chosen": plain(chosen),
        "rewards": best.all_rewards.tolist(),
        "columns": {name: column.tolist() for name, column in best.columns.items()},
        "completion_ids": [ids.tolist() for ids in best.completion_ids],
        "conversations": best.conversations,
    }


BEST = {
    "best of n": lambda: best_of_n(hf),
    "best of n, moe": lambda: best_of_n(moe),
    "best of n, turns": lambda: best_of_n(hf, Two),
}


def record(name):
    return json.loads(json.dumps(BEST[name]())) if name in BEST else run(name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {name: record(name) for name in (*TRAINERS, *BEST)}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found.items())
    PATH.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
