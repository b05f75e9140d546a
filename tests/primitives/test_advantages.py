"""Advantages against numbers done by hand, TRL's, and a float64 reference written with Python's fractions and fsum."""

import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import strop

same_engine = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
SCALES = ["group", "batch", "none"]


def exact_std(values, ddof):
    """Standard deviation without overflow or cancellation: fsum of values brought into [−1, 1]."""
    largest = max(map(abs, values), default=0.0)
    if largest == 0.0 or len(values) <= 1:
        return 0.0
    exponent = math.frexp(largest)[1]
    scaled = [math.ldexp(v, -exponent) for v in values]
    mean = math.fsum(scaled) / len(scaled)
    return math.ldexp(math.sqrt(math.fsum((v - mean) ** 2 for v in scaled) / (len(scaled) - ddof)), exponent)


def reference(rewards_PG, ddof, eps, scale):
    flat = [float(v) for v in rewards_PG.ravel()]
    result = []
    for group in rewards_PG.astype(np.float64).tolist():
        mean = math.fsum(group) / len(group)
        divisor = {"none": 1.0, "batch": exact_std(flat, ddof) + eps, "group": exact_std(group, ddof) + eps}[scale]
        equal = len(set(group)) == 1
        result.append([0.0 if equal else (v - mean) / divisor for v in group])
    return np.array(result).reshape(rewards_PG.shape)


def test_by_hand(engine):
    # mean 2.5, deviations ∓1.5 ∓0.5, variance (2·2.25 + 2·0.25)/4 = 1.25
    assert strop.compute_group_advantages(np.array([1.0, 2, 3, 4])) == pytest.approx(
        np.array([-1.5, -0.5, 0.5, 1.5]) / math.sqrt(1.25)
    )
    # Bessel: variance 5/3; eps is added to the std, not to the variance
    found = strop.compute_group_advantages(np.array([1.0, 2, 3, 4]), ddof=1, eps=0.5)
    assert found == pytest.approx(np.array([-1.5, -0.5, 0.5, 1.5]) / (math.sqrt(5 / 3) + 0.5))


def test_scales_by_hand(engine):
    rewards = np.array([[0.0, 2.0], [4.0, 10.0]])  # group stds 1 and 3; batch mean 4, variance (16+4+0+36)/4 = 14
    batch = strop.compute_batch_group_advantages
    assert batch(rewards).tolist() == [[-1.0, 1.0], [-1.0, 1.0]]
    assert batch(rewards, scale="none").tolist() == [[-1.0, 1.0], [-3.0, 3.0]]
    assert batch(rewards, scale="batch") == pytest.approx(np.array([[-1, 1], [-3, 3]]) / math.sqrt(14))


def test_trl_golden_values(engine, golden):
    assert len(golden["advantages"]) > 0
    for case in golden["advantages"]:
        rewards = np.array(case["rewards"])
        for scale in SCALES:
            found = strop.compute_batch_group_advantages(rewards, case["group_size"], ddof=1, eps=1e-4, scale=scale)
            expected = np.array(case[scale])
            np.testing.assert_allclose(found.ravel(), expected.ravel(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("value", [1000.1, -3e30, 1e-40, 0.0, 0.1])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 9, 33])
def test_equal_rewards_give_exactly_zero(engine, dtype, scale, value, size):
    rewards = np.full((3, size), value, dtype)
    assert (strop.compute_batch_group_advantages(rewards, scale=scale) == 0).all()
    assert (strop.compute_group_advantages(rewards[0]) == 0).all()


def test_an_equal_group_among_others_is_zero(engine):
    rewards = np.array([[1000.1] * 8, [0.0, 1, 0, 1, 0, 1, 0, 1]])
    for scale in SCALES:
        found = strop.compute_batch_group_advantages(rewards, scale=scale)
        assert (found[0] == 0).all()
        assert (found[1] != 0).all()


def test_group_of_one_is_zero_for_every_ddof(engine):
    assert strop.compute_group_advantages(np.array([5.0]), ddof=1).tolist() == [0.0]
    assert strop.compute_batch_group_advantages(np.array([5.0, 7.0]), 1, ddof=1).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("shape", [(0,), (0, 4)])
def test_empty(engine, shape):
    found = strop.compute_batch_group_advantages(np.zeros(shape, np.float32), *([4] if len(shape) == 1 else []))
    assert found.shape == shape
    assert found.dtype == np.float32
    assert strop.compute_group_advantages(np.zeros(0)).shape == (0,)


@same_engine
@given(
    groups=st.integers(1, 5),
    size=st.integers(2, 40),
    dtype=st.sampled_from([np.float32, np.float64]),
    scale=st.sampled_from(SCALES),
    ddof=st.integers(0, 1),
    eps=st.sampled_from([0.0, 1e-4, 1.0]),
    offset=st.sampled_from([0.0, 1000.0, -1e6]),
    spread=st.sampled_from([1.0, 1e-3, 1e5]),
    seed=st.integers(0, 2**32 - 1),
)
def test_against_reference(engine, groups, size, dtype, scale, ddof, eps, offset, spread, seed):
    rewards = (np.random.default_rng(seed).standard_normal((groups, size)) * spread + offset).astype(dtype)
    found = strop.compute_batch_group_advantages(rewards, ddof=ddof, eps=eps, scale=scale)
    expected = reference(rewards, ddof, eps, scale)
    assert found.dtype == dtype
    # A deviation is known only as well as the mean it is taken from.
    spread_found = expected.std() if scale == "none" else rewards.astype(np.float64).std(1).min()  # two may be close
    blur = float(np.abs(rewards).max()) / max(float(spread_found), 1e-300)
    tolerance = 3e-7 if dtype == np.float32 else 1e-14 * (1 + 10 * blur)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())
    np.testing.assert_array_equal(
        strop.compute_batch_group_advantages(rewards.ravel(), size, ddof=ddof, eps=eps, scale=scale), found.ravel()
    )


@same_engine
@given(
    values=st.lists(st.floats(allow_nan=False, allow_infinity=False, width=64), min_size=2, max_size=24),
    scale=st.sampled_from(["group", "batch"]),
)
def test_every_finite_reward(engine, values, scale):
    """Denormals and the largest doubles included: finite advantages, the population's variance is 1, the mean 0."""
    rewards = np.array([values])
    found = strop.compute_batch_group_advantages(rewards, scale=scale)
    assert np.isfinite(found).all()
    if len(set(values)) == 1:
        assert (found == 0).all()
    else:
        assert found.mean() == pytest.approx(0, abs=1e-6)
        assert (found**2).mean() == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_every_size_of_reward(engine, scale):
    """Advantages do not change with the unit of the rewards, also where squares overflow or vanish."""
    rewards = np.random.default_rng(8).standard_normal((3, 5))
    expected = strop.compute_batch_group_advantages(rewards, scale=scale)
    for exponent in range(-1000, 1020, 20):
        found = strop.compute_batch_group_advantages(np.ldexp(rewards, exponent), scale=scale)
        np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-15)


def test_scale_may_be_any_string(engine):
    rewards = np.arange(8.0)
    for scale in SCALES:
        expected = strop.compute_batch_group_advantages(rewards, 4, scale=scale)
        for word in ("".join(list(scale)), np.str_(scale), type("Text", (str,), {})(scale)):
            np.testing.assert_array_equal(strop.compute_batch_group_advantages(rewards, 4, scale=word), expected)
    strop.compute_batch_group_advantages(rewards, 4, scale="none", ddof=1 << 30)


def test_strided_and_foreign_inputs(engine):
    base = np.random.default_rng(0).standard_normal((8, 12))
    expected = strop.compute_batch_group_advantages(base[:, ::3].copy())
    views = {
        "strided": base[:, ::3],
        "fortran": np.asfortranarray(base[:, ::3]),
        "byte order": base[:, ::3].astype(">f8"),
        "list": base[:, ::3].tolist(),
        "read-only": np.frombuffer(base[:, ::3].copy().tobytes()).reshape(8, 4),
    }
    for name, view in views.items():
        np.testing.assert_array_equal(strop.compute_batch_group_advantages(view), expected, err_msg=name)


def test_integers_and_booleans_are_rewards(engine):
    expected = strop.compute_group_advantages(np.array([0.0, 1, 1, 0]))
    for rewards in ([0, 1, 1, 0], np.array([0, 1, 1, 0], np.int32), np.array([False, True, True, False])):
        found = strop.compute_group_advantages(rewards)
        assert found.dtype == np.float64
        np.testing.assert_array_equal(found, expected)


def test_the_input_is_left_alone(engine):
    rewards = np.arange(8.0)
    strop.compute_batch_group_advantages(rewards, 4)
    assert rewards.tolist() == list(range(8))


GROUP, BATCH = "compute_group_advantages", "compute_batch_group_advantages"
PASS = "compute_pass_at_k_advantages"
MISTAKES = [
    (GROUP, ([1.0, math.nan, 2.0],), {}, ValueError, "rewards must be finite, found nan at index 1"),
    (GROUP, (np.array([1.0, 2, math.inf]),), {}, ValueError, "rewards must be finite, found inf at index 2"),
    (BATCH, (np.array([[1.0, -math.inf]]),), {}, ValueError, "rewards must be finite, found -inf at index (0, 1)"),
    (BATCH, (np.array([[1.0, math.nan]]),), {"scale": "none"}, ValueError, "found nan at index (0, 1)"),
    (GROUP, (np.zeros((2, 2)),), {}, ValueError, "rewards must be one group of shape (G,), found (2, 2)"),
    (GROUP, ("abc",), {}, TypeError, "rewards must be float32, float64 or integers, found <U3"),
    (GROUP, ([1.0, None],), {}, TypeError, "rewards must be float32, float64 or integers, found list of objects"),
    (GROUP, (np.zeros(4, np.float16),), {}, TypeError, "found float16"),
    (GROUP, (np.zeros(4), 1), {}, TypeError, "positional argument"),
    (GROUP, (np.zeros(4),), {"dof": 1}, TypeError, "unexpected keyword argument 'dof'"),
    (GROUP, (np.arange(4.0),), {"ddof": 4}, ValueError, "ddof must be below the 4 rewards of a group, found 4"),
    (GROUP, (np.arange(4.0),), {"ddof": -1}, ValueError, "ddof must be at least 0, found -1"),
    (GROUP, (np.arange(4.0),), {"ddof": 0.5}, TypeError, "ddof must be an int, found float"),
    (GROUP, (np.arange(4.0),), {"eps": -1.0}, ValueError, "eps must be finite and at least 0, found -1.0"),
    (GROUP, (np.arange(4.0),), {"eps": math.nan}, ValueError, "eps must be finite and at least 0, found nan"),
    (GROUP, (np.arange(4.0),), {"eps": 10**400}, ValueError, "eps must be finite and at least 0, found inf"),
    (
        GROUP,
        (np.ma.masked_array([1.0, 2.0], [0, 1]),),
        {},
        TypeError,
        "rewards must be an array without a mask of its own",
    ),
    (BATCH, (np.zeros(6), 2), {"scale": np.array(["a"])}, ValueError, "scale must be one of"),
    (GROUP, (np.arange(4.0),), {"eps": "x"}, TypeError, "eps must be a number, found str"),
    (BATCH, (np.zeros(6),), {}, ValueError, "group_size is needed for rewards of shape (6,)"),
    (BATCH, (np.zeros(6), 4), {}, ValueError, "rewards must have a multiple of group_size=4 elements, found 6"),
    (BATCH, (np.zeros(6), 0), {}, ValueError, "group_size must be at least 1, found 0"),
    (BATCH, (np.zeros(6), -2), {}, ValueError, "group_size must be at least 1, found -2"),
    (BATCH, (np.zeros(6), 2.0), {}, TypeError, "group_size must be an int, found float"),
    (BATCH, (np.zeros(6), True), {}, TypeError, "group_size must be an int, found bool"),
    (
        BATCH,
        (np.zeros((3, 2)), 3),
        {},
        ValueError,
        "group_size must be 2 or left out for rewards of shape (3, 2), found 3",
    ),
    (BATCH, (np.zeros((3, 0)),), {}, ValueError, "group_size must be at least 1, found 0 in rewards of shape (3, 0)"),
    (BATCH, (np.zeros((2, 2, 2)),), {}, ValueError, "rewards must be one- or two-dimensional, found shape (2, 2, 2)"),
    (BATCH, ([[1.0, 2.0], [3.0]],), {}, ValueError, "rewards must be rectangular"),
    (
        BATCH,
        (np.zeros(6), 2),
        {"scale": "std"},
        ValueError,
        "scale must be one of 'group', 'batch', 'none', 'leave_one_out', 'mean', found 'std'",
    ),
    (
        BATCH,
        (np.array([1.0, -2.0]), 2),
        {"scale": "mean"},
        ValueError,
        'at least 0 for scale="mean", found -2.0 at index 1',
    ),
    (GROUP, (np.zeros(3),), {"lengths": [1, 2]}, ValueError, "lengths must have the shape (3,) of rewards, found (2,)"),
    (GROUP, (np.zeros(3),), {"lengths": [1, 2, -1]}, ValueError, "lengths must be at least 0, found -1 at index 2"),
    (GROUP, (np.zeros(2),), {"lengths": [1.0, 2.0]}, TypeError, "lengths must be integers"),
    (GROUP, (np.array([1.0, 2.0]),), {"lengths": [1, 1], "ddof": 2}, ValueError, "below the sum 2 of lengths, found 2"),
    (GROUP, (np.array([1.0, math.nan]),), {"lengths": [1, 0]}, ValueError, "found nan at index 1"),
    (PASS, (np.zeros(4), 4), {"k": 1}, ValueError, "k must be at least 2, found 1"),
    (PASS, (np.zeros(4), 4), {"k": 5}, ValueError, "k must be at most the 4 rewards of a group, found 5"),
    (PASS, (np.array([1.0, math.inf]), 2), {"k": 2}, ValueError, "found inf at index 1"),
    (PASS, (np.zeros(4), 3), {"k": 2}, ValueError, "a multiple of group_size=3 elements, found 4"),
]


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "error", "message"), MISTAKES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_mistakes(engine, name, args, kwargs, error, message):
    with pytest.raises(error) as raised:
        getattr(strop, name)(*args, **kwargs)
    assert message in str(raised.value)


# ---- other advantages ----


def test_scales_without_a_std_by_hand(engine):
    rewards = np.array([[1.0, 0.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    batch = strop.compute_batch_group_advantages
    leave_one_out = [1 - 1, 0 - 4 / 3, 0 - 4 / 3, 3 - 1 / 3]
    assert batch(rewards, scale="leave_one_out")[0] == pytest.approx(leave_one_out)
    assert batch(rewards, scale="mean")[0].tolist() == [0.0, -1.0, -1.0, 2.0]
    assert batch(rewards, scale="mean", eps=1.0)[0].tolist() == [0.0, -0.5, -0.5, 1.0]
    for scale in ("leave_one_out", "mean"):
        assert (batch(rewards, scale=scale)[1:] == 0).all()
        assert (batch(np.array([5.0, 7.0]), 1, scale=scale) == 0).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [2, 7, 8, 9, 33])
def test_scales_without_a_std_against_formulas(engine, dtype, size):
    rewards = (np.random.default_rng(size).random((5, size)) * 3 + 100).astype(dtype)
    wide, tolerance = rewards.astype(np.float64), 3e-7 if dtype == np.float32 else 1e-12
    others = (wide.sum(1, keepdims=True) - wide) / (size - 1)
    mean = wide.mean(1, keepdims=True)
    for scale, wanted in (("leave_one_out", wide - others), ("mean", (wide - mean) / mean)):
        found = strop.compute_batch_group_advantages(rewards, scale=scale)
        assert found.dtype == dtype
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_lengths_are_repetitions(engine, dtype, scale):
    """A reward that counts three times is a reward that is there three times; one that counts 0 times is not there."""
    if dtype == np.float32:
        scale = float(np.float32(np.sqrt(np.sqrt(scale)) if scale != 1e200 else 1e30))
    rng = np.random.default_rng(3)
    rewards, lengths = (rng.standard_normal(20) * scale + 5 * scale).astype(dtype), rng.integers(0, 4, 20)
    rewards[:4], lengths[:4] = rewards[0], [0, 0, 2, 1]
    for ddof, eps in ((0, 0.0), (1, 0.25 * scale)):
        found = strop.compute_group_advantages(rewards, lengths=lengths, ddof=ddof, eps=eps)
        repeated = strop.compute_group_advantages(np.repeat(rewards, lengths), ddof=ddof, eps=eps)
        tolerance = 1e-6 if dtype == np.float32 else 1e-12
        assert found.dtype == dtype
        np.testing.assert_allclose(np.repeat(found, lengths), repeated, rtol=tolerance, atol=tolerance)
        assert (found[lengths == 0] == 0).all()
    assert (strop.compute_group_advantages(rewards, lengths=np.zeros(20, int)) == 0).all()
    equal = np.where(lengths > 0, dtype(1000.1), dtype(3))
    assert (strop.compute_group_advantages(equal, lengths=lengths) == 0).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("size", "k"), [(2, 2), (5, 2), (5, 4), (5, 5), (9, 3)])
def test_pass_at_k_is_what_a_completion_adds_to_sets(engine, dtype, size, k):
    rewards = np.random.default_rng(k).standard_normal((4, size)).astype(dtype)
    rewards[1, 1:3] = rewards[1, 0]
    wanted = np.zeros((4, size))
    for p, i in np.ndindex(4, size):
        sets = [list(one) for one in itertools.combinations(range(size), k) if i in one]
        added = [rewards[p, one].max() - np.delete(rewards[p], [j for j in range(size) if j not in one or j == i]).max()
                 for one in sets]  # fmt: skip
        wanted[p, i] = np.mean(added, dtype=np.float64)
    tolerance = 1e-6 if dtype == np.float32 else 1e-12
    found = strop.compute_pass_at_k_advantages(rewards, k=k)
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(strop.compute_pass_at_k_advantages(rewards.ravel(), size, k=k), found.ravel())


def expected_gradient(p, group_size, advantages):
    """d/dp by the policy gradient (1/G)·Σ A·d log π, in expectation over groups of answers that are right with chance p."""
    total = 0.0
    for rights in itertools.product([0.0, 1.0], repeat=group_size):
        rewards = np.array(rights)
        chance = np.prod(np.where(rewards == 1, p, 1 - p))
        slopes = np.where(rewards == 1, 1 / p, -1 / (1 - p))
        total += chance * (advantages(rewards) * slopes).mean()
    return total


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_expected_gradients(engine, p):
    """RLOO's is that of the share of right answers, pass@k's that of one right among k, MaxRL's that of log p up to order G − 1."""
    G, k = 5, 3
    scaled = functools.partial(strop.compute_batch_group_advantages, group_size=G)
    assert expected_gradient(p, G, functools.partial(scaled, scale="leave_one_out")) == pytest.approx(1.0, rel=1e-12)
    best = functools.partial(strop.compute_pass_at_k_advantages, group_size=G, k=k)
    assert k * expected_gradient(p, G, best) == pytest.approx(k * (1 - p) ** (k - 1), rel=1e-12)
    orders = sum((1 - p) ** (order - 1) for order in range(1, G))  # of Σ −(1 − p)^order/order
    assert expected_gradient(p, G, functools.partial(scaled, scale="mean")) == pytest.approx(orders, rel=1e-12)


def test_maxrl_of_two_answers_is_rloo(engine):
    rewards = np.array([[0.0, 1], [1, 0], [1, 1], [0, 0]])
    batch = strop.compute_batch_group_advantages
    np.testing.assert_array_equal(batch(rewards, scale="mean"), batch(rewards, scale="leave_one_out"))
