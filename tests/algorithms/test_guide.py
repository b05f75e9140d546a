"""The five snippets of the guide this library answers to, as a user writes them: id tensors, pairs (a, b), no tokenizer."""

import copy

import pytest
import torch
from test_grpo import weights
from tiny_models import VOCAB, Letters, every_kind, moe

from strop.algorithms.best_of_n import BestOfN
from strop.algorithms.dpo import DPO
from strop.algorithms.grpo import GRPO
from strop.algorithms.online_dpo import OnlineDPO
from strop.logging import ConsoleLogger


def reward_fn(completions):
    return [float((x < 25).float().mean()) for x in completions]


def score(x):
    return (x < 25).float().mean()


def preference_fn(pairs):
    return [0 if score(a) > score(b) else 1 for a, b in pairs]


@pytest.fixture
def prompt_batch():
    return torch.randint(0, VOCAB, (4, 8), generator=torch.Generator().manual_seed(0))


@every_kind
def test_dpo(make):
    model, ref = make(max_length=256), make(max_length=256, seed=1)
    before = weights(model)
    dpo = DPO(model=model, ref_model=ref, beta=0.1, learning_rate=1e-4, logger=ConsoleLogger(log_interval=100))
    prompt, chosen, rejected = (torch.randint(0, VOCAB, (4, length)) for length in (8, 6, 7))
    metrics = dpo.train_step(prompt, chosen, rejected)
    assert metrics["loss"] > 0
    assert not torch.equal(before, weights(model))


@every_kind
def test_grpo(make, prompt_batch):
    model = make(max_length=256)
    ref, before = copy.deepcopy(model), weights(model)
    grpo = GRPO(
        model=model, ref_model=ref, reward_fn=reward_fn, group_size=4, kl_coef=0.1, learning_rate=1e-4, max_new_tokens=128
    )  # fmt: skip
    metrics = grpo.train_step(prompt_batch)
    assert {"loss", "tokens_per_second", "grad_norm", "time/generate"} <= set(metrics)
    assert metrics["completion/length"] == 128
    assert 0 < metrics["mean_reward"] < 1
    assert metrics["mean_kl"] == pytest.approx(0, abs=1e-6)
    assert not torch.equal(before, weights(model))


@every_kind
def test_online_dpo(make, prompt_batch):
    model, ref = make(max_length=256), make(max_length=256, seed=1)
    online = OnlineDPO(model=model, ref_model=ref, preference_fn=preference_fn, beta=0.1)
    metrics = online.train_step(prompt_batch)
    assert metrics["loss"] > 0
    completions = [torch.tensor(sample["completion"]) for sample in online.samples]
    better = preference_fn(list(zip(completions[::2], completions[1::2], strict=True)))
    assert [sample["preferred"] for sample in online.samples] == [i == b for b in better for i in (0, 1)]


@every_kind
def test_best_of_n(make, prompt_batch):
    best_of_n = BestOfN(model=make(max_length=256), reward_fn=reward_fn, n=8, max_new_tokens=128)
    best = best_of_n.generate(prompt_batch)
    assert best.shape == (4, 8 + 128)
    assert torch.equal(best[:, :8], prompt_batch)
    assert reward_fn([row[8:] for row in best]) == pytest.approx(best_of_n.rewards.tolist())


@every_kind
def test_checkpoint(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [torch.randint(0, VOCAB, (4, length)) for length in (8, 6, 7)]
    dpo = DPO(model=make(), ref_model=make(seed=1), beta=0.1, learning_rate=1e-4)
    dpo.train_step(*rows)
    dpo.save("dpo.pt")
    again = DPO.from_checkpoint("dpo.pt", **({"model": make()} if dpo.policy.kind == "plain" else {}))
    assert again.train_step(*rows)["loss"] == dpo.train_step(*rows)["loss"]


def test_what_functions_get_are_tensors_of_their_own():
    """All four of them, 1-D and int64; one that changes what it is given changes neither the training nor the samples."""
    seen = {}

    def reward(completions, prompts, completion_ids, prompt_ids):
        seen.update(completions=completions, prompts=prompts, completion_ids=completion_ids, prompt_ids=prompt_ids)
        lengths = [float(len(x)) for x in completions]
        for ids in (*completion_ids, *prompt_ids):
            assert (ids.dtype, ids.ndim) == (torch.int64, 1)
            ids.zero_()
        return lengths

    prompts = [[5, 6], [7]]
    grpo, honest = (
        GRPO(model=moe(eos_token_id=[3, 6]), reward_fn=reward_fn, group_size=2, max_new_tokens=6)
        for reward_fn in (reward, lambda completions: [float(len(x)) for x in completions])
    )
    assert grpo.train_step(prompts)["loss"] == honest.train_step(prompts)["loss"]
    assert [x.tolist() for x in seen["prompts"]] == [[5, 6], [5, 6], [7], [7]]
    assert [x.tolist() for x in seen["completions"]] == [sample["completion"] for sample in honest.samples]
    assert [x.tolist() for x in seen["prompt_ids"]] == [[0, 0], [0, 0], [0], [0]]
    assert grpo.samples == honest.samples


def test_with_a_tokenizer_only_ids_are_tensors():
    seen = {}

    def judge(pairs, prompts, prompt_ids):
        seen.update(pairs=pairs, prompts=prompts, prompt_ids=prompt_ids)
        return [0 for _ in pairs]

    online = OnlineDPO(model=moe(eos_token_id=3), tokenizer=Letters(), preference_fn=judge, max_new_tokens=5)
    online.train_step(["ab", "d"])
    assert seen["prompts"] == ["ab", "d"]
    assert [ids.tolist() for ids in seen["prompt_ids"]] == [[1, 2], [4]]
    assert [text for pair in seen["pairs"] for text in pair] == [sample["completion"] for sample in online.samples]
