"""Rollouts of a module that only returns logits: a loop without a cache, with one forward of all active rows per step.

Rows are right-padded and the logits of each row's last real token are read, so padding has no influence on a causal
model.
"""

from dataclasses import replace

import torch

from strop.data.batch import TokenBatch, Trajectory
from strop.models import Policy
from strop.rollout.grammar import Matchers, allowed_bits, restricted, take
from strop.rollout.sampling import Sampling, draw


def complete(
    policy: Policy,
    prompts: list[torch.Tensor],
    sampling: Sampling,
    num_samples: int,
    uniforms_BT: torch.Tensor,
    eos_ids: tuple[int, ...],
    matchers: Matchers | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    rows = [prompt for prompt in prompts for _ in range(num_samples)]
    new: list[list[int]] = [[] for _ in rows]
    logps: list[list[torch.Tensor]] = [[] for _ in rows]
    active = list(range(len(rows)))
    for step in range(sampling.max_new_tokens):
        sequences = [(rows[i], new[i]) for i in active]
        logits_NV = _last_logits(policy, sequences)
        some = [None if matchers is None else matchers[i] for i in active]
        if any(some):
            logits_NV = restricted(logits_NV, allowed_bits(some).to(logits_NV.device))
        tokens_N, logps_N = draw(logits_NV, uniforms_BT[active, step].to(logits_NV.device), sampling)
        for i, token, logp in zip(active, tokens_N.tolist(), logps_N.cpu(), strict=True):
            new[i].append(token)
            logps[i].append(logp)
        ended = {active[n] for n in take(some, tokens_N.tolist())}
        active = [i for i in active if new[i][-1] not in eos_ids and i not in ended]
        if not active:
            break
    return [torch.tensor(row) for row in new], [torch.stack(row) for row in logps]


def _last_logits(policy: Policy, sequences: list[tuple[torch.Tensor, list[int]]]) -> torch.Tensor:
    batch = TokenBatch.of([Trajectory.of(prompt, new) for prompt, new in sequences], policy.device)
    policy.check_causality(batch)
    last_S = batch.cu_seqlens[1:].long() - 1
    return policy.logits(
        replace(
            batch,
            places_n=last_S,
            targets_n=batch.ids_N[last_S],
            sequence_n=torch.arange(len(batch), device=batch.device),
            num_loss_tokens_S=[1] * len(batch),
        )
    )
