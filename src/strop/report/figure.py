"""The main curves of a report as an image, for a README."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop._install import missing
from strop.report.curves import smooth, smoothing_window
from strop.report.metrics import SECOND_TO, Metric, describe
from strop.report.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ["#1f66c9", "#d3541a", "#16875b", "#9333b0", "#b07a08", "#0d7f92", "#c22755", "#596375"]
INK, SOFT, RULE = "#211d18", "#6b6257", "#e6dfd4"
MOST_PANELS = 4
PANELS = [
    "eval/accuracy",
    "reward/mean",
    "preference/accuracy",
    "loss",
    "kl",
    "entropy",
    "entropy_estimate",
    "completion/length",
]


def draw(
    runs: Sequence[Run],
    path: Path,
    *,
    bars: tuple[str, dict[str, dict[str, float]]] | None = None,
    metadata: dict[str, str] | None = None,
) -> Path:
    """Draw one panel per metric, after a panel of bars: (title, {"greedy": {"before": 0.4, "after": 0.97}}).

    metadata   texts stored in a PNG
    """
    try:
        import matplotlib
    except ImportError:
        raise missing("a figure", "matplotlib", "bench") from None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    there = [name for name in PANELS if any(len(run.series(name)) for run in runs)]
    there = [name for name in there if SECOND_TO.get(name) not in there][: MOST_PANELS - bool(bars)]
    count = len(there) + bool(bars)
    if not count:
        raise ValueError(f"the runs hold none of {', '.join(PANELS)}; found {', '.join(runs[0].names)}")
    style: Any = {"font.size": 9, "svg.hashsalt": "strop", "text.color": INK, "axes.labelcolor": SOFT}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(3.1 * count, 2.85), dpi=150, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        axes = list(figure.subplots(1, count, squeeze=False).flat)
        if bars:
            _bars(axes.pop(0), *bars)
        for name in there:
            _panel(axes.pop(0), runs, name, describe(name))
        if len(runs) > 1:
            _legend(figure, runs)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Software": None, **(metadata or {})} if path.suffix == ".png" else None)
    return path


def _panel(ax: "Axes", runs: Sequence[Run], name: str, metric: Metric) -> None:
    for i, run in enumerate(runs):
        series = run.series(name)
        if not len(series):
            continue
        colour = COLOURS[i % len(COLOURS)]
        scale = 100 if metric.fraction else 1
        values = scale * series.values
        window = smoothing_window(len(values)) if metric.smoothed else 1
        if window > 1:
            ax.plot(series.steps, values, color=colour, alpha=0.25, linewidth=0.7)
        marker = "o" if len(values) < 25 else None
        ax.plot(series.steps, smooth(values, window), color=colour, linewidth=1.8, marker=marker, markersize=3)
    _frame(ax, metric.title, "%" if metric.fraction else metric.unit)
    ax.set_xlabel("step")
    if metric.fraction:
        ax.set_ylim(0, 100)
    elif metric.from_zero:
        ax.set_ylim(bottom=0)


def _bars(ax: "Axes", title: str, groups: dict[str, dict[str, float]]) -> None:
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    width = 0.8 / len(names)
    for k, name in enumerate(names):
        places = [i + (k - (len(names) - 1) / 2) * width for i in range(len(groups))]
        heights = [100 * group.get(name, 0.0) for group in groups.values()]
        drawn = ax.bar(places, heights, width * 0.94, color=COLOURS[k % len(COLOURS)], label=name)
        ax.bar_label(drawn, [f"{h:.0f}" for h in heights], padding=1, fontsize=8, color=INK)
    _frame(ax, title, "%")
    ax.set_xticks(range(len(groups)), list(groups))
    ax.set_ylim(0, 130 if len(names) > 1 else 112)
    ax.set_yticks([0, 25, 50, 75, 100])
    if len(names) > 1:
        ax.legend(fontsize=8, frameon=False, loc="upper left", ncols=2, borderaxespad=0)


def _frame(ax: "Axes", title: str, unit: str) -> None:
    ax.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    ax.set_title(unit, loc="right", fontsize=8, color=SOFT)
    ax.grid(axis="y", color=RULE, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(colors=SOFT, labelsize=8)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(SOFT)


def _legend(figure: "Figure", runs: Sequence[Run]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=COLOURS[i % len(COLOURS)], linewidth=2) for i in range(len(runs))]
    figure.legend(handles, [run.name for run in runs], loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
