"""Policy and preference losses as pure torch functions of log-probs."""

from strop.config.on_policy import ADVANTAGE_SCALES
from strop.config.policy_losses import IMPORTANCE_LEVELS, KL_ESTIMATORS, POLICY_LOSS_TYPES, PolicyRule, clip_bounds
from strop.config.preference_losses import PREFERENCE_LOSS_TYPES, UNPAIRED_LOSS_TYPES, PreferenceRule, UnpairedRule
from strop.losses.advantages import gae_advantages, group_advantages, rloo_advantages
from strop.losses.policy import (
    covariance_marks,
    kl_estimate,
    policy_loss,
    policy_metrics,
    rloo_loss,
    token_policy_loss,
    token_weights,
)
from strop.losses.preference import PreferenceLoss, pair_preference_loss, preference_loss, sequence_logps
from strop.losses.rules import NLL, PolicyLoss
from strop.losses.unpaired import unpaired_loss

__all__ = [
    "ADVANTAGE_SCALES",
    "IMPORTANCE_LEVELS",
    "KL_ESTIMATORS",
    "NLL",
    "POLICY_LOSS_TYPES",
    "PREFERENCE_LOSS_TYPES",
    "UNPAIRED_LOSS_TYPES",
    "PolicyLoss",
    "PolicyRule",
    "PreferenceLoss",
    "PreferenceRule",
    "UnpairedRule",
    "clip_bounds",
    "covariance_marks",
    "gae_advantages",
    "group_advantages",
    "kl_estimate",
    "pair_preference_loss",
    "policy_loss",
    "policy_metrics",
    "preference_loss",
    "rloo_advantages",
    "rloo_loss",
    "sequence_logps",
    "token_policy_loss",
    "token_weights",
    "unpaired_loss",
]
