"""Fused decoder layers of the common kind: RMSNorm, rotary attention, gated MLP (Llama, Qwen2 and 3, Mistral …).

A layer of transformers runs about 60 kernels forward. Most take less time than their launch, and the layer saves 60 kB per
token for its backward at hidden 896. Within `Fused.used` a layer is one autograd node: four matmuls, attention, and one
kernel each for residual + norm, rotation and gate. It saves 8 kB per token, because norms and the MLP are recomputed.
This costs one more matmul, and micro-batches of four times the tokens fit in less memory. Whether a layer is of this kind
shows only in its numbers: `Fused.differs` compares output and gradients of each layer with its own forward's.

Shapes: N tokens, H hidden, F the width of the gate; Q query heads, K key heads, D numbers a head, W = (Q + 2·K)·D.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from strop._types import Context
from strop.models import layer_kernels as kernels
from strop.models.attention import Packed, Rule, Unsupported, current_pass
from strop.models.decoder_layers import (
    ALLOWED,
    activation_of,
    check_layer,
    eps_of,
    has_hooks,
    norms_of,
    projections_of,
    relative_error,
    rms_norm_of,
)
from strop.models.exact import Exact
from strop.models.kinds import base_model, replaced_forwards
from strop.ops.exact import whole
from strop.ops.head import first_order, product


@dataclass
class Fused:
    """A model's decoder layers and last norm, with their fused forwards.

    rules   attention rule of each layer
    parts   submodules of the layers; the fused forward does not call them
    by      `Fast`, or `Exact`, whose sums have a fixed order and which has no fallback
    """

    layers: list[Any]
    rules: list[Rule]
    norm: Any
    parts: list[nn.Module]
    by: Any

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Use the fused forwards, unless attention has dropout or a part that would not be called has hooks."""
        drops = any(getattr(layer.self_attn, "attention_dropout", 0.0) for layer in self.layers)
        as_they_are = drops or any(map(has_hooks, self.parts))
        if as_they_are and self.by is Exact:
            found = "attention with dropout" if drops else "hooks on parts of its layers"
            raise ValueError(f"exact must be False for a model with {found}, which fused layers leave out, found True")
        with replaced_forwards({} if as_they_are else self._forwards()):
            yield

    def differs(self, read: Callable[[], object]) -> str | None:
        """Return which layer's fused output or gradient differs from its own when `read` runs the model; None if none does."""
        found: list[str] = []

        def compared(module: nn.Module, forward: Callable[..., object], x: torch.Tensor, **known: object) -> Any:
            own = functools.partial(type(module).forward, module)
            wanted, ours = (_with_gradients(module, one, x, known) for one in (own, forward))
            for what, values in wanted.items():
                if not (error := relative_error(ours[what], values)) <= ALLOWED[_computed_in(x)].training:
                    found.append(f"the {what} of its {type(module).__name__} is another (relative error {error:.1e})")
            return wanted["output"]

        with replaced_forwards(
            {module: functools.partial(compared, module, f) for module, f in self._forwards().items()}
        ):
            read()
        return found[0] if found else None

    def _forwards(self) -> dict[nn.Module, Callable[..., torch.Tensor]]:
        layers = {
            layer: functools.partial(_layer, layer, rule, self.by)
            for layer, rule in zip(self.layers, self.rules, strict=True)
        }
        return layers | {self.norm: lambda x: LastNorm.apply(x, self.norm.weight, eps_of(self.norm))}


def fused(model: torch.nn.Module, rules: dict[int, Rule], exact: bool = False) -> Fused:
    """Return the model's fused layers. Raise Unsupported, with the reason, if the layers are of another kind.

    rules   attention rule of each layer
    """
    decoder = base_model(model).get_decoder()
    layers, norm = list(getattr(decoder, "layers", [])), getattr(decoder, "norm", None)
    if not layers or norm is None:
        raise Unsupported(f"its {type(decoder).__name__} has no 'layers' or no 'norm'")
    for layer in layers:
        check_layer(layer)
        _check_trainable(layer)
    rms_norm_of(norm)
    parts = [part for layer in layers for part in layer.modules() if part is not layer]
    return Fused(layers, [rules[layer.self_attn.layer_idx] for layer in layers], norm, parts, Exact if exact else Fast)


def _check_trainable(layer: Any) -> None:
    """Raise Unsupported if the kernels of this file cannot compute the layer. Rollouts support more kinds."""
    if activation_of(layer.mlp.act_fn) != "silu":
        raise Unsupported(f"its activation is {type(layer.mlp.act_fn).__name__}")
    if not _is_plain(layer):
        raise Unsupported("its projections are more than products")
    projections = projections_of(layer)
    if any(one.bias is not None for one in projections[3:]):
        raise Unsupported("its products have biases in other places than before attention")
    if any(size % 8 for one in projections for size in one.weight.shape):
        raise Unsupported("its sizes are no multiples of 8")
    if any(rms_norm_of(norm).offset for norm in norms_of(layer)):
        raise Unsupported("its norms add an offset to their weights")


def _is_plain(layer: object) -> bool:
    """Return whether all projections are plain nn.Linear. Adapters and quantised weights are other classes."""
    return all(type(one) is nn.Linear for one in projections_of(layer))


def _with_gradients(
    module: nn.Module, forward: Callable[..., Any], x: torch.Tensor, known: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the output, and the gradients of the input and of the norms' weights for a fixed output gradient."""
    parts: list[Any] = [part for part in module.modules() if eps_of(part) is not None]
    norms = [part.weight for part in parts if part.weight.requires_grad]
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        out = forward(x, **known)
        d_out = torch.linspace(-9, 9, out.numel(), device=out.device).sin().view_as(out).to(out.dtype)
        dx, *d_norms = torch.autograd.grad(out, [x, *norms], d_out)
    found = {"output": out.detach(), "gradient": dx}
    return found | ({"norms' gradient": torch.cat(d_norms)} if norms else {})


# ---- a layer ----


def _layer(
    layer: Any,
    rule: Rule,
    by: object,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **others: object,
) -> torch.Tensor:
    if not _is_plain(layer):  # an adapter was added after the trial
        if by is Exact:
            raise ValueError(
                "exact must be False for a model with adapters, whose sums in training are others, found True"
            )
        return type(layer).forward(layer, hidden_states, position_embeddings=position_embeddings, **others)
    parts, (q, k, v, *rest) = layer._modules, [one._parameters for one in projections_of(layer)]
    attn = parts["self_attn"]._modules
    norms = parts["input_layernorm"], parts["post_attention_layernorm"], attn.get("q_norm"), attn.get("k_norm")
    return FusedLayer.apply(
        hidden_states, position_embeddings, Attention(current_pass(), rule, by), [eps_of(norm) for norm in norms],
        *(None if norm is None else norm._parameters["weight"] for norm in norms), q["weight"], k["weight"], v["weight"],
        q["bias"], k["bias"], v["bias"], *(one["weight"] for one in rest),
    )  # fmt: skip


class Fast:
    """The operations of a layer with cuBLAS matmuls and torch's attention kernel."""

    product = staticmethod(linear)

    @staticmethod
    def add_norm(x_NH, a_NI, weight, w, eps, dtype):
        """Return h = x + a·weightᵀ and its norm."""
        return kernels.norm(x_NH, w, eps, dtype, a=linear(a_NI, weight))[:2]

    @staticmethod
    def add(h_NH, m_NF, weight):
        """Return h + m·weightᵀ."""
        return torch.addmm(h_NH, m_NF, weight.T) if h_NH.dtype == m_NF.dtype else h_NH + linear(m_NF, weight)

    @staticmethod
    def attend(pass_, rule, q_NQD, k_NKD, v_NKD):
        """Return the output [N, Q, D] and the other tensors that the backward needs."""
        if pass_.has_kernel(q_NQD, v_NKD, rule):
            out_NQD, *saved = pass_.flash(q_NQD, k_NKD, v_NKD, rule)
            return out_NQD, saved
        return _by_sequence(pass_, rule, q_NQD, k_NKD, v_NKD), []


def computed(x_NH, cos, sin, attend, eps, norms, joined, heads, dtype):
    """Return a layer's y, attention's saved tensors, r₁, raw, r_q, r_k, qkv, out and h, in training and exact rollouts."""
    (w_1, w_2, w_q, w_k), (qkv, o, gate_up, down, bias), by = norms, joined, attend.by
    _, n1_NH, r1_N = kernels.norm(x_NH, w_1, eps[0], dtype)
    raw_NW = qkv_NW = by.product(n1_NH, qkv, bias)
    r_q = r_k = None
    if w_q is not None:
        qkv_NW = torch.empty_like(raw_NW)
        (q_raw, k_raw, v_raw), (q_new, k_new, v_new) = (_apart(one, heads) for one in (raw_NW, qkv_NW))
        _, _, r_q = kernels.norm(q_raw, w_q, eps[2], dtype, n=q_new)
        _, _, r_k = kernels.norm(k_raw, w_k, eps[3], dtype, n=k_new)
        v_new.copy_(v_raw)
    q_NQD, k_NKD, v_NKD = _apart(qkv_NW, heads)
    kernels.rotate(q_NQD, k_NKD, cos, sin, into=(q_NQD, k_NKD))
    out_NQD, saved = attend.forward(q_NQD, k_NKD, v_NKD)
    h_NH, n2_NH = by.add_norm(x_NH, out_NQD.flatten(1), o, w_2, eps[1], dtype)
    y_NH = by.add(h_NH, kernels.gate(by.product(n2_NH, gate_up)), down)
    return y_NH, saved, r1_N, raw_NW, r_q, r_k, qkv_NW, out_NQD, h_NH


class FusedLayer(torch.autograd.Function):
    """y = h + MLP(norm h), h = x + attention(norm x)"""

    @staticmethod
    def forward(ctx: Context, x, angles, attend, eps, w_1, w_2, w_q, w_k, *projections):
        x_NH, cos, sin = whole(x[0]), *map(whole, angles)
        dtype, heads = _computed_in(x), [one.shape[0] // cos.shape[-1] for one in projections[:3]]
        norms, joined = (w_1, w_2, w_q, w_k), _copied(projections, dtype, attend.pass_.memory)
        y_NH, saved, *rest = computed(x_NH, cos, sin, attend, eps, norms, joined, heads, dtype)

        r1_N, raw_NW, r_q, r_k, qkv_NW, out_NQD, h_NH = rest
        kept = x_NH, r1_N, raw_NW, r_q, r_k, qkv_NW, cos, sin, out_NQD, h_NH, *norms
        ctx.save_for_backward(*kept, *projections, *saved)
        ctx.attend, ctx.heads, ctx.dtype, ctx.eps_2, ctx.num_kept = attend, heads, dtype, eps[1], len(kept)
        return y_NH[None]

    @staticmethod
    def backward(ctx: Context, dy: torch.Tensor):
        with torch.no_grad():
            gradients = FusedLayer._gradients(ctx, dy)
        return first_order(*gradients)

    @staticmethod
    def _gradients(ctx: Context, dy: torch.Tensor):
        saved = ctx.saved_tensors  # read only once: gradient checkpointing returns them only once
        kept, projections, saved = saved[: ctx.num_kept], saved[ctx.num_kept :][:10], saved[ctx.num_kept + 10 :]
        x_NH, r1_N, raw_NW, r_q, r_k, qkv_NW, cos, sin, out_NQD, h_NH, w_1, w_2, w_q, w_k = kept
        dtype, heads, wants = ctx.dtype, ctx.heads, ctx.needs_input_grad[8:]
        qkv, o, gate_up, down, _ = _copied(projections, dtype, ctx.attend.pass_.memory)
        dy_NH = whole(dy[0])

        # y = h + m·downᵀ,  m = gate(n₂·gate_upᵀ),  n₂ = norm h
        d_NH = dy_NH.to(dtype)
        _, n2_NH, r2_N = kernels.norm(h_NH, w_2, ctx.eps_2, dtype)
        d_gu_N2F, m_NF = kernels.gate_bwd(d_NH @ down, linear(n2_NH, gate_up))
        (d_down,) = _of_weights(wants[9:], d_NH, m_NF, projections[9:])
        d_gate, d_up = _of_weights(wants[7:9], d_gu_N2F, n2_NH, projections[7:9])
        dh_NH = torch.empty_like(h_NH)
        d_w2 = kernels.norm_bwd(d_gu_N2F @ gate_up, h_NH, w_2, r2_N, dh_NH, past=dy_NH)

        # h = x + out·oᵀ,  out = attention(q, k, v)
        d_NH = dh_NH.to(dtype)
        (d_o,) = _of_weights(wants[6:7], d_NH, out_NQD.flatten(1), projections[6:7])
        dq_NQD, dk_NKD, dv_NKD = ctx.attend.backward(
            (d_NH @ o).view_as(out_NQD), *_apart(qkv_NW, heads), out_NQD, saved
        )

        # q, k, v = rotated and normed of n₁·qkvᵀ + bias,  n₁ = norm x
        d_qkv_NW = torch.empty_like(qkv_NW)
        into = _apart(d_qkv_NW, heads)
        into[2].copy_(dv_NKD)
        turned = into[:2] if w_q is None else (dq_NQD, dk_NKD)
        kernels.rotate(dq_NQD, dk_NKD, cos, sin, into=turned, backward=True)
        d_wq = d_wk = None
        if w_q is not None:
            q_raw, k_raw, _ = _apart(raw_NW, heads)
            d_wq = kernels.norm_bwd(dq_NQD, q_raw, w_q, r_q, into[0])
            d_wk = kernels.norm_bwd(dk_NKD, k_raw, w_k, r_k, into[1])
        dx_NH, n1_NH = torch.empty_like(x_NH), n2_NH
        d_w1 = kernels.norm_bwd(d_qkv_NW @ qkv, x_NH, w_1, r1_N, dx_NH, past=dh_NH, n=n1_NH)
        d_qkv = _of_weights(wants[:3], d_qkv_NW, n1_NH, projections[:3])
        d_biases: Any = [None] * 3
        if any(wants[3:6]):
            d_biases = d_qkv_NW.sum(0, dtype=torch.float32).split([len(one) for one in projections[:3]])
        return (
            dx_NH[None], None, None, None, d_w1, d_w2, d_wq, d_wk, *d_qkv, *d_biases, d_o, d_gate, d_up, d_down
        )  # fmt: skip


@dataclass
class Attention:
    """A layer's attention, forward and backward, outside autograd. Without a kernel the backward recomputes the forward."""

    pass_: Packed
    rule: Rule
    by: Any

    def forward(self, *states: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the output [N, Q, D] for q, k and v, and the other tensors that the backward needs."""
        return self.by.attend(self.pass_, self.rule, *states)

    def backward(self, d_out_NQD, q_NQD, k_NKD, v_NKD, out_NQD, saved) -> Sequence[torch.Tensor]:
        if saved:
            return self.pass_.flash_bwd(d_out_NQD, q_NQD, k_NKD, v_NKD, out_NQD, *saved, rule=self.rule)
        with torch.enable_grad():
            states = [one.detach().requires_grad_() for one in (q_NQD, k_NKD, v_NKD)]
            out_NQD = _by_sequence(self.pass_, self.rule, *states)
            return [whole(one) for one in torch.autograd.grad(out_NQD, states, d_out_NQD)]


def _by_sequence(pass_: Packed, rule: Rule, *states: torch.Tensor) -> torch.Tensor:
    q, k, v = (one.transpose(0, 1)[None] for one in states)
    return pass_.attend(q, k, v, 0, rule)[0]


class LastNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, w: torch.Tensor, eps: float):
        x_NH = whole(x[0])
        _, n_NH, r_N = kernels.norm(x_NH, w, eps, _computed_in(x))
        ctx.save_for_backward(x_NH, w, r_N)
        return n_NH[None]

    @staticmethod
    def backward(ctx: Context, dn: torch.Tensor):
        x_NH, w, r_N = ctx.saved_tensors
        with torch.no_grad():
            dx_NH = torch.empty_like(x_NH)
            dw = kernels.norm_bwd(whole(dn[0]), x_NH, w, r_N, dx_NH)
        return first_order(dx_NH[None], dw, None)


def _computed_in(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which products with x are computed."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _copied(projections: Sequence[Any], dtype: torch.dtype, memory: dict[Any, Any]) -> tuple[Any, ...]:
    """Return (qkv, o, gate_up, down, bias or None) in `dtype`: a layer's weights, copied by one kernel.

    One joined matmul is faster than several, and the gradient of its input is one matmul too. Layers of one shape share one
    buffer in `memory`, allocated once. This is safe: the kernels that read it are queued before the next layer's copy.
    """
    sources = [one for one in projections if one is not None]
    kind = dtype, *(one.shape for one in sources)
    if kind not in memory:
        memory[kind] = _joined(projections, dtype)
    copies, joined = memory[kind]
    torch._foreach_copy_(copies, sources)
    return joined


def _joined(projections: Sequence[Any], dtype: torch.dtype) -> tuple[list[torch.Tensor], tuple[object, ...]]:
    """Return uninitialised memory for each projection, and the same memory as joined matrices."""
    q, k, v, *biases, o, gate, up, down = projections
    memory = [
        torch.empty(sum(len(one) for one in group), *group[0].shape[1:], dtype=dtype, device=q.device)
        for group in ((q, k, v), (o,), (gate, up), (down,), biases)
        if group[0] is not None
    ]
    qkv, o_, gate_up, down_, *bias = memory
    copies = [*qkv.split([len(q), len(k), len(v)])]
    if bias:
        copies += bias[0].split([len(q), len(k), len(v)])
    return [*copies, o_, *gate_up.split([len(gate), len(up)]), down_], (
        qkv,
        o_,
        gate_up,
        down_,
        bias[0] if bias else None,
    )


def _apart(row_NW: torch.Tensor, heads: list[int]) -> list[torch.Tensor]:
    """Return views q [N, Q, D], k [N, K, D] and v [N, K, D] of the rows."""
    return list(row_NW.view(row_NW.shape[0], sum(heads), -1).split_with_sizes(heads, 1))


def _of_weights(
    wanted: Sequence[bool], dy_NO: torch.Tensor, x_NI: torch.Tensor, weights: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    """Return dL/dW = dyᵀ·x for each of several weights stacked by rows, in the weights' dtype."""
    if not any(wanted):
        return [None] * len(weights)
    d_OI = torch.empty(dy_NO.shape[1], x_NI.shape[1], dtype=weights[0].dtype, device=dy_NO.device)
    product(dy_NO.T, x_NI, d_OI)
    return d_OI.split([len(weight) for weight in weights])
