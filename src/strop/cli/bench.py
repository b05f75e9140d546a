"""`strop bench SUITE`"""

import importlib
import importlib.util
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table

from strop.bench.suites import SUITES


def bench(
    suite: Annotated[str, typer.Argument(help="One of: " + "; ".join(f"{k} ({v})" for k, v in SUITES.items()))],
    output: Annotated[Path | None, typer.Option(help="Where the JSON goes; by default benchmarks/results.")] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; each gives one sample per contender.")] = 21,
    only: Annotated[str, typer.Option(help="Only the cases whose name contains this; nothing is written then.")] = "",
) -> None:
    """Measure a suite, print its table, write its JSON with all samples."""
    if suite not in SUITES:
        raise ValueError(f"unknown suite {suite!r}; there are {', '.join(SUITES)}")
    if importlib.util.find_spec("scipy") is None:
        raise ModuleNotFoundError("benchmarks need scipy: pip install 'strop[bench]'")
    from strop.bench import harness

    method = harness.Method(rounds=rounds)
    cases = [
        c for c in importlib.import_module(f"strop.bench.suites.{suite}").cases() if only in f"{c.work} {c.labels}"
    ]
    if not cases:
        raise ValueError(f"no case of {suite} contains {only!r}")
    found = harness.header(suite, method, "strop " + shlex.join(sys.argv[1:]))
    name = f"{suite}-{found['machine']['architecture']}-{found['threads']['usable_cpus']}cores.json"
    path = output or Path("benchmarks/results") / name
    if path.is_dir():
        raise IsADirectoryError(f"--output must be a file, found the folder {path}")
    console = Console()
    found["cases"] = _measure(cases, method, suite, console)
    console.print(_table(suite, found["cases"]))
    if not only:
        harness.save(found, path)
        console.print(f"wrote {path}")


def _measure(cases: list[Any], method: Any, suite: str, console: Console) -> list[dict[str, Any]]:
    from strop.bench import harness

    measured: list[dict[str, Any]] = []
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(suite, total=len(cases))
        try:
            for case, found in zip(cases, harness.run_cases(cases, method), strict=True):
                measured.append(found)
                progress.update(task, advance=1, description=case.work)
        except KeyboardInterrupt:
            console.print(f"interrupted after {len(measured)} of {len(cases)} cases; nothing was written")
            raise typer.Exit(130) from None
    return measured


def _table(suite: str, measured: list[dict[str, Any]]) -> Table:
    from strop.bench.report import duration

    peers = list(dict.fromkeys(peer for case in measured for peer in case["ratios"]))
    table = Table("work", "dtype", "strop", *(f"{p} takes" for p in peers), title=f"{suite}: times as long as strop")
    colours = {"faster": "green", "slower": "bold red", "same": "yellow"}
    for case in measured:
        cells = []
        for peer in peers:
            ratio = case["ratios"].get(peer)
            cells.append(f"[{colours[ratio['verdict']]}]{ratio['value']:.3g}×[/]" if ratio else "")
        strop_time = duration(case["contenders"]["strop"]["median_ns"])
        table.add_row(case["work"], case["labels"].get("dtype", ""), strop_time, *cells)
    return table
