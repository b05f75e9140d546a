"""Sampling: the distribution by hand, draws that follow it, and refused settings."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.moe import available_engines
from strop.moe.engines import engine_class
from strop.moe.sampling import sample, sampling_logps

LOGITS = np.log(np.array([[0.1, 0.4, 0.2, 0.3]]))


def probabilities(**settings):
    return np.exp(sampling_logps(LOGITS, **settings))[0]


def test_distributions_by_hand():
    assert probabilities() == pytest.approx([0.1, 0.4, 0.2, 0.3])
    assert probabilities(top_k=2) == pytest.approx([0, 4 / 7, 0, 3 / 7])
    assert probabilities(top_k=9) == pytest.approx([0.1, 0.4, 0.2, 0.3])
    assert probabilities(top_p=0.6) == pytest.approx([0, 4 / 7, 0, 3 / 7])  # 0.4 does not reach it, 0.7 does
    assert probabilities(top_p=0.75) == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9])
    assert probabilities(top_p=1e-9) == pytest.approx([0, 1, 0, 0])
    squared = np.array([0.01, 0.16, 0.04, 0.09])
    assert probabilities(temperature=0.5) == pytest.approx(squared / squared.sum())
    # top-p looks at what top-k left: 4/7 < 0.6, so both stay; below it one does
    assert probabilities(top_k=2, top_p=0.6) == pytest.approx([0, 4 / 7, 0, 3 / 7])
    assert probabilities(top_k=2, top_p=0.57) == pytest.approx([0, 1, 0, 0])


def test_ties_keep_the_lower_id():
    assert np.exp(sampling_logps(np.zeros((1, 4)), top_k=2))[0] == pytest.approx([0.5, 0.5, 0, 0])
    assert np.exp(sampling_logps(np.zeros((1, 4)), top_p=0.6))[0] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])


@pytest.fixture(params=available_engines())
def engine_sample(request):
    engine = engine_class(request.param)
    return lambda *args, **settings: engine.sample(*args, **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, **settings})


def test_the_uniform_picks_by_cumulative_probability(engine_sample):
    uniforms = np.array([0.0, 0.05, 0.15, 0.45, 0.55, 0.65, 0.75, 0.99999])
    tokens, logps = engine_sample(np.repeat(LOGITS, 8, 0), uniforms)
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert np.exp(logps) == pytest.approx([0.1, 0.1, 0.4, 0.4, 0.2, 0.2, 0.3, 0.3])


def test_greedy_reports_the_models_log_prob(engine_sample):
    tokens, logps = engine_sample(LOGITS, np.array([0.9]), temperature=0.0, top_k=1)
    assert tokens.tolist() == [1]
    assert logps[0] == pytest.approx(math.log(0.4))


@pytest.mark.parametrize("temperature", [1e-4, 1e-20, 1e-40, 1e-300])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tiny_temperatures_draw_the_most_probable_token(engine_sample, temperature, dtype):
    logits = (9 * np.random.default_rng(0).standard_normal((20, 70))).astype(dtype)
    for settings in ({}, {"top_k": 3}, {"top_p": 0.9}):
        tokens, logps = engine_sample(logits, np.linspace(0, 0.999, 20), temperature=temperature, **settings)
        assert tokens.tolist() == logits.argmax(-1).tolist()
        assert (logps == 0).all()


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.7}, {"temperature": 0.6, "top_k": 9, "top_p": 0.9}])
def test_draws_follow_the_distribution(settings, engine_sample):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((1, 20))
    count = 40_000
    tokens, logps = engine_sample(np.repeat(logits, count, 0), rng.random(count), **settings)
    want = np.exp(sampling_logps(logits, **settings))[0]
    seen = np.bincount(tokens, minlength=20)
    assert not seen[want == 0].any()
    chi_squared = ((seen - count * want)[want > 0] ** 2 / (count * want[want > 0])).sum()
    assert chi_squared < 50  # 19 degrees of freedom: p < 1e-4
    assert logps == pytest.approx(np.log(want[tokens]))


@given(st.integers(0, 2**32), st.floats(0.1, 3), st.integers(0, 30), st.floats(0.01, 1))
def test_sampling_always_draws_from_a_distribution(seed, temperature, top_k, top_p):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((3, 25)).astype(np.float32) * 10
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    p = np.exp(sampling_logps(logits, **settings))
    assert p.sum(-1) == pytest.approx(np.ones(3))
    assert ((p > 0).sum(-1) <= (top_k or 25)).all()
    tokens, logps = sample(logits, np.array([0.0, np.nextafter(1, 0), rng.random()]), **settings)
    assert np.isfinite(logps).all()
    assert (p[np.arange(3), tokens] > 0).all()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"temperature": -1.0}, ValueError, r"temperature must be finite and at least 0, found -1.0"),
        ({"temperature": math.nan}, ValueError, "temperature must be finite .*, found nan"),
        ({"temperature": "hot"}, TypeError, "temperature must be a number, found str"),
        ({"top_k": -1}, ValueError, r"top_k must be at least 0, found -1"),
        ({"top_k": 1.5}, TypeError, "top_k must be an int, found float"),
        ({"top_p": 0.0}, ValueError, "top_p must be above 0 and at most 1, found 0.0"),
        ({"top_p": 1.5}, ValueError, "top_p must be above 0 and at most 1, found 1.5"),
    ],
)
def test_refused_settings(settings, error, message):
    with pytest.raises(error, match=message):
        sample(LOGITS, np.array([0.5]), **settings)


def test_greedy_has_no_distribution():
    with pytest.raises(ValueError, match="temperature must be finite and above 0"):
        sampling_logps(LOGITS, temperature=0)
