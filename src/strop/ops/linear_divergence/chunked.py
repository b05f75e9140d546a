"""`linear_divergence` by chunks of tokens: "chunked" with torch's row functions on any device, "triton" with a row kernel.

The logits of some tokens, of student and teacher, lie in a working memory of fixed size; the row function leaves the
gradient in the student's place. Four products in all, three with a frozen head: the gradients are made in the forward.
"""

import torch

from strop._tensors import computed_in, in_dtype, sums_in
from strop.ops.chunks import fake_gradients, train_workspace
from strop.ops.head import (
    ALL,
    TOKENS_MULTIPLE,
    CountedTokens,
    Head,
    Wanted,
    add_product,
    cut,
    empty_gradients,
    narrowed,
    no_view,
    product,
)
from strop.ops.library import first_order, keep_gradients, kept_gradients, library_op
from strop.ops.linear_divergence.reference import DivergenceLoss, check_linear_divergence, linear_divergence
from strop.ops.registry import on_gpu, on_gpu_or_interpreted
from strop.ops.rows import implementation


@linear_divergence.backend("chunked")
def linear_divergence_chunked(hidden, weight, teacher_hidden, teacher_weight, weights, **options) -> DivergenceLoss:
    return _linear_divergence("torch", hidden, weight, teacher_hidden, teacher_weight, weights, **options)


@linear_divergence.backend("triton", when=on_gpu, by_name=on_gpu_or_interpreted)
def linear_divergence_triton(hidden, weight, teacher_hidden, teacher_weight, weights, **options) -> DivergenceLoss:
    return _linear_divergence("triton", hidden, weight, teacher_hidden, teacher_weight, weights, **options)


def _linear_divergence(
    rows: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    weights: torch.Tensor,
    *,
    beta: float = 1.0,
    bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    workspace: int | None = None,
) -> DivergenceLoss:
    head, teacher = (hidden, weight, bias), (teacher_hidden, teacher_weight, teacher_bias)
    check_linear_divergence(head, teacher, weights, beta, temperature, workspace)
    (weights_n,) = in_dtype(sums_in(computed_in(hidden)), weights)
    wanted = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in head]
    frozen = [None if x is None else x.detach() for x in teacher]
    settings = float(beta), float(temperature), rows, workspace, computed_in(hidden), computed_in(teacher_hidden)
    return DivergenceLoss(*_LinearDivergence.apply(*head, frozen, weights_n, settings, wanted))


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight, bias, teacher, weights_N, settings, wanted):
        loss, found_N, *gradients = divergence_terms(hidden_NH, weight, bias, *teacher, weights_N, *settings, wanted)
        ctx.wanted, ctx.rows = wanted, settings[2]
        if any(wanted):
            keep_gradients(ctx, "linear_divergence", *gradients)
        ctx.mark_non_differentiable(found_N)
        ctx.set_materialize_grads(False)
        return loss, found_N

    @staticmethod
    def backward(ctx, d_loss, _found):
        with torch.no_grad():
            gradients = kept_gradients(ctx, d_loss, lambda *given: implementation(ctx.rows).scale_(*given))
        found = (g if w else None for g, w in zip(gradients, ctx.wanted, strict=True))
        return first_order(*found, None, None, None, None)


def _fake(hidden_NH, weight, bias, *rest):
    dtype, wanted = rest[-3], rest[-1]
    make = hidden_NH.new_empty
    sums = sums_in(dtype)
    return (
        make((), dtype=sums),
        make(len(hidden_NH), dtype=sums),
        *fake_gradients(hidden_NH, weight, bias, dtype, wanted),
    )


@library_op(
    "linear_divergence(Tensor hidden, Tensor weight, Tensor? bias, Tensor teacher_hidden, Tensor teacher_weight, "
    "Tensor? teacher_bias, Tensor weights, float beta, float temperature, str rows, int? workspace, ScalarType dtype, "
    "ScalarType teacher_dtype, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake,
)
def divergence_terms(
    hidden_NH, weight, bias, teacher_hidden_NG, teacher_weight, teacher_bias, weights_N, beta, temperature, rows,
    workspace, dtype, teacher_dtype, wanted,
):  # fmt: skip
    """The loss, the divergences [N], and the gradients of hidden states, weight and bias."""
    module, head = implementation(rows), Head.of(dtype, weight, bias)
    teacher = Head.of(teacher_dtype, teacher_weight, teacher_bias)
    tokens, teacher_tokens = (
        CountedTokens(hidden_NH, None, dtype, module),
        CountedTokens(teacher_hidden_NG, None, teacher_dtype, module),
    )
    sums = sums_in(dtype)
    most = train_workspace(hidden_NH.device, workspace) // (head.V * module.divergence_bytes(dtype, teacher_dtype))
    parts = cut(tokens.count, max(most, 1), TOKENS_MULTIPLE)
    size = max((part.stop - part.start for part in parts), default=0) * head.V
    memory, teacher_memory = tokens.workspace(size), teacher_tokens.workspace(size)
    # over several chunks the weight's gradient is summed in float32, whatever its own dtype
    weight_dtype = sums if len(parts) > 1 else weight.dtype
    grads = empty_gradients(tokens, head, Wanted(wanted[0], wanted[1], wanted[2], weight_dtype))
    found_N = hidden_NH.new_empty(tokens.count, dtype=sums)
    for part in parts:
        hidden_nH = tokens.hidden(part)
        logits_nV = head.logits(hidden_nH, ALL, memory)
        teacher_nV = teacher.logits(teacher_tokens.hidden(part), ALL, teacher_memory)
        found_N[part] = module.divergence(logits_nV, teacher_nV, weights_N[part], beta, temperature, any(wanted))
        if wanted[0]:
            tokens.put_product(logits_nV, head.weight_VH, None, part, grads.hidden_NH)
        if wanted[1]:
            (add_product if part.start else product)(logits_nV.T, hidden_nH, grads.weight_VH)
        if wanted[2]:
            grads.bias_V.add_(logits_nV.sum(0, dtype=sums))
    d_bias = grads.bias_V.to(weight.dtype if bias is None else bias.dtype)
    d_weight = no_view(narrowed(grads.weight_VH, weight.dtype)) if wanted[1] else grads.weight_VH
    return (weights_N * found_N).sum(), found_N, grads.hidden_NH, d_weight, d_bias
