"""Checks that the engine and its fused layers can run a model: its calls of attention, its states and its logits."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from strop.models import Policy
from strop.models.attention import Unsupported, current, sdpa_without_plans
from strop.models.decoder_layers import ALLOWED, relative_error
from strop.models.kinds import base_model, unwrapped
from strop.models.policy import takes_use_cache
from strop.models.routing import Routers
from strop.models.trial import shortened
from strop.rollout.sampling import Sampling
from strop.rollout.slots import CacheShape, Seen, States

TWO_GREEDY = Sampling(max_new_tokens=2, temperature=0.0)


@contextlib.contextmanager
def errors_are_unsupported(what: str) -> Iterator[None]:
    """Raise `Unsupported` for an error inside: a foreign model may raise anything, and then this engine cannot run it."""
    try:
        yield
    except (Unsupported, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise Unsupported(f"{what} ({type(error).__name__}: {error})") from error


def probe(policy: Policy) -> list[torch.Tensor]:
    """Return three prompts of different lengths, of ids the model knows and short enough for it."""
    size = policy.vocab_size or 2
    _, shorter, longest = policy.trial_lengths(room=2)
    lengths = (longest, shorter, 1)
    return [(torch.arange(length) + 1 + 2 * i) % size for i, length in enumerate(lengths)]


def check_completions(complete: Callable[..., Sequence[Sequence[torch.Tensor]]], policy: Policy) -> None:
    """Raise `Unsupported` unless greedy completions of the probe have the log-probs of the model's own forward."""
    prompts, model = probe(policy), base_model(unwrapped(policy.model))
    longest = policy.longest_together
    room = 6 if longest is None else longest - max(map(len, prompts)) + 1
    sampling = Sampling(max_new_tokens=max(1, min(6, room)), temperature=0.0)
    uniforms_BT = torch.zeros(len(prompts), sampling.max_new_tokens)
    with torch.no_grad():
        with errors_are_unsupported("it fails"):
            tokens, logps = complete(policy, prompts, sampling, 1, uniforms_BT, ())
        for prompt, new, found in zip(prompts, tokens, logps, strict=True):
            for i, token in enumerate(new):
                ids = torch.cat([prompt, new[:i]]).to(policy.device)
                more = {"use_cache": False} if takes_use_cache(model) else {}
                logps_V = model(input_ids=ids[None], **more).logits[0, -1].double().log_softmax(-1)
                apart = abs(logps_V[token] - found[i]).item()
                if not apart <= ALLOWED[model.dtype].logps:
                    raise Unsupported(f"its log-probs are not those of the model's forward (off by {apart:.1e})")


def check_beyond_windows(complete: Callable[..., Sequence[Sequence[torch.Tensor]]], policy: Policy) -> None:
    """Repeat `check_completions` with shortened windows and chunks, if those of the model are longer than the probe."""
    inner = unwrapped(policy.model)
    with shortened(inner) as is_shorter:
        if not is_shorter:
            return
        try:
            with torch.no_grad():
                base_model(inner)(input_ids=probe(policy)[0][None].to(policy.device))
        except Exception:  # the model itself fails with shortened windows, so nothing can be checked
            return
        check_completions(complete, policy)


def states_of(layers: Any, ids: torch.Tensor, device: torch.device) -> Seen:
    """Return what the layers pass to attention. Raise `Unsupported` if their forward fails."""
    seen = Seen()
    seen.states = States()
    with errors_are_unsupported("its forward fails with a cache of slots"), layers.ready(), current(seen):
        # not compiled, since `seen` may hold more than tensors
        layers(ids[None].to(device), torch.arange(len(ids), device=device)[None], with_logits=False)
    return seen


def cache_shape(seen: Seen) -> CacheShape:
    shapes = set(seen.shapes.values())
    if not shapes and not seen.states.by_key:
        raise Unsupported("its attention layers do not go through transformers' attention interface")
    if not shapes:  # no layer has keys: slots are empty
        return CacheShape(0, 1, 1, 1, next(iter(seen.states.by_key.values())).dtype)
    if len(shapes) > 1:
        raise Unsupported("its layers have keys of different shapes")
    num_heads, key_dim, value_dim, dtype = shapes.pop()
    num_query_heads = {q.shape[1] for q, _, _ in seen.given.values()}
    if len(num_query_heads) > 1:
        raise Unsupported("its layers have different numbers of heads")
    return CacheShape(len(seen.shapes), num_heads, num_query_heads.pop() // num_heads, max(key_dim, value_dim), dtype)


def check_states(found: Seen, wanted: Seen) -> None:
    """Raise `Unsupported` unless queries, keys and values agree in every layer.

    Logits alone hardly show a wrong rotation in an untrained model.
    """
    if found.shapes != wanted.shapes:
        raise Unsupported("its layers are of another shape")
    pairs = [(a, b) for layer in wanted.given for a, b in zip(found.given[layer], wanted.given[layer], strict=True)]
    error = max(relative_error(a, b) for a, b in pairs)
    if not error <= ALLOWED[pairs[0][1].dtype].decoding:
        raise Unsupported(f"its layers compute something else (relative error {error:.1e})")


def check_against_forward(engine: Any, policy: Policy) -> None:
    """Compare two greedy steps of the probe with plain forwards.

    This is the only way to test how a model uses positions.

    The forwards use the experts chosen in the steps. Otherwise a choice decided by rounding would look like an error.
    """
    prompts = probe(policy)
    routers = policy.routers if isinstance(policy.routers, Routers) else None
    engine.layers.refresh(len(prompts[0]) + 2)
    recording = contextlib.nullcontext() if routers is None else routers.recording()
    with (
        errors_are_unsupported("its forward fails with a cache of slots"), engine.layers.ready(), recording as latest
    ):  # fmt: skip
        round_, rows = engine.begin(prompts, 1, len(prompts), TWO_GREEDY, torch.zeros(len(prompts), 2), ())
        if routers is not None:
            engine._begin_record(round_, prompts, routers, latest)
        engine._prefill(prompts, round_)
        round_.enter_states(rows, torch.arange(len(prompts), device=engine.device))
        found = []
        for _ in range(2):
            with round_.recorded(rows):
                logits_NV = engine._decode_logits(rows, round_)
                found.append(logits_NV[: len(prompts)].float())
                engine._draw(logits_NV, rows, round_, TWO_GREEDY)
    chosen = (
        None if round_.record is None else round_.record.of_rows(prompts, round_.prefix_starts, [2] * len(prompts), 1)
    )
    for i, prompt in enumerate(prompts):
        read = torch.cat([prompt, round_.tokens_BT[i, :1].cpu()]).to(engine.device)
        experts: Any = contextlib.nullcontext()
        if routers is not None and chosen is not None:
            experts = routers.replay(chosen[i][: len(read)].to(engine.device)).used()
        with torch.no_grad(), sdpa_without_plans(), experts:
            wanted_TV = engine.model(input_ids=read[None], use_cache=False).logits[0, -2:].float()
        found_TV = torch.stack([one[i] for one in found])
        error = relative_error(found_TV, wanted_TV)
        if not error <= max(ALLOWED[dtype].decoding for dtype in engine.dtypes):
            raise Unsupported(
                f"its logits with a cache of slots are not those of its forward (relative error {error:.1e})"
            )
