"""Every engine that runs here is tested by existing."""

import numpy as np
import pytest

from strop.moe import available_engines
from strop.moe.engine import engine_class


@pytest.fixture(params=available_engines())
def moe_engine(request):
    return request.param


@pytest.fixture(params=[name for name in available_engines() if np.float64 in engine_class(name).dtypes])
def float64_engine(request):
    return request.param
