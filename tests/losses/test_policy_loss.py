"""Policy losses: by hand, TRL's numbers, finite differences, invariances, precision, garbage, bad input."""

import copy
import json
import math
import pickle
from pathlib import Path

import pytest
import torch
from yardstick import RULES, clip_of, float64, options_of_case, same

from strop.config.policy_losses import POLICY_LOSSES
from strop.losses import (
    IMPORTANCE_LEVELS,
    KL_ESTIMATORS,
    POLICY_LOSS_TYPES,
    PolicyRule,
    clip_bounds,
    covariance_marks,
    kl_estimate,
    policy_loss,
    policy_metrics,
    rloo_loss,
    token_policy_loss,
    token_weights,
)

ATOL = 1e-9
every_loss_type = pytest.mark.parametrize("loss_type", POLICY_LOSS_TYPES)
every_rule = pytest.mark.parametrize(("loss_type", "level"), RULES)
HELD = ("cispo", "vespo", "double_sided", "dppo_tv", "dppo_kl")  # their weights are constants for the gradient
every_surrogate = pytest.mark.parametrize("level", ["token", "sequence"])


def example(dtype=torch.float64, spread=0.3, seed=0):
    """Four sequences of lengths 7, 3, 1 and 5, some ratios far outside the clip range."""
    generator = torch.Generator().manual_seed(seed)
    logps, old, ref = torch.randn(3, 4, 7, generator=generator, dtype=torch.float64) * spread - 1.5
    mask = torch.arange(7) < torch.tensor([7, 3, 1, 5])[:, None]
    advantages = float64([0.7, -1.2, 0.4, -0.1])
    return logps.to(dtype), old.to(dtype), ref.to(dtype), advantages.to(dtype), mask


def run(loss_type, level="token", **changes):
    """Loss and gradient of the example under one set of options."""
    logps, old, ref, advantages, mask = example()
    inputs = {"logps": logps, "old_logps": old, "advantages": advantages, "completion_mask": mask, "ref_logps": ref}
    inputs |= {"beta": 0.04, "max_completion_length": 11, "clip_eps": clip_of(loss_type, 5.0)} | changes
    inputs |= no_marks(loss_type, inputs["completion_mask"])
    inputs["logps"] = inputs["logps"].detach().requires_grad_()
    found = policy_loss(**inputs, loss_type=loss_type, importance_level=level)
    found.loss.backward()
    return found, inputs["logps"].grad


def no_marks(loss_type, mask):
    return {"marked": torch.zeros_like(mask)} if POLICY_LOSSES[loss_type].marks else {}


# ---- by hand ----


def test_by_hand():
    """Two sequences: ratios 1.5 and 0.5 with A = 2, ratios 1.5 and 0.5 with A = −1; clip 0.8 to 1.2."""
    logps = torch.log(float64([[1.5, 0.5], [1.5, 0.5]])).requires_grad_()
    token_loss = token_policy_loss(logps, torch.zeros(2, 2), float64([2.0, -1.0]))
    assert token_loss.tolist() == [pytest.approx([-2.4, -1.0]), pytest.approx([1.5, 0.8])]
    token_loss.sum().backward()
    assert logps.grad.tolist() == [pytest.approx([0.0, -1.0]), pytest.approx([1.5, 0.0])]


def test_another_loss_added_in_place_leaves_the_parts_alone():
    result = policy_loss(float64([[-1.0]]).requires_grad_(), None, float64([2.0]), torch.ones(1, 1))
    loss = result.loss
    loss += 3.0
    assert [x.item() for x in result] == [1.0, -2.0, 0.0]


def test_two_sided_clip_by_hand():
    """delta caps the ratio where A < 0, which the plain clip leaves open."""
    logps = torch.log(float64([[3.0, 9.0, 0.5, 3.0]])).requires_grad_()
    advantages = float64([[-1.0, -1.0, -1.0, 1.0]])
    token_loss = token_policy_loss(logps, torch.zeros(1, 4), advantages, delta=4.0)
    assert token_loss.tolist() == [pytest.approx([3.0, 4.0, 0.8, -1.2])]
    token_loss.sum().backward()
    assert logps.grad.tolist() == [pytest.approx([3.0, 0.0, 0.0, 0.0])]


def test_cispo_by_hand():
    """−min(r, 5)·A·logp: the weight is a constant, so every token has a gradient, a cut one too."""
    logps = float64([[-1.0, -0.5]]).requires_grad_()
    old = logps.detach() - torch.log(float64([[1.5, 9.0]]))
    token_loss = token_policy_loss(logps, old, float64([2.0]), loss_type="cispo", clip_eps=(0.2, 5.0))
    assert token_loss.tolist() == [pytest.approx([1.5 * 2 * 1.0, 5 * 2 * 0.5])]
    token_loss.sum().backward()
    assert logps.grad.tolist() == [pytest.approx([-3.0, -10.0])]


def test_sequence_level_by_hand():
    """Log-ratios 0.1 and 0.3 with a third masked: r = exp(0.2), whose gradient is halved between the two tokens."""
    logps = float64([[0.1, 0.3, 7.0]]).requires_grad_()
    mask = torch.tensor([[1, 1, 0]])
    token_loss = token_policy_loss(
        logps, torch.zeros(1, 3), float64([1.0]), importance_level="sequence", clip_eps=0.5, completion_mask=mask
    )
    ratio = math.exp(0.2)
    assert token_loss.tolist() == [pytest.approx([-ratio, -ratio, 0.0])]
    token_loss[0, 0].backward()
    assert logps.grad.tolist() == [pytest.approx([-ratio / 2, -ratio / 2, 0.0])]


def test_weights_by_hand():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    assert token_weights(mask, "grpo").tolist() == [pytest.approx([1 / 6] * 3 + [0]), [0.5, 0, 0, 0]]
    assert token_weights(mask, "dr_grpo", max_completion_length=5).tolist() == [
        pytest.approx([0.1] * 3 + [0]),
        pytest.approx([0.1, 0, 0, 0]),
    ]
    for loss_type in ("bnpo", "dapo", "cispo"):
        assert token_weights(mask, loss_type).tolist() == [[0.25, 0.25, 0.25, 0], [0.25, 0, 0, 0]]
        assert token_weights(mask, loss_type, num_tokens=8).sum() == 0.5
        assert token_weights(mask, loss_type, num_tokens=torch.tensor(8)).sum() == 0.5
    assert token_weights(mask, "grpo", num_sequences=8).sum() == 0.25
    assert token_weights(mask, "grpo", num_sequences=torch.tensor(8)).sum() == 0.25
    assert token_weights(mask, "grpo").dtype == torch.float32
    assert token_weights(mask, "grpo", dtype=torch.float64).dtype == torch.float64


def test_token_counts_below_one_are_not_rounded_up():
    """A count divided among processes may be below 1 and is not rounded up."""
    assert token_weights(torch.ones(1, 1), "dapo", num_tokens=0.25).item() == 4.0
    assert token_weights(torch.ones(1, 1), "dapo", num_tokens=torch.tensor(0.25)).item() == 4.0


@every_rule
def test_on_policy(loss_type, level):
    """Without old log-probs the ratio is 1: the gradient is that of −A·logp, whatever the loss."""
    found, gradient = run(loss_type, level, old_logps=None, beta=0.0)
    _, _, _, advantages, mask = example()
    weights = token_weights(mask, loss_type, max_completion_length=11, dtype=torch.float64)
    torch.testing.assert_close(gradient, -advantages[:, None] * weights)
    assert found.metrics["ratio/min"] == found.metrics["ratio/max"] == found.metrics["ratio/mean"] == 1
    assert found.metrics["clip_fraction"] == found.metrics["approx_kl"] == 0


@every_loss_type
def test_on_policy_the_ratio_of_a_token_without_probability_is_1(loss_type):
    logps = float64([[-math.inf, -1.0], [-2.0, math.nan]]).requires_grad_()
    mask, advantages = torch.tensor([[1, 1], [1, 0]]), float64([2.0, -1.0])
    options = {"loss_type": loss_type, "max_completion_length": 4, "clip_eps": clip_of(loss_type, 1.0)}
    options |= no_marks(loss_type, mask)
    found = policy_loss(logps, None, advantages, mask, **options)
    found.loss.backward()
    weights = token_weights(mask, loss_type, max_completion_length=4, dtype=torch.float64)
    torch.testing.assert_close(logps.grad, -advantages[:, None] * weights)
    value = (
        2 / torch.where(advantages > 0, 1.0, 1.05) if loss_type == "sapo" else torch.ones(2)
    )  # of the token at r = 1
    expected = (-(advantages * value)[:, None] * weights).sum().item()
    expected = math.inf if loss_type in HELD else expected
    assert found.loss.item() == pytest.approx(expected)
    assert policy_loss(logps, None, advantages, torch.ones(2, 2), **options).loss.isnan()


# ---- TRL ----


def test_trl_golden_values(golden):
    assert len(golden["grpo"]) == 60
    for case in golden["grpo"]:
        logps = float64(case["logp"]).requires_grad_()
        given = float64(case["old_logp"]), float64(case["advantages"]), torch.tensor(case["mask"])
        found = policy_loss(logps, *given, ref_logps=float64(case["ref_logp"]), **options_of_case(case))
        found.loss.backward()
        assert found.loss.item() == pytest.approx(case["loss"], rel=ATOL, abs=ATOL)
        torch.testing.assert_close(logps.grad, float64(case["grad"]), rtol=ATOL, atol=ATOL)
        if case["kl"] is not None:  # TRL's metric is the mean over tokens
            assert found.metrics["kl"].item() == pytest.approx(case["kl"], rel=ATOL)


RULE_FIELDS = ("loss_type", "importance_level", "clip_eps", "beta", "sapo_temperatures", "vespo_gamma", "stale_kl")


def test_trl_golden_values_of_later_losses(golden_more):
    """sapo, luspo, vespo, GMPO, and masking of stale sequences."""
    for case in golden_more["policy"]:
        logps = float64(case["logps"]).requires_grad_()
        options = {name: case[name] for name in RULE_FIELDS if name in case}
        given = (float64(case[name]) for name in ("old_logps", "advantages", "mask"))
        found = policy_loss(logps, *given, ref_logps=float64(case["ref_logps"]), max_completion_length=11, **options)
        found.loss.backward()
        assert found.loss.item() == pytest.approx(case["loss"], rel=ATOL, abs=ATOL)
        torch.testing.assert_close(logps.grad, float64(case["grad"]), rtol=ATOL, atol=ATOL)
        if "stale_kl" in case:  # it takes something away, and not everything
            without = policy_loss(
                logps, float64(case["old_logps"]), float64(case["advantages"]), float64(case["mask"]),
                ref_logps=float64(case["ref_logps"]), **options | {"stale_kl": None},
            )  # fmt: skip
            assert without.loss.item() != pytest.approx(case["loss"])
    assert {case["loss_type"] for case in golden_more["policy"]} >= {"sapo", "luspo", "vespo"}


def test_the_geometric_level_by_hand():
    """Log-ratios 0.9 and 0.1 with A = 1, clipped to 0.4 and 0.1: r = exp(0.25), and only the second has a gradient."""
    logps = float64([[0.9, 0.1]]).requires_grad_()
    found = policy_loss(logps, torch.zeros(1, 2), float64([1.0]), torch.ones(1, 2), importance_level="geometric")
    found.loss.backward()
    assert found.loss.item() == pytest.approx(-math.exp(0.25))
    assert logps.grad.tolist() == [pytest.approx([0.0, -math.exp(0.25) / 2])]
    assert found.metrics["clip_fraction_high"].item() == 0.5


def test_sapo_of_a_ratio_that_overflows():
    logps = torch.tensor([[0.0], [0.0]], requires_grad=True)
    token_loss = token_policy_loss(
        logps, torch.tensor([[-1000.0], [1000.0]]), torch.tensor([1.0, -1.0]), loss_type="sapo"
    )
    token_loss.sum().backward()
    assert token_loss.flatten().tolist() == pytest.approx([-4.0, 4 / 1.05 * 1 / (1 + math.exp(1.05))])
    assert logps.grad.flatten().tolist() == [0.0, 0.0]


def test_trl_golden_values_of_rloo(golden):
    assert len(golden["rloo"]) == 3
    for case in golden["rloo"]:
        logps = float64(case["logp"]).requires_grad_()
        arguments = float64(case["advantages"]), torch.tensor(case["mask"])
        found = rloo_loss(logps, float64(case["old_logp_sum"]), *arguments, clip_eps=case["eps"])
        found.loss.backward()
        assert found.loss.item() == pytest.approx(case["loss"], rel=ATOL, abs=ATOL)
        torch.testing.assert_close(logps.grad, float64(case["grad"]), rtol=ATOL, atol=ATOL)


@every_surrogate
def test_the_surrogate_is_min_of_both_products(level):
    """Against −min(min(r, delta)·A, clip(r)·A) as papers write it, value and gradient."""
    logps, old, _, _, mask = example(spread=1.0)
    advantages = torch.randn(4, 7, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for delta in (None, 1.5, 3.0):
        results = []
        for way in ("ours", "paper"):
            x = logps.clone().requires_grad_()
            if way == "ours":
                token_loss = token_policy_loss(
                    x, old, advantages, importance_level=level, clip_eps=(0.2, 0.28), delta=delta, completion_mask=mask
                )
            else:
                log_ratio = (x - old) * mask
                if level == "sequence":
                    log_ratio = (log_ratio.sum(-1) / mask.sum(-1))[:, None]
                ratio = log_ratio.exp()
                open_product = (ratio if delta is None else ratio.clamp(max=delta)) * advantages
                token_loss = -torch.minimum(open_product, ratio.clamp(0.8, 1.28) * advantages) * mask
            token_loss.sum().backward()
            results.append((token_loss.detach(), x.grad))
        torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


# ---- finite differences ----


@every_rule
@pytest.mark.parametrize("kl_estimator", KL_ESTIMATORS)
def test_gradients(loss_type, level, kl_estimator):
    """Finite differences. Weights that are constants for the gradient are held here."""
    logps, old, ref, advantages, mask = example()
    entropy = torch.rand(4, 7, dtype=torch.float64, requires_grad=True)

    def loss(x, h):
        if loss_type in HELD:  # the surrogate whose derivative is their gradient
            log_ratio = torch.where(mask, logps - old, 0.0)
            if level == "sequence":
                log_ratio = (log_ratio.sum(-1) / mask.sum(-1))[:, None]
            weight = log_ratio.exp().clamp(max=5.0)
            if loss_type == "vespo":
                w = log_ratio.sum(-1, keepdim=True).exp()
                k, decay = (torch.where(advantages[:, None] > 0, *pair) for pair in ((2.0, 3.0), (3.0, 2.0)))
                weight = w**k * torch.exp(decay - decay * w)
            elif loss_type != "cispo":
                weight = log_ratio.exp() * trusted(
                    loss_type, log_ratio, logps.exp(), old.exp(), advantages[:, None] > 0
                )
            weights = token_weights(mask, loss_type, dtype=torch.float64)
            kl = kl_estimate(x, ref, kl_estimator)
            return (weights * (-weight * advantages[:, None] * x + 0.3 * kl - 0.01 * h)).sum()
        return policy_loss(x, old, advantages, mask, **options, entropy=h).loss

    options = {
        "loss_type": loss_type, "importance_level": level, "clip_eps": clip_of(loss_type, 5.0), "ref_logps": ref,
        "beta": 0.3, "kl_estimator": kl_estimator, "entropy_coef": 0.01, "max_completion_length": 9,
    }  # fmt: skip
    free = logps.clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, (free, entropy))
    found = torch.autograd.grad(
        policy_loss(free, old, advantages, mask, **options, entropy=entropy).loss, (free, entropy)
    )
    expected = torch.autograd.grad(loss(free, entropy), (free, entropy))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def trusted(loss_type, log_ratio, now, before, positive):
    """Where each loss's trust region is, bounds (0.2, 0.28), by its paper's formula."""
    if loss_type == "double_sided":
        return (log_ratio.exp() >= 0.8) & (log_ratio.exp() <= 1.28)
    far = (now - before).abs()
    if loss_type == "dppo_kl":
        far = before * (before / now).log() + (1 - before) * ((1 - before) / (1 - now)).log()
    return torch.where(positive, (far <= 0.28) | (now < before), (far <= 0.2) | (now > before))


def test_gradients_of_rloo():
    logps, old, _, advantages, mask = example(spread=0.05)
    free = logps.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rloo_loss(x, old, advantages, mask).loss, free)


# ---- what it is made of ----


@every_rule
def test_the_parts_make_the_whole(loss_type, level):
    logps, old, ref, advantages, mask = example()
    entropy = torch.rand(4, 7, dtype=torch.float64)
    found = policy_loss(
        logps, old, advantages, mask, loss_type=loss_type, importance_level=level, clip_eps=clip_of(loss_type, 5.0),
        ref_logps=ref, beta=0.3, entropy=entropy, entropy_coef=0.1, max_completion_length=9,
    )  # fmt: skip
    weights = token_weights(mask, loss_type, max_completion_length=9, dtype=torch.float64)
    token_loss = token_policy_loss(
        logps, old, advantages, loss_type=loss_type, importance_level=level, clip_eps=clip_of(loss_type, 5.0),
        completion_mask=mask,
    )  # fmt: skip
    loss, policy, kl = found
    torch.testing.assert_close(policy, (weights * token_loss).sum())
    torch.testing.assert_close(kl, (weights * kl_estimate(logps, ref)).sum())
    torch.testing.assert_close(loss, policy + 0.3 * kl - 0.1 * (weights * entropy).sum())
    assert (found.loss, found.policy_loss, found.kl) == (loss, policy, kl)
    assert loss.shape == policy.shape == kl.shape == ()


def test_the_kl_is_reported_without_a_coefficient():
    logps, old, ref, advantages, mask = example()
    loss, policy, kl = policy_loss(logps, old, advantages, mask, ref_logps=ref)
    assert kl > 0
    assert loss.item() == pytest.approx(policy.item(), rel=1e-12)
    assert policy_loss(logps, old, advantages, mask).kl == 0
    # a reference that bans a token makes the kl infinite, and the loss without a coefficient is not touched by it
    assert policy_loss(logps, old, advantages, mask, ref_logps=ref.fill_(-math.inf)).loss.item() == pytest.approx(
        policy.item()
    )


def test_metrics_by_hand():
    """Ratios 1.5, 0.5 with A = 2 and 1.5, 0.5, 9 with A = −1, the ninth masked row apart; delta 4."""
    logps = torch.log(float64([[1.5, 0.5, 1.0], [1.5, 0.5, 9.0]])).requires_grad_()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    old, ref = torch.zeros(2, 3, dtype=torch.float64), logps.detach() - 0.5
    entropy = float64([[1, 2, 100], [3, 4, 5]])
    found = policy_loss(logps, old, float64([2.0, -1.0]), mask, delta=4.0, ref_logps=ref, entropy=entropy)
    k3 = math.exp(-0.5) - 0.5
    expected = {
        "clip_fraction": 3 / 5, "clip_fraction_low": 1 / 5, "clip_fraction_high": 1 / 5, "clip_fraction_delta": 1 / 5,
        "ratio/mean": 13 / 5, "ratio/min": 0.5, "ratio/max": 9.0, "kl": k3, "entropy": 3.0,
        "approx_kl": sum(r - math.log(r) - 1 for r in (1.5, 0.5, 1.5, 0.5, 9)) / 5,
    }  # fmt: skip
    assert {name: value.item() for name, value in found.metrics.items()} == pytest.approx(expected)
    for value in found.metrics.values():
        assert value.shape == ()
        assert not value.requires_grad
    assert found.metrics is found.metrics  # computed once


def test_metrics_ignore_masked_tokens():
    """Masked tokens are no ratio of 1, and a ratio outside the range is not cut where A = 0."""
    logps, mask = torch.log(torch.tensor([[2.0, 4.0, 0.1]])), torch.tensor([[1, 1, 0]])
    metrics = policy_metrics(logps, torch.zeros(1, 3), torch.tensor([0.0]), mask)
    assert [metrics[f"ratio/{name}"].item() for name in ("min", "mean", "max")] == pytest.approx([2, 3, 4])
    assert policy_metrics(-logps, torch.zeros(1, 3), torch.tensor([0.0]), mask)["ratio/max"].item() == pytest.approx(
        0.5
    )
    assert metrics["clip_fraction"] == metrics["clip_fraction_high"] == 0


@pytest.mark.parametrize("level", IMPORTANCE_LEVELS)
def test_metrics_on_policy_of_a_token_without_probability(level):
    logps, advantages = torch.tensor([[-math.inf, -1.0]]), torch.tensor([1.0])
    metrics = policy_loss(logps, None, advantages, torch.ones(1, 2), importance_level=level).metrics
    assert [metrics[f"ratio/{name}"].item() for name in ("min", "mean", "max")] == [1, 1, 1]
    assert metrics["approx_kl"] == 0
    broken = policy_metrics(logps.masked_fill(logps == -1, math.nan), None, advantages, torch.ones(1, 2))
    assert broken["ratio/mean"].isnan()
    assert broken["approx_kl"].isnan()


def test_metrics_of_cispo_count_both_signs():
    logps = torch.log(torch.tensor([[6.0, 2.0], [6.0, 0.1]]))
    metrics = policy_metrics(
        logps, torch.zeros(2, 2), torch.tensor([1.0, -1.0]), torch.ones(2, 2), loss_type="cispo", clip_eps=(0.2, 5.0)
    )
    assert metrics["clip_fraction"] == metrics["clip_fraction_high"] == 0.5
    assert metrics["clip_fraction_low"] == 0


def test_metrics_are_computed_on_first_use_and_keep_no_graph():
    logps, old, ref, advantages, mask = example()
    calls = []
    found = policy_loss(logps.requires_grad_(), old, advantages, mask, ref_logps=ref, entropy=logps * 2)
    compute = found._compute_metrics
    assert not any(x.requires_grad for x in [*compute.args, *compute.keywords.values()] if isinstance(x, torch.Tensor))
    found._compute_metrics = lambda: calls.append(1) or compute()
    assert not calls
    assert found.metrics["ratio/mean"] > 0
    assert found.metrics["ratio/mean"] > 0
    assert len(calls) == 1


def test_the_result_can_be_copied_and_pickled():
    logps, old, _, advantages, mask = example()
    found = policy_loss(logps, old, advantages, mask)
    for other in (copy.copy(found), copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert type(other) is type(found)
        assert other == found
        assert other.metrics == found.metrics


# ---- invariances ----


@every_rule
@pytest.mark.parametrize("split", [[1, 1, 1, 1], [2, 2], [3, 1]])
def test_micro_batches_add_up(loss_type, level, split):
    whole, gradient = run(loss_type, level)
    logps, old, ref, advantages, mask = example()
    parts, gradients = [], []
    for rows in torch.arange(4).split(split):
        found, part_gradient = run(
            loss_type, level, logps=logps[rows], old_logps=old[rows], advantages=advantages[rows],
            completion_mask=mask[rows], ref_logps=ref[rows], num_tokens=mask.sum(), num_sequences=4,
        )  # fmt: skip
        parts.append(torch.stack(found))
        gradients.append(part_gradient)
    torch.testing.assert_close(sum(parts), torch.stack(whole), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.cat(gradients), gradient, rtol=1e-12, atol=1e-14)


@every_rule
def test_permutation_and_padding_change_nothing(loss_type, level):
    whole, gradient = run(loss_type, level)
    logps, old, ref, advantages, mask = example()
    order = torch.tensor([2, 0, 3, 1])
    found, permuted = run(
        loss_type, level, logps=logps[order], old_logps=old[order], advantages=advantages[order],
        completion_mask=mask[order], ref_logps=ref[order],
    )  # fmt: skip
    torch.testing.assert_close(torch.stack(found), torch.stack(whole), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(permuted, gradient[order], rtol=1e-12, atol=1e-14)

    def padded(values, by):
        return torch.nn.functional.pad(values, (2, 3), value=by)

    found, wider = run(
        loss_type, level, logps=padded(logps, math.nan), old_logps=padded(old, math.inf),
        completion_mask=padded(mask, False), ref_logps=padded(ref, -math.inf),
    )  # fmt: skip
    torch.testing.assert_close(torch.stack(found), torch.stack(whole), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(wider, padded(gradient, 0.0), rtol=1e-12, atol=1e-14)


@every_rule
def test_masked_garbage_changes_nothing(loss_type, level):
    clean, gradient = run(loss_type, level)
    *tensors, mask = example()
    for garbage in (math.nan, math.inf, -math.inf, 1e30):
        logps, old, ref = (x.masked_fill(~mask, garbage) for x in tensors[:3])
        advantages = tensors[3][:, None].expand(4, 7).masked_fill(~mask, garbage)
        found, dirty = run(
            loss_type, level, logps=logps, old_logps=old, ref_logps=ref, advantages=advantages,
            entropy=torch.zeros(4, 7).masked_fill(~mask, garbage), entropy_coef=0.1,
        )  # fmt: skip
        same(torch.stack(found), torch.stack(clean))
        same(dirty, gradient)
        assert (dirty[~mask] == 0).all()
        same([found.metrics[name] for name in clean.metrics], clean.metrics.values(), scale=1.0)


@every_rule
@pytest.mark.parametrize("shape", [(4, 7), (4, 0), (0, 7)])
def test_nothing_counts(loss_type, level, shape):
    logps = torch.full(shape, math.nan, requires_grad=True)
    found = policy_loss(
        logps, logps.detach(), torch.full(shape[:1], math.nan), torch.zeros(shape), loss_type=loss_type,
        importance_level=level, clip_eps=clip_of(loss_type, 5.0), ref_logps=logps.detach(), beta=0.1, max_completion_length=5,
    )  # fmt: skip
    found.loss.backward()
    assert torch.stack(found).tolist() == [0.0, 0.0, 0.0]
    assert logps.grad.shape == shape
    assert (logps.grad == 0).all()
    assert all(value == 0 for value in found.metrics.values())


@every_loss_type
def test_an_empty_row_adds_nothing_but_counts_as_a_sequence(loss_type):
    logps, old, ref, advantages, mask = example()
    mask = mask.clone()
    mask[1] = False
    changes = {"completion_mask": mask, "advantages": advantages.index_fill(0, torch.tensor(1), math.nan)}
    found, gradient = run(loss_type, **changes)
    rows = torch.tensor([0, 2, 3])
    rest, _ = run(
        loss_type, logps=logps[rows], old_logps=old[rows], ref_logps=ref[rows], advantages=advantages[rows],
        completion_mask=mask[rows], num_sequences=4,
    )  # fmt: skip
    torch.testing.assert_close(found.loss, rest.loss)
    assert (gradient[1] == 0).all()


def test_rloo_takes_sums_or_tokens_and_ignores_masked_garbage():
    logps, old, _, advantages, mask = example(spread=0.05)
    sums = (old * mask).sum(-1)
    expected = rloo_loss(logps, sums, advantages, mask)
    dirty = logps.masked_fill(~mask, math.nan).requires_grad_()
    found = rloo_loss(dirty, old.masked_fill(~mask, math.inf), advantages, mask)
    torch.testing.assert_close(found.loss, expected.loss)
    found.loss.backward()
    assert (dirty.grad[~mask] == 0).all()
    halves = [
        rloo_loss(logps[i], sums[i], advantages[i], mask[i], num_sequences=4).loss for i in (slice(2), slice(2, 4))
    ]
    torch.testing.assert_close(sum(halves), expected.loss)
    assert rloo_loss(logps, None, advantages, mask).loss == pytest.approx(-advantages.mean().item())
    emptied = mask & (torch.arange(4) != 1)[:, None]
    kept = rloo_loss(logps[[0, 2, 3]], sums[[0, 2, 3]], advantages[[0, 2, 3]], mask[[0, 2, 3]], num_sequences=4).loss
    torch.testing.assert_close(rloo_loss(logps, sums, advantages, emptied).loss, kept)


# ---- precision ----


@every_rule
def test_float32_against_float64(loss_type, level):
    exact, exact_gradient = run(loss_type, level)
    changes = dict(zip(("logps", "old_logps", "ref_logps", "advantages"), example(torch.float32)[:4], strict=True))
    found, gradient = run(loss_type, level, **changes)
    assert found.loss.dtype == gradient.dtype == torch.float32
    torch.testing.assert_close(torch.stack(found).double(), torch.stack(exact), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32(dtype):
    low = dict(zip(("logps", "old_logps", "ref_logps", "advantages"), example(dtype)[:4], strict=True))
    found, gradient = run("grpo", **low)
    expected, expected_gradient = run("grpo", **{name: value.float() for name, value in low.items()})
    same(torch.stack(found), torch.stack(expected))
    same(gradient, expected_gradient.to(dtype))


@every_surrogate
def test_a_ratio_that_overflows(level):
    """exp(1000) where clipping holds it gives the clipped value and gradient 0, not NaN; open, it is honestly infinite."""
    logps = torch.tensor([[0.0], [0.0], [-1000.0]], requires_grad=True)
    old = torch.tensor([[-1000.0], [-1000.0], [0.0]])
    options = {"importance_level": level, "delta": 4.0}
    token_loss = token_policy_loss(logps, old, torch.tensor([1.0, 0.0, -1.0]), **options)
    token_loss.sum().backward()
    assert token_loss.flatten().tolist() == pytest.approx([-1.2, 0.0, 0.8])
    assert logps.grad.flatten().tolist() == [0.0, 0.0, 0.0]
    negative = torch.tensor([-1.0, -1.0, -1.0])
    assert token_policy_loss(logps, old, negative, **options).flatten().tolist() == pytest.approx([4.0, 4.0, 0.8])
    assert token_policy_loss(logps, old, negative, importance_level=level)[0].item() == math.inf


def test_nan_that_counts_is_not_hidden():
    logps, old, ref, advantages, mask = example()
    assert policy_loss(logps, old, advantages.index_fill(0, torch.tensor(0), math.nan), mask).loss.isnan()
    assert policy_loss(logps.index_fill(1, torch.tensor(0), math.nan), old, advantages, mask).loss.isnan()
    spoilt = ref.index_fill(1, torch.tensor(0), math.nan)
    assert policy_loss(logps, old, advantages, mask, ref_logps=spoilt, beta=0.1).loss.isnan()


# ---- bad input ----

L, A, M = torch.zeros(2, 3), torch.ones(2), torch.ones(2, 3)
KNOWN = ", ".join(map(repr, POLICY_LOSS_TYPES))
MISTAKES = [
    ((L, L, A, M), {"loss_type": "ppo"}, ValueError, f"loss_type must be one of {KNOWN}, found 'ppo'"),
    ((L, L, A, M), {"importance_level": "turn"}, ValueError, "importance_level must be one of 'token', 'sequence', 'geometric', found 'turn'"),
    ((L, L, A, M), {"loss_type": "sapo", "clip_eps": 0.2}, ValueError, "clip_eps must be None for 'sapo', which clips nothing, found 0.2"),
    ((L, L, A, M), {"loss_type": "vespo", "delta": 3.0}, ValueError, "delta must be None for 'vespo', which clips nothing, found 3.0"),
    ((L, L, A, M), {"loss_type": "vespo", "importance_level": "sequence"}, ValueError, "importance_level must be 'token' for 'vespo'"),
    ((L, L, A, M), {"loss_type": "cispo", "importance_level": "geometric"}, ValueError, "'token' or 'sequence' for 'cispo', found 'geometric'"),
    ((L, L, A, M), {"importance_level": "geometric", "delta": 3.0}, ValueError, "delta must be None at the geometric importance_level"),
    ((L, L, A, M), {"sapo_temperatures": (1.0,)}, ValueError, "sapo_temperatures must be 2 numbers, found (1.0,)"),
    ((L, L, A, M), {"sapo_temperatures": (0.0, 1.0)}, ValueError, "sapo_temperatures must be finite and above 0, found 0.0"),
    ((L, L, A, M), {"vespo_gamma": (1, 1, 1, -1)}, ValueError, "vespo_gamma must be finite and at least 0, found -1"),
    ((L, L, A, M), {"stale_kl": -0.1}, ValueError, "stale_kl must be finite and at least 0, found -0.1"),
    ((L, L, A, M), {"kl_estimator": "k0"}, ValueError, "kl_estimator must be one of 'k1', 'k2', 'k3', found 'k0'"),
    ((L[0], L, A, M), {}, ValueError, "logps must have shape [B, T], found [3]"),
    ((L.long(), L, A, M), {}, TypeError, "logps must be of a floating dtype, found torch.int64"),
    ((L.numpy(), L, A, M), {}, TypeError, "logps must be a tensor, found ndarray"),
    ((L, L[:, :2], A, M), {}, ValueError, "old_logps must have shape [2, 3], found [2, 2]"),
    ((L, L.long(), A, M), {}, TypeError, "old_logps must be of a floating dtype, found torch.int64"),
    ((L, L, A[:1], M), {}, ValueError, "advantages must have shape [2] or [2, 3], found [1]"),
    ((L, L, A[:, None], M), {}, ValueError, "advantages must have shape [2] or [2, 3], found [2, 1]"),
    ((L, L, A.long(), M), {}, TypeError, "advantages must be of a floating dtype, found torch.int64"),
    ((L, L, [1.0, 1.0], M), {}, TypeError, "advantages must be a tensor, found list"),
    ((L, L, A.to("meta"), M), {}, TypeError, "advantages must be on cpu as logps is, found meta"),
    ((L, L, A, M[:1]), {}, ValueError, "completion_mask must have shape [2, 3], found [1, 3]"),
    ((L, L, A, M * 2), {}, ValueError, "completion_mask must hold only 0 and 1, found 2.0"),
    ((L, L, A, [[1]]), {}, TypeError, "completion_mask must be a tensor, found list"),
    ((L, L, A, M), {"clip_eps": 0.0}, ValueError, "clip_eps must be above 0, found 0.0"),
    ((L, L, A, M), {"clip_eps": (0.2, -0.1)}, ValueError, "clip_eps must be above 0, found -0.1"),
    ((L, L, A, M), {"clip_eps": math.nan}, ValueError, "clip_eps must be above 0, found nan"),
    ((L, L, A, M), {"clip_eps": (0.1, 0.2, 0.3)}, ValueError, "clip_eps must be one number or a pair (low, high), found 3 numbers"),
    ((L, L, A, M), {"clip_eps": "0.2"}, TypeError, "clip_eps must be a number, found str"),
    ((L, L, A, M), {"loss_type": "cispo", "clip_eps": 0.2}, ValueError, "with high at least 1 for 'cispo', the ratio's bound"),
    ((L, L, A, M), {"loss_type": "cispo", "clip_eps": (0.2, 5.0), "delta": 6.0}, ValueError, "delta must be None for 'cispo'"),
    ((L, L, A, M), {"delta": 1.1}, ValueError, "delta must be at least 1 + clip_eps = 1.2, found 1.1"),
    ((L, L, A, M), {"delta": math.nan}, ValueError, "delta must be a number, found nan"),
    ((L, L, A, M), {"beta": 0.1}, ValueError, "ref_logps must be given where beta is above 0, found None with beta=0.1"),
    ((L, L, A, M), {"beta": -0.1, "ref_logps": L}, ValueError, "beta must be finite and at least 0, found -0.1"),
    ((L, L, A, M), {"beta": 0.1, "ref_logps": L[:1]}, ValueError, "ref_logps must have shape [2, 3], found [1, 3]"),
    ((L, L, A, M), {"entropy_coef": 0.1}, ValueError, "entropy must be given where entropy_coef is above 0, found None"),
    ((L, L, A, M), {"entropy": L[0]}, ValueError, "entropy must have shape [2, 3], found [3]"),
    ((L, L, A, M), {"loss_type": "dr_grpo"}, ValueError, "max_completion_length must be given for 'dr_grpo', found None"),
    ((L, L, A, M), {"loss_type": "dr_grpo", "max_completion_length": 0}, ValueError, "max_completion_length must be at least 1, found 0"),
    ((L, L, A, M), {"loss_type": "dr_grpo", "max_completion_length": 2.5}, TypeError, "max_completion_length must be an int, found float"),
    ((L, L, A, M), {"num_sequences": -1}, ValueError, "num_sequences must be finite and at least 0, found -1"),
    ((L, L, A, M), {"num_sequences": torch.tensor(-1)}, ValueError, "num_sequences must be finite and at least 0, found -1"),
    ((L, L, A, M), {"loss_type": "dapo", "num_tokens": torch.tensor(math.nan)}, ValueError, "num_tokens must be finite and at least 0, found nan"),
    ((L, L, A, M), {"loss_type": "dapo", "num_tokens": A}, ValueError, "num_tokens must be a number or a tensor of shape [], found shape [2]"),
    ((L, L, A, M), {"loss_type": "dapo", "num_tokens": "8"}, TypeError, "num_tokens must be a number, found str"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "kwargs", "error", "message"), MISTAKES)
def test_mistakes(args, kwargs, error, message):
    with pytest.raises(error) as raised:
        policy_loss(*args, **kwargs)
    assert message in str(raised.value)


def test_mistakes_in_the_parts():
    with pytest.raises(ValueError, match=r"loss_type must be one of 'grpo', .* found 'ppo'"):
        token_weights(M, "ppo")
    with pytest.raises(ValueError, match=r"completion_mask must have shape \[B, T\], found \[3\]"):
        token_weights(M[0], "grpo")
    with pytest.raises(TypeError, match="completion_mask must be a tensor, found NoneType"):
        token_weights(None, "grpo")
    with pytest.raises(ValueError, match="loss_type must be one of"):
        token_policy_loss(L, L, A, loss_type="ppo")
    with pytest.raises(ValueError, match=r"old_logps must have shape \[2\], found \[3\]"):
        rloo_loss(L, L[0], A, M)
    with pytest.raises(ValueError, match=r"advantages must have shape \[2\], found \[2, 3\]"):
        rloo_loss(L, L, L, M)


def test_clip_bounds():
    assert clip_bounds(0.2, None, "grpo") == clip_bounds((0.2, 0.2), None, "dapo")
    bounds = clip_bounds((0.2, 0.28), 2.0, "grpo")
    assert (bounds.low, bounds.high, bounds.delta) == (0.8, 1.28, 2.0)
    assert clip_bounds((0.2, 5.0), None, "cispo").high == 5.0


# ---- trust regions ----

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "corrections.json").read_text())["policy"]


def of_verl(case):
    """The inputs of a case, and its options as strop names them."""
    tensors = [float64(case[name]) for name in ("logps", "old_logps", "advantages", "mask")]
    options = {"loss_type": case["loss_type"]}
    if case["loss_type"] != "kl_cov":
        options["clip_eps"] = tuple(case["clip_eps"])
    if case["loss_type"] in ("dppo_tv", "dppo_kl"):
        options["delta"] = case["delta"]
    names = {"clip_cov_ratio": "cov_fraction", "kl_cov_ratio": "cov_fraction", "ppo_kl_coef": "cov_kl_coef"}
    options |= {here: case[theirs] for theirs, here in names.items() if theirs in case}
    if "clip_cov_lb" in case:
        options["cov_bounds"] = (case["clip_cov_lb"], case["clip_cov_ub"])
    return *tensors, options


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['loss_type']} {case['clip_eps']}")
def test_verls_trust_regions(case):
    logps, old, advantages, mask, options = of_verl(case)
    marks = {}
    if "cov_fraction" in options:
        marks["marked"] = covariance_marks(logps, advantages, mask, rule=PolicyRule(**options))
        assert 0 < marks["marked"].sum() < mask.sum()
    logps.requires_grad_()
    found = policy_loss(logps, old, advantages, mask, **options, **marks)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(case["loss"], rel=1e-9)
    wanted = float64(case["grad"])
    torch.testing.assert_close(logps.grad, wanted, rtol=1e-9, atol=1e-12)
    if case["loss_type"].startswith("dppo"):
        assert 0 < found.metrics["clip_fraction"] < 1
        assert (found.metrics["clip_fraction_delta"] > 0) == (case["delta"] == 1.5)
    assert {one["loss_type"] for one in GOLDEN} == {"dppo_tv", "dppo_kl", "clip_cov", "kl_cov"}


def test_double_sided_by_hand():
    """Ratios 0.7, 0.9, 1.1 and 1.4 within 0.8 to 1.2: a token outside has no gradient, whatever the sign of A."""
    for advantage in (2.0, -1.0):
        logps = torch.log(float64([[0.7, 0.9, 1.1, 1.4]])).requires_grad_()
        loss = token_policy_loss(logps, torch.zeros(1, 4), float64([advantage]), loss_type="double_sided")
        loss.sum().backward()
        assert logps.grad[0].tolist() == pytest.approx([0.0, -0.9 * advantage, -1.1 * advantage, 0.0])
        metrics = policy_metrics(logps, torch.zeros(1, 4), float64([advantage]), None, loss_type="double_sided")
        assert (metrics["clip_fraction_low"], metrics["clip_fraction_high"]) == (0.25, 0.25)


@pytest.mark.parametrize("loss_type", ["double_sided", "dppo_tv", "dppo_kl"])
def test_trust_regions_without_bounds_are_cispo_without_a_bound(loss_type):
    """The limiting case: a region that holds everything. Then the gradient is that of −r·A, the plain surrogate."""
    logps, old, _, advantages, mask = example(spread=1.0)
    found = []
    for options in ({"loss_type": loss_type, "clip_eps": math.inf}, {"loss_type": "cispo", "clip_eps": (0.2, math.inf)},
                    {"loss_type": "dapo", "clip_eps": math.inf}):  # fmt: skip
        leaf = logps.clone().requires_grad_()
        policy_loss(leaf, old, advantages, mask, **options).loss.backward()
        found.append(leaf.grad)
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found[0], found[2], rtol=1e-12, atol=1e-15)


def test_cov_losses_without_marks_are_the_surrogate():
    logps, old, _, advantages, mask = example()
    none = torch.zeros_like(mask)
    for loss_type, plain in (("clip_cov", {"clip_eps": 0.2}), ("kl_cov", {"clip_eps": math.inf})):
        options = {} if loss_type == "kl_cov" else plain
        found = policy_loss(logps, old, advantages, mask, loss_type=loss_type, marked=none, **options).loss
        wanted = policy_loss(logps, old, advantages, mask, loss_type="dapo", **plain).loss
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)


def test_marks_by_hand():
    """Covariances (A − 0)·(log π + 2) of four tokens: 6, −1, 2, −3; a masked token does not count."""
    logps = float64([[-1.0, -1.0, -3.0, -3.0, 0.0]])
    advantages = float64([[6.0, -1.0, -2.0, 3.0, 9.0]]) - 1.5
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    covariances = [4.5, -2.5, 3.5, -1.5]
    marks = lambda **options: covariance_marks(logps, advantages, mask, rule=PolicyRule(**options)).tolist()[0]  # noqa: E731
    assert marks(loss_type="kl_cov", cov_fraction=0.5) == [True, False, True, False, False]
    assert marks(loss_type="kl_cov", cov_fraction=1e-6) == [True, False, False, False, False]
    assert marks(loss_type="clip_cov", cov_fraction=1.0, cov_bounds=(3.0, 4.0)) == [False, False, True, False, False]
    assert sum(marks(loss_type="clip_cov", cov_fraction=0.25, cov_bounds=(3.0, 5.0))) == 1
    assert marks(loss_type="clip_cov", cov_fraction=1.0, cov_bounds=(5.0, 9.0)) == [False] * 5
    drawn = {tuple(covariance_marks(logps, advantages, mask, seed=seed, rule=PolicyRule(
        loss_type="clip_cov", cov_fraction=0.25, cov_bounds=(3.0, 5.0))).tolist()[0]) for seed in range(20)}  # fmt: skip
    assert len(drawn) == 2
    assert len(covariances) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "dppo_tv", "importance_level": "sequence"}, "importance_level must be 'token' for 'dppo_tv', which looks at"),
        ({"loss_type": "double_sided", "importance_level": "geometric"}, "importance_level must be 'token' or 'sequence'"),
        ({"loss_type": "kl_cov", "clip_eps": 0.2}, "clip_eps must be None for 'kl_cov', which clips nothing"),
        ({"loss_type": "dppo_kl", "delta": 0.5}, "delta must be at least 1, found 0.5"),
        ({"loss_type": "clip_cov", "cov_bounds": (1.0,)}, "cov_bounds must be 2 numbers"),
        ({"loss_type": "clip_cov", "cov_fraction": 0.0}, "cov_fraction must be"),
        ({"loss_type": "clip_cov"}, "marked must be given for 'clip_cov'"),
    ],
)  # fmt: skip
def test_bad_options_of_trust_regions(options, message):
    logps, old, _, advantages, mask = example()
    with pytest.raises(ValueError, match=message):
        policy_loss(logps, old, advantages, mask, **options)
