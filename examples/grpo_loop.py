"""The whole of GRPO in one flat file: read it from top to bottom, then change it.

A small Mixture-of-Experts transformer, fresh from random weights, learns to sort digits: "52814>" → "12458". A short
supervised stage shows it the format and leaves it mediocre. Then it samples answers of its own, a rule checks them, and
what was better than the other answers to the same prompt becomes likelier. No label is seen in that stage. Half a minute
on two CPU cores:

    python examples/grpo_loop.py

Everything the classes in `strop.algorithms` add to this (checkpoints, logging, evaluation, other models) is left out.

Shapes: P prompts, G samples of each, B = P·G rows, T tokens, V vocabulary.
"""

import argparse

import numpy as np
import torch

from strop import tasks
from strop.losses import group_advantages, policy_loss
from strop.moe import MoEConfig, MoETransformer
from strop.moe.torch import MoEForCausalLM
from strop.ops import logp

SFT_STEPS, SFT_BATCH, SFT_LR = 65, 64, 1e-3
GRPO_STEPS, PROMPTS, SAMPLES, GRPO_LR = 200, 64, 8, 5e-4
CLIP_EPS, KL_COEF = 0.2, 0.01


def main(seed: int = 0, sft_steps: int = SFT_STEPS, grpo_steps: int = GRPO_STEPS) -> tuple[float, float]:
    # 1. The task: problems, their answers, a reward. Held-out problems share not even an answer with those trained on.
    task = tasks.get("sorting", length=5)
    tokenizer = task.tokenizer
    train_rows, test_rows = task.rows("train", 20_000, seed=seed), task.rows("test", 250, seed=seed)
    rng = np.random.default_rng(seed)

    # 2. The model: 220 thousand parameters, trained by hand-derived gradients in C++, a torch module on the outside.
    config = MoEConfig(vocab_size=len(tokenizer), max_seq_len=32, eos_token_id=tokenizer.eos_token_id)
    model = MoEForCausalLM(MoETransformer(config, seed=seed))

    # 3. Supervised stage: the answers' tokens made likelier, for a few steps.
    optimizer = torch.optim.AdamW(model.parameters(), lr=SFT_LR, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(sft_steps):
        rows = [train_rows[i] for i in rng.integers(len(train_rows), size=SFT_BATCH)]
        answers = [[*tokenizer.encode(row["answer"]), tokenizer.eos_token_id] for row in rows]
        ids_BT, completion_mask_BT = right_padded([tokenizer.encode(row["prompt"]) for row in rows], answers)
        logps_BT = score(model, ids_BT, completion_mask_BT)
        update(model, optimizer, -logps_BT.sum() / completion_mask_BT.sum(), SFT_LR * min(1, (step + 1) / 20))
    before = accuracy(model, task, test_rows)
    print(f"after {sft_steps} supervised steps: {before:.1%} of held-out problems solved")

    # 4. The reference: the policy as it is now, frozen. The KL to it is measured, and held by KL_COEF.
    reference = MoEForCausalLM(MoETransformer(config, params={k: v.copy() for k, v in model.moe.params.items()}))

    optimizer = torch.optim.AdamW(model.parameters(), lr=GRPO_LR, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(grpo_steps):
        # 5. Rollout: SAMPLES answers to each prompt, next to each other, with the log-probs they were drawn with.
        rows = [train_rows[i] for i in rng.integers(len(train_rows), size=PROMPTS)]
        prompts_B = [tokenizer.encode(row["prompt"]) for row in rows for _ in range(SAMPLES)]
        rollout = model.moe.generate(
            prompts_B[::SAMPLES], num_samples=SAMPLES, max_new_tokens=task.max_new_tokens, seed=int(rng.integers(2**32))
        )

        # 6. Rewards: does the text say the answer? 1 or 0.
        texts_B = [tokenizer.decode(ids, skip_special_tokens=True) for ids in rollout.completions]
        answers_B = [row["answer"] for row in rows for _ in range(SAMPLES)]
        rewards_B = torch.tensor(task.reward(texts_B, answers_B))

        # 7. Advantages: (reward − mean of its group) / standard deviation. A group all right or all wrong says nothing.
        advantages_B = group_advantages(rewards_B, samples_per_prompt=SAMPLES)

        # 8. Loss: the clipped ratio to the policy that sampled times the advantage, and the KL to the reference.
        ids_BT, completion_mask_BT = right_padded(prompts_B, rollout.completions)
        old_logps_BT = torch.zeros(completion_mask_BT.shape)
        drawn_BT = np.arange(rollout.logps_BT.shape[1]) < rollout.lengths_B[:, None]
        old_logps_BT[completion_mask_BT] = torch.from_numpy(rollout.logps_BT[drawn_BT]).float()
        with torch.no_grad():
            ref_logps_BT = score(reference, ids_BT, completion_mask_BT)
        result = policy_loss(
            score(model, ids_BT, completion_mask_BT),
            old_logps_BT,
            advantages_B,
            completion_mask_BT,
            loss_type="dapo",  # every token weighs the same
            clip_eps=CLIP_EPS,
            ref_logps=ref_logps_BT,
            beta=KL_COEF,
        )

        # 9. Update. One per rollout, so the ratio is 1 and the clip idle; several are a loop around 8 and 9.
        update(model, optimizer, result.loss, GRPO_LR * (1 - step / grpo_steps))
        if step % 25 == 0 or step == grpo_steps - 1:
            silent = (advantages_B.view(-1, SAMPLES) == 0).all(1).float().mean()
            print(
                f"step {step:3d}   reward {rewards_B.mean():.3f}   KL {result.kl:.3f}   groups without signal {silent:.0%}"
            )

    after = accuracy(model, task, test_rows)
    print(f"after {grpo_steps} steps of GRPO: {after:.1%} of held-out problems solved")
    return before, after


def right_padded(prompts_B, completions_B) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [B, T], and the mask of the completions' tokens. What stands behind a row changes nothing before it."""
    rows_B = [torch.tensor([*prompt, *completion]) for prompt, completion in zip(prompts_B, completions_B, strict=True)]
    ids_BT = torch.nn.utils.rnn.pad_sequence(rows_B, batch_first=True)
    starts_B1 = torch.tensor([len(prompt) for prompt in prompts_B])[:, None]
    ends_B1 = torch.tensor([len(row) for row in rows_B])[:, None]
    positions_T = torch.arange(ids_BT.shape[1])
    return ids_BT, (starts_B1 <= positions_T) & (positions_T < ends_B1)


def score(model: MoEForCausalLM, ids_BT: torch.Tensor, completion_mask_BT: torch.Tensor) -> torch.Tensor:
    """log π(ids[t] | ids[<t]) at every t of a completion, 0 elsewhere: logits at t − 1 are for the token at t."""
    logits_BTV = model(ids_BT).logits
    logps_BT = logp(logits_BTV[:, :-1], ids_BT[:, 1:], completion_mask=completion_mask_BT[:, 1:])
    return torch.nn.functional.pad(logps_BT, (1, 0))


def update(model: MoEForCausalLM, optimizer: torch.optim.Optimizer, loss: torch.Tensor, learning_rate: float) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()


def accuracy(model: MoEForCausalLM, task: tasks.Task, rows: list[dict[str, str]]) -> float:
    """The share of problems whose greedy answer is exactly right."""
    prompts = [task.tokenizer.encode(row["prompt"]) for row in rows]
    made = model.moe.generate(prompts, max_new_tokens=task.max_new_tokens, temperature=0.0)
    texts = [task.tokenizer.decode(ids, skip_special_tokens=True) for ids in made.completions]
    return float(np.mean(task.reward(texts, [row["answer"] for row in rows])))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO in one flat file")
    parser.add_argument("--seed", type=int, default=0)
    torch.set_num_threads(1)  # its tensors are small here, and the engine that does the work has threads of its own
    main(seed=parser.parse_args().seed)
