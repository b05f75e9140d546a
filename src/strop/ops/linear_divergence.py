"""The divergence of a student from a teacher, from the hidden states and LM heads of both: the loss of distillation.

The tokens are processed in chunks. The logits of a chunk, of student and teacher, are written into a working memory of
fixed size, and the row function overwrites the student's with their gradient. There are four products, three with a
frozen head, because the forward computes the gradients.

Shapes: n tokens, H hidden size of the student, G of the teacher, V the vocabulary.
"""

from typing import NamedTuple

import torch

from strop._checks import check_number
from strop._tensors import (
    check_device,
    check_floats,
    check_head,
    check_shape,
    check_temperature,
    check_workspace,
)
from strop.losses.divergence import divergence
from strop.ops.chunks import fake_gradients, train_workspace
from strop.ops.head import (
    TOKENS_MULTIPLE,
    CountedTokens,
    Head,
    LogitChunks,
    Wanted,
    add_product,
    computed_in,
    cut,
    empty_gradients,
    in_dtype,
    narrowed,
    no_view,
    product,
    sums_in,
)
from strop.ops.library import library_op
from strop.ops.linear import LMHead, with_gradients
from strop.ops.linear_logp import BY_ROWS
from strop.ops.registry import op_with_backends
from strop.ops.rows import implementation


class DivergenceLoss(NamedTuple):
    """The loss Σ weight·divergence, 0-d, and the divergence of each token, [n], without gradient."""

    loss: torch.Tensor
    divergences: torch.Tensor


@op_with_backends(torch=None, **BY_ROWS)
def linear_divergence(
    rows,
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
    """Return Σ weight·D(student, teacher) over tokens; only the reference backend allocates the logits [n, V].

    hidden           [n, H] the student's hidden states that predict the tokens
    weight, bias     [V, H] and [V] of its LM head, in hidden's dtype (any under autocast); may be tied or frozen
    teacher_hidden   [n, G] the teacher's states of the same tokens, with teacher_weight [V, G] and teacher_bias [V]
    weights          [n] the weight of each token in the loss
    beta             1 is the reverse KL, 0 the forward KL, between them GKD's generalised Jensen–Shannon divergence
    temperature      divides the logits of student and teacher
    workspace        bytes of working memory; by default 560 MiB, 64 MiB on a CPU

    returns          `DivergenceLoss`. Only the loss has a gradient, to hidden, weight and bias
    """
    head, teacher = LMHead(hidden, weight, bias), LMHead(teacher_hidden, teacher_weight, teacher_bias)
    _check(head, teacher, weights)
    check_number(beta, "beta", 0, 1)
    check_temperature(temperature)
    check_workspace(workspace)
    (weights_n,) = in_dtype(sums_in(computed_in(hidden)), weights)
    if rows is None:
        log_p_nV, log_q_nV = (_log_probs(one, temperature) for one in (head, teacher))
        found_n = divergence(log_p_nV, log_q_nV.detach().to(log_p_nV.dtype), beta)
        return DivergenceLoss((weights_n * found_n).sum(), found_n.detach())
    frozen = [None if one is None else one.detach() for one in teacher]
    dtypes = computed_in(hidden), computed_in(teacher_hidden)
    settings = *frozen, weights_n, float(beta), float(temperature), rows, workspace, *dtypes
    return DivergenceLoss(*with_gradients(_terms_and_gradients, head, settings, rows=rows, name="linear_divergence"))


def _log_probs(head: LMHead, temperature: float) -> torch.Tensor:
    logits_nV = torch.nn.functional.linear(*head)
    return torch.log_softmax(logits_nV.to(sums_in(computed_in(head.hidden_NH))) / temperature, -1)


def _check(head: LMHead, teacher: LMHead, weights: torch.Tensor) -> None:
    """Raise unless the shapes and dtypes of student, teacher and weights match."""
    hidden, weight, _ = head
    check_head(*head)
    if hidden.ndim != 2:
        raise ValueError(f"hidden must have shape [n, H], found {list(hidden.shape)}")
    check_head(*teacher, prefix="teacher_")
    check_device(teacher.hidden_NH, "teacher_hidden", hidden, "hidden")
    check_shape(teacher.hidden_NH, "teacher_hidden", (hidden.shape[0], teacher.hidden_NH.shape[-1]))
    if len(teacher.weight_VH) != len(weight):
        raise ValueError(
            f"teacher_weight must have the vocabulary of weight, {len(weight)} tokens, found {len(teacher.weight_VH)}"
        )
    check_floats(weights, "weights")
    check_shape(weights, "weights", hidden.shape[:1])
    check_device(weights, "weights", hidden, "hidden")


def _terms_and_gradients(*given):
    loss, found_N, *gradients = divergence_terms(*given)
    return (loss, found_N), gradients


def _fake(hidden_NH, weight, bias, *rest):
    dtype, wanted = rest[-3], rest[-1]
    made = (hidden_NH.new_empty(size, dtype=sums_in(dtype)) for size in ((), len(hidden_NH)))
    return *made, *fake_gradients(hidden_NH, weight, bias, dtype, wanted)


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
    """Return the loss, the divergences [N], and the gradients of hidden states, weight and bias."""
    module, head = implementation(rows), Head.of(dtype, weight, bias)
    teacher = Head.of(teacher_dtype, teacher_weight, teacher_bias)
    tokens = CountedTokens(hidden_NH, None, dtype, module)
    teacher_tokens = CountedTokens(teacher_hidden_NG, None, teacher_dtype, module)
    most = train_workspace(hidden_NH.device, workspace) // (head.V * module.divergence_bytes(dtype, teacher_dtype))
    n = max((part.stop - part.start for part in cut(tokens.count, max(most, 1), TOKENS_MULTIPLE)), default=0)
    chunks, teacher_chunks = LogitChunks(tokens, head, n), LogitChunks(teacher_tokens, teacher, n)
    # with several chunks, sum the weight's gradient in float32 whatever its dtype
    weight_dtype = sums_in(dtype) if len(chunks.parts) > 1 else weight.dtype
    grads = empty_gradients(tokens, head, Wanted._make((*wanted, weight_dtype)))
    found_N = hidden_NH.new_empty(tokens.count, dtype=sums_in(dtype))
    for (part, hidden_nH, logits_nV), (_, _, teacher_nV) in zip(chunks, teacher_chunks, strict=True):
        found_N[part] = module.divergence(logits_nV, teacher_nV, weights_N[part], beta, temperature, any(wanted))
        if wanted[0]:
            tokens.put_product(logits_nV, head.weight_VH, None, part, grads.hidden_NH)
        if wanted[1]:
            (add_product if part.start else product)(logits_nV.T, hidden_nH, grads.weight_VH)
        if wanted[2]:
            grads.bias_V.add_(logits_nV.sum(0, dtype=sums_in(dtype)))
    d_bias = grads.bias_V.to(weight.dtype if bias is None else bias.dtype)
    d_weight = no_view(narrowed(grads.weight_VH, weight.dtype)) if wanted[1] else grads.weight_VH
    return (weights_N * found_N).sum(), found_N, grads.hidden_NH, d_weight, d_bias
