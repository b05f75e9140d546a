"""Titles, units and chart settings of the metrics."""

from dataclasses import dataclass, replace

GROUPS = {
    "outcome": ("What it learned", ""),
    "policy": ("How the policy moved", "Distance from the reference, how sure the policy is, and how it writes."),
    "optimiser": ("Optimisation and speed", ""),
    "other": ("Other metrics", ""),
}


@dataclass(frozen=True)
class Metric:
    """The display settings of a metric.

    rank           orders the charts
    by_algorithm   the metric has another meaning in each algorithm
    ratio          the metric is a ratio; 1 is no change
    """

    title: str
    unit: str = ""
    group: str = "other"
    rank: float = 50
    fraction: bool = False
    from_zero: bool = False
    smoothed: bool = True
    by_algorithm: bool = False
    in_summary: bool = False
    scale: float = 1.0
    ratio: bool = False


METRICS = {
    "reward/mean": Metric("Reward", "mean of a batch", "outcome", 2, in_summary=True),
    "accuracy": Metric("Accuracy", "of the batch", "outcome", 1, fraction=True, in_summary=True),
    "preference/accuracy": Metric(
        "Preference accuracy", "chosen above rejected", "outcome", 3, fraction=True, in_summary=True
    ),
    "preference/margin": Metric("Preference margin", "implicit reward, nats", "outcome", 4, in_summary=True),
    "preference/win_rate": Metric("Win rate", "against the start", "outcome", 4, fraction=True, in_summary=True),
    "rewards/chosen": Metric("Implicit reward, chosen", "nats", "outcome", 4.2),
    "rewards/rejected": Metric("Implicit reward, rejected", "nats", "outcome", 4.3),
    "preference/tied_fraction": Metric("Ties", "of pairs", "outcome", 4.5, fraction=True),
    "loss": Metric("Loss", "", "outcome", 6, by_algorithm=True, in_summary=True),
    "perplexity": Metric("Perplexity", "", "outcome", 6, from_zero=True),
    "reward/std": Metric("Spread of rewards", "standard deviation", "outcome", 7, from_zero=True),
    "reward/zero_std_fraction": Metric("Groups without signal", "all rewards equal", "outcome", 8, fraction=True),
    "kl": Metric("KL to the reference", "nats per token", "policy", 10, from_zero=True, in_summary=True),
    "entropy": Metric("Entropy", "nats per token", "policy", 11, from_zero=True, in_summary=True),
    "entropy_estimate": Metric(
        "Entropy, estimated", "−log π of the tokens drawn", "policy", 11.5, from_zero=True, in_summary=True
    ),
    "completion/length": Metric("Completion length", "tokens", "policy", 12, from_zero=True, in_summary=True),
    "completion/truncated_fraction": Metric("Cut off at the limit", "of completions", "policy", 13, fraction=True),
    "clip_fraction": Metric("Clipped", "of tokens", "policy", 14, fraction=True),
    "ratio/max": Metric("Largest ratio", "new over old probability", "policy", 15, ratio=True),
    "ratio/mean": Metric("Mean ratio", "new over old probability", "policy", 16, ratio=True),
    "mismatch_kl": Metric("Rollout against training, KL", "nats per token", "policy", 17),
    "mismatch_ratio_max": Metric("Rollout against training, largest ratio", "", "policy", 18, ratio=True),
    "staleness/mean": Metric("Age of completions", "steps", "policy", 18.2, from_zero=True),
    "staleness/max": Metric("Age of the oldest completions", "steps", "policy", 18.3, from_zero=True),
    "staleness/dropped_groups": Metric("Groups too old", "left out", "policy", 18.4, from_zero=True),
    "routing/changed_fraction": Metric(
        "Experts chosen otherwise", "of tokens in layers", "policy", 18.5, fraction=True
    ),
    "grad_norm": Metric("Gradient norm", "before clipping", "optimiser", 20, from_zero=True),
    "learning_rate": Metric("Learning rate", "", "optimiser", 21, from_zero=True, smoothed=False),
    "tokens_per_second": Metric("Throughput", "tokens per second", "optimiser", 30, from_zero=True, in_summary=True),
    "memory": Metric("GPU memory", "peak, GiB", "optimiser", 31, from_zero=True, smoothed=False, scale=2.0**-30),
}
# not a main metric if the run has the other one: a policy gradient's loss stays near 0, an estimate is only a substitute
SECOND_TO = {"loss": "reward/mean", "eval/loss": "reward/mean", "entropy_estimate": "entropy"}
ALSO_CALLED = {"mean_reward": "reward/mean", "mean_kl": "kl"}  # aliases in the metrics of train_step


def describe(name: str) -> Metric:
    """Return a metric's display settings. `eval/…` is the metric on held-out data; an unknown metric's title is its name."""
    if name.startswith("eval/"):
        inner = describe(name.removeprefix("eval/"))
        unit = "" if "batch" in inner.unit else inner.unit
        summed = inner.in_summary and inner.group == "outcome"
        title = f"{inner.title}, held out"
        return replace(inner, title=title, unit=unit, rank=inner.rank - 0.5, smoothed=False, in_summary=summed)
    if name in METRICS:
        return METRICS[name]
    fraction = name.endswith(("_fraction", "accuracy", "_rate"))
    if name.startswith("reward/") and not fraction:
        return Metric(f"Reward: {name.removeprefix('reward/')}", "mean of a batch", "outcome", 5)
    return Metric(name, fraction=fraction)
