"""`ratio_kl` by `logp`'s kernels: the policy's row is read once forward and once backward, the reference's once."""

import torch

from strop.ops.logp.triton import logp_triton
from strop.ops.ratio_kl.reference import check_ratio_kl, composed, ratio_kl
from strop.ops.registry import on_gpu, on_gpu_or_interpreted


@ratio_kl.backend("triton", when=on_gpu, by_name=on_gpu_or_interpreted)
def ratio_kl_triton(
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
    mask = check_ratio_kl(policy_logits, ref_logits, action_ids, completion_mask, old_logps, temperature, validate)
    return composed(logp_triton, policy_logits, ref_logits, action_ids, mask, old_logps, temperature, in_place)
