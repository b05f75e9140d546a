"""The page of `strop demo`: what was learned, in numbers, in examples, and as curves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strop.report import (
    Chart,
    Curve,
    Run,
    Section,
    Tile,
    bar_section,
    draw_figure,
    load_run,
    sample_section,
    write_report,
)
from strop.report.curves import percent

if TYPE_CHECKING:
    from strop.cli.demo import HeldOutScores


@dataclass(frozen=True)
class Results:
    """What the demo found. `rows` are the held-out problems whose greedy answers the scores hold."""

    folder: Path
    rows: Sequence[Mapping[str, str]]
    before: "HeldOutScores"
    after: "HeldOutScores"
    comparison: Mapping[str, Mapping[str, float]]
    sft_ended: str
    seconds: Mapping[str, float]


def write(results: Results) -> Path:
    sft, grpo = load_run(results.folder / "sft"), grpo_run(results.folder)
    total = sum(results.seconds.values())
    stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in results.seconds.items() if seconds >= 0.5)
    tiles = [
        Tile(f"Solved, {name}", percent(shares["after GRPO"]), percent(shares["after SFT"]), "of held-out problems")
        for name, shares in results.comparison.items()
    ]
    tiles.append(Tile("Time", f"{total:.0f} s", detail=stages))
    return write_report(
        [grpo],
        results.folder / "report.html",
        title="strop demo: a model learns to sort",
        lead=(
            "A Mixture-of-Experts transformer, from random weights on a CPU. A short supervised stage leaves it mediocre; "
            "GRPO, which only sees whether an answer is right, makes it good. Held out are problems that neither stage was "
            "trained on and whose answers neither has seen."
        ),
        headline=tiles,
        extra_sections=[_bars(results), _samples(results), _supervised(sft, results.sft_ended)],
    )


def draw(results: Results, path: Path) -> Path:
    """The main curves as an image."""
    bars = "Held-out problems solved", {name: dict(shares) for name, shares in results.comparison.items()}
    return draw_figure([grpo_run(results.folder)], path, bars=bars)


def grpo_run(folder: Path) -> Run:
    """The GRPO run; the reward is 1 for a right answer and 0 for any other, so its mean is the accuracy."""
    run = load_run(folder / "grpo")
    run.columns.rename("eval/reward/mean", "eval/accuracy")
    run.hidden |= {"eval/reward/std", "eval/reward/reward", "reward/reward"}  # say nothing new
    return run


def _bars(results: Results) -> Section:
    return bar_section(
        "Held-out problems solved",
        results.comparison,
        under=(
            "Greedy takes the likeliest token each time; sampled draws at temperature 1; best of 8 draws eight answers and "
            "lets the reward choose, which needs the right answer at hand and shows what the model can reach. A model unsure "
            "of itself, as after SFT, samples far worse than it answers greedily."
        ),
    )


def _samples(results: Results) -> Section:
    before, after = results.before, results.after
    shown = [
        {
            "prompt": f"{row['prompt']} (right: {row['answer']})",
            "before": before.answers[i],
            "after": after.answers[i],
            "reward_before": before.rewards[i],
            "reward_after": after.rewards[i],
        }
        for i, row in enumerate(results.rows)
    ]
    return sample_section(
        "Answers before and after GRPO", shown, under=f"The first {len(shown)} held-out problems, greedy."
    )


def _supervised(run: Run, ended: str) -> Section:
    loss = run.series("loss")
    chart = Chart("Loss, SFT", [Curve("SFT", loss.steps, loss.values)], "nats per token", from_zero=True)
    return Section("The supervised stage", under=f"{run.num_steps} steps on right answers; {ended}.", charts=[chart])
