"""What a rollout computes with that is not the model's own: its weights in 16 bits, several as one, adapters added.

    copies = Copies()
    weight = copies.joined([q_proj, k_proj, v_proj], torch.bfloat16)    # memory that stays where it is
    copies.refresh()                                                    # before every rollout: what training made of them

The parameters themselves are read and never changed.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from strop.models import Policy, unwrapped
from strop.models.attention import Unsupported

Adapter = tuple[torch.Tensor, torch.Tensor, float]  # B, A and the scaling of B·A


class Copies:
    """Copies of parameters, each in a place of its own or a part of a larger one."""

    def __init__(self) -> None:
        self.places: list[tuple[dict[str, Any], str]] = []
        self.copies: list[torch.Tensor] = []
        self.adapted: list[tuple[torch.Tensor, Any]] = []  # of the copies, and the LoRA layer whose product they get

    def add(self, module: nn.Module, name: str, copy: torch.Tensor) -> None:
        self.places.append((module._parameters, name))
        self.copies.append(copy)

    def joined(self, layers: Sequence[nn.Module], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of linear layers as one; in place where there is nothing to convert, join or add."""
        linears = [_linear(layer) for layer in layers]
        adapted = [layer for layer, linear in zip(layers, linears, strict=True) if layer is not linear]
        if any((linear.bias is None) != (linears[0].bias is None) for linear in linears):
            raise Unsupported("only some of its joined layers have a bias")
        if len(layers) == 1 and not adapted and linears[0].weight.dtype == dtype:
            only = linears[0]
            return only.weight.detach(), None if only.bias is None else only.bias.detach()
        parts = [linear.weight for linear in linears]
        weight = torch.empty(sum(map(len, parts)), parts[0].shape[1], dtype=dtype, device=parts[0].device)
        bias = weight.new_empty(len(weight)) if linears[0].bias is not None else None
        sizes = [len(part) for part in parts]
        for layer, linear, part in zip(layers, linears, weight.split(sizes), strict=True):
            self.add(linear, "weight", part)
            if layer is not linear:
                self.adapted.append((part, layer))
        if bias is not None:
            for linear, part in zip(linears, bias.split(sizes), strict=True):
                self.add(linear, "bias", part)
        return weight, bias

    @property
    def originals(self) -> list[torch.Tensor]:
        """Asked for each time: a parameter may be another object over the same memory by now."""
        return [owner[name] for owner, name in self.places]

    def refresh(self) -> None:
        """Outside of `in_place`."""
        if self.copies:
            torch._foreach_copy_(self.copies, [param.detach() for param in self.originals])
        for copy, layer in self.adapted:
            weight = layer.base_layer.weight.detach().float()
            for b, a, scaling in _adapters(layer):
                weight = torch.addmm(weight, b.float(), a.float(), alpha=scaling)  # W + scaling·B·A
            copy.copy_(weight)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the model computes with the copies."""
        originals = self.originals
        for (owner, name), copy in zip(self.places, self.copies, strict=True):
            owner[name] = copy
        try:
            yield
        finally:
            for (owner, name), original in zip(self.places, originals, strict=True):
                owner[name] = original


def converted(model: Any, dtype: torch.dtype | None) -> Copies:
    """16-bit copies of what autocast would convert in every step: the parameters of linear layers and of experts."""
    copies = Copies()
    if dtype is not None:
        for module in model.modules():
            for name, param in module._parameters.items():
                if param is not None and param.dtype == torch.float32 and _is_converted(module, param):
                    copies.add(module, name, torch.empty_like(param, dtype=dtype, requires_grad=False))
    return copies


def _is_converted(module: Any, param: torch.Tensor) -> bool:
    return isinstance(module, nn.Linear) or (param.ndim >= 2 and not isinstance(module, nn.Embedding))


# ---- LoRA ----


def _linear(layer: Any) -> nn.Linear:
    """The linear layer, or that beneath plain LoRA adapters."""
    if type(layer) is nn.Linear:
        return layer
    if (type(layer).__module__, type(layer).__name__) != ("peft.tuners.lora.layer", "Linear"):
        raise Unsupported(f"a {type(layer).__name__} of its layers is no torch.nn.Linear")
    more = [getattr(layer, name, None) or {} for name in ("lora_variant", "use_dora", "lora_bias")]
    if any(found for one in more for found in one.values()) or layer.fan_in_fan_out:
        raise Unsupported("its adapters do more than add a product")
    if layer.merged and layer.disable_adapters:
        raise Unsupported("its adapters are merged and switched off")
    return _linear(layer.base_layer)


def _adapters(layer: Any) -> Iterator[Adapter]:
    if layer.disable_adapters or layer.merged:
        return
    for name in layer.active_adapters:
        if name in layer.lora_A:
            yield layer.lora_B[name].weight.detach(), layer.lora_A[name].weight.detach(), layer.scaling[name]


# ---- when they are the same ----


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def signature(policy: Policy) -> Any:
    """Changes when an engine made before cannot be used any more: weights or buffers elsewhere, other adapters or another
    scaling of theirs, which a graph has as a number, other autocast, hooks.
    """
    adapters, altered, tensors = [], [], []
    for index, module in enumerate(unwrapped(policy.model).modules()):
        if hasattr(module, "merged_adapters") and hasattr(module, "active_adapters"):
            adapters.append((module.disable_adapters, *map(tuple, (module.merged_adapters, module.active_adapters)),
                             _scaling(module)))  # fmt: skip
        if is_altered(module):
            altered.append(index)
        for one in (*module._parameters.values(), *module._buffers.values()):
            if one is not None:
                tensors.append((one.data_ptr(), one.dtype, one.shape))
    return autocast_dtype(policy.device), adapters, altered, tensors


def is_altered(module: nn.Module) -> bool:
    """Whether calling it is more than its class's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _scaling(adapted: Any) -> list[float]:
    scaling = getattr(adapted, "scaling", None)
    return [v for v in scaling.values() if isinstance(v, (int, float))] if isinstance(scaling, dict) else []
