"""gae_advantages: the primitive's numbers, on tensors wherever they are."""

import pytest
import torch

import strop
from strop.losses import gae_advantages


@pytest.mark.parametrize("T", [1, 3, 63, 64, 65, 200])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.0, 0.0)])
def test_values_equal_those_of_the_primitive(T, gamma, lam):
    draw = torch.Generator().manual_seed(T)
    rewards, values = (torch.randn(5, T, dtype=torch.float64, generator=draw) for _ in range(2))
    mask = torch.rand(5, T, generator=draw) < 0.7
    mask[0], mask[1] = True, False
    for counts in (None, mask):
        wanted = strop.compute_gae(rewards, values, gamma=gamma, lam=lam, mask=counts)
        options = {"gamma": gamma, "lam": lam, "completion_mask": counts}
        found = gae_advantages(rewards, values, **options)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        both = gae_advantages(rewards.float(), values.float(), **options)
        assert both.dtype == torch.float32
        torch.testing.assert_close(both.double(), wanted, rtol=0, atol=1e-5)
    unused = torch.where(mask, 0.0, float("nan"))
    again = gae_advantages(rewards + unused, values + unused, gamma=gamma, lam=lam, completion_mask=mask)
    assert torch.equal(again, found)


def test_by_hand_without_gradient_and_without_tokens():
    rewards, values = torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[0.5, 9.0, 0.25]], requires_grad=True)
    found = gae_advantages(rewards, values, lam=0.5, completion_mask=torch.tensor([[1, 0, 1]]))
    assert found.tolist() == [[0.25 - 0.5 + 0.5 * 0.75, 0.0, 0.75]]
    assert not found.requires_grad
    assert gae_advantages(rewards.bfloat16()[:, :0], values.bfloat16()[:, :0]).shape == (1, 0)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda r: gae_advantages(r[0], r[0]), ValueError, r"rewards must have shape \[B, T\], found \[3\]"),
        (lambda r: gae_advantages(r, r[:1]), ValueError, "values must have"),
        (lambda r: gae_advantages(r.long(), r), TypeError, "rewards must be of a floating dtype"),
        (lambda r: gae_advantages(r, r, gamma=1.5), ValueError, "gamma must be at least 0 and at most 1"),
        (lambda r: gae_advantages(r, r, completion_mask=r + 2), ValueError, "completion_mask must hold only 0 and 1"),
    ],
)
def test_mistakes(make, error, message):
    with pytest.raises(error, match=message):
        make(torch.zeros(2, 3))
