"""Quantised weights: linear layers whose frozen weights are 4-bit (nf4) or 8-bit (int8) numbers with scales.

A product uses the dequantised weight without further rounding: y = x · dequantised(W)ᵀ, in forward and backward, in
training and in evaluation. So LoRA on a quantised base is LoRA on the dequantised one, and a merged model is the trained one.

nf4    bitsandbytes' 4-bit normal float: one of 16 levels times the largest magnitude of each block of 64 (4.5 bits a weight)
int8   W[o, i] ≈ q[o, i] · s[o], with s[o] = max|W[o]| / 127 (8 bits a weight)

Shapes: O outputs of a layer, I inputs of it.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from strop._install import missing
from strop.models.kinds import base_model, is_hugging_face, is_peft
from strop.models.trial import not_differentiable

BLOCK_SIZE = 64  # weights that share a scale in nf4
SCORING_HEADS = ("score", "classifier")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is quantised and frozen; `base_dtype` is the dtype of the original weight."""

    scales: nn.Parameter

    def __init__(self, source: nn.Linear, method: str) -> None:
        """Quantise the weight of `source`; share its bias unchanged."""
        super().__init__(source.in_features, source.out_features, source.bias is not None, device="meta")
        self.method, self.base_dtype = method, source.weight.dtype
        packed, scales = (_to_nf4 if method == "nf4" else _to_int8)(source.weight.detach())
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = source.bias
        self.train(source.training)

    def dequantized(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the weight [O, I], computed in float32 and rounded once, to `dtype` or else to `base_dtype`."""
        shape, dtype = (self.out_features, self.in_features), dtype or self.base_dtype
        if self.method == "int8":
            return (self.weight.float() * self.scales[:, None]).to(dtype)
        state = _bitsandbytes().QuantState(
            self.scales, shape=torch.Size(shape), dtype=torch.float32, blocksize=BLOCK_SIZE, quant_type="nf4"
        )
        return _bitsandbytes().dequantize_4bit(self.weight, state).to(dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        return _Product.apply(input.to(dtype), None if self.bias is None else self.bias.to(dtype), self)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, method={self.method}"


class _Product(torch.autograd.Function):
    """y = x · Wᵀ + b. Forward and backward each dequantise the weight and do not save it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias_O: torch.Tensor | None, layer: QuantizedLinear) -> torch.Tensor:
        ctx.layer = layer
        return linear(x, layer.dequantized().to(x.dtype), bias_O)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        dx = dy @ ctx.layer.dequantized().to(dy.dtype)  # dL/dx = dL/dy · W
        dbias_O = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None  # dL/db = Σ dL/dy
        return dx, dbias_O, None


def _to_nf4(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    source = weight_OI.contiguous() if weight_OI.dtype in FLOATS else weight_OI.float()
    packed, state = _bitsandbytes().quantize_4bit(source, blocksize=BLOCK_SIZE, quant_type="nf4")
    return packed, state.absmax


def _to_int8(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide_OI = weight_OI.float()
    scales_O = wide_OI.abs().amax(1) / 127
    return (wide_OI / scales_O.clamp_min(1e-30)[:, None]).round().to(torch.int8), scales_O


def _bitsandbytes() -> Any:
    try:
        from bitsandbytes import functional
    except ImportError:
        raise missing('quantize="nf4"', "bitsandbytes", "quantize") from None
    return functional


# ---- a whole model ----


def quantize(model: Any, method: str) -> None:
    """Replace every linear layer of a Hugging Face model, except its head, by a `QuantizedLinear`.

    Experts and convolutions that are not a torch.nn.Linear stay as they are.
    """
    if not is_hugging_face(model) and not hasattr(model, "config"):
        raise ValueError(f"quantize must be None but for Hugging Face models, found a {type(model).__name__}")
    inner = base_model(model)
    head = inner.get_output_embeddings()
    linears = {
        name: module
        for name, module in inner.named_modules()
        if type(module) is nn.Linear and module is not head and name.rpartition(".")[2] not in SCORING_HEADS
        and ".lora_" not in name
    }  # fmt: skip
    if not linears:
        raise ValueError(f"quantize must be None: a {type(inner).__name__} has no torch.nn.Linear besides its head")
    for name, module in linears.items():
        inner.set_submodule(name, QuantizedLinear(module, method))


def quantization_of(model: nn.Module) -> str | None:
    """Return the model's quantisation: nf4 or int8; None if it is not quantised."""
    return next((module.method for module in model.modules() if isinstance(module, QuantizedLinear)), None)


def num_weights(model: nn.Module) -> int:
    """Return the number of weights; in a quantised layer the original number, not that of the packed tensor."""
    quantized = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    packed = sum(module.weight.numel() + module.scales.numel() for module in quantized)
    whole = sum(module.in_features * module.out_features for module in quantized)
    return sum(param.numel() for param in model.parameters()) - packed + whole


def dequantize_and_merge(model: Any) -> None:
    """Replace the model's quantised layers by torch.nn.Linear in the base's dtype, with their adapters merged in.

    W + Σ scaling · B · A is computed in float32 and rounded once.
    """
    for name, module in list(model.named_modules()):
        base = getattr(module, "base_layer", module)
        if not isinstance(base, QuantizedLinear) or name.endswith(".base_layer"):
            continue
        weight_OI = base.dequantized(torch.float32)
        if module is not base:
            for adapter in module.active_adapters:
                if adapter in module.lora_A:
                    weight_OI += module.get_delta_weight(adapter).float()
        plain = nn.Linear(base.in_features, base.out_features, base.bias is not None, device="meta")
        plain.weight, plain.bias = nn.Parameter(weight_OI.to(base.base_dtype), requires_grad=False), base.bias
        model.set_submodule(name, plain)


def merge_adapters(model: Any) -> Any:
    """Return the model with all adapters merged in, changed in place; a quantised base is dequantised first."""
    if quantization_of(model) is not None:
        dequantize_and_merge(model)
    if is_peft(model):
        return model.merge_and_unload()
    for name, module in list(model.named_modules()):  # transformers puts adapter layers into the base model itself
        if hasattr(module, "base_layer") and hasattr(module, "merge"):
            module.merge()
            model.set_submodule(name, module.get_base_layer())
    return model


# ---- layers that cannot be trained ----


def check_differentiable(model: Any) -> None:
    """Raise a ValueError if no gradient passes a layer whose weight is not a plain tensor, such as a head quantised elsewhere."""
    for name, why in not_differentiable(model).items():
        raise ValueError(
            f'model must be differentiable, found that {name}, {why}; quantize="nf4" or "int8" leaves the head as it is'
        )
