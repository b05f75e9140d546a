"""The report page of `strop demo`: numbers, examples and curves."""

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
from strop.report.metrics import Metric

if TYPE_CHECKING:
    from strop.cli.demo import Demo

LEAD = (
    "A Mixture-of-Experts transformer, from random weights on a CPU. A short supervised stage leaves it mediocre; GRPO, which "
    "only sees whether an answer is right, makes it good. Held out are problems that neither stage was trained on and whose "
    "answers neither has seen."
)
UNDER_BARS = (
    "Greedy takes the likeliest token each time; sampled draws at temperature 1; best of 8 draws eight answers and lets the "
    "reward choose, which needs the right answer at hand and shows what the model can reach. A model unsure of itself, as "
    "after SFT, samples far worse than it answers greedily."
)


def write(demo: "Demo", figure: Path | None) -> None:
    """Write the report of a finished demo and, if asked for, its main curves as an image."""
    grpo, comparison = grpo_run(demo.folder), demo.comparison()
    tiles = [
        Tile(f"Solved, {name}", percent(shares["after GRPO"]), percent(shares["after SFT"]), "of held-out problems")
        for name, shares in comparison.items()
    ]
    stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in demo.seconds.items() if seconds >= 0.5)
    tiles.append(Tile("Time", f"{sum(demo.seconds.values()):.0f} s", detail=stages))
    sections = [
        bar_section("Held-out problems solved", comparison, under=UNDER_BARS),
        _samples(demo),
        _supervised(demo),
    ]
    title = "strop demo: a model learns to sort"
    write_report([grpo], demo.folder / "report.html", title=title, lead=LEAD, headline=tiles, extra_sections=sections)
    if figure is not None:
        draw_figure([grpo_run(demo.folder)], figure, bars=("Held-out problems solved", comparison))


def grpo_run(folder: Path) -> Run:
    """Return the GRPO run; its reward is 1 for a right answer and 0 for any other, so the mean is the accuracy."""
    run = load_run(folder / "grpo")
    run.columns.rename("eval/reward/mean", "eval/accuracy")
    run.hidden |= {"eval/reward/std", "eval/reward/reward", "reward/reward"}  # repeat others
    return run


def _samples(demo: "Demo") -> Section:
    before, after = demo.scores
    shown = [
        {
            "prompt": f"{row['prompt']} (right: {row['answer']})",
            "before": before.answers[i], "reward_before": before.rewards[i],
            "after": after.answers[i], "reward_after": after.rewards[i],
        }
        for i, row in enumerate(demo.test[: len(before.answers)])
    ]  # fmt: skip
    under = f"The first {len(shown)} held-out problems, greedy."
    return sample_section("Answers before and after GRPO", shown, under=under)


def _supervised(demo: "Demo") -> Section:
    run = load_run(demo.folder / "sft")
    loss = run.series("loss")
    metric = Metric("Loss, SFT", "nats per token", from_zero=True)
    chart = Chart(metric, [Curve("SFT", loss.steps, loss.values)])
    under = f"{run.num_steps} steps on right answers; {demo.sft_ended}."
    return Section("The supervised stage", under=under, charts=[chart])
