"""The advantages GRPO can take: verl's numbers, failed rewards, what has no effect, and RLOO as a name for one of them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from steps import fill, lines_of, loss_on
from test_grpo import PROMPTS, Table, make_grpo, weights
from tiny_models import moe

import strop
from strop.algorithms.grpo import GRPO, advantages_of, without_signal
from strop.config import GRPOConfig, RLOOConfig
from strop.config.on_policy import ADVANTAGES
from strop.losses import rloo_loss
from strop.rewards import Rewards

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "corrections.json").read_text())["advantages"]
VERL = {"advantage_eps": 0.0}  # where verl adds 1e-8 to a variance, or 1e-6 and less to a std


def found_of(rewards_KB, lengths=None, **options):
    """Advantages by a config, of rewards that are added with its weights."""
    rewards_KB = torch.tensor(rewards_KB, dtype=torch.float64)
    config = GRPOConfig.from_options({"group_size": 4} | options)
    total_B = torch.einsum(
        "k,kb->b", torch.tensor(config.reward_weights or [1.0] * len(rewards_KB)).double(), rewards_KB
    )
    rewards = Rewards(total_B, {str(k): column for k, column in enumerate(rewards_KB)})
    lengths = torch.ones(len(total_B)) if lengths is None else torch.tensor(lengths)
    return advantages_of(config, rewards, lengths.long().numpy())


@pytest.mark.parametrize("advantage", GOLDEN)
def test_verls_numbers(advantage):
    case = GOLDEN[advantage]
    options = {} if advantage == "grpo" else VERL  # verl's own epsilon of GRPO is given
    weights = {"reward_weights": case["weights"]} if case["weights"] else {}
    found = found_of(case["rewards"], case["lengths"], advantage=advantage, **options, **weights)
    wanted = np.array(case["advantages"])
    assert abs(found - wanted).max() <= 1e-9 * abs(wanted).max()
    assert len(set(found.round(9))) > 2


def test_every_advantage_has_an_oracle():
    """MaxRL is not in verl 0.9.1: its expected gradient is in tests/primitives/test_advantages.py."""
    assert set(ADVANTAGES) - set(GOLDEN) == {"maxrl"}
    assert found_of([[1, 0, 0, 1]], advantage="maxrl").tolist() == [1.0, -1.0, -1.0, 1.0]


def test_limits_that_are_other_advantages():
    rewards = [[3.0, 1.0, 4.0, 1.5, 9.0, 2.0, 6.0, 5.0]]
    same = {"group_size": 8, "advantage_eps": 1e-3}
    plain = found_of(rewards, **same)
    for advantage in ("reinforce++", "reinforce++_baseline"):  # of one prompt and completions of one length
        assert found_of(rewards, advantage=advantage, **same) == pytest.approx(plain, rel=1e-12)
    # of two answers for each prompt the best of two is the better one, by its lead
    pairs = found_of(rewards, group_size=2, advantage="pass@k")
    assert pairs == pytest.approx([2.0, 0, 2.5, 0, 7.0, 0, 1.0, 0])
    assert found_of(rewards, advantage="pass@k", pass_k=4) == pytest.approx(found_of(rewards, advantage="pass@k"))
    assert found_of(rewards, advantage="dr_grpo") == pytest.approx(found_of(rewards, advantage_scale="none"))
    # one function alone: GRPO's advantages, brought to the batch's std of 1
    alone = found_of(rewards, advantage="gdpo", advantage_eps=0.0)
    grpo = found_of(rewards, advantage_eps=0.0)
    assert alone == pytest.approx(grpo / grpo.std(ddof=1), rel=1e-12)


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_failed_rewards_are_not_compared(advantage):
    """The others have the advantages of a batch without those; here each group has lost as many."""
    nan = math.nan
    rewards, lengths = (
        [1.0, nan, 4.0, 0.5, 2.0, 3.0, 9.0, nan, 0.0, 0.0, nan, 1.0],
        [2, 0, 3, 1, 1, 4, 2, 0, 5, 1, 0, 1],
    )
    known = [i for i, value in enumerate(rewards) if value == value]
    found = found_of([rewards], lengths, advantage=advantage)
    wanted = found_of([[rewards[i] for i in known]], [lengths[i] for i in known], advantage=advantage, group_size=3)
    assert found[known] == pytest.approx(wanted, rel=1e-12)
    assert [found[i] for i in range(12) if i not in known] == [0.0] * 3


def test_negative_rewards_are_not_for_maxrl():
    with pytest.raises(ValueError, match=r'rewards must be at least 0 for scale="mean", found -1\.0 at index 1'):
        found_of([[1.0, -1.0, 0.0, 0.0]], advantage="maxrl")


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_every_advantage_trains(advantage):
    grpo = make_grpo(moe(), advantage=advantage, reward_fn=[first, longer])
    before = weights(grpo.model)
    metrics = grpo.train_step(PROMPTS)
    assert math.isfinite(metrics["loss"])
    assert not torch.equal(weights(grpo.model), before)


def first(completions):
    return [float(ids[0] % 3 == 0) for ids in completions]


def longer(completions):
    return [len(ids) / 10 for ids in completions]


def test_gdpo_sees_signal_in_sums_that_are_equal():
    lines = fill(lines_of([1] * 4, torch.zeros(4, 1)), reward=[1.0] * 4)
    fill(lines, rewards=[{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.0}])
    assert without_signal(lines, 2).tolist() == [True, True]
    assert without_signal(lines, 2, each=True).tolist() == [False, True]
    assert (
        abs(found_of([[1.0, 0, 1, 1], [0.0, 1, 0, 0]], group_size=2, advantage="gdpo", reward_weights=(2.0, 1.0))).max()
        > 0.5
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"advantage": "rloo", "advantage_scale": "batch"}, "advantage_scale has no effect: it is for advantage grpo, found 'rloo'"),
        ({"advantage": "maxrl", "advantage_eps": 0.5}, "advantage_eps has no effect"),
        ({"advantage": "pass@k", "advantage_ddof": 0}, "advantage_ddof has no effect"),
        ({"pass_k": 2}, "pass_k has no effect: it is for advantage pass@k, found 'grpo'"),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_said(options, told):
    with pytest.warns(UserWarning, match=told):
        make_grpo(moe(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage": "grpo2"}, "advantage must be one of 'grpo', 'dr_grpo', 'rloo'"),
        ({"advantage": "pass@k", "pass_k": 1}, "pass_k must be 0, or from 2 to group_size=8, found 1"),
        ({"advantage": "pass@k", "pass_k": 9}, "found 9"),
        (
            {"advantage": "rloo", "credit": "turn"},
            'advantage must be "grpo" or "dr_grpo" with credit="turn", found \'rloo\'',
        ),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        GRPOConfig.from_options(options)


# ---- RLOO ----


def test_rloo_is_grpo_with_two_other_defaults():
    assert issubclass(strop.RLOO, GRPO)
    rloo, grpo = RLOOConfig().to_dict(), GRPOConfig().to_dict()
    assert {name for name in rloo if rloo[name] != grpo[name]} == {"advantage", "loss"}
    assert RLOOConfig().loss.loss_type == "luspo"
    with pytest.raises(ImportError, match="RLOOTrainer is TRL's; what strop has is RLOO: from strop import RLOO"):
        strop.RLOOTrainer  # noqa: B018


def test_rloos_gradient_on_policy(golden):
    """That of rloo_loss, whose numbers are TRL's: the sum over a completion's tokens, divided by no length."""
    generator = torch.Generator().manual_seed(0)
    logps, lengths = -torch.rand(4, 5, generator=generator).double(), [5, 2, 3, 4]
    rloo = strop.RLOO(
        model=Table(logps, 2), reward_fn=lambda completions: [1.0, 0.0, 0.25, 2.0], group_size=2, kl_coef=0.0,
        max_new_tokens=5,
    )  # fmt: skip
    lines = lines_of(lengths, logps)
    rloo.score(lines)
    rloo.reward(lines)
    batch = rloo.whole_batch(lines, 0)
    rloo.advantages(lines, batch)
    assert [line.advantages_t[0].item() for line in lines] == [1.0, -1.0, -1.75, 1.75]
    loss_on(rloo, lines).loss.backward()
    leaf = logps.clone().requires_grad_()
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    rloo_loss(leaf, None, torch.tensor([1.0, -1.0, -1.75, 1.75]).double(), mask).loss.backward()
    torch.testing.assert_close(rloo.model.logps_BT.grad, leaf.grad, rtol=1e-12, atol=1e-12)
