"""logp and ratio_kl on a GPU: as exact as eager torch, at real sizes, and what differs there by contract."""

import pytest
import torch
from measure import MiB, peak_bytes, without_waiting
from yardstick import check, check_gradient, eager_logps, same

from strop.ops import logp, ratio_kl, registry

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(params=registry.backends("logp"))
def backend(request):
    with registry.use_backend(logp=request.param, ratio_kl=request.param):
        yield request.param


def example(N, V, dtype, spread=3.0):
    torch.manual_seed(0)
    logits = (torch.randn(N, V, device="cuda") * spread).to(dtype)
    ids = torch.randint(0, V, (N,), device="cuda")
    ids[0], ids[1] = 0, V - 1
    return logits, ids, (torch.arange(N, device="cuda") % 5 != 3)


@every_dtype
@pytest.mark.parametrize("V", [32768, 50257, 131072])
@pytest.mark.parametrize("spread", [0.01, 3.0, 40.0])
def test_as_exact_as_eager(dtype, V, spread):
    """The strict yardstick: here bfloat16 is rounded, not cut off. Flat, usual and peaked logits."""
    logits, ids, mask = example(40, V, dtype, spread)
    results = []
    for way in ("found", "exact", "eager"):
        x = (logits.double() if way == "exact" else logits.clone()).requires_grad_()
        if way == "eager":
            p = (x.float() / 0.8).log_softmax(-1)
            logps, entropy = p.gather(-1, ids[:, None]).squeeze(-1) * mask, -(p.exp() * p).sum(-1) * mask
        else:
            function = logp if way == "found" else logp.reference
            logps, entropy = function(x, ids, temperature=0.8, completion_mask=mask, entropy=True)
        (logps.sum() + 0.5 * entropy.sum()).backward()
        results.append((logps, entropy, x.grad))
    found, exact, eager = results
    check(found[0], exact[0], eager[0], "logp")
    check(found[1], exact[1], eager[1], "entropy", scale=12.0)
    check_gradient(found[2], exact[2], eager[2], ids, coefficient=6.0, p=(logits.double() / 0.8).softmax(-1))
    assert (found[2][~mask] == 0).all()


@every_dtype
def test_small_and_odd_vocabularies(dtype):
    for V in (1, 2, 3, 7, 8, 9, 64, 8003):
        logits, ids, mask = example(7, V, dtype)
        x, exact, eager = (
            logits.clone().requires_grad_(),
            logits.double().requires_grad_(),
            logits.clone().requires_grad_(),
        )
        found, expected = logp(x, ids, completion_mask=mask), logp.reference(exact, ids, completion_mask=mask)
        eager_found = eager_logps(eager, ids) * mask
        for result in (found, expected, eager_found):
            result.sum().backward()
        check(found, expected, eager_found, f"logp at V = {V}")
        check_gradient(x.grad, exact.grad, eager.grad, ids, f"gradient at V = {V}")


def test_layouts():
    """The next token's logits, a start on no boundary, the vocabulary first: as a copy."""
    logits, ids, _ = example(12, 50257, torch.bfloat16)
    logits, ids = logits.view(3, 4, 50257), ids.view(3, 4)
    shifted = torch.empty(logits.numel() + 3, device="cuda", dtype=torch.bfloat16)[3:].view(logits.shape).copy_(logits)
    for view, chosen in (
        (logits[:, :-1], ids[:, 1:]),
        (shifted, ids),
        (logits.permute(2, 0, 1).contiguous().permute(1, 2, 0), ids),
        (logits[:1, ::2], ids[:1, ::2]),
    ):
        x, y = view.detach().requires_grad_(), view.detach().contiguous().requires_grad_()
        found, expected = logp(x, chosen), logp(y, chosen.contiguous())
        (found.sum() + expected.sum()).backward()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(x.grad, y.grad, rtol=0.01, atol=1e-6)


def test_masked_garbage_changes_nothing(backend):
    logits, ids, mask = example(20, 8003, torch.bfloat16)
    results = []
    for value, garbage_id in ((0.0, 0), (torch.nan, -100), (torch.inf, 8008), (-torch.inf, 2**40)):
        x = logits.masked_fill(~mask[:, None], value).requires_grad_()
        found = logp(x, ids.masked_fill(~mask, garbage_id), completion_mask=mask)
        found.sum().backward()
        results.append((found, x.grad))
    for other in results[1:]:
        same(other, results[0])


def test_more_than_two_to_the_31_logits():
    """17,000 rows of 131,072: the last are as right as the first. The gradient takes the logits' memory."""
    N, V = 17000, 131072
    assert N * V > 2**31
    logits = torch.empty(N, V, device="cuda", dtype=torch.bfloat16)
    for part in logits.split(1000):
        part.normal_()
    ids = torch.randint(0, V, (N,), device="cuda")
    some = torch.tensor([0, 1, N // 2, N - 2, N - 1], device="cuda")
    exact = logits[some].double().requires_grad_()
    expected = logp.reference(exact, ids[some])
    expected.sum().backward()
    eager = eager_logps(logits[some], ids[some])
    leaf = logits.requires_grad_()
    found = logp(leaf, ids, in_place=True)
    check(found[some], expected, eager, "logp")
    found.sum().backward()
    torch.testing.assert_close(leaf.grad[some], exact.grad.bfloat16(), rtol=0.01, atol=1e-7)


def test_memory_and_waiting():
    """Forward: a few numbers per row. Backward: the gradient; in place not even that."""
    logits, ids, mask = example(2048, 32768, torch.bfloat16)
    logits.requires_grad_()
    size = logits.numel() * 2

    def both(in_place):
        logits.grad = None
        logp(logits, ids, completion_mask=mask, in_place=in_place).sum().backward()

    both(False)
    with without_waiting():
        both(False)
    logits.grad = None
    assert peak_bytes(lambda: both(False)) <= size + MiB
    logits.grad = None
    assert peak_bytes(lambda: both(True)) <= MiB


def test_an_id_outside_the_vocabulary_is_nan_or_raises(backend):
    logits = torch.zeros(3, 8, device="cuda", requires_grad=True)
    ids = torch.tensor([1, 8, -100], device="cuda")
    mask = torch.tensor([1, 1, 0], device="cuda")
    found = logp(logits, ids, completion_mask=mask)
    assert found.isnan().tolist() == [False, True, False]
    found.sum().backward()
    assert logits.grad.isnan().all(-1).tolist() == [False, True, False]
    with pytest.raises(ValueError, match=r"ids must be from 0 to 7, found 8 at index \[1\]"):
        logp(logits, ids, completion_mask=mask, validate=True)


def test_tensors_on_two_devices_are_told_apart(backend):
    logits, ids, _ = example(3, 8, torch.float32)
    with pytest.raises(TypeError, match="ids must be on cuda:0 as logits is, found cpu"):
        logp(logits, ids.cpu())


@every_dtype
def test_ratio_kl(dtype):
    policy, ids, mask = example(40, 50257, dtype)
    torch.manual_seed(1)
    ref = (policy.float() + 0.3 * torch.randn_like(policy, dtype=torch.float32)).to(dtype)
    old = eager_logps(policy, ids) + 0.2 * torch.randn(40, device="cuda")
    results = []
    for way in ("found", "exact", "eager"):
        x, r = (t.double() if way == "exact" else t.clone() for t in (policy, ref))
        with registry.use_backend(ratio_kl="triton" if way == "found" else "torch"):
            ratio, kl = ratio_kl(x.requires_grad_(), r, ids, mask, old)
        (ratio.sum() + 0.1 * kl.sum()).backward()
        results.append((ratio, kl, x.grad))
    found, exact, eager = results
    check(found[0], exact[0], eager[0], "ratio", scale=10.0)
    check(found[1], exact[1], eager[1], "kl", scale=10.0)
    check_gradient(found[2], exact[2], eager[2], ids, coefficient=4.0)
