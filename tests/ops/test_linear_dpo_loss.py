"""linear_dpo_loss on every backend: against the losses on log-probs, and the kinds of reference log-probs."""

import math

import pytest
import torch
from yardstick import backend_fixture, references

from strop.losses import PREFERENCE_LOSS_TYPES, preference_loss, sequence_logps
from strop.ops import linear_dpo_loss, linear_logp

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


def test_reference_log_probs_summed_or_per_token(backend):
    head, ids, mask, ref = example()
    per_token = linear_logp.reference(*ref[:2], ids, bias=ref[2])
    expected, gradients = run(linear_dpo_loss, head, ids, mask, **references(ref))
    for ref_logps in (per_token, per_token.masked_fill(mask == 0, math.nan), sequence_logps(per_token, mask)):
        found, found_gradients = run(linear_dpo_loss, head, ids, mask, ref_logps=ref_logps)
        torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found_gradients, gradients, rtol=1e-5, atol=1e-6)
