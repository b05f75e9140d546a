"""linear_grpo_loss: chunks of tokens and blocks of the vocabulary, tokens that do not count, banned tokens that were taken."""

import math

import pytest
import torch
from operators import B, V, arguments, check_as_exact_as_eager, compare, run_backend, run_reference
from torch.nn.functional import linear, one_hot
from yardstick import backend_fixture

from strop.ops import chunks, linear_grpo_loss, registry
from strop.ops.head import Head, Wanted, cut

CASE = "linear_grpo_loss"
REF_HEAD = ("ref_hidden", "ref_weight", "ref_bias")
backend, fast_backend = backend_fixture(CASE), backend_fixture(CASE, fast=True)


def example(dtype=torch.float32, V=V, **changes):
    """The arguments of the operator without a reference."""
    return arguments(CASE, dtype, V) | dict.fromkeys(REF_HEAD) | {"beta": 0.0} | changes


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
    check_as_exact_as_eager(CASE, fast_backend, example(dtype, 203, workspace=2000), dtype)
    assert min(numbers) > 1


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 11, 12])
@pytest.mark.parametrize("workspace", [None, 7 * 203 * 16])
@pytest.mark.parametrize("frozen", [("weight", "bias"), ()], ids=str)
def test_any_number_of_tokens_may_count(fast_backend, count, workspace, frozen):
    """None of them, one, a chunk and one more, all: what does not count may be NaN."""
    given = example(V=203, bias=None)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(count))
    mask = torch.zeros(12, dtype=torch.bool).index_fill(0, order[:count], True).view(4, 3)
    hidden = given["hidden"].masked_fill(~mask[..., None], torch.nan)
    given |= {"completion_mask": mask, "hidden": hidden}
    frozen = (*frozen, "bias")
    found = run_backend(CASE, fast_backend, given | {"workspace": workspace}, frozen=frozen)
    assert not any(x.isnan().any() for x in found[1].values())
    compare(found, run_reference(CASE, given, frozen=frozen), rtol=1e-4, atol=1e-6)


def test_a_default_device(fast_backend):
    """`torch.set_default_device` is for the user's new tensors: the number of tokens that count goes to the host."""
    given = example()
    expected = run_backend(CASE, fast_backend, given)
    with torch.device("meta"):
        found = run_backend(CASE, fast_backend, given)
    compare(found, expected)


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
    head = {"hidden": make(1, N, H), "weight": make(V, H) / H**0.5, "bias": make(V)}
    given = {name: x.to(dtype) for name, x in head.items()} | {"rewards": None, "beta": 0.1, "advantages": make(1)}
    given |= {"action_ids": torch.randint(0, V, (1, N), generator=generator), "old_logps": make(1, N) / 10 - 6}
    given |= {"ref_logps": given["old_logps"] + 0.1, "completion_mask": torch.ones(1, N)}
    if masked:
        given["completion_mask"][0, 3::4] = 0
    blocks = []
    original = chunks._policy_terms_in_blocks

    def counted(tokens, head, plan, *given):
        blocks.append(-(-V // plan.v))
        values, gradients = original(tokens, head, plan, *given)
        assert not gradients.weight_VH._is_view()  # to which autograd would not add in place
        return values, gradients

    plan_of, computed_in = chunks._over_the_gradient, torch.bfloat16 if autocast else dtype
    monkeypatch.setattr(chunks, "_policy_terms_in_blocks", counted)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        # the least memory with which that many blocks are enough
        for workspace in range(64, 100_000, 64):
            count, wanted = int(given["completion_mask"].count_nonzero()), Wanted(True, True, True, dtype)
            plan = plan_of(count, Head(given["weight"], None), wanted, computed_in, computed_in.itemsize, workspace)
            if plan is not None and -(-V // plan.v) <= num_blocks:
                break
        check_as_exact_as_eager(CASE, "triton", given | {"workspace": workspace}, dtype)
    assert blocks == [num_blocks]


@pytest.mark.parametrize("workspace", [None, 1000])
def test_another_loss_may_be_added_in_place(backend, workspace):
    given = example(workspace=workspace)
    expected, gradients = run_backend(CASE, backend, given)
    weight = given["weight"].clone().requires_grad_()
    found = linear_grpo_loss(**given | {"weight": weight})
    loss = found.loss
    loss += 0.5 * weight.square().sum()
    loss *= 2
    loss.backward()
    torch.testing.assert_close(weight.grad, 2 * (gradients["weight"] + weight.detach()), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.policy_loss, expected.policy_loss)


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
    given = example(dtype, workspace=workspace, loss_type=loss_type, clip_eps=(1.0, 1.0), old_logps=None)
    given |= {"rewards": None, "samples_per_prompt": None, "advantages": torch.full((B,), 2.0)}
    hidden, weight, bias, ids, mask = (
        given[name] for name in ("hidden", "weight", "bias", "action_ids", "completion_mask")
    )
    bias[ids[0, 1]] = -math.inf
    found, gradients = run_backend(CASE, backend, given)
    assert found.loss.item() == (math.inf if loss_type == "cispo" else pytest.approx(-2.0))
    d_logits = (linear(hidden, weight, bias).float().softmax(-1) - one_hot(ids, V)) * (2 * mask / mask.sum())[..., None]
    expected = {"hidden": d_logits @ weight.float()}
    expected["weight"] = d_logits.flatten(0, 1).T @ hidden.float().flatten(0, 1)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    for name, exact in expected.items():
        torch.testing.assert_close(gradients[name].float(), exact, rtol=tolerance, atol=tolerance)
