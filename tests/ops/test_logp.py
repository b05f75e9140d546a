"""logp on every backend: by hand, TRL's numbers, finite differences, invariances, bad input."""

import math

import pytest
import torch
from yardstick import backend_fixture, check, check_gradient, cut_off, eager_logps, float64, same

from strop.ops import logp, registry

backend, float64_backend = backend_fixture("logp"), backend_fixture("logp", dtype=torch.float64)


def test_by_hand(backend):
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]))
    found, entropy = logp(logits, torch.tensor([1, 2]), entropy=True)
    assert found.tolist() == pytest.approx([math.log(0.25), math.log(0.7)])
    expected = [-sum(p * math.log(p) for p in row) for row in ([0.5, 0.25, 0.25], [0.1, 0.2, 0.7])]
    assert entropy.tolist() == pytest.approx(expected)


def test_trl_golden_values(float64_backend, golden):
    assert golden["logp"]
    for case in golden["logp"]:
        logits = float64(case["logits"])
        found, entropy = logp(logits, torch.tensor(case["ids"]), temperature=case["temperature"], entropy=True)
        torch.testing.assert_close(found, float64(case["logp"]), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(entropy, float64(case["entropy"]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("banned", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients(float64_backend, banned, masked):
    torch.manual_seed(0)
    free = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 5, (2, 3))
    ban = torch.zeros(7, dtype=torch.bool)
    ban[5] = banned
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]) if masked else None

    def both(x):
        return logp(x.masked_fill(ban, -torch.inf), ids, temperature=0.7, completion_mask=mask, entropy=True)

    assert torch.autograd.gradcheck(both, free)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocabulary", [1, 64, 8003])
def test_low_precision_is_computed_in_float32(backend, dtype, vocabulary):
    torch.manual_seed(1)
    logits = (torch.randn(2, vocabulary) * 4).to(dtype).requires_grad_()
    ids = torch.randint(0, vocabulary, (2,), dtype=torch.int32)
    exact, eager = logits.detach().double().requires_grad_(), logits.detach().clone().requires_grad_()
    found, expected, eager_found = logp(logits, ids), logp.reference(exact, ids), eager_logps(eager, ids)
    for result in (found, expected, eager_found):
        result.sum().backward()
    assert found.dtype == torch.float32
    assert logits.grad.dtype == dtype
    check(found, expected, eager_found)
    check_gradient(logits.grad, exact.grad, eager.grad, ids, allowance=cut_off(backend, dtype))


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


def test_masked_garbage_changes_nothing(backend):
    torch.manual_seed(2)
    logits, ids = torch.randn(2, 4, 6), torch.randint(0, 6, (2, 4))
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0]])
    results = []
    for garbage_logit, garbage_id in ((0.0, 0), (math.nan, -100), (math.inf, 11), (-math.inf, 2**40)):
        dirty = logits.masked_fill(mask[..., None] == 0, garbage_logit).requires_grad_()
        found, entropy = logp(dirty, ids.masked_fill(mask == 0, garbage_id), completion_mask=mask, entropy=True)
        (found.sum() + entropy.sum()).backward()
        results.append((found, entropy, dirty.grad))
        assert (found[mask == 0] == 0).all()
        assert (entropy[mask == 0] == 0).all()
        assert (dirty.grad[mask == 0] == 0).all()
    for other in results[1:]:
        same(other, results[0])


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


def test_no_tokens_have_a_gradient_too(backend):
    logits = torch.randn(2, 0, 11, requires_grad=True)
    logp(logits, torch.zeros(2, 0, dtype=torch.long)).sum().backward()
    assert logits.grad.shape == (2, 0, 11)
    logits = torch.randn(2, 3, 11, requires_grad=True)
    logp(logits, torch.zeros(2, 3, dtype=torch.long), completion_mask=torch.zeros(2, 3)).sum().backward()
    assert logits.grad.shape == (2, 3, 11)
    assert (logits.grad == 0).all()


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


@pytest.mark.parametrize("which", ["logp", "entropy", "both"])
def test_a_gradient_of_either_result(backend, which):
    torch.manual_seed(5)
    logits, ids = torch.randn(2, 3, 6), torch.randint(0, 6, (2, 3))
    mask = torch.tensor([[1, 0, 1], [1, 1, 1]])
    grads = []
    for function in (logp, logp.reference):
        x = logits.clone().requires_grad_()
        found, entropy = function(x, ids, completion_mask=mask, entropy=True)
        ((found * (which != "entropy")).sum() * 0.7 + (entropy * (which != "logp")).square().sum()).backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-6)


def test_the_gradient_may_take_the_logits_memory(backend):
    torch.manual_seed(6)
    logits, ids = torch.randn(2, 3, 7), torch.randint(0, 7, (2, 3))
    plain = logits.clone().requires_grad_()
    logp(plain, ids).sum().backward()
    leaf = logits.clone().requires_grad_()
    source = leaf * 1.0
    found = logp(source, ids, in_place=True)
    found.sum().backward(retain_graph=True)
    torch.testing.assert_close(leaf.grad, plain.grad)
    if backend == "triton":
        assert torch.equal(source, leaf.grad)
        with pytest.raises(RuntimeError, match="can run once: the gradient has overwritten the logits"):
            found.sum().backward()
        columns = torch.randn(7, 6).T.requires_grad_()
        with pytest.raises(ValueError, match="in_place needs logits whose rows lie in memory one after another"):
            logp(columns, ids.view(-1), in_place=True)
        assert logp(columns.detach(), ids.view(-1), in_place=True).shape == (6,)  # nothing to overwrite


def test_logits_overwritten_and_kept_by_another_are_refused():
    """Either loss may overwrite the logits, but not under the other, which would read a gradient for logits."""
    ids = torch.tensor([1, 2])
    for in_place in (True, False):
        logits = torch.randn(2, 5, requires_grad=True) * 1.0
        with registry.use_backend(logp="triton"):
            first, second = (logp(logits, ids, in_place=x) for x in (in_place, True))
        second.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            first.sum().backward()


def test_backward_twice_and_of_itself(backend):
    logits = torch.randn(2, 5, requires_grad=True)
    found = logp(logits, torch.tensor([1, 2]))
    first = torch.autograd.grad(found.sum(), logits, retain_graph=True)
    same(first, torch.autograd.grad(found.sum(), logits))
    if backend == "triton":
        (gradient,) = torch.autograd.grad(logp(logits, torch.tensor([1, 2])).sum(), logits, create_graph=True)
        with pytest.raises(RuntimeError, match="this backend has no gradient of its gradient; the reference has"):
            gradient.sum().backward()


def test_without_gradients(backend):
    logits, ids = torch.randn(2, 5, requires_grad=True), torch.tensor([1, 2])
    expected = logp(logits, ids).detach()
    with torch.no_grad():
        found = logp(logits, ids)
    with torch.inference_mode():
        inferred = logp(logits, ids)
    assert not found.requires_grad
    same(found, expected)
    same(inferred.clone(), expected)


def test_autocast_changes_nothing(backend):
    logits, ids = torch.randn(2, 5), torch.tensor([1, 2])
    with torch.autocast("cpu", torch.bfloat16):
        found = logp(logits, ids)
    same(found, logp(logits, ids))


L, I = torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)  # noqa: E741
MISTAKES = [
    ((L, I[:, :2]), {}, ValueError, "ids must have shape [2, 3], found [2, 2]"),
    ((L, I.float()), {}, TypeError, "ids must be int64 or int32, found torch.float32"),
    ((L.long(), I), {}, TypeError, "logits must be of a floating dtype, found torch.int64"),
    ((L.numpy(), I), {}, TypeError, "logits must be a tensor, found ndarray"),
    ((L[..., :0], I), {}, ValueError, "logits must have shape [.., V] with V at least 1, found [2, 3, 0]"),
    ((L, I), {"completion_mask": I[0]}, ValueError, "completion_mask must have shape [2, 3], found [3]"),
    ((L, I), {"completion_mask": [1]}, TypeError, "completion_mask must be a tensor, found list"),
    ((L, I), {"temperature": 0.0}, ValueError, "temperature must be finite and above 0, found 0.0"),
    ((L, I), {"temperature": 1e-39}, ValueError, "temperature must be at least 1.2e-38, found 1e-39"),
    ((L, I), {"temperature": math.nan}, ValueError, "temperature must be finite and above 0, found nan"),
    ((L, I), {"temperature": "1"}, TypeError, "temperature must be a number, found str"),
    ((L, I), {"completion_mask": L[..., 0]}, ValueError, "completion_mask must hold only 0 and 1, found"),
    ((L, I + 4), {}, ValueError, "ids must be from 0 to 3, found 4 at index [0, 0]"),
    ((L, I - 1), {"completion_mask": torch.tensor([[0, 0, 0], [0, 1, 0]])}, ValueError, "found -1 at index [1, 1]"),
]


@pytest.mark.parametrize(("args", "kwargs", "error", "message"), MISTAKES)
def test_mistakes(backend, args, kwargs, error, message):
    with pytest.raises(error) as raised:
        logp(*args, **kwargs)
    assert message in str(raised.value)
