"""grpo_loss on every backend: by hand, every option, long rows, numbers at the edge, in place."""

import itertools
import math

import pytest
import torch
from yardstick import (
    RULES,
    backend_fixture,
    check,
    check_gradient,
    clip_of,
    eager_logps,
    same,
)

from strop.losses import KL_ESTIMATORS, group_advantages, policy_loss
from strop.ops import grpo_loss

B, T, V = 4, 3, 13
backend, fast_backend = backend_fixture("grpo_loss"), backend_fixture("grpo_loss", fast=True)


def example(dtype=torch.float32, V=V, seed=0):
    """policy_logits, ref_logits, action_ids, old_logps, rewards, completion_mask; ratios on both sides of the clip."""
    generator = torch.Generator().manual_seed(seed)
    policy, ref = (torch.randn(2, B, T, V, generator=generator) * 2).to(dtype)
    ids = torch.randint(0, V, (B, T), generator=generator)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    old = eager_logps(policy, ids).to(wide) + 0.3 * torch.randn(B, T, generator=generator)
    rewards = torch.randn(B, generator=generator)
    return policy, ref, ids, old, rewards, torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])


def run(function, inputs, **options):
    """The result and the gradient."""
    policy, *rest = inputs
    policy = policy.detach().clone().requires_grad_()
    found = function(policy, *rest, **options)
    found.loss.backward()
    return found, policy.grad


def check_as_reference(inputs, **options):
    """Hold loss, metrics and gradient of a backend against the reference's and return the backend's."""
    found, gradient = run(grpo_loss, inputs, **options)
    expected, expected_gradient = run(grpo_loss.reference, inputs, **options)
    torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.metrics, expected.metrics, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-7, equal_nan=True)
    return found, gradient


# ---- by hand ----


def test_by_hand(backend):
    """Two tokens of probability ½ that were ¼ and ½ when sampled; rewards 1 and 0, so A = 1 and −1; β = 0."""
    logits = torch.zeros(2, 1, 2, requires_grad=True)
    ids, mask = torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1)
    old = torch.log(torch.tensor([[0.25], [0.5]]))
    loss, policy, kl = grpo_loss(logits, None, ids, old, torch.tensor([1.0, 0.0]), mask, samples_per_prompt=2)
    # ratio 2 is cut at 1.2 and has no gradient; ratio 1 is not: mean of −1.2 and +1
    assert loss.item() == pytest.approx(-0.1)
    assert policy.item() == pytest.approx(-0.1)
    assert kl.item() == 0
    loss.backward()
    assert logits.grad[0].tolist() == [[0.0, 0.0]]
    assert logits.grad[1, 0].tolist() == pytest.approx([0.25, -0.25])  # ½·r·(onehot − p)


def test_the_three_results(backend):
    """loss = policy_loss + beta·kl; only the loss has a gradient; metrics as the losses'."""
    inputs = example()
    found = grpo_loss(inputs[0].clone().requires_grad_(), *inputs[1:], samples_per_prompt=2, beta=0.3)
    loss, policy, kl = found
    torch.testing.assert_close(loss, policy + 0.3 * kl)
    assert [x.requires_grad for x in found] == [True, False, False]
    assert [x.shape for x in found] == [()] * 3
    logps, ref_logps = (eager_logps(x, inputs[2]) for x in inputs[:2])
    expected = policy_loss(
        logps, inputs[3], group_advantages(inputs[4], samples_per_prompt=2), inputs[5], ref_logps=ref_logps, beta=0.3
    )
    torch.testing.assert_close(tuple(found), tuple(expected))
    assert set(found.metrics) == set(expected.metrics)
    for name, value in expected.metrics.items():
        torch.testing.assert_close(found.metrics[name], value)


# ---- TRL ----


# ---- finite differences ----


# ---- every option against the reference ----

REFERENCES = ("ref_logits", "ref_logps", "neither")
OPTIONS = [
    # each loss type with each importance level, each KL and each kind of reference at least once
    *((*rule, *rest) for rule, *rest in zip(RULES, itertools.cycle(KL_ESTIMATORS), itertools.cycle(REFERENCES))),
    *(("grpo", "token", kl, ref) for kl, ref in itertools.product(KL_ESTIMATORS, REFERENCES[:2])),
    ("cispo", "token", "k2", "ref_logits"),
    ("dr_grpo", "token", "k1", "ref_logps"),
    ("bnpo", "token", "k3", "neither"),
]  # fmt: skip


@pytest.mark.parametrize(("loss_type", "level", "kl", "reference"), sorted(set(OPTIONS)))
def test_every_option(fast_backend, loss_type, level, kl, reference):
    policy, ref, ids, old, rewards, mask = example()
    options = {"loss_type": loss_type, "importance_level": level, "kl_estimator": kl, "clip_eps": clip_of(loss_type)}
    options |= {"beta": 0.0 if reference == "neither" else 0.1, "max_completion_length": 9, "temperature": 0.9}
    options |= {"ref_logps": eager_logps(ref, ids)} if reference == "ref_logps" else {}
    inputs = [policy, ref if reference == "ref_logits" else None, ids, old, rewards, mask]
    exact = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
    found, gradient = run(grpo_loss, inputs, samples_per_prompt=2, **options)
    expected, expected_gradient = run(grpo_loss.reference, exact, samples_per_prompt=2, **options)
    eager, eager_gradient = run(grpo_loss.reference, inputs, samples_per_prompt=2, **options)
    for part in ("loss", "policy_loss", "kl"):
        check(getattr(found, part), getattr(expected, part), getattr(eager, part), part, scale=1.0)
    # a row's coefficient is that of the policy's loss less that of the kl: float32 rounds those
    terms = {"coefficient": expected_gradient.abs().max(), "p": (policy / 0.9).softmax(-1)}
    check_gradient(gradient, expected_gradient, eager_gradient, ids, **terms)
    assert (gradient[mask == 0] == 0).all()
    assert set(found.metrics) == set(eager.metrics)
    for name, value in expected.metrics.items():
        torch.testing.assert_close(found.metrics[name].double(), value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("V", [4099, 16391, 50257, 100003])
def test_long_rows(fast_backend, V, in_place):
    """The kernel goes through each of them in another way; one row is garbage under the mask."""
    policy, ref, ids, old, rewards, mask = (x[:2, :2] if x.ndim > 1 else x[:2] for x in example(V=V))
    mask = torch.tensor([[1, 1], [1, 0]])
    policy[1, 1], ids[1, 1] = torch.nan, V + 5
    ids[0] = torch.tensor([0, V - 1])
    options = {"samples_per_prompt": 2, "beta": 0.1, "ref_logps": eager_logps(ref, ids.clamp(max=V - 1))}
    old = eager_logps(policy, ids.clamp(max=V - 1)) + 0.1
    expected, wanted = run(grpo_loss.reference, [policy.double(), None, ids, old, rewards, mask], **options)
    found, gradient = run(grpo_loss, [policy, None, ids, old, rewards, mask], in_place=in_place, **options)
    # a log-prob of −12 is known to 1e-6 in float32, and so is the ratio
    torch.testing.assert_close(torch.stack([*found]).double(), torch.stack([*expected]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-4, atol=1e-12)
    assert (gradient[1, 1] == 0).all()


@pytest.mark.parametrize(
    "given",
    [
        {"samples_per_prompt": 4},
        {"group_boundaries": [0, 1, 4]},
        {"group_boundaries": torch.tensor([0, 3, 4])},
        {"advantages": torch.tensor([0.5, -1.0, 0.0, 2.0])},
        {"advantages": torch.linspace(-1, 1, B * T).view(B, T)},
    ],
    ids=lambda given: next(iter(given)),
)
def test_every_source_of_advantages(backend, given):
    policy, _, *rest = example()
    check_as_reference((policy, None, *rest), **given)


@pytest.mark.parametrize("rewards", [[1, 1, 0, 1], [True, False, True, True], [2.5, 2.5, 2.5, 2.5]])
def test_rewards_of_any_kind(backend, rewards):
    policy, _, ids, old, _, mask = example()
    check_as_reference((policy, None, ids, old, torch.tensor(rewards), mask), samples_per_prompt=2)


def test_one_sequence_of_advantages(backend):
    """B = 1: the advantage of every token is one number, wherever it lies in memory."""
    policy, _, ids, old, _, mask = example()
    check_as_reference((policy[:1], None, ids[:1], old[:1], None, mask[:1]), advantages=torch.tensor([2.0]))


def test_two_sided_clip(backend):
    policy, _, ids, old, rewards, mask = example()
    inputs = policy, None, ids, old - 1.5, rewards, mask  # ratios about 4.5
    found, _ = check_as_reference(inputs, samples_per_prompt=2, delta=4.0)
    assert found.metrics["clip_fraction_delta"] > 0


# ---- invariances ----


def test_a_padded_batch_is_the_same_batch(backend):
    inputs = example()
    padded = [torch.nn.functional.pad(x, (0, 0) * (x.ndim == 3) + (0, 2)) if x.ndim > 1 else x for x in inputs]
    found, gradient = run(grpo_loss, padded, samples_per_prompt=2, beta=0.1)
    expected, expected_gradient = run(grpo_loss, inputs, samples_per_prompt=2, beta=0.1)
    torch.testing.assert_close(tuple(found), tuple(expected))
    torch.testing.assert_close(gradient[:, :T], expected_gradient, rtol=1e-5, atol=1e-8)
    assert (gradient[:, T:] == 0).all()


def test_layouts(backend):
    """logits[:, :-1], a misaligned start, columns; ids, masks and log-probs that are views."""
    policy, ref, ids, old, rewards, mask = example()
    expected, expected_gradient = run(grpo_loss, example(), samples_per_prompt=2, beta=0.1)
    shift = torch.zeros(policy.numel() + 1)[1:].view(policy.shape).copy_(policy)
    longer = torch.cat([policy, policy[:, :1]], 1)[:, :-1]
    columns = policy.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    views = [torch.stack([x, x], -1)[..., 0] for x in (ids, old, mask)]
    for x in (shift, longer, columns):
        x = x.detach().requires_grad_()
        found = grpo_loss(x, ref, views[0], views[1], rewards, views[2], samples_per_prompt=2, beta=0.1)
        found.loss.backward()
        torch.testing.assert_close(tuple(found), tuple(expected))
        torch.testing.assert_close(x.grad, expected_gradient, rtol=1e-5, atol=1e-7)


def test_a_vocabulary_of_one(backend):
    policy, _, _, _old, rewards, mask = example()
    inputs = policy[..., :1], None, torch.zeros(B, T, dtype=torch.int32), torch.zeros(B, T), rewards, mask
    assert (check_as_reference(inputs, samples_per_prompt=2)[1] == 0).all()


def test_old_logps_of_the_policy_itself(backend):
    policy, _, ids, _, rewards, mask = example()
    found, gradient = run(grpo_loss, (policy, None, ids, None, rewards, mask), samples_per_prompt=2)
    expected, expected_gradient = run(
        grpo_loss, (policy, None, ids, eager_logps(policy, ids), rewards, mask), samples_per_prompt=2
    )
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)


# ---- numbers at the edge ----


def test_nan_is_not_hidden_by_the_clip(backend):
    """min(NaN, 1.2) is 1.2 on a GPU: a NaN must come through the loss and its row's gradient, both signs of A."""
    for loss_type, sign in itertools.product(("grpo", "cispo"), (1.0, -1.0)):
        policy, _, ids, old, _, mask = example()
        policy[0, 1, 4] = math.nan
        options = {"advantages": torch.full((B,), sign), "loss_type": loss_type, "clip_eps": clip_of(loss_type)}
        found, gradient = run(grpo_loss, (policy, None, ids, old, None, mask), **options)
        assert found.loss.isnan()
        assert gradient.isnan().any(-1).sum() == 1
        assert gradient[0, 1].isnan().all()
        policy, _, ids, old, _, mask = example()
        old[0, 1] = math.nan
        found, gradient = run(grpo_loss, (policy, None, ids, old, None, mask), **options)
        assert found.loss.isnan()
        assert gradient[0, 1].isnan().all()


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("kl", KL_ESTIMATORS)
def test_a_reference_that_bans_the_token(backend, beta, kl):
    """The kl is infinite; without a coefficient neither the loss nor the gradient feels it, with one as the reference."""
    policy, _, ids, old, rewards, mask = example()
    ref_logps = eager_logps(policy, ids)
    ref_logps[0, 0] = -math.inf
    options = {"samples_per_prompt": 2, "beta": beta, "kl_estimator": kl, "ref_logps": ref_logps}
    found, gradient = check_as_reference((policy, None, ids, old, rewards, mask), **options)
    if not beta:
        assert found.loss.isfinite()
        assert gradient.isfinite().all()


def test_a_ratio_that_overflows(backend):
    policy, _, ids, old, _, mask = example()
    for sign in (1.0, -1.0):
        inputs, options = (
            (policy, None, ids, old - 200, None, mask),
            {"advantages": torch.full((B,), sign), "delta": 5.0},
        )
        assert (check_as_reference(inputs, **options)[1] == 0).all()  # every ratio is cut


def test_banned_tokens(backend):
    policy, _, ids, old, rewards, mask = example()
    ids = ids.clamp(max=V - 4)
    policy[..., -3:] = -math.inf
    _, gradient = check_as_reference((policy, None, ids, old, rewards, mask), samples_per_prompt=2)
    assert (gradient[..., -3:] == 0).all()


# ---- autograd ----


@pytest.mark.parametrize("view", [False, True])
def test_in_place(backend, view):
    """The gradient in the memory of the logits; what lies between its rows stays as it was."""
    policy, *rest = example()
    _, expected = run(grpo_loss, (policy, *rest), samples_per_prompt=2, beta=0.1)
    base = torch.cat([policy, policy[:, :1]], 1)[:, : T + view].contiguous()
    before = base.clone()
    x = base[:, :T].detach().requires_grad_()
    found = grpo_loss(x, *rest, samples_per_prompt=2, beta=0.1, in_place=True)
    (2 * found.loss).backward()
    torch.testing.assert_close(x.grad, 2 * expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(base[:, T:], before[:, T:])
    if backend == "triton":
        assert torch.equal(x, x.grad)
        columns = policy.permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_()
        with pytest.raises(ValueError, match="in_place needs logits whose rows lie in memory one after another"):
            grpo_loss(columns, *rest, samples_per_prompt=2, in_place=True)


def test_in_place_is_refused_where_another_operator_saved_the_logits(fast_backend):
    """A tanh keeps its output, another loss its input: both would read the gradient for logits."""
    policy, *rest = example()
    leaf = policy.clone().requires_grad_()
    for make, other in ((torch.tanh, torch.zeros_like), (torch.clone, torch.square)):
        x = make(leaf)
        kept = other(x).sum()
        loss = grpo_loss(x, *rest, samples_per_prompt=2, beta=0.1, in_place=True).loss
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (loss + kept).backward()


def test_the_logits_choose_the_backend_in_whatever_order_keywords_come(fast_backend):
    """And not old log-probs in float64 that were written before them."""
    policy, ref, ids, old, rewards, mask = example()
    given = {"old_logps": old.double(), "policy_logits": policy, "ref_logits": ref, "action_ids": ids}
    found = grpo_loss(**given, rewards=rewards, completion_mask=mask, samples_per_prompt=2)
    same(found.loss, grpo_loss(policy, ref, ids, old, rewards, mask, samples_per_prompt=2).loss, scale=1.0)


# ---- bad input ----
