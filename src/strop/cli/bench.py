"""`strop bench SUITE`"""

import importlib
import importlib.util
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table

from strop.bench.suites import SUITES
from strop.cli.options import number_option


def bench(
    suite: Annotated[str, typer.Argument(help="One of: " + "; ".join(f"{k} ({v})" for k, v in SUITES.items()))],
    output: Annotated[Path | None, typer.Option(help="Where the JSON goes; by default benchmarks/results.")] = None,
    rounds: Annotated[int, number_option("Interleaved rounds; each gives one sample per contender.")] = 21,
    only: Annotated[
        str,
        typer.Option(
            help="Only the cases whose name contains this; nothing is written then, unless --output says where."
        ),
    ] = "",
) -> None:
    """Measure a suite, print its table, write its JSON with all samples."""
    if suite not in SUITES:
        raise ValueError(f"unknown suite {suite!r}; there are {', '.join(SUITES)}")
    if importlib.util.find_spec("scipy") is None:
        raise ModuleNotFoundError("benchmarks need scipy: pip install 'strop[bench]'")
    from strop.bench import harness

    method = harness.Method(rounds=rounds)
    module = importlib.import_module(f"strop.bench.suites.{suite}")
    cases = [c for c in module.cases() if only in f"{c.work} {getattr(c, 'labels', '')}"]
    if not cases:
        raise ValueError(f"no case of {suite} contains {only!r}")
    found = harness.header(suite, method, _command(sys.argv[1:]))
    if getattr(module, "ON_GPU", False):
        found["gpu"] = harness.gpu()
    path = output or Path("benchmarks/results") / f"{suite}-{harness.machine_name(found)}.json"
    if path.is_dir():
        raise IsADirectoryError(f"--output must be a file, found the folder {path}")
    console = Console()
    load = harness.Load()
    found["cases"] = _measure(cases, method, suite, console)
    found["load_by_others"] = load.by_others()
    if found.get("gpu"):
        found["gpu_after"] = harness.gpu()  # the clocks again
    console.print(*_summary(suite, module, found["cases"]), sep="\n")
    if output or not only:
        harness.save(found, path)
        console.print(f"wrote {path}")


def _measure(cases: list[Any], method: Any, suite: str, console: Console) -> list[dict[str, Any]]:
    from strop.bench import harness

    measured: list[dict[str, Any]] = []
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(suite, total=len(cases) + sum(len(harness.able_alone(case)) for case in cases))
        try:
            for case in cases:
                progress.update(task, description=case.work)
                if not console.is_terminal:
                    print(case.work, file=sys.stderr, flush=True)
                measured.append(case.measure(method))
                progress.advance(task)
            for name in harness.measure_alone(cases, measured):
                progress.update(task, advance=1, description=name)
        except KeyboardInterrupt:
            console.print(f"interrupted after {len(measured)} of {len(cases)} cases; nothing was written")
            raise typer.Exit(130) from None
    return measured


def _summary(suite: str, module: Any, measured: list[dict[str, Any]]) -> Iterator[Table]:
    """The suite's own table where its rows are not timings."""
    if not hasattr(module, "summary"):
        yield from _tables(suite, measured)
        return
    header, rows = module.summary(measured)
    table = Table(*header, title=suite)
    for row in rows:
        table.add_row(*row)
    yield table


def _tables(suite: str, measured: list[dict[str, Any]]) -> Iterator[Table]:
    """Timed rows with the same contenders together: what the first one takes, how many times as long the others do."""
    from strop.bench.text import duration

    colours = {"faster": "green", "slower": "bold red", "same": "yellow"}
    timed = [case for case in measured if case.get("contenders")]
    tables: dict[str, list[dict[str, Any]]] = {}
    for case in timed:
        tables.setdefault(next(iter(case["contenders"])), []).append(case)
    for first, cases in tables.items():
        peers = list(dict.fromkeys(peer for case in cases for peer in case["ratios"]))
        table = Table(
            "work", "dtype", first, *(f"{p} takes" for p in peers), title=f"{suite}: times as long as {first}"
        )
        for case in cases:
            ratios = [case["ratios"].get(peer) for peer in peers]
            cells = [f"[{colours[ratio['verdict']]}]{ratio['value']:.3g}×[/]" if ratio else "" for ratio in ratios]
            own = duration(case["contenders"][first]["median_ns"])
            table.add_row(case["work"], case["labels"].get("dtype", ""), own, *cells)
        yield table


def _command(arguments: list[str]) -> str:
    """What repeats the measurement: where its result goes is no part of it."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and not argument.startswith("--output"):
            kept.append(argument)
        skip = argument == "--output"
    return "strop " + shlex.join(kept)
