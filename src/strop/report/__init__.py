"""Reports of runs: one self-contained HTML page, and its main figure as an image.

write_report(["runs/a", "runs/b"], "report.html")
page = build_report(runs, extra_sections=[bar_section("Accuracy", {"greedy": {"before": 0.4, "after": 0.97}})])
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from strop.report import page
from strop.report.curves import duration
from strop.report.metrics import ALSO_CALLED
from strop.report.page import Section as Section
from strop.report.page import Tile as Tile
from strop.report.page import bar_section as bar_section
from strop.report.page import sample_section as sample_section
from strop.report.runs import Run as Run
from strop.report.runs import Series
from strop.report.runs import load_run as load_run
from strop.report.runs import load_runs as load_runs
from strop.report.svg import Chart as Chart
from strop.report.svg import Curve as Curve


def build_report(
    runs: Iterable[Run | str | Path],
    *,
    extra_sections: Sequence[Section] = (),
    headline: Sequence[Tile] = (),
    title: str | None = None,
    lead: str | None = None,
    version: str | None = None,
) -> str:
    """Return the page as text.

    runs             run folders or loaded runs, overlaid in every chart
    extra_sections   put between the summary and the curves
    headline         numbers at the top in place of the run's own
    title, lead      the heading, and the line below it
    version          set for a page that a server keeps up to date (`strop.report.watch`)
    """
    found = _as_runs(runs)
    shown = page.drawn(found)
    table = Section("Runs", page.summary_table(found)) if len(found) > 1 else None
    sections = [page.alarm_section(found), table, *extra_sections, *page.curve_sections(shown)]
    sections += [page.time_section(shown), page.samples_section(shown), page.config_section(found)]
    tiles = list(headline) or (page.summary_tiles(found[0]) if len(found) == 1 else [])
    lead = _lead(found) if lead is None else lead
    return page.render(found, [one for one in sections if one], tiles, title or _title(found), lead, version)


def write_report(runs: Iterable[Run | str | Path], path: str | Path, **options: object) -> Path:
    """Write the page to a file and return its path. `options` are those of build_report."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"the report must be a file, found the folder {path}")
    text = build_report(runs, **options)  # type: ignore[arg-type]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="replace")  # half a surrogate pair, which JSON can hold
    return path


def draw_figure(runs: Iterable[Run | str | Path], path: str | Path, **options: object) -> Path:
    """Draw the main curves as an image and return its path (needs matplotlib)."""
    from strop.report import figure

    return figure.draw(_as_runs(runs), Path(path), **options)  # type: ignore[arg-type]


def _as_runs(runs: Iterable[Run | str | Path]) -> list[Run]:
    runs = [runs] if isinstance(runs, (str, Path, Run)) else list(runs)
    folders = [r for r in runs if not isinstance(r, Run)]
    found = [r for r in runs if isinstance(r, Run)] + load_runs(folders)
    if not found:
        raise ValueError("a report needs at least one run, found none")
    for run in found:
        _hide_doubles(run)
    return found


def _hide_doubles(run: Run) -> None:
    """Hide metrics that repeat another one: old names, and a single reward function that equals the mean reward."""
    names = set(run.names)
    for other, name in ALSO_CALLED.items():
        if {other, name} <= names and _are_equal(run.series(other), run.series(name)):
            run.hidden.add(other)
    for prefix in ("", "eval/"):
        mean = run.series(f"{prefix}reward/mean")
        for name in names - {f"{prefix}reward/mean"}:
            if name.startswith(f"{prefix}reward/") and len(mean) and _are_equal(run.series(name), mean):
                run.hidden.add(name)


def _are_equal(a: Series, b: Series) -> bool:
    return np.array_equal(a.steps, b.steps) and np.array_equal(a.values, b.values)


def _title(runs: Sequence[Run]) -> str:
    return " · ".join(run.name for run in runs) if len(runs) <= 4 else f"{len(runs):,} runs"


def _lead(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        return f"{len(runs):,} runs compared."
    run = runs[0]
    parts = [run.algorithm or "A run", run.model]
    steps = f"{run.num_steps:,} step" + "s" * (run.num_steps != 1)
    parts.append(f"{steps} in {duration(run.seconds)}" if run.seconds else steps)
    started = str(run.header.get("started", ""))[:16].replace("T", " ")
    parts.append(f"started {started}" if started else "")
    return ", ".join(p for p in parts if p) + "."
