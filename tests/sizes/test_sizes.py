"""Real sizes: tokenizers, files, prompts, conversations, runs and vocabularies, each with a bound on time and memory.

Time is CPU time, which other work on the machine changes little. `make test-sizes` runs all; those that take seconds run with
all other tests.
"""

import json
import random
import time

import pytest
import torch
from size_makers import chat, measured, prompt, sentences, write_rows, write_tokenizer
from tiny_qwen2 import tiny_qwen2

from strop.algorithms.sft import SFT
from strop.data.tokenize import encode_prompt, encode_rows
from strop.models.loading import load_tokenizer

sizes = pytest.mark.sizes
LARGE_VOCAB = 262_144


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sizes")


@pytest.fixture(scope="module")
def tokenizer(folder):
    pytest.importorskip("transformers")
    write_tokenizer(folder / "tokenizer", 49_152)
    return load_tokenizer(folder / "tokenizer")


def cpu_seconds(work):
    start = time.process_time()
    work()
    return time.process_time() - start


# ---- tokenizers ----


@pytest.mark.parametrize(
    ("num_tokens", "most"), [(49_152, 2.0), pytest.param(150_000, 5.0, marks=sizes), pytest.param(262_144, 8.0, marks=sizes)]
)  # fmt: skip
def test_a_tokenizer_in_a_folder_opens_in_seconds(tmp_path, num_tokens, most):
    pytest.importorskip("transformers")
    write_tokenizer(tmp_path, num_tokens)
    assert cpu_seconds(lambda: load_tokenizer(tmp_path)) <= most


# ---- rows ----


@pytest.mark.parametrize(
    ("num_rows", "seconds"), [(20_000, 0.25), pytest.param(1_000_000, 1.0, marks=sizes)], ids=["20k", "1M"]
)
def test_rows_of_a_file_take_the_memory_of_the_file(tmp_path, num_rows, seconds):
    write_rows(path := tmp_path / "rows.jsonl", num_rows, prompt)
    prepare = "from strop.data.formats import load_rows"
    taken, megabytes = measured(prepare, f"rows = load_rows('rows.jsonl'); assert len(rows) == {num_rows}", tmp_path)
    assert taken <= seconds
    assert megabytes <= path.stat().st_size / 1e6 * 1.2 + 30


@pytest.mark.parametrize(
    ("num_rows", "seconds"), [(20_000, 1.0), pytest.param(1_000_000, 30.0, marks=sizes)], ids=["20k", "1M"]
)
def test_data_check_keeps_no_rows(tmp_path, num_rows, seconds):
    write_rows(tmp_path / "rows.jsonl", num_rows, chat)
    prepare = "from strop.cli.data import app\nfrom strop.data import formats, tokenize"
    taken, megabytes = measured(prepare, "app(['check', 'rows.jsonl'], standalone_mode=False)", tmp_path)
    assert taken <= seconds
    assert megabytes <= 25


PREPARE = """
from tiny_qwen2 import tiny_qwen2
from strop import {kind}
from strop.callbacks import Callback
from strop.models.loading import load_tokenizer
tokenizer = load_tokenizer('tokenizer')
class Stop(Callback):
    def on_step_end(self, trainer, metrics): trainer.stop('measured')
trainer = {kind}(model=tiny_qwen2(vocab_size=len(tokenizer), max_position_embeddings=2048), tokenizer=tokenizer,
                 batch_size=2, num_steps=9, callbacks=Stop(), {options})
trainer.train('few.jsonl', progress=False)  # imports and whatever else a first step does once
trainer.goes_on = False
"""
ALGORITHMS = {
    "SFT": (chat, ""),
    "GRPO": (prompt, "reward_fn=lambda completions, answer: [0.0, 1.0] * (len(completions) // 2), max_new_tokens=2, group_size=2"),
}  # fmt: skip


@sizes
@pytest.mark.parametrize("kind", ALGORITHMS)
@pytest.mark.parametrize(("num_rows", "seconds"), [(1_000_000, 1.5), (5_000_000, 5.0)], ids=["1M", "5M"])
def test_the_first_of_millions_of_rows_is_trained_on_within_seconds(folder, tokenizer, kind, num_rows, seconds):
    row_of, options = ALGORITHMS[kind]
    write_rows(path := folder / f"{kind}.jsonl", num_rows, row_of)
    write_rows(folder / "few.jsonl", 8, row_of)
    size, prepare = path.stat().st_size / 1e6, PREPARE.format(kind=kind, options=options)
    train = f"trainer.train('{kind}.jsonl', progress=False, output_dir='{kind}{num_rows}')"
    taken, megabytes = measured(prepare, train, folder)
    path.unlink()
    assert taken <= seconds
    assert megabytes <= 1.2 * size + 150  # a step alone takes some


def test_chats_of_a_file_are_prepared_3000_a_second_on_a_core(folder, tokenizer):
    """Read, rendered, encoded and made into trajectories; the tokenizer's threads count too."""
    write_rows(folder / "chats.jsonl", 2_048, chat)
    model = tiny_qwen2(vocab_size=len(tokenizer), max_position_embeddings=2048)
    rows = SFT(model=model, tokenizer=tokenizer, batch_size=2).prepared(folder / "chats.jsonl")
    taken = min(cpu_seconds(lambda: list(rows)) for _ in range(3))
    assert 100 <= len(rows[0]) <= 250
    assert len(rows) / taken >= 3_000


# ---- long prompts and conversations ----


def test_a_conversation_of_200_turns_is_encoded_in_a_second(tokenizer):
    row = chat(random.Random(0), num_turns=200, num_words=10)
    found = []
    assert cpu_seconds(lambda: found.extend(encode_rows([row], tokenizer, "rows"))) <= 1.0
    _, ids, loss_mask = found[0]
    ends = [
        i
        for i, (token, trained) in enumerate(zip(ids, loss_mask, strict=True))
        if trained and token == tokenizer.eos_token_id
    ]
    assert len(ends) == 200  # each of the assistant's turns ends where it is to end  # fmt: skip


def test_a_conversation_of_200_turns_whose_template_needs_several_renderings(tokenizer, monkeypatch):
    from strop.data import templates

    row = chat(random.Random(0), num_turns=200, num_words=10)
    once = encode_rows([row], tokenizer, "rows")
    monkeypatch.setattr(templates, "marked_template", lambda tokenizer: None)
    assert encode_rows([row], tokenizer, "rows") == once
    assert cpu_seconds(lambda: encode_rows([row], tokenizer, "rows")) <= 3.0


def test_a_prompt_of_32_000_tokens_is_encoded_in_a_second(tokenizer):
    text = sentences(random.Random(0), 16_000)
    assert cpu_seconds(lambda: encode_prompt(text, tokenizer)) <= 1.0
    assert len(encode_prompt(text, tokenizer)) >= 32_000


# ---- reports ----


def write_run(folder, num_steps, names):
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"algorithm": "SFT", "config": {}}))
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, num_steps + 1):
            file.write(json.dumps({"step": step, **dict.fromkeys(names, step * 37 % 1009 / 1009)}) + "\n")


@sizes
def test_a_run_of_100_000_logged_steps_is_reported_in_five_seconds(tmp_path):
    write_run(tmp_path / "run", 100_000, [f"metric/{i:02}" for i in range(60)])
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_size > 190e6
    prepare = "from strop.report import write_report"
    taken, megabytes = measured(prepare, "write_report(['run'], 'report.html')", tmp_path)
    assert taken <= 5.0
    assert megabytes <= 300


@pytest.mark.parametrize(
    ("num_steps", "seconds", "most"),
    [(5_000, 0.5, 35), pytest.param(100_000, 8.0, 450, marks=sizes)],
    ids=["5k", "100k"],
)
def test_a_run_of_many_logged_steps_is_resumed(tmp_path, num_steps, seconds, most):
    """Its history stays in memory, and is the greater part of the memory."""
    write_run(tmp_path / "run", num_steps, [f"metric/{i:02}" for i in range(60)])
    prepare = "from strop.training.logging import drop_after"
    taken, megabytes = measured(
        prepare, f"assert len(drop_after('run/metrics.jsonl', {num_steps - 9})) == {num_steps - 9}", tmp_path
    )
    assert taken <= seconds
    assert megabytes <= most


@sizes
def test_a_thousand_runs_are_reported_together(tmp_path):
    for i in range(1_000):
        write_run(tmp_path / f"run{i:04}", 20, ["loss", "grad_norm"])
    prepare = "from pathlib import Path\nfrom strop.report import write_report"
    taken, megabytes = measured(prepare, "write_report(sorted(Path().glob('run*')), 'report.html')", tmp_path)
    assert taken <= 20.0
    assert megabytes <= 300


# ---- vocabularies ----

HIDDEN_DIM, NUM_ROWS = 8, 4


def operator_calls(dtype):
    """Return the hidden states of 4 tokens and every operator of `strop.ops`, by name, with a vocabulary of 262,144."""
    from strop import ops
    from strop.losses import NLL

    draw = torch.Generator().manual_seed(0)
    hidden_BTH, other_BTH = (torch.randn(2, 2, HIDDEN_DIM, generator=draw).to(dtype) for _ in range(2))
    head_VH = torch.randn(LARGE_VOCAB, HIDDEN_DIM, generator=draw).to(dtype)
    ids_BT = torch.tensor([[0, 1], [LARGE_VOCAB - 1, LARGE_VOCAB // 2]])
    mask_BT, old_BT = torch.ones(2, 2).bool(), torch.full((2, 2), -12.0, dtype=dtype)
    rewards_B, ones_n = torch.tensor([1.0, 0.0], dtype=dtype), torch.ones(NUM_ROWS, dtype=dtype)
    ref_BTV, policy = other_BTH @ head_VH.T, (ids_BT, old_BT, rewards_B, mask_BT)
    return hidden_BTH, {
        "logp": lambda x: ops.logp(x @ head_VH.T, ids_BT).sum(),
        "ratio_kl": lambda x: sum(part.sum() for part in ops.ratio_kl(x @ head_VH.T, ref_BTV, ids_BT, mask_BT, old_BT)),
        "grpo_loss": lambda x: ops.grpo_loss(x @ head_VH.T, ref_BTV, *policy, samples_per_prompt=2, beta=0.1).loss,
        "linear_logp": lambda x: ops.linear_logp(x, head_VH, ids_BT).sum(),
        "linear_grpo_loss": lambda x: ops.linear_grpo_loss(x, head_VH, *policy, samples_per_prompt=2).loss,
        "linear_dpo_loss": lambda x: ops.linear_dpo_loss(x, head_VH, ids_BT, mask_BT, ref_logps=rewards_B).loss,
        "linear_token_loss": lambda x: (
            ops.linear_token_loss(x.flatten(0, 1), head_VH, ids_BT.flatten(), ones_n, rule=NLL()).loss
        ),
        "linear_divergence": lambda x: (
            ops.linear_divergence(x.flatten(0, 1), head_VH, other_BTH.flatten(0, 1), head_VH, ones_n).loss
        ),
    }  # fmt: skip


def test_every_operator_takes_a_vocabulary_of_262_144():
    """Its value and gradient are those in float64."""
    from strop import ops

    (hidden, calls), (hidden64, calls64) = operator_calls(torch.float32), operator_calls(torch.float64)
    assert calls.keys() == set(ops.__all__)
    for name, call in calls.items():
        start = time.process_time()
        value = call(x := hidden.clone().requires_grad_())
        (gradient,) = torch.autograd.grad(value, x)
        assert time.process_time() - start <= 2.0, name
        wanted = calls64[name](x64 := hidden64.clone().requires_grad_())
        (wanted_gradient,) = torch.autograd.grad(wanted, x64)
        assert value.item() == pytest.approx(wanted.item(), rel=1e-4, abs=1e-5), name
        torch.testing.assert_close(gradient.double(), wanted_gradient, rtol=1e-3, atol=1e-4, msg=name)
