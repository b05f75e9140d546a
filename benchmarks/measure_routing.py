"""How often the training forward of a tiny Mixture-of-Experts model chooses other experts than the rollout, and what it costs.

python benchmarks/measure_routing.py [SEED …]

Models of random weights: 4 layers of width 64, vocabulary 64; Mixtral with 8 experts, 2 of a token, Qwen3-MoE with 16, 4 of
a token. A rollout in bfloat16 (autocast over float32 weights) is trained on in bfloat16 and in float32. "before": the first
step, before any update. "after": means of the last 5 of 20 steps with 4 updates each. Tokens and places (a token in a
layer) are shares of those that the routers would send elsewhere; KL is mismatch_kl, in nats per token.
"""

import contextlib
import dataclasses
import statistics
import sys
import warnings

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from strop.algorithms.grpo import GRPO
from strop.data.batch import TokenBatch

KINDS = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64},
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "norm_topk_prob": True},
}
PROMPTS = [[2 + (7 * i + 3 * j) % 60 for j in range(4 + i)] for i in range(8)]
STEPS, LAST = 20, 5


def model_of(kind, seed):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        kind, vocab_size=64, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=64, initializer_range=0.1, bos_token_id=None, eos_token_id=1, pad_token_id=0, **KINDS[kind],
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def small_numbers(completion_ids):
    return [float((ids < 20).float().mean()) for ids in completion_ids]


def trainer_of(kind, seed, autocast, replay):
    trainer = GRPO(
        model=model_of(kind, seed), reward_fn=small_numbers, group_size=8, kl_coef=0.0, inner_epochs=4, max_new_tokens=24,
        learning_rate=3e-4, autocast=autocast, replay_routing=replay, seed=seed,
    )  # fmt: skip
    sample = trainer.complete

    def in_bf16(*given):
        with torch.autocast("cpu", torch.bfloat16):
            return sample(*given)

    trainer.complete = in_bf16  # type: ignore[method-assign]
    return trainer


@torch.no_grad()
def shares(trainer):
    """Of the tokens that have a record: tokens and places whose experts the plain training forward chooses otherwise."""
    trainer.sampler.records_routing = True
    rollout = trainer.complete([prompt_of(ids) for ids in PROMPTS], trainer.config.sampling, 8, 12345)
    batch = TokenBatch.of(rollout)
    cast = torch.autocast("cpu", torch.bfloat16) if trainer.config.run.autocast else contextlib.nullcontext()
    with cast, trainer.policy.routers.recording() as latest:
        trainer.policy.logps(dataclasses.replace(batch, routing_NLk=None))
        own = latest()
    recorded_NLk = batch.routing_NLk
    assert recorded_NLk is not None, "the sampler records the experts"
    there = recorded_NLk[:, 0, 0] >= 0
    differs = (own.sort(-1)[0] != recorded_NLk.sort(-1)[0]).any(-1)[there]
    trainer.sampler.records_routing = trainer.config.replay_routing
    return differs.any(-1).float().mean().item(), differs.float().mean().item()


def prompt_of(ids):
    from strop.data.batch import Trajectory

    return Trajectory.of_prompt(ids)


def measured(kind, seed, autocast, replay):
    trainer = trainer_of(kind, seed, autocast, replay)
    before = shares(trainer)
    steps = [trainer.train_step(PROMPTS) for _ in range(STEPS)]
    after = shares(trainer)
    kl = [step["mismatch_kl"] for step in steps]
    changed = [step.get("routing/changed_fraction", float("nan")) for step in steps[-LAST:]]
    return {
        "tokens before": before[0], "places before": before[1], "KL before": kl[0],
        "tokens after": after[0], "places after": after[1], "KL after": statistics.fmean(kl[-LAST:]),
        "largest ratio": max(step["mismatch_ratio_max"] for step in steps), "changed": statistics.fmean(changed),
        "reward": statistics.fmean(step["mean_reward"] for step in steps[-LAST:]),
    }  # fmt: skip


def main(seeds):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for kind in KINDS:
        for autocast in ("bf16", None):
            for replay in (False, True):
                for seed in seeds:
                    found = measured(kind, seed, autocast, replay)
                    told = ", ".join(f"{name} {value:.3g}" for name, value in found.items())
                    print(
                        f"{kind}, trained in {autocast or 'float32'}, replay {replay}, seed {seed}: {told}", flush=True
                    )


if __name__ == "__main__":
    main([int(seed) for seed in sys.argv[1:]] or [0, 1, 2])
