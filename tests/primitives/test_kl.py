"""KL against numbers done by hand and a reference in 100 decimal digits."""

import functools
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import strop

same_engine = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
TOTALS = {"token": "compute_token_kl", "schulman": "compute_token_kl_schulman"}
BATCHES = {"token": "compute_batch_token_kl", "schulman": "compute_batch_token_kl_schulman"}
DTYPES = [np.float32, np.float64]
RELATIVE = {np.float32: 1e-6, np.float64: 1e-13}


@functools.cache
def exact_term(estimator, p, q):
    p, q = Decimal(p), Decimal(q)
    return p.exp() * (p - q) if estimator == "token" else (q - p).exp() - (q - p) - 1


def exact(estimator, p, q):
    """Σ in 100 digits, and Σ of magnitudes: the scale against which a sum of mixed signs is measured."""
    with localcontext() as context:
        context.prec = 100
        terms = [exact_term(estimator, a, b) for a, b in zip(p.ravel().tolist(), q.ravel().tolist(), strict=True)]
        return float(sum(terms)), float(sum(map(abs, terms)))


def check(estimator, dtype, found, p, q):
    expected, scale = exact(estimator, p, q)
    assert abs(found - expected) <= RELATIVE[dtype] * scale + float(np.finfo(dtype).tiny)


def test_by_hand(engine):
    p, q = np.log([0.5, 0.5]), np.log([0.25, 0.75])
    assert strop.compute_token_kl(p, q) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    # d = q − p = ln(1/2), ln(3/2): exp(d) − d − 1
    assert strop.compute_token_kl_schulman(p, q) == pytest.approx((0.5 + math.log(2) - 1) + (1.5 - math.log(1.5) - 1))


def test_direction_is_reference_minus_policy(engine):
    p, q = np.array([-1.0]), np.array([-3.0])  # d = −2
    assert strop.compute_token_kl_schulman(p, q) == pytest.approx(math.exp(-2) + 2 - 1)
    assert strop.compute_token_kl_schulman(q, p) == pytest.approx(math.exp(2) - 2 - 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1e-4, -1e-4, 1e-6, 3e-3, 0.2, -0.34, 0.36, -0.4])
def test_no_cancellation_near_the_reference(engine, dtype, d):
    p = np.zeros(5, dtype)
    q = np.full(5, d, dtype)
    expected, _ = exact("schulman", p, q)
    assert strop.compute_token_kl_schulman(p, q) == pytest.approx(expected, rel=1e-6 if dtype == np.float32 else 4e-15)


@same_engine
@given(
    estimator=st.sampled_from(["token", "schulman"]),
    dtype=st.sampled_from(DTYPES),
    n=st.sampled_from([1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 65, 127, 200]),
    distance=st.sampled_from([1e-6, 1e-3, 0.1, 0.35, 1.0, 7.0, 30.0]),
    low=st.sampled_from([-1.0, -5.0, -60.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_against_100_digits(engine, estimator, dtype, n, distance, low, seed):
    rng = np.random.default_rng(seed)
    p = rng.uniform(low, 0, n).astype(dtype)
    q = (p + distance * rng.standard_normal(n)).astype(dtype)
    check(estimator, dtype, getattr(strop, TOTALS[estimator])(p, q), p, q)


@pytest.mark.parametrize("estimator", ["token", "schulman"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_size_of_argument(engine, estimator, dtype):
    """One token at a time, from differences whose square underflows to where exp overflows, both signs."""
    top = 88.0 if dtype == np.float32 else {"token": 703.0, "schulman": 709.7}[estimator]
    for magnitude in np.concatenate([np.logspace(-30, 2, 65), np.linspace(0.3, 1.5, 25), [top]]):
        for x in (magnitude, -magnitude):
            p, q = (
                (np.array([x], dtype), np.array([-0.5], dtype))
                if estimator == "token"
                else (np.array([0], dtype), np.array([x], dtype))
            )
            if abs(x) <= top:
                check(estimator, dtype, getattr(strop, TOTALS[estimator])(p, q), p, q)


@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_offsets_do_not_add_up_their_rounding(engine, dtype):
    """The same d everywhere: each term's error has the same sign, so the sum shows the worst of it."""
    for d in np.linspace(-9, 9, 721):
        p = np.zeros(64, dtype)
        q = np.full(64, d, dtype)
        if d != 0:
            check("schulman", dtype, strop.compute_token_kl_schulman(p, q), p, q)


@pytest.mark.parametrize("vocabulary", [8, 50, 1000])
def test_nearly_equal_distributions(engine, vocabulary):
    """Σ exp(p)·(p − q) over a vocabulary is d²/2-small while its terms are d-large: what is left must still be right."""
    rng = np.random.default_rng(vocabulary)
    logits = rng.standard_normal(vocabulary)
    p = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
    q = (p + 1e-4 * rng.standard_normal(vocabulary)).astype(np.float32)
    expected, _ = exact("token", p, q)
    assert strop.compute_token_kl(p, q) == pytest.approx(expected, rel=1e-6)


def test_far_float32_differences_are_not_rounded_first(engine):
    """q − p is not a float32 there, and exp would multiply its rounding by d."""
    rng = np.random.default_rng(9)
    p = rng.uniform(-40, 0, 400).astype(np.float32)
    for d in np.linspace(8, 40, 65):
        q = (p + np.float32(d)).astype(np.float32)
        expected, _ = exact("schulman", p[:8], q[:8])
        for a, b in zip(p[:40], q[:40], strict=True):
            one, _ = exact("schulman", a[None], b[None])
            assert strop.compute_token_kl_schulman(a[None], b[None]) == pytest.approx(one, rel=6e-7)
        assert strop.compute_token_kl_schulman(p[:8], q[:8]) == pytest.approx(expected, rel=6e-7)


def test_many_small_blocks_beside_a_large_one(engine):
    """2,000 blocks of about 1 added to 1e16: each alone is below its rounding, together they are 2e-13 of it."""
    if engine == "numpy":
        pytest.skip("NumPy's pairwise sum adds the small ones first")
    p = np.zeros(2001 * 1024)
    q = np.full(p.size, 0.0441)  # k3 ≈ 1/1024
    q[:1024] = 0.0
    q[0] = 36.85
    d = np.unique(q)
    k3 = {x: exact("schulman", np.zeros(1), np.array([x]))[0] for x in d}
    expected = math.fsum([k3[36.85], 2000 * 1024 * k3[0.0441]])
    assert strop.compute_token_kl_schulman(p, q) == pytest.approx(expected, rel=5e-14)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sums_keep_their_precision(engine, dtype):
    rng = np.random.default_rng(1)
    p = rng.uniform(-6, 0, 300_000).astype(dtype)
    q = (p + 0.3 * rng.standard_normal(p.size)).astype(dtype)
    d = q.astype(np.float64) - p.astype(np.float64)
    expected = math.fsum(np.expm1(d) - d)
    assert strop.compute_token_kl_schulman(p, q) == pytest.approx(expected, rel=1e-7 if dtype == np.float32 else 1e-14)


@pytest.mark.parametrize("estimator", ["token", "schulman"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 3, 8, 17, 64, 130, 1025, 2048])
@pytest.mark.parametrize("masked", [False, True])
def test_batch_is_the_rows(engine, estimator, dtype, length, masked):
    rng = np.random.default_rng(2)
    p = rng.uniform(-6, 0, (5, length)).astype(dtype)
    q = (p + rng.standard_normal(p.shape)).astype(dtype)
    mask = rng.random(p.shape) < 0.6 if masked else None
    total, batch = getattr(strop, TOTALS[estimator]), getattr(strop, BATCHES[estimator])
    found = batch(p, q, mask=mask)
    rows = [total(p[b], q[b], None if mask is None else mask[b]) for b in range(5)]
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.array(rows).astype(dtype))
    flat = batch(p.ravel(), q.ravel(), length, None if mask is None else mask.ravel())
    np.testing.assert_array_equal(flat, found)


@pytest.mark.parametrize("estimator", ["token", "schulman"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 9, 64, 75, 200])
def test_masked_garbage_changes_nothing(engine, estimator, dtype, n):
    rng = np.random.default_rng(3)
    p = rng.uniform(-6, 0, n).astype(dtype)
    q = (p + rng.standard_normal(n)).astype(dtype)
    mask = rng.random(n) < 0.5
    total = getattr(strop, TOTALS[estimator])
    clean = total(np.where(mask, p, dtype(0)), np.where(mask, q, dtype(0)))
    for garbage_p, garbage_q in [
        (-np.inf, -np.inf),
        (np.nan, 0.0),
        (np.inf, -np.inf),
        (-np.inf, np.nan),
        (1e30, -1e30),
    ]:
        dirty_p, dirty_q = np.where(mask, p, dtype(garbage_p)), np.where(mask, q, dtype(garbage_q))
        assert total(dirty_p, dirty_q, mask) == clean
    assert total(np.full(n, -np.inf, dtype), np.full(n, -np.inf, dtype), np.zeros(n, bool)) == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 64, 70])
def test_infinities_and_nan(engine, dtype, n):
    def arrays(p, q):
        a, b = np.full(n, -1, dtype), np.full(n, -1, dtype)
        a[n // 2], b[n // 2] = p, q
        return a, b

    k3, token, inf = strop.compute_token_kl_schulman, strop.compute_token_kl, math.inf
    assert token(*arrays(-inf, -2.0)) == 0.0  # probability 0
    assert token(*arrays(-inf, -inf)) == 0.0
    assert token(*arrays(-2.0, -inf)) == inf
    assert k3(*arrays(-2.0, -inf)) == inf
    assert k3(*arrays(-inf, -2.0)) == inf
    assert math.isnan(k3(*arrays(-inf, -inf)))
    for function in (k3, token):
        assert math.isnan(function(*arrays(math.nan, -1.0)))
        assert math.isnan(function(*arrays(-1.0, math.nan)))
    assert k3(*arrays(0.0, -800.0)) == pytest.approx(799.0, rel=1e-6)


def test_denormal_probabilities(engine):
    for p in (-708.5, -720.0, -744.0):
        assert strop.compute_token_kl(np.array([p]), np.array([p - 1.0])) == pytest.approx(
            math.exp(p), rel=1e-12, abs=5e-324
        )
    assert strop.compute_token_kl_schulman(np.array([0.0]), np.array([5e-324])) == 0.0


@pytest.mark.parametrize("estimator", ["token", "schulman"])
def test_empty(engine, estimator):
    total, batch = getattr(strop, TOTALS[estimator]), getattr(strop, BATCHES[estimator])
    assert total(np.zeros(0), np.zeros(0)) == 0.0
    assert batch(np.zeros((0, 5)), np.zeros((0, 5))).shape == (0,)
    assert batch(np.zeros((3, 0)), np.zeros((3, 0))).tolist() == [0, 0, 0]
    assert batch(np.zeros(0), np.zeros(0), 4).shape == (0,)


def test_a_total_takes_any_shape(engine):
    p, q = np.random.default_rng(4).standard_normal((2, 3, 4, 5))
    assert strop.compute_token_kl(p, q) == strop.compute_token_kl(p.ravel(), q.ravel())
    assert isinstance(strop.compute_token_kl(p, q), float)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs(engine, dtype):
    rng = np.random.default_rng(5)
    p, q = rng.standard_normal((2, 6, 40)).astype(dtype)
    mask = rng.random((6, 40)) < 0.5
    expected = strop.compute_batch_token_kl_schulman(p[:, 1::2].copy(), q[:, 1::2].copy(), mask=mask[:, 1::2].copy())
    for convert in (lambda x: x, np.asfortranarray, lambda x: x.astype(x.dtype.newbyteorder(">"))):
        found = strop.compute_batch_token_kl_schulman(convert(p[:, 1::2]), convert(q[:, 1::2]), mask=mask[:, 1::2])
        np.testing.assert_array_equal(found, expected)


def test_masks_of_other_types(engine):
    p, q = np.random.default_rng(6).standard_normal((2, 8))
    mask = np.array([1, 0, 1, 1, 0, 0, 1, 0])
    expected = strop.compute_token_kl(p, q, mask.astype(bool))
    for other in (mask, mask.astype(np.uint8), mask.astype(np.float32), mask.tolist()):
        assert strop.compute_token_kl(p, q, other) == expected


@pytest.mark.parametrize("estimator", ["token", "schulman"])
def test_f32_names(engine, estimator):
    p, q = np.random.default_rng(7).standard_normal((2, 4, 6)).astype(np.float32)
    total, batch = TOTALS[estimator], BATCHES[estimator]
    assert getattr(strop, total + "_f32")(p, q) == getattr(strop, total)(p, q)
    np.testing.assert_array_equal(getattr(strop, batch + "_f32")(p, q), getattr(strop, batch)(p, q))
    for name in (total, batch):
        with pytest.raises(TypeError, match="log_p must be float32, found float64"):
            getattr(strop, name + "_f32")(p.astype(np.float64), q.astype(np.float64))


P = np.zeros(6)
MISTAKES = [
    ("total", (P, np.zeros(5)), ValueError, "log_q must have the shape (6,) of log_p, found (5,)"),
    ("total", (P, np.zeros(6, np.float32)), TypeError, "log_q must be float64 as log_p is, found float32"),
    ("total", (np.zeros(6, int), P), TypeError, "log_p must be float32 or float64, found int64"),
    ("total", (P, np.zeros(6, np.float16)), TypeError, "log_q must be float32 or float64, found float16"),
    ("total", (P, None), TypeError, "log_q must be float32 or float64, found NoneType of objects"),
    ("total", (P,), TypeError, "missing 1 required positional argument: 'log_q'"),
    ("total", (np.ma.masked_array(P, P == 0), P), TypeError, "log_p must be an array without a mask of its own"),
    ("total", (P, P, np.zeros(5, bool)), ValueError, "mask must have the shape (6,) of log_p, found (5,)"),
    ("total", (P, P, np.array([0, 1, 2, 0, 0, 0])), ValueError, "mask must hold only 0 and 1, found 2 at index (2,)"),
    ("total", (P, P, np.array(["a"] * 6)), TypeError, "mask must be boolean or numbers 0 and 1, found <U1"),
    ("batch", (P, P), ValueError, "seq_len is needed for log_p of shape (6,)"),
    ("batch", (P, P, 4), ValueError, "log_p must have a multiple of seq_len=4 elements, found 6"),
    ("batch", (P, P, 0), ValueError, "seq_len must be at least 1, found 0"),
    ("batch", (P, P, 2.0), TypeError, "seq_len must be an int, found float"),
    (
        "batch",
        (P.reshape(2, 3), P.reshape(2, 3), 2),
        ValueError,
        "seq_len must be 3 or left out for log_p of shape (2, 3), found 2",
    ),
    (
        "batch",
        (P.reshape(2, 3), P.reshape(3, 2)),
        ValueError,
        "log_q must have the shape (2, 3) of log_p, found (3, 2)",
    ),
    (
        "batch",
        (P.reshape(1, 2, 3), P.reshape(1, 2, 3)),
        ValueError,
        "log_p must be one- or two-dimensional, found shape (1, 2, 3)",
    ),
]


@pytest.mark.parametrize("estimator", ["token", "schulman"])
@pytest.mark.parametrize(("kind", "args", "error", "message"), MISTAKES)
def test_mistakes(engine, estimator, kind, args, error, message):
    with pytest.raises(error) as raised:
        getattr(strop, {"total": TOTALS, "batch": BATCHES}[kind][estimator])(*args)
    assert message in str(raised.value)
