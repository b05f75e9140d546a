"""Advantages in torch: by hand, TRL's numbers, the primitives, unequal groups, bad input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from yardstick import same

import strop
from strop.losses import ADVANTAGE_SCALES, group_advantages, rloo_advantages

every_scale = pytest.mark.parametrize("scale", ADVANTAGE_SCALES)


def test_by_hand():
    rewards = torch.tensor([1.0, 3.0, 0.0, 0.0, 3.0])
    found = group_advantages(rewards, group_boundaries=[0, 2, 5])
    assert found.tolist() == pytest.approx([-1, 1, -1 / math.sqrt(2), -1 / math.sqrt(2), math.sqrt(2)])
    assert group_advantages(rewards, group_boundaries=[0, 2, 5], scale="none").tolist() == [-1, 1, -1, -1, 2]
    found = group_advantages(rewards[:2], samples_per_prompt=2, ddof=1, eps=0.5)
    assert found.tolist() == pytest.approx([-1 / (math.sqrt(2) + 0.5), 1 / (math.sqrt(2) + 0.5)])
    spread = torch.tensor([1.0, 3.0, 0.0, 0.0, 3.0]).std(correction=0).item()
    found = group_advantages(rewards, group_boundaries=[0, 2, 5], scale="batch")
    assert found.tolist() == pytest.approx([x / spread for x in (-1, 1, -1, -1, 2)])


@every_scale
@given(
    rewards=st.lists(st.floats(-1e100, 1e100), min_size=12, max_size=12),
    group_size=st.sampled_from([1, 2, 3, 4, 6, 12]),
    options=st.sampled_from([(0, 0.0), (1, 1e-4), (0, 3.0)]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=100, deadline=None)
def test_agrees_with_the_primitive(scale, rewards, group_size, options, dtype):
    ddof, eps = options
    values = torch.tensor(rewards, dtype=torch.float64).clamp(-1e30, 1e30).to(dtype)
    expected = strop.compute_batch_group_advantages(values, group_size, ddof=ddof, eps=eps, scale=scale)
    options = {"ddof": ddof, "eps": eps, "scale": scale}
    by_size = group_advantages(values, samples_per_prompt=group_size, **options)
    by_boundaries = group_advantages(values, group_boundaries=list(range(0, 13, group_size)), **options)
    assert by_size.dtype == expected.dtype
    largest = expected.abs().max().item()
    torch.testing.assert_close(by_size, expected, rtol=1e-6 if dtype == torch.float32 else 1e-9, atol=1e-12 * largest)
    same(by_boundaries, by_size)


@every_scale
@pytest.mark.parametrize("value", [1000.1, 0.1, -3e7, 1e-300, 1e300])
def test_equal_rewards_are_exactly_zero(scale, value):
    rewards = torch.full((8,), value, dtype=torch.float64)
    assert (group_advantages(rewards, samples_per_prompt=8, scale=scale) == 0).all()
    assert (group_advantages(rewards, group_boundaries=[0, 3, 8], scale=scale, ddof=1) == 0).all()
    assert (rloo_advantages(rewards, 4) == 0).all()


@every_scale
def test_unequal_groups_are_the_groups_alone(scale):
    torch.manual_seed(0)
    rewards, boundaries = torch.randn(11, dtype=torch.float64), [0, 4, 5, 11]
    as_tensor = torch.tensor(boundaries)
    for given_as in (boundaries, tuple(boundaries), as_tensor, as_tensor.int()):
        found = group_advantages(rewards, group_boundaries=given_as, ddof=1, scale=scale)
        divisor = rewards.std() if scale == "batch" else 1
        for start, end in ((0, 4), (5, 11)):
            options = {"samples_per_prompt": end - start, "scale": "none" if scale == "batch" else scale}
            alone = group_advantages(rewards[start:end], ddof=1, **options)
            torch.testing.assert_close(found[start:end], alone / divisor, rtol=1e-12, atol=1e-14)
        assert found[4] == 0


def test_dtypes():
    integers = group_advantages(torch.tensor([1, 0, 0, 1]), samples_per_prompt=4)
    assert integers.dtype == torch.float32
    assert integers.tolist() == [1, -1, -1, 1]
    assert torch.equal(group_advantages(torch.tensor([True, False]), samples_per_prompt=2), torch.tensor([1.0, -1.0]))
    assert group_advantages(torch.ones(4, dtype=torch.bfloat16), samples_per_prompt=2).dtype == torch.float32
    assert not group_advantages(torch.ones(4, requires_grad=True), samples_per_prompt=2).requires_grad


def test_tiny_and_huge_rewards():
    for scale in (1e-200, 1e200):
        rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64) * scale
        assert group_advantages(rewards, samples_per_prompt=4).tolist() == pytest.approx([1, -1, -1, 1])


@every_scale
def test_nothing(scale):
    empty = torch.zeros(0)
    assert group_advantages(empty, samples_per_prompt=4, scale=scale).shape == (0,)
    assert group_advantages(empty, group_boundaries=[0], scale=scale).shape == (0,)
    assert rloo_advantages(empty, 4).shape == (0,)


def test_rloo():
    """Each reward minus the mean of the others."""
    rewards = torch.tensor([1.0, 2.0, 6.0, 0.0, 0.0, 3.0])
    assert rloo_advantages(rewards, 3).tolist() == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5, -1.5, -1.5, 3.0])
    assert rloo_advantages(rewards, 1).tolist() == [0.0] * 6


R = torch.arange(4.0)
MISTAKES = [
    ({"samples_per_prompt": 3}, ValueError, "rewards must have a multiple of samples_per_prompt=3 elements, found 4"),
    ({"samples_per_prompt": 0}, ValueError, "samples_per_prompt must be at least 1, found 0"),
    ({"samples_per_prompt": 2.0}, TypeError, "samples_per_prompt must be an int, found float"),
    ({}, ValueError, "exactly one of samples_per_prompt and group_boundaries must be given, found neither"),
    ({"samples_per_prompt": 2, "group_boundaries": [0, 4]}, ValueError, "must be given, found both"),
    ({"group_boundaries": [2, 4, 6]}, ValueError, "must start at 0, end at 4 and increase strictly for 4 rewards, found [2, 4, 6]"),
    ({"group_boundaries": [0, 2]}, ValueError, "found [0, 2]"),
    ({"group_boundaries": [0, 2, 2, 4]}, ValueError, "found [0, 2, 2, 4]"),
    ({"group_boundaries": [0, 3, 2, 4]}, ValueError, "found [0, 3, 2, 4]"),
    ({"group_boundaries": []}, ValueError, "found []"),
    ({"group_boundaries": torch.tensor([2, 4, 6])}, ValueError, "found [2, 4, 6]"),
    ({"group_boundaries": torch.tensor([[0, 4]])}, ValueError, "group_boundaries must be one-dimensional, found shape [1, 2]"),
    ({"group_boundaries": torch.tensor([0.0, 4.0])}, TypeError, "group_boundaries must be integers, found torch.float32"),
    ({"group_boundaries": [0, 4.0]}, TypeError, "group_boundaries[1] must be an int, found float"),
    ({"group_boundaries": 4}, TypeError, "group_boundaries must be a tensor or a list, found int"),
    ({"samples_per_prompt": 2, "ddof": 2}, ValueError, "ddof must be below the 2 rewards of a group, found 2"),
    ({"group_boundaries": [0, 1, 4], "ddof": 3}, ValueError, "ddof must be below the 3 rewards of a group, found 3"),
    ({"samples_per_prompt": 2, "ddof": 4, "scale": "batch"}, ValueError, "ddof must be below the 4 rewards of a batch, found 4"),
    ({"samples_per_prompt": 2, "ddof": -1}, ValueError, "ddof must be at least 0, found -1"),
    ({"samples_per_prompt": 2, "eps": -1.0}, ValueError, "eps must be finite and at least 0, found -1.0"),
    ({"samples_per_prompt": 2, "scale": "prompt"}, ValueError, "scale must be one of 'group', 'batch', 'none', found 'prompt'"),
    ({"rewards": R[None], "samples_per_prompt": 2}, ValueError, "rewards must have shape [B], found [1, 4]"),
    ({"rewards": [1.0], "samples_per_prompt": 1}, TypeError, "rewards must be a tensor, found list"),
    ({"rewards": R.cfloat(), "samples_per_prompt": 2}, TypeError, "rewards must be floats or integers, found torch.complex64"),
    ({"rewards": torch.tensor([0.0, math.nan]), "samples_per_prompt": 2}, ValueError, "rewards must be finite, found nan at index 1"),
    ({"rewards": torch.tensor([math.inf, 0.0]), "samples_per_prompt": 2}, ValueError, "rewards must be finite, found inf at index 0"),
]  # fmt: skip


@pytest.mark.parametrize(("kwargs", "error", "message"), MISTAKES)
def test_mistakes(kwargs, error, message):
    with pytest.raises(error) as raised:
        group_advantages(**({"rewards": R} | kwargs))
    assert message in str(raised.value)


def test_mistakes_in_rloo():
    with pytest.raises(ValueError, match="rewards must have a multiple of samples_per_prompt=3 elements, found 4"):
        rloo_advantages(R, 3)
    with pytest.raises(ValueError, match="rewards must be finite, found nan at index 0"):
        rloo_advantages(R * math.nan, 2)
