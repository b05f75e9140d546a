"""Run one suite: what `strop bench SUITE` does in a checkout."""

import importlib
import importlib.util
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table

from benchmarks import ROOT, harness
from benchmarks.harness import Measurable, Method
from benchmarks.suites import SUITES
from benchmarks.text import duration
from strop._install import missing

COLOURS = {"faster": "green", "slower": "bold red", "same": "yellow"}  # of a ratio, by its verdict


def run(suite: str, *, output: Path | None, rounds: int, only: str) -> None:
    """Measure the cases of a suite whose name contains `only`, print their table and write their JSON."""
    if suite not in SUITES:
        raise ValueError(f"unknown suite {suite!r}; there are {', '.join(SUITES)}")
    if importlib.util.find_spec("scipy") is None:
        raise missing("strop bench", "scipy", "bench")
    method = Method(rounds=rounds)
    module = importlib.import_module(f"benchmarks.suites.{suite}")
    cases = [case for case in module.cases() if only in f"{case.work} {getattr(case, 'labels', '')}"]
    if not cases:
        raise ValueError(f"no case of {suite} contains {only!r}")
    found = harness.header(suite, method, _repeatable_command(sys.argv[1:]))
    if getattr(module, "ON_GPU", False):
        found["gpu"] = harness.gpu()
    path = output or ROOT / f"benchmarks/results/{suite}-{harness.machine_name(found)}.json"
    if path.is_dir():
        raise IsADirectoryError(f"--output must be a file, found the folder {path}")
    console = Console()
    load = harness.Load()
    found["cases"] = _measure(cases, method, suite, console)
    found["load_by_others"] = load.by_others()
    if found.get("gpu"):
        found["gpu_after"] = harness.gpu()  # the clocks again
    console.print(*_tables(suite, module, found["cases"]), sep="\n")
    if output or not only:
        harness.save(found, path)
        console.print(f"wrote {path}")


def _measure(cases: Sequence[Measurable], method: Method, suite: str, console: Console) -> list[dict[str, Any]]:
    """Return the results of all cases, while a progress bar shows how far it is."""
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


def _tables(suite: str, module: ModuleType, measured: list[dict[str, Any]]) -> Iterator[Table]:
    """Yield the suite's own table if it has one, else tables of timings."""
    if not hasattr(module, "summary"):
        yield from _timing_tables(suite, measured)
        return
    header, rows = module.summary(measured)
    table = Table(*header, title=suite)
    for row in rows:
        table.add_row(*row)
    yield table


def _timing_tables(suite: str, measured: list[dict[str, Any]]) -> Iterator[Table]:
    """Yield one table per first contender: its time in each case, and how many times as long the others take."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for case in measured:
        if case.get("contenders"):
            tables.setdefault(next(iter(case["contenders"])), []).append(case)
    for first, cases in tables.items():
        peers = list(dict.fromkeys(peer for case in cases for peer in case["ratios"]))
        title = f"{suite}: times as long as {first}"
        table = Table("work", "dtype", first, *(f"{peer} takes" for peer in peers), title=title)
        for case in cases:
            ratios = [case["ratios"].get(peer) for peer in peers]
            cells = [f"[{COLOURS[ratio['verdict']]}]{ratio['value']:.3g}×[/]" if ratio else "" for ratio in ratios]
            own = duration(case["contenders"][first]["median_ns"])
            table.add_row(case["work"], case["labels"].get("dtype", ""), own, *cells)
        yield table


def _repeatable_command(arguments: Sequence[str]) -> str:
    """Return the command that repeats the measurement, without --output."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and not argument.startswith("--output"):
            kept.append(argument)
        skip = argument == "--output"
    return "strop " + shlex.join(kept)
