"""The checker fails for what it is there to find."""

import pytest
import torch
from yardstick import check, check_gradient, eager_logps, same

from strop.ops import logp


@pytest.fixture
def gradients():
    """(right in bfloat16, exact, eager in bfloat16, ids)"""
    torch.manual_seed(0)
    logits, ids = torch.randn(4, 503).bfloat16(), torch.randint(0, 400, (4,))
    made = []
    for dtype, function in ((torch.float64, logp.reference), (torch.bfloat16, eager_logps)):
        x = logits.to(dtype).requires_grad_()
        function(x, ids).sum().backward()
        made.append(x.grad)
    exact, eager = made
    return exact.bfloat16(), exact, eager, ids


def test_a_right_gradient_passes(gradients):
    check_gradient(*gradients)


def zero_tail(g, ids):
    g[:, -1] = 0


def nan(g, ids):
    g[2, 100] = torch.nan


def zero_off_the_target(g, ids):
    g[g < 0] = 0


def zero_on_the_target(g, ids):
    g.scatter_(1, ids[:, None], 0.0)


def all_zero(g, ids):
    g.zero_()


def two_percent_too_large(g, ids):
    g *= 1.02


def next_column(g, ids):
    g.copy_(g.roll(1, 1))


@pytest.mark.parametrize(
    "spoil", [zero_tail, nan, zero_off_the_target, zero_on_the_target, all_zero, two_percent_too_large, next_column]
)
def test_a_wrong_gradient_fails(gradients, spoil):
    found, exact, eager, ids = gradients
    spoil(found, ids)
    with pytest.raises(AssertionError, match="gradient o"):
        check_gradient(found, exact, eager, ids)


def test_infinities_have_their_places():
    exact = torch.tensor([1.0, -torch.inf, torch.nan], dtype=torch.float64)
    check(exact.float(), exact, exact.float())
    for wrong in ([1.0, 0.0, torch.nan], [1.0, torch.inf, torch.nan], [torch.inf, -torch.inf, torch.nan]):
        with pytest.raises(AssertionError, match="NaN or inf"):
            check(torch.tensor(wrong), exact, exact.float())
    with pytest.raises(AssertionError, match="shape"):
        check(exact.float()[:2], exact, exact.float())


def test_two_ways_to_one_result():
    a = torch.tensor([1.0, -3.0, 0.0, torch.inf, torch.nan])
    same(a, a.clone())
    same([a, a * 0], [a * (1 + 4 * torch.finfo(a.dtype).eps), a * 0])
    same(torch.tensor([3.0]).bfloat16(), torch.tensor([3.02]).bfloat16())
    same(torch.tensor(1e-8), torch.tensor(2e-8), scale=1.0)
    for wrong in (a * 1.00001, a + 3e-5, a.double(), a[:4], a.nan_to_num(), torch.zeros(5)):
        with pytest.raises(AssertionError):
            same(wrong, a)
    with pytest.raises(AssertionError):
        same(torch.full((3,), 1e-30), torch.zeros(3))  # what is masked is 0
    with pytest.raises(AssertionError):
        same(torch.tensor([3.0]).bfloat16(), torch.tensor([3.1]).bfloat16())
    with pytest.raises(ValueError, match="longer"):
        same([a], [a, a])
