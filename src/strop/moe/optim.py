"""AdamW, clipping by the global norm, and the warm-up + cosine schedule."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from strop._checks import as_count, as_number

Arrays = dict[str, np.ndarray]


def adamw_update(
    param: np.ndarray,
    grad: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
) -> None:
    """Update one array in place by one AdamW step (Loshchilov & Hutter 2019); `step` counts from 1.

    g = grad_scale·grad,  m = β₁·m + (1 − β₁)·g,  v = β₂·v + (1 − β₂)·g²
    θ = θ·(1 − lr·decay) − lr·m̂ / (√v̂ + eps),  m̂ = m / (1 − β₁ᵗ),  v̂ = v / (1 − β₂ᵗ)
    """
    work = grad * ((1 - beta1) * grad_scale)
    m *= beta1
    m += work  # m = β₁·m + (1 − β₁)·g
    np.multiply(grad, grad, out=work)
    work *= (1 - beta2) * grad_scale**2
    v *= beta2
    v += work  # v = β₂·v + (1 − β₂)·g²
    np.sqrt(v, out=work)
    work /= math.sqrt(1 - beta2**step)
    work += eps  # √v̂ + eps
    np.divide(m, work, out=work)
    work *= lr / (1 - beta1**step)  # lr·m̂ / (√v̂ + eps)
    if weight_decay:
        param *= 1 - lr * weight_decay  # weight decay, decoupled from the gradient
    param -= work


def adamw_update_all(
    params: Sequence[np.ndarray],
    grads: Sequence[np.ndarray],
    ms: Sequence[np.ndarray],
    vs: Sequence[np.ndarray],
    *,
    weight_decays: Sequence[float],
    **settings: Any,
) -> None:
    """Apply `adamw_update` to several arrays, each with its own weight_decay."""
    for param, grad, m, v, weight_decay in zip(params, grads, ms, vs, weight_decays, strict=True):
        adamw_update(param, grad, m, v, weight_decay=weight_decay, **settings)


class AdamW:
    """AdamW over named arrays, updated in place. Matrices have weight decay; norms (1-d arrays) have none."""

    def __init__(
        self,
        params: Arrays,
        *,
        learning_rate: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        update: Callable[..., None] = adamw_update_all,
    ):
        """Create the moments. `update` is `adamw_update_all` or an engine's method of that name."""
        for name, value in (("learning_rate", learning_rate), ("weight_decay", weight_decay)):
            as_number(value, name, 0)
        for beta in betas:
            as_number(beta, "betas", 0, 1, open_high=True)
        as_number(eps, "eps", 0, open_low=True)
        self.params, self.update = params, update
        self.learning_rate, self.betas, self.eps, self.weight_decay = learning_rate, betas, eps, weight_decay
        self.step_count = 0
        self.m = {name: np.zeros_like(param) for name, param in params.items()}
        self.v = {name: np.zeros_like(param) for name, param in params.items()}

    def step(self, grads: Arrays, *, learning_rate: float | None = None, grad_scale: float = 1.0) -> None:
        """Update all arrays in place. grad_scale multiplies the gradients first (for clipping)."""
        if grads.keys() != self.params.keys():
            wrong = sorted(grads.keys() ^ self.params.keys())[0]
            raise ValueError(f"grads must name the parameters exactly, found a difference at {wrong!r}")
        self.step_count += 1
        lr = self.learning_rate if learning_rate is None else learning_rate
        params = list(self.params.values())
        self.update(
            params,
            [grads[name] for name in self.params],
            [self.m[name] for name in self.params],
            [self.v[name] for name in self.params],
            step=self.step_count,
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            eps=self.eps,
            weight_decays=[self.weight_decay if param.ndim > 1 else 0.0 for param in params],
            grad_scale=grad_scale,
        )


def global_norm(grads: Arrays) -> float:
    """Return √Σ g² over all elements of all arrays; the arrays' sums are added in float64."""
    return math.sqrt(sum(float(np.dot(g.ravel(), g.ravel())) for g in grads.values()))


def clip_scale(norm: float, max_norm: float) -> float:
    """Return the factor that clips gradients of this norm to max_norm: min(1, max_norm / norm)."""
    as_number(max_norm, "max_norm", 0, open_low=True, finite=False)
    return min(1.0, max_norm / norm) if norm > 0 else 1.0


def clip_global_norm(grads: Arrays, max_norm: float) -> float:
    """Scale all gradients in place to a global norm of at most max_norm, and return the norm before."""
    norm = global_norm(grads)
    scale = clip_scale(norm, max_norm)
    if scale < 1:
        for grad in grads.values():
            grad *= scale
    return norm


def warmup_cosine(
    step: int, *, learning_rate: float, total_steps: int, warmup_steps: int = 0, min_learning_rate: float = 0.0
) -> float:
    """Return the learning rate of a step, counted from 0.

    lr·(step + 1) / warmup                                during warm-up: the last warm-up step has the full rate
    min + (lr − min)·½·(1 + cos(π·progress))              after it, progress from 0 to 1 at total_steps
    """
    as_count(total_steps, "total_steps", 1)
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(f"warmup_steps must be from 0 to total_steps={total_steps}, found {warmup_steps}")
    if step < warmup_steps:
        return learning_rate * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return min_learning_rate + (learning_rate - min_learning_rate) * 0.5 * (1 + math.cos(math.pi * progress))
