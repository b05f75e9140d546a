"""The suite `algorithms` in the documents: what each algorithm learns, by seed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.text import Result, origin, table

CURVES = "Held-out problems solved by training step, for every algorithm and three seeds"


def algorithms_table(result: Result) -> str:
    """Of every algorithm the share before and after, a number a seed."""
    rows = []
    for algorithm, cases in _by_algorithm(result).items():
        what = "right answer preferred" if cases[0]["measure"] != "solved" else "problems solved"
        ends = [", ".join(f"{case['scores'][end]:.0%}" for case in cases) for end in (0, -1)]
        seconds = max(case["cpu_seconds"] for case in cases)
        rows.append([algorithm, str(cases[0]["labels"]["num_steps"]), what, *ends, f"{seconds:.0f} s"])
    header = ["", "steps", "held out", "before, by seed", "after, by seed", "CPU time, at most"]
    return f"![{CURVES}](images/algorithms.png)\n\n{table(header, rows)}{origin(result)}\n"


def algorithms_figure(result: Result, path: Path, metadata: dict[str, str]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = _by_algorithm(result)
    figure, axes = plt.subplots(
        2, -(-len(found) // 2), figsize=(11, 4.6), sharey=True, squeeze=False, layout="constrained"
    )
    for plot, (algorithm, cases) in zip(axes.flat, found.items(), strict=False):
        for case in cases:
            plot.plot(case["steps"], case["scores"], marker="o", ms=3, label=f"seed {case['labels']['seed']}")
        plot.set(title=algorithm, xlabel="step", ylim=(0, 1.03))
        plot.spines[["top", "right"]].set_visible(False)
    for plot in axes[:, 0]:
        plot.set_ylabel("held out")
    axes.flat[0].legend(frameon=False)
    figure.savefig(path, dpi=110, metadata=metadata)
    plt.close(figure)


def _by_algorithm(result: Result) -> dict[str, Sequence[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for case in result["cases"]:
        found.setdefault(case["labels"]["algorithm"], []).append(case)
    return found  # type: ignore[return-value]
