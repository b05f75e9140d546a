"""Prepare numbers for a chart: smoothing, thinning out, axes, labels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

Numbers = Sequence[int] | Sequence[float] | np.ndarray
MAX_POINTS = 320  # of one curve: about one per pixel of a chart
SMALL_FRACTION = 0.2
LOG_RATIO = 8.0
SMOOTH_FROM = 20  # shorter curves are drawn as they are


def smoothing_window(num_values: int) -> int:
    """Return the number of values (odd) that a smoothed value averages; 1 is no smoothing."""
    return 1 if num_values < SMOOTH_FROM else 2 * (num_values // 30) + 3


def smooth(values: Numbers, window: int) -> np.ndarray:
    """Return the moving mean over a centred window, which is shorter at the two ends."""
    sums, n, half = np.concatenate([[0.0], np.cumsum(values)]), len(values), window // 2
    starts, ends = np.maximum(np.arange(n) - half, 0), np.minimum(np.arange(n) + half + 1, n)
    return (sums[ends] - sums[starts]) / (ends - starts)


def thin(steps: Numbers, values: Numbers, most: int = MAX_POINTS) -> tuple[list[int], list[float]]:
    """Return at most `most` points: the minimum and the maximum of each interval, so that no spike is lost."""
    steps, values = np.asarray(steps), np.asarray(values)
    if len(steps) > most:
        num_bins = max(most // 2 - 1, 1)
        edges = [round(i * len(steps) / num_bins) for i in range(num_bins + 1)]
        kept = {0, len(steps) - 1}
        for a, b in pairwise(edges):
            kept |= {a + int(values[a:b].argmin()), a + int(values[a:b].argmax())}
        steps, values = steps[sorted(kept)], values[sorted(kept)]
    return steps.tolist(), values.tolist()


def thin_evenly(steps: Numbers, values: Numbers, most: int = MAX_POINTS) -> tuple[list[int], list[float]]:
    """Return every n-th point and the last one, for curves that are smooth."""
    steps, values = np.asarray(steps), np.asarray(values)
    if len(steps) > most:
        kept = sorted({round(i * (len(steps) - 1) / (most - 1)) for i in range(most)})
        steps, values = steps[kept], values[kept]
    return steps.tolist(), values.tolist()


@dataclass(frozen=True)
class Axis:
    """The ends of a scale and its ticks. On a logarithmic scale the ends are exponents of 10."""

    low: float
    high: float
    ticks: list[float]
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Return a value's position on the axis, from 0 at the low end to 1 at the high end."""
        value = math.log10(value) if self.logarithmic else value
        return (value - self.low) / (self.high - self.low)


def linear_axis(low: float, high: float, num_ticks: int = 5, *, whole: bool = False) -> Axis:
    """Return an axis with round ticks, which begins and ends at a tick."""
    if high <= low:
        pad = abs(low) * 0.1 or 0.5
        low, high = low - pad, high + pad
    step = _nice_step((high - low) / num_ticks)
    if whole:
        step = float(math.ceil(step)) if step != 2.5 else 5.0
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [i * step for i in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], ticks)


def log_axis(low: float, high: float) -> Axis:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    every = max(1, math.ceil((last - first) / 6))
    return Axis(first, last, [10.0**e for e in range(first, last + 1, every)], logarithmic=True)


def value_axis(values: Numbers, *, from_zero: bool = False, fraction: bool = False, ratio: bool = False) -> Axis:
    """Return the axis of a metric.

    A fraction's scale is 0 to 1, unless all values are small. A ratio's scale includes 1, and is logarithmic if the values
    span more than a factor of LOG_RATIO. Other scales start at 0 if that takes less than half of the height. They are
    logarithmic, and the chart says so, if single values are more than 20 times nearly all others.
    """
    values = np.asarray(values, dtype=float)
    low, high = float(values.min()), float(values.max())
    if fraction and low >= 0 and high <= 1:
        whole = Axis(0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0])
        return whole if high > SMALL_FRACTION else linear_axis(0.0, max(high, 0.01))
    if ratio and low > 0:
        low, high = min(low, 1.0), max(high, 1.0)
        return log_axis(low, high) if high > LOG_RATIO * low else linear_axis(low, high)
    place = int(0.97 * (len(values) - 1))
    ordinary = float(np.partition(values, place)[place])
    if low > 0 and high > 20 * ordinary:
        return log_axis(low, high)
    if low == high == 0:
        return linear_axis(0.0, 1.0)
    if from_zero or 0 <= low < 0.5 * high:
        low = min(low, 0.0)
    if low < 0 and 0 >= high > 0.5 * low:
        high = 0.0
    return linear_axis(low, high)


def _nice_step(rough: float) -> float:
    """Return the smallest of 1, 2, 2.5 and 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))


def short(value: float | None) -> str:
    """Return a number formatted with few characters: 0.0123, 1,234, 12.3k, 1.2e−5."""
    if value is None or not math.isfinite(value):
        return "–" if value is None else "not finite"
    size = abs(value)
    if size == 0:
        return "0"
    if 1e5 <= size < 1e9:
        text = f"{value / 1e6:.3g}M" if size >= 1e6 else f"{value / 1e3:.3g}k"
    elif 1e-3 <= size < 1e9:
        text = f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"
    else:
        mantissa, exponent = f"{value:.1e}".split("e")
        text = f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return text.replace("-", "−")


def percent(value: float, decimals: int = 1) -> str:
    return f"{100 * value:.{decimals}f}\u00a0%"  # no-break space


def tick_label(value: float, axis: Axis, fraction: bool = False) -> str:
    """Return a tick's label with just enough digits to tell it from its neighbours."""
    if fraction and axis.high <= 1:
        return percent(value, 0 if axis.ticks[1] - axis.ticks[0] >= 0.01 else 1)
    if axis.logarithmic or len(axis.ticks) < 2:
        return short(value)
    step = axis.ticks[1] - axis.ticks[0]
    if abs(value) < step * 1e-9:
        return "0"
    largest = max(abs(axis.low), abs(axis.high))
    if largest >= 1e5 or largest < 1e-3:
        return short(float(f"{value:.6g}"))
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if abs(step * 10**decimals - round(step * 10**decimals)) > 1e-9:
        decimals += 1  # 0.25
    return f"{value:,.{decimals}f}".replace("-", "−")


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.3g}\u00a0s"
    minutes, hours = round(seconds / 60), seconds / 3600
    if hours < 1:
        return f"{int(seconds // 60)}\u00a0min {int(seconds % 60)}\u00a0s"
    return f"{minutes // 60}\u00a0h {minutes % 60}\u00a0min"
