"""Charts as inline SVG. Colours are CSS variables of the page, which has a light and a dark theme."""

import bisect
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from strop._types import Json
from strop.report.curves import (
    MAX_POINTS,
    Axis,
    linear_axis,
    percent,
    short,
    smooth,
    smoothing_window,
    thin,
    thin_evenly,
    tick_label,
    value_axis,
)
from strop.report.metrics import Metric

WIDTH, HEIGHT = 420, 236
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 36
NUM_COLOURS = 8
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
MAX_RAW = 8  # curves: charts with more draw only smoothed curves, and say so
FEWEST_POINTS = 80  # points of a curve if there are very many curves


def colour(index: int) -> str:
    """Return the CSS class of a curve or bar. After the eighth the colours repeat."""
    return f"c{index % NUM_COLOURS}"


def escape(text: object) -> str:
    """Return text for HTML: markup is escaped, control characters become symbols, lone surrogates become �.

    Characters that change the text direction, and could disguise a text, are shown by their numbers.
    """
    shown = str(text).encode("utf-8", "replace").decode("utf-8")
    return html.escape(UNSEEN.sub(_symbol, shown))


def _symbol(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(0x2400 + code) if code < 32 else ascii(found[0])[1:-1]


@dataclass(frozen=True)
class Curve:
    """One line of a chart. `colour` is an index for `colour()`; `broken_steps` are marked on the axis."""

    label: str
    steps: Sequence[int] | np.ndarray
    values: Sequence[float] | np.ndarray
    broken_steps: Sequence[int] | np.ndarray = ()
    colour: int = 0


@dataclass(frozen=True)
class Chart:
    """A line chart of a metric: several curves over the step. `notes` are written below it."""

    metric: Metric
    curves: Sequence[Curve]
    notes: list[str] = field(default_factory=list)


# ---- lines ----


def line_chart(chart: Chart) -> tuple[str, Json]:
    """Return the SVG, and the data from which the page's script shows values under the pointer."""
    values = np.concatenate([np.asarray(curve.values, dtype=float) for curve in chart.curves])
    steps = [np.asarray(s)[[0, -1]] for c in chart.curves for s in (c.steps, c.broken_steps) if len(s)]
    metric = chart.metric
    scale = {"from_zero": metric.from_zero, "fraction": metric.fraction, "ratio": metric.ratio}
    y_axis = value_axis(values, **scale) if len(values) else linear_axis(0, 1)
    x_axis = step_axis(np.concatenate(steps).tolist() if steps else [])
    if y_axis.logarithmic:
        chart.notes.append("logarithmic scale")
    most = max(8 * MAX_POINTS // max(len(chart.curves), 8), FEWEST_POINTS)
    drawn = [_curve(curve, chart, x_axis, y_axis, most) for curve in chart.curves]
    lines = "".join(line for line, _ in drawn)
    frame = _frame(x_axis, y_axis, chart)
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_spoken(chart))}">'
        f'{frame}{lines}<g class="hover"></g></svg>'
    )
    area = {"left": LEFT, "right": WIDTH - RIGHT, "top": TOP, "bottom": HEIGHT - BOTTOM}
    return svg, {"area": area, "x": [x_axis.low, x_axis.high], "curves": [points for _, points in drawn]}


def step_axis(steps: Sequence[int]) -> Axis:
    """Return an axis from the first to the last step. Ticks are round numbers; the ends need not be."""
    low, high = (min(steps), max(steps)) if steps else (0, 1)
    if low == high:
        return Axis(low - 1, high + 1, [low])
    if low <= 0.1 * high:
        low = 0
    rounded = linear_axis(low, high, 6, whole=True)
    return Axis(low, high, [t for t in rounded.ticks if low <= t <= high])


def _x(axis: Axis, step: float) -> float:
    return round(LEFT + axis.place(step) * (WIDTH - LEFT - RIGHT), 1)


def _y(axis: Axis, value: float) -> float:
    return round(HEIGHT - BOTTOM - axis.place(value) * (HEIGHT - BOTTOM - TOP), 1)


def _curve(curve: Curve, chart: Chart, x_axis: Axis, y_axis: Axis, most: int) -> tuple[str, Json]:
    """Return a curve's SVG: thin raw values, the smoothed curve over them, and a cross on the axis for non-finite values."""
    window = smoothing_window(len(curve.values)) if chart.metric.smoothed else 1
    crosses = "".join(_cross(_x(x_axis, s)) for s in thin_evenly(curve.broken_steps, curve.broken_steps, 60)[0])
    if len(curve.broken_steps):
        chart.notes.append(f"× {len(curve.broken_steps)} values of {curve.label} are not finite")
    lines, main = "", curve.values
    if window > 1:
        if len(chart.curves) <= MAX_RAW:
            lines = _polylines(thin(curve.steps, curve.values, most), curve, (x_axis, y_axis), "raw")
        main = smooth(curve.values, window)
    steps, values = thin_evenly(curve.steps, main, most)
    lines += _polylines((steps, values), curve, (x_axis, y_axis), "line")
    few = list(zip(steps, values, strict=True))
    few = few if len(few) <= 40 and window == 1 else few[-1:]
    radius = 2.6 if len(few) > 1 else 3.2
    dots = "".join(f'<circle cx="{_x(x_axis, s)}" cy="{_y(y_axis, v)}" r="{radius}"/>' for s, v in few)
    shown = {
        "label": curve.label, "colour": colour(curve.colour), "steps": steps,
        "y": [_y(y_axis, v) for v in values],
        "text": [percent(v) if chart.metric.fraction else short(v) for v in values],
    }  # fmt: skip
    return f'<g class="{colour(curve.colour)}">{lines}{dots}{crosses}</g>', shown


def _polylines(points: tuple[list[int], list[float]], curve: Curve, axes: tuple[Axis, Axis], kind: str) -> str:
    """Return a line with gaps at non-finite values."""
    broken = np.sort(np.asarray(curve.broken_steps, dtype=np.int64)).tolist()
    pieces: dict[int, list[str]] = {}
    for s, v in zip(*points, strict=True):
        pieces.setdefault(bisect.bisect(broken, s), []).append(f"{_x(axes[0], s):g},{_y(axes[1], v):g}")
    drawn = [" ".join(piece) for piece in pieces.values() if len(piece) > 1]
    return "".join(f'<polyline class="{kind}" points="{piece}"/>' for piece in drawn)


def _cross(x: float) -> str:
    y = HEIGHT - BOTTOM
    return f'<path class="broken" d="M{x - 3:g} {y - 3}l6 6m0 -6l-6 6"/>'


def _frame(x_axis: Axis, y_axis: Axis, chart: Chart) -> str:
    floor, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in y_axis.ticks:
        y = _y(y_axis, tick)
        label = tick_label(tick, y_axis, chart.metric.fraction)
        fit = f' textLength="{LEFT - 6}" lengthAdjust="spacingAndGlyphs"' if len(label) > 7 else ""  # must fit
        text = f'<text x="{LEFT - 6}" y="{y + 4:g}" class="end"{fit}>{label}</text>'
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{right}"/>{text}')
    for tick in x_axis.ticks:
        x = _x(x_axis, tick)
        text = f'<text x="{x:g}" y="{floor + 16}" class="{"end" if x > right - 14 else "mid"}">{tick:,.0f}</text>'
        parts.append(f'<path class="axis" d="M{x:g} {floor}v4"/>{text}')
    parts.append(f'<path class="axis" d="M{LEFT} {floor}H{right}"/>')
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 4}" class="mid label">step</text>')
    return "".join(parts)


def _spoken(chart: Chart) -> str:
    """Return the chart in words, for screen readers."""
    said = []
    for curve in chart.curves:
        if len(curve.values):
            ends = f"{short(curve.values[0])} at step {curve.steps[0]} to {short(curve.values[-1])} at step {curve.steps[-1]}"
            said.append(f"{curve.label} from {ends}")
    return f"{chart.metric.title}: " + ("; ".join(said) or "no finite value")


# ---- bars ----


def share_bar(phases: Mapping[str, float]) -> str:
    """Return one horizontal bar, as HTML, divided by the share of each phase."""
    total = sum(phases.values()) or 1.0
    cells = []
    for index, (name, seconds) in enumerate(phases.items()):
        share = seconds / total
        label = percent(share, 0) if share >= 0.08 else ""
        tip = escape(f"{name}: {short(seconds)} s per step, {percent(share)}")
        style = f"flex-grow:{max(share, 0.002):.4f}"
        cells.append(f'<span class="{colour(index)}" style="{style}" title="{tip}">{label}</span>')
    return f'<div class="share">{"".join(cells)}</div>'


def bars(groups: Mapping[str, Mapping[str, float]], *, fraction: bool = True) -> str:
    """Return groups of horizontal bars, each with its value at the end: {"greedy": {"before": 0.4, "after": 0.9}}."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    most = 1.0 if fraction else max((v for group in groups.values() for v in group.values()), default=1.0) or 1.0
    rows = ""
    for label, group in groups.items():
        drawn = ""
        for name, value in group.items():
            fill = f'<span class="fill" style="width:{100 * max(value, 0) / most:.2f}%"></span>'
            text = percent(value) if fraction else short(value)
            drawn += f'<div class="bar {colour(names.index(name))}">{fill}<span class="value">{text}</span></div>'
        rows += f'<div class="bar-group"><div class="bar-label">{escape(label)}</div><div>{drawn}</div></div>'
    legend = legend_of(names) if len(names) > 1 else ""
    return f'{legend}<div class="bars">{rows}</div>'


def legend_of(names: Sequence[str], kind: str = "legend") -> str:
    return f'<div class="{kind}">{"".join(chip_of(i, name) for i, name in enumerate(names))}</div>'


def chip_of(index: int, name: str) -> str:
    return f'<span class="chip {colour(index)}"><i></i>{escape(name)}</span>'
