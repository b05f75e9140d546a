"""`linear_grpo_loss` of rows with a mask, by what `linear_token_loss` does with tokens."""

from collections.abc import Callable
from typing import Any

import torch

from strop._tensors import computed_in, sums_in
from strop.losses import PolicyLoss
from strop.ops.linear import LMHead, loss_terms
from strop.ops.linear_grpo_loss.reference import (
    check_linear_grpo_loss,
    composed_from_hidden,
    linear_grpo_loss,
    ref_logps_of,
)
from strop.ops.linear_logp.chunked import linear_logp_chunked, linear_logp_triton
from strop.ops.policy import coefficients, flat, fused_result, rule_and_given, token_coefficients
from strop.ops.registry import on_gpu, on_gpu_or_interpreted


@linear_grpo_loss.backend("chunked")
def linear_grpo_loss_chunked(hidden, weight, action_ids, old_logps, rewards, completion_mask, **options) -> PolicyLoss:
    given = action_ids, old_logps, rewards, completion_mask
    return _linear_grpo_loss("torch", linear_logp_chunked, hidden, weight, *given, **options)


@linear_grpo_loss.backend("triton", when=on_gpu, by_name=on_gpu_or_interpreted)
def linear_grpo_loss_triton(hidden, weight, action_ids, old_logps, rewards, completion_mask, **options) -> PolicyLoss:
    given = action_ids, old_logps, rewards, completion_mask
    return _linear_grpo_loss("triton", linear_logp_triton, hidden, weight, *given, **options)


def _linear_grpo_loss(
    rows: str,
    linear_logp_of: Callable[..., torch.Tensor],
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
    workspace: int | None = None,
    **options: Any,
) -> PolicyLoss:
    rule, given = rule_and_given(options)
    head, ref = (hidden, weight, bias), (ref_hidden, ref_weight, ref_bias)
    batch = check_linear_grpo_loss(head, ref, action_ids, old_logps, rewards, completion_mask, workspace, rule, given)
    if not rule.row_suffices:
        return composed_from_hidden(linear_logp_of, batch, head, ref, action_ids, workspace)
    ref_logps = ref_logps_of(linear_logp_of, batch, ref, action_ids, workspace)
    dtype = sums_in(computed_in(hidden))
    old_logps_N, ref_logps_N = (flat(logps, dtype) for logps in (batch.old_logps_BT, ref_logps))
    if rows == "triton":
        advantages_N, weights_N = (_per_row(values, action_ids) for values in coefficients(batch))
    else:
        advantages_N, weights_N = token_coefficients(batch, dtype)
    total, policy_and_kl, logps_N = loss_terms(
        LMHead(hidden.reshape(-1, hidden.shape[-1]), weight, bias),
        (action_ids.reshape(-1), batch.mask_BT.reshape(-1), old_logps_N, ref_logps_N, advantages_N, weights_N),
        float(given.temperature),
        rule,
        rows=rows,
        workspace=workspace,
        name="linear_grpo_loss",
    )
    return fused_result(batch, advantages_N, ref_logps_N, total, policy_and_kl, logps_N)


def _per_row(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """One value for every token, where there may be one for every sequence."""
    return values if values.numel() == ids.numel() else values[:, None].expand(ids.shape).reshape(-1)
