"""linear_dpo_loss on every backend: against the losses on log-probs, TRL, chunk sizes, garbage, bad input."""

import itertools
import math

import pytest
import torch
from yardstick import backend_fixture, backends, float64, references, same

from strop.losses import PREFERENCE_LOSS_TYPES, preference_loss, sequence_logps
from strop.ops import linear_dpo_loss, linear_logp, registry

H, V = 5, 17
backend = backend_fixture("linear_dpo_loss")


def example(dtype=torch.float32, V=V):
    """(hidden, weight, bias), ids, mask, (ref_hidden, ref_weight, ref_bias) of two pairs"""
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    head, ref = (make(4, 3, H), make(V, H), make(V)), (make(4, 3, H + 1), make(V, H + 1), make(V))
    ids = torch.randint(0, V, (4, 3), generator=generator)
    return head, ids, torch.tensor([[1, 1, 1], [1, 1, 0], [0, 1, 0], [1, 1, 1]]), ref


def run(function, head, ids, mask, **options):
    leaves = [x.detach().clone().requires_grad_() for x in head]
    found = function(*leaves[:2], ids, mask, bias=leaves[2], **options)
    found.loss.backward()
    return found, [x.grad for x in leaves]


@pytest.mark.parametrize("loss_type", PREFERENCE_LOSS_TYPES)
def test_every_loss_is_that_of_the_log_probs(backend, loss_type):
    head, ids, mask, ref = example()
    options = {"loss_type": loss_type, "beta": 0.3, "label_smoothing": 0.1 if loss_type == "exo_pair" else 0.0}
    found, gradients = run(linear_dpo_loss, head, ids, mask, workspace=3000, **options, **references(ref))
    leaves = [x.clone().requires_grad_() for x in head]
    chosen, rejected = sequence_logps(linear_logp.reference(*leaves[:2], ids, bias=leaves[2]), mask).chunk(2)
    ref_chosen, ref_rejected = sequence_logps(linear_logp.reference(*ref[:2], ids, bias=ref[2]), mask).chunk(2)
    lengths = dict(zip(("chosen_lengths", "rejected_lengths"), mask.sum(-1).chunk(2), strict=True))
    expected = preference_loss(chosen, rejected, ref_chosen, ref_rejected, **options, **lengths)
    expected.loss.backward()
    torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients, [x.grad for x in leaves], rtol=1e-4, atol=1e-5)
    for name, value in expected.metrics.items():
        torch.testing.assert_close(found.metrics[name], value, rtol=1e-5, atol=1e-6)


def test_trl_golden_values(golden):
    for case, name in itertools.product(golden["dpo"], backends("linear_dpo_loss", torch.float64)):
        logps = float64(case["logps"])
        hidden = torch.stack([logps, torch.log1p(-logps.exp())], -1)
        with registry.use_backend(linear_dpo_loss=name):
            found = linear_dpo_loss(
                hidden, torch.eye(2, dtype=torch.float64), torch.zeros(logps.shape, dtype=torch.long),
                torch.tensor(case["completion_mask"]), ref_logps=float64(case["ref_chosen"] + case["ref_rejected"]),
                loss_type=case["loss_type"], beta=case["beta"], label_smoothing=case["label_smoothing"],
            )  # fmt: skip
        assert found.loss.item() == pytest.approx(case["loss"], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", backends("linear_dpo_loss", torch.float64))
def test_gradients(name):
    head, ids, mask, ref = example(torch.float64, V=3)
    leaves = [x.requires_grad_() for x in head]
    with registry.use_backend(linear_dpo_loss=name):
        function = lambda h, w, b: linear_dpo_loss(h, w, ids, mask, bias=b, **references(ref)).loss  # noqa: E731
        assert torch.autograd.gradcheck(function, leaves)


def test_reference_log_probs_summed_or_per_token(backend):
    head, ids, mask, ref = example()
    per_token = linear_logp.reference(*ref[:2], ids, bias=ref[2])
    expected, gradients = run(linear_dpo_loss, head, ids, mask, **references(ref))
    for ref_logps in (per_token, per_token.masked_fill(mask == 0, math.nan), sequence_logps(per_token, mask)):
        found, found_gradients = run(linear_dpo_loss, head, ids, mask, ref_logps=ref_logps)
        torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found_gradients, gradients, rtol=1e-5, atol=1e-6)


def test_masked_garbage_changes_nothing(backend):
    (hidden, *head), ids, mask, (ref_hidden, *ref) = example()
    out, results = mask == 0, []
    for value, garbage_id in ((0.0, 0), (math.nan, -100), (math.inf, V + 5)):
        dirty, ref_dirty = (x.masked_fill(out[..., None], value) for x in (hidden, ref_hidden))
        found, gradients = run(
            linear_dpo_loss, (dirty, *head), ids.masked_fill(out, garbage_id), mask, **references((ref_dirty, *ref))
        )
        results.append((*found, *gradients))
    for other in results[1:]:
        same(other, results[0], scale=1.0)


def test_micro_batches_add_up_to_the_batch(backend):
    (hidden, weight, bias), ids, mask, ref = example()
    ref_logps = linear_logp.reference(*ref[:2], ids, bias=ref[2])
    whole, gradients = run(linear_dpo_loss, (hidden, weight, bias), ids, mask, ref_logps=ref_logps)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    total = 0.0
    for pair in ([0, 2], [1, 3]):
        loss = linear_dpo_loss(
            leaves[0][pair], leaves[1], ids[pair], mask[pair], bias=leaves[2], ref_logps=ref_logps[pair], num_pairs=2
        ).loss
        loss.backward()
        total += loss.detach()
    torch.testing.assert_close(total, whole.loss)
    torch.testing.assert_close([x.grad for x in leaves], gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [0, 4])
def test_nothing_counts(backend, rows):
    (hidden, weight, bias), ids, mask, _ = example()
    found, gradients = run(
        linear_dpo_loss, (hidden[:rows], weight, bias), ids[:rows], mask[:rows] * 0, ref_logps=torch.zeros(rows)
    )
    assert found.loss.item() == pytest.approx(math.log(2) if rows else 0.0)
    assert [g.abs().sum().item() for g in gradients] == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(backend, dtype):
    """No further from float64 than twice eager's error: the product in the dtype, the rest in float32."""
    head, ids, mask, _ = example(dtype)
    options = {"ref_logps": torch.full((4,), -9.0)}
    found, gradients = run(linear_dpo_loss, head, ids, mask, **options)
    exact, exact_gradients = run(linear_dpo_loss.reference, [x.double() for x in head], ids, mask, **options)
    eager, eager_gradients = run(linear_dpo_loss.reference, head, ids, mask, **options)
    assert (found.loss - exact.loss).abs() <= 2 * (eager.loss - exact.loss).abs() + 1e-5
    for a, b, c in zip(gradients, exact_gradients, eager_gradients, strict=True):
        allowed = 2 * (c - b).abs().max() + torch.finfo(dtype).eps * b.abs().max()
        assert (a - b).abs().max() <= allowed
        assert a.abs().max() > 0.5 * b.abs().max()


(Hi, W, Bi), I, M, (RH, RW, RB) = example()  # noqa: E741
GOOD = {"hidden": Hi, "weight": W, "ids": I, "completion_mask": M, "ref_logps": torch.zeros(4)}
MISTAKES = [
    ({"hidden": Hi[:3], "ids": I[:3]}, ValueError, "hidden must have shape [2B, T, H], chosen then rejected, found [3, 3, 5]"),
    ({"ref_logps": None}, ValueError, "exactly one of ref_hidden and ref_logps must be given, found neither"),
    ({"ref_hidden": RH, "ref_weight": RW}, ValueError, "exactly one of ref_hidden and ref_logps must be given, found both"),
    ({"ref_hidden": RH}, ValueError, "ref_hidden and ref_weight must be given together, found only ref_hidden"),
    ({"ref_logps": torch.zeros(3)}, ValueError, "ref_logps must have shape [4] or [4, 3], found [3]"),
    ({"ref_logps": [0.0] * 4}, TypeError, "ref_logps must be a tensor, found list"),
    ({"completion_mask": None}, TypeError, "completion_mask must be a tensor, found NoneType"),
    ({"loss_type": "dpo"}, ValueError, "loss_type must be one of 'sigmoid'"),
    ({"beta": 0.0}, ValueError, "beta must be finite and above 0, found 0.0"),
    ({"ids": I + V}, ValueError, "ids must be from 0 to 16, found"),
    ({"bogus": 1}, TypeError, "got an unexpected keyword argument 'bogus'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), MISTAKES)
def test_mistakes(backend, change, error, message):
    with pytest.raises(error) as raised:
        linear_dpo_loss(**(GOOD | change))
    assert message in str(raised.value)
