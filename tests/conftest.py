"""Shared fixtures: every primitive on every engine, and the golden values."""

import json
from pathlib import Path

import pytest

import strop
from strop import _compiled

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
