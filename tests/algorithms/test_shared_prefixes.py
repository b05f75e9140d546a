"""Sharing the prompt's forward and backward changes no loss, no metric and no weight of any algorithm."""

import pytest
import torch

from strop.algorithms.distill import Distill
from strop.algorithms.dpo import DPO
from strop.algorithms.grpo import GRPO
from strop.algorithms.kto import KTO
from strop.algorithms.online_dpo import OnlineDPO
from strop.algorithms.ppo import PPO
from strop.algorithms.reward_model import RewardModel
from strop.algorithms.sft import SFT
from strop.data.batch import TokenBatch

GENERATOR = torch.Generator().manual_seed(0)
PROMPTS = [torch.randint(2, 30, (n,), generator=GENERATOR).tolist() for n in (60, 40)]
PAIRS = [([p, p, p][i], [3 + i, 4, 5 + i], [9, 8 + i]) for p in PROMPTS for i in range(3)]


def neox(kind="ForCausalLM", **changes):
    """A model in float64 without a float32 inside, as RMSNorm of transformers has one."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        vocab_size=30, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, eos_token_id=1,
        pad_token_id=0, bos_token_id=None, max_position_embeddings=128, initializer_range=0.3, **changes,
    )  # fmt: skip
    return getattr(transformers, f"GPTNeoX{kind}")(config).double()


def count_low(completions):
    return [float((ids < 15).float().mean()) for ids in completions]


SAMPLED = {"max_new_tokens": 6, "batch_size": 2}
STEPS = {  # name → make a trainer with these options, and its arguments of train_step
    "grpo": (lambda **o: GRPO(model=neox(), reward_fn=count_low, group_size=6, kl_coef=0.1, **SAMPLED, **o), (PROMPTS,)),
    "ppo": (lambda **o: PPO(model=neox(), reward_fn=count_low, group_size=6, kl_coef=0.1, **SAMPLED, **o), (PROMPTS,)),
    "ppo with a critic": (
        lambda **o: PPO(
            model=neox(), reward_fn=count_low, group_size=6, critic=neox("ForSequenceClassification", num_labels=1),
            **SAMPLED, **o,
        ),
        (PROMPTS,),
    ),
    "online_dpo": (lambda **o: OnlineDPO(model=neox(), reward_fn=count_low, **SAMPLED, **o), (PROMPTS * 3,)),
    "distill": (
        lambda **o: Distill(model=neox(), teacher=neox(rotary_pct=0.5), **SAMPLED, **o), ([PROMPTS[0]] * 3,)
    ),
    "dpo": (lambda **o: DPO(model=neox(), **o), tuple(map(list, zip(*PAIRS, strict=True)))),
    "reward_model": (
        lambda **o: RewardModel(model=neox("ForSequenceClassification", num_labels=1), **o),
        tuple(map(list, zip(*PAIRS, strict=True))),
    ),
    "kto": (lambda **o: KTO(model=neox(), **o), ([p for p, *_ in PAIRS], [c for _, c, _ in PAIRS], [1, 0, 1, 0, 0, 1])),
    "sft": (lambda **o: SFT(model=neox(), **o), ([p for p, *_ in PAIRS], [c for _, c, _ in PAIRS])),
}  # fmt: skip


@pytest.fixture
def num_shared(monkeypatch):
    """Counts the forwards that read a prefix once, by tokens that were not read again."""
    found, read = [], TokenBatch.with_prefixes

    def counted(batch, groups):
        once = read(batch, groups)
        if len(groups) == 1 and len(groups[0][1]) == 2 and batch.num_tokens < 30:  # the trial
            return once
        found.append(batch.num_tokens - once.num_tokens)
        return once

    monkeypatch.setattr(TokenBatch, "with_prefixes", counted)
    return found


def step_of(name, **options):
    make, arguments = STEPS[name]
    torch.manual_seed(0)
    trainer = make(optimizer=torch.optim.SGD, learning_rate=0.1, **options)
    metrics = trainer.train_step(*arguments)
    timeless = {
        key: value for key, value in metrics.items() if not key.startswith("time/") and key != "tokens_per_second"
    }
    return timeless, [param.detach().clone() for param in trainer.module.parameters()]


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_that_without_sharing(name, num_shared):
    wanted = step_of(name, share_prefixes="never")
    assert num_shared == []
    for num_tokens in (6144, 160, 70):  # groups together; apart; cut, so that each part reads its prompt
        found = step_of(name, micro_batch_tokens=num_tokens)
        assert sum(num_shared) > 0 or num_tokens == 70
        assert found[0] == pytest.approx(wanted[0], rel=1e-9, abs=1e-10)
        torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=1e-10)
        num_shared.clear()
