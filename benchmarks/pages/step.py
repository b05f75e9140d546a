"""The suite `step` on a page: a whole GRPO step, its phases and their shares."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.text import Result, duration, left_out, provenance, size, table, times

EXACT = "strop, exact"
PHASES = ("generate", "reward", "score", "forward", "backward", "update")
COLOURS = {
    "generate": "#4c72b0", "reward": "#937860", "score": "#8172b3", "forward": "#55a868", "backward": "#c44e52",
    "update": "#dd8452", "rest": "#c8c8c8",
}  # fmt: skip


def step_table(result: Result) -> str:
    """Each side's step: seconds, how many times as long it takes as ours, phases with their shares."""
    rows = []
    for work, name, facts, faster, memory in _sides(result):
        shares = ", ".join(f"{n} {100 * ns / facts['median_ns']:.0f} %" for n, ns in _phases(facts).items())
        tokens = f"{facts['tokens_per_second']:,.0f}"
        rows.append([work, name, duration(facts["median_ns"]), faster, shares, tokens, memory])
    for case in result["cases"]:
        rows += [[_work(case), name, f"left out: {why}", "", "", "", ""] for name, why in left_out(case).items()]
    header = [
        "work",
        "by",
        "a step",
        "strop is faster by",
        "of which",
        "tokens generated / s of the step",
        "peak memory",
    ]
    return table(header, rows) + "\n" + _origin(result) + "\n"


def step_summary(result: Result) -> str:
    """The same without phases, for the front page."""
    header = ["a GRPO step", "by", "takes", "strop is faster by", "peak memory"]
    rows = [[work, name, duration(f["median_ns"]), faster, memory] for work, name, f, faster, memory in _sides(result)]
    return table(header, rows) + "\n" + _origin(result) + "\n"


def exact_table(result: Result) -> str:
    """strop's step with `exact` beside the ordinary one."""
    header = ["a GRPO step", "ordinary", "with `exact`", "times as long", "of the ordinary step", "of the exact one"]
    rows = []
    for case in result["cases"]:
        sides, price = (case["contenders"][name] for name in ("strop", EXACT)), case["ratios"][EXACT]
        ordinary, exact = sides
        of_which = [", ".join(f"{n} {duration(ns)}" for n, ns in _phases(side).items()) for side in (ordinary, exact)]
        took = f"{price['value']:.3g}× [{price['low']:.3g}, {price['high']:.3g}]"
        rows.append([_work(case), duration(ordinary["median_ns"]), duration(exact["median_ns"]), took, *of_which])
    return table(header, rows) + "\n" + _origin(result) + "\n"


def step_training(result: Result) -> str:
    """What the GPU does in strop's step from the end of generation on, by a profile."""
    header = ["work", "training", "kernels", "kernels run for", "of its time, profiled", "waits for the GPU"]
    rows = []
    for case in result["cases"]:
        found = case["contenders"]["strop"]["training"]
        busy = duration(found["busy_ns"]), f"{found['busy_share']:.0%} of {duration(found['profiled_ns'])}"
        rows.append([_work(case), duration(found["median_ns"]), f"{found['kernels']:,}", *busy, str(found["waits"])])
    return table(header, rows)


def _sides(result: Result) -> Iterator[tuple[str, str, dict[str, Any], str, str]]:
    """work, side, its facts, how many times as long it takes, its peak memory"""
    for case in result["cases"]:
        for name, facts in case["contenders"].items():
            faster = times(case["ratios"][name]) if name in case["ratios"] else ""
            yield _work(case), name, facts, faster, size(facts["peak_bytes"]) if "peak_bytes" in facts else ""


def _work(case: dict[str, Any]) -> str:
    labels = case["labels"]
    return f"{labels['model']}, {labels['completions']} × {labels['new_tokens']} tokens, {labels['dtype']}"


def _origin(result: Result) -> str:
    counts = sorted({len(f["samples_ns"]) for case in result["cases"] for f in case["contenders"].values()})
    return provenance(result, f"{' and '.join(map(str, counts))} steps of each side, which take turns")


def step_figure(result: Result, path: Path, metadata: dict[str, str]) -> None:
    """Stacked bars, one a side: what a step consists of."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bars = [(f"{c['labels']['model']}\n{n}", f) for c in result["cases"] for n, f in c["contenders"].items()]
    figure, axes = plt.subplots(figsize=(8, 0.8 + 0.7 * len(bars)), layout="constrained")
    shown: dict[str, Any] = {}
    for place, (_, facts) in enumerate(bars):
        left = 0.0
        for name, ns in _phases(facts).items():
            bar = axes.barh(place, ns / 1e9, left=left, color=COLOURS[name], height=0.6)
            shown.setdefault(name, bar)
            left += ns / 1e9
        axes.text(left, place, f" {duration(facts['median_ns'])}", va="center", fontsize=9)
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("seconds of a GRPO step")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend([shown[n] for n in COLOURS if n in shown], [n for n in COLOURS if n in shown],
                  loc="outside lower center", ncols=7, frameon=False, fontsize=8)  # fmt: skip
    figure.savefig(path, dpi=110, metadata=metadata)
    plt.close(figure)


def _phases(facts: dict[str, Any]) -> dict[str, float]:
    """Nanoseconds in the order of a step; what no phase counts is the rest."""
    told = {name: facts["phases_ns"][name] for name in PHASES if name in facts["phases_ns"]}
    return told | {"rest": max(facts["median_ns"] - sum(told.values()), 0.0)}
