"""Losses on a GPU: the values of the CPU's float64, without waiting for the device."""

import math

import pytest
import torch
from measure import without_waiting
from yardstick import RULES, clip_of

from strop.losses import (
    ADVANTAGE_SCALES,
    PREFERENCE_LOSS_TYPES,
    group_advantages,
    kl_estimate,
    policy_loss,
    preference_loss,
    rloo_advantages,
    rloo_loss,
)


def example():
    torch.manual_seed(0)
    logps, old, ref = torch.randn(3, 8, 33, dtype=torch.float64) * 0.3 - 1.5
    mask = torch.arange(33) < torch.randint(1, 34, (8, 1))
    return logps, old, ref, torch.randn(8, dtype=torch.float64), mask


@pytest.mark.parametrize(("loss_type", "level"), RULES)
def test_policy_loss(loss_type, level):
    *tensors, mask = example()
    options = {"loss_type": loss_type, "importance_level": level, "beta": 0.1, "max_completion_length": 40}
    options |= {"clip_eps": clip_of(loss_type, 5.0), "num_tokens": mask.sum()}

    def run(logps, old, ref, advantages, mask):
        logps = logps.clone().requires_grad_()
        found = policy_loss(logps, old, advantages, mask, ref_logps=ref, **options)
        found.loss.backward()
        return found, found.metrics, logps.grad

    expected, expected_metrics, expected_gradient = run(*tensors, mask)
    on_gpu = [x.float().cuda() for x in tensors] + [mask.cuda()]
    with without_waiting():
        found, metrics, gradient = run(*on_gpu)
    torch.testing.assert_close(torch.stack(found).double().cpu(), torch.stack(expected), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double().cpu(), expected_gradient, rtol=1e-5, atol=1e-7)
    for name, value in expected_metrics.items():
        torch.testing.assert_close(metrics[name].double().cpu(), value, rtol=1e-5, atol=1e-6)


def test_rloo_loss():
    logps, old, _, advantages, mask = example()
    expected = rloo_loss(logps, old, advantages, mask).loss
    on_gpu = [x.cuda() for x in (logps, old, advantages, mask)]
    with without_waiting():
        found = rloo_loss(*on_gpu).loss
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("scale", ADVANTAGE_SCALES)
def test_advantages(scale):
    rewards = torch.randn(12)
    boundaries = [0, 3, 4, 12]
    cases = [
        {"samples_per_prompt": 4},
        {"group_boundaries": boundaries},
        {"group_boundaries": torch.tensor(boundaries)},
    ]
    expected = [group_advantages(rewards, ddof=1, scale=scale, **case) for case in cases]
    on_gpu = rewards.cuda()
    with without_waiting():
        found = [group_advantages(on_gpu, ddof=1, scale=scale, **case) for case in cases]
        leave_one_out = rloo_advantages(on_gpu, 4)
    torch.testing.assert_close([x.cpu() for x in found], expected)
    torch.testing.assert_close(leave_one_out.cpu(), rloo_advantages(rewards, 4))
    waited = group_advantages(on_gpu, ddof=1, scale=scale, group_boundaries=torch.tensor(boundaries).cuda())
    torch.testing.assert_close(waited, found[1])


def test_a_nan_reward_spoils_its_group():
    found = group_advantages(torch.tensor([1.0, 0.0, math.nan, 1.0], device="cuda"), samples_per_prompt=2)
    assert found[:2].tolist() == [1.0, -1.0]
    assert found[2:].isnan().all()


@pytest.mark.parametrize("loss_type", PREFERENCE_LOSS_TYPES)
def test_preference_loss(loss_type):
    torch.manual_seed(0)
    sums, lengths = torch.randn(4, 9, dtype=torch.float64) * 5 - 30, torch.randint(1, 40, (2, 9))
    options = {"loss_type": loss_type, "label_smoothing": 0.1 if loss_type in ("robust", "exo_pair") else 0.0}
    options["num_pairs"] = 9
    expected = preference_loss(*sums, chosen_lengths=lengths[0], rejected_lengths=lengths[1], **options)
    sums, lengths = sums.float().cuda(), lengths.cuda()
    with without_waiting():
        found = preference_loss(*sums, chosen_lengths=lengths[0], rejected_lengths=lengths[1], **options)
        metrics = found.metrics
    torch.testing.assert_close(found.loss.double().cpu(), expected.loss, rtol=1e-5, atol=1e-5)
    for name, value in expected.metrics.items():
        torch.testing.assert_close(metrics[name].double().cpu(), value, rtol=1e-5, atol=1e-5)


def test_k3_near_the_reference():
    d = torch.logspace(-8, 1.9, 500, dtype=torch.float64)
    d = torch.cat([d, -d]).float()
    exact = kl_estimate(torch.zeros_like(d).double(), d.double())
    found = kl_estimate(torch.zeros_like(d).cuda(), d.cuda())
    torch.testing.assert_close(found.double().cpu(), exact, rtol=4e-7, atol=0)
