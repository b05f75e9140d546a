"""Every engine that runs here is tested by existing."""

import numpy as np
import pytest

import strop
from strop import _compiled
from strop.moe import available_engines
from strop.moe.engines import engine_class


@pytest.fixture(params=_compiled.native.available_isas() if _compiled.native else [])
def isa(request):
    """The native engine with each instruction set this machine has."""
    before = _compiled.native.isa()
    assert _compiled.native.set_isa(request.param)
    yield request.param
    _compiled.native.set_isa(before)


@pytest.fixture
def restore_threads():
    before = strop.get_num_threads()
    yield
    strop.set_num_threads(before)


@pytest.fixture(params=available_engines())
def moe_engine(request):
    return request.param


@pytest.fixture(params=[name for name in available_engines() if np.float64 in engine_class(name).dtypes])
def float64_engine(request):
    return request.param
