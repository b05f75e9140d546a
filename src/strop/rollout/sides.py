"""Rollouts of models whose numbers depend on the longest row of a call. No call mixes rows of two sides
(`models/trial.py`).

A row that reaches a boundary continues beyond it after all of its tokens are read again, as in transformers' `generate`
for Phi-3. The token at the boundary, where a cache would be of the previous side, is drawn from a forward of the whole
row.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from strop.models import Policy
from strop.models.trial import Sides
from strop.rollout import plain
from strop.rollout.grammar import Matchers
from strop.rollout.sampling import Sampling

Complete = Callable[..., tuple[list[torch.Tensor], ...]]


def stays(sides: Sides, prompts: list[torch.Tensor], new_tokens: int) -> bool:
    """Return whether all rows stay before the first boundary, from their first token to the last."""
    return all((steps := sides.steps(len(prompt))) is None or new_tokens <= steps for prompt in prompts) and (
        len({sides.side(len(prompt)) for prompt in prompts} | {sides.side(1)}) == 1
    )


def complete(
    with_cache: Complete,
    policy: Policy,
    prompts: list[torch.Tensor],
    sampling: Sampling,
    num_samples: int,
    uniforms_BT: torch.Tensor,
    eos_ids: tuple[int, ...],
    matchers: Matchers | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return completions and log-probs, drawn by `with_cache` and `plain.complete` in parts between boundaries."""
    assert policy.sides is not None
    T = sampling.max_new_tokens
    rows = [prompt for prompt in prompts for _ in range(num_samples)]
    starts = [len(row) for row in rows]
    logps: list[list[torch.Tensor]] = [[] for _ in rows]
    active = list(range(len(rows)))
    while active:
        groups: dict[tuple[int, int], list[int]] = {}  # (side, steps) → rows
        for row in active:
            left, steps = T - len(rows[row]) + starts[row], policy.sides.steps(len(rows[row]))
            steps = left if steps is None else min(steps, left)
            groups.setdefault((policy.sides.side(len(rows[row])), steps), []).append(row)
        for (_, steps), some in groups.items():
            done = [len(rows[row]) - starts[row] for row in some]
            few = replace(sampling, max_new_tokens=max(steps, 1))
            uniforms_MT = torch.stack([
                uniforms_BT[row, begun : begun + few.max_new_tokens] for row, begun in zip(some, done, strict=True)
            ])  # fmt: skip
            policy.sides.forget()
            further = {} if matchers is None else {"matchers": [matchers[row] for row in some]}
            found = (with_cache if steps else plain.complete)(
                policy, [rows[row] for row in some], few, 1, uniforms_MT, eos_ids, **further
            )
            for row, new, new_logps in zip(some, found[0], found[1], strict=True):
                rows[row] = torch.cat([rows[row], new])
                logps[row].append(new_logps)
        active = [i for i in active if len(rows[i]) < starts[i] + T and int(rows[i][-1]) not in eos_ids]
        active = [i for i in active if matchers is None or (one := matchers[i]) is None or not one.ended]
    return [row[start:] for row, start in zip(rows, starts, strict=True)], [torch.cat(one) for one in logps]
