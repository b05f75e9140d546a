"""Entropy: a bonus that follows a target, only uncertain tokens trained on, tokens marked by their covariance."""

import json
import math
from pathlib import Path

import pytest
import torch
from steps import cut, fill, lines_of, loss_on
from test_grpo import PROMPTS, make_grpo, weights
from tiny_models import llama, moe
from trained_models import whole_and_resumed

from strop import PPO
from strop.algorithms.entropy import EntropyBonus, keep_uncertain, mark_covariant
from strop.algorithms.grpo import GRPO
from strop.config import EntropyConfig, GRPOConfig
from strop.data.batch import TokenBatch
from strop.distributed import World
from strop.losses import PolicyRule

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "corrections.json").read_text())
ALONE = World()
OPTIONS = {  # each chooses tokens or follows their entropy
    "quantile": {"top_entropy_quantile": 0.3},
    "target": {"entropy_target": 2.9, "entropy_coef": 0.01, "entropy_coef_delta": 0.05},
    "clip_cov": {"loss_type": "clip_cov", "cov_fraction": 0.2, "cov_bounds": (0.0, 9.0)},
    "kl_cov": {"loss_type": "kl_cov", "cov_fraction": 0.2, "cov_kl_coef": 1.0},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


# ---- TRL's numbers ----


def test_trls_adaptive_coefficient():
    case = GOLDEN["adaptive"]
    config = EntropyConfig(
        entropy_target=case["target"], entropy_coef_delta=case["delta"], entropy_coef_max=case["max"]
    )
    bonus = EntropyBonus(config, PolicyRule(entropy_coef=case["first"]))
    for entropy, loss, coefficient in zip(case["entropies"], case["losses"], case["coefficients"], strict=True):
        assert -bonus.rule.entropy_coef * entropy == pytest.approx(loss, rel=1e-9, abs=1e-15)  # the bonus is all of it
        bonus.follow(entropy)
        assert bonus.coefficient == pytest.approx(coefficient, rel=1e-9, abs=1e-15)
    assert case["losses"][0] == case["losses"][-1] == 0.0  # above the target it is not applied
    assert {0.0, case["max"]} <= set(case["coefficients"])


@pytest.mark.parametrize("case", GOLDEN["quantile"], ids=lambda case: str(case["quantile"]))
def test_trls_tokens_of_high_entropy(case):
    lengths = [sum(row) for row in case["mask"]]
    entropies = torch.tensor(case["entropies"], dtype=torch.float64)
    lines = fill(lines_of(lengths, entropies), entropies_t=cut(entropies, lengths))
    fill(lines, advantages_t=[torch.full((n,), 2.0) for n in lengths])
    keep_uncertain(lines, case["quantile"], ALONE)
    wanted = [[2.0 * kept for kept in row[:n]] for row, n in zip(case["kept"], lengths, strict=True)]
    assert [line.advantages_t.tolist() for line in lines] == wanted


# ---- in a trainer ----


@every_option
def test_micro_batches_choose_the_same(options):
    found = []
    for size in (0, 1, 3):
        grpo = make_grpo(
            moe(scale=3.0), learning_rate=1e-2, inner_epochs=2, minibatch_size=8, micro_batch_size=size, **options
        )
        metrics = [grpo.train_step(PROMPTS) for _ in range(3)]
        found.append(weights(grpo.model))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(found[2], found[0], rtol=0, atol=2e-5)
    plain = make_grpo(moe(scale=3.0), learning_rate=1e-2, inner_epochs=2, minibatch_size=8)
    for _ in range(3):
        plain.train_step(PROMPTS)
    assert not torch.allclose(weights(plain.model), found[0], rtol=0, atol=2e-4), "the option had no effect"
    assert ("entropy_coef" in metrics[-1]) == ("entropy_target" in options)


@every_option
def test_resumed_runs_are_the_whole_ones(options, tmp_path):
    def make():
        return GRPO(
            model=moe(scale=3.0), reward_fn=low, group_size=2, max_new_tokens=4, batch_size=2, inner_epochs=2, **options
        )

    rows = [{"prompt": [2 + i, 3]} for i in range(6)]
    whole, resumed = whole_and_resumed(make, rows, tmp_path, reward_fn=low)
    if whole.bonus is not None:
        assert whole.bonus.state == resumed.bonus.state
        assert whole.bonus.coefficient != 0.01


def low(completions):
    return [float((ids < 15).sum()) for ids in completions]


def test_only_the_most_uncertain_tokens_have_advantages():
    grpo = make_grpo(moe(scale=3.0), top_entropy_quantile=0.25, kl_coef=0.0)
    seen = []
    learn = grpo.learn
    grpo.learn = lambda lines, batch: (learn(lines, batch), seen.extend(lines))[0]
    metrics = grpo.train_step(PROMPTS)
    policy = make_grpo(moe(scale=3.0)).policy
    entropies = torch.cat([line.entropies_t for line in seen])
    with torch.no_grad():
        wanted = policy.logps(TokenBatch.of(seen), entropy=True)[1]
    torch.testing.assert_close(entropies, wanted)
    advantages = torch.cat([line.advantages_t for line in seen])
    high = entropies >= entropies.double().quantile(0.75)
    assert high.sum() == pytest.approx(len(high) / 4, abs=1)
    assert (advantages[~high] == 0).all()
    assert (advantages[high] != 0).float().mean() > 0.5  # some rewards are their group's mean
    assert metrics["ratio/max"] == 1.0  # log-probs are those of the rollout


def test_tokens_outside_of_the_loss_do_not_count():
    """Truncated completions, which are masked, do not move the quantile."""
    grpo = make_grpo(moe(), top_entropy_quantile=0.5, kl_coef=0.0, mask_truncated=True, group_size=2)
    lines = fill(lines_of([2] * 4, -torch.ones(4, 2)), reward=[0.0, 1.0, 0.0, 1.0])
    fill(lines, rewards=[{"count_low": line.reward} for line in lines], finish=["eos", "eos", "length", "length"])
    batch = grpo.whole_batch(lines, 0)
    grpo.advantages(lines, batch)
    fill(lines, entropies_t=[torch.tensor(pair) for pair in ([1.0, 2.0], [3.0, 4.0], [9.0, 9.0], [9.0, 9.0])])
    grpo.choose_tokens(lines, grpo.loss_tokens(batch))
    assert [(line.advantages_t != 0).tolist() for line in lines] == [[False] * 2, [True] * 2, [True] * 2, [True] * 2]


def test_marks_are_of_all_completions_of_the_step():
    lines = lines_of([2, 3], torch.zeros(2, 3))
    fill(lines, old_logps_t=[torch.tensor([-1.0, -1.0]), torch.tensor([-3.0, -3.0, -2.0])])
    fill(lines, advantages_t=[torch.tensor([4.5, -2.5]), torch.tensor([-3.5, 1.5, 0.0])])
    mark_covariant(lines, PolicyRule(loss_type="kl_cov", cov_fraction=0.4), 0, ALONE)
    assert [line.marked_t.tolist() for line in lines] == [[True, False], [True, False, False]]


def test_kl_cov_holds_marked_tokens_back():
    """By hand: one token of two is marked; both have moved by log 2."""
    grpo = make_grpo(moe(), loss_type="kl_cov", cov_kl_coef=0.5, kl_coef=0.0, group_size=2)
    logps = grpo.policy.logps(TokenBatch.of(lines := lines_of([1, 1], torch.zeros(2, 1)))).detach()
    fill(lines, old_logps_t=list((logps - math.log(2)).split(1)), advantages_t=[torch.ones(1), torch.ones(1)])
    fill(lines, marked_t=[torch.tensor([True]), torch.tensor([False])], weight=[0.5, 0.5])
    loss = grpo.policy.loss(grpo.batch_of(lines), grpo.rule).loss.item()
    assert loss == pytest.approx(-2 + 0.5 * 0.5 * math.log(2), rel=1e-5)
    assert loss_on(grpo, lines).loss.item() == pytest.approx(loss)


def test_ppo_has_them_too():
    for options in OPTIONS.values():
        ppo = PPO(model=llama(), reward_fn=low, max_new_tokens=4, group_size=2, **options)
        assert math.isfinite(ppo.train_step(PROMPTS)["loss"])


def test_a_target_is_approached():
    """The bonus raises the entropy until it is above the target, and then goes."""

    def nothing(completions):
        return [0.0] * len(completions)

    grpo = make_grpo(
        moe(scale=4.0), reward_fn=nothing, kl_coef=0.0, learning_rate=1e-2, entropy_target=3.0, entropy_coef_delta=0.3,
        entropy_coef_max=1.0,
    )  # fmt: skip
    metrics = [grpo.train_step(PROMPTS) for _ in range(16)]
    entropies, coefficients = ([one[name] for one in metrics] for name in ("entropy", "entropy_coef"))
    assert entropies[0] < 2.8
    assert entropies[-1] > 3.0
    assert max(coefficients) > 0.5
    assert coefficients[-1] < max(coefficients)


# ---- bad input ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_entropy_quantile": 1.5}, "top_entropy_quantile must be"),
        ({"entropy_target": -1.0}, "entropy_target must be"),
        ({"entropy_target": 1.0, "entropy_coef_min": 2.0}, "entropy_coef_min must be at most entropy_coef_max=1.0, found 2.0"),
    ],
)  # fmt: skip
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        GRPOConfig.from_options(options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"entropy_coef_delta": 0.1}, "entropy_coef_delta has no effect: it is for entropy_target, found None"),
        ({"cov_fraction": 0.1}, "cov_fraction has no effect: it is for loss_type='clip_cov', found grpo"),
        ({"cov_kl_coef": 0.5, "loss_type": "clip_cov"}, "cov_kl_coef has no effect: it is for loss_type='kl_cov', found clip_cov"),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_said(options, told):
    with pytest.warns(UserWarning, match=told):
        make_grpo(moe(), **options)
