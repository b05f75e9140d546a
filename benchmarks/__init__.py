"""Benchmarks of this repository: suites, the libraries strop is compared with, results, and the pages made from them.

They are not installed with the package. `strop bench SUITE` runs them in a checkout; `python -m benchmarks.report` writes
the tables and figures of the documents.
"""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment() -> dict[str, str]:
    """Return this process's environment with the checkout on Python's path, for processes that import `benchmarks`."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
