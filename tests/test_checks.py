"""The vocabulary of checks: what passes, what comes back, and the words for everything else."""

import math

import numpy as np
import pytest

from strop._checks import as_count, as_number, check_choice, check_count, check_number

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("value", "low", "error"),
    [
        (0, 0, None),
        (2**63 - 1, 0, None),
        (-3, -3, None),
        (2, 3, "ValueError: n must be at least 3, found 2"),
        (2**63, 1, f"ValueError: n must be at least 1 and below 2**63, found {2**63}"),
        (True, 0, "TypeError: n must be an int, found bool"),
        (2.0, 0, "TypeError: n must be an int, found float"),
        (None, 0, "TypeError: n must be an int, found NoneType"),
        (np.int64(3), 0, "TypeError: n must be an int, found int64"),
    ],
)
def test_counts(value, low, error):
    assert said(check_count, value, "n", low) == error


@pytest.mark.parametrize("value", [np.int64(3), np.uint8(3), np.array(3), 3])
def test_any_integer_becomes_pythons(value):
    found = as_count(value, "n")
    assert (found, type(found)) == (3, int)


@pytest.mark.parametrize("value", [np.bool_(True), np.float64(3.0), np.array([3, 4]), "3"])
def test_what_is_no_integer(value):
    assert said(as_count, value, "n") == f"TypeError: n must be an int, found {type(value).__name__}"


@pytest.mark.parametrize(
    ("value", "bounds", "error"),
    [
        (0, {"low": 0}, None),
        (-1e308, {}, None),
        (0.5, {"low": 0, "high": 0.5}, None),
        (INF, {"low": 0, "finite": False}, None),
        (-0.1, {"low": 0}, "ValueError: x must be finite and at least 0, found -0.1"),
        (0, {"low": 0, "open_low": True}, "ValueError: x must be finite and above 0, found 0"),
        (0.5, {"low": 0, "high": 0.5, "open_high": True}, "ValueError: x must be at least 0 and below 0.5, found 0.5"),
        (2, {"low": 0, "high": 1, "open_low": True}, "ValueError: x must be above 0 and at most 1, found 2"),
        (2, {"high": 1}, "ValueError: x must be finite and at most 1, found 2"),
        (NAN, {}, "ValueError: x must be finite, found nan"),
        (INF, {}, "ValueError: x must be finite, found inf"),
        (INF, {"low": 0, "high": INF}, "ValueError: x must be finite and at least 0, found inf"),
        (-(10**400), {}, "ValueError: x must be finite, found -inf"),
        (NAN, {"low": 0, "finite": False}, "ValueError: x must be at least 0, found nan"),
        (NAN, {"finite": False}, "ValueError: x must be a number, found nan"),
        ("1", {}, "TypeError: x must be a number, found str"),
        (True, {}, "TypeError: x must be a number, found bool"),
        (np.float32(1), {}, "TypeError: x must be a number, found float32"),
    ],
)
def test_numbers(value, bounds, error):
    assert said(check_number, value, "x", **bounds) == error


def test_numpys_numbers_become_pythons():
    for value in (np.float32(0.25), np.float64(0.25), 0.25):
        found = as_number(value, "x", 0, 1)
        assert (found, type(found)) == (0.25, float)
    assert type(as_number(np.int32(2), "x")) is float
    assert said(as_number, np.bool_(True), "x") == "TypeError: x must be a number, found bool"
    assert said(as_number, np.float32(2), "x", 0, 1) == "ValueError: x must be at least 0 and at most 1, found 2.0"


def test_choices():
    known = ("linear", "cosine", None)
    for value in known:
        check_choice(value, "schedule", known)
    wanted = "ValueError: schedule must be one of 'linear', 'cosine', None, found "
    assert said(check_choice, "cosin", "schedule", known) == wanted + "'cosin'; did you mean 'cosine'?"
    assert said(check_choice, "step", "schedule", known) == wanted + "'step'"
    assert said(check_choice, np.array(["linear", "x"]), "schedule", known).startswith(wanted + "array(")
    assert said(check_choice, None, "a", ["b"]) == "ValueError: a must be one of 'b', found None"


def said(function, *args, **kwargs):
    """The error as a line; None where there is none."""
    try:
        function(*args, **kwargs)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None
