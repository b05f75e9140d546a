"""KL estimates: by hand, in high precision from 1e-8 to 80, gradients, the primitives, bad input."""

import decimal
import math

import pytest
import torch
from yardstick import same

import strop
from strop.losses import KL_ESTIMATORS, kl_estimate


def test_by_hand():
    logps, ref_logps = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert kl_estimate(logps, ref_logps, "k1").tolist() == [0.5, -1.0]
    assert kl_estimate(logps, ref_logps, "k2").tolist() == [0.125, 0.5]
    expected = [math.exp(-0.5) + 0.5 - 1, math.exp(1) - 1 - 1]
    assert kl_estimate(logps, ref_logps, "k3").tolist() == pytest.approx(expected, rel=1e-6)
    same(kl_estimate(logps, ref_logps), kl_estimate(logps, ref_logps, "k3"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_is_accurate_to_two_ulp(dtype):
    """Value and gradient within 2 ulp of 60 digits, from differences of 1e-8 to 80 of both signs.

    Beyond |d| = ½ the value is expm1(d) − d, and may be as far off as torch's expm1 is besides: a whole ulp, or half of
    one, as the CPU has it.
    """
    sizes = torch.logspace(-8, math.log10(80), 3000, dtype=torch.float64)
    edge = torch.tensor([0.5, math.nextafter(0.5, 0), math.nextafter(0.5, 1)], dtype=torch.float64)
    d = torch.cat([sizes, -sizes, edge, -edge]).to(dtype)
    logps = torch.zeros_like(d).requires_grad_()
    found = kl_estimate(logps, d)
    found.sum().backward()
    with decimal.localcontext(prec=60):
        exact = [decimal.Decimal(x) for x in d.tolist()]
        value = torch.tensor([float(x.exp() - x - 1) for x in exact], dtype=torch.float64)
        gradient = torch.tensor([float(1 - x.exp()) for x in exact], dtype=torch.float64)
    eps = torch.finfo(dtype).eps
    of_expm1 = torch.where(d.abs() < 0.5, 0.0, (torch.expm1(d).double() + gradient).abs())
    assert of_expm1.max() > 0
    assert ((found.double() - value).abs() <= 2 * eps * value + of_expm1).all()
    torch.testing.assert_close(logps.grad.double(), gradient, rtol=2 * eps, atol=0)


def test_k3_of_zero_and_infinite_differences():
    logps = torch.zeros(4, requires_grad=True)
    found = kl_estimate(logps, torch.tensor([0.0, -math.inf, 1000.0, math.nan]))
    assert found[:3].tolist() == [0.0, math.inf, math.inf]
    assert found[3].isnan()
    found.sum().backward()
    assert logps.grad[:3].tolist() == [0.0, 1.0, -math.inf]


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_gradients(estimator):
    torch.manual_seed(0)
    logps = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    ref_logps = torch.randn(3, 5, dtype=torch.float64)
    ref_logps[0] = logps.detach()[0] + 1e-3
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref_logps, estimator), logps)
    assert torch.autograd.gradgradcheck(lambda x: kl_estimate(x, ref_logps, estimator), logps)


def test_gradient_goes_to_the_policy_only():
    logps, ref_logps = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)
    kl_estimate(logps, ref_logps).sum().backward()
    assert ref_logps.grad is None
    assert logps.grad.tolist() == pytest.approx([-math.expm1(1)] * 2)


def test_under_vmap():
    torch.manual_seed(0)
    logps, ref_logps = torch.randn(2, 3, 4)
    found = torch.func.vmap(torch.func.grad(lambda p, q: kl_estimate(p, q).sum()))(logps, ref_logps)
    torch.testing.assert_close(found, -torch.expm1(ref_logps - logps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_agrees_with_the_primitive(dtype):
    torch.manual_seed(1)
    logps = -torch.rand(4, 9, dtype=dtype)
    ref_logps = logps + torch.randn(4, 9, dtype=dtype) * torch.logspace(-6, 0, 9, dtype=dtype)
    found = kl_estimate(logps, ref_logps).double().sum(-1)
    expected = strop.compute_batch_token_kl_schulman(logps, ref_logps).double()
    torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32(dtype):
    logps = torch.tensor([-1.0, -2.0], dtype=dtype, requires_grad=True)
    found = kl_estimate(logps, torch.tensor([-1.5, -2.125], dtype=dtype))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, kl_estimate(logps.detach().float(), torch.tensor([-1.5, -2.125])))
    found.sum().backward()
    assert logps.grad.dtype == dtype


P = torch.zeros(2, 3)
MISTAKES = [
    ((P, P, "k4"), ValueError, "estimator must be one of 'k1', 'k2', 'k3', found 'k4'"),
    ((P, P[:, :2]), ValueError, "ref_logps must have shape [2, 3], found [2, 2]"),
    ((P.long(), P), TypeError, "logps must be of a floating dtype, found torch.int64"),
    ((P, P.int()), TypeError, "ref_logps must be of a floating dtype, found torch.int32"),
    ((P, None), TypeError, "ref_logps must be a tensor, found NoneType"),
    ((P, P.to("meta")), TypeError, "ref_logps must be on cpu as logps is, found meta"),
]


@pytest.mark.parametrize(("args", "error", "message"), MISTAKES)
def test_mistakes(args, error, message):
    with pytest.raises(error) as raised:
        kl_estimate(*args)
    assert message in str(raised.value)
