"""Rollouts: prompts and sampling in; trajectories out, with log-probs and why each ended."""

from strop.rollout.generate import Rollout, Sampler, generate
from strop.rollout.sampling import Sampling, draw, sampling_logps

__all__ = ["Rollout", "Sampler", "Sampling", "draw", "generate", "sampling_logps"]
