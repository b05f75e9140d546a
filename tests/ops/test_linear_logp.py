"""linear_logp on every backend: by hand, chunks, frozen and tied heads, banned tokens."""

import math

import pytest
import torch
from torch.nn.functional import linear
from yardstick import backend_fixture, check, cut_off

from strop.ops import chunks, linear_logp, logp, registry
from strop.ops.head import CountedTokens

H, V = 6, 21
backend, fast_backend = backend_fixture("linear_logp"), backend_fixture("linear_logp", fast=True)


@pytest.fixture(params=["chunked", "triton"])
def cutting_backend(request):
    """The others keep rows whole, or multiply by a kernel of their own."""
    with registry.use_backend(linear_logp=request.param):
        yield request.param


def example(dtype=torch.float32, H=H, V=V, seed=0):
    """hidden, weight, bias, ids, completion_mask"""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(2, 3, H, generator=generator), torch.randn(V, H, generator=generator)
    bias, ids = torch.randn(V, generator=generator), torch.randint(0, V, (2, 3), generator=generator)
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), ids, torch.tensor([[1, 1, 0], [0, 1, 1]])


def run(function, hidden, weight, bias, ids, **options):
    """Results, and gradients of Σ logp (+ ½·Σ entropy) with respect to hidden, weight and bias."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
    found = function(*leaves[:2], ids, bias=leaves[2], **options)
    results = found if isinstance(found, tuple) else (found,)
    (results[0].sum() + 0.5 * sum(x.sum() for x in results[1:])).backward()
    return results, [None if x is None else x.grad for x in leaves]


def test_by_hand(backend):
    """Logits 0 and log 3, so probabilities ¼ and ¾."""
    hidden, weight = torch.tensor([[1.0, 2.0]], requires_grad=True), torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])
    found = linear_logp(hidden, weight.requires_grad_(), torch.tensor([0]))
    assert found.tolist() == pytest.approx([math.log(0.25)])
    found.sum().backward()  # g = (¾, −¾)
    assert hidden.grad[0].tolist() == pytest.approx([-0.75 * math.log(3), 0.0])
    assert weight.grad.tolist() == [pytest.approx([0.75, 1.5]), pytest.approx([-0.75, -1.5])]


@pytest.mark.parametrize("workspace", [1, 16 * 150 * 130])
def test_chunks_of_several_tokens_and_blocks_at_once(workspace):
    """A chunk for every logit; and more tokens than a chunk has, more vocabulary than a block, in multiples of 128."""
    torch.manual_seed(0)
    N = 300 if workspace > 1 else 5
    hidden, weight, ids = torch.randn(N, 4), torch.randn(N, 4), torch.randint(0, N, (N,))
    with registry.use_backend(linear_logp="chunked"):
        found, gradients = run(linear_logp, hidden, weight, None, ids, workspace=workspace)
    expected, expected_gradients = run(linear_logp.reference, hidden, weight, None, ids)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients[:2], expected_gradients[:2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("workspace", [None, 3000])
@pytest.mark.parametrize("masked", [True, False])
def test_a_frozen_head_is_as_exact_as_eager(backend, dtype, workspace, masked, monkeypatch):
    """Whatever comes back for a token, also a second time; what comes back for one that does not count changes nothing."""
    monkeypatch.setattr(chunks, "_FEWEST_TOKENS", 0)  # several chunks of the few there are
    hidden, weight, bias, ids, mask = example(dtype, H=16, V=203)
    mask = mask.bool() if masked else torch.ones_like(mask).bool()
    d_logps = torch.linspace(-2, 3, 6).view(2, 3)
    garbage = hidden.masked_fill(~mask[..., None], torch.nan).requires_grad_()
    found = linear_logp(garbage, weight, ids, bias=bias, completion_mask=mask, workspace=workspace, temperature=0.8)
    d_garbage = d_logps.masked_fill(~mask, torch.nan)
    gradients = [torch.autograd.grad(found, garbage, d_garbage, retain_graph=True)[0] for _ in range(2)]
    results = []
    for kind in (torch.float64, dtype):
        leaf = hidden.to(kind).requires_grad_()
        logits = linear(leaf, weight.to(kind), bias.to(kind))
        logps = logp.reference(logits, ids, completion_mask=mask, temperature=0.8)
        results.append((logps, *torch.autograd.grad(logps, leaf, d_logps.to(logps.dtype))))
    (exact, d_exact), (eager, d_eager) = results
    check(found, exact, eager, "logp")
    for gradient in gradients:
        assert gradient.dtype == dtype
        error, eager_error = ((x.double() - d_exact).abs().max() for x in (gradient, d_eager))
        assert error <= 2 * eager_error + (1e-6 + cut_off(backend, dtype)) * d_exact.abs().max()
        assert (gradient[~mask] == 0).all()


def test_a_frozen_head_takes_two_products(cutting_backend, monkeypatch):
    """The logits, and from their gradient the hidden states'; the backward none."""
    products = []
    for name in ("mm", "addmm"):
        original = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *given, original=original, **more: (products.append(1), original(*given, **more))[1]
        )
    hidden, weight, _, ids, mask = example()
    logps = linear_logp(hidden.requires_grad_(), weight, ids, completion_mask=mask)
    assert len(products) == 2
    logps.sum().backward()
    assert len(products) == 2


def test_a_frozen_head_keeps_to_a_small_workspace(cutting_backend, monkeypatch):
    """Where it holds few tokens' rows, blocks of the vocabulary: the weight is not read for every token."""
    original, sizes = CountedTokens.workspace, []
    monkeypatch.setattr(CountedTokens, "workspace", lambda self, size: (sizes.append(size), original(self, size))[1])
    hidden, weight, _, ids, mask = example(V=2003)
    hidden.requires_grad_()
    exact = torch.autograd.grad(linear_logp.reference(hidden, weight, ids, completion_mask=mask).sum(), hidden)
    for workspace, whole_rows in ((2000, False), (31 * 2003 * 4, False), (32 * 2003 * 16, True)):
        sizes.clear()
        logps = linear_logp(hidden, weight, ids, completion_mask=mask, workspace=workspace)
        assert sizes.pop() * 4 <= workspace
        found = torch.autograd.grad(logps.sum(), hidden)
        assert (not sizes) == whole_rows  # nothing is computed again
        torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("frozen", [True, False])
def test_no_incoming_gradient_gives_none(fast_backend, frozen):
    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logps):
            return logps.clone()

        @staticmethod
        def backward(ctx, _):
            return None

    hidden, weight, _, ids, _ = example()
    leaves = hidden.requires_grad_(), weight.requires_grad_(not frozen)
    Cut.apply(linear_logp(*leaves, ids)).sum().backward()
    assert hidden.grad is weight.grad is None


def test_a_tied_head_gets_both_gradients(backend):
    """The hidden states come from the same matrix, and the head is it transposed from [H, V]."""
    _, weight, _, ids, _ = example()
    grads = []
    for function in (linear_logp, lambda h, w, i: logp.reference(h @ w.T, i)):
        tied = weight.T.contiguous().requires_grad_()
        function(tied.T[ids], tied.T, ids).sum().backward()
        grads.append(tied.grad)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_banned_token_that_was_taken(backend, frozen):
    """Its log-prob is −inf, and the way to make it less so is onehot − p as for any other."""
    hidden, weight, bias, ids, _ = example()
    bias[ids[0, 1]] = -math.inf
    leaf, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
    found = linear_logp(leaf, head, ids, bias=bias)
    found.sum().backward()
    p = (hidden @ weight.T + bias).softmax(-1)
    assert found[0, 1] == -math.inf
    torch.testing.assert_close(leaf.grad, weight[ids] - p @ weight, rtol=1e-5, atol=1e-6)
    if not frozen:
        d_logits = torch.nn.functional.one_hot(ids, len(weight)) - p
        torch.testing.assert_close(head.grad, torch.einsum("btv,bth->vh", d_logits, hidden), rtol=1e-5, atol=1e-6)
