"""`logp` of an LM head's logits, from the hidden states.

By chunks, scoring takes one product. Gradients take three more, of which the first makes the logits again; with a frozen
head it is two in all, in the forward, where the workspace has room for rows of logits.

Shapes: H hidden, V vocabulary; `[..]` any number of leading dimensions, usually [B, T].
"""

import torch

from strop._tensors import check_linear_logp
from strop.ops.linear import LMHead, logps_and_entropies
from strop.ops.logp import Logps, Scores, logp_torch
from strop.ops.registry import op_with_backends

BY_ROWS = {"chunked": "torch", "triton": "triton"}  # backend → which row functions compute; the reference needs none
BY_EXACT_ROWS = {"chunked": "torch", "exact": "exact", "triton": "triton"}


def head_logps(
    rows: str | None,
    head: LMHead,
    ids: torch.Tensor,
    mask: torch.Tensor | None,
    temperature: float,
    workspace: int | None,
    entropy: bool = False,
) -> Scores:
    """Return log-probs and entropies, [..]. The arguments are checked. rows: None is the definition, with all logits."""
    hidden, weight, bias = head
    if rows is None:
        if mask is not None:  # before the product: garbage under the mask may be NaN
            hidden = hidden.masked_fill(~mask[..., None], 0.0)
        return logp_torch(torch.nn.functional.linear(hidden, weight, bias), ids, mask, temperature, entropy)
    logps_N, entropies_N = logps_and_entropies(
        LMHead(hidden.reshape(-1, hidden.shape[-1]), weight, bias), ids.reshape(-1), rows=rows,
        mask_N=None if mask is None else mask.reshape(-1), temperature=float(temperature), entropy=entropy,
        workspace=workspace,
    )  # fmt: skip
    return logps_N.view(ids.shape), None if entropies_N is None else entropies_N.view(ids.shape)


@op_with_backends(torch=None, **BY_EXACT_ROWS)
def linear_logp(
    rows,
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
) -> Logps:
    """`logp(hidden @ weightᵀ + bias, ids)` without ever holding [N, V]; every backend but the reference keeps that promise.

    hidden            [.., H] float32, bfloat16, float16, or float64
    weight, bias      [V, H] and [V] of the LM head, of hidden's dtype (any under autocast); tied or frozen heads too
    ids               [..] int64 or int32
    completion_mask   [..] tokens that count; the others are dropped first and give 0 without gradient
    entropy           also return the entropy, [..]
    workspace         bytes of working memory; by default 60 MiB to score, 560 MiB (64 MiB on a CPU) for gradients
    validate          raise for an id outside the vocabulary on a GPU too

    returns           [..] float32 (float64 for float64); with entropy=True a pair

    Gradient, with g that of the logits as in `logp`:
        d hidden = g @ weight        d weight = gᵀ @ hidden        d bias = Σ g
    Under autocast the products are in its dtype, as those of torch.nn.functional.linear would be.
    """
    mask = check_linear_logp(hidden, weight, ids, bias, temperature, completion_mask, workspace, validate)
    logps, entropies = head_logps(rows, LMHead(hidden, weight, bias), ids, mask, temperature, workspace, entropy)
    return logps if entropies is None else (logps, entropies)
