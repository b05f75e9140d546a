"""Rollouts of Hugging Face models: by our own engine (decoding.py), or by transformers' generate where that cannot be."""

import threading
import warnings

import torch

from strop.models import Policy
from strop.models.attention import Unsupported
from strop.rollout import transformers_generate
from strop.rollout.decoding import Engine
from strop.rollout.sampling import Sampling
from strop.rollout.weights import signature

_turn = threading.RLock()
"""Held during a rollout: it changes the model's attention, and a graph being captured bears no other thread's work beside it."""


def complete(
    policy: Policy,
    prompts: list[torch.Tensor],
    sampling: Sampling,
    num_samples: int,
    seed: int,
    eos_ids: tuple[int, ...],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    with _turn:
        engine = engine_of(policy)
        if isinstance(engine, Engine):
            return engine.complete(prompts, sampling, num_samples, seed, eos_ids)
        return transformers_generate.complete(policy, prompts, sampling, num_samples, seed, eos_ids)


def engine_of(policy: Policy) -> Engine | str:
    """The engine over the weights where they are now, or why the model has none; told once, as a warning."""
    now = signature(policy)
    if policy.rollout_engine is None or policy.rollout_engine[0] != now:
        policy.rollout_engine = None  # first, for its memory
        engine: Engine | str
        try:
            engine = Engine(policy)
        except Unsupported as error:
            engine = str(error)
            warnings.warn(
                f"rollouts of this {type(policy.model).__name__} go through transformers' generate, which is slower: {error}",
                stacklevel=2,
            )
        policy.rollout_engine = now, engine
    return policy.rollout_engine[1]


def description(policy: Policy) -> str:
    """What the latest rollout of this model ran on."""
    _, engine = policy.rollout_engine or (None, "none yet")
    return f"hf, {engine.name}" if isinstance(engine, Engine) else f"hf, transformers' generate: {engine}"
