"""Differentiable operators on torch tensors. Each has a torch reference and faster backends; see `registry`."""

from strop.ops.grpo_loss import grpo_loss
from strop.ops.linear_divergence import linear_divergence
from strop.ops.linear_dpo_loss import linear_dpo_loss
from strop.ops.linear_grpo_loss import linear_grpo_loss
from strop.ops.linear_logp import linear_logp
from strop.ops.linear_token_loss import linear_token_loss
from strop.ops.logp import logp
from strop.ops.ratio_kl import ratio_kl

__all__ = [
    "grpo_loss",
    "linear_divergence",
    "linear_dpo_loss",
    "linear_grpo_loss",
    "linear_logp",
    "linear_token_loss",
    "logp",
    "ratio_kl",
]
