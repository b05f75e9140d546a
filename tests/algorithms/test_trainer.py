"""The parts every algorithm shares: the update, the schedule, phases, events, the order of the data, the run folder."""

import functools
import hashlib
import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_qwen2 import tiny_qwen2
from trained_models import Bigram, tiny_moe, weights_of

from strop.algorithms.dpo import DPO
from strop.algorithms.grpo import GRPO
from strop.algorithms.sft import SFT
from strop.config import OptimConfig
from strop.training import trainer as trainer_module
from strop.training.run import Phases
from strop.training.state import epoch_order
from strop.training.trainer import Trainer, learning_rate_at

ROWS = [{"prompt": [2 + i], "completion": [3 + i, 1]} for i in range(7)]


class Recording(Trainer):
    """Trains on nothing and remembers the rows it was given."""

    def step_on(self, rows):
        self.seen = [*getattr(self, "seen", []), [row["prompt"][0] - 2 for row in rows]]
        return self.update([lambda: self.model.table_VV.square().sum()])

    def train_step(self):
        return self.run_step(lambda: self.step_on(ROWS[:1]))


# ---- the update ----


def test_losses_add_up_and_are_clipped():
    trainer = Recording(
        model=Bigram(3), learning_rate=1.0, max_grad_norm=0.5,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=9.0),
    )  # fmt: skip
    table = trainer.model.table_VV
    before = table.detach().clone()
    metrics = trainer.update([lambda: table[0].sum(), lambda: 2 * table[1].sum()])
    assert metrics["loss"] == pytest.approx((before[0].sum() + 2 * before[1].sum()).item(), abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(15**0.5)  # three ones and three twos
    gradient = torch.tensor([[1.0], [2.0], [0.0]]).expand(3, 3) * 0.5 / 15**0.5
    torch.testing.assert_close(table.detach(), before - gradient)


def test_no_update_on_a_loss_that_is_not_finite():
    trainer = Recording(model=Bigram(3))
    before = weights_of(trainer).clone()
    with pytest.raises(FloatingPointError, match=r"loss nan .* must be finite; the weights are those of step 0"):
        trainer.update([lambda: trainer.model.table_VV.sum() * float("nan")])
    assert torch.equal(weights_of(trainer), before)
    assert trainer.state.updates == 0


def test_an_optimiser_that_can_is_told_to_skip_and_the_step_raises(monkeypatch):
    """As on a GPU, where nobody waits for the loss before the update; those after an unfit one are skipped too."""
    monkeypatch.setattr(trainer_module, "can_skip", lambda optimizer: True)
    trainer = Recording(model=Bigram(3))
    table, seen = trainer.model.table_VV, []

    def updates():
        for factor in (1.0, float("nan"), 1.0):
            trainer.update([lambda factor=factor: table.square().sum() * factor])
            seen.append(weights_of(trainer).clone())
        return trainer.update([lambda: table.square().sum()])

    before = weights_of(trainer).clone()
    with pytest.raises(FloatingPointError, match=r"must be finite; the weights are those of step 0"):
        trainer.run_step(updates)
    assert not torch.equal(seen[0], before)
    assert torch.equal(seen[2], seen[0])
    assert torch.equal(weights_of(trainer), seen[0])
    assert trainer.state.updates == 1
    metrics = trainer.run_step(lambda: trainer.update([lambda: table.square().sum()]))
    assert metrics["loss"] == pytest.approx(seen[0].square().sum().item())
    assert isinstance(metrics["grad_norm"], float)
    assert not torch.equal(weights_of(trainer), seen[0])
    assert trainer.state.updates == 2


@pytest.mark.parametrize("make", [tiny_qwen2, tiny_moe], ids=["qwen2", "moe"])
def test_adamw_is_fused_and_steps_as_torchs_plain_one(make):
    """Also on the MoE, whose parameters lie in the engine's memory."""
    options = {"learning_rate": 1e-2, "weight_decay": 0.1, "eps": 1e-2}  # this eps: m/√v of rounding errors is anything
    fused = SFT(model=make(), **options)
    adamw = functools.partial(torch.optim.AdamW, eps=1e-2, foreach=False, fused=False)
    plain = SFT(model=make(), optimizer=adamw, **options)
    assert all(group["fused"] for group in fused.optimizer.param_groups)
    start = weights_of(fused).clone()
    for _ in range(3):
        for sft in (fused, plain):
            sft.train_step([[2, 3], [5]], [[4, 5, 1], [6, 1]])
    assert (weights_of(fused) - start).abs().max() > 1e-3
    torch.testing.assert_close(weights_of(fused), weights_of(plain), rtol=0, atol=1e-6)
    if make is tiny_moe:
        engine = torch.cat([torch.from_numpy(values).flatten() for values in fused.module.moe.params.values()])
        assert torch.equal(engine.sort().values, weights_of(fused).sort().values)


def test_norms_and_biases_do_not_decay():
    trainer = SFT(model=tiny_qwen2(), weight_decay=0.3, betas=(0.5, 0.6), eps=1e-4, learning_rate=0.1)
    decay = {id(p): group["weight_decay"] for group in trainer.optimizer.param_groups for p in group["params"]}
    for name, param in trainer.module.named_parameters():
        assert decay[id(param)] == (0.0 if "norm" in name or "bias" in name else 0.3), name
    assert trainer.optimizer.defaults["betas"] == (0.5, 0.6)
    assert trainer.optimizer.defaults["eps"] == 1e-4


def test_the_schedules_by_hand():
    linear = OptimConfig(learning_rate=1.0, warmup_steps=2, schedule="linear", min_learning_rate=0.2)
    assert [learning_rate_at(step, 6, linear) for step in range(7)] == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4, 0.2])
    cosine = OptimConfig(learning_rate=1.0, schedule="cosine")
    assert [learning_rate_at(step, 4, cosine) for step in (0, 2, 4)] == pytest.approx([1, 0.5, 0])
    assert learning_rate_at(100, 0, OptimConfig(learning_rate=0.5)) == 0.5
    with pytest.raises(ValueError, match="num_steps must be given for schedule='cosine'"):
        learning_rate_at(0, 0, cosine)


def test_the_optimiser_gets_the_schedule():
    sft = SFT(model=tiny_moe(), learning_rate=0.4, schedule="linear", batch_size=7)
    history = sft.train(ROWS, num_steps=4)
    assert history.values("learning_rate") == pytest.approx([0.4, 0.3, 0.2, 0.1])
    again = sft.train(ROWS, num_steps=2)  # a new run of the same trainer: its schedule begins anew
    assert [entry["step"] for entry in again.steps] == [5, 6]
    assert again.values("learning_rate") == pytest.approx([0.4, 0.2])


# ---- the order of the data ----


def test_every_epoch_sees_every_row_once_in_an_order_of_its_own():
    trainer = Recording(model=Bigram(12), batch_size=3)
    trainer.train(ROWS, num_epochs=2)
    sizes = [len(batch) for batch in trainer.seen]
    assert sizes == [3, 3, 1, 3, 3, 1]
    first, second = (list(itertools.chain(*trainer.seen[i : i + 3])) for i in (0, 3))
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    assert first == list(epoch_order(7, 0, 0, True))
    assert list(epoch_order(7, 1, 0, True)) != first
    plain = Recording(model=Bigram(12), batch_size=3, shuffle=False)
    plain.train(ROWS, num_steps=3)
    assert list(itertools.chain(*plain.seen)) == list(range(7))


def test_the_order_stays_that_of_earlier_versions():
    """Else a run that was begun with one version could not be resumed with the next."""
    assert list(epoch_order(6, 0, 0, True)) == [0, 5, 1, 4, 3, 2]
    assert list(epoch_order(6, 0, 1, True)) == [2, 0, 1, 5, 3, 4]


@pytest.mark.parametrize("num_rows", [1_001, 1_023, 1_024, 1_025, 65_536, 70_001])
@pytest.mark.parametrize("seed", [0, 7])
def test_the_order_of_many_rows_is_that_of_few(num_rows, seed):
    """Compiled code shuffles as Python does."""
    order = list(range(num_rows))
    random.Random(f"{seed}/3").shuffle(order)
    assert list(epoch_order(num_rows, seed, 3, True)) == order
    assert list(epoch_order(num_rows, seed, 3, False)) == list(range(num_rows))


# ---- phases and metrics ----


def test_phases_count_their_own_seconds(monkeypatch):
    clock = itertools.accumulate([100.0, 0.01, 0.03, 0.0, 0.0])  # by what a look at it has gone on
    monkeypatch.setattr("strop.training.run.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    phases = Phases()
    with phases.phase("outer"), phases.phase("inner"):
        pass
    assert phases.seconds == pytest.approx({"inner": 0.03, "outer": 0.01})


def test_phases_of_a_gpu_are_read_off_its_own_course(monkeypatch):
    """Scoring takes the GPU 50 ms and the host none; the reward, 20 ms of the host, ends within it and adds nothing."""
    course = {"gpu": 0.0, "host": 0.0, "waits": 0}

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            """Reached by the GPU when it is done with what was asked before, and not before it is asked."""
            course["gpu"] = self.at = max(course["gpu"], course["host"])

        def elapsed_time(self, end):
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: course.update(waits=course["waits"] + 1))
    phases = Phases(torch.device("cuda"))
    with phases.phase("score"):
        course["gpu"] += 50
    with phases.phase("reward"):
        course["host"] += 20
    with phases.phase("outer"), phases.phase("inner"):
        course["host"] += 90
        course["gpu"] = max(course["gpu"], course["host"]) + 5
    assert course["waits"] == 0
    assert phases.seconds == pytest.approx({"score": 0.05, "reward": 0.0, "outer": 0.0, "inner": 0.065})
    assert course["waits"] == 1


def test_the_metrics_of_a_step():
    sft = SFT(model=tiny_moe())
    metrics = sft.train_step(torch.tensor([[2, 3]]), torch.tensor([[4, 5, 1]]))
    named = {"loss", "grad_norm", "learning_rate", "tokens_per_second", "time/forward", "time/backward", "time/update"}
    assert named <= metrics.keys()
    assert all(isinstance(value, float) for value in metrics.values())
    assert metrics["tokens_per_second"] == pytest.approx(5 / metrics["time/step"])
    assert metrics["completion/length"] == 3
    parts = sum(metrics[f"time/{name}"] for name in ("forward", "backward", "update"))
    assert 0 < parts <= metrics["time/step"]
    assert sft.state.num_tokens == 5


def test_evaluation_changes_nothing():
    """Neither weights nor random numbers nor the mode of any module; the next step is the same."""
    sft = SFT(model=tiny_qwen2(attention_dropout=0.3), dropout=True)
    sft.model.train()
    sft.model.model.layers[0].eval()
    before = weights_of(sft).clone(), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    first = sft.evaluate(ROWS)
    assert sft.evaluate(ROWS) == pytest.approx(first, abs=1e-6)  # no dropout in it
    after = weights_of(sft), torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert before[2] == after[2]
    assert (before[3] == after[3]).all()
    assert sft.model.training
    assert not sft.model.model.layers[0].training


# ---- the run folder ----


def test_the_run_folder(tmp_path):
    rows = [*ROWS, ROWS[0]]
    sft = SFT(model=tiny_moe(), batch_size=4, save_every=2, keep_checkpoints=2, eval_every=2, log_every=2)
    history = sft.train(rows, eval_dataset=rows[:2], num_steps=5, output_dir=tmp_path / "run")
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} == {"run.json", "metrics.jsonl", "checkpoints", "final"}
    about = json.loads((folder / "run.json").read_text())
    assert (about["algorithm"], about["total_steps"], about["num_rows"]) == ("SFT", 5, 8)
    assert about["config"] == sft.config.to_dict()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], "loss" in line, "eval/loss" in line) for line in lines] == [
        (0, False, True), (2, True, False), (2, False, True), (4, True, False), (4, False, True), (5, False, True),
    ]  # fmt: skip
    assert [entry["step"] for entry in history.evaluations] == [0, 2, 4, 5]
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == [
        "step-00000004.safetensors", "step-00000005.safetensors",
    ]  # fmt: skip
    from transformers import AutoModelForCausalLM

    final = AutoModelForCausalLM.from_pretrained(folder / "final")
    ids = torch.tensor([[2, 3, 4]])
    torch.testing.assert_close(final(ids).logits, sft.model(ids).logits, rtol=1e-4, atol=1e-5)


def test_overwrite_removes_the_run_and_nothing_else(tmp_path):
    sft = SFT(model=tiny_moe(), batch_size=4, save_every=1, samples_every=0)
    sft.train(ROWS, num_steps=3, output_dir=tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "report.html").touch()
    again = SFT(model=tiny_moe(), batch_size=4)
    with pytest.raises(ValueError, match=r"resume=True goes on with it, overwrite=True removes it"):
        again.train(ROWS, num_steps=1, output_dir=tmp_path)
    with pytest.raises(ValueError, match="overwrite must be False with resume=True"):
        again.train(ROWS, num_steps=1, output_dir=tmp_path, overwrite=True, resume=True)
    with pytest.raises(ValueError, match="is in no known format"):
        again.train([{"wrong": 1}] * 8, num_steps=1, output_dir=tmp_path, overwrite=True)
    assert (tmp_path / "checkpoints" / "step-00000003.safetensors").exists()  # data with a mistake cost no run
    again.train(ROWS, num_steps=1, output_dir=tmp_path, overwrite=True)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001.safetensors"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "report.html").exists()


def test_overwrite_leaves_a_folder_alone_that_holds_no_run(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "mine.bin").touch()
    SFT(model=tiny_moe(), batch_size=4).train(ROWS, num_steps=1, output_dir=tmp_path, overwrite=True)
    assert (tmp_path / "checkpoints" / "mine.bin").exists()


def reward_of_this_file(completions):
    return [float(len(ids)) for ids in completions]


def test_run_json_says_what_it_takes_to_run_it_again(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--a b"])
    tiny_qwen2().save_pretrained(tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text('{"prompt": [2, 3]}\n' * 4)
    grpo = GRPO(
        model=str(tmp_path / "base"), reward_fn=[reward_of_this_file, functools.partial(reward_of_this_file)],
        batch_size=2, max_new_tokens=2, group_size=2,
    )  # fmt: skip
    grpo.train(tmp_path / "rows.jsonl", num_steps=1, output_dir=tmp_path / "run")
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["command"] == "train.py '--a b'"
    assert about["data"] == str(tmp_path / "rows.jsonl")
    assert about["model"]["name"] == str(tmp_path / "base")
    own = {"file": __file__, "sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}
    assert about["rewards"] == [{"name": "reward_of_this_file", **own}] * 2
    assert {"strop", "torch", "python", "transformers", "numpy"} <= about["versions"].keys()


def test_a_name_for_a_model():
    sft = SFT(model="moe:tiny", learning_rate=0.0)
    assert sft.policy.kind == "moe"
    assert sft.policy.max_length == 512


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: SFT(model=3), TypeError, "model must be"),
        (lambda: SFT(model=Bigram(), config={"beta": 1}), TypeError, "config must be a SFTConfig, found dict"),
        (lambda: SFT(model=Bigram(), gradient_checkpointing=True), ValueError, "gradient_checkpointing must be False"),
        (lambda: SFT(model=Bigram(), optimizer=lambda groups: None), TypeError, "optimizer must return"),
        (lambda: SFT(model=Bigram().requires_grad_(False)), ValueError, "parameters that require a gradient"),
        (
            lambda: SFT(model=tiny_moe(), batch_size=2).train(ROWS, num_steps=-1),
            ValueError,
            "num_steps must be at least 0",
        ),
        (
            lambda: SFT(model=tiny_moe(), batch_size=2).train(ROWS, num_epochs=0),
            ValueError,
            "num_steps or num_epochs must be",
        ),
        (
            lambda: SFT(model=tiny_moe(), callbacks=3),
            TypeError,
            "callbacks must be of strop.callbacks.Callback, found int",
        ),
        (
            lambda: SFT(model=tiny_moe(), tokenizer="gpt2"),
            TypeError,
            "tokenizer must have encode(text) and decode(ids), found a str",
        ),
        (lambda: SFT(model=tiny_moe(), optimizer=3), TypeError, "optimizer must make one of parameter groups"),
        (lambda: SFT(model=tiny_moe(), optimizer="adam"), ValueError, "optimizer must be one of 'adamw', 'adamw8bit'"),
        (lambda: DPO(model=tiny_moe(), ref_model=3), TypeError, "ref_model must be a torch.nn.Module"),
        (lambda: SFT(model=tiny_moe()).train_step(None), TypeError, "prompt must be token ids"),
        (lambda: SFT(model=tiny_moe(), callbacks=[print]), TypeError, "callbacks must be of strop.callbacks.Callback"),
        (lambda: SFT(model=tiny_moe(), logger=print), TypeError, "logger must have log(metrics, step)"),
        (lambda: SFT(model=tiny_moe(), lora={"r": 2}), ValueError, "lora must be None but for Hugging Face models"),
        (lambda: SFT(model=tiny_moe()).train(3), TypeError, "found int"),
        (lambda: SFT(model=tiny_moe()).train("nowhere.jsonl"), FileNotFoundError, "nowhere.jsonl"),
        (lambda: SFT(model=tiny_moe(), colour="red"), ValueError, "'colour' is no option of SFT"),
        (lambda: SFT(model=tiny_moe(), calbacks=[]), ValueError, "did you mean 'callbacks'"),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error) as caught:
        make()
    assert message in str(caught.value)
