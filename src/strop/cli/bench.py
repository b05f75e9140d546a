"""`strop bench SUITE`"""

import importlib
import sys
from pathlib import Path
from typing import Annotated

import typer

import strop
from strop.cli.options import number_option, option


def bench(
    suite: Annotated[str, typer.Argument(help="A suite of benchmarks/suites, such as primitives, losses or step.")],
    output: Annotated[Path | None, option("Where the JSON goes; by default benchmarks/results.")] = None,
    rounds: Annotated[int, number_option("Interleaved rounds; each gives one sample per contender.")] = 21,
    only: Annotated[str, option("Only cases whose name contains this; written only if --output is given.")] = "",
) -> None:
    """Measure a suite, print its table, write its JSON with all samples. Needs a checkout of strop's repository."""
    sys.path.insert(0, str(find_checkout()))
    importlib.import_module("benchmarks.command").run(suite, output=output, rounds=rounds, only=only)


def find_checkout() -> Path:
    """Return the repository that strop was imported from or, for an installed strop, the one in the current folder."""
    for folder in (Path(strop.__file__).resolve().parents[2], Path.cwd()):
        if (folder / "benchmarks" / "command.py").is_file():
            return folder
    hint = "clone its repository and run strop bench in that folder"
    raise FileNotFoundError(f"the benchmarks are not installed with strop; {hint}")
