"""The simulation of sampling ahead on a page: `benchmarks.simulate_ahead`."""

from pathlib import Path
from typing import Any

from benchmarks.text import Result, provenance, table


def ahead_table(result: Result) -> str:
    """For each cluster the best number of servers by order and staleness, and what it brings."""
    rows, staleness = [], result["labels"]["staleness"]
    for (model, num_gpus), own in _clusters(result).items():
        waiting = max(one["deterministic"][0] for one in own)
        for order, ages in (("deterministic", staleness), ("throughput", staleness[1:])):
            for i, k in enumerate(ages):
                best = max(own, key=lambda one, i=i, order=order: one[order][i])  # type: ignore[misc]
                rows.append([
                    model, str(num_gpus), order if k else "in turns", str(k), str(best["servers"]), f"{best[order][i]:.3g}",
                    f"{best[order][i] / waiting:.2f}×",
                ])  # fmt: skip
    header = [
        "model",
        "GPUs",
        "order",
        "`max_staleness`",
        "best number of servers",
        "steps an hour",
        "against in turns",
    ]
    return table(header, rows) + "\nSimulated, not measured. The times are those of:\n" + provenance(result, "") + "\n"


def ahead_figure(result: Result, path: Path, metadata: dict[str, str]) -> None:
    """Steps an hour by the number of servers, a panel for each cluster."""
    from matplotlib.figure import Figure

    clusters, staleness = _clusters(result), result["labels"]["staleness"]
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    for i, ((model, num_gpus), own) in enumerate(clusters.items()):
        axes = figure.add_subplot(1, len(clusters), i + 1)
        servers = [one["servers"] for one in own]
        for j, k in enumerate(staleness[:2]):
            axes.plot(servers, [one["deterministic"][j] for one in own], marker="o", ms=3, label=f"{k}, deterministic")
        for j, k in enumerate(staleness[1:]):
            axes.plot(servers, [one["throughput"][j] for one in own], "--", marker="o", ms=3, label=f"{k}, throughput")
        axes.set(title=f"{model}, {num_gpus} GPUs", xlabel="servers", ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
        if not i:
            axes.set_ylabel("steps an hour, simulated")
            axes.legend(title="max_staleness", fontsize=7, title_fontsize=7, frameon=False)
    figure.savefig(path, dpi=110, metadata=metadata)


def _clusters(result: Result) -> dict[tuple[str, int], list[dict[str, Any]]]:
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for one in result["cases"]:
        found.setdefault((one["model"], one["gpus"]), []).append(one)
    return found
