"""Log-probs and losses from hidden states and an LM head, without checks and without the registry, for trainers.

The operators `linear_logp`, `linear_token_loss` and `linear_grpo_loss` are the public interface. They check their
arguments, choose a backend and call these functions. A trainer calls them directly, because its arguments were checked
when its config and its batch were made. The arithmetic is the same.

rows        the row functions to use: "torch" on any device, "triton" on a GPU, "exact" for batch-invariant sums
in_graph    True in a compiled graph and on the meta device: each computation is an operator of torch.ops.strop. Only the
            public operators set it

Shapes: N tokens, H hidden, V vocabulary.
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from strop.losses.rules import PolicyLoss, TokenRule, computed_loss
from strop.ops.chunks import (
    linear_logps,
    linear_logps_bwd,
    linear_logps_with_gradient,
    linear_policy_terms,
    logps_bwd_op,
    logps_op,
    logps_with_gradient_op,
    policy_terms_in_graph,
    whole_rows_fit,
)
from strop.ops.head import computed_in, first_order, in_dtype, sums_in
from strop.ops.rows import TokenValues, implementation

_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


class LMHead(NamedTuple):
    """Hidden states and the LM head. The logits are hidden_NH @ weight_VHᵀ + bias_V."""

    hidden_NH: torch.Tensor
    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None = None


def rows_for(hidden: torch.Tensor) -> str:
    """Return the name of the fastest row functions for these hidden states."""
    return "triton" if hidden.is_cuda and _TRITON_INSTALLED and hidden.dtype != torch.float64 else "torch"


# ---- log-probs ----


def logps_and_entropies(
    head: LMHead,
    ids_N: torch.Tensor,
    *,
    rows: str,
    mask_N: torch.Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    workspace: int | None = None,
    in_graph: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probs [N], and entropies [N] or None if not asked for."""
    given = *head, ids_N, mask_N, temperature
    dtype = computed_in(head.hidden_NH)
    settings = rows, workspace, dtype
    if not entropy and _only_hidden_learns(head):
        device, vocabulary = head.hidden_NH.device, len(head.weight_VH)
        if whole_rows_fit(device, vocabulary, dtype, rows, workspace):
            return _FrozenLinearLogp.apply(*given, settings, in_graph), None
    logps_N, entropies_N = _LinearLogp.apply(*given, entropy, settings, in_graph)
    return logps_N, entropies_N if entropy else None


def _only_hidden_learns(head: LMHead) -> bool:
    frozen = not head.weight_VH.requires_grad and (head.bias_V is None or not head.bias_V.requires_grad)
    return frozen and head.hidden_NH.requires_grad and torch.is_grad_enabled()


class _FrozenLinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight, bias, ids_N, mask_N, temperature, settings, in_graph):
        compute = logps_with_gradient_op if in_graph else linear_logps_with_gradient
        logps_N, gradient_NH = compute(hidden_NH, weight, bias, ids_N, mask_N, temperature, *settings)
        ctx.save_for_backward(gradient_NH, mask_N)
        ctx.set_materialize_grads(False)
        return logps_N

    @staticmethod
    def backward(ctx, d_logps_N):
        if d_logps_N is None:
            return (None,) * 8
        gradient_NH, mask_N = ctx.saved_tensors
        with torch.no_grad():
            if mask_N is not None:
                d_logps_N = torch.where(mask_N, d_logps_N, 0.0)
            d_hidden_NH = (gradient_NH * d_logps_N[:, None]).to(gradient_NH.dtype)
        return first_order(d_hidden_NH, None, None, None, None, None, None, None)


class _LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight, bias, ids_N, mask_N, temperature, entropy, settings, in_graph):
        compute = logps_op if in_graph else linear_logps
        logps_N, stats_2N, entropies_N = compute(
            hidden_NH, weight, bias, ids_N, mask_N, temperature, entropy, *settings
        )
        ctx.save_for_backward(hidden_NH, weight, bias, ids_N, mask_N, stats_2N, entropies_N)
        ctx.temperature, ctx.entropy, ctx.settings, ctx.in_graph = temperature, entropy, settings, in_graph
        ctx.set_materialize_grads(False)
        return logps_N, entropies_N

    @staticmethod
    def backward(ctx, d_logps_N, d_entropies_N):
        hidden_NH, weight, bias, ids_N, mask_N, stats_2N, entropies_N = ctx.saved_tensors
        d_entropies_N = d_entropies_N if ctx.entropy else None  # a compiled graph passes one for the empty tensor
        if d_logps_N is None and d_entropies_N is None:
            return (None,) * 9
        wanted, (rows, workspace, dtype) = list(ctx.needs_input_grad[:3]), ctx.settings
        with torch.no_grad():
            d_logps_N = stats_2N.new_zeros(stats_2N.shape[1]) if d_logps_N is None else d_logps_N.contiguous()
            d_entropies_N = None if d_entropies_N is None else d_entropies_N.contiguous()
            compute = logps_bwd_op if ctx.in_graph else linear_logps_bwd
            gradients = compute(
                hidden_NH, weight, bias, ids_N, mask_N, stats_2N, entropies_N, d_logps_N, d_entropies_N,
                ctx.temperature, rows, workspace, dtype, wanted,
            )  # fmt: skip
        found = (g if w else None for g, w in zip(gradients, wanted, strict=True))
        return first_order(*found, None, None, None, None, None, None)


# ---- losses: three products, two with a frozen head, because the forward computes the gradients ----


def token_loss(
    head: LMHead,
    ids_N: torch.Tensor,
    weights_N: torch.Tensor,
    rule: TokenRule,
    *,
    rows: str,
    old_logps_N: torch.Tensor | None = None,
    ref_logps_N: torch.Tensor | None = None,
    advantages_N: torch.Tensor | None = None,
    temperature: float = 1.0,
    workspace: int | None = None,
    in_graph: bool = False,
) -> PolicyLoss:
    """Return Σ weight·(token loss + beta·kl) over all tokens. A token's loss must need only its own row of logits."""
    dtype = computed_in(head.hidden_NH)
    weights_N, old_N, ref_N, advantages_N = in_dtype(sums_in(dtype), weights_N, old_logps_N, ref_logps_N, advantages_N)
    advantages_or_weights_N = weights_N if advantages_N is None else advantages_N  # NLL ignores advantages
    values = TokenValues(ids_N, None, old_N, ref_N, advantages_or_weights_N, weights_N)
    run = policy_terms_in_graph if in_graph else linear_policy_terms
    settings = values, temperature, rule, rows, workspace, dtype
    results = with_gradients(run, head, settings, rows=rows, name="linear_token_loss")
    return computed_loss(rule, results, old_N, advantages_N, ref_N)


# ---- functions that compute their gradients in the forward ----


Run = Callable[..., tuple[tuple[torch.Tensor, ...], Sequence[torch.Tensor | None]]]


def with_gradients(
    run: Run, inputs: Sequence[torch.Tensor | None], settings: tuple[object, ...], *, rows: str, name: str
) -> tuple[torch.Tensor, ...]:
    """Return the results of `run(*inputs, *settings, wanted)`; the first one is differentiable in the inputs.

    run    returns the results and the gradients of the first; `wanted` has a flag per input
    rows   the row functions that scale the gradients if the incoming gradient is not 1
    name   the operator's name, for errors
    """
    wanted = [torch.is_grad_enabled() and one is not None and one.requires_grad for one in inputs]
    return _WithGradients.apply(run, settings, wanted, rows, name, *inputs)


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, settings, wanted, rows, name, *inputs):
        results, gradients = run(*inputs, *settings, wanted)
        ctx.wanted, ctx.rows, ctx.name, ctx.gradients = wanted, rows, name, None
        if any(wanted):
            if torch.compiler.is_compiling():  # a graph saves only tensors and manages their memory itself
                ctx.save_for_backward(*gradients)
            else:
                ctx.gradients = gradients
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)  # no zero gradients for the other results
        return tuple(results)

    @staticmethod
    def backward(ctx, d_first, *_):
        if torch.compiler.is_compiling():
            gradients = [gradient * d_first for gradient in ctx.saved_tensors]
        elif ctx.gradients is None:
            raise RuntimeError(
                f"backward of {ctx.name} can run once: its gradient was made in the forward and has been handed out; "
                "call it again for another backward"
            )
        else:
            gradients, ctx.gradients = ctx.gradients, None
            if d_first.device.type != "cpu" or d_first != 1:  # reading a GPU scalar would wait for the device
                with torch.no_grad():
                    for gradient in gradients:
                        implementation(ctx.rows).scale_(gradient, d_first)
        found = (gradient if wanted else None for gradient, wanted in zip(gradients, ctx.wanted, strict=True))
        return first_order(None, None, None, None, None, *found)
