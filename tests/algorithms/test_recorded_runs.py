"""Three steps of every on-policy algorithm, against what was recorded of an earlier version: nothing may move."""

import json
import math

import pytest
from golden.make_recorded_runs import BEST, PATH, TRAINERS, record

RECORDED = json.loads(PATH.read_text(encoding="utf-8"))


def check_same(found, wanted, where):
    """Equal, but for numbers, which may differ by 2e-6: rotary positions go through the CPU's cosine in float32.

    AdamW divides gradients by their size, which makes of an error in a small gradient one in a weight: 1e-4.
    """
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key in wanted:
            check_same(found[key], wanted[key], f"{where}/{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            check_same(one, other, f"{where}/{i}")
    elif isinstance(wanted, float):
        allowed = 1e-4 if "/weights/" in where else 2e-6
        assert math.isclose(found, wanted, rel_tol=allowed, abs_tol=allowed), (where, found, wanted)
    else:
        assert found == wanted, where


@pytest.mark.parametrize("name", [*TRAINERS, *BEST])
def test_a_run_is_the_recorded_one(name):
    check_same(record(name), RECORDED[name], name)


def test_every_recorded_run_is_run():
    assert RECORDED.keys() == {*TRAINERS, *BEST}


@pytest.mark.parametrize(
    ("found", "wanted"), [({"a": [1.0]}, {"a": [1.0 + 1e-5]}), ([1], [2]), ({"a": 1}, {}), ([], [0.0])]
)
def test_the_comparison_can_fail(found, wanted):
    with pytest.raises(AssertionError):
        check_same(found, wanted, "")
