"""The backends of `linear_logp`: "chunked" with torch's row functions on any device, "triton" with the row kernels, "exact"
with sums of one order. One product to score; three more for the gradients, of which the first makes the logits again. With
a frozen head two in all, in the forward, where the workspace has room for rows of logits.
"""

from typing import Any

import torch

from strop._tensors import check_linear_logp
from strop.ops.linear import LMHead, logps_and_entropies
from strop.ops.linear_logp.reference import linear_logp
from strop.ops.registry import on_gpu, on_gpu_or_interpreted, only_by_name


@linear_logp.backend("chunked")
def linear_logp_chunked(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, **options: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    return _linear_logp("torch", hidden, weight, ids, **options)


@linear_logp.backend("exact", when=only_by_name, by_name=on_gpu_or_interpreted)
def linear_logp_exact(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, **options: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    return _linear_logp("exact", hidden, weight, ids, **options)


@linear_logp.backend("triton", when=on_gpu, by_name=on_gpu_or_interpreted)
def linear_logp_triton(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, **options: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    return _linear_logp("triton", hidden, weight, ids, **options)


def _linear_logp(
    rows: str,
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
    mask = check_linear_logp(hidden, weight, ids, bias, temperature, completion_mask, workspace, validate)
    logps_N, entropies_N = logps_and_entropies(
        LMHead(hidden.reshape(-1, hidden.shape[-1]), weight, bias), ids.reshape(-1), rows=rows,
        mask_N=None if mask is None else mask.reshape(-1), temperature=float(temperature), entropy=entropy,
        workspace=workspace,
    )  # fmt: skip
    logps = logps_N.view(ids.shape)
    return logps if entropies_N is None else (logps, entropies_N.view(ids.shape))
