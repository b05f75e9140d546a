"""linear_divergence: TRL's GKD loss, by hand, every backend against the reference, banned tokens."""

import math

import pytest
import torch
from yardstick import backends, cut_off, float64

from strop.losses.divergence import divergence
from strop.ops import linear_divergence, registry

every_backend = pytest.mark.parametrize("backend", registry.backends("linear_divergence"))
BETAS = [0.0, 0.3, 1.0]
N, H, G, V = 11, 6, 5, 37


def problem(dtype=torch.float64, V=V, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (N, H), (V, H), (V,), (N, G), (V, G), (V,)
    tensors = [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    weights = torch.rand(N, generator=generator, dtype=torch.float64).to(dtype)
    return [t.requires_grad_() for t in tensors[:3]], tensors[3:], weights


def run(student, teacher, weights, **options):
    """Loss, divergences and the gradients of those that have one."""
    hidden, weight, bias = student
    found = linear_divergence(
        hidden, weight, teacher[0], teacher[1], weights, bias=bias, teacher_bias=teacher[2], **options
    )
    leaves = [leaf for leaf in student if leaf.requires_grad]
    return found, torch.autograd.grad(found.loss, leaves)


def test_trl_golden_values(golden_more):
    for case in golden_more["gkd"]:
        names = ("hidden", "weight", "bias", "teacher_hidden", "teacher_weight", "weights")
        hidden, weight, bias, teacher_hidden, teacher_weight, weights = (float64(case[name]) for name in names)
        for name in backends("linear_divergence", torch.float64):
            hidden = hidden.detach().requires_grad_()
            with registry.use_backend(linear_divergence=name):
                found = linear_divergence(
                    hidden, weight, teacher_hidden, teacher_weight, weights, bias=bias, beta=case["beta"],
                    temperature=case["temperature"],
                )  # fmt: skip
            found.loss.backward()
            assert found.loss.item() == pytest.approx(case["loss"], rel=1e-12)
            torch.testing.assert_close(found.divergences.tolist(), case["divergences"], rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(hidden.grad, float64(case["grad"]), rtol=1e-10, atol=1e-12)
    assert len(golden_more["gkd"]) == 6


def test_by_hand():
    """p = (½, ½), q = (¼, ¾)."""
    p, q = torch.tensor([[0.5, 0.5]], dtype=torch.float64), torch.tensor([[0.25, 0.75]], dtype=torch.float64)
    forward = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    reverse = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    m = (0.375, 0.625)
    jsd = 0.5 * sum(x * math.log(x / y) for x, y in zip((0.25, 0.75), m, strict=True))
    jsd += 0.5 * sum(x * math.log(x / y) for x, y in zip((0.5, 0.5), m, strict=True))
    for beta, wanted in ((0.0, forward), (1.0, reverse), (0.5, jsd)):
        assert divergence(p.log(), q.log(), beta).item() == pytest.approx(wanted)
        assert divergence(p.log(), p.log(), beta).item() == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("beta", BETAS)
def test_gradient_against_finite_differences(beta):
    """Of the reference: what the backends make in the forward is handed out once."""
    student, teacher, weights = problem()

    def loss_of(hidden, weight, bias):
        given = teacher[0], teacher[1], weights
        options = {"bias": bias, "teacher_bias": teacher[2], "beta": beta, "temperature": 0.7}
        return linear_divergence.reference(hidden, weight, *given, **options).loss

    assert torch.autograd.gradcheck(loss_of, student)


@every_backend
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("V", "workspace"), [(37, None), (37, 3000), (8003, None), (1, None)])
def test_backends_agree_with_the_reference(backend, beta, frozen, V, workspace):
    """In one chunk and in several; the gradients err at most twice as much as eager torch in float32."""
    student, teacher, weights = problem(torch.float32, V)
    for leaf in student[1:]:
        leaf.requires_grad_(not frozen)
    exact = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in student]
    with registry.use_backend(linear_divergence="torch"):
        wanted, wanted_gradients = run(
            exact, [t.double() for t in teacher], weights.double(), beta=beta, temperature=0.7
        )
        _, eager_gradients = run(student, teacher, weights, beta=beta, temperature=0.7)
    with registry.use_backend(linear_divergence=backend):
        found, gradients = run(student, teacher, weights, beta=beta, temperature=0.7, workspace=workspace)
    assert not found.divergences.requires_grad
    torch.testing.assert_close(found.loss.double(), wanted.loss, rtol=2e-5, atol=1e-5)
    torch.testing.assert_close(found.divergences.double(), wanted.divergences, rtol=2e-5, atol=1e-5)
    for gradient, eager, exactly in zip(gradients, eager_gradients, wanted_gradients, strict=True):
        error, of_eager = ((one.double() - exactly).norm() for one in (gradient, eager))
        assert error <= 2 * of_eager + 1e-6 * exactly.norm() + 1e-12


@every_backend
@pytest.mark.parametrize("beta", BETAS)
def test_bfloat16(backend, beta):
    """Logits and gradients are rounded to bfloat16 on the way, as eager torch rounds them."""
    student, teacher, weights = problem(torch.bfloat16)
    exact = [leaf.detach().double().requires_grad_() for leaf in student]
    with registry.use_backend(linear_divergence="torch"):
        wanted, wanted_gradients = run(exact, [t.double() for t in teacher], weights.double(), beta=beta)
    with registry.use_backend(linear_divergence=backend):
        found, gradients = run(student, teacher, weights, beta=beta)
    assert found.loss.dtype == torch.float32
    slack = 3e-2 + 4 * cut_off(backend, torch.bfloat16)
    torch.testing.assert_close(found.loss.double(), wanted.loss, rtol=slack, atol=slack)
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        error = (gradient.double() - wanted_gradient).norm() / wanted_gradient.norm()
        assert error < slack, error


@every_backend
@pytest.mark.parametrize("beta", BETAS)
def test_tokens_banned_in_both_distributions(backend, beta):
    """A bias of −inf takes a token out of both distributions: it adds nothing and has no gradient."""
    (hidden, weight, bias), teacher, weights = problem(torch.float32)
    banned = torch.zeros(V).index_fill(0, torch.tensor([3, 7]), -math.inf)
    bias, teacher_bias = (bias.detach() + banned).requires_grad_(), teacher[2] + banned
    kept = torch.isfinite(banned)
    with registry.use_backend(linear_divergence=backend):
        found, gradients = run([hidden, weight, bias], [*teacher[:2], teacher_bias], weights, beta=beta)
        cut = [hidden, weight.detach()[kept].requires_grad_(), bias.detach()[kept].requires_grad_()]
        wanted, wanted_gradients = run(cut, [teacher[0], teacher[1][kept], teacher_bias[kept]], weights, beta=beta)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients[0], wanted_gradients[0], rtol=1e-4, atol=1e-5)
    assert (gradients[2][~kept] == 0).all()
