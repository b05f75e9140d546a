"""Options of losses of pairs and of labelled completions: each rule names a loss and its numbers, and checks them.

The formulas, which need torch, are in `strop.losses`.
"""

from dataclasses import dataclass

from strop._checks import check_choice, check_number
from strop.config.base import check_fields, choice, number, without_use

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

    beta: float = number(0.1, 0, open_low=True)
    loss_type: str | tuple[str, ...] = "sigmoid"
    loss_weights: tuple[float, ...] | None = None
    label_smoothing: float = number(0.0, 0, 0.5, open_high=True)
    simpo_gamma: float = number(0.5, 0)
    discopop_tau: float = number(0.05, 0, 1, open_low=True)

    def __post_init__(self) -> None:
        check_fields(self)
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
            wanted = f"one number for each of {len(self.types)} losses"
            raise ValueError(f"loss_weights must have {wanted}, found {len(self.weights)}")
        for weight in self.weights:
            check_number(weight, "loss_weights", 0)
        if self.label_smoothing and not set(self.types) & set(LABEL_SMOOTHED):
            found = f"found {self.label_smoothing}"
            raise ValueError(f"label_smoothing must be 0 for {self.types[0]!r}, which has no use for it, {found}")
        if not self.label_smoothing and "exo_pair" in self.types:
            raise ValueError("label_smoothing must be above 0 for 'exo_pair', which takes its logarithm, found 0")

    def without_effect(self) -> list[str]:
        """Return a sentence for each option that is set but has no effect with these loss types."""
        return without_use(self, (("simpo_gamma", "simpo"), ("discopop_tau", "discopop")), self.types)

    @property
    def types(self) -> tuple[str, ...]:
        return (self.loss_type,) if isinstance(self.loss_type, str) else self.loss_type

    @property
    def weights(self) -> tuple[float, ...]:
        return (1.0,) * len(self.types) if self.loss_weights is None else self.loss_weights

    @property
    def needs_reference(self) -> bool:
        return not set(self.types) <= set(WITHOUT_REFERENCE)


@dataclass(frozen=True, kw_only=True)
class UnpairedRule:
    """Which loss of labelled completions: one value from the config to the formula, checked when it is made.

    beta                 how strongly the policy is held to the reference
    loss_type            kto, bco or apo_zero_unpaired
    desirable_weight     weight of desirable completions, to balance their number
    undesirable_weight   weight of undesirable completions
    """

    beta: float = number(0.1, 0, open_low=True)
    loss_type: str = choice("kto", UNPAIRED_LOSS_TYPES)
    desirable_weight: float = number(1.0, 0)
    undesirable_weight: float = number(1.0, 0)

    def __post_init__(self) -> None:
        check_fields(self)
