"""Options of losses: each rule names a loss and its numbers, checks them, and goes unchanged from a config to a kernel.

The formulas, which need torch, are in `strop.losses`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from strop._checks import check_choice, check_count, check_number
from strop.config.policy_losses import POLICY_LOSSES, ClipBounds, PolicyLossType

KL_ESTIMATORS = ("k1", "k2", "k3")
IMPORTANCE_LEVELS = ("token", "sequence", "geometric")
ClipEps = float | tuple[float, float]
Count = TypeVar("Count")  # a number, or a tensor with one
WITHOUT_REFERENCE = ("cpo", "simpo", "orpo", "sft")
LENGTH_NORMALISED = ("ipo", "sigmoid_norm", "simpo", "orpo")
LABEL_SMOOTHED = ("sigmoid", "robust", "exo_pair", "cpo", "simpo")
PREFERENCE_LOSS_TYPES = (
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "apo_zero",
    "apo_down",
    "sppo_hard",
    "sigmoid_norm",
    "bco_pair",
    "discopop",
    "cpo",
    "simpo",
    "orpo",
    "sft",
)
UNPAIRED_LOSS_TYPES = ("kto", "bco", "apo_zero_unpaired")


def clip_bounds(clip_eps: ClipEps, delta: float | None, loss_type: str) -> ClipBounds:
    """The arguments `clip_eps` and `delta` of a loss as bounds of the ratio, checked."""
    check_choice(loss_type, "loss_type", tuple(POLICY_LOSSES))
    pair = clip_eps if isinstance(clip_eps, (tuple, list)) else (clip_eps, clip_eps)
    if len(pair) != 2:
        raise ValueError(f"clip_eps must be one number or a pair (low, high), found {len(pair)} numbers")
    for value in pair:
        check_number(value, "clip_eps", 0, open_low=True, finite=False)
    high = float(pair[1])
    if loss_type == "cispo":
        if high < 1:
            raise ValueError(
                f"clip_eps must be a pair (low, high) with high at least 1 for 'cispo', where high is the bound of the "
                f"ratio itself, such as (0.2, 5.0); found {clip_eps}"
            )
        if delta is not None:
            raise ValueError(f"delta must be None for 'cispo', whose ratio clip_eps bounds already, found {delta}")
    elif delta is not None:
        check_number(delta, "delta", finite=False)
        if not delta >= 1 + high:
            raise ValueError(f"delta must be at least 1 + clip_eps = {1 + high}, found {delta}")
    return _bounds(clip_eps, delta, loss_type)


def _bounds(clip_eps: ClipEps, delta: float | None, loss_type: str) -> ClipBounds:
    low, high = clip_eps if isinstance(clip_eps, (tuple, list)) else (clip_eps, clip_eps)
    if loss_type == "cispo":
        return ClipBounds(0.0, float(high), math.inf)
    return ClipBounds(1 - float(low), 1 + float(high), math.inf if delta is None else float(delta))


@dataclass(frozen=True, kw_only=True)
class PolicyRule:
    """Which policy loss: one value from the config to the kernel, checked when it is made.

    loss_type               grpo, bnpo, dr_grpo, dapo, luspo, cispo, sapo or vespo; docs/losses.md has the formulas
    importance_level        "token": the token's ratio is clipped; "sequence": the geometric mean of its sequence's (GSPO);
                            "geometric": the tokens' log-ratios are clipped to [−low, high], then their mean is taken (GMPO)
    clip_eps                ε or (low, high); None is 0.2, for cispo (0.2, 5.0), for the geometric level 0.4. sapo and
                            vespo clip nothing
    delta                   upper bound of the ratio where the advantage is negative; None is off
    beta                    the coefficient of the KL to the reference
    kl_estimator            how the KL is estimated: k1, k2 or k3
    entropy_coef            weight of the entropy bonus
    max_completion_length   what dr_grpo divides by
    sapo_temperatures       temperatures of sapo's gate, for negative and for positive advantages
    vespo_gamma             k and λ of vespo's weight φ(w) = w^k·exp(λ − λw), for negative and for positive advantages
    stale_kl                a sequence with a negative advantage has no policy term where the mean of log(π_old/π) over its
                            tokens is above this; None keeps all

    In GRPO's config beta and max_completion_length are set by the options kl_coef and max_new_tokens.
    """

    loss_type: str = "grpo"
    importance_level: str = "token"
    clip_eps: float | tuple[float, float] | None = None
    delta: float | None = None
    beta: float = field(default=0.0, metadata={"set_by": "kl_coef"})
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    max_completion_length: int | None = field(default=None, metadata={"set_by": "max_new_tokens"})
    sapo_temperatures: tuple[float, float] = (1.05, 1.0)
    vespo_gamma: tuple[float, float, float, float] = (3.0, 2.0, 2.0, 3.0)
    stale_kl: float | None = None
    row_suffices: ClassVar[bool]  # whether a token's loss needs its own row of logits alone: no sequence, no entropy

    def __post_init__(self) -> None:
        check_choice(self.importance_level, "importance_level", IMPORTANCE_LEVELS)
        check_choice(self.kl_estimator, "kl_estimator", KL_ESTIMATORS)
        check_choice(self.loss_type, "loss_type", tuple(POLICY_LOSSES))
        for name in ("clip_eps", "sapo_temperatures", "vespo_gamma"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        for name in ("beta", "entropy_coef"):
            check_number(getattr(self, name), name, 0)
        if self.max_completion_length is not None:
            check_count(self.max_completion_length, "max_completion_length", 1)
        for name, count, open_low in (("sapo_temperatures", 2, True), ("vespo_gamma", 4, False)):
            _check_numbers(getattr(self, name), name, count, open_low)
        if self.stale_kl is not None:
            check_number(self.stale_kl, "stale_kl", 0)
        self._check_level()
        if self.type.clips:
            clip_bounds(self.clip, self.delta, self.loss_type)  # checks them
        alone = self.importance_level == "token" and self.type.derivative is not None and self.stale_kl is None
        object.__setattr__(self, "row_suffices", alone and not self.entropy_coef)

    def _check_level(self) -> None:
        """What a loss type or an importance level has no use for is not given."""
        for name, value in (("clip_eps", self.clip_eps), ("delta", self.delta)):
            if not self.type.clips and value is not None:
                raise ValueError(f"{name} must be None for {self.loss_type!r}, which clips nothing, found {value}")
        if self.loss_type == "vespo" and self.importance_level != "token":
            raise ValueError(
                f"importance_level must be 'token' for 'vespo', which weighs whole sequences by itself, found "
                f"{self.importance_level!r}"
            )
        if self.importance_level == "geometric":
            if self.loss_type in ("cispo", "sapo"):
                raise ValueError(
                    f"importance_level must be 'token' or 'sequence' for {self.loss_type!r}, found 'geometric'"
                )
            if self.delta is not None:
                raise ValueError(f"delta must be None at the geometric importance_level, found {self.delta}")

    def without_effect(self) -> list[str]:
        """Return the options that are set and that this loss type has no use for, each with the reason."""
        needed = (("sapo_temperatures", "sapo"), ("vespo_gamma", "vespo"))
        return _set_for_others(self, needed, (self.loss_type,))

    @property
    def clip(self) -> ClipEps:
        if self.clip_eps is not None:
            return self.clip_eps
        if self.loss_type == "cispo":
            return 0.2, 5.0
        return 0.4 if self.importance_level == "geometric" else 0.2

    @property
    def bounds(self) -> ClipBounds:
        """Of the ratio; for sapo the temperatures of its gate."""
        if self.loss_type == "sapo":
            return ClipBounds(*self.sapo_temperatures, math.inf)
        if self.importance_level == "geometric":
            low, high = self._pair
            return ClipBounds(math.exp(-low), math.exp(high), math.inf)
        return _bounds(self.clip, self.delta, self.loss_type)

    @property
    def _pair(self) -> tuple[float, float]:
        return self.clip if isinstance(self.clip, tuple) else (self.clip, self.clip)

    @property
    def text(self) -> str:
        """What a row needs, for operators of torch.ops, which take no objects; `from_text` is the way back."""
        low, high = self.sapo_temperatures if self.loss_type == "sapo" else self._pair
        return f"{self.loss_type} {low} {high} {self.delta} {self.beta} {self.kl_estimator}"

    @property
    def type(self) -> PolicyLossType:
        """The loss's declaration."""
        return POLICY_LOSSES[self.loss_type]

    def weight(self, length: int, num_tokens: int, num_sequences: int) -> float:
        """Return the weight of a token, given its sequence's length and the update's numbers of tokens and sequences."""
        count, divisor = self.weight_divisors(num_tokens, num_sequences)
        return 1 / ((count or 1) * (divisor or max(length, 1)))

    def weight_divisors(self, num_tokens: Count, num_sequences: Count) -> tuple[Count, int | None]:
        """Return what a token's weight is divided by: a count, and a length. A length of None is that of its sequence."""
        weight = self.type.weight
        if weight == "tokens":
            return num_tokens, 1
        if weight == "max_length":
            if self.max_completion_length is None:
                raise ValueError(f"max_completion_length must be given for {self.loss_type!r}, found None")
            return num_sequences, self.max_completion_length
        return num_sequences, 1 if weight == "sequences" else None


def _set_for_others(rule: object, needed: Sequence[tuple[str, str]], types: Sequence[str]) -> list[str]:
    """Return a sentence for each option that differs from its default and is of a loss type that is not used."""
    return [
        f"{name} has no effect: it is for loss_type={loss_type!r}, found {', '.join(types)}"
        for name, loss_type in needed
        if loss_type not in types and getattr(rule, name) != getattr(type(rule), name)
    ]


def _check_numbers(values: object, name: str, count: int, open_low: bool) -> None:
    if not isinstance(values, (tuple, list)) or len(values) != count:
        raise ValueError(f"{name} must be {count} numbers, found {values!r}")
    for value in values:
        check_number(value, name, 0, open_low=open_low)


@dataclass(frozen=True, kw_only=True)
class PreferenceRule:
    """Which preference loss: one value from the config to the formula, checked when it is made.

    beta              how strongly the policy is held to the reference; for ipo and sppo_hard 1/(2β) is the margin aimed at
    loss_type         sigmoid, ipo, hinge … (docs/losses.md lists all), or several, which are added: a list or "ipo,sft"
    loss_weights      one weight for each of several loss types; None is 1 for each
    label_smoothing   the probability that a label is wrong: from 0 to below ½, for sigmoid, robust, cpo and simpo; above 0
                      for exo_pair
    simpo_gamma       the margin simpo aims at
    discopop_tau      at most 1: how sharply discopop turns from the logistic to the exponential loss
    """

    beta: float = 0.1
    loss_type: str | tuple[str, ...] = "sigmoid"
    loss_weights: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    discopop_tau: float = 0.05

    def __post_init__(self) -> None:
        if isinstance(self.loss_type, str) and "," in self.loss_type:
            object.__setattr__(self, "loss_type", tuple(part.strip() for part in self.loss_type.split(",")))
        for name in ("loss_type", "loss_weights"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        if not isinstance(self.loss_type, (str, tuple)):
            raise TypeError(f"loss_type must be a name or a list of names, found {self.loss_type!r}")
        if not self.types or len(set(self.types)) < len(self.types):
            raise ValueError(f"loss_type must name each loss once and at least one, found {self.loss_type!r}")
        for loss_type in self.types:
            check_choice(loss_type, "loss_type", PREFERENCE_LOSS_TYPES)
        if len(self.weights) != len(self.types):
            raise ValueError(
                f"loss_weights must have one number for each of {len(self.types)} losses, found {len(self.weights)}"
            )
        for weight in self.weights:
            check_number(weight, "loss_weights", 0)
        check_number(self.beta, "beta", 0, open_low=True)
        check_number(self.simpo_gamma, "simpo_gamma", 0)
        check_number(self.discopop_tau, "discopop_tau", 0, 1, open_low=True)
        _check_label_smoothing(self.label_smoothing, self.types)

    def without_effect(self) -> list[str]:
        """Return the options that are set and that these loss types have no use for, each with the reason."""
        return _set_for_others(self, (("simpo_gamma", "simpo"), ("discopop_tau", "discopop")), self.types)

    @property
    def types(self) -> tuple[str, ...]:
        return (self.loss_type,) if isinstance(self.loss_type, str) else self.loss_type

    @property
    def weights(self) -> tuple[float, ...]:
        return (1.0,) * len(self.types) if self.loss_weights is None else self.loss_weights

    @property
    def needs_reference(self) -> bool:
        return not set(self.types) <= set(WITHOUT_REFERENCE)


def _check_label_smoothing(label_smoothing: float, types: tuple[str, ...]) -> None:
    check_number(label_smoothing, "label_smoothing", 0, 0.5, open_high=True)
    if label_smoothing and not set(types) & set(LABEL_SMOOTHED):
        raise ValueError(
            f"label_smoothing must be 0 for {types[0]!r}, which has no use for it, found {label_smoothing}"
        )
    if not label_smoothing and "exo_pair" in types:
        raise ValueError("label_smoothing must be above 0 for 'exo_pair', which takes its logarithm, found 0")


@dataclass(frozen=True, kw_only=True)
class UnpairedRule:
    """Which loss of labelled completions: one value from the config to the formula, checked when it is made.

    beta                 how strongly the policy is held to the reference
    loss_type            kto, bco or apo_zero_unpaired
    desirable_weight     weight of desirable completions, to balance their number
    undesirable_weight   weight of undesirable completions
    """

    beta: float = 0.1
    loss_type: str = "kto"
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        check_choice(self.loss_type, "loss_type", UNPAIRED_LOSS_TYPES)
        check_number(self.beta, "beta", 0, open_low=True)
        for name in ("desirable_weight", "undesirable_weight"):
            check_number(getattr(self, name), name, 0)
