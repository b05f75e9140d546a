"""`logp` of an LM head's logits, from the hidden states.

Shapes: H hidden, V vocabulary; `[..]` any number of leading dimensions, usually [B, T].
"""

import torch
from torch.nn.functional import linear

from strop._tensors import check_linear_logp
from strop.ops.logp import logp
from strop.ops.registry import op


@op
def linear_logp(
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
    """`logp(hidden @ weightᵀ + bias, ids)` without ever holding [N, V]; every backend but this reference keeps that promise.

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
    if mask is not None:  # before the product: garbage under the mask may be NaN
        hidden = hidden.masked_fill(~mask[..., None], 0.0)
    return logp.reference(
        linear(hidden, weight, bias), ids, temperature=temperature, completion_mask=mask, entropy=entropy
    )
