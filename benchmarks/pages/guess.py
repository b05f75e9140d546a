"""examples/guess.yaml in the documents: how a model learns to search, from nothing."""

from pathlib import Path

from benchmarks.text import Result, origin, table

CURVE = "Held-out numbers found, and guesses needed, by training step, for three seeds"


def guess_table(result: Result) -> str:
    """Of every seed the last evaluation."""
    rows = [
        [str(case["labels"]["seed"]), f"{case['found'][0]:.0%}", f"{case['found'][-1]:.0%}", f"{case['guesses'][-1]:.2f}",
         f"{case['cpu_seconds']:.0f} s"]
        for case in result["cases"]
    ]  # fmt: skip
    header = ["seed", "found before", "found after", "guesses after", "CPU time of the whole run"]
    fewest, count = result["cases"][0]["fewest"], result["cases"][0]["labels"]["num_eval_rows"]
    about = f"{count} held-out ranges and secrets, greedy. Binary search needs {fewest:.2f} guesses on average.\n"
    return f"![{CURVE}](images/guess.png)\n\n{table(header, rows)}\n{about}{origin(result)}\n"


def guess_figure(result: Result, path: Path, metadata: dict[str, str]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for case in result["cases"]:
        label = f"seed {case['labels']['seed']}"
        left.plot(case["steps"], case["found"], marker="o", ms=4, label=label)
        right.plot(case["steps"][1:], case["guesses"][1:], marker="o", ms=4, label=label)
    right.axhline(result["cases"][0]["fewest"], color="#888888", ls="--", label="binary search")
    left.set(xlabel="step", ylabel="held-out numbers found", ylim=(0, 1.03))
    right.set(xlabel="step", ylabel="guesses, at most 8", ylim=(2, 8))
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, metadata=metadata)
    plt.close(figure)
