"""Preference losses as pure functions of the log-probs of a chosen and a rejected completion (DPO and its relatives).

With c = log π(chosen) − log π_ref(chosen), r the same of the rejected one, h = β·(c − r) and σ the sigmoid:

    sigmoid        −(1−ε)·log σ(h) − ε·log σ(−h)                     DPO, arXiv 2305.18290; ε > 0: conservative DPO
    robust         (−(1−ε)·log σ(h) + ε·log σ(−h)) / (1 − 2ε)        arXiv 2403.00409
    hinge          max(0, 1 − h)                                     SLiC, arXiv 2305.10425
    ipo            (c/|chosen| − r/|rejected| − 1/(2β))²             IPO, arXiv 2310.12036
    sigmoid_norm   −log σ(β·(c/|chosen| − r/|rejected|))             DPO on means over tokens
    exo_pair       KL of (σ(h), σ(−h)) from (1−ε, ε)                 EXO, arXiv 2402.00856
    nca_pair       −log σ(βc) − ½·log σ(−βc) − ½·log σ(−βr)          NCA, arXiv 2402.05369
    apo_zero       σ(−βc) + σ(βr)                                    APO, arXiv 2408.06266: chosen up, rejected down
    apo_down       σ(βc) + σ(−h)                                     APO: both down, the rejected one more
    sppo_hard      (c − 1/(2β))² + (r + 1/(2β))²                     SPPO, arXiv 2405.00675

ε is label_smoothing, the probability that a label is wrong; |·| is a completion's number of tokens.

Shapes: B pairs, T tokens.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.functional import logsigmoid

from strop._checks import check_choice, check_number
from strop._tensors import (
    Count,
    as_completion_mask,
    as_divisor,
    can_look,
    check_device,
    check_floats,
    check_like,
    check_shape,
    check_tensor,
    in_float,
)
from strop.losses.policy import LossResult, Metrics


class _Pair(NamedTuple):
    """What a formula reads: c and r, the two numbers, and the lengths where the formula divides by them."""

    chosen_B: torch.Tensor
    rejected_B: torch.Tensor
    beta: float
    label_smoothing: float
    lengths_B: tuple[torch.Tensor, torch.Tensor] | None

    @property
    def logits_B(self) -> torch.Tensor:
        return self.beta * (self.chosen_B - self.rejected_B)

    @property
    def mean_margin_B(self) -> torch.Tensor:
        assert self.lengths_B is not None
        return self.chosen_B / self.lengths_B[0] - self.rejected_B / self.lengths_B[1]


def _sigmoid(pair: _Pair) -> torch.Tensor:
    h_B, eps = pair.logits_B, pair.label_smoothing
    return -(1 - eps) * logsigmoid(h_B) - eps * logsigmoid(-h_B)


def _robust(pair: _Pair) -> torch.Tensor:
    h_B, eps = pair.logits_B, pair.label_smoothing
    return (-(1 - eps) * logsigmoid(h_B) + eps * logsigmoid(-h_B)) / (1 - 2 * eps)


def _hinge(pair: _Pair) -> torch.Tensor:
    return torch.relu(1 - pair.logits_B)


def _ipo(pair: _Pair) -> torch.Tensor:
    return (pair.mean_margin_B - 1 / (2 * pair.beta)).square()


def _sigmoid_norm(pair: _Pair) -> torch.Tensor:
    return -logsigmoid(pair.beta * pair.mean_margin_B)


def _exo_pair(pair: _Pair) -> torch.Tensor:
    h_B, eps = pair.logits_B, pair.label_smoothing
    chosen_B = h_B.sigmoid() * (logsigmoid(h_B) - math.log1p(-eps))
    return chosen_B + (-h_B).sigmoid() * (logsigmoid(-h_B) - math.log(eps))


def _nca_pair(pair: _Pair) -> torch.Tensor:
    chosen_B, rejected_B = pair.beta * pair.chosen_B, pair.beta * pair.rejected_B
    return -logsigmoid(chosen_B) - logsigmoid(-chosen_B) / 2 - logsigmoid(-rejected_B) / 2


def _apo_zero(pair: _Pair) -> torch.Tensor:
    return torch.sigmoid(-pair.beta * pair.chosen_B) + torch.sigmoid(pair.beta * pair.rejected_B)


def _apo_down(pair: _Pair) -> torch.Tensor:
    return torch.sigmoid(pair.beta * pair.chosen_B) + torch.sigmoid(-pair.logits_B)


def _sppo_hard(pair: _Pair) -> torch.Tensor:
    half = 1 / (2 * pair.beta)
    return (pair.chosen_B - half).square() + (pair.rejected_B + half).square()


_FORMULAS: dict[str, Callable[[_Pair], torch.Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "sppo_hard": _sppo_hard,
    "sigmoid_norm": _sigmoid_norm,
}
PREFERENCE_LOSS_TYPES = tuple(_FORMULAS)
LENGTH_NORMALISED = ("ipo", "sigmoid_norm")
LABEL_SMOOTHED = ("sigmoid", "robust", "exo_pair")


@dataclass(frozen=True, kw_only=True)
class PreferenceRule:
    """Which preference loss: one value from the config to the formula, checked when it is made.

    beta              how strongly the policy is held to the reference; for ipo and sppo_hard 1/(2β) is the margin aimed at
    loss_type         one of `strop.losses.PREFERENCE_LOSS_TYPES`
    label_smoothing   the probability that a label is wrong: from 0 to below ½, for sigmoid and robust; above 0 for exo_pair
    """

    beta: float = 0.1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_choice(self.loss_type, "loss_type", PREFERENCE_LOSS_TYPES)
        check_number(self.beta, "beta", 0, open_low=True)
        _check_label_smoothing(self.label_smoothing, self.loss_type)


class PreferenceLoss(LossResult):
    """`loss, chosen_rewards, rejected_rewards`: 0-d, [B], [B]; the rewards are β·c and β·r, without gradient.

    `metrics`, computed when first asked for: means over the pairs of rewards_chosen, rewards_rejected, margin (their
    difference), accuracy (how often it is above 0), logps_chosen and logps_rejected.
    """

    @property
    def chosen_rewards(self) -> torch.Tensor:
        return self[1]

    @property
    def rejected_rewards(self) -> torch.Tensor:
        return self[2]


def preference_loss(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    ref_chosen: torch.Tensor,
    ref_rejected: torch.Tensor,
    *,
    loss_type: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    chosen_lengths: torch.Tensor | None = None,
    rejected_lengths: torch.Tensor | None = None,
    num_pairs: Count | None = None,
) -> PreferenceLoss:
    """The mean of `pair_preference_loss` over the pairs, with rewards and metrics.

    num_pairs   in the whole batch of which these are a part: the losses of micro-batches then add up to the batch's
    """
    rule = PreferenceRule(loss_type=loss_type, beta=beta, label_smoothing=label_smoothing)
    logps = policy_chosen, policy_rejected, ref_chosen, ref_rejected
    return pairs_loss(rule, *logps, chosen_lengths, rejected_lengths, num_pairs)


def pairs_loss(
    rule: PreferenceRule,
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    ref_chosen: torch.Tensor,
    ref_rejected: torch.Tensor,
    chosen_lengths: torch.Tensor | None = None,
    rejected_lengths: torch.Tensor | None = None,
    num_pairs: Count | None = None,
) -> PreferenceLoss:
    """`preference_loss` by a rule that is there already."""
    logps = policy_chosen, policy_rejected, ref_chosen, ref_rejected
    losses_B = _pair_losses(rule, *logps, chosen_lengths, rejected_lengths)
    loss = losses_B.sum() / as_divisor(len(losses_B) if num_pairs is None else num_pairs, "num_pairs", losses_B)
    chosen_B, rejected_B = policy_chosen.detach(), policy_rejected.detach()
    chosen_rewards_B = rule.beta * _log_ratio(chosen_B, ref_chosen)
    rejected_rewards_B = rule.beta * _log_ratio(rejected_B, ref_rejected)
    compute_metrics = functools.partial(_metrics, chosen_rewards_B, rejected_rewards_B, chosen_B, rejected_B)
    return PreferenceLoss(loss, chosen_rewards_B, rejected_rewards_B, compute_metrics)


def pair_preference_loss(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    ref_chosen: torch.Tensor,
    ref_rejected: torch.Tensor,
    *,
    loss_type: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    chosen_lengths: torch.Tensor | None = None,
    rejected_lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss of every pair, [B].

    policy_chosen, policy_rejected     [B] log-probs summed over each completion's tokens, as `sequence_logps` gives them
    ref_chosen, ref_rejected           [B] those of the reference; no gradient flows into them
    loss_type, beta, label_smoothing   see `PreferenceRule`
    chosen_lengths, rejected_lengths   [B] numbers of completion tokens, for ipo and sigmoid_norm, which divide each
                                       sum by its length; the others take no notice of them

    returns                            [B] float32 (float64 for float64); finite, and so is its gradient, however far
                                       apart the log-probs are
    """
    rule = PreferenceRule(loss_type=loss_type, beta=beta, label_smoothing=label_smoothing)
    logps = policy_chosen, policy_rejected, ref_chosen, ref_rejected
    return _pair_losses(rule, *logps, chosen_lengths, rejected_lengths)


def _pair_losses(
    rule: PreferenceRule,
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    ref_chosen: torch.Tensor,
    ref_rejected: torch.Tensor,
    chosen_lengths: torch.Tensor | None,
    rejected_lengths: torch.Tensor | None,
) -> torch.Tensor:
    _check_pairs(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    lengths_B = None
    if rule.loss_type in LENGTH_NORMALISED:
        lengths_B = (
            _as_lengths(chosen_lengths, policy_chosen, "chosen_lengths", rule.loss_type),
            _as_lengths(rejected_lengths, policy_chosen, "rejected_lengths", rule.loss_type),
        )
    chosen_B, rejected_B = _log_ratio(policy_chosen, ref_chosen), _log_ratio(policy_rejected, ref_rejected)
    return _FORMULAS[rule.loss_type](_Pair(chosen_B, rejected_B, rule.beta, rule.label_smoothing, lengths_B))


def sequence_logps(logps: torch.Tensor, completion_mask: torch.Tensor, average: bool = False) -> torch.Tensor:
    """The log-prob of each completion, [B]: the sum over its tokens that count, or with `average` their mean.

    logps             [B, T]
    completion_mask   [B, T]; what stands where it is 0 changes neither value nor gradient

    returns           [B] float32 (float64 for float64); 0 for a completion without tokens
    """
    check_floats(logps, "logps")
    if logps.ndim != 2:
        raise ValueError(f"logps must have shape [B, T], found {list(logps.shape)}")
    mask_BT = as_completion_mask(completion_mask, logps, "logps")
    sum_B = in_float(logps).masked_fill(~mask_BT, 0.0).sum(-1)
    return sum_B / mask_BT.sum(-1).clamp(min=1) if average else sum_B


def _log_ratio(policy_B: torch.Tensor, ref_B: torch.Tensor) -> torch.Tensor:
    """In the policy's dtype: a reference kept in float64 would make the loss float64."""
    policy_B = in_float(policy_B)
    return policy_B - ref_B.detach().to(policy_B.dtype)


def _metrics(
    chosen_rewards_B: torch.Tensor, rejected_rewards_B: torch.Tensor, chosen_B: torch.Tensor, rejected_B: torch.Tensor
) -> Metrics:
    num_pairs = max(len(chosen_B), 1)

    def mean(values_B: torch.Tensor) -> torch.Tensor:
        return values_B.to(chosen_rewards_B.dtype).sum() / num_pairs

    return {
        "rewards_chosen": mean(chosen_rewards_B),
        "rewards_rejected": mean(rejected_rewards_B),
        "margin": mean(chosen_rewards_B - rejected_rewards_B),
        "accuracy": mean(chosen_rewards_B > rejected_rewards_B),
        "logps_chosen": mean(chosen_B),
        "logps_rejected": mean(rejected_B),
    }


def _check_pairs(policy_chosen: Any, policy_rejected: Any, ref_chosen: Any, ref_rejected: Any) -> None:
    check_floats(policy_chosen, "policy_chosen")
    if policy_chosen.ndim != 1:
        raise ValueError(
            f"policy_chosen must have shape [B], found {list(policy_chosen.shape)}; sequence_logps sums tokens"
        )
    check_like(policy_rejected, "policy_rejected", policy_chosen, "policy_chosen")
    for value, name in ((ref_chosen, "ref_chosen"), (ref_rejected, "ref_rejected")):
        if value is None:
            raise TypeError(f"{name} must be a tensor, found NoneType; zeros make the loss free of a reference")
        check_like(value, name, policy_chosen, "policy_chosen")


def _check_label_smoothing(label_smoothing: Any, loss_type: str) -> None:
    check_number(label_smoothing, "label_smoothing", 0, 0.5, open_high=True)
    if label_smoothing and loss_type not in LABEL_SMOOTHED:
        raise ValueError(
            f"label_smoothing must be 0 for {loss_type!r}, which has no use for it, found {label_smoothing}"
        )
    if not label_smoothing and loss_type == "exo_pair":
        raise ValueError("label_smoothing must be above 0 for 'exo_pair', which takes its logarithm, found 0")


def _as_lengths(lengths: Any, policy_chosen: torch.Tensor, name: str, loss_type: str) -> torch.Tensor:
    """At least 1: a completion without tokens has log-prob 0 whatever it is divided by."""
    if lengths is None:
        raise ValueError(f"{name} must be given for {loss_type!r}, which divides by them, found None")
    check_tensor(lengths, name)
    check_shape(lengths, name, policy_chosen.shape)
    check_device(lengths, name, policy_chosen, "policy_chosen")
    if can_look(lengths) and (wrong := ~(lengths >= 0)).any():
        raise ValueError(f"{name} must be at least 0, found {lengths[wrong][0].item()}")
    return lengths.detach().clamp(min=1)
