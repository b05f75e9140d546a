"""`logp` of an LM head's logits, from the hidden states.

In chunks, scoring takes one product. The backward takes three more, the first of which recomputes the logits. With a
frozen head, and a workspace large enough for whole rows of logits, two products in the forward are enough.

Shapes: H hidden, V vocabulary; `[..]` any number of leading dimensions, usually [B, T].
"""

import torch

from strop._tensors import check_linear_logp
from strop.ops.library import is_plain
from strop.ops.linear import LMHead, logps_and_entropies
from strop.ops.logp import Logps, Scores, logp_torch
from strop.ops.registry import op_with_backends

BY_ROWS = {"chunked": "torch", "triton": "triton"}  # backend → its row functions; the reference needs none
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
    """Return log-probs and entropies, [..], of checked arguments. rows=None computes all logits, as the reference."""
    hidden, weight, bias = head
    if rows is None:
        if mask is not None:  # before the product: masked values may be NaN
            hidden = hidden.masked_fill(~mask[..., None], 0.0)
        return logp_torch(torch.nn.functional.linear(hidden, weight, bias), ids, mask, temperature, entropy)
    logps_N, entropies_N = logps_and_entropies(
        LMHead(hidden.reshape(-1, hidden.shape[-1]), weight, bias), ids.reshape(-1), rows=rows,
        mask_N=None if mask is None else mask.reshape(-1), temperature=float(temperature), entropy=entropy,
        workspace=workspace, in_graph=not is_plain(hidden),
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
    """Return `logp(hidden @ weightᵀ + bias, ids)`; only the reference backend allocates the logits [N, V].

    hidden            [.., H] float32, bfloat16, float16, or float64
    weight, bias      [V, H] and [V] of the LM head, in hidden's dtype (any under autocast); may be tied or frozen
    ids               [..] int64 or int32
    completion_mask   [..] tokens to score; the others are dropped first, and their result is 0 without gradient
    entropy           also return the entropy, [..]
    workspace         bytes of working memory; by default 60 MiB to score, 560 MiB (64 MiB on a CPU) for gradients
    validate          check ids against the vocabulary on a GPU too

    returns           [..] float32 (float64 for float64); with entropy=True the pair (log-probs, entropies)

    Gradient, where g is the logits' gradient as in `logp`:
        d hidden = g @ weight        d weight = gᵀ @ hidden        d bias = Σ g
    Under autocast the products run in its dtype, as in torch.nn.functional.linear.
    """
    mask = check_linear_logp(hidden, weight, ids, bias, temperature, completion_mask, workspace, validate)
    logps, entropies = head_logps(rows, LMHead(hidden, weight, bias), ids, mask, temperature, workspace, entropy)
    return logps if entropies is None else (logps, entropies)
