"""`linear_logp` by chunks (see `strop.ops.chunks`): "chunked" with torch's row functions on any device, "triton" with the
row kernels. One product to score; three more for the gradients, of which the first makes the logits again. With a frozen head
two in all, in the forward, where the workspace has room for rows of logits.
"""

from typing import Any

import torch

from strop._tensors import autocast_on
from strop.ops.autograd import first_order
from strop.ops.chunks import linear_logps, linear_logps_bwd, linear_logps_with_gradient, whole_rows_fit
from strop.ops.head import Head, Wanted, sums_in
from strop.ops.library import library_op
from strop.ops.linear_logp.reference import check_linear_logp, linear_logp
from strop.ops.rows import implementation, on_gpu, on_gpu_or_interpreted


@linear_logp.backend("chunked")
def linear_logp_chunked(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, **options: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    return _linear_logp("torch", hidden, weight, ids, **options)


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
    rows_fit = whole_rows_fit(hidden.device, weight.shape[0], dtype, rows, workspace)
    if rows_fit and not entropy and _only_hidden_learns(hidden, weight, bias):
        return _FrozenLinearLogp.apply(*given, settings).view(ids.shape)
    logps_N, entropies_N = _LinearLogp.apply(*given, entropy, settings)
    logps = logps_N.view(ids.shape)
    return (logps, entropies_N.view(ids.shape)) if entropy else logps


def _only_hidden_learns(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    frozen = not weight.requires_grad and (bias is None or not bias.requires_grad)
    return frozen and hidden.requires_grad and torch.is_grad_enabled()


def computed_in(hidden: torch.Tensor) -> torch.dtype:
    """The dtype of the products: autocast's, where it is on."""
    if autocast_on(hidden) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype


def head_in(dtype: torch.dtype, weight: torch.Tensor, bias: torch.Tensor | None) -> Head:
    return Head(weight.to(dtype), None if bias is None else bias.to(dtype))


class _FrozenLinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight, bias, ids_N, mask_N, temperature, settings):
        logps_N, gradient_NH = linear_logp_with_gradient(hidden_NH, weight, bias, ids_N, mask_N, temperature, *settings)
        ctx.save_for_backward(gradient_NH, mask_N)
        ctx.set_materialize_grads(False)
        return logps_N

    @staticmethod
    @first_order
    def backward(ctx, d_logps_N):
        if d_logps_N is None:
            return (None,) * 7
        gradient_NH, mask_N = ctx.saved_tensors
        if mask_N is not None:
            d_logps_N = torch.where(mask_N, d_logps_N, 0.0)
        d_hidden_NH = (gradient_NH * d_logps_N[:, None]).to(gradient_NH.dtype)
        return d_hidden_NH, None, None, None, None, None, None


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
    @first_order
    def backward(ctx, d_logps_N, d_entropies_N):
        hidden_NH, weight, bias, ids_N, mask_N, stats_2N, entropies_N = ctx.saved_tensors
        d_entropies_N = d_entropies_N if ctx.entropy else None  # a compiled graph gives the empty one a gradient
        if d_logps_N is None and d_entropies_N is None:
            return (None,) * 8
        d_logps_N = stats_2N.new_zeros(stats_2N.shape[1]) if d_logps_N is None else d_logps_N.contiguous()
        d_entropies_N = None if d_entropies_N is None else d_entropies_N.contiguous()
        wanted = list(ctx.needs_input_grad[:3])
        gradients = linear_logp_backward(
            hidden_NH, weight, bias, ids_N, mask_N, stats_2N, entropies_N, d_logps_N, d_entropies_N,
            ctx.temperature, *ctx.settings, wanted,
        )  # fmt: skip
        return (*(g if w else None for g, w in zip(gradients, wanted, strict=True)), None, None, None, None, None)


def _fake_forward(hidden_NH, weight, bias, ids_N, mask_N, temperature, entropy, rows, workspace, dtype):
    N = ids_N.shape[0]
    sizes = (N,), (2, N), (N if entropy else 0,)
    return tuple(hidden_NH.new_empty(size, dtype=sums_in(dtype)) for size in sizes)


@library_op(
    "linear_logp(Tensor hidden, Tensor weight, Tensor? bias, Tensor ids, Tensor? mask, float temperature, bool entropy, "
    "str rows, int? workspace, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    _fake_forward,
)
def linear_logp_forward(hidden_NH, weight, bias, ids_N, mask_N, temperature, entropy, rows, workspace, dtype):
    head = head_in(dtype, weight, bias)
    return linear_logps(hidden_NH, head, ids_N, mask_N, temperature, entropy, implementation(rows), workspace)


def _fake_with_gradient(hidden_NH, weight, bias, ids_N, mask_N, temperature, rows, workspace, dtype):
    return hidden_NH.new_empty(ids_N.shape, dtype=sums_in(dtype)), hidden_NH.new_empty(hidden_NH.shape)


@library_op(
    "linear_logp_with_gradient(Tensor hidden, Tensor weight, Tensor? bias, Tensor ids, Tensor? mask, float temperature, "
    "str rows, int? workspace, ScalarType dtype) -> (Tensor, Tensor)",
    _fake_with_gradient,
)
def linear_logp_with_gradient(hidden_NH, weight, bias, ids_N, mask_N, temperature, rows, workspace, dtype):
    head = head_in(dtype, weight, bias)
    return linear_logps_with_gradient(hidden_NH, head, ids_N, mask_N, temperature, implementation(rows), workspace)


def fake_gradients(hidden_NH, weight, bias, dtype, wanted):
    """As `strop.ops.chunks` makes them: those not asked for are empty, the weight's in the dtype of the products."""
    return (
        hidden_NH.new_empty(hidden_NH.shape if wanted[0] else 0),
        weight.new_empty(weight.shape) if wanted[1] else weight.new_empty(0, dtype=dtype),
        (weight if bias is None else bias).new_empty(bias.shape if wanted[2] else 0),
    )


@library_op(
    "linear_logp_backward(Tensor hidden, Tensor weight, Tensor? bias, Tensor ids, Tensor? mask, Tensor stats, "
    "Tensor entropies, Tensor d_logps, Tensor? d_entropies, float temperature, str rows, int? workspace, "
    "ScalarType dtype, bool[] wanted) -> (Tensor, Tensor, Tensor)",
    lambda hidden_NH, weight, bias, *rest: fake_gradients(hidden_NH, weight, bias, *rest[-2:]),
)
def linear_logp_backward(
    hidden_NH, weight, bias, ids_N, mask_N, stats_2N, entropies_N, d_logps_N, d_entropies_N, temperature, rows,
    workspace, dtype, wanted,
):  # fmt: skip
    head = head_in(dtype, weight, bias)
    gradients = linear_logps_bwd(
        hidden_NH, head, ids_N, mask_N, stats_2N, entropies_N, d_logps_N, d_entropies_N, temperature,
        implementation(rows), workspace, Wanted(wanted[0], wanted[1], wanted[2], weight.dtype),
    )  # fmt: skip
    return gradients.hidden_NH, gradients.weight_VH, gradients.bias_V.to(weight.dtype if bias is None else bias.dtype)
