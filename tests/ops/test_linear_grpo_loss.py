"""linear_grpo_loss on every backend: every option, chunks, layouts, memory, banned tokens."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import linear, one_hot
from yardstick import RULES, backend_fixture, clip_of, cut_off, references, same

from strop.losses import KL_ESTIMATORS
from strop.ops import chunks, grpo_loss, linear_grpo_loss, linear_logp, registry
from strop.ops.head import Head, Wanted, cut

B, T, H, V = 4, 3, 6, 17
backend, fast_backend = backend_fixture("linear_grpo_loss"), backend_fixture("linear_grpo_loss", fast=True)


def example(dtype=torch.float32, V=V, seed=0):
    """(hidden, weight, bias), (ids, old, rewards, mask), (ref_hidden, ref_weight, ref_bias): a reference of another width"""
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    head, ref = (make(B, T, H), make(V, H), make(V)), (make(B, T, H - 2), make(V, H - 2), make(V))
    ids = torch.randint(0, V, (B, T), generator=generator)
    old = linear_logp.reference(*head[:2], ids, bias=head[2]).float() + 0.3 * make(B, T).float()
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])
    return head, (ids, old, make(B).float(), mask), ref


def run(function, head, rest, frozen=False, **options):
    """The result and the gradients of hidden, weight (None where it is frozen) and bias."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in head]
    leaves[1].requires_grad_(not frozen)
    found = function(*leaves[:2], *rest, bias=leaves[2], **options)
    found.loss.backward()
    return found, [None if x is None else x.grad for x in leaves]


def test_is_grpo_loss_of_the_product(backend):
    head, (ids, *rest), ref = example()
    found, gradients = run(linear_grpo_loss, head, (ids, *rest), samples_per_prompt=2, beta=0.1, **references(ref))
    leaves = [x.clone().requires_grad_() for x in head]
    expected = grpo_loss.reference(linear(*leaves), linear(*ref), ids, *rest, samples_per_prompt=2, beta=0.1)
    expected.loss.backward()
    torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients, [x.grad for x in leaves], rtol=1e-4, atol=1e-6)
    for name, value in expected.metrics.items():
        torch.testing.assert_close(found.metrics[name], value, rtol=1e-4, atol=1e-5)
    assert [x.requires_grad for x in found] == [True, False, False]


OPTIONS = {(*rule, *rest) for rule, *rest in zip(RULES, itertools.cycle(KL_ESTIMATORS), itertools.cycle("hl0hlh0"))}


@pytest.mark.parametrize(("loss_type", "level", "kl", "reference"), sorted(OPTIONS))
def test_every_option(fast_backend, loss_type, level, kl, reference):
    entropy_coef = 0.01 if (loss_type, level) in (("grpo", "token"), ("cispo", "sequence")) else 0.0
    head, rest, ref = example()
    options = {"loss_type": loss_type, "importance_level": level, "kl_estimator": kl, "clip_eps": clip_of(loss_type)}
    options |= {"beta": 0.0 if reference == "0" else 0.1, "max_completion_length": 9, "temperature": 0.9}
    options |= {"samples_per_prompt": 2, "entropy_coef": entropy_coef}
    if reference == "h":
        options |= references(ref)
    elif reference == "l":
        options |= {"ref_logps": linear_logp.reference(*ref[:2], rest[0], bias=ref[2])}
    found, gradients = run(linear_grpo_loss, head, rest, workspace=1500, **options)
    expected, expected_gradients = run(linear_grpo_loss.reference, head, rest, **options)
    torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("workspace", [None, 2000])
def test_as_exact_as_eager(backend, dtype, workspace):
    """Eager: the product in the dtype, the rest in float32; each gradient to twice its error, in one chunk or several."""
    check_against_eager(backend, dtype, workspace)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_as_exact_as_eager_in_chunks_of_tokens(fast_backend, monkeypatch, dtype):
    """The way of many tokens. The few of these tests would lie in the memory of the weight's gradient, all at once."""
    numbers = []

    def noted(*given):
        found = cut(*given)
        numbers.append(len(found))
        return found

    monkeypatch.setattr(chunks, "_over_the_gradient", lambda *given: None)
    monkeypatch.setattr("strop.ops.head.cut", noted)
    check_against_eager(fast_backend, dtype, 2000)
    assert min(numbers) > 1


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 11, 12])
@pytest.mark.parametrize("workspace", [None, 7 * 203 * 16])
@pytest.mark.parametrize("frozen", [True, False])
def test_any_number_of_tokens_may_count(fast_backend, count, workspace, frozen):
    """None of them, one, a chunk and one more, all: what does not count may be NaN."""
    (hidden, weight, _), rest, _ = example(torch.float32, V=203)
    ids, old, rewards, mask = rest
    order = torch.randperm(mask.numel(), generator=torch.Generator().manual_seed(count))
    mask = torch.zeros(mask.numel(), dtype=torch.bool).index_fill(0, order[:count], True).view_as(mask)
    hidden = hidden.detach().masked_fill(~mask[..., None], torch.nan).requires_grad_()
    results = []
    for loss_of, more in ((linear_grpo_loss.reference, {}), (linear_grpo_loss, {"workspace": workspace})):
        leaves = [hidden, weight.detach().requires_grad_(not frozen)]
        found = loss_of(*leaves, ids, old, rewards, mask, samples_per_prompt=2, **more)
        results.append((found.loss.detach(), *torch.autograd.grad(found.loss, leaves[: 1 if frozen else 2])))
    (expected, *d_expected), (loss, *gradients) = results
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert not any(x.isnan().any() for x in gradients)
    for found, exact in zip(gradients, d_expected, strict=True):
        torch.testing.assert_close(found, exact.nan_to_num(0.0), rtol=1e-4, atol=1e-6)


def test_a_default_device(fast_backend):
    """`torch.set_default_device` is for the user's new tensors: the number of tokens that count goes to the host."""
    head, rest, _ = example()
    expected, gradients = run(linear_grpo_loss, head, rest, samples_per_prompt=2)
    with torch.device("meta"):
        found, found_gradients = run(linear_grpo_loss, head, rest, samples_per_prompt=2)
    same((*found, *found_gradients), (*expected, *gradients), scale=1.0)


def check_against_eager(
    backend, dtype, workspace, *, hidden_laid=lambda x: x, weight_laid=lambda x: x, masked=True, frozen=False
):
    (hidden, weight, bias), (*rest, mask), _ = example(dtype, V=203)
    head, rest = [hidden, weight, None if frozen else bias], (*rest, mask if masked else torch.ones_like(mask))
    options = {"samples_per_prompt": 2, "frozen": frozen}
    laid = [hidden_laid(hidden), weight_laid(weight), head[2]]
    found = run(linear_grpo_loss, laid, rest, workspace=workspace, **options)
    eager = run(linear_grpo_loss.reference, head, rest, **options)
    hold_against_eager(found, eager, head, rest, cut_off(backend, dtype), **options)


def hold_against_eager(found, eager, head, rest, allowance, **options):
    """(result, gradients): their error at its largest at most twice eager's, in whatever dtype it multiplied."""
    (result, gradients), (eager_result, eager_gradients) = found, eager
    wide = [None if x is None else x.double() for x in head]
    exact, exact_gradients = run(linear_grpo_loss.reference, wide, rest, **options)
    for name, a, b, c in zip(("loss", "policy_loss", "kl"), result, exact, eager_result, strict=True):
        error, eager_error = (a.double() - b).abs(), (c.double() - b).abs()
        most = 2 * eager_error + (1e-6 + allowance) * b.abs().clamp(min=1)
        assert error <= most, f"{name}: {error:.3g}, eager {eager_error:.3g}"
    for name, a, b, c in zip(("hidden", "weight", "bias"), gradients, exact_gradients, eager_gradients, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert a.dtype == head[0].dtype
            error, eager_error = (a.double() - b).abs().max(), (c.double() - b).abs().max()
            most = 2 * eager_error + (1e-6 + allowance) * b.abs().max()
            assert error <= most, f"d {name}: {error:.3g}, eager {eager_error:.3g}"
            assert a.abs().max() > 0.5 * b.abs().max()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
@pytest.mark.parametrize("num_blocks", [2, 3])
def test_logits_are_stored_in_the_weight_gradients_memory(monkeypatch, num_blocks, dtype, autocast, masked):
    """In blocks of the vocabulary, each overwritten by the gradients of those before it."""
    generator = torch.Generator().manual_seed(3)
    make = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    N, H, V = 26, 40 if dtype == torch.float32 and not autocast else 16, 350
    head = [x.to(dtype) for x in (make(1, N, H), make(V, H) / H**0.5, make(V))]
    rest = torch.randint(0, V, (1, N), generator=generator), make(1, N) / 10 - 6, None, torch.ones(1, N)
    if masked:
        rest[-1][0, 3::4] = 0
    options = {"advantages": make(1), "ref_logps": rest[1] + 0.1, "beta": 0.1}
    blocks = []
    original = chunks._policy_terms_in_blocks

    def counted(tokens, head, plan, *given):
        blocks.append(-(-V // plan.v))
        values, gradients = original(tokens, head, plan, *given)
        assert not gradients.weight_VH._is_view()  # to which autograd would not add in place
        return values, gradients

    plan_of, computed_in = chunks._over_the_gradient, torch.bfloat16 if autocast else dtype
    monkeypatch.setattr(chunks, "_policy_terms_in_blocks", counted)
    with registry.use_backend(linear_grpo_loss="triton"), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        # the least memory with which that many blocks are enough
        for workspace in range(64, 100_000, 64):
            count, wanted = int(rest[-1].count_nonzero()), Wanted(True, True, True, dtype)
            plan = plan_of(count, Head(*head[1:]), wanted, computed_in, computed_in.itemsize, workspace)
            if plan is not None and -(-V // plan.v) <= num_blocks:
                break
        found = run(linear_grpo_loss, head, rest, workspace=workspace, **options)
        eager = run(linear_grpo_loss.reference, head, rest, **options)
    assert blocks == [num_blocks]
    hold_against_eager(found, eager, head, rest, cut_off("triton", computed_in), **options)


@pytest.mark.parametrize("workspace", [None, 1000])
def test_another_loss_may_be_added_in_place(backend, workspace):
    (hidden, weight, bias), rest, _ = example()
    expected, gradients = run(linear_grpo_loss, (hidden, weight, bias), rest, samples_per_prompt=2)
    weight = weight.clone().requires_grad_()
    found = linear_grpo_loss(hidden, weight, *rest, bias=bias, samples_per_prompt=2, workspace=workspace)
    loss = found.loss
    loss += 0.5 * weight.square().sum()
    loss *= 2
    loss.backward()
    torch.testing.assert_close(weight.grad, 2 * (gradients[1] + weight.detach()), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.policy_loss, expected.policy_loss)


LAYOUTS = {
    "wider rows": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "hidden first": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "time first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_hidden_states_of_any_layout(backend, layout, dtype, masked, frozen):
    """As exact as eager: products of another layout are other kernels of the BLAS, with sums of their own."""
    assert not layout(example()[0][0]).is_contiguous()
    check_against_eager(backend, dtype, None, hidden_laid=layout, masked=masked, frozen=frozen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_is_a_transposed_matrix(backend, dtype):
    check_against_eager(backend, dtype, 2000, weight_laid=lambda weight: weight.T.contiguous().T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("workspace", [None, 4000], ids=["one piece", "chunks"])
def test_gradients_of_a_tied_weight_are_added_in_place(dtype, workspace):
    """There is no third matrix of its size: autograd adds to the head's gradient only where nobody else holds its memory.

    Not through Triton's interpreter, which holds what it was last given.
    """
    tied = torch.randn(350, 40, dtype=dtype, requires_grad=True)
    ids, mask = torch.arange(26).view(2, 13), torch.ones(2, 13)
    hidden = torch.nn.functional.embedding(ids, tied)
    with registry.use_backend(linear_grpo_loss="chunked"):
        options = {"advantages": torch.ones(2), "workspace": workspace}
        loss = linear_grpo_loss(hidden, tied, ids, None, None, mask, **options).loss
    with torch.autograd.profiler.profile(record_shapes=True) as happened:
        loss.backward()
    sums = [event.name for event in happened.function_events if event.input_shapes[:2] == [list(tied.shape)] * 2]
    assert "aten::add_" in sums
    assert "aten::add" not in sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss_type", ["bnpo", "cispo"])
@pytest.mark.parametrize("workspace", [None, 700])
def test_a_banned_token_that_was_taken(backend, dtype, loss_type, workspace):
    """On policy its ratio is 1 and its gradient that of any other; the loss is infinite where it has the log-prob in it."""
    (hidden, weight, bias), (ids, _, _, mask), _ = example(dtype)
    bias[ids[0, 1]] = -math.inf
    options = {"advantages": torch.full((B,), 2.0), "loss_type": loss_type, "clip_eps": (1.0, 1.0)}
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    found = linear_grpo_loss(*leaves, ids, None, None, mask, bias=bias, workspace=workspace, **options).loss
    found.backward()
    assert found.item() == (math.inf if loss_type == "cispo" else pytest.approx(-2.0))
    d_logits = (linear(hidden, weight, bias).float().softmax(-1) - one_hot(ids, V)) * (2 * mask / mask.sum())[..., None]
    expected = d_logits @ weight.float(), d_logits.flatten(0, 1).T @ hidden.float().flatten(0, 1)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    for leaf, exact in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad.float(), exact, rtol=tolerance, atol=tolerance)
