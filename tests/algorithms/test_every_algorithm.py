"""What holds for every algorithm that learns from rows: TRL's numbers, ragged rows, micro-batches, packing, runs that go on."""

import json
from pathlib import Path

import pytest
import torch
from tiny_models import read_padded
from tiny_qwen2 import tiny_qwen2
from trained_models import Bigram, shifted, tiny_moe, weights_of, whole_and_resumed

from strop.algorithms.dpo import DPO
from strop.algorithms.kto import KTO
from strop.algorithms.reward_model import RewardModel
from strop.algorithms.sft import SFT
from strop.losses import UNPAIRED_LOSS_TYPES

COLUMNS = {
    "sft": ("prompt", "completion"), "dpo": ("prompt", "chosen", "rejected"), "kto": ("prompt", "completion", "label"),
    "reward": ("prompt", "chosen", "rejected", "margin"),
}  # fmt: skip
METRICS = {  # besides the loss
    "sft": (), "dpo": ("preference/accuracy", "preference/margin", "rewards/chosen"),
    "kto": ("rewards/shift", "rewards/chosen", "rewards/rejected"),
    "reward": ("preference/accuracy", "preference/margin", "reward/mean"),
}  # fmt: skip
TRL = {
    name: json.loads(Path(__file__).with_name(f"trl_{name}_trajectory.json").read_text())
    for name in ("dpo", "kto", "reward")
}


def classifier():
    return tiny_qwen2("ForSequenceClassification", num_labels=1)


def trainer_of(name, make=tiny_qwen2, **options):
    """A trainer whose reference, if it has one, is another model."""
    if name == "sft":
        return SFT(model=make(), **options)
    if name == "reward":
        return RewardModel(model=classifier(), **options)
    return {"dpo": DPO, "kto": KTO}[name](model=make(), ref_model=shifted(make()), **options)


def random_rows(num_rows):
    draw = torch.Generator().manual_seed(0)

    def ids(low, high):
        length = int(torch.randint(low, high, (1,), generator=draw))
        return torch.randint(2, 20, (length,), generator=draw).tolist()

    rows = [{"prompt": ids(2, 5), "chosen": ids(1, 6), "rejected": ids(1, 6)} for _ in range(num_rows)]
    return [row | {"completion": row["chosen"], "label": i % 3 != 1, "margin": i / 4} for i, row in enumerate(rows)]


def train_step(name, trainer, rows):
    return trainer.train_step(*([row[column] for row in rows] for column in COLUMNS[name]))


@pytest.mark.parametrize(("name", "run"), [(name, run) for name, known in TRL.items() for run in known["runs"]])
def test_four_steps_are_those_of_trl(name, run):
    known, given = TRL[name], TRL[name]["runs"][run]["options"]
    options = {option: known[option] for option in ("learning_rate", "schedule", "num_steps")}
    if name == "reward":
        trainer = RewardModel(model=classifier(), center_coef=given["center_rewards_coefficient"], **options)
    else:
        model = {"model": tiny_qwen2(), "ref_model": tiny_qwen2(), "micro_batch_size": 3}
        trainer = {"dpo": DPO, "kto": KTO}[name](**model, beta=known["beta"], loss_type=run, **options, **given)
    found, steps = [], known["runs"][run]["steps"]
    for step in steps:
        found.append(train_step(name, trainer, step["batch"]))
        if "kl" in step:
            assert found[-1]["rewards/shift"] == pytest.approx(known["beta"] * step["kl"], abs=1e-5)
    losses = [metrics["loss"] for metrics in found]
    torch.testing.assert_close(losses, [step["loss"] for step in steps], rtol=1e-6, atol=1e-5)
    assert len(set(losses)) == known["num_steps"]
    assert run != "kto" or sum(step["kl"] for step in steps) > 1


@pytest.mark.parametrize("make", [tiny_qwen2, tiny_moe, Bigram], ids=["qwen2", "moe", "plain"])
@pytest.mark.parametrize("name", COLUMNS)
def test_a_ragged_batch_is_its_rows(name, make):
    """Of tokens for SFT, of rows for the others. Without a shift for KTO, which the rows of a batch have in common."""
    if name == "reward" and make is not tiny_qwen2:
        pytest.skip("a reward model is one of transformers")
    rows = random_rows(5)
    options = {"dpo": {"beta": 0.3}, "kto": {"loss_type": "apo_zero_unpaired"}, "reward": {"center_coef": 0.1}}.get(
        name, {}
    )
    trainer = trainer_of(name, make, learning_rate=0.0, **options)
    whole, alone = train_step(name, trainer, rows), [train_step(name, trainer, [row]) for row in rows]
    weights = [len(row["completion"]) if name == "sft" else 1 for row in rows]
    for metric in ("loss", *(METRICS[name] if name != "kto" else ())):
        mean = sum(w * metrics[metric] for w, metrics in zip(weights, alone, strict=True)) / sum(weights)
        assert whole[metric] == pytest.approx(mean, abs=3e-6), metric
    assert len({metrics["loss"] for metrics in alone}) == 5


MICRO_BATCHES = [
    *(("sft", make, {}) for make in (tiny_qwen2, tiny_moe, Bigram)),
    *(("dpo", tiny_qwen2, {"loss_type": loss_type}) for loss_type in ("sigmoid", ("simpo", "sft"))),
    *(("dpo", tiny_moe, {"loss_type": loss_type}) for loss_type in ("ipo", ("sigmoid", "orpo", "sft"))),
    *(("kto", tiny_qwen2, {"loss_type": loss_type}) for loss_type in UNPAIRED_LOSS_TYPES),
    ("kto", tiny_moe, {}), ("reward", tiny_qwen2, {"center_coef": 0.1}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "make", "options"), MICRO_BATCHES)
@pytest.mark.filterwarnings("ignore:ref_model has no effect")
def test_micro_batches_change_nothing(name, make, options):
    """Numbers of the whole batch divide, not those of a micro-batch: rows of unequal length weigh the same either way."""
    rows, after = random_rows(8), []
    for size, tokens in ((0, 0), (1, 0), (3, 16384), (0, 20)):
        sizes = {"micro_batch_size": size, "micro_batch_tokens": tokens}
        trainer = trainer_of(
            name, make, learning_rate=0.1, max_grad_norm=0, optimizer=torch.optim.SGD, **sizes, **options
        )
        metrics = train_step(name, trainer, rows)
        after.append(([metrics[metric] for metric in ("loss", "grad_norm", *METRICS[name])], weights_of(trainer)))
    for numbers, weights in after[1:]:
        torch.testing.assert_close(numbers, after[0][0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(weights, after[0][1], rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sft", {}),
        ("sft", {"attn_implementation": "eager"}),
        ("dpo", {}),
        ("dpo", {"loss_type": "ipo"}),
        ("kto", {}),
        ("reward", {}),
    ],
)
def test_packing_changes_no_loss_and_no_gradient(name, options):
    attention = {key: value for key, value in options.items() if key == "attn_implementation"}
    options, results = {key: value for key, value in options.items() if key not in attention}, []
    for packs in (False, True):
        trainer = trainer_of(
            name, lambda: tiny_qwen2(**attention), max_length=24, learning_rate=0.1, max_grad_norm=0,
            optimizer=torch.optim.SGD, **options,
        )  # fmt: skip
        reference = getattr(trainer, "reference", None)
        for policy in (trainer.policy, *([] if reference is None else [reference.policy])):
            if not packs:
                read_padded(policy)
            assert policy.packs == packs
        metrics = train_step(name, trainer, random_rows(6))
        results.append(([metrics[metric] for metric in ("loss", *METRICS[name])], weights_of(trainer)))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=2e-6)


RUNS = [
    ("kto", tiny_moe, {}), ("kto", tiny_moe, {"loss_type": "bco"}), ("reward", tiny_qwen2, {}),
    ("reward", tiny_qwen2, {"lora": {"r": 2, "alpha": 4}}), ("dpo", tiny_moe, {}), ("dpo", Bigram, {}),
    ("dpo", tiny_qwen2, {"lora": {"r": 2, "alpha": 4}}), ("dpo", lambda: tiny_qwen2(attention_dropout=0.2), {"dropout": True}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "make", "options"), RUNS)
def test_a_run_that_goes_on_is_the_whole_run(name, make, options, tmp_path):
    options = {
        "batch_size": 4,
        "learning_rate": 1e-2,
        "schedule": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        **options,
    }
    rows = [{column: row[column] for column in COLUMNS[name]} for row in random_rows(10)]
    given = {"model": Bigram()} if make is Bigram else {}  # the files of a plain module say no more than its weights
    whole, resumed = whole_and_resumed(lambda: trainer_of(name, make, **options), rows, tmp_path, 6, **given)
    if name == "kto":
        assert torch.equal(resumed._seen, whole._seen)
