"""Decoder layers of the common kind with few kernels: RMSNorm, rotary attention, gated MLP (Llama, Qwen2 and 3, Mistral …).

On a GPU a layer of transformers is some 60 kernels forward, most of them smaller than their launch. Within `Fused.used` the
same layer is its products, attention, and one kernel each for residual + norm, rotation and gate. The projections are
called as the modules they are, so adapters and quantised weights stay what they are. Only numbers tell whether a layer is
of that kind: `fused` holds output and gradients of each against the layer's own.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from strop.models.attention import Rule, attention
from strop.models.kinds import base_model

# names of the modules that make up a layer and its parts; those in brackets may be missing
LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


@dataclass
class Fused:
    """A model's layers and last norm, to be used in this way.

    rules   of attention, by layer
    """

    layers: list[Any]
    rules: list[Rule]
    norm: Any

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Within, the layers compute so, unless somebody wants to hear of a part that is not called then."""
        parts = {} if any(map(_has_hooks, self._unheard())) else self._forwards()
        with _replaced(parts):
            yield

    def differs(self, read: Callable[[], Any], alike: dict[torch.dtype, float]) -> str | None:
        """Where a layer computes something else than its own forward does when `read` runs the model; None if nowhere."""
        found: list[str] = []

        def compared(module: nn.Module, forward: Callable[..., Any], x: torch.Tensor, **known: Any) -> Any:
            own = functools.partial(type(module).forward, module)
            wanted, ours = (_with_gradients(module, one, x, known) for one in (own, forward))
            for what, values in wanted.items():
                apart = float((ours[what].double() - values.double()).norm() / values.double().norm())
                if not apart <= alike[_computed_in(x)]:
                    found.append(f"the {what} of its {type(module).__name__} is another (relative error {apart:.1e})")
            return wanted["output"]

        with _replaced({module: functools.partial(compared, module, f) for module, f in self._forwards().items()}):
            read()
        return found[0] if found else None

    def _forwards(self) -> dict[nn.Module, Callable[..., Any]]:
        layers = {layer: functools.partial(_layer, layer, rule) for layer, rule in zip(self.layers, self.rules, strict=True)}
        return layers | {self.norm: lambda x: _norm(self.norm, x)[1]}

    def _unheard(self) -> Iterator[nn.Module]:
        for layer in self.layers:
            attn = layer.self_attn
            yield from (layer.input_layernorm, attn, layer.post_attention_layernorm, layer.mlp, layer.mlp.act_fn)
            yield from (getattr(attn, name) for name in HEAD_NORMS if hasattr(attn, name))


def fused(model: Any, rules: dict[int, Rule]) -> Fused | str:
    """The model's layers, or why they are not of the kind. `rules` are what its attention was asked for, by layer."""
    decoder = base_model(model).get_decoder()
    layers, norm = list(getattr(decoder, "layers", [])), getattr(decoder, "norm", None)
    for module in (*layers, norm):
        if why := _unlike(module) if module in layers else _no_norm(norm):
            return why
    return Fused(layers, [rules[layer.self_attn.layer_idx] for layer in layers], norm)


def _unlike(layer: nn.Module) -> str | None:
    """Why the layer is not of the kind, judged by its parts."""
    if "forward" in vars(layer):
        return f"the forward of its {type(layer).__name__} has been replaced"
    names = {name: dict(part.named_children()) for name, part in [("", layer), *layer.named_children()]}
    for name, wanted in (("", LAYER), ("self_attn", ATTENTION), ("mlp", MLP)):
        found = names.get(name, {}).keys() - (HEAD_NORMS if name == "self_attn" else set())
        if found != wanted:
            return f"its {name or 'layers'} have {', '.join(sorted(found ^ wanted))} in other ways"
    act = names["mlp"]["act_fn"]
    if type(act).__name__ not in ("SiLU", "SiLUActivation"):
        return f"its activation is {type(act).__name__}"
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [part for name, part in names["self_attn"].items() if name in HEAD_NORMS]
    return next(filter(None, map(_no_norm, norms)), None)


def _no_norm(norm: Any) -> str | None:
    if _eps(norm) is None or set(dict(norm.named_parameters())) != {"weight"}:
        return f"its norm is a {type(norm).__name__}"
    return None


def _eps(norm: Any) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


@contextlib.contextmanager
def _replaced(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Within, these modules compute so. Around one another: the inner one's forwards count, and the outer's come back."""
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = forward


def _with_gradients(
    module: nn.Module, forward: Callable[..., Any], x: torch.Tensor, known: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """The output, and for a given gradient of it those of the input and of the norms' weights."""
    norms = [part.weight for part in module.modules() if _eps(part) is not None and part.weight.requires_grad]
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        out = forward(x, **known)
        d_out = torch.linspace(-9, 9, out.numel(), device=out.device).sin().view_as(out).to(out.dtype)
        dx, *d_norms = torch.autograd.grad(out, [x, *norms], d_out)
    found = {"output": out.detach(), "gradient": dx}
    return found | ({"norms' gradient": torch.cat(d_norms)} if norms else {})


# ---- a layer ----


def _layer(layer: Any, rule: Rule, hidden_states: torch.Tensor, position_embeddings: Any, **_: Any) -> torch.Tensor:
    from strop.models.layer_kernels import Gate

    attn, mlp = layer.self_attn, layer.mlp
    x, n = _norm(layer.input_layernorm, hidden_states)
    x, n = _norm(layer.post_attention_layernorm, x, _attend(attn, rule, n, *position_embeddings))
    return x + mlp.down_proj(Gate.apply(mlp.gate_proj(n), mlp.up_proj(n)))


def _attend(attn: Any, rule: Rule, n: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    from strop.models.layer_kernels import Rotate

    D = cos.shape[-1]
    q, k, v = (projection(n).unflatten(-1, (-1, D)) for projection in (attn.q_proj, attn.k_proj, attn.v_proj))
    if hasattr(attn, "q_norm"):
        q, k = _norm(attn.q_norm, q)[1], _norm(attn.k_norm, k)[1]
    q, k = Rotate.apply(q, k, cos, sin)
    q, k, v = (states.transpose(1, 2) for states in (q, k, v))
    dropout = attn.attention_dropout if attn.training else 0.0
    out, _ = attention(attn, q, k, v, None, rule.scaling, rule.window, rule.softcap, dropout)
    return attn.o_proj(out.flatten(2))


def _norm(norm: Any, x: torch.Tensor, a: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + a, its norm); the norm in the dtype that products take it in."""
    from strop.models.layer_kernels import AddNorm

    return AddNorm.apply(x, a, norm.weight, _eps(norm), _computed_in(x))


def _computed_in(x: torch.Tensor) -> torch.dtype:
    """The dtype of products with x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
