"""Policy and preference losses as pure torch functions of log-probs."""

from strop.losses.advantages import ADVANTAGE_SCALES, group_advantages, rloo_advantages
from strop.losses.kl import KL_ESTIMATORS, kl_estimate
from strop.losses.policy import (
    IMPORTANCE_LEVELS,
    POLICY_LOSS_TYPES,
    PolicyLoss,
    clip_bounds,
    policy_loss,
    policy_metrics,
    rloo_loss,
    token_policy_loss,
    token_weights,
)

__all__ = [
    "ADVANTAGE_SCALES",
    "IMPORTANCE_LEVELS",
    "KL_ESTIMATORS",
    "POLICY_LOSS_TYPES",
    "PolicyLoss",
    "clip_bounds",
    "group_advantages",
    "kl_estimate",
    "policy_loss",
    "policy_metrics",
    "rloo_advantages",
    "rloo_loss",
    "token_policy_loss",
    "token_weights",
]
