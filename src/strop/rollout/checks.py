"""Whether a model can be run by the engine, and by fused layers: what its forward hands to attention, and its numbers."""

import contextlib
from typing import Any

import torch

from strop.models import Policy
from strop.models.attention import Unsupported, current, sdpa_without_plans
from strop.models.kinds import of_config
from strop.models.routing import Routers
from strop.rollout.sampling import Sampling
from strop.rollout.slots import CacheShape, Seen

PROBE = ([1, 2, 3, 4, 5], [3, 1], [2])
ERROR_ALLOWED = {
    torch.float64: 1e-6,
    torch.float32: 1e-3,
}  # relative; 0.1 in 16 bits


def probe(policy: Policy) -> list[torch.Tensor]:
    """A few ragged prompts of ids the model knows, shorter than what it reads."""
    size, longest = policy.vocab_size or 2, (policy.max_length or len(PROBE[0]) + 1) - 1
    return [torch.tensor([i % size for i in prompt[:longest]]) for prompt in PROBE]


def states_of(layers: Any, ids: torch.Tensor, device: torch.device) -> Seen:
    """What the layers hand to attention. What is not as it should be is a reason not to use them."""
    seen = Seen()
    try:
        with layers.ready(), current(seen):
            layers(ids[None].to(device), torch.arange(len(ids), device=device)[None])
    except (Unsupported, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model does with a cache or with arguments it does not know
        raise Unsupported(f"its forward fails with a cache of slots ({type(error).__name__}: {error})") from error
    return seen


def cache_shape(model: torch.nn.Module, seen: Seen) -> CacheShape:
    shapes = set(seen.shapes.values())
    if sorted(seen.shapes) != list(range(len(seen.shapes))) or not shapes:
        raise Unsupported("its attention layers do not go through transformers' attention interface")
    if len(shapes) > 1:
        raise Unsupported("its layers have keys of different shapes")
    num_heads, key_dim, value_dim, dtype = shapes.pop()
    if key_dim != value_dim:
        raise Unsupported("its keys and values have different sizes")
    _check_windows(model, seen)
    num_query_heads = {q.shape[1] for q, _, _ in seen.states.values()}
    if len(num_query_heads) > 1:
        raise Unsupported("its layers have different numbers of heads")
    return CacheShape(len(seen.shapes), num_heads, num_query_heads.pop() // num_heads, key_dim, dtype)


def _check_windows(model: torch.nn.Module, seen: Seen) -> None:
    """Some models have a window in their mask alone, which is not made here; a few tokens do not show it."""
    types = of_config(model.config, "layer_types") or ["sliding_attention"] * len(seen.rules)
    if "chunked_attention" in types:
        raise Unsupported("its attention is in chunks")
    wanted = of_config(model.config, "sliding_window") or 0
    for layer, rule in seen.rules.items():
        if wanted and types[layer] == "sliding_attention" and not rule.window:
            raise Unsupported("its attention is not told of its window")


def check_states(found: Seen, wanted: Seen) -> None:
    """The same queries, keys and values in every layer: logits alone hardly show a rotation in a model not yet trained."""
    if found.shapes != wanted.shapes:
        raise Unsupported("its layers are of another shape")
    errors = [
        (a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30)
        for layer in wanted.states
        for a, b in zip(found.states[layer], wanted.states[layer], strict=True)
    ]
    dtype = next(iter(wanted.states.values()))[0].dtype
    if not (error := torch.stack(errors).max().item()) <= ERROR_ALLOWED.get(dtype, 0.1):
        raise Unsupported(f"its layers compute something else (relative error {error:.1e})")


def check_against_forward(engine: Any, policy: Policy) -> None:
    """Two greedy steps of the probe against plain forwards: the only way to know what a model does with positions.

    The forwards use the experts of the steps. Else a choice that rounding decides would look like an error.
    """
    prompts = probe(policy)
    routers = policy.routers if isinstance(policy.routers, Routers) else None
    sampling = Sampling(max_new_tokens=2, temperature=0.0)
    engine.layers.refresh(len(prompts[0]) + 2)
    with engine.layers.ready(), contextlib.nullcontext() if routers is None else routers.recording() as latest:
        round_, rows = engine.begin(prompts, 1, len(prompts), sampling, torch.zeros(len(prompts), 2), ())
        if routers is not None:
            engine._begin_record(round_, prompts, routers, latest)
        engine._prefill(prompts, round_)
        found = []
        for _ in range(2):
            with round_.recorded(rows):
                logits_NV = engine._decode_logits(rows, round_)
                found.append(logits_NV[: len(prompts)].float())
                engine._draw(logits_NV, rows, round_, sampling)
    chosen = (
        None if round_.record is None else round_.record.lines(prompts, round_.prefix_starts, [2] * len(prompts), 1)
    )
    for i, prompt in enumerate(prompts):
        read = torch.cat([prompt, round_.tokens_BT[i, :1].cpu()]).to(engine.device)
        experts: Any = contextlib.nullcontext()
        if routers is not None and chosen is not None:
            experts = routers.replay(chosen[i][: len(read)].to(engine.device)).used()
        with torch.no_grad(), sdpa_without_plans(), experts:
            wanted_TV = engine.model(input_ids=read[None], use_cache=False).logits[0, -2:].float()
        found_TV = torch.stack([one[i] for one in found])
        error = ((found_TV - wanted_TV).norm() / wanted_TV.norm()).item()
        if error > ERROR_ALLOWED.get(engine.shape.dtype, 0.1):
            raise Unsupported(
                f"its logits with a cache of slots are not those of its forward (relative error {error:.1e})"
            )
