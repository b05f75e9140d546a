"""Truncated importance sampling: numbers by hand, TRL's formula, nothing where sampling and training agree."""

import json
import math
from pathlib import Path

import pytest
import torch
from steps import advantages, advantages_only, cut, fill, lines_of, loss_on
from test_grpo import PROMPTS, Table, make_grpo, weights
from tiny_models import moe

from strop.algorithms.grpo import GRPOConfig
from strop.config.on_policy import IMPORTANCE_MODES, REJECTIONS
from strop.training.trainer import gather_metrics


def make_case(trained_BT, sampled_BT, lengths, **options):
    """A trainer whose training forward gives trained_BT for completions drawn with sampled_BT, and that rollout."""
    grpo = make_grpo(Table(trained_BT, 2), max_new_tokens=trained_BT.shape[1], group_size=2, **options)
    return grpo, lines_of(lengths, sampled_BT)


def test_by_hand():
    """A = ±1. Ratios of training to sampling: e (capped at 2), 1, √½ for the first; ½ for the second."""
    e = math.e
    trained = torch.tensor([[-1.0, -1.0, -1.0], [-2.0, -1, -1]], dtype=torch.float64)
    sampled = torch.tensor([[-2.0, -1.0, -1.0 + math.log(2) / 2], [-2.0 + math.log(2), -1, -1]], dtype=torch.float64)
    grpo, lines = make_case(
        trained, sampled, [3, 1], importance_cap=2.0, kl_coef=0.5, advantage_ddof=0, advantage_eps=0.0
    )
    with torch.no_grad():  # the reference gives every token e^½ of the policy's probability: d = −½
        grpo.reference.policy.model.logps_BT.sub_(0.5)
    batch = advantages(grpo, lines, [1.0, 0.0])
    assert torch.cat([line.importance_t for line in lines]).tolist() == pytest.approx([2.0, 1.0, 0.5**0.5, 0.5])
    result = loss_on(grpo, lines)
    policy = (-(2 + 1 + 0.5**0.5) / 3 + 0.5) / 2
    k3 = math.exp(-0.5) + 0.5 - 1  # of every token, unweighted
    assert result.policy_loss.item() == pytest.approx(policy)
    assert result.loss.item() == pytest.approx(policy + 0.5 * k3)
    result.loss.backward()
    kl = 0.5 * (1 - math.exp(-0.5))  # of d(β·k3)/dlogp
    wanted = [(-2 + kl) / 6, (-1 + kl) / 6, (-(0.5**0.5) + kl) / 6, (0.5 + kl) / 2]
    grad = grpo.model.logps_BT.grad
    assert [*grad[0].tolist(), grad[1, 0].item()] == pytest.approx(wanted)

    metrics, _ = gather_metrics(grpo.learn(lines, batch) | grpo.metrics_of(lines), [], grpo.world)
    assert metrics["importance/mean"] == pytest.approx((2 + 1 + 0.5**0.5 + 0.5) / 4)
    assert metrics["importance/capped_fraction"] == 0.25
    assert metrics["mismatch_ratio_max"] == pytest.approx(e)
    assert metrics["ratio/max"] == 1.0  # the ratio of the loss is to the training forward, not to sampling


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "cispo"])
def test_trls_token_truncate(level, loss_type):
    """Every token's −min(c·A, clip(c)·A), or cispo's, times min(ratio, cap), and the KL added after that."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda: -2 * torch.rand(4, 5, generator=generator, dtype=torch.float64) - 0.1  # noqa: E731
    now, trained, sampled, ref = draw(), draw(), draw(), draw()
    lengths = [5, 2, 3, 4]
    values = torch.tensor([1.0, -2.0, 0.5, -0.3], dtype=torch.float64)
    grpo, lines = make_case(
        now, sampled, lengths, importance_cap=1.5, kl_coef=0.1, importance_level=level, loss_type=loss_type,
        clip_eps=(0.2, 2.0) if loss_type == "cispo" else 0.2,
    )  # fmt: skip
    ratios = (trained - sampled).exp().clamp(max=1.5)
    fill(lines, old_logps_t=cut(trained, lengths), ref_logps_t=cut(ref, lengths), importance_t=cut(ratios, lengths))
    fill(lines, advantages_t=[value.expand(n) for value, n in zip(values, lengths, strict=True)])
    result = loss_on(grpo, lines)

    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    log_ratio = now - trained
    if level == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1))[:, None]
    c, a = log_ratio.exp(), values[:, None]
    per_token = -torch.min(c * a, c.clamp(0.8, 1.2) * a) if loss_type != "cispo" else -c.clamp(max=2.0) * a * now
    per_token = per_token * ratios + 0.1 * ((ref - now).exp() - (ref - now) - 1)
    per_token = per_token * mask
    means = (per_token.sum(-1) / mask.sum(-1)).mean() if loss_type == "grpo" else per_token.sum() / mask.sum()
    assert result.loss.item() == pytest.approx(means.item(), abs=1e-12)


def test_trl_golden_values(golden_more):
    """Truncated and masked, on one side and on both; vespo takes the weights into the product of its ratios."""
    rule = ("loss_type", "importance_level", "clip_eps", "vespo_gamma", "sapo_temperatures")
    for case in golden_more["importance"]:
        now, trained, sampled, ref = (
            torch.tensor(case[name], dtype=torch.float64)
            for name in ("logps", "old_logps", "sampled_logps", "ref_logps")
        )
        lengths = [sum(row) for row in case["mask"]]
        grpo, lines = make_case(
            now, sampled, lengths, importance_cap=case["importance_cap"], importance_mode=case["importance_mode"],
            kl_coef=case["beta"], **{name: case[name] for name in rule if name in case},
        )  # fmt: skip
        fill(lines, old_logps_t=cut(trained, lengths))
        if case["beta"]:
            fill(lines, ref_logps_t=cut(ref, lengths))
        advantages_only(grpo, lines, [0.0] * 4)
        values = torch.tensor(case["advantages"], dtype=torch.float64)
        fill(lines, advantages_t=[value.expand(n) for value, n in zip(values, lengths, strict=True)])
        result = loss_on(grpo, lines)
        assert result.loss.item() == pytest.approx(case["loss"], abs=1e-12)
        result.loss.backward()
        torch.testing.assert_close(
            grpo.model.logps_BT.grad, torch.tensor(case["grad"], dtype=torch.float64), rtol=1e-9, atol=1e-12
        )
    assert {case["importance_mode"] for case in golden_more["importance"]} == {"truncate", "mask"}


def test_where_sampling_and_training_agree_it_changes_nothing():
    found = []
    for cap in (None, 1.0):
        grpo = make_grpo(moe(), learning_rate=1e-2, importance_cap=cap, kl_coef=0.1, micro_batch_tokens=40)
        for _ in range(3):
            metrics = grpo.train_step(PROMPTS)
        found.append(weights(grpo.model))
    assert torch.equal(*found)
    assert metrics["importance/mean"] == 1.0
    assert metrics["importance/capped_fraction"] == 0.0


def test_with_a_cut_distribution_it_is_recomputed_and_told():
    grpo = make_grpo(moe(scale=2.0), top_k=5, importance_cap=2.0)
    assert grpo.config.recomputes
    metrics = grpo.train_step(PROMPTS)
    assert 0 < metrics["importance/mean"] < 0.9  # top-k made what was drawn more probable than the policy has it
    assert metrics["importance/capped_fraction"] == 0.0


# ---- sequences, and rejection: verl's numbers ----

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "corrections.json").read_text())


def weights_of(case, **options):
    """The weights that a trainer gives the tokens of a case, [B, T], 0 where its mask is."""
    trained, sampled = (torch.tensor(case[name], dtype=torch.float64) for name in ("trained", "sampled"))
    lengths = [sum(row) for row in case["mask"]]
    grpo, lines = make_case(trained, sampled, lengths, kl_coef=0.0, **options)
    fill(lines, old_logps_t=cut(trained, lengths))
    advantages_only(grpo, lines, [0.0] * len(lines))
    found = torch.zeros_like(trained)
    for row, line in zip(found, lines, strict=True):
        row[: len(line.importance_t)] = line.importance_t
    return found, gather_metrics(grpo.metrics_of(lines), [], grpo.world)[0]


@pytest.mark.parametrize("case", GOLDEN["importance"], ids=lambda case: f"{case['level']} {case['mode']}")
def test_verls_importance_weights(case):
    mode = {"token": "", "sequence": "sequence_"}[case["level"]] + case["mode"]
    found, metrics = weights_of(case, importance_mode=mode, importance_cap=(case["low"], case["high"]))
    wanted = torch.tensor(case["weights"], dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    num = sum(map(sum, case["mask"]))
    assert metrics["importance/mean"] == pytest.approx(wanted.sum().item() / num)
    assert 0 < metrics["importance/capped_fraction"] < 1


@pytest.mark.parametrize("case", GOLDEN["rejection"], ids=lambda case: f"{case['criterion']} {case['bounds']}")
def test_verls_rejection(case):
    bounds = tuple(case["bounds"]) if isinstance(case["bounds"], list) else case["bounds"]
    rejects = {"importance_reject": case["criterion"], "importance_reject_bounds": bounds}
    found, metrics = weights_of(case, **rejects)
    assert found.tolist() == case["kept"]
    kept, num = (sum(map(sum, case[name])) for name in ("kept", "mask"))
    assert 0 < kept < num
    assert metrics["importance/rejected_fraction"] == pytest.approx(1 - kept / num)
    # with weights too, both count
    both, _ = weights_of(case, importance_cap=1.1, **rejects)
    alone, _ = weights_of(case, importance_cap=1.1)
    assert torch.equal(both, alone * found)


def test_every_criterion_has_verls_numbers():
    assert {case["criterion"] for case in GOLDEN["rejection"]} == set(REJECTIONS)
    levels = {"token": "", "sequence": "sequence_"}
    assert {levels[case["level"]] + case["mode"] for case in GOLDEN["importance"]} == set(IMPORTANCE_MODES)


def test_a_rejected_completion_has_its_kl_and_no_policy_term():
    """Its tokens stay in the divisor, as masked ones do."""
    trained, sampled = torch.full((2, 3), -1.0).double(), torch.tensor([[-1.0] * 3, [-2.0] * 3]).double()
    options = {"importance_reject": "seq_mean_k1", "importance_reject_bounds": 2.0, "kl_coef": 0.5}
    grpo, lines = make_case(trained, sampled, [3, 3], advantage_ddof=0, advantage_eps=0.0, **options)
    with torch.no_grad():
        grpo.reference.policy.model.logps_BT.sub_(0.5)
    advantages(grpo, lines, [1.0, 0.0])
    assert [line.importance_t.tolist() for line in lines] == [[1.0] * 3, [0.0] * 3]
    result = loss_on(grpo, lines)
    assert result.policy_loss.item() == pytest.approx(-0.5)
    assert result.loss.item() == pytest.approx(-0.5 + 0.5 * (math.exp(-0.5) + 0.5 - 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"importance_mode": "geometric"}, "importance_mode must be one of 'truncate', 'mask', 'sequence_truncate'"),
        ({"importance_reject": "seq_max_k1"}, "importance_reject must be one of 'token_k1'"),
        ({"importance_reject": "seq_mean_k1"}, "importance_reject_bounds must be given for 'seq_mean_k1', found None"),
        ({"importance_reject": "token_k1", "importance_reject_bounds": 0.5}, "importance_reject_bounds must be"),
        ({"importance_reject": "token_k1", "importance_reject_bounds": (2.0, 0.5)}, r"must be \(low, high\), found \(2.0, 0.5\)"),
        ({"importance_reject": "token_k1", "importance_reject_bounds": (0.0, 2.0)}, "importance_reject_bounds must be"),
        ({"importance_reject": "token_k3", "importance_reject_bounds": (0.5, 2.0)}, "importance_reject_bounds must be a number"),
        ({"importance_reject": "token_k3", "importance_reject_bounds": 0.1, "old_logps": "rollout"}, "with importance_reject"),
        ({"importance_cap": 2.0, "importance_mode": "sequence_mask", "loss_type": "vespo"}, "importance_mode must be 'truncate'"),
    ],
)  # fmt: skip
def test_bad_options(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        GRPOConfig.from_options(options)


def test_bounds_without_a_criterion_are_said():
    with pytest.warns(
        UserWarning, match="importance_reject_bounds has no effect: it is for importance_reject, found None"
    ):
        make_grpo(moe(), importance_reject_bounds=2.0)
