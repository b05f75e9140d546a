"""CPU primitives on NumPy arrays and CPU tensors: advantages, GAE, KL, packing."""

from strop.primitives.advantages import (
    compute_batch_group_advantages,
    compute_group_advantages,
    compute_pass_at_k_advantages,
)
from strop.primitives.gae import compute_gae
from strop.primitives.kl import (
    compute_batch_token_kl,
    compute_batch_token_kl_f32,
    compute_batch_token_kl_schulman,
    compute_batch_token_kl_schulman_f32,
    compute_token_kl,
    compute_token_kl_f32,
    compute_token_kl_schulman,
    compute_token_kl_schulman_f32,
)
from strop.primitives.packing import collate_packed, pack_sequences

__all__ = [
    "collate_packed",
    "compute_batch_group_advantages",
    "compute_batch_token_kl",
    "compute_batch_token_kl_f32",
    "compute_batch_token_kl_schulman",
    "compute_batch_token_kl_schulman_f32",
    "compute_gae",
    "compute_group_advantages",
    "compute_pass_at_k_advantages",
    "compute_token_kl",
    "compute_token_kl_f32",
    "compute_token_kl_schulman",
    "compute_token_kl_schulman_f32",
    "pack_sequences",
]
