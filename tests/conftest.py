"""Shared fixtures: every primitive on every engine, and the golden values."""

import json
import os
from pathlib import Path

import pytest

if not Path("/dev/nvidia0").exists():  # no GPU: Triton's kernels run through its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")  # here, before any module makes them
# some virtual machines announce AMX and then refuse it: a bfloat16 product would end the process
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# the workers of pytest-xdist share the cores: with threads for all of them in each, most would wait for the others
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))

from interpreter import hasten

import strop
from strop import _compiled

if os.environ.get("TRITON_INTERPRET") == "1":
    hasten()

# an editable install is imported before PYTHONPATH: in a second checkout it would be the first one that is tested
TESTED, CHECKOUT = Path(strop.__file__).resolve().parent, Path(__file__).resolve().parents[1]
if TESTED.parent.name == "src" and TESTED != CHECKOUT / "src" / "strop":
    pytest.exit(
        f"these tests are of {CHECKOUT}, but strop is imported from {TESTED}; use PYTHONPATH=src python -m pytest", 4
    )


def pytest_addoption(parser):
    parser.addoption("--reverse", action="store_true", help="files, and the tests in each, from the last to the first")


def pytest_collection_modifyitems(config, items):
    if config.getoption("reverse"):
        items.reverse()


ENGINES = ["numpy", *(_compiled.native.available_isas() if _compiled.native else [])]


@pytest.fixture(params=ENGINES)
def engine(request, monkeypatch):
    """The public functions with each instruction set this machine has, and without the compiled module."""
    if request.param == "numpy":
        monkeypatch.setattr(_compiled, "native", None)
        monkeypatch.setattr(_compiled, "kernels", {})
        for name in strop.__all__:
            if hasattr(getattr(strop, name), "__self__"):
                monkeypatch.setattr(strop, name, getattr(strop, name).__self__.twin)
        yield "numpy"
    else:
        before = _compiled.native.isa()
        assert _compiled.native.set_isa(request.param)
        yield request.param
        _compiled.native.set_isa(before)


@pytest.fixture(scope="session")
def golden():
    return json.loads((Path(__file__).parent / "golden" / "trl-1.16.json").read_text())


@pytest.fixture(scope="session")
def golden_more():
    """By tests/golden/make_trl_losses.py."""
    return json.loads((Path(__file__).parent / "golden" / "trl-1.16-more.json").read_text())
