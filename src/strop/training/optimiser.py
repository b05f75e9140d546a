"""The optimiser and the learning rate's schedule."""

import math
from collections.abc import Callable, Iterable

import torch

from strop._types import Json
from strop.config import OptimConfig

FUSED_ON = ("cuda", "cpu")  # one pass over weights, gradients and moments, in place

MakeOptimizer = Callable[[list[Json]], torch.optim.Optimizer]


def make_optimizer(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], config: OptimConfig, make: MakeOptimizer | None = None
) -> torch.optim.Optimizer:
    """AdamW, or what `make` makes of the parameter groups; the schedule sets the learning rate of either.

    Norms and biases (parameters of fewer than two dimensions) have no weight decay.
    """
    params = [param for _, param in named_parameters if param.requires_grad]
    if not params:
        raise ValueError("model must have parameters that require a gradient, found none")
    matrices = [param for param in params if param.ndim >= 2]
    others = [param for param in params if param.ndim < 2]
    groups = [
        {"params": group, "weight_decay": decay}
        for group, decay in ((matrices, config.weight_decay), (others, 0.0))
        if group
    ]
    if make is not None:
        if not callable(make):
            raise TypeError(f"optimizer must make one of parameter groups, as torch.optim.SGD does, found {make!r:.60}")
        optimizer = make(groups)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must return a torch.optim.Optimizer, found {type(optimizer).__name__}")
        return optimizer
    fusable = all(param.is_floating_point() and param.device.type in FUSED_ON for param in params)
    fused = True if fusable else None  # None, not False: torch then chooses the next best
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=fused)


def can_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimiser's kernel leaves everything as it is where `found_inf` on the device is 1, as AMP has it do."""
    on_gpu = all(param.is_cuda for group in optimizer.param_groups for param in group["params"])
    return on_gpu and type(optimizer) is torch.optim.AdamW and all(group["fused"] for group in optimizer.param_groups)


def learning_rate_at(step: int, total_steps: int, config: OptimConfig) -> float:
    """The learning rate of step `step`, counted from 0.

    warm-up:  lr·(step + 1)/warmup_steps
    then, with p the share of the remaining steps that is done:
    linear    min + (lr − min)·(1 − p)          cosine    min + (lr − min)·(1 + cos πp)/2
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    if total_steps < 1:
        raise ValueError(f"num_steps must be given for schedule={config.schedule!r}, which ends there, found 0")
    done = min((step - config.warmup_steps) / max(total_steps - config.warmup_steps, 1), 1.0)
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.min_learning_rate + (config.learning_rate - config.min_learning_rate) * left
