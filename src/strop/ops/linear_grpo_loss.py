"""The loss of GRPO and its variants from hidden states and the LM head: `linear_token_loss` for masked [B, T] rows.

Shapes: B sequences, T completion tokens, H hidden, V the vocabulary.
"""

from collections.abc import Sequence
from typing import Unpack

import torch

from strop._tensors import (
    Count,
    check_device,
    check_head,
    check_linear_logp,
    check_shape,
)
from strop.losses import PolicyLoss, PolicyRule
from strop.losses.rules import PolicyOptions, computed_loss
from strop.ops.chunks import linear_policy_terms, policy_terms_in_graph
from strop.ops.head import computed_in, sums_in
from strop.ops.library import is_plain
from strop.ops.linear import LMHead, with_gradients
from strop.ops.linear_logp import BY_ROWS, head_logps
from strop.ops.policy import PolicyBatch, coefficients, composed, token_coefficients
from strop.ops.registry import op_with_backends
from strop.ops.rows import TokenValues


@op_with_backends(torch=None, **BY_ROWS)
def linear_grpo_loss(
    rows,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    action_ids: torch.Tensor,
    old_logps: torch.Tensor | None,
    rewards: torch.Tensor | None,
    completion_mask: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ref_hidden: torch.Tensor | None = None,
    ref_weight: torch.Tensor | None = None,
    ref_bias: torch.Tensor | None = None,
    ref_logps: torch.Tensor | None = None,
    samples_per_prompt: int | None = None,
    group_boundaries: torch.Tensor | Sequence[int] | None = None,
    advantages: torch.Tensor | None = None,
    temperature: float = 1.0,
    num_tokens: Count | None = None,
    num_sequences: Count | None = None,
    workspace: int | None = None,
    validate: bool = False,
    **rule_options: Unpack[PolicyOptions],
) -> PolicyLoss:
    """Return `grpo_loss` of hidden @ weightᵀ + bias; only the reference backend allocates the logits [N, V].

    hidden            [B, T, H]; position t predicts action_ids[:, t]
    weight, bias      [V, H] and [V] of the LM head, in hidden's dtype (any under autocast); may be tied or frozen
    ref_hidden        [B, T, H'] of the reference with ref_weight [V, H'] and ref_bias; or ref_logps [B, T]; or neither
    completion_mask   [B, T] tokens in the loss; the others are dropped before the first product
    workspace         bytes of working memory; by default 560 MiB, 64 MiB on a CPU
    rule_options      fields of `strop.losses.PolicyRule`: loss_type="grpo", clip_eps=0.2, beta=0.0 and so on
    everything else   as in `grpo_loss`

    returns           `PolicyLoss`: three 0-d tensors, and `.metrics`. Only the loss has a gradient, to hidden,
                      weight and bias
    """
    rule = PolicyRule(**rule_options)
    check_head(hidden, weight, bias)
    if hidden.ndim != 3:
        raise ValueError(f"hidden must have shape [B, T, H], found {list(hidden.shape)}")
    given = action_ids, bias, temperature, completion_mask, workspace, validate, "action_ids"
    check_linear_logp(hidden, weight, *given)
    head = LMHead(hidden, weight, bias)
    reference = check_reference(head, ref_hidden, ref_weight, ref_bias)
    batch = PolicyBatch(
        rule, action_ids, completion_mask, old_logps, ref_logps, rewards, advantages, samples_per_prompt, group_boundaries,
        num_tokens, num_sequences,
    ).checked(ref_hidden, "ref_hidden")  # fmt: skip
    mask_BT = batch.mask_BT
    if reference is not None:
        with torch.no_grad():
            ref_logps, _ = head_logps(rows, reference, action_ids, mask_BT, temperature, workspace)
            batch = batch._replace(ref_logps_BT=ref_logps)
    if rows is None or not rule.row_suffices:
        entropy = rule.entropy_coef != 0
        return composed(batch, head_logps(rows, head, action_ids, mask_BT, temperature, workspace, entropy))

    computed = computed_in(hidden)
    dtype = sums_in(computed)
    found = coefficients(batch) if rows == "triton" else token_coefficients(batch, dtype)
    advantages_N, weights_N = (  # one per token, also if given per sequence
        values if values.numel() == action_ids.numel() else values[:, None].expand(action_ids.shape).reshape(-1)
        for values in found
    )
    old_N, ref_N = batch.flat_logps(dtype)
    mask_N = mask_BT.reshape(-1)
    values = TokenValues(action_ids.reshape(-1), mask_N, old_N, ref_N, advantages_N, weights_N)
    results = with_gradients(
        linear_policy_terms if is_plain(hidden) else policy_terms_in_graph,
        LMHead(hidden.reshape(-1, hidden.shape[-1]), weight, bias),
        (values, float(temperature), rule, rows, workspace, computed), rows=rows, name="linear_grpo_loss",
    )  # fmt: skip
    return computed_loss(rule, results, old_N, advantages_N, ref_N, mask_N)


def check_reference(
    head: LMHead, ref_hidden: torch.Tensor | None, ref_weight: torch.Tensor | None, ref_bias: torch.Tensor | None
) -> LMHead | None:
    """Return the reference's head, or None; raise unless its tokens and vocabulary match the policy's."""
    if (ref_hidden is None) != (ref_weight is None):
        found = "ref_weight" if ref_hidden is None else "ref_hidden"
        raise ValueError(f"ref_hidden and ref_weight must be given together, found only {found}")
    if ref_hidden is None or ref_weight is None:
        if ref_bias is not None:
            raise ValueError("ref_bias must come with ref_hidden and ref_weight, found it alone")
        return None
    hidden, weight, _ = head
    check_head(ref_hidden, ref_weight, ref_bias, prefix="ref_")
    check_device(ref_hidden, "ref_hidden", hidden, "hidden")
    check_shape(ref_hidden, "ref_hidden", (*hidden.shape[:-1], ref_hidden.shape[-1]))
    check_shape(ref_weight, "ref_weight", (weight.shape[0], ref_weight.shape[1]))
    return LMHead(ref_hidden, ref_weight, ref_bias)
