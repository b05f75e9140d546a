"""The backends of `linear_token_loss`: "chunked" with torch's row functions on any device, "triton" with the row kernels,
"exact" with sums of one order.
"""

from typing import Any

import torch

from strop._tensors import check_linear_logp, check_tokens
from strop.losses import PolicyLoss
from strop.losses.policy import check_given
from strop.losses.rules import TokenRule
from strop.ops.linear import LMHead, token_loss
from strop.ops.linear_token_loss.reference import linear_token_loss
from strop.ops.registry import on_gpu, on_gpu_or_interpreted, only_by_name


@linear_token_loss.backend("chunked")
def linear_token_loss_chunked(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, **options: Any
) -> PolicyLoss:
    return _linear_token_loss("torch", hidden, weight, ids, weights, **options)


@linear_token_loss.backend("exact", when=only_by_name, by_name=on_gpu_or_interpreted)
def linear_token_loss_exact(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, **options: Any
) -> PolicyLoss:
    return _linear_token_loss("exact", hidden, weight, ids, weights, **options)


@linear_token_loss.backend("triton", when=on_gpu, by_name=on_gpu_or_interpreted)
def linear_token_loss_triton(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, **options: Any
) -> PolicyLoss:
    return _linear_token_loss("triton", hidden, weight, ids, weights, **options)


def _linear_token_loss(
    rows: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    rule: TokenRule,
    old_logps: torch.Tensor | None = None,
    ref_logps: torch.Tensor | None = None,
    advantages: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    workspace: int | None = None,
    validate: bool = False,
) -> PolicyLoss:
    check_linear_logp(hidden, weight, ids, bias, temperature, None, workspace, validate)
    check_tokens(ids, hidden, weights=weights, old_logps=old_logps, ref_logps=ref_logps, advantages=advantages)
    check_given(rule, ref_logps, advantages)
    return token_loss(
        LMHead(hidden, weight, bias), ids, weights, rule, rows=rows, old_logps_N=old_logps, ref_logps_N=ref_logps,
        advantages_N=advantages, temperature=float(temperature), workspace=workspace,
    )  # fmt: skip
