"""grpo_loss on every backend: by hand, TRL's numbers, finite differences, the yardstick, invariances, bad input."""

import itertools
import math

import pytest
import torch
from yardstick import (
    RULES,
    backend_fixture,
    backends,
    check,
    check_gradient,
    clip_of,
    cut_off,
    eager_logps,
    float64,
    options_of_case,
    same,
)

from strop.losses import IMPORTANCE_LEVELS, KL_ESTIMATORS, group_advantages, policy_loss
from strop.ops import grpo_loss, registry

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


def test_trl_golden_values(golden):
    """Two tokens, the first of which has TRL's log-prob."""
    for case, name in itertools.product(golden["grpo"], backends("grpo_loss", torch.float64)):
        logps = float64(case["logp"])
        logits = torch.stack([logps, torch.log1p(-logps.exp())], -1).requires_grad_()
        with registry.use_backend(grpo_loss=name):
            found = grpo_loss(
                logits, None, torch.zeros(logps.shape, dtype=torch.long), float64(case["old_logp"]), None,
                torch.tensor(case["mask"]), advantages=float64(case["advantages"]), ref_logps=float64(case["ref_logp"]),
                **options_of_case(case),
            )  # fmt: skip
        found.loss.backward()
        assert found.loss.item() == pytest.approx(case["loss"], rel=1e-9, abs=1e-9)
        d_logps = float64(case["grad"])  # d logp / d logits = (1 − p, −(1 − p))
        expected = (d_logps * -torch.expm1(logps))[..., None] * float64([1, -1])
        torch.testing.assert_close(logits.grad, expected, rtol=1e-8, atol=1e-9)


def test_trl_golden_values_in_float32(backend, golden):
    for case in golden["grpo"][3::17]:
        logps = float64(case["logp"])
        logits = torch.stack([logps, torch.log1p(-logps.exp())], -1).float().requires_grad_()
        found = grpo_loss(
            logits, None, torch.zeros(logps.shape, dtype=torch.int32), float64(case["old_logp"]), None,
            torch.tensor(case["mask"]), advantages=float64(case["advantages"]), ref_logps=float64(case["ref_logp"]),
            **options_of_case(case),
        )  # fmt: skip
        assert found.loss.item() == pytest.approx(case["loss"], rel=1e-5, abs=1e-6)


# ---- finite differences ----


@pytest.mark.parametrize("name", backends("grpo_loss", torch.float64))
@pytest.mark.parametrize(("level", "entropy_coef"), [("token", 0.0), ("sequence", 0.01)])
def test_gradients(name, level, entropy_coef):
    policy, *rest = example(torch.float64, V=3)
    options = {"samples_per_prompt": 2, "beta": 0.2, "importance_level": level, "entropy_coef": entropy_coef}
    with registry.use_backend(grpo_loss=name):
        assert torch.autograd.gradcheck(lambda x: grpo_loss(x, *rest, **options).loss, policy.requires_grad_())


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("V", [8, 8003])
def test_as_exact_as_eager(backend, dtype, V):
    """Eager: log-probs in torch from logits of the dtype, and the loss of strop.losses on them."""
    policy, ref, ids, old, rewards, mask = (x[:2, :2] if x.ndim > 1 else x[:2] for x in example(dtype, V))
    options = {"samples_per_prompt": 2, "beta": 0.1}
    found, gradient = run(grpo_loss, [policy, ref, ids, old, rewards, mask], **options)
    exact = [x.double() if x.is_floating_point() else x for x in (policy, ref, ids, old, rewards, mask)]
    expected, expected_gradient = run(grpo_loss.reference, exact, **options)
    x = policy.clone().requires_grad_()
    advantages = group_advantages(rewards, samples_per_prompt=2)
    eager = policy_loss(eager_logps(x, ids), old, advantages, mask, ref_logps=eager_logps(ref, ids), beta=0.1)
    eager.loss.backward()
    assert gradient.dtype == dtype
    check(found.loss, expected.loss, eager.loss, "loss", scale=1.0)
    check(found.kl, expected.kl, eager.kl, "kl", scale=1.0)
    check_gradient(gradient, expected_gradient, x.grad, ids, allowance=cut_off(backend, dtype))


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


def test_log_probs_in_float64_beside_logits_in_float32(backend):
    """Old and reference log-probs of another engine: the loss keeps the policy's dtype, and so does every metric."""
    policy, _, ids, old, *rest = example()
    options = {"samples_per_prompt": 2, "beta": 0.1, "ref_logps": old + 0.1}
    expected, gradient = run(grpo_loss, (policy, None, ids, old, *rest), **options)
    options["ref_logps"] = options["ref_logps"].double()
    found, found_gradient = run(grpo_loss, (policy, None, ids, old.double(), *rest), **options)
    assert {x.dtype for x in (*found, *found.metrics.values())} == {torch.float32}
    torch.testing.assert_close(tuple(found), tuple(expected))
    torch.testing.assert_close(found_gradient, gradient)


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


@pytest.mark.parametrize("level", IMPORTANCE_LEVELS)
def test_masked_garbage_changes_nothing(backend, level):
    policy, ref, ids, old, rewards, mask = example()
    out, results = mask == 0, []
    for value, garbage_id in ((0.0, 0), (math.nan, -100), (math.inf, V + 5)):
        dirty = [x.masked_fill(out[..., None], value) for x in (policy, ref)]
        inputs = *dirty, ids.masked_fill(out, garbage_id), old.masked_fill(out, value), rewards, mask
        found, gradient = run(grpo_loss, inputs, samples_per_prompt=2, beta=0.1, importance_level=level)
        results.append((*found, gradient, *found.metrics.values()))
    for other in results[1:]:
        same(other, results[0], scale=1.0)


@pytest.mark.parametrize(
    ("loss_type", "on_device"), [("grpo", False), ("grpo", True), ("dapo", True), ("dr_grpo", False), ("cispo", False)]
)
def test_micro_batches_add_up_to_the_batch(backend, loss_type, on_device):
    inputs = example()
    mask = inputs[-1]
    options = {"samples_per_prompt": 2, "beta": 0.1, "loss_type": loss_type, "clip_eps": clip_of(loss_type)}
    options["max_completion_length"] = 5
    whole, gradient = run(grpo_loss, inputs, **options)
    count = {"num_tokens": mask.sum(), "num_sequences": torch.tensor(B)}
    count = count if on_device else {name: value.item() for name, value in count.items()}
    parts = [run(grpo_loss, [x[i : i + 2] for x in inputs], **options, **count) for i in (0, 2)]
    torch.testing.assert_close(sum(found.loss for found, _ in parts), whole.loss)
    torch.testing.assert_close(torch.cat([g for _, g in parts]), gradient, rtol=1e-5, atol=1e-7)


def test_gradient_accumulation_into_one_leaf(backend):
    policy, *rest = example()
    leaf = policy.clone().requires_grad_()
    for _ in range(2):
        (grpo_loss(leaf * 1, *rest, samples_per_prompt=2, beta=0.1).loss / 2).backward()
    torch.testing.assert_close(leaf.grad, run(grpo_loss, (policy, *rest), samples_per_prompt=2, beta=0.1)[1])


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


@pytest.mark.parametrize(("B_", "T_"), [(0, 3), (2, 0), (0, 0), (B, T)])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_no_token_counts(backend, B_, T_, loss_type):
    *inputs, mask = example()
    inputs = [x[:B_, :T_] if x.ndim > 1 else x[:B_] for x in (*inputs, mask * 0)]
    found, gradient = run(grpo_loss, inputs, samples_per_prompt=2, beta=0.1, loss_type=loss_type)
    assert [x.item() for x in found] == [0, 0, 0]
    assert gradient.shape == (B_, T_, V)
    assert (gradient == 0).all()
    assert found.metrics["clip_fraction"] == 0


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


def test_backward_scales_the_gradient(backend):
    _, gradient = run(grpo_loss, example(), samples_per_prompt=2, beta=0.1)
    policy, *rest = example()
    for scale in (lambda loss: loss * 3, lambda loss: loss.mul_(3), lambda loss: loss.double() * 3):
        x = policy.clone().requires_grad_()
        scale(grpo_loss(x, *rest, samples_per_prompt=2, beta=0.1).loss).backward()
        torch.testing.assert_close(x.grad, 3 * gradient)


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


def test_logits_overwritten_and_kept_by_another_are_refused(fast_backend):
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


def test_the_gradient_is_handed_out_once(backend):
    policy, *rest = example()
    x = policy.requires_grad_()
    loss = grpo_loss(x, *rest, samples_per_prompt=2).loss
    loss.backward(retain_graph=True)
    if backend == "torch":
        loss.backward()
    else:
        with pytest.raises(
            RuntimeError, match="backward of grpo_loss can run once: its gradient was made in the forward"
        ):
            loss.backward()
        (gradient,) = torch.autograd.grad(grpo_loss(x, *rest, samples_per_prompt=2).loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match="this backend has no gradient of its gradient"):
            gradient.sum().backward()


def test_without_gradients(backend):
    policy, *rest = example()
    expected = run(grpo_loss, (policy, *rest), samples_per_prompt=2, beta=0.1)[0]
    leaf = policy.clone().requires_grad_()
    with torch.no_grad():
        found = grpo_loss(leaf, *rest, samples_per_prompt=2, beta=0.1, in_place=True)
    assert not found.loss.requires_grad
    assert torch.equal(leaf, policy)
    with torch.inference_mode():
        inferred = grpo_loss(policy, *rest, samples_per_prompt=2, beta=0.1)
        assert inferred.metrics["ratio/mean"] > 0
    for result in (found, inferred, grpo_loss(policy, *rest, samples_per_prompt=2, beta=0.1)):
        torch.testing.assert_close(result.loss, expected.loss.detach())


def test_only_the_policy_has_a_gradient(backend):
    policy, ref, ids, old, rewards, mask = example()
    leaves = [x.requires_grad_() for x in (policy, ref, old, rewards)]
    grpo_loss(policy, ref, ids, old, rewards, mask, samples_per_prompt=2, beta=0.1).loss.backward()
    assert [x.grad is not None for x in leaves] == [True, False, False, False]


# ---- bad input ----

P, R, I, O, W, M = example()  # noqa: E741
GOOD = {
    "policy_logits": P, "ref_logits": None, "action_ids": I, "old_logps": O, "rewards": W, "completion_mask": M,
    "samples_per_prompt": 2,
}  # fmt: skip
MISTAKES = [
    ({"policy_logits": P[0]}, ValueError, "action_ids must have shape [3], found [4, 3]"),
    ({"policy_logits": P[0], "action_ids": I[0]}, ValueError, "policy_logits must have shape [B, T, V], found [3, 13]"),
    ({"policy_logits": I}, TypeError, "policy_logits must be of a floating dtype, found torch.int64"),
    ({"policy_logits": P.numpy()}, TypeError, "policy_logits must be a tensor, found ndarray"),
    ({"ref_logits": R[:2]}, ValueError, "ref_logits must have shape [4, 3, 13], found [2, 3, 13]"),
    ({"ref_logits": R, "ref_logps": O}, ValueError, "at most one of ref_logits and ref_logps must be given, found both"),
    ({"action_ids": I.float()}, TypeError, "action_ids must be int64 or int32, found torch.float32"),
    ({"action_ids": I + V}, ValueError, "action_ids must be from 0 to 12, found"),
    ({"old_logps": O[:, :2]}, ValueError, "old_logps must have shape [4, 3], found [4, 2]"),
    ({"rewards": None}, TypeError, "rewards must be a tensor, found NoneType"),
    ({"rewards": W[:2]}, ValueError, "rewards must have shape [4], found [2]"),
    ({"rewards": W * math.nan}, ValueError, "rewards must be finite, found nan at index 0"),
    ({"rewards": W.to(torch.complex64)}, TypeError, "rewards must be floats or integers, found torch.complex64"),
    ({"completion_mask": None}, TypeError, "completion_mask must be a tensor, found NoneType"),
    ({"completion_mask": M * 2}, ValueError, "completion_mask must hold only 0 and 1, found 2"),
    ({"samples_per_prompt": None}, ValueError, "exactly one of samples_per_prompt, group_boundaries, advantages must be given, found none"),
    ({"group_boundaries": [0, 4]}, ValueError, "found samples_per_prompt and group_boundaries"),
    ({"samples_per_prompt": 3}, ValueError, "rewards must have a multiple of samples_per_prompt=3 elements, found 4"),
    ({"samples_per_prompt": 0}, ValueError, "samples_per_prompt must be at least 1, found 0"),
    *(
        ({"samples_per_prompt": None, "group_boundaries": wrong}, ValueError, "group_boundaries must start at 0, end at 4 and increase")
        for wrong in ([2, 4, 6], [0, 2], [0, 2, 2, 4], [0, 3, 2, 4], [], torch.tensor([2, 4, 6]))
    ),
    ({"samples_per_prompt": None, "advantages": W[:2]}, ValueError, "advantages must have shape [4] or [4, 3], found [2]"),
    ({"loss_type": "ppo"}, ValueError, "loss_type must be one of 'grpo'"),
    ({"importance_level": "word"}, ValueError, "importance_level must be one of 'token', 'sequence', 'geometric', found 'word'"),
    ({"kl_estimator": "k4"}, ValueError, "kl_estimator must be one of 'k1', 'k2', 'k3', found 'k4'"),
    ({"loss_type": "cispo", "clip_eps": 0.2}, ValueError, "clip_eps must be a pair (low, high) with high at least 1 for 'cispo'"),
    ({"loss_type": "dr_grpo"}, ValueError, "max_completion_length must be given for 'dr_grpo', found None"),
    ({"clip_eps": 0.0}, ValueError, "clip_eps must be above 0, found 0.0"),
    ({"delta": 1.0}, ValueError, "delta must be at least 1 + clip_eps = 1.2, found 1.0"),
    ({"beta": 0.1}, ValueError, "ref_logits or ref_logps must be given where beta is above 0, found beta=0.1"),
    ({"beta": -0.1, "ref_logps": O}, ValueError, "beta must be finite and at least 0, found -0.1"),
    ({"beta": math.nan, "ref_logps": O}, ValueError, "beta must be finite and at least 0, found nan"),
    ({"entropy_coef": -1.0}, ValueError, "entropy_coef must be finite and at least 0, found -1.0"),
    ({"entropy_coef": None}, TypeError, "entropy_coef must be a number, found NoneType"),
    ({"temperature": 0}, ValueError, "temperature must be finite and above 0, found 0"),
    ({"num_sequences": -1}, ValueError, "num_sequences must be finite and at least 0, found -1"),
    ({"bogus": 1}, TypeError, "got an unexpected keyword argument 'bogus'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), MISTAKES)
def test_mistakes(backend, change, error, message):
    with pytest.raises(error) as raised:
        grpo_loss(**(GOOD | change))
    assert message in str(raised.value)


def test_a_missing_argument_is_named(backend):
    with pytest.raises(TypeError, match="missing a required argument: 'completion_mask'"):
        grpo_loss(P, None, I, O, W)
