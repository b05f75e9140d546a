"""Preference losses: by hand, TRL's numbers, finite differences, invariances, extremes, bad input."""

import copy
import math
import pickle

import pytest
import torch
from yardstick import float64, same

from strop.config.preference_losses import LABEL_SMOOTHED
from strop.losses import PREFERENCE_LOSS_TYPES, PreferenceRule, pair_preference_loss, preference_loss, sequence_logps

every_loss_type = pytest.mark.parametrize("loss_type", PREFERENCE_LOSS_TYPES)
NAMES = ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected", "chosen_lengths", "rejected_lengths")


def smoothing_of(loss_type):
    return 0.1 if loss_type in LABEL_SMOOTHED else 0.0


def example(dtype=torch.float64):
    """Five pairs; sums of log-probs and lengths."""
    generator = torch.Generator().manual_seed(0)
    sums = (torch.randn(4, 5, generator=generator, dtype=torch.float64) * 3 - 20).to(dtype)
    lengths = torch.randint(1, 30, (2, 5), generator=generator)
    return dict(zip(NAMES, [*sums, *lengths], strict=True))


def run(loss_type, **changes):
    inputs = example() | changes
    leaves = [inputs[name].detach().requires_grad_() for name in NAMES[:2]]
    inputs |= dict(zip(NAMES, leaves, strict=False))
    found = preference_loss(**({"label_smoothing": smoothing_of(loss_type), "loss_type": loss_type} | inputs))
    found.loss.backward()
    return found, [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def sigma(x):
    return 1 / (1 + math.exp(-x))


# c = 2, r = −1, β = ½, so h = 1.5; lengths 4 and 2, so the means' difference is 1; ε = 0.1
BY_HAND = {
    "sigmoid": (0.1, -0.9 * math.log(sigma(1.5)) - 0.1 * math.log(sigma(-1.5))),
    "hinge": (0.0, 0.0),
    "ipo": (0.0, (1 - 1) ** 2),
    "robust": (0.1, (-0.9 * math.log(sigma(1.5)) + 0.1 * math.log(sigma(-1.5))) / 0.8),
    "exo_pair": (0.1, sigma(1.5) * math.log(sigma(1.5) / 0.9) + sigma(-1.5) * math.log(sigma(-1.5) / 0.1)),
    "nca_pair": (0.0, -math.log(sigma(1)) - math.log(sigma(-1)) / 2 - math.log(sigma(0.5)) / 2),
    "apo_zero": (0.0, sigma(-1) + sigma(-0.5)),
    "apo_down": (0.0, sigma(1) + sigma(-1.5)),
    "sppo_hard": (0.0, (2 - 1) ** 2 + (-1 + 1) ** 2),
    "sigmoid_norm": (0.0, -math.log(sigma(0.5))),
    "bco_pair": (0.0, -math.log(sigma(1)) - math.log(sigma(0.5))),
    "discopop": (0.0, -math.log(sigma(1.5)) * sigma(-30) + math.exp(-1.5) * sigma(30)),
    # of the policy alone: −3 and −6, means −¾ and −3
    "cpo": (0.1, -0.9 * math.log(sigma(1.5)) - 0.1 * math.log(sigma(-1.5))),
    "simpo": (0.0, -math.log(sigma(0.5 * 2.25 - 0.5))),
    "orpo": (0.0, -0.5 * math.log(sigma(2.25 - math.log(1 - math.exp(-0.75)) + math.log(1 - math.exp(-3))))),
    "sft": (0.0, 3 / 4),
}


@every_loss_type
def test_by_hand(loss_type):
    label_smoothing, expected = BY_HAND[loss_type]
    found = pair_preference_loss(
        float64([-3.0]), float64([-6.0]), float64([-5.0]), float64([-5.0]), loss_type=loss_type, beta=0.5,
        label_smoothing=label_smoothing, chosen_lengths=torch.tensor([4]), rejected_lengths=torch.tensor([2]),
    )  # fmt: skip
    assert found.tolist() == pytest.approx([expected], abs=1e-15)


def test_hinge_by_hand():
    found = pair_preference_loss(
        float64([-3.0]), float64([-3.5]), float64([-3.0]), float64([-3.0]), loss_type="hinge", beta=1.0
    )
    assert found.tolist() == [0.5]


def test_trl_golden_values(golden):
    assert len(golden["dpo"]) == 30
    for case in golden["dpo"]:
        mask = torch.tensor(case["completion_mask"])
        given = (
            *sequence_logps(float64(case["logps"]), mask).chunk(2),
            float64(case["ref_chosen"]),
            float64(case["ref_rejected"]),
        )
        options = {name: case[name] for name in ("loss_type", "beta", "label_smoothing")}
        options |= dict(zip(NAMES[4:], mask.sum(-1).chunk(2), strict=True))
        found = preference_loss(*given, **options)
        assert found.loss.item() == pytest.approx(case["loss"], rel=1e-9, abs=1e-9)


def test_trl_golden_values_of_later_losses(golden_more, golden):
    """bco_pair, discopop, combinations; and without a reference simpo, cpo and orpo."""
    cases = golden_more["preference"] + golden_more["without_reference"]
    known = {name for case in cases for name in case["loss_type"]} | {case["loss_type"] for case in golden["dpo"]}
    assert known == set(PREFERENCE_LOSS_TYPES)
    for case in cases:
        logps, mask = float64(case["logps"]).requires_grad_(), torch.tensor(case["completion_mask"])
        names = ("loss_type", "loss_weights", "beta", "label_smoothing", "simpo_gamma", "discopop_tau")
        options = {name: case[name] for name in names if name in case}
        refs = [None if case[name] is None else float64(case[name]) for name in ("ref_chosen", "ref_rejected")]
        lengths = dict(zip(("chosen_lengths", "rejected_lengths"), mask.sum(-1).chunk(2), strict=True))
        found = preference_loss(*sequence_logps(logps, mask).chunk(2), *refs, **lengths, **options)
        found.loss.backward()
        assert found.loss.item() == pytest.approx(case["loss"], rel=1e-9, abs=1e-9)
        torch.testing.assert_close(logps.grad, float64(case["grad"]), rtol=1e-9, atol=1e-9)
        assert PreferenceRule(**options).needs_reference == (refs[0] is not None and case["loss_type"] != ["sft"])


def test_rewards_without_a_reference():
    """βp and βq; for simpo of the means, which are what it compares."""
    given = {"chosen_lengths": torch.tensor([4]), "rejected_lengths": torch.tensor([1]), "beta": 0.5}
    pair = float64([-4.0]), float64([-3.0])
    assert [x.item() for x in preference_loss(*pair, loss_type="cpo", **given)[1:]] == [-2.0, -1.5]
    assert [x.item() for x in preference_loss(*pair, loss_type="simpo", **given)[1:]] == [-0.5, -1.5]


@every_loss_type
def test_gradients(loss_type):
    inputs = example()
    leaves = [inputs.pop(name).requires_grad_() for name in NAMES[:2]]
    options = {"loss_type": loss_type, "label_smoothing": smoothing_of(loss_type)}
    assert torch.autograd.gradcheck(lambda c, r: pair_preference_loss(c, r, **inputs, **options), leaves)
    assert torch.autograd.gradcheck(lambda c, r: preference_loss(c, r, **inputs, **options).loss, leaves)


def test_gradient_equations():
    """d loss / d policy_chosen, as docs/losses.md has it."""
    inputs = example()
    beta, eps = 0.3, 0.1
    c = inputs["policy_chosen"] - inputs["ref_chosen"]
    r = inputs["policy_rejected"] - inputs["ref_rejected"]
    h, s = beta * (c - r), torch.sigmoid
    mean = c / inputs["chosen_lengths"] - r / inputs["rejected_lengths"]
    p, q = inputs["policy_chosen"], inputs["policy_rejected"]
    means = p / inputs["chosen_lengths"], q / inputs["rejected_lengths"]
    mean_pq = means[0] - means[1]
    log_odds = mean_pq - torch.log(-torch.expm1(means[0])) + torch.log(-torch.expm1(means[1]))
    expected = {
        "sigmoid": -beta * (s(-h) - eps),
        "robust": -beta * ((1 - eps) / (1 - 2 * eps) - s(h)),
        "hinge": -beta * (h < 1).double(),
        "ipo": 2 * (mean - 1 / (2 * beta)) / inputs["chosen_lengths"],
        "sigmoid_norm": -beta * s(-beta * mean) / inputs["chosen_lengths"],
        "exo_pair": beta * s(h) * s(-h) * (h - math.log((1 - eps) / eps)),
        "nca_pair": -beta * (1 - 1.5 * s(beta * c)),
        "apo_zero": -beta * s(beta * c) * s(-beta * c),
        "apo_down": beta * (s(beta * c) * s(-beta * c) - s(h) * s(-h)),
        "sppo_hard": 2 * (c - 1 / (2 * beta)),
        "bco_pair": -beta * s(-beta * c),
        "discopop": beta * (-s(-20 * h) * (s(-h) - 20 * s(20 * h) * torch.nn.functional.logsigmoid(h))
                            + s(20 * h) * torch.exp(-h) * (20 * s(-20 * h) - 1)),
        "cpo": -beta * (s(-beta * (p - q)) - eps),
        "simpo": -beta * (s(0.5 - beta * mean_pq) - eps) / inputs["chosen_lengths"],
        "orpo": -beta * s(-log_odds) / -torch.expm1(p / inputs["chosen_lengths"]) / inputs["chosen_lengths"],
        "sft": -torch.ones(5, dtype=torch.float64) / inputs["chosen_lengths"].sum(),
    }  # fmt: skip
    assert set(expected) == set(PREFERENCE_LOSS_TYPES)
    for loss_type, gradient in expected.items():
        _, (found, _) = run(loss_type, beta=beta, num_pairs=1)
        torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-12)


@every_loss_type
def test_a_better_margin_is_a_smaller_loss(loss_type):
    """Except where a loss aims at a finite margin: from equal log-probs towards it, every loss falls."""
    zero = torch.zeros(1, dtype=torch.float64)
    options = {"loss_type": loss_type, "chosen_lengths": torch.ones(1), "rejected_lengths": torch.ones(1)}
    options |= {"ref_chosen": zero, "ref_rejected": zero, "label_smoothing": smoothing_of(loss_type)}
    chosen, rejected = (zero - 1, zero - 2) if loss_type == "apo_down" else (zero + 1, zero - 1)  # it lowers both
    assert pair_preference_loss(chosen, rejected, **options) < pair_preference_loss(zero, zero, **options)


@every_loss_type
def test_permutation_and_micro_batches(loss_type):
    whole, gradients = run(loss_type)
    order = torch.tensor([3, 1, 4, 0, 2])
    permuted, _ = run(loss_type, **{name: value[order] for name, value in example().items()})
    torch.testing.assert_close(permuted.loss, whole.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(permuted.chosen_rewards, whole.chosen_rewards[order], rtol=1e-12, atol=0)
    num_chosen = example()["chosen_lengths"].sum()
    for num_pairs, num_tokens in ((5, num_chosen.item()), (torch.tensor(5), num_chosen)):
        counts = {"num_pairs": num_pairs, "num_tokens": num_tokens}
        parts = [
            run(loss_type, **counts, **{name: value[rows] for name, value in example().items()})
            for rows in torch.arange(5).split([2, 1, 2])
        ]
        torch.testing.assert_close(sum(found.loss for found, _ in parts), whole.loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(torch.cat([g[0] for _, g in parts]), gradients[0], rtol=1e-12, atol=0)


@every_loss_type
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_log_ratios_stay_finite(loss_type, dtype):
    """Log-ratios of ±1000 and β = 1, which exp() would not survive."""
    chosen = torch.tensor([1000.0, -1000.0, 1000.0, -1000.0], dtype=dtype)
    rejected = torch.tensor([-1000.0, 1000.0, 1000.0, -1000.0], dtype=dtype)
    zeros, ones = torch.zeros(4, dtype=dtype), torch.ones(4)
    names = dict(zip(NAMES, (chosen, rejected, zeros, zeros, ones, ones), strict=True))
    found, gradients = run(loss_type, beta=1.0, **names)
    assert found.loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)
    if loss_type in ("sigmoid", "robust", "sigmoid_norm", "hinge", "nca_pair", "ipo", "sppo_hard"):
        assert gradients[0][1] < 0  # a pair so wrong still pushes
        assert gradients[1][1] > 0


@every_loss_type
def test_float32_against_float64(loss_type):
    exact, exact_gradients = run(loss_type)
    found, gradients = run(loss_type, **{name: example(torch.float32)[name] for name in NAMES[:4]})
    assert found.loss.dtype == torch.float32
    torch.testing.assert_close(found.loss.double(), exact.loss, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close([g.double() for g in gradients], exact_gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss_type", ["sigmoid", "apo_zero", "apo_down"])
def test_small_losses_keep_their_precision(loss_type):
    """A pair already right by 40: σ(−40) is far below float32's resolution at 1."""
    chosen, rejected = (-80.0, -120.0) if loss_type == "apo_down" else (40.0, -40.0)
    zero = torch.zeros(1)
    found = pair_preference_loss(zero + chosen, zero + rejected, zero, zero, beta=1.0, loss_type=loss_type)
    expected = {"sigmoid": sigma(-80), "apo_zero": 2 * sigma(-40), "apo_down": sigma(-80) + sigma(-40)}[loss_type]
    assert found.item() == pytest.approx(expected, rel=1e-6, abs=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32(dtype):
    low = {name: example(dtype)[name] for name in NAMES[:4]}
    found, gradients = run("sigmoid", **low)
    expected, _ = run("sigmoid", **{name: value.float() for name, value in low.items()})
    same(found.loss, expected.loss)
    assert gradients[0].dtype == dtype


@pytest.mark.parametrize("loss_type", PREFERENCE_LOSS_TYPES)
def test_a_reference_in_float64_leaves_the_loss_in_the_policys_dtype(loss_type):
    mixed = {name: example(torch.float32)[name] for name in NAMES[:4]}
    expected, _ = run(loss_type, **mixed)
    found, _ = run(loss_type, **mixed | {name: mixed[name].double() for name in NAMES[2:4]})
    assert [x.dtype for x in found] == [torch.float32] * 3
    same(found.loss, expected.loss, scale=20.0)  # log-probs are differences of numbers about that large


def test_rewards_and_metrics():
    chosen, rejected = float64([-1.0, -2.0]).requires_grad_(), float64([-3.0, -1.0])
    ref = float64([-2.0, -2.0])
    found = preference_loss(chosen, rejected, ref, ref, beta=0.5)
    loss, chosen_rewards, rejected_rewards = found
    assert chosen_rewards.tolist() == [0.5, 0.0]
    assert rejected_rewards.tolist() == [-0.5, 0.5]
    assert loss.item() == pytest.approx((-math.log(sigma(1)) - math.log(sigma(-0.5))) / 2)
    assert {name: value.item() for name, value in found.metrics.items()} == {
        "rewards_chosen": 0.25, "rewards_rejected": 0.0, "margin": 0.25, "accuracy": 0.5,
        "logps_chosen": -1.5, "logps_rejected": -2.0,
    }  # fmt: skip
    assert not any(x.requires_grad for x in (chosen_rewards, rejected_rewards, *found.metrics.values()))
    assert found.metrics is found.metrics
    detached = preference_loss(chosen.detach(), rejected, ref, ref)
    for other in (copy.deepcopy(detached), pickle.loads(pickle.dumps(detached))):
        assert other.loss == detached.loss
        assert other.metrics == detached.metrics


def test_no_pairs():
    none = torch.zeros(0, requires_grad=True)
    found = preference_loss(none, none, none, none)
    found.loss.backward()
    assert found.loss == 0
    assert all(value == 0 for value in found.metrics.values())


def test_sequence_logps():
    logps = torch.tensor([[-1.0, -2.0, math.nan], [-4.0, math.inf, -2.0], [math.nan, math.nan, math.nan]])
    logps.requires_grad_()
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
    assert sequence_logps(logps, mask).tolist() == [-3.0, -6.0, 0.0]
    means = sequence_logps(logps, mask.bool(), average=True)
    assert means.tolist() == [-1.5, -3.0, 0.0]
    means.sum().backward()
    assert logps.grad.tolist() == [[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]
    free = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: sequence_logps(x, mask, average=True), free)


@pytest.mark.parametrize("loss_type", ["ipo", "sigmoid_norm"])
def test_a_completion_without_tokens(loss_type):
    zeros = torch.zeros(1)
    lengths = {"chosen_lengths": torch.tensor([0]), "rejected_lengths": torch.tensor([3])}
    assert preference_loss(zeros, zeros, zeros, zeros, loss_type=loss_type, **lengths).loss.isfinite()


S, K = torch.zeros(2), torch.ones(2)
KNOWN = ", ".join(map(repr, PREFERENCE_LOSS_TYPES))
MISTAKES = [
    ((S, S, S, S), {"loss_type": "kto"}, ValueError, f"loss_type must be one of {KNOWN}, found 'kto'"),
    ((S[:, None], S, S, S), {}, ValueError, "policy_chosen must have shape [B], found [2, 1]; sequence_logps sums tokens"),
    ((S, S[:1], S, S), {}, ValueError, "policy_rejected must have shape [2], found [1]"),
    ((S, S, S[:1], S), {}, ValueError, "ref_chosen must have shape [2], found [1]"),
    ((S.long(), S, S, S), {}, TypeError, "policy_chosen must be of a floating dtype, found torch.int64"),
    ((S, S, S, S.int()), {}, TypeError, "ref_rejected must be of a floating dtype, found torch.int32"),
    ((S, S, None, S), {}, TypeError, "ref_chosen must be a tensor, found NoneType; zeros make the loss free of a reference"),
    ((S, S, S, S.to("meta")), {}, TypeError, "ref_rejected must be on cpu as policy_chosen is, found meta"),
    ((S, S, S, S), {"beta": 0.0}, ValueError, "beta must be finite and above 0, found 0.0"),
    ((S, S, S, S), {"beta": "1"}, TypeError, "beta must be a number, found str"),
    ((S, S, S, S), {"label_smoothing": 0.5}, ValueError, "label_smoothing must be at least 0 and below 0.5, found 0.5"),
    ((S, S, S, S), {"label_smoothing": -0.1}, ValueError, "label_smoothing must be at least 0 and below 0.5, found -0.1"),
    ((S, S, S, S), {"loss_type": "hinge", "label_smoothing": 0.1}, ValueError, "label_smoothing must be 0 for 'hinge'"),
    ((S, S, S, S), {"loss_type": "exo_pair"}, ValueError, "label_smoothing must be above 0 for 'exo_pair'"),
    ((S, S, S, S), {"loss_type": "ipo"}, ValueError, "chosen_lengths must be given for 'ipo', which divides by them, found None"),
    ((S, S, S, S), {"loss_type": "ipo", "chosen_lengths": K}, ValueError, "rejected_lengths must be given for 'ipo'"),
    ((S, S, S, S), {"loss_type": "ipo", "chosen_lengths": [1, 1]}, TypeError, "chosen_lengths must be a tensor, found list"),
    ((S, S, S, S), {"loss_type": "ipo", "chosen_lengths": K[:1]}, ValueError, "chosen_lengths must have shape [2], found [1]"),
    ((S, S, S, S), {"loss_type": "ipo", "chosen_lengths": -K}, ValueError, "chosen_lengths must be at least 0, found -1.0"),
    ((S, S, S, S), {"loss_type": {"ipo": 1.0}}, TypeError, "loss_type must be a name or a list of names, found {'ipo': 1.0}"),
    ((S, S, S, S), {"loss_type": ()}, ValueError, "loss_type must name each loss once and at least one, found ()"),
    ((S, S, S, S), {"loss_type": ["ipo", "ipo"]}, ValueError, "loss_type must name each loss once and at least one"),
    ((S, S, S, S), {"loss_type": ["sft", "hinge"], "loss_weights": [1.0]}, ValueError, "one number for each of 2 losses, found 1"),
    ((S, S, S, S), {"loss_weights": [-1.0]}, ValueError, "loss_weights must be finite and at least 0, found -1.0"),
    ((S, S, S, S), {"loss_type": "sft"}, ValueError, "chosen_lengths must be given for 'sft'"),
    ((S, S), {"loss_type": ["simpo", "hinge"]}, TypeError, "ref_chosen must be a tensor, found NoneType"),
    ((S, S, S, S), {"discopop_tau": 1.5}, ValueError, "discopop_tau must be above 0 and at most 1, found 1.5"),
    ((S, S, S, S), {"simpo_gamma": -1.0}, ValueError, "simpo_gamma must be finite and at least 0, found -1.0"),
    ((S, S, S, S), {"num_pairs": -2}, ValueError, "num_pairs must be finite and at least 0, found -2"),
    ((S, S, S, S), {"num_pairs": torch.tensor(-2)}, ValueError, "num_pairs must be finite and at least 0, found -2"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "kwargs", "error", "message"), MISTAKES)
def test_mistakes(args, kwargs, error, message):
    with pytest.raises(error) as raised:
        preference_loss(*args, **kwargs)
    assert message in str(raised.value)


def test_mistakes_in_sequence_logps():
    with pytest.raises(ValueError, match=r"logps must have shape \[B, T\], found \[2\]"):
        sequence_logps(S, S)
    with pytest.raises(ValueError, match=r"completion_mask must have shape \[1, 2\], found \[2\]"):
        sequence_logps(S[None], S)
    with pytest.raises(TypeError, match="completion_mask must be a tensor, found NoneType"):
        sequence_logps(S[None], None)
