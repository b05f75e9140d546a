"""The suite `learning` in the documents: what the model solved before and after, and the way there.

Addition is on the page of GRPO, the calculator on that of environments.
"""

import math
from pathlib import Path
from typing import Any

from benchmarks.pages.step import PHASES
from benchmarks.text import Result, origin, size, table

Metrics = tuple[tuple[str, str, str], ...]  # a metric, what it is called, how it is written

ADDITION_ACCURACY = "eval/reward/right_number"  # results of addition up to 2026-11-17 do not name it
FIRST_AND_LAST = 10  # steps of sampled rewards that are told together
CURVE = "How many held-out problems SmolLM2-135M-Instruct solves, and what its samples are rewarded, by step"
CALLS = "How many held-out products SmolLM2-135M-Instruct gets right with a calculator, and its calls for each, by step"


def learning_summary(result: Result) -> str:
    """A sentence."""
    case = _case(result)
    before, after = _accuracies(case)
    steps, seconds = case["training"]["steps"][-1], sum(case["training"]["time/step"])
    where = result["gpu"]["name"] if result.get("gpu") else result["machine"]["cpu"]
    return (
        f"Greedy answers to {case['labels']['num_eval_rows']:,} held-out problems are right in {before} before and in {after}"
        f" after {steps} steps, {_minutes(seconds)} of training on one {where}.\n"
    )


def learning_table(result: Result) -> str:
    """Before and after: held-out problems, what was sampled, and what it took."""
    return f"![{CURVE}](../images/learning.png)\n\n" + _before_and_after(result, HELD_OUT, SAMPLED)


def calculator_table(result: Result) -> str:
    """The same of conversations with a tool, and the worst of the first and of the last step that has samples."""
    shown = "".join(_conversation(sample) for sample in _case(result)["samples"][::2])
    return f"![{CALLS}](images/calculator.png)\n\n" + _before_and_after(result, WITH_TOOL, SAMPLED_WITH_TOOL) + shown


def _before_and_after(result: Result, held_out_metrics: Metrics, sampled: Metrics) -> str:
    case = _case(result)
    training, held_out = case["training"], case["evaluations"]
    steps, count = training["steps"][-1], min(FIRST_AND_LAST, len(training["steps"]))
    rows = [["held-out problems solved, greedy", *_accuracies(case)]]
    rows += [[title, *(form.format(held_out[name][i]) for i in (0, -1))] for name, title, form in held_out_metrics]
    for name, title, form in sampled:
        if name in training:
            rows.append(
                [title, *(form.format(_mean(part)) for part in (training[name][:count], training[name][-count:]))]
            )
    header = ["", "before; first steps", f"after {steps} steps; last of them"]
    return table(header, rows) + "\n" + _effort(case, count) + origin(result) + "\n"


def _conversation(sample: dict[str, Any]) -> str:
    """What was asked last and what followed, as it was said."""
    messages = [sample["prompt"][-1], *sample["completion"]]
    said = "\n".join(f"{message['role']}: {' '.join(message['content'].split())}" for message in messages)
    return f"\nThe worst sample of step {sample['step']}, rewarded with {sample['reward']:.2g}:\n\n```\n{said}\n```\n"


HELD_OUT: Metrics = (("eval/completion/length", "length of those answers, tokens", "{:.1f}"),)
WITH_TOOL: Metrics = (
    ("eval/environment/tool_calls", "calls for one of those answers", "{:.2f}"),
    ("eval/environment/failed_calls", "of which fail", "{:.2f}"),
    ("eval/completion/length", "tokens drawn for it", "{:.1f}"),
)
SAMPLED: Metrics = (
    ("reward/mean", "reward of sampled answers", "{:.3f}"),
    ("reward/zero_std_fraction", "groups whose answers are all right or all wrong", "{:.1%}"),
    ("kl", "KL to the model before training, a token", "{:.4f}"),
    ("entropy", "entropy, a token", "{:.3f}"),
    ("entropy_estimate", "entropy, a token, estimated from the tokens drawn", "{:.3f}"),
    ("completion/truncated_fraction", "answers without an end", "{:.1%}"),
)
SAMPLED_WITH_TOOL: Metrics = (
    ("reward/right", "sampled answers that are right", "{:.1%}"),
    ("environment/tool_calls", "calls for a sampled answer", "{:.2f}"),
    ("environment/failed_calls", "of which fail", "{:.2f}"),
    ("entropy_estimate", "entropy, a token, estimated from the tokens drawn", "{:.3f}"),
)


def learning_figure(result: Result, path: Path, metadata: dict[str, str]) -> None:
    """Held-out accuracy with the rewards of every step, and the KL beside it."""
    _figure(result, path, metadata, {"kl": ""}, "KL to the model before, a token")


def calculator_figure(result: Result, path: Path, metadata: dict[str, str]) -> None:
    """The same, and the calls beside it."""
    lines = {"environment/tool_calls": "all", "environment/failed_calls": "those that fail"}
    _figure(result, path, metadata, lines, "Calls for a sampled answer")


def _figure(result: Result, path: Path, metadata: dict[str, str], lines: dict[str, str], title: str) -> None:
    """lines   metrics of training for the right side, with their labels"""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    case = _case(result)
    training, held_out, accuracy = case["training"], case["evaluations"], _accuracy(case)
    count = case["labels"]["num_eval_rows"]
    intervals = [_interval(value, count) for value in held_out[accuracy]]
    sampled = training["steps"], training[accuracy.removeprefix("eval/")]
    greedy = held_out["steps"], held_out[accuracy]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", width_ratios=(2, 1))
    left.plot(*sampled, color="#dd8452", lw=1, alpha=0.7, label="sampled, training problems")
    left.plot(*greedy, color="#4c72b0", lw=2, marker="o", ms=4, label="greedy, held-out problems")
    left.fill_between(held_out["steps"], *zip(*intervals, strict=True), color="#4c72b0", alpha=0.2, lw=0)
    left.set(xlabel="step", ylim=(0, 1.03), title="Answers that are right")
    left.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
    left.legend(frameon=False, fontsize=8, loc="best")
    for (name, label), color in zip(lines.items(), ("#55a868", "#c44e52"), strict=False):
        right.plot(training["steps"], training[name], color=color, lw=1, label=label)
    right.set(xlabel="step", title=title)
    right.set_ylim(bottom=0)
    if len(lines) > 1:
        right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, metadata=metadata)
    plt.close(figure)


def _case(result: Result) -> dict[str, Any]:
    (case,) = result["cases"]
    return case


def _accuracy(case: dict[str, Any]) -> str:
    return case["labels"].get("accuracy", ADDITION_ACCURACY)


def _accuracies(case: dict[str, Any]) -> tuple[str, str]:
    """Before and after, each with its 95 % interval."""
    count, values = case["labels"]["num_eval_rows"], case["evaluations"][_accuracy(case)]
    before, after = ((value, *_interval(value, count)) for value in (values[0], values[-1]))
    return tuple(f"{v:.1%} [{low:.0%}, {high:.0%}]" for v, low, high in (before, after))  # type: ignore[return-value]


def _interval(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share of `count` problems."""
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return middle - half, middle + half


def _effort(case: dict[str, Any], count: int) -> str:
    """Sizes, times and memory in a sentence."""
    training, config = case["training"], case["config"]
    seconds = sum(training["time/step"])
    shares = ", ".join(
        f"{phase} {sum(training[f'time/{phase}']) / seconds:.0%}" for phase in PHASES if f"time/{phase}" in training
    )
    memory = f", peak memory {size(max(training['memory']))}" if "memory" in training else ""
    return (
        f"Accuracies with 95 % intervals over {case['labels']['num_eval_rows']:,} problems that are never trained on; what is"
        f" sampled is the mean of the first and of the last {count} steps. {config['run']['batch_size']} prompts ×"
        f" {config['group_size']} answers a step, learning rate {config['optim']['learning_rate']:g}, {_minutes(seconds)} of training"
        f" ({shares}){memory}.\n"
    )


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
