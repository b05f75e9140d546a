"""A run that says it is done is done: settings of torch, locks, hashes of what it computes with, checkpoints that stay."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from test_resume import FailAt, Failure
from tiny_qwen2 import tiny_qwen2
from trained_models import tiny_moe, weights_of

from strop._contained import Settings
from strop.algorithms.grpo import GRPO
from strop.algorithms.sft import SFT
from strop.callbacks import Callback
from strop.data.digest import digest_rows
from strop.logging import read_metrics
from strop.models import load_model
from strop.training import lock as lock_module
from strop.training.lock import locked
from strop.user_code import load_function

ROWS = [{"prompt": [2 + i % 7, 3], "completion": [4 + i, 1]} for i in range(10)]
PROMPTS = [{"prompt": [2 + i % 7, 3]} for i in range(4)]
LEFT_OPEN = []  # guards of inference mode, which would end it when they are freed
OPTIONS = {"batch_size": 4, "learning_rate": 1e-2}


def sum_of_ids(completion_ids):
    return [float(ids.sum()) for ids in completion_ids]


def grpo(reward=sum_of_ids, model=None, **options):
    return GRPO(model=tiny_moe() if model is None else model, reward_fn=reward, batch_size=2, group_size=4,
                max_new_tokens=3, learning_rate=1e-2, **options)  # fmt: skip


def sft(**options):
    return SFT(model=tiny_moe(), **{**OPTIONS, **options})


@pytest.fixture(autouse=True)
def same_settings_afterwards():
    before = Settings.now()
    yield
    before.apply()


# ---- settings of torch ----


def test_a_function_that_turns_gradients_off_changes_nothing():
    def turns_off(completion_ids):
        torch.set_grad_enabled(False)
        return sum_of_ids(completion_ids)

    expected, found = grpo(), grpo(turns_off)
    expected.train(PROMPTS, num_steps=3)
    torch.set_grad_enabled(False)  # as a file of rewards does at its top, in a session
    history = found.train(PROMPTS, num_steps=3)
    assert all(step["grad_norm"] > 0 for step in history.steps)
    assert torch.equal(weights_of(found), weights_of(expected))


@pytest.mark.parametrize("where", ["reward", "on_step_begin", "logger"])
def test_steps_have_their_own_settings(where):
    """Dropout draws from its own generator, so that a function may seed whatever it likes."""
    threads = torch.get_num_threads()

    def spoil():
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(threads + 1)
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        LEFT_OPEN.append(torch.inference_mode())
        LEFT_OPEN[-1].__enter__()

    class Spoiling(Callback):
        def on_step_begin(self, trainer):
            spoil()

    class SpoilingLogger:
        def log(self, metrics, step):
            spoil()

    def reward(completion_ids):
        if where == "reward":
            spoil()
        return sum_of_ids(completion_ids)

    model = tiny_qwen2(attention_dropout=0.3)
    expected = grpo(model=model, dropout=True)
    spoilt = grpo(
        reward, tiny_qwen2(attention_dropout=0.3), dropout=True,
        callbacks=[Spoiling()] if where == "on_step_begin" else [],
        logger=SpoilingLogger() if where == "logger" else None,
    )  # fmt: skip
    expected.train(PROMPTS, num_steps=3)
    spoilt.train(PROMPTS, num_steps=3)
    assert LEFT_OPEN
    assert torch.equal(weights_of(spoilt), weights_of(expected))
    assert (torch.get_default_dtype(), torch.get_num_threads()) == (torch.float32, threads)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_a_file_of_functions_leaves_the_settings_alone(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\ntorch.set_grad_enabled(False)\ntorch.set_default_dtype(torch.float64)\ndef f(x): return x\n"
    )
    load_function(f"{file}:f", "reward")
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("on_device", [False, True], ids=["waits", "as-on-a-gpu"])
def test_no_gradient_although_there_is_an_advantage_is_an_error(on_device, monkeypatch):
    if on_device:
        monkeypatch.setattr("strop.training.trainer.can_skip", lambda optimizer: True)
    trainer = grpo(model=tiny_qwen2())
    inner = trainer.model.model.forward
    trainer.model.model.forward = torch.no_grad()(inner)
    for param in trainer.model.lm_head.parameters():
        param.requires_grad_(False)
    before = weights_of(trainer).clone()
    with pytest.raises(
        RuntimeError, match="gradient must not be exactly 0 for all parameters while an advantage is not 0"
    ):
        trainer.train(PROMPTS, num_steps=2)
    assert torch.equal(weights_of(trainer), before)


def test_a_run_without_signal_says_so(capsys):
    grpo(lambda completions: [1.0 for _ in completions]).train(PROMPTS, num_steps=2)
    told = capsys.readouterr().err
    assert "warning: nothing was learned: the gradient was 0 in every step" in told
    assert "the same reward" in told
    grpo().train(PROMPTS, num_steps=2)
    assert "warning" not in capsys.readouterr().err


# ---- checkpoints that stay ----


def test_pruning_keeps_what_can_be_read(tmp_path):
    run = sft(keep_checkpoints=1, save_every=1)
    run.train(ROWS, num_steps=2, output_dir=tmp_path)
    good = tmp_path / "checkpoints" / "step-00000002.safetensors"
    broken = tmp_path / "checkpoints" / "step-00000009.safetensors"
    broken.write_bytes(good.read_bytes()[:1000])
    with pytest.warns(UserWarning, match="taking the one before"):
        sft(keep_checkpoints=1).train(ROWS, num_steps=3, output_dir=tmp_path, resume=True)
    newest = tmp_path / "checkpoints" / "step-00000003.safetensors"
    assert newest.exists()
    assert not good.exists()
    assert SFT.from_checkpoint(newest).state.step == 3
    sft(keep_checkpoints=2, save_every=1).train(ROWS, num_steps=5, output_dir=tmp_path, resume=True)
    kept = sorted(path.name for path in broken.parent.iterdir())
    assert kept == ["step-00000004.safetensors", "step-00000005.safetensors"]


def test_pruning_does_not_count_an_older_one_that_is_broken(tmp_path):
    sft(keep_checkpoints=0, save_every=1).train(ROWS, num_steps=3, output_dir=tmp_path)
    folder = tmp_path / "checkpoints"
    torn = folder / "step-00000003.safetensors"
    torn.write_bytes(torn.read_bytes()[:-5])
    resumed = sft(keep_checkpoints=2, seed=0)
    with pytest.warns(UserWarning, match="taking the one before"):
        resumed.train(ROWS, num_steps=2, output_dir=tmp_path, resume=True)
    names = sorted(path.name for path in folder.iterdir())
    assert "step-00000001.safetensors" in names
    assert "step-00000002.safetensors" in names


# ---- one process at a time ----

HOLDER = """
import sys, time
from pathlib import Path
from strop.training.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_and_a_dead_ones_lock_is_taken_over(tmp_path):
    sft(save_every=1).train(ROWS, num_steps=1, output_dir=tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        for options in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(
                ValueError, match=rf"output_dir must not be in use: process {holder.pid} on .* writes to"
            ):
                sft().train(ROWS, num_steps=2, output_dir=tmp_path, **options)
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
    finally:
        holder.kill()
        holder.communicate()
    sft().train(ROWS, num_steps=2, output_dir=tmp_path, resume=True)
    assert [entry["step"] for entry in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert not (tmp_path / lock_module.FILE).exists()


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    """As a worker of the run would, that lives on for a moment when the run is killed."""
    with locked(tmp_path):
        child = os.fork()
        if not child:
            time.sleep(30)
            os._exit(0)
    try:
        with locked(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_disk_without_locks_is_told(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(lock_module.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock_module.fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="is on a disk without locks"), locked(tmp_path):
        pass


# ---- what a resumed run computes with ----


def write_reward(path, factor):
    path.write_text(
        f"def reward(completion_ids):\n    return [{factor} * float(ids.sum()) for ids in completion_ids]\n"
    )
    return load_function(f"{path}:reward", "reward")


def test_resume_refuses_another_reward_file_and_remembers_the_first(tmp_path):
    first = write_reward(tmp_path / "mine.py", 1.0)
    grpo(first, save_every=1).train(PROMPTS, num_steps=1, output_dir=tmp_path / "run")
    begun = json.loads((tmp_path / "run" / "run.json").read_text())["sources"]
    second = write_reward(tmp_path / "mine.py", 2.0)
    with pytest.raises(ValueError, match=r"was begun with another function reward .*allow_changes=True"):
        grpo(second).train(PROMPTS, num_steps=2, output_dir=tmp_path / "run", resume=True)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["sources"] == begun
    grpo(second).train(PROMPTS, num_steps=2, output_dir=tmp_path / "run", resume=True, allow_changes=True)
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["earlier_sources"] == [{"until_step": 1, **begun}]
    assert about["sources"]["function reward"] != begun["function reward"]
    grpo(second).train(PROMPTS, num_steps=3, output_dir=tmp_path / "run", resume=True)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["earlier_sources"] == about["earlier_sources"]


def test_resume_refuses_another_reward_of_a_notebook(tmp_path):
    def of_cell(factor):
        exec(f"def reward(completion_ids): return [{factor} * float(ids.sum()) for ids in completion_ids]", names := {})
        return names["reward"]

    grpo(of_cell(1.0), save_every=1).train(PROMPTS, num_steps=1, output_dir=tmp_path)
    with pytest.raises(ValueError, match="was begun with another function reward"):
        grpo(of_cell(2.0)).train(PROMPTS, num_steps=2, output_dir=tmp_path, resume=True)
    grpo(of_cell(1.0)).train(PROMPTS, num_steps=2, output_dir=tmp_path, resume=True)


def test_resume_refuses_other_rows_of_the_same_number(tmp_path):
    sft(save_every=1).train(ROWS, num_steps=1, output_dir=tmp_path)
    others = [*ROWS[:5], {"prompt": [2, 3], "completion": [9, 1]}, *ROWS[6:]]
    with pytest.raises(ValueError, match="was begun with another dataset"):
        sft().train(others, num_steps=2, output_dir=tmp_path, resume=True)
    assert sft().train(others, num_steps=2, output_dir=tmp_path, resume=True, allow_changes=True).steps[-1]["step"] == 2


def test_digests_of_rows(tmp_path):
    rows = [{"prompt": f"text {i}", "n": i, "ids": [i, i + 1], "x": None, "y": 0.5} for i in range(2500)]
    digest = digest_rows(rows)
    assert digest_rows([dict(row) for row in json.loads(json.dumps(rows))]) == digest
    for i in (0, 1300, 2499):
        changed = [dict(row) for row in rows]
        changed[i]["ids"] = [i, i + 2]
        assert digest_rows(changed) != digest
    assert digest_rows(rows[::-1]) != digest
    with_tensors = [{"ids": torch.tensor([1, 2])}, {"ids": torch.tensor([3])}]
    assert digest_rows(with_tensors) != digest_rows([{"ids": torch.tensor([1, 2])}, {"ids": torch.tensor([4])}])


def test_digest_of_streamed_rows(tmp_path):
    from strop.data.formats import read_rows

    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"text {i}"}) + "\n" for i in range(100)))
    first = digest_rows(read_rows(file, stream=True))
    assert digest_rows(read_rows(file, stream=True)) == first
    assert digest_rows(read_rows(file, stream=True).mapped(lambda row, i: {"prompt": "Q: " + row["prompt"]})) != first
    text = file.read_text()
    file.write_text(text.replace("text 51", "text 15"))
    assert digest_rows(read_rows(file, stream=True)) != first


def test_digest_of_a_dataset_reads_no_rows():
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"text {i}", "n": i} for i in range(2500)]
    one, other = datasets.Dataset.from_list(rows), datasets.Dataset.from_list(rows)
    assert digest_rows(one) == digest_rows(other)
    assert digest_rows(one.select(range(1, 2500))) != digest_rows(one.select(range(2499)))


# ---- models ----


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_that_lacks_a_tensor_is_refused(tied, tmp_path):
    from safetensors.torch import load_file, save_file

    tiny_qwen2(tie_word_embeddings=tied).save_pretrained(tmp_path)
    load_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"model must hold all its tensors, found .* without {name}"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match=f"without {name}"):  # its new head is not what is missed
        load_model(tmp_path, scores=True)


def test_weights_in_float16_are_not_trained():
    with pytest.raises(TypeError, match=r'must not be trained in float16.*autocast="bf16"'):
        SFT(model=tiny_qwen2().half())
    adapted = SFT(model=tiny_qwen2().half(), lora={"r": 2}, batch_size=4)
    assert all(param.dtype == torch.float32 for param in adapted.module.parameters() if param.requires_grad)


# ---- sys.exit ----


@pytest.mark.parametrize("where", ["reward", "on_step_end", "on_train_end", "logger"])
def test_code_that_ends_the_program_is_an_error(where, tmp_path):
    class Exits(Callback):
        def on_step_end(self, trainer, metrics):
            if where == "on_step_end":
                sys.exit(0)

        def on_train_end(self, trainer, history):
            if where == "on_train_end":
                sys.exit(0)

    class ExitsLogger:
        def log(self, metrics, step):
            if where == "logger":
                sys.exit(0)

    def reward(completion_ids):
        if where == "reward":
            sys.exit(0)
        return sum_of_ids(completion_ids)

    with pytest.raises((RuntimeError, ValueError), match=r"sys.exit\(0\) was called at .*test_runs.py, line \d+"):
        grpo(reward, callbacks=[Exits()], logger=ExitsLogger()).train(PROMPTS, num_steps=2, output_dir=tmp_path)
    assert not (tmp_path / "final").exists()


# ---- metrics ----


def test_an_evaluation_after_the_last_checkpoint_is_logged_once(tmp_path, monkeypatch):
    """The run is killed between its last evaluation and its last checkpoint."""
    folder = tmp_path / "run"
    plain = sft(save_every=2)
    close = "strop.training.folder.RunFolder.close"
    with monkeypatch.context() as patch:
        patch.setattr(close, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            plain.train(ROWS, eval_dataset=ROWS[:2], num_steps=2, output_dir=folder)
    sft(save_every=2).train(ROWS, eval_dataset=ROWS[:2], num_steps=2, output_dir=folder, resume=True)
    evaluated = [entry["step"] for entry in read_metrics(folder / "metrics.jsonl") if "eval/loss" in entry]
    assert evaluated == [0, 2]


@pytest.mark.parametrize("kept_lines", [None, 1])
def test_metrics_that_are_shorter_than_the_checkpoint_are_told(kept_lines, tmp_path):
    sft(save_every=1).train(ROWS, num_steps=3, output_dir=tmp_path)
    file = tmp_path / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.unlink()
    if kept_lines is not None:
        file.write_text("".join(lines[:kept_lines]))
    with pytest.warns(UserWarning, match=r"metrics.jsonl must have the steps up to 3"):
        sft().train(ROWS, num_steps=4, output_dir=tmp_path, resume=True)


# ---- the folder ----


def test_output_is_where_it_was_when_the_run_began(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    class Moves(Callback):
        def on_step_end(self, trainer, metrics):
            os.chdir(tmp_path / "elsewhere")

    history = sft(callbacks=[Moves()]).train(ROWS, num_steps=2, output_dir="run")
    assert Path(history.checkpoint) == tmp_path / "run" / "checkpoints" / "step-00000002.safetensors"
    assert (tmp_path / "run" / "final").is_dir()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_failure_in_the_first_step_offers_nothing_to_go_on_from(tmp_path):
    with pytest.raises(Failure) as failed:
        sft(callbacks=[FailAt(1, "begin")]).train(ROWS, num_steps=2, output_dir=tmp_path / "a")
    assert not getattr(failed.value, "__notes__", [])
    assert not list((tmp_path / "a").glob("checkpoints/*"))
    with pytest.raises(Failure) as failed:
        sft(callbacks=[FailAt(2, "begin")]).train(ROWS, num_steps=2, output_dir=tmp_path / "b")
    assert "the run up to step 1" in failed.value.__notes__[0]
