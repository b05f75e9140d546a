"""ratio_kl on every backend: by hand, at the reference, in place. What holds for every operator: test_every_operator.py."""

import math

import pytest
import torch
from yardstick import backend_fixture, eager_logps

from strop.ops import ratio_kl

backend = backend_fixture("ratio_kl")


def example(dtype=torch.float32, V=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    policy, ref = (torch.randn(2, 2, 3, V, generator=generator) * 2).to(dtype)
    ids = torch.randint(0, V, (2, 3), generator=generator)
    old = eager_logps(policy, ids) + 0.3 * torch.randn(2, 3, generator=generator)
    return policy, ref, ids, torch.tensor([[1, 1, 0], [1, 1, 1]]), old


def test_by_hand(backend):
    """p = ¼ and reference ½ for the token, old ⅛: ratio 2, d = log 2, kl = 2 − log 2 − 1."""
    policy = torch.log(torch.tensor([[0.25, 0.75]])).requires_grad_()
    ref, old = torch.log(torch.tensor([[0.5, 0.5]])), torch.log(torch.tensor([0.125]))
    ratio, kl = ratio_kl(policy, ref, torch.tensor([0]), None, old)
    assert ratio.tolist() == pytest.approx([2.0])
    assert kl.tolist() == pytest.approx([1 - math.log(2)])
    (d_ratio,) = torch.autograd.grad(ratio.sum(), policy, retain_graph=True)
    (d_kl,) = torch.autograd.grad(kl.sum(), policy)
    assert d_ratio[0].tolist() == pytest.approx([2 * 0.75, -2 * 0.75])
    assert d_kl[0].tolist() == pytest.approx([-1 * 0.75, 0.75])  # (1 − exp d)·(onehot − p)


def test_at_the_reference_and_on_policy(backend):
    policy, _, ids, mask, _ = example()
    ratio, kl = ratio_kl(policy, policy, ids, mask, eager_logps(policy, ids))
    torch.testing.assert_close(ratio, torch.ones(2, 3))
    assert kl.abs().max() < 1e-12


def test_in_place_and_no_tokens(backend):
    policy, ref, ids, mask, old = example()
    plain, leaf = policy.clone().requires_grad_(), policy.clone().requires_grad_()
    ratio_kl(plain, ref, ids, mask, old)[0].sum().backward()
    ratio_kl(leaf * 1, ref, ids, mask, old, in_place=True)[0].sum().backward()
    torch.testing.assert_close(leaf.grad, plain.grad)
    ratio, kl = ratio_kl(policy[:, :0], ref[:, :0], ids[:, :0], mask[:, :0], old[:, :0])
    assert ratio.shape == kl.shape == (2, 0)
