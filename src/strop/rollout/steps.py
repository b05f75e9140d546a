"""The two implementations of a model's layers, `read(pass, ids, positions) → logits`; the pass computes attention.

`FusedLayers`: decoder layers of the common kind (RMSNorm, rotary attention with or without bias and norms of q and k,
gated MLP) in eight kernels each: four products of joined weights by cuBLAS, and four kernels between them (kernels.py),
on a CPU torch. `OwnLayers`: transformers' modules, for every other model.

Shapes: P rows of T tokens, N = P·T; H hidden, Q query heads, K key heads, D head dimension, V vocabulary.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, rms_norm

from strop._types import Json
from strop.models.attention import Pass, Rule, Unsupported, attending, current
from strop.models.decoder_layers import (
    ACTIVATIONS,
    RMSNorm,
    activation_of,
    check_layer,
    check_parts,
    norms_of,
    projections_of,
    rms_norm_of,
)
from strop.models.kinds import is_plain
from strop.models.rotations import Boundaries
from strop.models.routing import Within
from strop.models.trial import decoder_and_head
from strop.ops import onednn
from strop.rollout.slots import CacheShape, OneRow, slot_cache

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos and sin
Adapter = tuple[torch.Tensor, torch.Tensor, float]  # B, A and the scaling of B·A


def sdpa_without_plans() -> contextlib.AbstractContextManager[None]:
    """Return a context without cuDNN's attention, which takes a second to load and makes a plan for every new shape."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def without_autograd(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context in which operators on a CPU skip autograd's bookkeeping, a tenth of a tiny model's step.

    Unlike those of torch.inference_mode, its tensors are ordinary ones. On a GPU graphs have no bookkeeping.
    """
    return torch._C._AutoDispatchBelowADInplaceOrView() if device.type == "cpu" else contextlib.nullcontext()


class OwnLayers:
    """The model's forward, with 16-bit copies of its matrices under autocast."""

    def __init__(
        self, model: Any, device: torch.device, autocast: torch.dtype | None, compiled: bool, products: Within
    ):
        self.model, self.device, self.autocast = model, device, autocast
        self.copies: Copies | None = None
        self.rules: dict[int, Rule] | None = None  # attention rules, once the layers have been seen
        self.places: dict[int, int] | None = None  # cache index of each layer with keys, if some have none
        self.in_one_row = False  # whether the model reads the tokens of all rows as one row: see `OneRow`
        takes = inspect.signature(model.forward).parameters
        self._keeps_logits = "logits_to_keep" in takes
        self._cache = {"cache_params" if "cache_params" in takes else "past_key_values": slot_cache()}
        self._compiled: Any = torch.compile(self._forward) if compiled else None
        self._products = products

    def refresh(self, num_positions: int) -> None:
        if self.copies is None:  # only when they are needed: most models have fused layers
            self.copies = converted(self.model, self.autocast)
        self.copies.refresh()

    def read(
        self, pass_: Pass, ids_PT: torch.Tensor, positions_PT: torch.Tensor, with_logits: bool = True
    ) -> torch.Tensor:
        """Return [P, V], the logits of the last column, with the attention of this pass."""
        pass_.places = self.places
        forward = self._compiled if self._compiled is not None and with_logits else self._forward
        if not self.in_one_row:
            with current(pass_):
                return forward(ids_PT, positions_PT)[:, -1]
        P, T = ids_PT.shape
        ids_1N, positions_1N = ids_PT.view(1, -1), positions_PT.reshape(1, -1)
        before_N = positions_1N[0] - torch.arange(P * T, device=ids_PT.device)
        with current(OneRow(pass_, P, before_N)):
            logits_NV = forward(ids_1N, positions_1N, P * T if with_logits else 1)[0]
        return logits_NV.unflatten(0, (P, T))[:, -1] if with_logits else logits_NV

    def _forward(self, ids_PT: torch.Tensor, positions_PT: torch.Tensor, num_logits: int = 1) -> torch.Tensor:
        """Return the logits of the last columns."""
        options = {"logits_to_keep": num_logits} if self._keeps_logits else {}
        output = self.model(input_ids=ids_PT, position_ids=positions_PT, use_cache=True, **self._cache, **options)
        return output.logits

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Prepare the model for calls: attention by slots, 16-bit matrices, no compiled forward, no gradient.

        Autocast must not cache converted weights: a graph would use the old ones after a weight has changed.
        """
        compiled, self.model._compiled_call_impl = self.model._compiled_call_impl, None
        cast = torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None, cache_enabled=False)
        copies = contextlib.nullcontext() if self.copies is None else self.copies.in_place()
        try:
            skipping = contextlib.nullcontext() if self._compiled else without_autograd(self.device)
            attention = attending(self.model, None, self.rules), sdpa_without_plans()
            with torch.no_grad(), skipping, cast, attention[0], attention[1], copies, self._products():
                yield
        finally:
            self.model._compiled_call_impl = compiled


# ---- layers of the common kind ----


@dataclass
class Product:
    """A product with joined weights [E, H]. packed: the weight as the kernels of this CPU read it, during a rollout."""

    weight_EH: torch.Tensor
    bias_E: torch.Tensor | None
    packed: torch.Tensor | None = None

    def __call__(self, x_NH: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            return linear(x_NH, self.weight_EH, self.bias_E)
        return onednn.product(x_NH, self.packed, self.bias_E)


@dataclass
class DecodeLayer:
    attention_norm: RMSNorm
    qkv: Product
    head_norms: tuple[RMSNorm, ...] | None  # norms of q and of k
    rule: Rule
    out: Product
    mlp_norm: RMSNorm
    gate_up: Product
    down: Product


class FusedLayers:
    """A decoder of layers of the common kind, over joined weights.

    Raises `Unsupported`, with the reason, for other models.
    """

    def __init__(self, model: object, shape: CacheShape, rules: dict[int, Rule], table: torch.Tensor, on_gpu: bool):
        """Join the weights.

        table: the kernels read the rotation's address from it; without a GPU torch computes everything.
        """
        decoder, head = _parts(model)
        self.dtype, self.num_heads, self.head_dim = shape.dtype, shape.num_heads, shape.head_dim
        self.copies, self.table = Copies(), table
        self.kernels = _kernels() if on_gpu else None
        self.embed, self._rotary = decoder.embed_tokens, decoder.rotary_emb
        self.layers = [self._layer(layer, rules[index]) for index, layer in enumerate(decoder.layers)]
        self.activation = activation_of(decoder.layers[0].mlp.act_fn)
        self.norm = rms_norm_of(decoder.norm)
        self.head = Product(*self.copies.joined([head], self.dtype))
        self.rotation_TCD = torch.empty(0, 2, shape.head_dim)  # cos and sin of every position

    def _layer(self, layer: Any, rule: Rule) -> DecodeLayer:
        if rule.chunk:  # the decode kernel finds a token's rotation by its place among the keys
            raise Unsupported("its attention is in chunks")
        q, k, v, o, gate, up, down = projections_of(layer)
        attention_norm, mlp_norm, *head_norms = map(rms_norm_of, norms_of(layer))
        qkv, out, gate_up, down = (
            Product(*self.copies.joined(one, self.dtype)) for one in ([q, k, v], [o], [gate, up], [down])
        )
        return DecodeLayer(
            attention_norm, qkv, tuple(head_norms) or None, replace(rule, dropout=0.0), out, mlp_norm, gate_up, down
        )

    def refresh(self, num_positions: int) -> None:
        """Copy the present weights, and compute the rotation of num_positions positions by the model's own module."""
        self.copies.refresh()
        device, residual = self.embed.weight.device, self.embed.weight.dtype
        positions_1T = torch.arange(num_positions, device=device)[None]
        x = torch.empty(1, 1, 1, dtype=residual, device=device)
        kind = torch.float64 if self.dtype == torch.float64 else torch.float32
        with torch.no_grad():
            self.rotation_TCD = torch.stack([one[0].to(kind) for one in self._rotary(x, positions_1T)], 1)
        if self.rotation_TCD.shape != (num_positions, 2, self.head_dim):
            raise Unsupported("its rotation is of a part of each head")
        self.table[6] = self.rotation_TCD.data_ptr()

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        device = self.embed.weight.device
        cast = torch.autocast(device.type, enabled=False)
        try:
            with torch.no_grad(), without_autograd(device), cast, sdpa_without_plans():
                yield
        finally:
            for one in self._products:  # the next rollout has other weights
                one.packed = None

    @property
    def _products(self) -> list[Product]:
        of_layers = [one for layer in self.layers for one in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return [*of_layers, self.head]

    def pack(self, num_rows: int) -> None:
        """Prepare the products for steps of about so many rows, until `ready` ends. Does nothing on a GPU."""
        for one in self._products:
            if one.packed is None and one.weight_EH.numel() >= onednn.FEWEST_WEIGHTS:
                one.packed = onednn.packed(one.weight_EH, num_rows)

    def read(
        self, pass_: Pass, ids_PT: torch.Tensor, positions_PT: torch.Tensor, with_logits: bool = True
    ) -> torch.Tensor:
        """Return [P, V], the logits of the last column, with the attention of this pass."""
        P, T = ids_PT.shape
        x_NH: Any = self.embed(ids_PT).flatten(0, 1)
        update_NH: Any = None
        rotation = None if self.kernels else self._rotation_at(positions_PT.flatten())
        for index, layer in enumerate(self.layers):
            x_NH, y_NH = self._add_norm(x_NH, update_NH, layer.attention_norm)
            attended = self._attend(pass_, layer.qkv(y_NH), positions_PT, rotation, index, layer)
            if index + 1 == len(self.layers) and not with_logits:
                return attended
            update_NH = layer.out(attended.reshape(P * T, -1))
            x_NH, y_NH = self._add_norm(x_NH, update_NH, layer.mlp_norm)
            update_NH = layer.down(self._gated(layer.gate_up(y_NH)))
        if T > 1:
            x_NH, update_NH = (one.unflatten(0, (P, T))[:, -1].contiguous() for one in (x_NH, update_NH))
        return self.head(self._add_norm(x_NH, update_NH, self.norm)[1])

    def launches(self) -> list[Callable[[], object]]:
        """Return one launch of each kernel between the products, on data of its own."""
        layer, weight = self.layers[0], self.embed.weight
        x_NH, gate_up_NF = (weight.new_zeros(1, size) for size in (weight.shape[1], len(layer.gate_up.weight_EH)))
        qkv_NED = torch.zeros(1, len(layer.qkv.weight_EH), dtype=self.dtype, device=weight.device).unflatten(
            1, (-1, self.head_dim)
        )
        first = torch.zeros(1, dtype=torch.int64, device=weight.device)
        return [
            lambda: self._add_norm(x_NH, None, layer.attention_norm),
            lambda: self._gated(gate_up_NF.to(self.dtype)),
            lambda: self._rotate(qkv_NED, first, None, layer),
        ]

    # ---- between the products ----

    def _add_norm(
        self, x_NH: torch.Tensor, update_NH: torch.Tensor | None, norm: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + update and its norm. The kernel writes the sum to x."""
        if self.kernels:
            return x_NH, self.kernels.add_norm(x_NH, update_NH, norm, self.dtype)
        if update_NH is not None:
            x_NH = x_NH + update_NH
        return x_NH, rms_norm_(x_NH, norm).to(self.dtype)

    def _attend(
        self,
        pass_: Any,
        qkv_NE: torch.Tensor,
        positions_PT: torch.Tensor,
        rotation: Rotation | None,
        index: int,
        layer: DecodeLayer,
    ) -> torch.Tensor:
        qkv = heads(qkv_NE, self.num_heads, self.head_dim, positions_PT.shape[1])
        if hasattr(pass_, "attend_unrotated"):  # the decode kernel, which rotates by itself
            return pass_.attend_unrotated(*qkv, index, layer.rule, layer.head_norms, self.rounds)
        self._rotate(qkv_NE.unflatten(1, (-1, self.head_dim)), positions_PT.flatten(), rotation, layer)
        return pass_.attend(*qkv, index, layer.rule)

    def _rotation_at(self, positions_N: torch.Tensor) -> Rotation:
        """Return cos and sin at these positions, [N, 1, D] each."""
        cos_N1D, sin_N1D = self.rotation_TCD[positions_N].to(self.embed.weight.dtype).split(1, 1)
        return cos_N1D, sin_N1D

    def _rotate(
        self, qkv_NED: torch.Tensor, positions_N: torch.Tensor, rotation: Rotation | None, layer: DecodeLayer
    ) -> None:
        """Norm (if the model does) and rotate queries and keys in place; by the kernels, else with `rotation`."""
        K, D = self.num_heads, self.head_dim
        if self.kernels:
            return self.kernels.rotate(qkv_NED, positions_N, self.table, K, layer.head_norms, self.rounds)
        if layer.head_norms:
            for part, norm in zip((qkv_NED[:, : -2 * K], qkv_NED[:, -2 * K : -K]), layer.head_norms, strict=True):
                part.copy_(rms_norm_(part, norm))
        assert rotation is not None
        cos_N1D, sin_N1D = rotation
        turned = qkv_NED[:, :-K]
        half = torch.cat([-turned[..., D // 2 :], turned[..., : D // 2]], -1)
        turned.copy_(turned * cos_N1D + half * sin_N1D)
        return None

    @property
    def rounds(self) -> bool:
        """True if the model rounds to 16 bits between operations. Under autocast it does not."""
        return self.embed.weight.dtype == self.dtype and self.dtype.itemsize == 2

    def _gated(self, gate_up_NF: torch.Tensor) -> torch.Tensor:
        if self.kernels:
            return self.kernels.gated(gate_up_NF, self.activation)
        gate_NF, up_NF = gate_up_NF.chunk(2, -1)
        return ACTIVATIONS[self.activation](gate_NF) * up_NF


def heads(qkv_NE: torch.Tensor, K: int, D: int, num_tokens: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of queries [P, Q, T, D], keys and values [P, K, T, D]."""
    heads_PETD = qkv_NE.view(-1, num_tokens, qkv_NE.shape[1] // D, D).transpose(1, 2)
    return heads_PETD[:, : -2 * K], heads_PETD[:, -2 * K : -K], heads_PETD[:, -K:]


def _kernels() -> ModuleType:
    from strop.rollout import launch  # needs Triton, which comes with a GPU

    return launch


def rms_norm_(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    weight = norm.weight + norm.offset if norm.offset else norm.weight
    return rms_norm(x, weight.shape, weight.to(x.dtype), norm.eps)


# ---- is a model of this kind? Its parts are checked here, its numbers in checks.py ----


def _parts(model: object) -> tuple[Any, nn.Linear]:
    found = decoder_and_head(model)
    if isinstance(found, str):
        raise Unsupported(found)
    decoder: Any = found[0]
    head = found[1]
    check_parts(decoder, {"embed_tokens", "layers", "norm", "rotary_emb"})
    for layer in decoder.layers:
        check_layer(layer)
    bypassed = [model, decoder, head, *decoder.norm.modules(), *decoder.layers.modules(), decoder.rotary_emb]
    if not isinstance(decoder.embed_tokens, nn.Embedding):
        raise Unsupported(f"its embedding is a {type(decoder.embed_tokens).__name__}")
    if any(map(is_altered, bypassed)):
        raise Unsupported("its modules have hooks")
    if getattr(decoder.rotary_emb, "rope_type", "default") in ("dynamic", "longrope"):
        raise Unsupported("its rotation depends on the longest row")
    return decoder, head


# ---- converted copies of weights: 16-bit, joined, or with adapters added; the model's parameters never change ----


class Copies:
    """Copies of parameters, each in its own memory or in a part of a larger copy."""

    def __init__(self) -> None:
        self.places: list[tuple[Json, str]] = []
        self.copies: list[torch.Tensor] = []
        self.adapted: list[tuple[torch.Tensor, Any]] = []  # copies, and the LoRA layers whose product is added to them

    def add(self, module: nn.Module, name: str, copy: torch.Tensor) -> None:
        self.places.append((module._parameters, name))
        self.copies.append(copy)

    def joined(self, layers: Sequence[nn.Module], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias of linear layers as one.

        Nothing is copied if there is nothing to convert, join or add.
        """
        linears = [_linear(layer) for layer in layers]
        adapted = [layer for layer, plain in zip(layers, linears, strict=True) if layer is not plain]
        if any((one.bias is None) != (linears[0].bias is None) for one in linears):
            raise Unsupported("only some of its joined layers have a bias")
        if len(layers) == 1 and not adapted and linears[0].weight.dtype == dtype:
            only = linears[0]
            return only.weight.detach(), None if only.bias is None else only.bias.detach()
        parts = [one.weight for one in linears]
        weight = torch.empty(sum(map(len, parts)), parts[0].shape[1], dtype=dtype, device=parts[0].device)
        bias = weight.new_empty(len(weight)) if linears[0].bias is not None else None
        sizes = [len(part) for part in parts]
        for layer, plain, part in zip(layers, linears, weight.split(sizes), strict=True):
            self.add(plain, "weight", part)
            if layer is not plain:
                self.adapted.append((part, layer))
        if bias is not None:
            for plain, part in zip(linears, bias.split(sizes), strict=True):
                self.add(plain, "bias", part)
        return weight, bias

    @property
    def originals(self) -> list[torch.Tensor]:
        """The parameters now.

        They are looked up each time, since a parameter may have become another object over the same memory.
        """
        return [owner[name] for owner, name in self.places]

    def refresh(self) -> None:
        """Copy the present weights. Not allowed inside `in_place`."""
        if self.copies:
            torch._foreach_copy_(self.copies, [param.detach() for param in self.originals])
        for copy, layer in self.adapted:
            weight = layer.base_layer.weight.detach().float()
            for b, a, scaling in _adapters(layer):
                weight = torch.addmm(weight, b.float(), a.float(), alpha=scaling)  # W + scaling·B·A
            copy.copy_(weight)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the parameters by the copies inside this context."""
        originals = self.originals
        for (owner, name), copy in zip(self.places, self.copies, strict=True):
            owner[name] = copy
        try:
            yield
        finally:
            for (owner, name), original in zip(self.places, originals, strict=True):
                owner[name] = original


def converted(model: Any, dtype: torch.dtype | None) -> Copies:
    """Return 16-bit copies of the parameters that autocast would convert in every step: linear layers and experts."""
    copies = Copies()
    if dtype is not None:
        for module in model.modules():
            for name, param in module._parameters.items():
                if param is not None and param.dtype == torch.float32 and _is_converted(module, param):
                    copies.add(module, name, torch.empty_like(param, dtype=dtype, requires_grad=False))
    return copies


def _is_converted(module: object, param: torch.Tensor) -> bool:
    if not is_plain(param):
        return False
    return isinstance(module, nn.Linear) or (param.ndim >= 2 and not isinstance(module, nn.Embedding))


# ---- LoRA ----


def _linear(layer: Any) -> nn.Linear:
    """Return the linear layer, or the one beneath plain LoRA adapters."""
    if type(layer) is nn.Linear:
        if not is_plain(layer.weight):
            raise Unsupported(f"a weight of its layers is a {type(layer.weight).__name__}")
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


# ---- when an engine stays valid ----


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def signature(model: nn.Module, boundaries: Boundaries | None = None) -> Any:
    """Return a value that changes when an engine is no longer valid.

    It covers addresses of weights and buffers, adapters and their scaling (a constant in a graph), autocast, and hooks.
    """
    adapters, altered, tensors, devices = [], [], [], set()
    renewed = (
        set() if boundaries is None else {id(one.module) for one in boundaries.rotations}
    )  # renewed in every forward
    module: Any
    for index, module in enumerate(model.modules()):
        if hasattr(module, "merged_adapters") and hasattr(module, "active_adapters"):
            adapters.append((module.disable_adapters, *map(tuple, (module.merged_adapters, module.active_adapters)),
                             _scaling(module)))  # fmt: skip
        if is_altered(module):
            altered.append(index)
        buffers = () if id(module) in renewed else module._buffers.values()
        for one in (*module._parameters.values(), *buffers):
            if one is not None:
                tensors.append((one.data_ptr(), one.dtype, one.shape))
                devices.add(one.device)
    kinds = sorted({device.type for device in devices} - {"meta"})  # torch has no autocast for meta
    return [autocast_dtype(torch.device(kind)) for kind in kinds], adapters, altered, tensors


def is_altered(module: nn.Module) -> bool:
    """Return whether a call of the module does more than its class's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _scaling(adapted: object) -> list[float]:
    scaling = getattr(adapted, "scaling", None)
    return [v for v in scaling.values() if isinstance(v, (int, float))] if isinstance(scaling, dict) else []
