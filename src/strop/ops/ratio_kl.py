"""The importance ratio of sampled tokens and their KL to a reference, from logits.

Shapes: `[..]` any number of leading dimensions, usually [B, T]; V the vocabulary.
"""

import torch

from strop._tensors import check_like, check_logits, check_logp
from strop.losses import kl_estimate
from strop.ops.logp import logp_kernels, logp_torch
from strop.ops.registry import op_with_backends


@op_with_backends(torch=logp_torch, triton=logp_kernels)
def ratio_kl(
    logp_by,
    policy_logits: torch.Tensor,
    ref_logits: torch.Tensor,
    action_ids: torch.Tensor,
    completion_mask: torch.Tensor | None,
    old_logps: torch.Tensor,
    *,
    temperature: float = 1.0,
    in_place: bool = False,
    validate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ratio = exp(logp − old_logps) and kl = exp(d) − d − 1, d = logp_ref − logp, for each token.

    policy_logits     [.., V]; the only argument that gets a gradient
    ref_logits        [.., V] of the reference
    action_ids        [..] int64 or int32
    completion_mask   [..] tokens to compute, None for all; elsewhere ratio 1, kl 0 and no gradient, whatever the values
    old_logps         [..] of the policy that sampled
    in_place          let the gradient overwrite policy_logits; do not read them after backward

    returns           (ratio, kl), [..] float32 (float64 for float64)

    d ratio / d logp = ratio,  d kl / d logp = 1 − exp(d),  and d logp / d logits as in `logp`.
    """
    names = "policy_logits", "action_ids"
    mask = check_logp(policy_logits, action_ids, temperature, completion_mask, validate, names=names)
    check_logits(ref_logits, "ref_logits")
    check_like(ref_logits, "ref_logits", policy_logits, "policy_logits")
    check_like(old_logps, "old_logps", action_ids, "action_ids")
    logps, _ = logp_by(policy_logits, action_ids, mask, temperature, in_place=in_place)
    with torch.no_grad():
        ref_logps = logp_by(ref_logits, action_ids, mask, temperature)[0].to(logps.dtype)
        old_logps = old_logps.to(logps.dtype)
        if mask is not None:
            old_logps = old_logps.masked_fill(~mask, 0.0)  # logp is 0 there too: ratio 1 and no NaN gradient
    return (logps - old_logps).exp(), kl_estimate(logps, ref_logps)
