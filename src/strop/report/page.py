"""The report's page: summary, curves, phase times, samples, configuration. One HTML file that loads nothing else."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import strop
from strop._types import Json, Row
from strop.report import samples
from strop.report.alarms import alarms_of
from strop.report.curves import duration, percent, short, smoothing_window
from strop.report.metrics import GROUPS, SECOND_TO, Metric, describe
from strop.report.runs import Run, Series
from strop.report.svg import (
    MAX_RAW,
    Chart,
    Curve,
    bars,
    chip_of,
    escape,
    legend_of,
    line_chart,
    share_bar,
)
from strop.training.callbacks import falls

HERE = Path(__file__).parent
WHOLE_STEP = "time/step"
SAMPLING_METRICS = {"reward/mean", "completion/truncated_fraction", "time/generate"}
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
MAX_DRAWN = 24  # runs whose curves, times and samples are on the page; the table lists all runs
MAX_LISTED = 50  # notes and alarms
MAX_OPTIONS = 12  # columns for differing options, if there are very many runs


@dataclass(frozen=True)
class Tile:
    """A number at the top of the page: `before` → `value`."""

    label: str
    value: str
    before: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page: `body` is HTML; `charts` are drawn after it."""

    title: str
    body: str = ""
    under: str = ""
    charts: Sequence[Chart] = ()


# ---- sections that a caller may add ----


def bar_section(
    title: str, groups: Mapping[str, Mapping[str, float]], *, under: str = "", fraction: bool = True
) -> Section:
    """Return a section of grouped bars: {"greedy": {"before": 0.41, "after": 0.97}, "best of 8": {…}}."""
    return Section(title, f'<div class="card">{bars(groups, fraction=fraction)}</div>', under)


def sample_section(title: str, rows: Sequence[Row], *, under: str = "") -> Section:
    """Return a section that compares completions before and after training.

    rows   dicts with prompt, before, after, and if known reward_before and reward_after
    """
    cards = []
    for row in rows:
        sides = [samples.Side(name, row[name], row.get(f"reward_{name}")) for name in ("before", "after")]
        cards.append(samples.card(row["prompt"], sides))
    return Section(title, "".join(cards), under)


def samples_section(runs: Sequence[Run]) -> Section | None:
    """Return the section of samples; None if there are none. If there are several runs, each is folded."""
    found: list[tuple[str, str]] = []
    for run in runs:
        if run.samples:
            body, under = samples.of_run(run)
            if len(runs) > 1:
                body = _folded(f"{run.name}: {under}", body)
            found.append((body, under))
    if not found:
        return None
    return Section("Samples", "".join(body for body, _ in found), found[0][1] if len(runs) == 1 else "")


# ---- the page ----


def render(
    runs: Sequence[Run],
    sections: Sequence[Section],
    tiles: Sequence[Tile],
    title: str,
    lead: str,
    version: str | None = None,
) -> str:
    """Return the page. With a version, the page polls its server for a newer version."""
    follows = version is not None
    policy = f"{POLICY}; connect-src 'self'" if follows else POLICY
    of = f' data-version="{escape(version)}"' if follows else ""
    live = '<p class="live" role="status">Following the run.</p>' if follows else ""
    complete = "" if follows else "This file is complete: it loads nothing from anywhere."
    scripts = ["hover.js", *(["watch.js"] if follows else [])]
    script = "\n".join((HERE / name).read_text(encoding="utf-8") for name in scripts)
    data: list[Json] = []
    body = "".join(_section(section, data) for section in sections)
    shown = drawn(runs)
    legend = legend_of([run.name for run in shown], "legend runs") if len(shown) > 1 else ""
    if len(shown) < len(runs):
        legend = legend_of([run.name for run in shown])
        legend = f'<details class="legend runs"><summary>{len(shown)} of {len(runs):,} runs are drawn</summary>{legend}</details>'
    notes = _first_few([f"<li>{escape(f'{run.name}: {note}')}</li>" for run in runs for note in run.notes], "notes")
    told = f'<ul class="notes">{notes}</ul>' if notes else ""
    curves = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en"{of}><head><meta charset="utf-8"><title>{escape(title)} · strop</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<link rel="icon" href="data:,"><style>{(HERE / "style.css").read_text(encoding="utf-8")}</style></head>\n<body>'
        f'<header><div class="mark">strop</div><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>{live}</header>\n'
        f"<main>{told}{_tiles(tiles)}{legend}{body}</main>\n"
        f"<footer>Written by strop {strop.__version__}. {complete}</footer>\n"
        f'<script type="application/json" id="curves">{curves}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def _first_few(items: Sequence[str], what: str) -> str:
    """Return the list items joined: at most MAX_LISTED, then the number of those left out."""
    more = f"<li>and {len(items) - MAX_LISTED:,} more {what}</li>" if len(items) > MAX_LISTED else ""
    return "".join(items[:MAX_LISTED]) + more


def _tiles(tiles: Sequence[Tile]) -> str:
    drawn = []
    for tile in tiles:
        before = f'<span class="from">{escape(tile.before)} → </span>' if tile.before else ""
        drawn.append(
            f'<div class="tile"><div class="what">{escape(tile.label)}</div><div class="number">{before}{escape(tile.value)}</div>'
            f'<div class="detail">{escape(tile.detail)}</div></div>'
        )
    return f'<div class="tiles">{"".join(drawn)}</div>' if drawn else ""


def _section(section: Section, data: list[Json]) -> str:
    under = f'<p class="under">{escape(section.under)}</p>' if section.under else ""
    charts = "".join(_chart_card(chart, data) for chart in section.charts)
    grid = f'<div class="grid">{charts}</div>' if charts else ""
    return f"<section><h2>{escape(section.title)}</h2>{under}{section.body}{grid}</section>\n"


def _chart_card(chart: Chart, data: list[Json]) -> str:
    svg, points = line_chart(chart)
    data.append(points)
    windows = sorted({smoothing_window(len(c.values)) for c in chart.curves} - {1}) if chart.metric.smoothed else []
    spans = "–".join(str(w) for w in dict.fromkeys((windows[0], windows[-1]))) if windows else ""
    behind = "; raw behind" if len(chart.curves) <= MAX_RAW else ""
    notes = [*([f"mean of {spans} values{behind}"] if spans else []), *chart.notes]
    if not any(len(c.values) for c in chart.curves):
        notes.append("no finite value")
    note = f'<p class="note">{escape("; ".join(notes))}</p>' if notes else ""
    head = _head(escape(chart.metric.title), escape(chart.metric.unit))
    return f'<div class="card" data-chart="{len(data) - 1}">{head}{svg}{note}</div>'


def _head(title: str, unit: str) -> str:
    return f'<div class="head"><h3>{title}</h3><span class="unit">{unit}</span></div>'


# ---- sections of a run folder ----


def drawn(runs: Sequence[Run]) -> Sequence[Run]:
    """Return the runs to draw: all, or MAX_DRAWN of them, half the best and half spread evenly over the others."""
    if len(runs) <= MAX_DRAWN:
        return runs
    half = MAX_DRAWN // 2
    best, rest = (ranked := rank(runs))[:half], ranked[half:]
    return [*best, *(rest[round(k * (len(rest) - 1) / (half - 1))] for k in range(half))]


def rank(runs: Sequence[Run]) -> list[Run]:
    """Return the runs sorted by the final value of the first main metric, best first. Runs without it come last."""
    names = main_names(runs, 1)
    if not names:
        return list(runs)
    sign = 1 if falls(names[0]) else -1
    found = [run.series(names[0]) for run in runs]
    values = [sign * series.ends()[1] if len(series) else math.inf for series in found]
    return [runs[i] for i in sorted(range(len(runs)), key=values.__getitem__)]


def _option_cells(configs: Sequence[Json]) -> dict[str, list[str]]:
    """Return option → its value in each config, as text."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return {key: [json.dumps(c[key], ensure_ascii=False) if key in c else "–" for c in configs] for key in keys}


def curve_sections(runs: Sequence[Run]) -> list[Section]:
    names = dict.fromkeys(name for run in runs for name in run.names if not name.startswith("time/"))
    charts: dict[str, list[tuple[float, Chart]]] = {group: [] for group in GROUPS}
    for position, name in enumerate(names):
        metric = describe(name)
        for chart in _charts_of(name, metric, runs):
            charts[_group(name, metric, runs)].append((1000 * metric.rank + position, chart))
    order = {group: [c for _, c in sorted(found, key=lambda f: f[0])] for group, found in charts.items()}
    return [Section(GROUPS[group][0], under=GROUPS[group][1], charts=found) for group, found in order.items() if found]


def _group(name: str, metric: Metric, runs: Sequence[Run]) -> str:
    """Return the metric's section. Completion lengths say nothing about the policy if the run samples none."""
    samples_none = all(not SAMPLING_METRICS & set(run.names) for run in runs if name in run.names)
    return "optimiser" if name.endswith("completion/length") and samples_none else metric.group


def _charts_of(name: str, metric: Metric, runs: Sequence[Run]) -> list[Chart]:
    """Return one chart for all runs, or one per algorithm if the metric's meaning differs between algorithms."""
    found = [(i, run, run.series(name)) for i, run in enumerate(runs) if name in run.names]
    found = [(i, run, series) for i, run, series in found if len(series) or len(series.broken_steps)]
    algorithms = list(dict.fromkeys(run.algorithm for _, run, _ in found)) if metric.by_algorithm else [None]
    charts = []
    for algorithm in algorithms:
        chosen = [(i, run, series) for i, run, series in found if algorithm in (None, run.algorithm)]
        if not chosen:
            continue
        curves = [Curve(run.name, s.steps, metric.scale * s.values, s.broken_steps, colour=i) for i, run, s in chosen]
        title = f"{metric.title}, {algorithm}" if len(algorithms) > 1 else metric.title
        charts.append(Chart(replace(metric, title=title), curves))
    return charts


def alarm_section(runs: Sequence[Run]) -> Section | None:
    rows = []
    for run in runs:
        for title, numbers, advice in alarms_of(run):
            whose = f"{run.name}: " if len(runs) > 1 else ""
            rows.append(f"<li><b>{escape(whose + title)}</b> <span>{escape(numbers)}</span><br>{escape(advice)}</li>")
    return Section("Alarms", f'<ul class="alarms">{_first_few(rows, "alarms")}</ul>') if rows else None


def time_section(runs: Sequence[Run]) -> Section | None:
    """Return the section of the phases' times: their shares of a step, and how they change over the run."""
    phases = dict.fromkeys(n for run in runs for n in run.names if n.startswith("time/") and n != WHOLE_STEP)
    timed = [(i, run, _phases_of(run, list(phases))) for i, run in enumerate(runs)]
    timed = [(i, run, series) for i, run, series in timed if any(len(s) for s in series.values())]
    if not timed:
        return None
    labels = list(dict.fromkeys(label for _, _, series in timed for label in series))
    shares = "".join(_shares(i, run, series, alone=len(runs) == 1) for i, run, series in timed)
    charts = []
    for _, run, series in timed:
        found = [(colour, label, s) for colour, (label, s) in enumerate(series.items()) if len(s)]
        curves = [Curve(label, s.steps, s.values, s.broken_steps, colour) for colour, label, s in found]
        title = run.name if len(runs) > 1 else "Over the run"
        charts.append(Chart(Metric(title, "seconds per step", from_zero=True), curves))
    body = f'<div class="card">{legend_of(labels)}{shares}</div>'
    return Section("Where the time goes", body, "Seconds of each phase of a training step.", charts)


def _phases_of(run: Run, names: Sequence[str]) -> dict[str, Series]:
    """Return the seconds of each phase, and as `other` the rest of the step."""
    series = {name.removeprefix("time/"): run.series(name) for name in names}
    whole = run.series(WHOLE_STEP)
    if len(whole):
        spent = sum((_at(whole.steps, s) for s in series.values()), np.zeros(len(whole)))
        series["other"] = Series(whole.steps, np.maximum(whole.values - spent, 0), whole.broken_steps)
    return series


def _at(steps: np.ndarray, series: Series) -> np.ndarray:
    """Return the values at these steps, and 0 where the series has no value."""
    if not len(series):
        return np.zeros(len(steps))
    index = np.minimum(np.searchsorted(series.steps, steps), len(series) - 1)
    return np.where(series.steps[index] == steps, series.values[index], 0.0)


def _shares(index: int, run: Run, series: Mapping[str, Series], alone: bool) -> str:
    means = {label: float(s.values.mean()) if len(s) else 0.0 for label, s in series.items()}
    total = sum(means.values())
    name = "Mean of all steps" if alone else chip_of(index, run.name)
    head = _head(name, f"{short(total)} s per step")
    if not alone:
        return head + share_bar(means)
    cells = ((escape(label), f"{short(one)} s", percent(one / (total or 1))) for label, one in means.items())
    rows = "".join(f'<tr><td>{a}</td><td class="number">{b}</td><td class="number">{c}</td></tr>' for a, b, c in cells)
    return f"{head}{share_bar(means)}<table>{rows}</table>"


def facts(run: Run) -> Json:
    """Return a run's facts besides its options: model, data, rewards, command."""
    header, model = run.header, run.header.get("model")
    rewards = [reward for reward in header.get("rewards") or () if isinstance(reward, dict)]
    found = {
        "algorithm": run.algorithm,
        "model": run.model,
        "model.name": model.get("name") if isinstance(model, dict) else None,
        "started": header.get("started"),
        "command": header.get("command"),
        "data": header.get("data"),
        "rewards": [f"{r.get('name')} of {r.get('file')}, sha256 {str(r.get('sha256'))[:12]}" for r in rewards],
    }
    job = header.get("job")
    return found | ({f"job.{name}": value for name, value in job.items()} if isinstance(job, dict) else {})


def config_section(runs: Sequence[Run]) -> Section | None:
    """Return the section of the options and facts: those that differ, then the others."""
    many = len(runs) > MAX_DRAWN
    known = [{} if many else {name: value for name, value in facts(run).items() if value} for run in runs]
    cells = _option_cells([about | run.config for about, run in zip(known, runs, strict=True)])
    differing = {key: values for key, values in cells.items() if len(set(values)) > 1}
    alike = {key: values[0] for key, values in cells.items() if key not in differing}
    names = [run.name for run in runs]
    if many:
        columns = {"run": names} | dict(list(differing.items())[:MAX_OPTIONS])
        table = _table(list(columns), zip(*columns.values(), strict=True), "config sortable", tall=True)
        more = f"<p>and {len(differing) - MAX_OPTIONS} more options</p>" if len(differing) > MAX_OPTIONS else ""
        told = f"Options that differ, for {len(runs):,} runs"
        return Section("Configuration", _folded(told, table + more)) if differing else None
    if not cells:
        return None
    rows = [(key, *values) for key, values in differing.items()]
    tables = _table(["option", *names], rows, "config", "differs") if rows else ""
    if alike:
        told = f"{len(alike)} {'that are the same' if len(runs) > 1 else 'options'}"
        tables += _folded(told, _table(["option", "value"], alike.items(), "config"))
    versions = {k: v for run in runs for k, v in (run.header.get("versions") or {}).items()}
    told = "Versions: " + ", ".join(f"{k} {v}" for k, v in versions.items()) + "." if versions else ""
    return Section("Configuration", tables, told)


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str, row_kind: str = "", tall: bool = False
) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = ""
    for first, *cells in rows:
        values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        body += f'<tr class="{row_kind}"><th>{escape(first)}</th>{values}</tr>'
    return f'<div class="scroll{" tall" * tall}"><table class="{kind}"><tr>{head}</tr>{body}</table></div>'


def _folded(told: str, body: str) -> str:
    return f"<details><summary>{escape(told)}</summary>{body}</details>"


# ---- the summary ----


def written(value: float, metric: Metric) -> str:
    return percent(value) if metric.fraction else short(value)


def summary_tiles(run: Run, most: int = 6) -> list[Tile]:
    """Return tiles with a run's main metrics at its start and at its end."""
    tiles = [Tile("Steps", f"{run.num_steps:,}", detail=duration(run.seconds) if run.seconds else "")]
    for name in sorted(run.names, key=lambda n: describe(n).rank):
        metric, series = describe(name), run.series(name)
        if not len(series) or len(tiles) == most or not _is_main(name, run):
            continue
        before, after = series.ends()
        how = f"first and last {'tenth of the run' if len(series) >= 20 else 'value'}" if len(series) > 1 else ""
        was = written(before, metric) if len(series) > 1 else ""
        tiles.append(Tile(metric.title, written(after, metric), was, "; ".join(p for p in (metric.unit, how) if p)))
    return tiles


def _is_main(name: str, run: Run) -> bool:
    """Return whether a metric is a main metric of the run."""
    return describe(name).in_summary and SECOND_TO.get(name) not in run.names


def main_names(runs: Sequence[Run], most: int = 6) -> list[str]:
    """Return the main metrics of these runs, the most important first."""
    found = dict.fromkeys(name for run in runs for name in run.names if _is_main(name, run) and len(run.series(name)))
    return sorted(found, key=lambda n: describe(n).rank)[:most]


def summary_table(runs: Sequence[Run]) -> str:
    """Return a table with one row per run; on a narrow screen each row becomes a card."""
    names, shown = main_names(runs), {id(run): i for i, run in enumerate(drawn(runs))}
    runs = rank(runs) if len(runs) > MAX_DRAWN else runs
    columns = ["run", "algorithm", "steps", "time", *(describe(n).title for n in names)]
    heads = "".join(f'<th class="{"number" if i > 1 else ""}">{escape(c)}</th>' for i, c in enumerate(columns))
    rows = []
    for run in runs:
        i = shown.get(id(run))
        chip = escape(run.name) if i is None else chip_of(i, run.name)
        cells: list[tuple[str, float | None]] = [(chip, None), (escape(run.algorithm), None)]
        cells += [(f"{run.num_steps:,}", run.num_steps), (duration(run.seconds), run.seconds)]
        for name in names:
            series = run.series(name)
            there = _is_main(name, run) and len(series) > 0
            cells.append((_ends_written(series, describe(name)), series.ends()[1]) if there else ("–", None))
        told = enumerate(zip(cells, columns, strict=True))
        rows.append("".join(_cell(cell, column, k > 1, value) for k, ((cell, value), column) in told))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    note, tall = "", " tall" if len(runs) > MAX_DRAWN else ""
    if tall:
        best = f"the best by {describe(names[0]).title} and others evenly from the next to the worst" if names else ""
        note = f"<p>Curves, times and samples are those of {len(shown)} runs: {escape(best or 'the first')}.</p>"
    return f'{note}<div class="scroll{tall}"><table class="stack sortable"><tr>{heads}</tr>{body}</table></div>'


def _cell(content: str, column: str, number: bool, value: float | None = None) -> str:
    order = "" if value is None else f' data-value="{value:.9g}"'
    kind = ("number " if number else "") + ("none" if content == "–" else "")
    return f'<td class="{kind}" data-label="{escape(column)}"{order}><span>{content}</span></td>'


def _ends_written(series: Series, metric: Metric) -> str:
    before, after = series.ends()
    was = f'<span class="from">{written(before, metric)} → </span>' if len(series) > 1 else ""
    return f"{was}{written(after, metric)}"
