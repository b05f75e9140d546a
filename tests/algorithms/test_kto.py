"""KTO, BCO, APO of single completions: by hand, the shift, learning, and bad input."""

import itertools
import math

import numpy as np
import pytest
import torch
from tiny_models import Letters
from tiny_qwen2 import tiny_qwen2
from trained_models import Bigram, shifted, tiny_moe

from strop.algorithms.kto import KTO, KTOConfig
from strop.losses import UNPAIRED_LOSS_TYPES, UnpairedRule, unpaired_loss

every_loss_type = pytest.mark.parametrize("loss_type", UNPAIRED_LOSS_TYPES)


def random_rows(num_rows, seed=0, vocab_size=20):
    draw = torch.Generator().manual_seed(seed)

    def ids(low, high):
        length = int(torch.randint(low, high, (1,), generator=draw))
        return torch.randint(2, vocab_size, (length,), generator=draw).tolist()

    return [{"prompt": ids(2, 5), "completion": ids(1, 6), "label": i % 3 != 1} for i in range(num_rows)]


def columns(rows):
    return [[row[name] for row in rows] for name in ("prompt", "completion", "label")]


# ---- values ----


@pytest.mark.parametrize("mark", ["", "{% generation %}"], ids=["no marks", "marks"])
def test_what_tools_say_counts_for_nothing(mark):
    """Of completions with several turns, and of those that another prompt is compared with."""
    from chat_templates import of_bytes
    from tiny_models import llama

    said = mark + "{{ m.content }}<|im_end|>" + mark.replace("gen", "endgen")
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + said + "{% else %}"
        "{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokens = of_bytes(template, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>")
    kto = KTO(model=llama(vocab_size=len(tokens), max_length=512), tokenizer=tokens)
    user, tool = {"role": "user", "content": "the inn?"}, {"role": "tool", "content": "13"}
    turns = [[{"role": "assistant", "content": word} for word in words] for words in (("call", "in"), ("ooh", "all"))]
    rows = [{"prompt": [user], "completion": [a, tool, b], "label": True} for a, b in turns]
    lines = kto.prepare(rows)
    counted = [tokens.decode(line.ids_T[line.loss_mask_T]) for line in lines]
    assert counted == ["call<|im_end|>in<|im_end|>", "ooh<|im_end|>all<|im_end|>"]
    others = kto._mismatched(lines)
    assert [tokens.decode(line.ids_T[line.loss_mask_T]) for line in others] == counted[::-1]
    assert [line.ids_T.tolist() for line in others] == [line.ids_T.tolist() for line in lines[::-1]]  # the same prompt


def test_the_formulas_by_hand():
    """β = ½, c = 2 and −1 with labels true and false, a shift of ½: s·(βc − shift) is ½ and 1."""
    policy = torch.tensor([-1.0, -3.0], dtype=torch.float64, requires_grad=True)
    given = policy, torch.tensor([-3.0, -2.0], dtype=torch.float64), torch.tensor([True, False])
    sigma = [1 / (1 + math.exp(-x)) for x in (0.5, 1.0)]
    weights = {"beta": 0.5, "desirable_weight": 2.0, "undesirable_weight": 3.0}
    wanted = {
        "kto": 2 * (1 - sigma[0]) + 3 * (1 - sigma[1]),
        "bco": -2 * math.log(sigma[0]) - 3 * math.log(sigma[1]),
        "apo_zero_unpaired": 2 * (1 - sigma[0]) + 3 * (1 - sigma[1]),
    }
    for loss_type in UNPAIRED_LOSS_TYPES:
        loss, rewards = unpaired_loss(UnpairedRule(loss_type=loss_type, **weights), *given, 0.5)
        assert loss.item() == pytest.approx(wanted[loss_type] / 2)
        assert rewards.tolist() == [1.0, -0.5]
        (gradient,) = torch.autograd.grad(loss, policy)
        slopes = [1 - s if loss_type == "bco" else s * (1 - s) for s in sigma]
        assert gradient.tolist() == pytest.approx([-2 * 0.5 * slopes[0] / 2, 3 * 0.5 * slopes[1] / 2])


def test_the_kl_is_that_of_each_prompt_with_the_completion_before():
    rows = random_rows(4)
    kto = KTO(model=Bigram(), ref_model=shifted(Bigram()), learning_rate=0.0, beta=0.3)
    metrics = kto.train_step(*columns(rows))
    ratios = []
    for row, before in zip(rows, [rows[-1], *rows[:-1]], strict=True):
        ids = row["prompt"][-1:] + before["completion"]
        for a, b in itertools.pairwise(ids):
            logps = [m.table_VV[a].log_softmax(0)[b].item() for m in (kto.model, kto.reference.model)]
            ratios.append(logps[0] - logps[1])
    assert metrics["rewards/shift"] == pytest.approx(0.3 * max(sum(ratios) / 4, 0), abs=1e-5)


def test_a_batch_of_one_row_has_no_shift():
    """As the last of an epoch may be. Compared with its own reward as the KL, it would always be worth nothing."""
    kto = KTO(model=Bigram(), ref_model=shifted(Bigram()), learning_rate=0.0, batch_size=2)
    metrics = [kto.train_step(*columns([row])) for row in random_rows(4)]
    assert [one["rewards/shift"] for one in metrics] == [0.0] * 4
    assert all(abs(one["loss"] - 0.5) > 1e-4 for one in metrics)
    assert kto.evaluate(random_rows(1))["eval/rewards/shift"] == 0


def test_labels_of_numpy_and_torch():
    rows = random_rows(4)
    prompt, completion, label = columns(rows)
    found = set()
    for labels in (label, np.array(label), np.array(label).astype(np.int64), torch.tensor(label), [*np.array(label)]):
        found.add(KTO(model=Bigram(), ref_model=shifted(Bigram())).train_step(prompt, completion, labels)["loss"])
    assert len(found) == 1
    texts = KTO(model=tiny_qwen2(), tokenizer=Letters(), learning_rate=0.0)
    assert texts.train_step(["ab", "cd"], ["e", "f"], torch.tensor([True, False]))["loss"] == pytest.approx(0.5)


def test_bcos_shift_is_the_mean_of_all_rewards_so_far():
    rows = random_rows(12)
    kto = KTO(model=Bigram(), ref_model=shifted(Bigram()), learning_rate=0.0, loss_type="bco")
    shifts = [kto.train_step(*columns(rows[i : i + 4]))["rewards/shift"] for i in (0, 4, 8)]
    together = KTO(model=Bigram(), ref_model=shifted(Bigram()), learning_rate=0.0, loss_type="bco")
    assert shifts[-1] == pytest.approx(together.train_step(*columns(rows))["rewards/shift"], rel=1e-6)
    assert len(set(shifts)) == 3
    before = kto._seen.clone()
    kto.evaluate(rows)
    assert torch.equal(kto._seen, before)


# ---- invariances ----


def test_a_mismatched_completion_is_cut_where_the_context_ends():
    rows = [
        {"prompt": [2] * 30, "completion": [3, 4], "label": True},
        {"prompt": [5], "completion": [6] * 20, "label": False},
    ]
    kto = KTO(model=tiny_moe(), learning_rate=0.0)
    examples = kto.prepare(rows)
    assert [len(line) for line in kto._mismatched(examples)] == [32, 3]


# ---- learning ----


@every_loss_type
def test_it_learns(loss_type):
    """Completions of low ids are desirable, of high ids not; held-out prompts tell."""
    draw = torch.Generator().manual_seed(0)
    rows = [
        {
            "prompt": torch.randint(2, 20, (3,), generator=draw).tolist(),
            "completion": torch.randint(2 if i % 2 else 11, 11 if i % 2 else 20, (4,), generator=draw).tolist(),
            "label": bool(i % 2),
        }
        for i in range(96)
    ]
    kto = KTO(model=tiny_moe(), loss_type=loss_type, learning_rate=1e-2, batch_size=16, beta=0.5)
    history = kto.train(rows[:64], eval_dataset=rows[64:], num_steps=30)
    first, last = history.evaluations[0], history.evaluations[-1]
    assert abs(first["eval/rewards/chosen"]) < 1e-5
    assert last["eval/rewards/chosen"] > last["eval/rewards/rejected"] + 1
    assert last["eval/loss"] < 0.6 * first["eval/loss"]


# ---- bad input ----


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: KTOConfig.from_options(loss_type="dpo"), ValueError, "loss_type must be one of 'kto', 'bco'"),
        (lambda: KTOConfig.from_options(beta=0), ValueError, "beta must be finite and above 0"),
        (lambda: KTOConfig.from_options(desirable_weight=-1), ValueError, "desirable_weight must be finite and at least 0"),
        (lambda: KTOConfig.from_options(batch_size=1), ValueError, "batch_size must be at least 2 for 'kto'"),
        (lambda: KTOConfig.from_options(max_length=1), ValueError, "max_length must be at least 2"),
        (lambda: KTO(model=Bigram()).train_step([[2]], [[3]], ["good"]), TypeError, "row 0: label must be true or false, found 'good'"),
        (lambda: KTO(model=Bigram()).train_step([[2]], [[3]], [2]), TypeError, "row 0: label must be true or false, found 2"),
        (lambda: KTO(model=Bigram()).train_step([[2]], [[3]], [True, False]), ValueError, "label must have 1 rows as prompt has, found 2"),
        (lambda: KTO(model=Bigram()).prepare([{"prompt": [2], "completion": [3]}]), TypeError, "dataset[0]: label must be true or false, found None"),
        (lambda: KTO(model=Bigram()).prepare([{"prompt": [2], "completion": [], "label": 1}]), ValueError, "completion must have at least one"),
        (lambda: KTO(model=Bigram()).prepare([{"text": [2, 3], "label": 1}]), ValueError, "prompt_completion"),
    ],
)  # fmt: skip
def test_mistakes(make, error, message):
    with pytest.raises(error) as raised:
        make()
    assert message in str(raised.value)
