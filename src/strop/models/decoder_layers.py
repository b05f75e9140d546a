"""The recogniser of common decoder layers: RMSNorm, rotary attention, gated MLP (Llama, Qwen2 and 3, Mistral, Gemma …).

Training (`models/layers.py`) and rollouts (`rollout/steps.py`) compute such layers with few kernels. This file looks at the
parts of a layer. What happens between the parts shows only in numbers, which `models/trial.py` and `rollout/checks.py`
compare with those of the layer's own forward. `ALLOWED` is the table of errors for all of these comparisons.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import gelu, silu

from strop._types import Foreign
from strop.models.attention import Unsupported

# names of the modules that make up a layer and its parts
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
}


class Allowed(NamedTuple):
    """Allowed errors between two ways to compute the same function. A different function exceeds them by far.

    training   relative, for logits, outputs and gradients of a forward
    decoding   relative, for logits and attention states with a cache, whose sums have another order
    logps      absolute, for the log-prob of a token sampled with a cache
    """

    training: float
    decoding: float
    logps: float


ALLOWED = {
    torch.float64: Allowed(1e-6, 1e-6, 1e-4),
    torch.float32: Allowed(1e-4, 1e-3, 1e-2),
    torch.bfloat16: Allowed(3e-2, 0.1, 0.3),
    torch.float16: Allowed(1e-2, 0.1, 0.3),
}


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return |found − wanted| / |wanted|."""
    dtype = torch.float64 if wanted.dtype == torch.float64 else torch.float32  # not every device has float64
    found, wanted = found.to(dtype), wanted.to(dtype)
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


class RMSNorm(NamedTuple):
    """y = x / rms(x) · (weight + offset)"""

    weight: torch.Tensor
    eps: float
    offset: int


def check_layer(layer: Foreign) -> None:
    """Raise Unsupported, with the reason, unless the layer has the parts of a common decoder layer."""
    if "forward" in vars(layer):
        raise Unsupported(f"the forward of its {type(layer).__name__} has been replaced")
    check_parts(layer, LAYER)
    check_parts(layer.self_attn, ATTENTION, HEAD_NORMS)
    check_parts(layer.mlp, MLP)
    for norm in norms_of(layer):
        rms_norm_of(norm)
    activation_of(layer.mlp.act_fn)


def check_parts(module: Foreign, wanted: set[str], optional: Collection[str] = ()) -> None:
    """Raise Unsupported unless these are the module's parts, with all or none of the optional ones."""
    found = {name for name, _ in module.named_children()}
    if odd := found ^ wanted ^ (found.intersection(optional) and set(optional)):
        raise Unsupported(f"its {type(module).__name__} has other parts: {', '.join(sorted(odd))}")
    if module._parameters:
        raise Unsupported(
            f"its {type(module).__name__} has parameters of its own: {', '.join(sorted(module._parameters))}"
        )


def projections_of(layer: Foreign) -> list[Any]:
    """Return q, k, v, o, gate, up and down. Reading `_modules` is faster than a module's attributes."""
    attn, mlp = layer._modules["self_attn"]._modules, layer._modules["mlp"]._modules
    return [*(attn[name] for name in PROJECTIONS[:4]), *(mlp[name] for name in PROJECTIONS[4:])]


def norms_of(layer: Foreign) -> list[Any]:
    """Return the norms before attention and before the MLP, then those of queries and keys if the layer has them."""
    attn = layer._modules["self_attn"]._modules
    head_norms = [attn[name] for name in ("q_norm", "k_norm") if name in attn]
    return [layer._modules["input_layernorm"], layer._modules["post_attention_layernorm"], *head_norms]


def eps_of(norm: Foreign) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def rms_norm_of(module: Foreign) -> RMSNorm:
    """Return a norm's weight, eps and offset (RMSNorm of ones is weight + offset). Raise Unsupported if it is no RMSNorm."""
    eps = eps_of(module)
    if not isinstance(eps, float) or set(dict(module.named_parameters())) != {"weight"}:
        raise Unsupported(f"its {type(module).__name__} is no RMSNorm")
    weight = module.weight.detach()
    with torch.no_grad():
        found = module(torch.ones_like(weight))
    for offset in (0, 1):
        if torch.allclose(found.float(), weight.float() + offset, rtol=1e-2, atol=1e-2):
            return RMSNorm(weight, eps, offset)
    raise Unsupported(f"its {type(module).__name__} is no RMSNorm")


def activation_of(function: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """Return a function's name in ACTIVATIONS. Raise Unsupported if it is not one of them."""
    x = torch.linspace(-4, 4, 33)
    with torch.no_grad():
        found = function(x)
    for name, known in ACTIVATIONS.items():
        if torch.allclose(found, known(x), rtol=1e-5, atol=1e-6):
            return name
    raise Unsupported(f"its activation is {type(function).__name__}")


def has_hooks(module: nn.Module) -> bool:
    """Return whether the module has hooks. A fused forward does not call the module, so it would skip them."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks)
