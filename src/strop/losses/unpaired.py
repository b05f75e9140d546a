"""Losses of single completions labelled desirable or not, as pure functions of log-probs (KTO and its variants).

With c = log π − log π_ref of a completion, s = 1 if it is desirable, else −1, and σ the sigmoid:

    kto                 σ(−s·(βc − β·KL))       KTO, arXiv 2402.01306: KL estimated on completions of other prompts
    bco                 −log σ(s·(βc − δ))      BCO, arXiv 2404.04656: δ the running mean of βc
    apo_zero_unpaired   σ(−s·βc)                APO, arXiv 2408.06266

Each is multiplied by the weight of its label; the loss is the mean over completions. β·KL or δ is the *shift*, the
baseline of a reward βc.

Shapes: B completions.
"""

import torch
from torch.nn.functional import logsigmoid

from strop._tensors import Count, as_divisor, check_floats, check_like, in_float
from strop.config.preference_losses import UnpairedRule


def unpaired_loss(
    rule: UnpairedRule,
    policy: torch.Tensor,
    ref: torch.Tensor,
    desirable: torch.Tensor,
    shift: torch.Tensor | float = 0.0,
    num_rows: Count | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the rewards βc [B], which have no gradient.

    policy, ref   [B] log-probs summed over each completion's tokens; only the policy's get a gradient
    desirable     [B] booleans
    shift         β·KL for kto, the mean of rewards for bco; without gradient
    num_rows      completions in the whole batch, of which this may be a part: micro-batch losses then add up
    """
    check_floats(policy, "policy")
    if policy.ndim != 1:
        raise ValueError(f"policy must have shape [B], found {list(policy.shape)}; sequence_logps sums tokens")
    check_like(ref, "ref", policy, "policy")
    if desirable.shape != policy.shape or desirable.dtype != torch.bool:
        raise ValueError(f"desirable must be {len(policy)} booleans, found {list(desirable.shape)} {desirable.dtype}")
    policy_B = in_float(policy)
    rewards_B = rule.beta * (policy_B - ref.detach().to(policy_B.dtype))
    sign_B = torch.where(desirable, 1.0, -1.0).to(policy_B.dtype)
    weight_B = torch.full_like(policy_B, rule.undesirable_weight).masked_fill(desirable, rule.desirable_weight)
    above_B = sign_B * (rewards_B - shift)
    losses_B = -logsigmoid(above_B) if rule.loss_type == "bco" else torch.sigmoid(-above_B)
    divisor = as_divisor(len(policy) if num_rows is None else num_rows, "num_rows", policy_B)
    return (weight_B * losses_B).sum() / divisor, rewards_B.detach()
