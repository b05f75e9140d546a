"""BestOfN: the best of what was sampled, in the form the prompts came in."""

import pytest
import torch
from tiny_models import Letters, every_kind, moe, plain

from strop.algorithms.best_of_n import BestOfN
from strop.models import as_policy
from strop.rollout import Sampling, generate

PROMPTS = [[1, 2, 3], [4], [7, 8, 9, 10, 11], [12, 13]]


def count_low(completions):
    return [float((ids < 15).sum()) for ids in completions]


@every_kind
def test_best_of_eight_beats_one_sample(make):
    model = make(eos_token_id=3)
    prompts = [[1 + i % 29, 2] for i in range(40)]
    best = BestOfN(model=model, reward_fn=count_low, n=8, max_new_tokens=6, seed=0)
    best.generate(prompts)
    one = generate(as_policy(model), prompts, Sampling(max_new_tokens=6), seed=1)
    rewards = torch.tensor(count_low(one.completion_ids))
    assert best.rewards.mean() > rewards.mean() + 1


def test_it_is_the_best_of_what_was_sampled():
    seen = []

    def reward(completion_ids, prompt_ids):
        seen.append((prompt_ids, completion_ids))
        return count_low(completion_ids)

    best = BestOfN(model=moe(eos_token_id=[3, 6]), reward_fn=reward, n=5, max_new_tokens=4, seed=0)
    output = best.generate(PROMPTS)
    prompt_ids, completion_ids = seen[0]
    assert [ids.tolist() for ids in prompt_ids] == [p for p in PROMPTS for _ in range(5)]
    rewards = torch.tensor(count_low(completion_ids)).view(4, 5)
    assert torch.equal(best.all_rewards, rewards)
    assert torch.equal(best.rewards, rewards.max(1).values)
    assert output.shape == (4, 5 + max(map(len, best.completion_ids)))
    for row, prompt, completion, reward_of in zip(output, PROMPTS, best.completion_ids, best.rewards, strict=True):
        assert row[5 - len(prompt) : 5].tolist() == prompt
        assert row[5 : 5 + len(completion)].tolist() == completion.tolist()
        assert count_low([completion]) == [reward_of.item()]
        pad = as_policy(moe(eos_token_id=[3, 6])).pad_id
        assert set(row[5 + len(completion) :].tolist()) <= {pad}
        assert set(row[: 5 - len(prompt)].tolist()) <= {pad}


def test_a_tensor_of_prompts_comes_back_as_it_was():
    prompts, mask = torch.tensor([[0, 1, 2], [4, 5, 6]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    for given, options in ((prompts, {"pad_id": 0}), ({"input_ids": prompts, "attention_mask": mask}, {})):
        best = BestOfN(model=plain(), reward_fn=count_low, n=2, max_new_tokens=4, **options)
        assert torch.equal(best.generate(given)[:, :3], prompts)


def test_texts_for_texts():
    def reward(completions, answer):
        assert all(isinstance(c, str) for c in completions)
        return [c.count(a) for c, a in zip(completions, answer, strict=True)]

    best = BestOfN(model=moe(eos_token_id=3), reward_fn=reward, tokenizer=Letters(), n=64, max_new_tokens=6, seed=0)
    texts = best.generate(["ab", "d"], answer=["e", "f"])
    assert [t.count(a) for t, a in zip(texts, ["e", "f"], strict=True)] == best.rewards.tolist()
    assert min(best.rewards) >= 1
    assert best.generate([{"prompt": "ab", "answer": "e"}]) != texts[:1]  # every call draws anew
    again = BestOfN(model=moe(eos_token_id=3), reward_fn=reward, tokenizer=Letters(), n=64, max_new_tokens=6, seed=0)
    assert again.generate(["ab", "d"], answer=["e", "f"]) == texts
    ids = again.generate([[1, 2], [4]], answer=["e", "f"])
    assert isinstance(ids, torch.Tensor)


def test_a_folder_for_a_model(tmp_path):
    moe().moe.save(tmp_path / "model")
    for name in (tmp_path / "model", str(tmp_path / "model")):
        assert BestOfN(model=name, reward_fn=lambda c: [0.0] * len(c), n=2, max_new_tokens=2).policy.kind == "moe"


def test_bad_input():
    with pytest.raises(ValueError, match="n must be at least 1, found 0"):
        BestOfN(model=moe(), reward_fn=count_low, n=0)
    with pytest.raises(ValueError, match="'max_tokens' is no option of BestOfN; did you mean 'max_new_tokens'"):
        BestOfN(model=moe(), reward_fn=count_low, max_tokens=5)
    with pytest.raises(TypeError, match="seed must be an int, found str"):
        BestOfN(model=moe(), reward_fn=count_low, seed="x")
    with pytest.raises(ValueError, match=r"seed must be at least 0 and below 2\*\*63, found 1180591620717411303424"):
        BestOfN(model=moe(), reward_fn=count_low, seed=2**70)
    with pytest.raises(ValueError, match="reward_timeout must be finite and above 0, found -1"):
        BestOfN(model=moe(), reward_fn=count_low, reward_timeout=-1)
