"""ratio_kl on every backend: by hand, finite differences, the yardstick, garbage under the mask, bad input."""

import math

import pytest
import torch
from yardstick import backend_fixture, backends, check, check_gradient, cut_off, eager_logps, same

from strop.losses import kl_estimate
from strop.ops import ratio_kl, registry

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


@pytest.mark.parametrize("name", backends("ratio_kl", torch.float64))
def test_gradients(name):
    policy, ref, ids, mask, old = example(torch.float64, V=4)
    with registry.use_backend(ratio_kl=name):
        function = lambda x: ratio_kl(x, ref, ids, mask, old, temperature=0.7)  # noqa: E731
        assert torch.autograd.gradcheck(function, policy.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_as_exact_as_eager(backend, dtype):
    policy, ref, ids, mask, old = example(dtype, V=203)
    results = []
    for way in ("found", "exact", "eager"):
        x, r = (t.double() if way == "exact" else t.clone() for t in (policy, ref))
        x.requires_grad_()
        if way == "eager":
            logps, ref_logps = eager_logps(x, ids, 0.7), eager_logps(r, ids, 0.7)
            ratio = torch.where(mask == 1, (logps - old).exp(), 1.0)
            kl = torch.where(mask == 1, kl_estimate(logps, ref_logps), 0.0)
        else:
            function = ratio_kl if way == "found" else ratio_kl.reference
            ratio, kl = function(x, r, ids, mask, old, temperature=0.7)
        (ratio.sum() + 0.1 * kl.sum()).backward()
        results.append((ratio, kl, x.grad))
    found, exact, eager = results
    check(found[0], exact[0], eager[0], "ratio")
    check(found[1], exact[1], eager[1], "kl")
    check_gradient(found[2], exact[2], eager[2], ids, coefficient=4.0, allowance=cut_off(backend, dtype))


def test_masked_garbage_changes_nothing(backend):
    policy, ref, ids, mask, old = example()
    out, results = mask == 0, []
    for value, garbage_id in ((0.0, 0), (math.nan, -100), (math.inf, 16)):
        dirty = [t.masked_fill(out[..., None], value) for t in (policy, ref)]
        dirty[0].requires_grad_()
        ratio, kl = ratio_kl(*dirty, ids.masked_fill(out, garbage_id), mask, old.masked_fill(out, value))
        (ratio.sum() + kl.sum()).backward()
        results.append((ratio, kl, dirty[0].grad))
        assert (ratio[out] == 1).all()
        assert (kl[out] == 0).all()
        assert (dirty[0].grad[out] == 0).all()
    for other in results[1:]:
        same(other, results[0])


def test_the_gradient_goes_to_the_policy_only(backend):
    policy, ref, ids, mask, old = example()
    tensors = [t.requires_grad_() for t in (policy, ref, old)]
    ratio, kl = ratio_kl(*tensors[:2], ids, mask, tensors[2])
    (ratio.sum() + kl.sum()).backward()
    assert policy.grad.abs().sum() > 0
    assert ref.grad is old.grad is None


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


P, R, I, M, O = example()  # noqa: E741
MISTAKES = [
    ((P, R[..., :4], I, M, O), ValueError, "ref_logits must have shape [2, 3, 11], found [2, 3, 4]"),
    ((P, R, I[0], M, O), ValueError, "action_ids must have shape [2, 3], found [3]"),
    ((P, R, I, M[0], O), ValueError, "completion_mask must have shape [2, 3], found [3]"),
    ((P, R, I, M, O[0]), ValueError, "old_logps must have shape [2, 3], found [3]"),
    ((P, R, I, M, I), TypeError, "old_logps must be of a floating dtype, found torch.int64"),
    ((P, None, I, M, O), TypeError, "ref_logits must be a tensor, found NoneType"),
    ((P, R, I + 11, M, O), ValueError, "action_ids must be from 0 to 10, found"),
    ((P, R, I, M), TypeError, "missing a required argument: 'old_logps'"),
]


@pytest.mark.parametrize(("args", "error", "message"), MISTAKES)
def test_mistakes(backend, args, error, message):
    with pytest.raises(error) as raised:
        ratio_kl(*args)
    assert message in str(raised.value)
