"""The suite `demo` in the documents: what the demo reaches, and its main figure."""

from pathlib import Path
from typing import Any

from benchmarks.text import Result, origin, table
from strop.report import Run, draw_figure
from strop.report.lines import Columns

WAYS = {"greedy": "greedy", "sampled": "sampled", "best_of": "best of {n}"}


def demo_summary(result: Result) -> str:
    """A sentence for the README."""
    solved = [[case[when]["greedy"] for case in result["cases"]] for when in ("before", "after")]
    before, after = (f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %" for shares in solved)
    seconds = [sum(case["seconds"].values()) for case in result["cases"]]
    number = result["cases"][0]["labels"]["num_held_out"]
    return (
        f"On {len(seconds)} seeds the model solves {before} of {number} held-out problems after the supervised stage and {after} after"
        f" GRPO, in at most {max(seconds):.0f} seconds on {result['threads']['usable_cpus']} CPU cores.\n"
    )


def demo_table(result: Result) -> str:
    """Every seed: what is solved by which way of answering, before and after."""
    rows = []
    for case in result["cases"]:
        for name, shown in WAYS.items():
            label = shown.format(n=case["labels"]["best_of"])
            total = f"{sum(case['seconds'].values()):.0f} s" if name == "greedy" else ""
            rows.append(
                [str(case["labels"]["seed"]), label, *(f"{case[w][name]:.1%}" for w in ("before", "after")), total]
            )
    return table(["seed", "answers", "after SFT", "after GRPO", "whole demo"], rows) + origin(result) + "\n"


def demo_figure(result: Result, path: Path, metadata: dict[str, str]) -> None:
    """The first seed's, as `strop demo --figure` draws it."""
    case = result["cases"][0]
    bars = {
        shown.format(n=case["labels"]["best_of"]): {
            "after SFT": case["before"][name],
            "after GRPO": case["after"][name],
        }
        for name, shown in WAYS.items()
    }
    run = Run("demo", Columns.of(_rows(case["training"]) + _rows(case["evaluations"])))
    draw_figure([run], path, bars=("Held-out problems solved", bars), metadata=metadata)


def _rows(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Columns as the lines of a run's metrics."""
    others = [name for name in columns if name != "steps"]
    return [
        {"step": step} | {name: columns[name][i] for name in others if columns[name][i] is not None}
        for i, step in enumerate(columns["steps"])
    ]
