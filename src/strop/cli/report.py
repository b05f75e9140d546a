"""`strop report RUN…`"""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, or folders of them; several are laid over one another.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="The HTML file; by default report.html in the run, or here for several.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="The heading.")] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Also the main curves as an image (PNG or SVG; needs matplotlib).")
    ] = None,
) -> None:
    """One HTML page of a run, or of several side by side. It is complete in itself: mail it, keep it."""
    from strop.report import draw_figure, load_runs, write_report

    found = load_runs(runs)
    one = runs[0] if len(runs) == 1 else Path()
    path = write_report(found, output or one / "report.html", title=title)
    if figure is not None:
        draw_figure(found, figure)
        print(figure)
    print(path)
