"""`linear_logp` by chunks (see `strop.ops.chunks`): "chunked" with torch's row functions on any device, "triton" with the
row kernels, "exact" with sums of one order. One product to score; three more for the gradients, of which the first makes
the logits again. With a frozen head two in all, in the forward, where the workspace has room for rows of logits.
"""

from typing import Any

import torch

from strop._tensors import check_linear_logp, computed_in
from strop.ops.chunks import linear_logp_backward, linear_logp_forward, linear_logp_with_gradient, whole_rows_fit
from strop.ops.library import first_order
from strop.ops.linear_logp.reference import linear_logp
from strop.ops.registry import on_gpu, on_gpu_or_interpreted, only_by_name


@linear_logp.backend("chunked")
def linear_logp_chunked(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, **options: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    return _linear_logp("torch", hidden, weight, ids, **options)


@linear_logp.backend("exact", when=only_by_name, by_name=on_gpu_or_interpreted)
def linear_logp_exact(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, **options: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    return _linear_logp("exact", hidden, weight, ids, **options)


@linear_logp.backend("triton", when=on_gpu, by_name=on_gpu_or_interpreted)
def linear_logp_triton(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, **options: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    return _linear_logp("triton", hidden, weight, ids, **options)


def _linear_logp(
    rows: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    completion_mask: torch.Tensor | None = None,
    entropy: bool = False,
    workspace: int | None = None,
    validate: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    mask = check_linear_logp(hidden, weight, ids, bias, temperature, completion_mask, workspace, validate)
    hidden_NH, mask_N = hidden.reshape(-1, hidden.shape[-1]), None if mask is None else mask.reshape(-1)
    given = hidden_NH, weight, bias, ids.reshape(-1), mask_N, float(temperature)
    dtype = computed_in(hidden)
    settings = rows, workspace, dtype
    frozen = not entropy and _only_hidden_learns(hidden, weight, bias)
    if frozen and whole_rows_fit(hidden.device, weight.shape[0], dtype, rows, workspace):
        return _FrozenLinearLogp.apply(*given, settings).view(ids.shape)
    logps_N, entropies_N = _LinearLogp.apply(*given, entropy, settings)
    logps = logps_N.view(ids.shape)
    return (logps, entropies_N.view(ids.shape)) if entropy else logps


def _only_hidden_learns(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    frozen = not weight.requires_grad and (bias is None or not bias.requires_grad)
    return frozen and hidden.requires_grad and torch.is_grad_enabled()


class _FrozenLinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight, bias, ids_N, mask_N, temperature, settings):
        logps_N, gradient_NH = linear_logp_with_gradient(hidden_NH, weight, bias, ids_N, mask_N, temperature, *settings)
        ctx.save_for_backward(gradient_NH, mask_N)
        ctx.set_materialize_grads(False)
        return logps_N

    @staticmethod
    def backward(ctx, d_logps_N):
        if d_logps_N is None:
            return (None,) * 7
        gradient_NH, mask_N = ctx.saved_tensors
        with torch.no_grad():
            if mask_N is not None:
                d_logps_N = torch.where(mask_N, d_logps_N, 0.0)
            d_hidden_NH = (gradient_NH * d_logps_N[:, None]).to(gradient_NH.dtype)
        return first_order(d_hidden_NH, None, None, None, None, None, None)


class _LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight, bias, ids_N, mask_N, temperature, entropy, settings):
        logps_N, stats_2N, entropies_N = linear_logp_forward(
            hidden_NH, weight, bias, ids_N, mask_N, temperature, entropy, *settings
        )
        ctx.save_for_backward(hidden_NH, weight, bias, ids_N, mask_N, stats_2N, entropies_N)
        ctx.temperature, ctx.entropy, ctx.settings = temperature, entropy, settings
        ctx.set_materialize_grads(False)
        return logps_N, entropies_N

    @staticmethod
    def backward(ctx, d_logps_N, d_entropies_N):
        hidden_NH, weight, bias, ids_N, mask_N, stats_2N, entropies_N = ctx.saved_tensors
        d_entropies_N = d_entropies_N if ctx.entropy else None  # a compiled graph gives the empty one a gradient
        if d_logps_N is None and d_entropies_N is None:
            return (None,) * 8
        wanted = list(ctx.needs_input_grad[:3])
        with torch.no_grad():
            d_logps_N = stats_2N.new_zeros(stats_2N.shape[1]) if d_logps_N is None else d_logps_N.contiguous()
            d_entropies_N = None if d_entropies_N is None else d_entropies_N.contiguous()
            gradients = linear_logp_backward(
                hidden_NH, weight, bias, ids_N, mask_N, stats_2N, entropies_N, d_logps_N, d_entropies_N,
                ctx.temperature, *ctx.settings, wanted,
            )  # fmt: skip
        found = (g if w else None for g, w in zip(gradients, wanted, strict=True))
        return first_order(*found, None, None, None, None, None)
