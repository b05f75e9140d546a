"""`strop report RUN…`"""

from pathlib import Path
from typing import Annotated

import typer

from strop.cli.options import number_option, option


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of them; several are overlaid.")],
    output: Annotated[Path | None, option("The HTML file; by default report.html in the run, or here.")] = None,
    title: Annotated[str | None, option("The heading.")] = None,
    figure: Annotated[Path | None, option("Also draw the main curves as PNG or SVG (needs matplotlib).")] = None,
    watch: Annotated[bool, option("Serve the page on localhost and follow the runs until Ctrl-C.")] = False,
    port: Annotated[int, number_option("Of --watch; 0 is any that is free.", high=65535)] = 0,
) -> None:
    """One HTML page of a run, or of several side by side. It is complete in itself: mail it, keep it."""
    from strop.report import draw_figure, load_runs, write_report

    if watch:
        _serve(runs, title, port)
        return
    found = load_runs(runs)
    one = runs[0] if len(runs) == 1 else Path()
    path = write_report(found, output or one / "report.html", title=title)
    if figure is not None:
        draw_figure(found, figure)
        print(figure)
    print(path)


def _serve(runs: list[Path], title: str | None, port: int) -> None:
    from strop.report import build_report, load_runs
    from strop.report.runs import RunReader
    from strop.report.watch import Watch

    for folder in runs:
        if not folder.is_dir():
            raise FileNotFoundError(f"no such run folder: {folder}")
    readers: dict[Path, RunReader] = {}  # so that only new lines are read each time

    def page(version: str) -> str:
        return build_report(load_runs(runs, readers), title=title, version=version)

    with Watch(runs, page, port) as server:
        print(server.address, flush=True)
        server.serve_forever()
