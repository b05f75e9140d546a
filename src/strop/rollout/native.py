"""Rollouts of strop's MoE: its engine's own loop, with a KV cache, a prompt read once for all its samples."""

import torch

from strop.models import Policy, unwrapped
from strop.rollout.sampling import Sampling


def complete(
    policy: Policy,
    prompts: list[torch.Tensor],
    sampling: Sampling,
    num_samples: int,
    uniforms_BT: torch.Tensor,
    eos_ids: tuple[int, ...],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model = unwrapped(policy.model)
    model._check_sharing()  # what training wrote must be what the engine reads
    made = model.moe.generate(
        [prompt.numpy() for prompt in prompts],
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        num_samples=num_samples,
        uniforms=uniforms_BT.numpy(),
        eos_token_id=eos_ids,
    )
    # copies of the rows, so that nothing holds the whole array
    tokens = [torch.from_numpy(row.copy()) for row in made.completions]
    rows = torch.from_numpy(made.logps_BT).to(model.dtype)
    return tokens, [row[:length].clone() for row, length in zip(rows, made.lengths_B.tolist(), strict=True)]
