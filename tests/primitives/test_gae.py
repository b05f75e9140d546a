"""Generalised advantage estimation against a scalar loop, by hand, and what masks and bad input do."""

import numpy as np
import pytest

import strop


def scalar_loop(rewards, values, gamma, lam, mask):
    found = np.zeros(rewards.shape)
    for row in range(rewards.shape[0]):
        value = advantage = 0.0
        for t in reversed(range(rewards.shape[1])):
            if mask[row, t]:
                delta = float(rewards[row, t]) + gamma * value - float(values[row, t])
                advantage = delta + gamma * lam * advantage
                value = float(values[row, t])
                found[row, t] = advantage
    return found


def test_by_hand(engine):
    """γ = ½, λ = ½: A₂ = 1 − 2 = −1; A₁ = 0 + ½·2 − 4 − ¼ = −3.25; A₀ = 3 + ½·4 − 1 + ¼·(−3.25)."""
    found = strop.compute_gae(np.array([3.0, 0.0, 1.0]), np.array([1.0, 4.0, 2.0]), gamma=0.5, lam=0.5)
    assert found.tolist() == [3 + 2 - 1 - 3.25 / 4, -3.25, -1.0]


def test_lambda_1_is_the_return_less_the_value(engine):
    rewards, values = np.random.default_rng(0).standard_normal((2, 3, 9))
    found = strop.compute_gae(rewards, values, lam=1.0)
    np.testing.assert_allclose(found, rewards[:, ::-1].cumsum(1)[:, ::-1] - values, rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (4, 8), (5, 33), (9, 1), (0, 4), (3, 0), (300, 200)])
def test_against_a_scalar_loop(engine, dtype, shape):
    rng = np.random.default_rng(1)
    rewards, values = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    mask = rng.random(shape) < 0.7
    found = strop.compute_gae(rewards, values, gamma=0.99, lam=0.9, mask=mask)
    assert found.dtype == dtype
    # float32 is rounded once, at the end
    np.testing.assert_allclose(
        found, scalar_loop(rewards, values, 0.99, 0.9, mask), rtol=2 * np.finfo(dtype).eps, atol=1e-14
    )


def test_masked_tokens_are_as_if_they_were_not_there(engine):
    rng = np.random.default_rng(2)
    rewards, values = rng.standard_normal((2, 1, 12))
    mask = np.array([[1, 1, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0]], dtype=bool)
    for garbage in (0.0, np.nan, np.inf):
        dirty = np.where(mask, rewards, garbage), np.where(mask, values, garbage)
        found = strop.compute_gae(*dirty, mask=mask)
        np.testing.assert_array_equal(found[mask], strop.compute_gae(rewards[mask], values[mask]))
        assert (found[~mask] == 0).all()
    spoilt = rewards.copy()
    spoilt[0, 4] = np.nan
    assert np.isnan(strop.compute_gae(spoilt, values, mask=mask)).tolist()[0][:6] == [
        True,
        True,
        False,
        False,
        True,
        False,
    ]


def test_forms_of_input(engine):
    rng = np.random.default_rng(3)
    rewards, values = rng.standard_normal((2, 4, 6))
    wanted = strop.compute_gae(rewards, values)
    np.testing.assert_array_equal(strop.compute_gae(np.asfortranarray(rewards), values[:, ::-1][:, ::-1]), wanted)
    np.testing.assert_array_equal(
        strop.compute_gae(rewards.tolist(), values.tolist(), mask=np.ones((4, 6), int)), wanted
    )
    np.testing.assert_array_equal(strop.compute_gae(rewards, values, gamma=1, lam=np.float64(0.95)), wanted)
    torch = pytest.importorskip("torch")
    found = strop.compute_gae(torch.from_numpy(rewards), torch.from_numpy(values))
    assert torch.equal(found, torch.from_numpy(wanted))


R = np.zeros((2, 3))


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((R, R[:, :2]), {}, ValueError, "values must have the shape (2, 3) of rewards, found (2, 2)"),
        ((R, R.astype(np.float32)), {}, TypeError, "values must be float64 as rewards is, found float32"),
        ((R.astype(int), R), {}, TypeError, "rewards must be float32 or float64"),
        ((R[None], R[None]), {}, ValueError, "rewards must have shape (B, T) or (T,), found (1, 2, 3)"),
        ((R, R), {"gamma": 1.5}, ValueError, "gamma must be at least 0 and at most 1, found 1.5"),
        ((R, R), {"lam": -0.1}, ValueError, "lam must be at least 0 and at most 1, found -0.1"),
        ((R, R), {"lam": "1"}, TypeError, "lam must be a number, found str"),
        ((R, R), {"mask": R[:1]}, ValueError, "mask must have the shape (2, 3) of rewards, found (1, 3)"),
        ((R, R), {"mask": R + 2}, ValueError, "mask must hold only 0 and 1, found 2.0 at index (0, 0)"),
    ],
)
def test_mistakes(engine, args, options, error, message):
    with pytest.raises(error) as raised:
        strop.compute_gae(*args, **options)
    assert message in str(raised.value)
