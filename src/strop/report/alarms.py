"""Alarms: signs of trouble in a run's curves, each with a line of advice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strop.report.curves import percent, short
from strop.report.runs import Run

FEWEST_STEPS = 5


@dataclass(frozen=True)
class Alarm:
    """A sign of trouble in a metric.

    metrics   names of metrics; the first one that the run has is tested
    fires     takes the means of the first and of the last tenth of its values, and returns whether to alarm
    """

    title: str
    metrics: tuple[str, ...]
    fires: Callable[[float, float], bool]
    advice: str
    fraction: bool = False


ALARMS = (
    Alarm("The KL to the reference runs away", ("kl",), lambda first, last: last > max(0.5, 5 * first),
          "Lower the learning rate or raise kl_coef; look in the last samples for text that only games the reward."),
    Alarm("The entropy collapses", ("entropy", "entropy_estimate"), lambda first, last: first > 0.05 and last < 0.2 * first,
          "The policy always writes the same: lower the learning rate, raise entropy_coef or temperature, or stop earlier."),
    Alarm("Most groups have no signal", ("reward/zero_std_fraction",), lambda _, last: last > 0.8,
          "All completions of a prompt get the same reward: take harder or easier prompts, a larger group_size, "
          "or resample_rounds.", fraction=True),
    Alarm("Sampling and training disagree", ("mismatch_kl",), lambda _, last: last > 0.05,
          "The rollout computes other log-probs than training: use one dtype for both, old_logps=recompute or importance_cap."),
    Alarm("Most completions are cut off", ("completion/truncated_fraction",), lambda _, last: last > 0.5,
          "They reach max_new_tokens: raise it, ask for shorter answers, or leave them out of the loss with mask_truncated.",
          fraction=True),
    Alarm("The held-out loss rises", ("eval/loss",), lambda first, last: last > 1.1 * first > 0,
          "The model overfits: train for fewer epochs, a lower learning rate, more data, or EarlyStopping."),
)  # fmt: skip


def alarms_of(run: Run) -> list[tuple[str, str, str]]:
    """Return title, numbers and advice of every alarm that fires for a run."""
    found = []
    for alarm in ALARMS:
        name = next((metric for metric in alarm.metrics if len(run.series(metric)) >= _fewest(metric)), None)
        if name is None:
            continue
        first, last = run.series(name).ends()
        if alarm.fires(first, last):
            written = percent if alarm.fraction else short
            found.append((alarm.title, f"{name} {written(first)} → {written(last)}", alarm.advice))
    if broken := _broken(run, ("loss", "grad_norm", "reward/mean")):
        told = f"{len(broken)} step{'s' * (len(broken) > 1)}, the first {broken[0]}"
        advice = "Lower the learning rate; look at the largest ratio of the steps before."
        found.append(("A value is not finite", told, advice))
    return found


def _fewest(metric: str) -> int:
    return 2 if metric.startswith("eval/") else FEWEST_STEPS


def _broken(run: Run, names: Sequence[str]) -> list[int]:
    return sorted({step for name in names for step in run.series(name).broken_steps.tolist()})
