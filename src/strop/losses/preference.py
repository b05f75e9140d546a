"""Preference losses as pure functions of the log-probs of a chosen and a rejected completion (DPO and its variants).

With c = log π(chosen) − log π_ref(chosen), r the same for the rejected one, h = β·(c − r) and σ the sigmoid:

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
    bco_pair       −log σ(βc) − log σ(−βr)                           BCO, arXiv 2404.04656, without its shift
    discopop       −(1−m)·log σ(h) + m·exp(−h), m = σ(h/τ)           DiscoPOP, arXiv 2406.08414

And without a reference, with p = log π(chosen), q = log π(rejected):

    cpo            sigmoid of β·(p − q)                              CPO, arXiv 2401.08417, with sft
    simpo          sigmoid of β·(p/|chosen| − q/|rejected|) − γ      SimPO, arXiv 2405.14734
    orpo           −β·log σ(log-odds of p/|chosen| − of q/|rejected|)   ORPO, arXiv 2403.07691, with sft
    sft            −p, over the batch divided by its chosen tokens   the NLL of the chosen completions

ε is label_smoothing, the probability that a label is wrong; |·| is a completion's number of tokens; the log-odds of x
are x − log(1 − exp x). Several loss types are summed, each with its weight: CPO is (cpo, sft), ORPO (orpo, sft).

Shapes: B pairs, T tokens.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypedDict, Unpack

import torch
from torch.nn.functional import logsigmoid

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
from strop.config.preference_losses import LENGTH_NORMALISED, PreferenceRule
from strop.losses.rules import LossResult, Metrics


class PreferenceOptions(TypedDict, total=False):
    """The fields of `PreferenceRule`, for functions that take them as keyword arguments."""

    beta: float
    loss_type: str | tuple[str, ...]
    loss_weights: tuple[float, ...] | None
    label_smoothing: float
    simpo_gamma: float
    discopop_tau: float


class _Pair(NamedTuple):
    """The inputs of a formula: c, r, p, q, the rule, and for some formulas lengths and chosen tokens.

    tokens   average number of chosen tokens per pair of the batch
    """

    c: torch.Tensor
    r: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor
    rule: PreferenceRule
    lengths: tuple[torch.Tensor, torch.Tensor] | None
    tokens: Count | None

    @property
    def beta(self) -> float:
        return self.rule.beta

    @property
    def h(self) -> torch.Tensor:
        return self.beta * (self.c - self.r)

    def means(self, chosen: torch.Tensor, rejected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the means over tokens: the sums divided by the completions' lengths."""
        assert self.lengths is not None
        return chosen / self.lengths[0], rejected / self.lengths[1]

    @property
    def mean_margin(self) -> torch.Tensor:
        chosen, rejected = self.means(self.c, self.r)
        return chosen - rejected

    def losses(self) -> torch.Tensor:
        """Return the loss of each pair: the weighted sum of the rule's loss types."""
        found, *others = (
            _FORMULAS[name](self) * weight if weight != 1 else _FORMULAS[name](self)
            for name, weight in zip(self.rule.types, self.rule.weights, strict=True)
        )
        return sum(others, found)

    def smoothed(self, h: torch.Tensor) -> torch.Tensor:
        """Return −(1−ε)·log σ(h) − ε·log σ(−h)."""
        eps = self.rule.label_smoothing
        return -(1 - eps) * logsigmoid(h) - eps * logsigmoid(-h)


def _simpo(pair: _Pair) -> torch.Tensor:
    chosen, rejected = pair.means(pair.p, pair.q)
    return pair.smoothed(pair.beta * (chosen - rejected) - pair.rule.simpo_gamma)


def _orpo(pair: _Pair) -> torch.Tensor:
    chosen, rejected = pair.means(pair.p, pair.q)
    return -pair.beta * logsigmoid(chosen - rejected - _log1mexp(chosen) + _log1mexp(rejected))


def _log1mexp(x_B: torch.Tensor) -> torch.Tensor:
    """Return log(1 − exp x) for x < 0; x = 0 is treated as the largest probability below 1."""
    x_B = x_B.clamp(max=-torch.finfo(x_B.dtype).eps)
    # use each form where it is accurate; the other gets a safe input, so that its gradient is not NaN
    near_B = x_B > -math.log(2)
    by_expm1_B = torch.log(-torch.expm1(x_B.masked_fill(~near_B, -1.0)))
    return torch.where(near_B, by_expm1_B, torch.log1p(-torch.exp(x_B.masked_fill(near_B, -1.0))))


def _robust(pair: _Pair) -> torch.Tensor:
    h, eps = pair.h, pair.rule.label_smoothing
    return (-(1 - eps) * logsigmoid(h) + eps * logsigmoid(-h)) / (1 - 2 * eps)


def _exo_pair(pair: _Pair) -> torch.Tensor:
    h, eps = pair.h, pair.rule.label_smoothing
    chosen = h.sigmoid() * (logsigmoid(h) - math.log1p(-eps))
    return chosen + (-h).sigmoid() * (logsigmoid(-h) - math.log(eps))


def _nca_pair(pair: _Pair) -> torch.Tensor:
    chosen, rejected = pair.beta * pair.c, pair.beta * pair.r
    return -logsigmoid(chosen) - logsigmoid(-chosen) / 2 - logsigmoid(-rejected) / 2


def _sppo_hard(pair: _Pair) -> torch.Tensor:
    half = 1 / (2 * pair.beta)
    return (pair.c - half).square() + (pair.r + half).square()


def _discopop(pair: _Pair) -> torch.Tensor:
    h, tau = pair.h, pair.rule.discopop_tau
    # σ(h/τ)·exp(−h) as one exponential: exp(−h) alone would overflow for very negative h
    return -logsigmoid(h) * torch.sigmoid(-h / tau) + (logsigmoid(h / tau) - h).exp()


def _sft(pair: _Pair) -> torch.Tensor:
    assert pair.tokens is not None
    return -pair.p / pair.tokens


_FORMULAS: dict[str, Callable[[_Pair], torch.Tensor]] = {
    "sigmoid": lambda pair: pair.smoothed(pair.h),
    "hinge": lambda pair: torch.relu(1 - pair.h),
    "ipo": lambda pair: (pair.mean_margin - 1 / (2 * pair.beta)).square(),
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "apo_zero": lambda pair: torch.sigmoid(-pair.beta * pair.c) + torch.sigmoid(pair.beta * pair.r),
    "apo_down": lambda pair: torch.sigmoid(pair.beta * pair.c) + torch.sigmoid(-pair.h),
    "sppo_hard": _sppo_hard,
    "sigmoid_norm": lambda pair: -logsigmoid(pair.beta * pair.mean_margin),
    "bco_pair": lambda pair: -logsigmoid(pair.beta * pair.c) - logsigmoid(-pair.beta * pair.r),
    "discopop": _discopop,
    "cpo": lambda pair: pair.smoothed(pair.beta * (pair.p - pair.q)),
    "simpo": _simpo,
    "orpo": _orpo,
    "sft": _sft,
}


class PreferenceLoss(LossResult):
    """The tuple (loss, chosen_rewards, rejected_rewards): 0-d, [B], [B].

    The rewards are β·c and β·r, without gradient. Without a reference they are β·p and β·q, for simpo and orpo divided
    by the lengths.

    `metrics`, computed on first access: means over the pairs of rewards_chosen, rewards_rejected, margin (their
    difference), accuracy (share of margins above 0), logps_chosen and logps_rejected.
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
    ref_chosen: torch.Tensor | None = None,
    ref_rejected: torch.Tensor | None = None,
    *,
    chosen_lengths: torch.Tensor | None = None,
    rejected_lengths: torch.Tensor | None = None,
    num_pairs: Count | None = None,
    num_tokens: Count | None = None,
    **rule_options: Unpack[PreferenceOptions],
) -> PreferenceLoss:
    """Return the mean of `pair_preference_loss` over the pairs, with rewards and metrics.

    num_pairs, num_tokens   pairs and chosen tokens in the whole batch, of which this may be a part: the losses of
                            micro-batches then add up to the batch's
    rule_options            fields of `PreferenceRule`
    """
    logps = policy_chosen, policy_rejected, ref_chosen, ref_rejected
    return pairs_loss(PreferenceRule(**rule_options), *logps, chosen_lengths, rejected_lengths, num_pairs, num_tokens)


def pairs_loss(
    rule: PreferenceRule,
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    ref_chosen: torch.Tensor | None = None,
    ref_rejected: torch.Tensor | None = None,
    chosen_lengths: torch.Tensor | None = None,
    rejected_lengths: torch.Tensor | None = None,
    num_pairs: Count | None = None,
    num_tokens: Count | None = None,
) -> PreferenceLoss:
    """Return `preference_loss` for a given rule."""
    logps = policy_chosen, policy_rejected, ref_chosen, ref_rejected
    pair = _as_pair(rule, *logps, chosen_lengths, rejected_lengths, num_pairs, num_tokens)
    losses_B = pair.losses()
    loss = losses_B.sum() / as_divisor(len(losses_B) if num_pairs is None else num_pairs, "num_pairs", losses_B)
    rewards = rule.beta * pair.c.detach(), rule.beta * pair.r.detach()
    if not rule.needs_reference and pair.lengths is not None:
        rewards = pair.means(*rewards)
    compute_metrics = functools.partial(_metrics, *rewards, pair.p.detach(), pair.q.detach())
    return PreferenceLoss(loss, *rewards, compute_metrics)


def pair_preference_loss(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    ref_chosen: torch.Tensor | None = None,
    ref_rejected: torch.Tensor | None = None,
    *,
    chosen_lengths: torch.Tensor | None = None,
    rejected_lengths: torch.Tensor | None = None,
    **rule_options: Unpack[PreferenceOptions],
) -> torch.Tensor:
    """Return the loss of each pair, [B].

    policy_chosen, policy_rejected     [B] log-probs summed over each completion's tokens, as `sequence_logps` gives them
    ref_chosen, ref_rejected           [B] those of the reference, without gradient; None for a rule without a reference
    chosen_lengths, rejected_lengths   [B] numbers of completion tokens, for ipo, sigmoid_norm, simpo and orpo, which divide
                                       each sum by its length, and for sft; ignored by the others
    rule_options                       fields of `PreferenceRule`: loss_type="sigmoid", beta=0.1 and so on

    returns                            [B] float32 (float64 for float64); value and gradient are finite however far
                                       apart the log-probs are
    """
    logps = policy_chosen, policy_rejected, ref_chosen, ref_rejected
    return _as_pair(PreferenceRule(**rule_options), *logps, chosen_lengths, rejected_lengths).losses()


def _as_pair(
    rule: PreferenceRule,
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    ref_chosen: torch.Tensor | None,
    ref_rejected: torch.Tensor | None,
    chosen_lengths: torch.Tensor | None,
    rejected_lengths: torch.Tensor | None,
    num_pairs: Count | None = None,
    num_tokens: Count | None = None,
) -> _Pair:
    """Return the inputs of the formulas; raise if shapes or dtypes do not match."""
    check_floats(policy_chosen, "policy_chosen")
    if policy_chosen.ndim != 1:
        raise ValueError(
            f"policy_chosen must have shape [B], found {list(policy_chosen.shape)}; sequence_logps sums tokens"
        )
    check_like(policy_rejected, "policy_rejected", policy_chosen, "policy_chosen")
    for value, name in ((ref_chosen, "ref_chosen"), (ref_rejected, "ref_rejected")):
        if value is not None:
            check_like(value, name, policy_chosen, "policy_chosen")
        elif rule.needs_reference:
            raise TypeError(f"{name} must be a tensor, found NoneType; zeros make the loss free of a reference")
    p_B, q_B = in_float(policy_chosen), in_float(policy_rejected)
    lengths, tokens = None, None
    if normalised := [name for name in rule.types if name in LENGTH_NORMALISED]:
        lengths = (
            _as_lengths(chosen_lengths, policy_chosen, "chosen_lengths", normalised[0]),
            _as_lengths(rejected_lengths, policy_chosen, "rejected_lengths", normalised[0]),
        )
    if "sft" in rule.types:
        if num_tokens is None:
            _as_lengths(chosen_lengths, policy_chosen, "chosen_lengths", "sft")
            assert chosen_lengths is not None
            num_tokens = chosen_lengths.sum()
        pairs = as_divisor(len(p_B) if num_pairs is None else num_pairs, "num_pairs", p_B)
        tokens = as_divisor(num_tokens, "num_tokens", p_B) / pairs
    return _Pair(_log_ratio(p_B, ref_chosen), _log_ratio(q_B, ref_rejected), p_B, q_B, rule, lengths, tokens)


def sequence_logps(logps: torch.Tensor, completion_mask: torch.Tensor, average: bool = False) -> torch.Tensor:
    """Return the log-prob of each completion, [B]: the sum over its unmasked tokens, or with `average` the mean.

    logps             [B, T]
    completion_mask   [B, T]; tokens where it is 0 affect neither value nor gradient

    returns           [B] float32 (float64 for float64); 0 for a completion without tokens
    """
    check_floats(logps, "logps")
    if logps.ndim != 2:
        raise ValueError(f"logps must have shape [B, T], found {list(logps.shape)}")
    mask_BT = as_completion_mask(completion_mask, logps, "logps")
    sum_B = in_float(logps).masked_fill(~mask_BT, 0.0).sum(-1)
    return sum_B / mask_BT.sum(-1).clamp(min=1) if average else sum_B


def _log_ratio(policy_B: torch.Tensor, ref_B: torch.Tensor | None) -> torch.Tensor:
    """Return log π − log π_ref, or log π without a reference, in the policy's dtype; ref may be float64."""
    return policy_B if ref_B is None else policy_B - ref_B.detach().to(policy_B.dtype)


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


def _as_lengths(lengths: torch.Tensor | None, policy_chosen: torch.Tensor, name: str, loss_type: str) -> torch.Tensor:
    """Return the lengths, at least 1: a completion without tokens has log-prob 0 anyway."""
    if lengths is None:
        raise ValueError(f"{name} must be given for {loss_type!r}, which divides by them, found None")
    check_tensor(lengths, name)
    check_shape(lengths, name, policy_chosen.shape)
    check_device(lengths, name, policy_chosen, "policy_chosen")
    if can_look(lengths) and (wrong := ~(lengths >= 0)).any():
        raise ValueError(f"{name} must be at least 0, found {lengths[wrong][0].item()}")
    return lengths.detach().clamp(min=1)
