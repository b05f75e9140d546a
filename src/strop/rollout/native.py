"""Rollouts of strop's MoE by its engine's own loop, with a KV cache. A prompt is read once for all its samples.

Rows with grammars are drawn step by step, since their logits are changed before each draw.
"""

from typing import Any

import numpy as np
import torch

from strop.models import Policy, unwrapped
from strop.moe._inputs import left_padded
from strop.rollout.cached_rows import CachedRows
from strop.rollout.grammar import Matcher, Matchers, allowed_bits, restricted, take
from strop.rollout.sampling import Sampling


def complete(
    policy: Policy,
    prompts: list[torch.Tensor],
    sampling: Sampling,
    num_samples: int,
    uniforms_BT: torch.Tensor,
    eos_ids: tuple[int, ...],
    cached: CachedRows | None = None,
    matchers: Matchers | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    if sampling.min_p:
        raise ValueError(f"min_p must be 0 for strop's MoE, found {sampling.min_p:g}")
    model = unwrapped(policy.model)
    model._check_sharing()  # the engine must read the weights that training wrote
    rows, cache = [prompt.numpy() for prompt in prompts], None
    if matchers is not None and cached is None:
        rows, num_samples = [row for row in rows for _ in range(num_samples)], 1
        cached = CachedRows(now=range(len(rows)))
    if cached is not None:
        rows, cache = _going_on(model.moe.engine, rows, cached, sampling.max_new_tokens)
    if matchers is not None and cached is not None:
        found = _by_steps(model.moe.engine, rows, cache, sampling, uniforms_BT.numpy(), eos_ids, list(matchers))
        cached.rows.update({row: (cache, at) for at, row in enumerate(cached.now)})
        return [torch.tensor(ids) for ids, _ in found], [torch.tensor(logps, dtype=model.dtype) for _, logps in found]
    made = model.moe.generate(
        rows,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        num_samples=num_samples,
        uniforms=uniforms_BT.numpy(),
        eos_token_id=eos_ids,
        cache=cache,
    )
    if cached is not None:
        cached.rows.update({row: (cache, at) for at, row in enumerate(cached.now)})
    # copies of the rows, so that the whole array can be freed
    tokens = [torch.from_numpy(row.copy()) for row in made.completions]
    logps = torch.from_numpy(made.logps_BT).to(model.dtype)
    return tokens, [row[:length].clone() for row, length in zip(logps, made.lengths_B.tolist(), strict=True)]


def _by_steps(
    engine: Any,
    rows: list[np.ndarray],
    cache: Any,
    sampling: Sampling,
    uniforms_BT: np.ndarray,
    eos_ids: tuple[int, ...],
    matchers: list[Matcher | None],
) -> list[tuple[list[int], list[float]]]:
    """Return ids and log-probs of each row. Ended rows are decoded on, without effect, until all have ended."""
    rule = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in rows]
    active = set(range(len(rows)))
    logits_BV = engine.prefill(*left_padded(rows), cache)
    for step in range(sampling.max_new_tokens):
        if any(matchers):
            logits_BV = restricted(torch.from_numpy(logits_BV), allowed_bits(matchers)).numpy()
        tokens_B, logps_B = engine.sample(logits_BV, np.ascontiguousarray(uniforms_BT[:, step]), **rule)
        for at in active:
            found[at][0].append(int(tokens_B[at]))
            found[at][1].append(float(logps_B[at]))
        ended = {at for at in active if found[at][0][-1] in eos_ids} | {*take(matchers, tokens_B.tolist())}
        matchers = [None if at in ended else matcher for at, matcher in enumerate(matchers)]
        active -= ended
        if not active:
            break
        if step + 1 < sampling.max_new_tokens:
            logits_BV = engine.decode(tokens_B, cache)
    return found


def _going_on(
    engine: Any, rows: list[np.ndarray], cached: CachedRows, max_new_tokens: int
) -> tuple[list[np.ndarray], Any]:
    """Return the new tokens of each row, and a cache with the tokens already read.

    `cached` has for each row a cache and the row's number in it.
    """
    _read_twins(engine, rows, cached)
    cache = engine.new_cache(len(rows), max(map(len, rows)) + max_new_tokens)
    for at, row in enumerate(cached.now):
        if row in cached.rows:
            cache.copy_row(at, *cached.rows[row])
    return [ids[held:] for ids, held in zip(rows, cache.lengths_B.tolist(), strict=True)], cache


def _read_twins(engine: Any, rows: list[np.ndarray], cached: CachedRows) -> None:
    """Read equal prompts of new rows once, but for the last token: the step that reads it draws the next one."""
    same: dict[bytes, list[int]] = {}
    for row, ids in zip(cached.now, rows, strict=True):
        if row not in cached.rows and len(ids) > 1:
            same.setdefault(ids[:-1].tobytes(), []).append(row)
    twins = {ids: who for ids, who in same.items() if len(who) > 1}
    if twins:
        prompts = [np.frombuffer(ids, np.int64) for ids in twins]
        cache = engine.new_cache(len(prompts), max(map(len, prompts)))
        engine.prefill(*left_padded(prompts), cache)
        cached.rows.update({row: (cache, at) for at, who in enumerate(twins.values()) for row in who})
