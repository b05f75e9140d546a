"""The log-probability a model gives to chosen tokens: the primitive of every loss.

Shapes: V the vocabulary; `[..]` any number of leading dimensions, usually [B, T].
"""

import torch

from strop._tensors import can_look, check_logp
from strop.ops.registry import op


@op
def logp(
    logits: torch.Tensor,
    ids: torch.Tensor,
    *,
    temperature: float = 1.0,
    completion_mask: torch.Tensor | None = None,
    entropy: bool = False,
    in_place: bool = False,
    validate: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits / temperature)[ids], and optionally that distribution's entropy; both differentiable.

    logits            [.., V] float32, bfloat16 or float16 (computed in float32), or float64 (computed in float64)
    ids               [..] int64 or int32
    completion_mask   [..] tokens that count; elsewhere the result is 0 without gradient, whatever stands there
    entropy           also return −Σ p·log p, [..]
    in_place          the gradient may overwrite the logits, which nobody may read after backward; saves their size in memory
    validate          raise for an id outside the vocabulary on a GPU too (it waits for the device)

    returns           [..] float32 (float64 for float64); with entropy=True a pair

    A logit of −inf bans its token. An id outside the vocabulary that counts is a ValueError on the CPU and NaN on a GPU.
    Gradient, with p = softmax(logits / temperature):
        d logp / d logits = (onehot(id) − p) / temperature
        d H / d logits    = −p·(log p + H) / temperature
    """
    mask = check_logp(logits, ids, temperature, completion_mask, validate)
    if mask is not None and can_look(mask) and mask.all():
        mask = None  # every token counts, which spares a copy of the logits
    in_range = (ids >= 0) & (ids < logits.shape[-1])
    x = logits if logits.dtype == torch.float64 else logits.float()
    if mask is not None:  # before any arithmetic: garbage under the mask may be NaN
        x = x.masked_fill(~mask[..., None], 0.0)
    log_probs = (x if temperature == 1 else x / temperature).log_softmax(-1)
    picked = log_probs.gather(-1, torch.where(in_range, ids, 0).long()[..., None]).squeeze(-1)
    logps = picked * torch.where(in_range, 1.0, torch.nan)  # NaN, and so is its gradient
    if mask is not None:
        logps = logps.masked_fill(~mask, 0.0)
    if not entropy:
        return logps
    # a banned token has p = 0 and contributes 0, not 0·(−inf)
    entropies = -(log_probs.exp() * log_probs.masked_fill(log_probs == -torch.inf, 0.0)).sum(-1)
    return logps, entropies if mask is None else entropies.masked_fill(~mask, 0.0)
