"""The primitives suite in the documents."""

from pathlib import Path

from benchmarks.text import Result, duration, provenance, table, times


def primitives_table(
    result: Result, primitives: tuple[str, ...] = ("advantages", "GAE", "k3 KL", "token KL", "packing")
) -> str:
    """Every row: our time, and how many times as long the others take."""
    peers = ["numpy", "torch", "rlox"]
    rows = []
    for case in result["cases"]:
        labels = case["labels"]
        if labels["primitive"] not in primitives:
            continue
        cells = [times(case["ratios"][p]) if p in case["ratios"] else "" for p in peers]
        name = f"{labels['primitive']} {labels['shape']}" + (f" ({labels['note']})" if "note" in labels else "")
        rows.append([name, labels["dtype"], duration(case["contenders"]["strop"]["median_ns"]), *cells])
    return table(["work", "dtype", "strop", *(f"faster than {p}" for p in peers)], rows) + provenance(result)


def primitives_summary(result: Result) -> str:
    """The rows of advantages and k3: time, and the ratios to torch and rlox."""
    rows: dict[tuple[str, str], list[str]] = {}
    for case in result["cases"]:
        labels = case["labels"]
        if labels["primitive"] in ("advantages", "k3 KL"):
            cells = rows.setdefault((labels["primitive"], labels["shape"]), [])
            cells.append(duration(case["contenders"]["strop"]["median_ns"]))
            cells += [f"{case['ratios'][p]['value']:.3g}×" if p in case["ratios"] else "" for p in ("torch", "rlox")]
    columns = [
        f"{head} {dtype}" for dtype in ("float64", "float32") for head in ("strop,", "faster than torch,", "than rlox,")
    ]
    return table(["work", *columns], [[f"{a} {b}", *cells] for (a, b), cells in rows.items()]) + provenance(result)


def primitives_figure(result: Result, path: Path, metadata: dict[str, str]) -> None:
    """Speed-up over each peer for every row of advantages and k3, float32."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = [
        c
        for c in result["cases"]
        if c["labels"]["primitive"] in ("advantages", "k3 KL") and c["labels"]["dtype"] == "float32"
    ]
    figure, axes = plt.subplots(figsize=(10, 4.2), layout="constrained")
    peers = [p for p in ("numpy", "torch", "rlox") if any(p in c["ratios"] for c in cases)]
    colours = {"numpy": "#4c72b0", "torch": "#dd8452", "rlox": "#55a868"}
    for k, peer in enumerate(peers):
        ratios = [c["ratios"][peer] for c in cases]
        values = [r["value"] for r in ratios]
        errors = [[r["value"] - r["low"] for r in ratios], [r["high"] - r["value"] for r in ratios]]
        places = [i + (k - (len(peers) - 1) / 2) * 0.27 for i in range(len(cases))]
        axes.bar(
            places, values, 0.27, label=peer, color=colours[peer], yerr=errors, error_kw={"lw": 0.8, "ecolor": "#333"}
        )
    axes.axhline(1, color="black", lw=1)
    axes.set_yscale("log")
    axes.set_yticks([1, 2, 5, 10, 20, 50, 100], ["1×", "2×", "5×", "10×", "20×", "50×", "100×"])
    axes.set_xticks(
        range(len(cases)),
        [c["labels"]["primitive"].replace("advantages", "adv.") + "\n" + c["labels"]["shape"] for c in cases],
        fontsize=8,
    )
    axes.set_ylabel("times as long as strop")
    axes.set_title("CPU primitives, float32: how many times as long the others take")
    axes.legend(frameon=False, ncols=3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, metadata=metadata)
    plt.close(figure)
