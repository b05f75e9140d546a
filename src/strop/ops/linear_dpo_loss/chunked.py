"""`linear_dpo_loss` by `linear_logp`'s chunks: a pair's loss needs its two completions whole, so log-probs come first."""

from collections.abc import Callable
from typing import Any

import torch

from strop.losses import PreferenceLoss
from strop.ops.linear_dpo_loss.reference import composed, linear_dpo_loss
from strop.ops.linear_logp.chunked import linear_logp_chunked, linear_logp_triton
from strop.ops.registry import on_gpu, on_gpu_or_interpreted


@linear_dpo_loss.backend("chunked")
def linear_dpo_loss_chunked(hidden, weight, ids, completion_mask, **options) -> PreferenceLoss:
    return _linear_dpo_loss(linear_logp_chunked, hidden, weight, ids, completion_mask, **options)


@linear_dpo_loss.backend("triton", when=on_gpu, by_name=on_gpu_or_interpreted)
def linear_dpo_loss_triton(hidden, weight, ids, completion_mask, **options) -> PreferenceLoss:
    return _linear_dpo_loss(linear_logp_triton, hidden, weight, ids, completion_mask, **options)


def _linear_dpo_loss(
    linear_logp_of: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ref_hidden: torch.Tensor | None = None,
    ref_weight: torch.Tensor | None = None,
    ref_bias: torch.Tensor | None = None,
    ref_logps: torch.Tensor | None = None,
    temperature: float = 1.0,
    workspace: int | None = None,
    validate: bool = False,
    **loss_options: Any,
) -> PreferenceLoss:
    head, ref = (hidden, weight, bias), (ref_hidden, ref_weight, ref_bias)
    score_options = {"temperature": temperature, "workspace": workspace, "validate": validate}
    return composed(linear_logp_of, head, ref, ids, completion_mask, ref_logps, loss_options, score_options)
