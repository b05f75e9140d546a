"""OnlineDPO: the pairs it makes, its loss by DPO's, learning, bad input."""

import copy

import pytest
import torch
from steps import step_lines
from test_grpo import PROMPTS, weights
from tiny_models import every_kind, llama, moe, plain

from strop.algorithms.dpo import DPO
from strop.algorithms.online_dpo import OnlineDPO, OnlineDPOConfig
from strop.algorithms.sft import SFT
from strop.models import as_policy
from strop.rewards import RewardError
from strop.rollout import Sampling, generate


def low_tokens(ids):
    return int((ids < 15).sum())


def prefers_low(pairs):
    return [int(low_tokens(b) > low_tokens(a)) for a, b in pairs]


def make_online(model, **options):
    if "reward_fn" not in options:
        options.setdefault("preference_fn", prefers_low)
    return OnlineDPO(model=model, **({"max_new_tokens": 6, "max_grad_norm": 0.0} | options))


@every_kind
def test_a_step_is_dpos_on_the_pairs_that_were_sampled(make):
    """The pairs as the preference function saw them, given to DPO: the same loss, the same weights."""
    seen = []

    def remembers(pairs, prompts):
        assert [prompt.tolist() for prompt in prompts] == PROMPTS
        seen.extend(pairs)
        return prefers_low(pairs)

    options = {"learning_rate": 0.5, "beta": 0.3, "optimizer": torch.optim.SGD}
    online = make_online(make(eos_token_id=[3, 6], scale=2.0), preference_fn=remembers, **options)
    start = weights(online.model)
    metrics = online.train_step(PROMPTS)
    better = prefers_low(seen)
    assert 0 < sum(better) < 4
    chosen = [pair[index] for pair, index in zip(seen, better, strict=True)]
    rejected = [pair[1 - index] for pair, index in zip(seen, better, strict=True)]
    dpo = DPO(model=make(eos_token_id=[3, 6], scale=2.0), max_grad_norm=0.0, **options)
    wanted = dpo.train_step(PROMPTS, chosen, rejected)
    assert metrics["loss"] == pytest.approx(wanted["loss"], abs=1e-6)
    assert (weights(online.model) - start).abs().max() > 1e-2
    torch.testing.assert_close(weights(online.model), weights(dpo.model), rtol=0, atol=1e-5)
    assert [s["preferred"] for s in online.samples] == [i == b for b in better for i in (0, 1)]


def test_rewards_in_place_of_preferences():
    """The higher reward is chosen; a tie teaches nothing and is counted."""
    seen = []

    def reward(completions, answer):
        seen.append([ids.tolist() for ids in completions])
        return [1.0, 1.0, 0.0, 2.0, 5.0, -1.0, 3.0, 3.0]

    online = make_online(moe(), ref_model=moe(seed=5), reward_fn=reward)
    taught = []
    online._learn = lambda pairs, num_pairs, ref_logps_P2: taught.append((pairs, ref_logps_P2)) or {"loss": 0.0}
    metrics = online.train_step(PROMPTS, answer=[1] * 4)
    completions, (pairs, ref_logps_P2) = seen[0], taught[0]
    # scored before they were judged, and now in the order of the judgement
    torch.testing.assert_close(ref_logps_P2, online._reference_logps(online._batches(pairs)), rtol=1e-6, atol=1e-6)
    assert (ref_logps_P2[:, 0] != ref_logps_P2[:, 1]).all()
    assert [[line.ids_T.tolist() for line in pair] for pair in pairs] == [
        [PROMPTS[1] + completions[3], PROMPTS[1] + completions[2]],
        [PROMPTS[2] + completions[4], PROMPTS[2] + completions[5]],
    ]
    assert metrics["preference/tied_fraction"] == 0.5
    assert metrics["reward/mean"] == 14 / 8


def test_nothing_but_ties():
    model = moe()
    before = weights(model)
    metrics = make_online(model, reward_fn=lambda completions: [1.0] * len(completions)).train_step(PROMPTS)
    assert metrics["loss"] == 0.0
    assert metrics["preference/tied_fraction"] == 1.0
    assert torch.equal(before, weights(model))


def test_win_rate_over_the_start_rises_above_75_percent():
    model = moe(eos_token_id=3)
    start = copy.deepcopy(model)
    online = make_online(model, learning_rate=5e-3, beta=0.1)
    for step in range(40):
        metrics = online.train_step([[1 + (step * 8 + i) % 29, 2] for i in range(16)])
    assert metrics["preference/margin"] > 0

    prompts = [[1 + i % 29, 2] for i in range(200)]
    sampling = Sampling(max_new_tokens=6)
    old, new = (
        [low_tokens(c) for c in generate(as_policy(m), prompts, sampling, seed=seed).completion_ids]
        for m, seed in ((start, 1), (model, 2))
    )
    wins = sum((n > o) + 0.5 * (n == o) for n, o in zip(new, old, strict=True)) / len(prompts)
    assert wins > 0.75


def test_train_and_evaluate():
    online = make_online(llama(eos_token_id=3, scale=2.0), learning_rate=1e-3, batch_size=2)
    rows = [{"prompt": p} for p in PROMPTS]
    history = online.train(rows, num_steps=3, progress=False)
    assert len(history.steps) == 3
    first, again = online.evaluate(rows), online.evaluate(rows)
    assert first == pytest.approx(again, abs=1e-6)
    assert {"eval/loss", "eval/preference/accuracy", "eval/completion/length"} <= set(first)


def test_a_saved_run_goes_on_bit_for_bit(tmp_path):
    whole, half = (make_online(moe(), learning_rate=1e-2) for _ in range(2))
    wanted = [whole.train_step(PROMPTS)["loss"] for _ in range(3)]
    found = [half.train_step(PROMPTS)["loss"]]
    half.save(tmp_path / "online.pt")
    other = OnlineDPO.from_checkpoint(tmp_path / "online.pt", preference_fn=prefers_low)
    found += [other.train_step(PROMPTS)["loss"] for _ in range(2)]
    assert found == wanted
    assert torch.equal(weights(whole.model), weights(other.model))


def test_completions_are_cut_at_max_length():
    """As DPO cuts them; a prompt that fills max_length alone is named before anything is sampled."""
    online = make_online(llama(), max_length=7, max_new_tokens=6)
    lines = online.cut(step_lines(online, [{"prompt": p} for p in PROMPTS]))
    assert [(len(line), line.num_loss_tokens) for line in lines] == [(7, n) for n in (4, 6, 2, 5) for _ in range(2)]
    online.train_step(PROMPTS)
    too_long = [*PROMPTS, [1] * 7]
    message = r"\[4\]: the prompt must be shorter than max_length, 7 tokens, found 7"
    with pytest.raises(ValueError, match="prompts" + message):
        online.train_step(too_long)
    with pytest.raises(ValueError, match="dataset" + message):
        online.train([{"prompt": p} for p in too_long])
    assert online.state.step == 1


def test_an_evaluation_has_no_larger_batches_than_training():
    """Of rows however many: a forward over all of them at once would fill any memory."""
    sizes = []
    online = make_online(plain(eos_token_id=3), batch_size=4)
    online.model.register_forward_pre_hook(lambda model, args: sizes.append(len(args[0])))
    found = online.evaluate([{"prompt": prompt} for prompt in PROMPTS * 5])
    assert max(sizes) == 8  # pairs
    assert found["eval/completion/length"] > 1
    rows = [{"prompt": [1], "completion": [2 + i % 9, 3]} for i in range(20)]
    losses = []
    for batch_size in (4, 20):
        sft = SFT(model=plain(eos_token_id=3), batch_size=batch_size)
        sft.model.register_forward_pre_hook(lambda model, args: sizes.append(len(args[0])))
        sizes.clear()
        losses.append(sft.evaluate(rows)["eval/loss"])
        assert max(sizes) == batch_size
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_the_judge_gets_the_columns_of_the_dataset():
    seen = []

    def judge(pairs, answer):
        seen.append(answer)
        return [0 for _ in pairs]

    make_online(moe(), preference_fn=judge).train_step(PROMPTS, answer=["a", "b", "c", "d"])
    assert seen == [["a", "b", "c", "d"]]


def test_bad_input():
    with pytest.raises(ValueError, match="OnlineDPO needs a preference_fn, a reward_fn or an environment, found none"):
        OnlineDPO(model=moe())
    with pytest.raises(ValueError, match="found both"):
        OnlineDPO(model=moe(), preference_fn=prefers_low, reward_fn=low_tokens)
    with pytest.raises(ValueError, match="temperature must be above 0: two greedy completions are the same"):
        OnlineDPOConfig.from_options({"temperature": 0.0})
    with pytest.raises(RewardError, match=r"must return 0 or 1.*found 2 \(pair 3, prompt \[12, 13\]\)"):
        make_online(moe(), preference_fn=lambda pairs: [0, 1, 0, 2]).train_step(PROMPTS)
    with pytest.warns(UserWarning, match="reward_weights have no effect"):
        make_online(moe(), reward_weights=(1.0,))
