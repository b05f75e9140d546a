"""The engines suite in the documents. A contender that was not there has empty cells."""

from pathlib import Path
from typing import Any

from benchmarks.text import Result, duration, provenance, size, table, times

AXES = ("memory", "kernels", "dispatch", "parallel", "scale")
HEADLINES = {  # what the README shows
    "memory: forward 2×32, by batch": "forward, batch 2 × 32 tokens",
    "memory: train step 2×8": "training step, batch 2 × 8 tokens",
    "scale: hidden 256, forward 2×32": "hidden 256: forward",
    "scale: hidden 256, train step 2×8": "hidden 256: training step",
    "decode: hidden 64, batch 64, 32 tokens": "generate 32 tokens, batch 64",
    "dispatch: cold, new process to first forward 2×32": "new process to first forward",
}
PEER = "Mixtral eager"
COLOURS = {"native": "#c44e52", "numpy": "#4c72b0", "Mixtral eager": "#dd8452", "Mixtral compiled": "#8c8c8c"}


def engines_summary(result: Result) -> str:
    """A few rows: the time of each engine, and how many times as fast the first of ours is as eager Mixtral."""
    cases = {case["work"]: case for case in result["cases"]}
    return _time_table(result, {name: cases[work] for work, name in HEADLINES.items() if work in cases}, [PEER])


def engines_table(result: Result) -> str:
    """All 22 scenarios."""
    rows = {case["work"]: case for case in result["cases"] if case["labels"]["axis"] in AXES}
    return _time_table(result, rows, [name for name in engines(result) if name.startswith("Mixtral")])


def engines_decode(result: Result) -> str:
    """Generation, which is not among the 22."""
    rows = {case["labels"]["scenario"]: case for case in result["cases"] if case["labels"]["axis"] == "decode"}
    return _time_table(result, rows, [PEER])


def engines_memory(result: Result) -> str:
    """Peak memory of a fresh process; calls of malloc and bytes asked for in one warm call."""
    names = engines(result)
    rows = []
    for case in result["cases"]:
        if case["labels"]["axis"] not in (*AXES, "decode"):
            continue
        cells = [case["contenders"].get(name, {}) for name in names]
        peak = ["" if "peak_rss_mb" not in c else f"{c['peak_rss_mb']:.0f} MB" for c in cells]
        allocated = [
            "" if c.get("allocations") is None else f"{c['allocations']:,} ({size(c['allocated_bytes'])})"
            for c in cells
        ]
        rows.append([case["work"], *peak, *allocated])
    return table(["scenario", *(f"{n}: peak" for n in names), *(f"{n}: allocations" for n in names)], rows)


def engines_details(result: Result) -> str:
    """The rest of what was recorded, a row for each scenario and contender."""
    rows = []
    for case in result["cases"]:
        if case["labels"]["axis"] not in (*AXES, "decode"):
            continue
        for name, c in case["contenders"].items():
            rows.append([
                case["work"], name, *(duration(c[key]) for key in ("median_ns", "p95_ns", "iqr_ns", "cpu_ns")),
                duration(c["gc_ns"]) if c.get("gc_ns") else "0" if "gc_ns" in c else "",
                f"{c['tokens_per_second']:,.0f}" if "tokens_per_second" in c else "",
                f"{c['gflops']:.3g}" if "gflops" in c else "",
                {True: "yes", False: "**no**"}[c["finite"]] if "finite" in c else "",
            ])  # fmt: skip
    header = ["scenario", "contender", "median", "p95", "IQR", "CPU time", "GC", "tokens/s", "GFLOP/s", "finite"]
    return table(header, rows)


def engines_agreement(result: Result) -> str:
    """How far each contender is from the reference in float64."""
    rows = []
    for case in result["cases"]:
        if case["labels"]["axis"] == "agreement":
            for name, errors in case["agreement"].items():
                cells = [f"{errors[key]:.1e}" for key in ("logits", "loss", "gradients")]
                rows.append([str(case["labels"]["hidden"]), name, *cells])
    return table(
        ["hidden", "contender", "logits, largest difference", "loss, relative", "worst gradient, relative"], rows
    )


def engines_blas(result: Result) -> str:
    """One sentence: why the NumPy engine runs with the BLAS threads it has."""
    case = next(case for case in result["cases"] if case["labels"]["axis"] == "blas")
    one, two = case["contenders"].items()
    ratio = case["ratios"][two[0]]
    return (
        f"A training step of the NumPy engine takes {duration(one[1]['median_ns'])} with {one[0]} and"
        f" {duration(two[1]['median_ns'])} with {two[0]} ({ratio['value']:.3g}× [{ratio['low']:.3g},"
        f" {ratio['high']:.3g}]); the rows here were measured with {result['threads'].get('blas')}.\n"
    )


def engines_shares(result: Result) -> str:
    """Of a training step: its matrix products alone, and the same calls on next to no numbers. Both measured."""
    rows = []
    for case in _shares(result):
        step, labels = case["contenders"]["step"], case["labels"]
        cells = [f"{share(case, part)} ({duration(case['contenders'][part]['median_ns'])})"
                 if part in case["ratios"] else "" for part in ("products", "calls")]  # fmt: skip
        rows.append([labels["engine"], str(labels["hidden"]), duration(step["median_ns"]), *cells])
    return table(["engine", "hidden", "training step", "matrix products alone", "calls alone"], rows) + provenance(
        result
    )


def engines_host_language(result: Result) -> str:
    """What the shares say, in a paragraph."""
    cases = {(case["labels"]["engine"], case["labels"]["hidden"]): case for case in _shares(result)}
    sentences = []
    for name in engines(result):
        small, large = cases.get((name, 64)), cases.get((name, 256))
        if small is None or large is None:
            continue
        calls = duration(small["contenders"]["calls"]["median_ns"])
        products = [percent(case, "products") for case in (small, large)]
        arithmetic = f"products are {products[0]} of a step, and {products[1]} at hidden 256" if all(products) else ""
        sentences.append(
            f"**{name}**: the calls of a step cost {calls} whatever the model's size, {percent(small, 'calls')} of a step"
            f" at hidden 64 and {percent(large, 'calls')} at hidden 256; {arithmetic}."
        )
    return "- " + "\n- ".join(sentences) + "\n"


def engines_figure(result: Result, path: Path, metadata: dict[str, str]) -> None:
    """Left: how many times as long the others take. Right: the measured shares of a training step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = {case["work"]: case for case in result["cases"]}
    works = [work for work in HEADLINES if work in cases][::-1]
    first, *others = engines(result)
    figure, (left, right) = plt.subplots(1, 2, figsize=(12.5, 5), layout="constrained", width_ratios=[3, 2])
    height = 0.8 / max(1, len(others))
    for k, name in enumerate(others):
        rows = [(i, cases[work]) for i, work in enumerate(works) if name in cases[work]["ratios"]]
        places = [i + (len(others) / 2 - k - 0.5) * height for i, _ in rows]
        ratios = [case["ratios"][name] for _, case in rows]
        widths = [ratio["value"] - 1 for ratio in ratios]  # bars start at 1: as long as the first
        errors = [[r["value"] - r["low"] for r in ratios], [r["high"] - r["value"] for r in ratios]]
        left.barh(places, widths, height * 0.92, left=1, color=COLOURS.get(name, "#555555"), label=name,
                  xerr=errors, error_kw={"lw": 0.8, "ecolor": "#333"})  # fmt: skip
        for place, ratio, (_, case) in zip(places, ratios, rows, strict=True):
            text = f"{ratio['value']:.3g}×, {duration(case['contenders'][name]['median_ns'])}"
            left.text(max(ratio["high"], 1) * 1.05, place, text, va="center", fontsize=7.5)
    left.axvline(1, color="black", lw=1)
    left.set_xscale("log")
    left.set_xlim(right=left.get_xlim()[1] * 2)
    ticks = [t for t in (0.5, 1, 2, 5, 10, 20, 50, 100) if left.get_xlim()[0] <= t <= left.get_xlim()[1]]
    left.set_xticks(ticks, [f"{t:g}×" for t in ticks])
    left.minorticks_off()
    times_of_first = [duration(cases[work]["contenders"][first]["median_ns"]) for work in works]
    labels = [f"{HEADLINES[work]}\n{first}: {time}" for work, time in zip(works, times_of_first, strict=True)]
    left.set_yticks(range(len(works)), labels, fontsize=8.5)
    left.set_xlabel(f"times as long as {first}, logarithmic")
    left.set_title("Time", loc="left")
    left.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)

    shares = _shares(result)[::-1]
    for k, (part, label, colour) in enumerate((
        ("products", "matrix products alone", "#55a868"), ("calls", "the same calls, next to no numbers", "#937860"),
    )):  # fmt: skip
        rows = [(i, case["ratios"][part]) for i, case in enumerate(shares) if part in case["ratios"]]
        values = [100 * ratio["value"] for _, ratio in rows]
        errors = [[100 * (r["value"] - r["low"]) for _, r in rows], [100 * (r["high"] - r["value"]) for _, r in rows]]
        places = [i + 0.19 - 0.38 * k for i, _ in rows]
        right.barh(places, values, 0.36, xerr=errors, color=colour, label=label, error_kw={"lw": 0.8, "ecolor": "#333"})
    right.axvline(100, color="black", lw=0.8, ls=":")
    right.set_yticks(
        range(len(shares)), [f"{c['labels']['engine']}\nhidden {c['labels']['hidden']}" for c in shares], fontsize=8
    )
    right.set_xlabel("% of the time of a training step")
    right.set_title("Shares of a training step, each measured", loc="left")
    right.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, metadata=metadata)
    plt.close(figure)


def engines_scaling_figure(result: Result, path: Path, metadata: dict[str, str]) -> None:
    """Tokens a second against batch, length and workers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {
        "forward by batch, 32 tokens": ("batch", lambda c: c["work"].endswith("by batch"), lambda c: c["labels"]["shape"][0]),
        "forward by length, batch 2": ("tokens in a row", lambda c: c["work"].endswith("by length"), lambda c: c["labels"]["shape"][1]),
        "inference by workers": ("workers, one thread each", lambda c: "inference" in c["work"], lambda c: c["labels"]["workers"]),
        "training by workers": ("workers, one thread each", lambda c: "training" in c["work"], lambda c: c["labels"]["workers"]),
    }  # fmt: skip
    figure, grid = plt.subplots(1, 4, figsize=(12.5, 3.6), layout="constrained")
    for axes, (title, (label, chosen, size_of)) in zip(grid, panels.items(), strict=True):
        cases = [case for case in result["cases"] if chosen(case)]
        for name in engines(result):
            rows = [(size_of(c), c["contenders"][name]["tokens_per_second"]) for c in cases if name in c["contenders"]]
            if rows:
                axes.plot(*zip(*rows, strict=True), "o-", color=COLOURS.get(name, "#555555"), label=name, ms=4)
        sizes = [size_of(case) for case in cases]
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_yscale("log")
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    grid[0].set_ylabel("tokens a second, logarithmic")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110, metadata=metadata)
    plt.close(figure)


# ---- parts ------------------------------------------------------------------------------------------------------------


def engines(result: Result) -> list[str]:
    """The contenders of the scenarios, ours first."""
    return list(dict.fromkeys(n for c in result["cases"] if c["labels"]["axis"] in AXES for n in c["contenders"]))


def _time_table(result: Result, cases: dict[str, dict[str, Any]], peers: list[str]) -> str:
    """Median of each contender, then how many times as long the peers take as the first one of the row."""
    names = engines(result)
    rows = []
    for name, case in cases.items():
        medians = [_cell(case["contenders"].get(n)) for n in names]
        first = next(iter(case["contenders"]))
        ratios = [times(case["ratios"][peer]) if peer in case["ratios"] else "" for peer in peers]
        rows.append(
            [name, *medians, *(f"{ratio} ({first})" if ratio and first != names[0] else ratio for ratio in ratios)]
        )
    return table(["", *names, *(f"{names[0]} faster than {peer}" for peer in peers)], rows) + provenance(result)


def _cell(facts: dict[str, Any] | None) -> str:
    """The median; of a new process also its memory."""
    if facts is None:
        return ""
    return duration(facts["median_ns"]) + (f", {facts['peak_rss_mb']:.0f} MB" if "gc_ns" not in facts else "")


def _shares(result: Result) -> list[dict[str, Any]]:
    return [case for case in result["cases"] if case["labels"]["axis"] == "shares"]


def share(case: dict[str, Any], part: str) -> str:
    ratio = case["ratios"][part]
    return f"{ratio['value']:.0%} [{ratio['low']:.0%}, {ratio['high']:.0%}]"


def percent(case: dict[str, Any], part: str) -> str:
    return f"{case['ratios'][part]['value']:.0%}" if part in case["ratios"] else ""
