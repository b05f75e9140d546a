"""The operators on hidden states on a GPU: as exact as eager torch, and never the logits in memory."""

import pytest
import torch
from measure import MiB, peak_bytes
from torch.nn.functional import linear
from yardstick import eager_logps

from strop.ops import linear_dpo_loss, linear_grpo_loss, linear_logp, registry

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def example(dtype=torch.bfloat16, B=4, T=24, H=256, V=50257):
    """(hidden, weight, bias), ids, mask; logits of about 3"""
    torch.manual_seed(0)
    hidden, weight = torch.randn(B, T, H, device="cuda"), torch.randn(V, H, device="cuda") * 3 / H**0.5
    bias, ids = torch.randn(V, device="cuda"), torch.randint(0, V, (B, T), device="cuda")
    mask = torch.arange(T, device="cuda") < torch.randint(1, T + 1, (B, 1), device="cuda")
    return [x.to(dtype) for x in (hidden, weight, bias)], ids, mask


def run(head, loss_of):
    leaves = [x.detach().clone().requires_grad_() for x in head]
    value = loss_of(*leaves)
    value.sum().backward()
    return value.detach(), [x.grad for x in leaves]


def compare(head, found_of, exact_of, eager_of):
    """Values and the three gradients: an error of at most twice eager's, and of the right size."""
    found, gradients = run(head, found_of)
    exact, exact_gradients = run([x.double() for x in head], exact_of)
    eager, eager_gradients = run(head, eager_of)
    error, eager_error = (found - exact).abs().max(), (eager - exact).abs().max()
    # a single number may by chance be more exact than it deserves
    slack = 0.5 * torch.finfo(head[0].dtype).eps if found.ndim == 0 else 0.0
    assert error <= 2 * eager_error + 1e-5 + slack, f"{error:.3g}, eager {eager_error:.3g}"
    for name, a, b, c in zip(("hidden", "weight", "bias"), gradients, exact_gradients, eager_gradients, strict=True):
        assert a.dtype == head[0].dtype
        error, eager_error, size = (a - b).abs().max(), (c - b).abs().max(), b.abs().max()
        assert error <= 2 * eager_error + 2e-6 * size, f"d {name}: {error:.3g}, eager {eager_error:.3g}"
        assert (a - b).norm() <= 2 * (c - b).norm() + 2e-6 * b.norm(), f"d {name}"
        assert error < 0.1 * size


@every_dtype
@pytest.mark.parametrize("workspace", [None, 4 * MiB])
def test_linear_logp(dtype, workspace):
    head, ids, mask = example(dtype)
    compare(
        head,
        lambda h, w, b: linear_logp(h, w, ids, bias=b, completion_mask=mask, workspace=workspace),
        lambda h, w, b: linear_logp.reference(h, w, ids, bias=b, completion_mask=mask),
        lambda h, w, b: eager_logps(linear(h, w, b), ids) * mask,
    )


@every_dtype
@pytest.mark.parametrize("workspace", [None, 4 * MiB])
def test_linear_logp_of_a_frozen_head(dtype, workspace):
    """Its gradient is made in the forward, and a backward only multiplies it."""
    (hidden, weight, _), ids, mask = example(dtype)
    d_logps = torch.linspace(-1, 2, ids.numel(), device="cuda").view_as(ids)

    def gradient(logps_of, dtype):
        leaf = hidden.to(dtype).requires_grad_()
        logps = logps_of(leaf, weight.to(dtype))
        return logps.detach(), *torch.autograd.grad(logps, leaf, d_logps.to(logps.dtype))

    options = {"completion_mask": mask}
    exact, d_exact = gradient(lambda h, w: linear_logp.reference(h, w, ids, **options), torch.float64)
    eager, d_eager = gradient(lambda h, w: eager_logps(linear(h, w), ids) * mask, dtype)
    found, d_found = gradient(lambda h, w: linear_logp(h, w, ids, workspace=workspace, **options), dtype)
    assert (found - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-5
    error, eager_error = (x - d_exact for x in (d_found, d_eager))
    assert error.abs().max() <= 2 * eager_error.abs().max() + 2e-6 * d_exact.abs().max()
    assert error.norm() <= 2 * eager_error.norm() + 2e-6 * d_exact.norm()
    assert error.norm() < 0.1 * d_exact.norm()


def test_linear_logp_with_entropy():
    head, ids, mask = example()
    options = {"completion_mask": mask, "entropy": True, "temperature": 0.8}
    found = linear_logp(*head[:2], ids, bias=head[2], **options)
    exact, eager = (
        linear_logp.reference(*h[:2], ids, bias=h[2], **options) for h in ([x.double() for x in head], head)
    )
    for a, b, c in zip(found, exact, eager, strict=True):
        assert (a - b).abs().max() <= 2 * (c - b).abs().max() + 1e-5


@every_dtype
@pytest.mark.parametrize(("H", "workspace"), [(256, None), (256, 4 * MiB), (16, 2 * MiB)])
def test_linear_grpo_loss(dtype, H, workspace):
    """With H = 16 the logits do not fit into the memory of the weight's gradient: chunks of tokens, summed in float32."""
    head, ids, mask = example(dtype, H=H)
    old = eager_logps(linear(*head), ids) + 0.2 * torch.randn(4, 24, device="cuda")
    rest, options = (ids, old, torch.randn(4, device="cuda"), mask), {"samples_per_prompt": 2}
    reference = lambda h, w, b: linear_grpo_loss.reference(h, w, *rest, bias=b, **options).loss  # noqa: E731
    compare(
        head,
        lambda h, w, b: linear_grpo_loss(h, w, *rest, bias=b, workspace=workspace, **options).loss,
        reference,
        reference,
    )


@pytest.mark.parametrize("backend", registry.backends("linear_grpo_loss"))
def test_linear_grpo_loss_with_everything(backend):
    head, ids, mask = example(torch.float32, V=8003)
    ref, _, _ = example(torch.float32, V=8003, H=128)
    old = eager_logps(linear(*head), ids) + 0.2 * torch.randn(4, 24, device="cuda")
    rest = ids, old, torch.randn(4, device="cuda"), mask
    options = {"samples_per_prompt": 4, "beta": 0.1, "ref_hidden": ref[0], "ref_weight": ref[1], "ref_bias": ref[2]}
    for level, entropy_coef in (("token", 0.0), ("sequence", 0.01)):
        more = {"importance_level": level, "entropy_coef": entropy_coef}
        results = []
        for name in (backend, "torch"):
            with registry.use_backend(linear_grpo_loss=name):
                results.append(run(head, lambda h, w, b: linear_grpo_loss(h, w, *rest, bias=b, **options, **more).loss))  # noqa: B023
        torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-5)
        for a, b in zip(results[0][1], results[1][1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@every_dtype
@pytest.mark.parametrize("workspace", [None, 4 * MiB])
@pytest.mark.parametrize("spread", [1, 40])
def test_a_frozen_head(dtype, workspace, spread):
    """Exponentials over a base that is not the maximum; with logits of 120, a base that does not do."""
    (hidden, weight, _), ids, mask = example(dtype)
    hidden = hidden * spread
    if spread == 1:
        mask = torch.ones_like(mask)
    old = eager_logps(linear(hidden.double(), weight.double()), ids).float() - 0.1
    options = {"advantages": torch.linspace(-1, 1, 4, device="cuda"), "ref_logps": old + 0.2, "beta": 0.1}

    def gradient(loss_of, dtype, **more):
        leaf = hidden.to(dtype).requires_grad_()
        loss = loss_of(leaf, weight.to(dtype), ids, old, None, mask, **options, **more).loss
        return loss.detach(), *torch.autograd.grad(loss, leaf)

    exact, d_exact = gradient(linear_grpo_loss.reference, torch.float64)
    eager, d_eager = gradient(linear_grpo_loss.reference, dtype)
    found, d_found = gradient(linear_grpo_loss, dtype, workspace=workspace)
    assert (found - exact).abs() <= 2 * (eager - exact).abs() + 1e-5 + 0.5 * torch.finfo(dtype).eps
    error, eager_error = d_found - d_exact, d_eager - d_exact
    assert error.abs().max() <= 2 * eager_error.abs().max() + 2e-6 * d_exact.abs().max()
    assert error.norm() <= 2 * eager_error.norm() + 2e-6 * d_exact.norm()
    assert error.norm() < 0.1 * d_exact.norm() or spread > 1


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("count", [0, 1, 95, 96])
def test_any_number_of_tokens_may_count(frozen, count):
    """Their number comes while the first product is computed, of as many as there may be."""
    (hidden, weight, _), ids, mask = example(torch.float32)
    mask = (torch.arange(mask.numel(), device="cuda") < count).view_as(mask)
    hidden = hidden.masked_fill(~mask[..., None], torch.nan)
    results = []
    for loss_of in (linear_grpo_loss.reference, linear_grpo_loss):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)]
        loss = loss_of(*leaves, ids, None, None, mask, advantages=torch.ones(4, device="cuda")).loss
        results.append((loss.detach(), *torch.autograd.grad(loss, leaves[: 1 if frozen else 2])))
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected.nan_to_num(0.0), rtol=1e-3, atol=1e-6)


def test_linear_dpo_loss():
    head, ids, mask = example()
    ref_logps = torch.full((4,), -100.0, device="cuda")
    reference = lambda h, w, b: linear_dpo_loss.reference(h, w, ids, mask, bias=b, ref_logps=ref_logps).loss  # noqa: E731
    compare(
        head,
        lambda h, w, b: linear_dpo_loss(h, w, ids, mask, bias=b, ref_logps=ref_logps).loss,
        reference,
        reference,
    )


def test_scoring_takes_at_most_64_megabytes():
    (hidden, weight, _), ids, _ = example(B=8, T=1024, H=1024, V=131072)
    with torch.no_grad():
        linear_logp(hidden, weight, ids)
        assert peak_bytes(lambda: linear_logp(hidden, weight, ids)) <= 64 * MiB


def test_training_takes_at_most_600_megabytes_beyond_its_gradients():
    """A float32 buffer for the weight's gradient and the hidden states' gradient; two gibibytes of logits are never there."""
    (hidden, weight, _), ids, _ = example(B=8, T=1024, H=1024, V=131072)
    rest = ids, None, torch.randn(8, device="cuda"), torch.ones(8, 1024, device="cuda")
    hidden.requires_grad_()
    weight.requires_grad_()

    def step():
        hidden.grad = weight.grad = None
        linear_grpo_loss(hidden, weight, *rest, samples_per_prompt=4).loss.backward()

    step()
    hidden.grad = weight.grad = None
    assert peak_bytes(step) <= weight.numel() * 4 + hidden.numel() * 2 + 600 * MiB
    weight.requires_grad_(False)
    hidden.grad = weight.grad = None
    assert peak_bytes(step) <= hidden.numel() * 2 + 600 * MiB


@pytest.mark.parametrize("workspace", [None, 4 * MiB])
def test_autocast(workspace):
    """As F.linear under autocast: products in bfloat16, gradients in the parameters' float32."""
    head, ids, mask = example(torch.float32)
    rest = ids, None, torch.randn(4, device="cuda"), mask
    for found_of, expected_of in (
        (
            lambda h, w, b: linear_logp(h, w, ids, bias=b, completion_mask=mask, workspace=workspace),
            lambda h, w, b: linear_logp.reference(h, w, ids, bias=b, completion_mask=mask),
        ),
        (
            lambda h, w, b: linear_grpo_loss(h, w, *rest, bias=b, samples_per_prompt=2, workspace=workspace).loss,
            lambda h, w, b: linear_grpo_loss.reference(h, w, *rest, bias=b, samples_per_prompt=2).loss,
        ),
    ):
        with torch.autocast("cuda", torch.bfloat16):
            found, gradients = run(head, found_of)
            expected, expected_gradients = run(head, expected_of)
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)
        for a, b in zip(gradients, expected_gradients, strict=True):
            assert a.dtype == torch.float32
            assert (a - b).norm() < 0.02 * b.norm()


def test_ids_outside_the_vocabulary():
    (hidden, weight, _), ids, mask = example(V=1000)
    ids[~mask] = -100
    mask[0, 0] = True
    ids[0, 0] = 1000
    for backend in registry.backends("linear_logp"):
        with registry.use_backend(linear_logp=backend):
            found = linear_logp(hidden, weight, ids, completion_mask=mask)
            assert found.isnan().sum() == 1
            assert found[0, 0].isnan()
            with pytest.raises(ValueError, match=r"ids must be from 0 to 999, found 1000 at index \[0, 0\]"):
                linear_logp(hidden, weight, ids, completion_mask=mask, validate=True)
    assert linear_grpo_loss(
        hidden, weight, ids, None, None, mask, advantages=torch.ones(4, device="cuda"), loss_type="dapo"
    ).loss.isnan()
