"""logp and ratio_kl on every backend: by hand, the gradients' equations, numbers at the edge, shapes."""

import math

import pytest
import torch
from yardstick import backend_fixture, same

from strop.ops import logp, ratio_kl, registry

backend, ratio_kl_backend = backend_fixture("logp"), backend_fixture("ratio_kl")


def test_by_hand(backend):
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]))
    found, entropy = logp(logits, torch.tensor([1, 2]), entropy=True)
    assert found.tolist() == pytest.approx([math.log(0.25), math.log(0.7)])
    expected = [-sum(p * math.log(p) for p in row) for row in ([0.5, 0.25, 0.25], [0.1, 0.2, 0.7])]
    assert entropy.tolist() == pytest.approx(expected)


def test_ratio_kl_by_hand(ratio_kl_backend):
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
    _, kl = ratio_kl(policy, policy, torch.tensor([0]), None, old)
    assert kl.abs().max() < 1e-12


def test_gradient_equations(backend):
    torch.manual_seed(0)
    logits = torch.randn(4, 9, requires_grad=True)
    ids = torch.tensor([0, 3, 8, 3])
    found, entropy = logp(logits, ids, temperature=2.0, entropy=True)
    p = (logits / 2).softmax(-1).detach()
    (d_logp,) = torch.autograd.grad(found.sum(), logits, retain_graph=True)
    (d_entropy,) = torch.autograd.grad(entropy.sum(), logits)
    torch.testing.assert_close(d_logp, (torch.nn.functional.one_hot(ids, 9) - p) / 2, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(d_entropy, -p * (p.log() + entropy.detach()[:, None]) / 2, rtol=1e-5, atol=1e-7)


def test_banned_tokens(backend):
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [-torch.inf, -torch.inf, 5.0]])
    found, entropy = logp(logits, torch.tensor([1, 2]), entropy=True)
    assert found.tolist() == [-math.inf, 0.0]
    assert entropy.tolist() == pytest.approx([math.log(2), 0.0])


def test_peaked_and_shifted_logits(backend):
    logits = torch.tensor([[1e4, 0.0, -1e4]])
    assert logp(logits, torch.tensor([0])).item() == 0.0
    assert logp(logits, torch.tensor([1])).item() == -1e4
    torch.testing.assert_close(logp(logits + 1e5, torch.tensor([1])), torch.tensor([-1e4]))


@pytest.mark.parametrize("offset", [0.0, 50.0, 1e4, 1e6])
def test_a_common_offset_costs_no_more_than_the_rounding_of_the_logits(backend, offset):
    torch.manual_seed(4)
    logits = (torch.randn(16, 100) * 3 + offset).requires_grad_()
    ids = torch.randint(0, 100, (16,))
    found, entropy = logp(logits, ids, entropy=True)
    expected, expected_entropy = logp.reference(logits.detach().double(), ids, entropy=True)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-6, atol=2e-6)


def test_float16_at_the_end_of_its_range(backend):
    found = logp(torch.tensor([[60000, 60000, -60000]], dtype=torch.float16), torch.tensor([0]))
    assert found.item() == pytest.approx(-math.log(2), rel=1e-6)


def test_shapes(backend):
    torch.manual_seed(3)
    logits, ids = torch.randn(2, 5, 11), torch.randint(0, 11, (2, 5))
    whole = logp(logits, ids)
    same(logp(logits[:, :-1], ids[:, 1:]), logp(logits[:, :-1].contiguous(), ids[:, 1:].contiguous()))
    same(logp(logits.transpose(0, 1), ids.T).T, whole)
    same(logp(logits[0, 0], ids[0, 0]), whole[0, 0])
    same(logp(logits[:1, ::2], ids[:1, ::2]), whole[:1, ::2])  # ids that are a view with a stride
    same(logp(logits[0].expand(3, 5, 11), ids[0].expand(3, 5))[2], whole[0])
    assert logp(torch.randn(2, 0, 11), torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0)
    assert logp(logits, ids, completion_mask=torch.zeros(2, 5)).tolist() == [[0.0] * 5] * 2


@pytest.mark.parametrize("temperature", [1e-3, 1e3, 1e30])
def test_extreme_temperatures(backend, temperature):
    logits = torch.tensor([[3.0, 1.0, 2.0]])
    found = logp(logits, torch.tensor([1]), temperature=temperature)
    expected = logp.reference(logits.double(), torch.tensor([1]), temperature=temperature)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


def test_nan_logits_are_not_hidden(backend):
    logits = torch.zeros(2, 4)
    logits[0, 3] = math.nan
    assert logp(logits, torch.tensor([0, 0])).isnan().tolist() == [True, False]


def test_in_place_runs_backward_once_and_overwrites_only_what_has_a_gradient():
    ids, columns = torch.arange(6), torch.randn(7, 6).T
    with registry.use_backend(logp="triton"):
        found = logp(torch.randn(6, 7, requires_grad=True) * 1.0, ids, in_place=True)
        found.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="can run once: the gradient has overwritten the logits"):
            found.sum().backward()
        assert logp(columns, ids, in_place=True).shape == (6,)  # nothing to overwrite


def test_in_place_is_refused_where_logp_saved_the_logits():
    """Either loss may overwrite the logits, but not under the other, which would read a gradient for logits."""
    ids = torch.tensor([1, 2])
    for in_place in (True, False):
        logits = torch.randn(2, 5, requires_grad=True) * 1.0
        with registry.use_backend(logp="triton"):
            first, second = (logp(logits, ids, in_place=x) for x in (in_place, True))
        second.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            first.sum().backward()
