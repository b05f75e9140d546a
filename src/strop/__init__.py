"""strop: LLM post-training. This module holds the primitives; it needs NumPy and never imports torch."""

from strop._compiled import get_num_threads, set_num_threads
from strop.primitives import (
    collate_packed,
    compute_batch_group_advantages,
    compute_batch_token_kl,
    compute_batch_token_kl_f32,
    compute_batch_token_kl_schulman,
    compute_batch_token_kl_schulman_f32,
    compute_group_advantages,
    compute_token_kl,
    compute_token_kl_f32,
    compute_token_kl_schulman,
    compute_token_kl_schulman_f32,
    pack_sequences,
)

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "collate_packed",
    "compute_batch_group_advantages",
    "compute_batch_token_kl",
    "compute_batch_token_kl_f32",
    "compute_batch_token_kl_schulman",
    "compute_batch_token_kl_schulman_f32",
    "compute_group_advantages",
    "compute_token_kl",
    "compute_token_kl_f32",
    "compute_token_kl_schulman",
    "compute_token_kl_schulman_f32",
    "get_num_threads",
    "pack_sequences",
    "set_num_threads",
]
