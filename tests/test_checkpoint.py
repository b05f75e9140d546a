"""Checkpoint files: what they rebuild, that they are atomic, and what is said of a file that is none."""

import json
import os
import pickle
import random
import struct

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from tiny_qwen2 import tiny_qwen2
from trained_models import Bigram, shifted, tiny_moe, weights_of

from strop.algorithms.dpo import DPO
from strop.algorithms.sft import SFT
from strop.models import load_model
from strop.training import checkpoint
from strop.training.checkpoint import CheckpointError, base_sum, read

BATCH = [[2, 3], [4, 5]], [[6, 1], [7, 8]], [[9, 9, 1], [10, 1]]


def trained(trainer, num_steps=2):
    for _ in range(num_steps):
        trainer.train_step(*map(list, BATCH[: 3 if isinstance(trainer, DPO) else 2]))
    return trainer


def same_next_step(a, b):
    trained(a, 1)
    trained(b, 1)
    return torch.equal(weights_of(a), weights_of(b))


# ---- what is rebuilt ----


@pytest.mark.parametrize("tied", [False, True])
def test_a_hugging_face_model_from_the_file_alone(tied, tmp_path):
    ref = shifted(tiny_qwen2(tie_word_embeddings=tied))
    dpo = trained(DPO(model=tiny_qwen2(tie_word_embeddings=tied), ref_model=ref, beta=0.3, learning_rate=1e-2))
    dpo.save(tmp_path / "dpo.pt")
    again = DPO.from_checkpoint(tmp_path / "dpo.pt")
    assert type(again.module).__name__ == "Qwen2ForCausalLM"
    assert again.module.config.tie_word_embeddings == tied
    assert again.config == dpo.config
    assert again.state == dpo.state
    assert torch.equal(weights_of(again), weights_of(dpo))
    assert all(torch.equal(a, b) for a, b in zip(again.reference.model.parameters(), ref.parameters(), strict=True))
    assert again.policy.eos_ids == (1,)
    assert same_next_step(dpo, again)
    if tied:
        assert again.module.lm_head.weight is again.module.model.embed_tokens.weight


def test_a_config_with_an_infinity(tmp_path):
    """Mamba 2 has one among its numbers, which JSON has not."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "num_heads": 4}
    sft = SFT(model=Mamba2ForCausalLM(Mamba2Config(**sizes, head_dim=8, n_groups=1)))
    sft.save(tmp_path / "sft.pt")
    again = SFT.from_checkpoint(tmp_path / "sft.pt").module
    assert tuple(again.config.time_step_limit) == tuple(sft.module.config.time_step_limit) == (0.0, float("inf"))


def test_the_moe_from_the_file_alone(tmp_path):
    sft = trained(SFT(model=tiny_moe(), learning_rate=1e-2))
    sft.save(tmp_path / "sft.pt")
    again = SFT.from_checkpoint(tmp_path / "sft.pt")
    assert again.module.moe.config == sft.module.moe.config
    assert again.module.moe.engine.name == sft.module.moe.engine.name
    assert same_next_step(sft, again)


@pytest.mark.parametrize("wrapped_by", ["option", "user"])
def test_adapters_from_the_file_alone(wrapped_by, tmp_path):
    import peft

    options = {"r": 2, "alpha": 4, "target_modules": ["q_proj", "down_proj"]}
    if wrapped_by == "option":
        dpo = DPO(model=tiny_qwen2(), lora=options, learning_rate=1e-2)
    else:
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        dpo = DPO(model=peft.get_peft_model(tiny_qwen2(), lora), learning_rate=1e-2)
    trained(dpo).save(tmp_path / "dpo.pt")
    assert not any(name.startswith("ref/") for name in load_file(tmp_path / "dpo.pt"))  # the base, adapter off
    again = DPO.from_checkpoint(tmp_path / "dpo.pt")
    trainable = [[name for name, p in t.module.named_parameters() if p.requires_grad] for t in (dpo, again)]
    assert trainable[0] == trainable[1] != []
    assert torch.equal(weights_of(again), weights_of(dpo))
    assert same_next_step(dpo, again)


@pytest.mark.parametrize("wrapped_by", ["option", "user"])
def test_without_the_base_only_what_trains_is_written(wrapped_by, tmp_path):
    import peft

    def model():
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
        return tiny_qwen2() if wrapped_by == "option" else peft.get_peft_model(tiny_qwen2(), lora)

    lora = {"r": 2, "alpha": 4, "target_modules": ["q_proj"]} if wrapped_by == "option" else None
    sft = trained(SFT(model=model(), lora=lora, learning_rate=1e-2))
    sft.save(tmp_path / "sft.pt", base=False)
    written = {name for name in load_file(tmp_path / "sft.pt") if name.startswith("model/")}
    assert written == {f"model/{n}" for n, p in sft.module.named_parameters() if p.requires_grad} != set()
    with pytest.raises(
        CheckpointError, match=r"model must be given: .* without the weights below it.* Qwen2ForCausalLM"
    ):
        SFT.from_checkpoint(tmp_path / "sft.pt")
    again = SFT.from_checkpoint(tmp_path / "sft.pt", model=model())
    assert torch.equal(weights_of(again), weights_of(sft))
    assert same_next_step(sft, again)
    other = model()
    next(p for p in other.parameters() if not p.requires_grad or lora).data.view(-1)[0] += 1e-3
    with pytest.raises(CheckpointError, match=r"model must have the weights that the adapter of .* was trained on"):
        SFT.from_checkpoint(tmp_path / "sft.pt", model=other)


def test_a_changed_base_is_told_from_the_one_before():
    """Its checksum is kept from save to save: also where a frozen weight is changed in between."""
    module = SFT(model=tiny_qwen2(), lora={"r": 2}).module
    before = base_sum(module)
    assert base_sum(module) == before
    frozen = next(param for param in module.parameters() if not param.requires_grad)
    with torch.no_grad():
        frozen.view(-1)[0] += 1
    assert base_sum(module) != before


@pytest.mark.parametrize("merge", [False, True])
def test_a_run_leaves_the_adapter_and_merged_on_request(merge, tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    tiny_qwen2().save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    sft = SFT(model=model, lora={"r": 2, "merge": merge}, learning_rate=1e-1, batch_size=2, save_every=1)
    sft.train([{"prompt": [2, 3], "completion": [4, 5]}] * 4, num_steps=2, output_dir=tmp_path / "run")
    ids = torch.tensor([[2, 3, 4, 5]])
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    wanted, unadapted = sft.model(ids).logits, base(ids).logits
    opened = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "final" / "adapter")
    torch.testing.assert_close(opened(ids).logits, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(unadapted, wanted, atol=1e-3)
    loaded, _ = load_model(tmp_path / "run" / "final" / "adapter")
    torch.testing.assert_close(loaded(ids).logits, wanted, rtol=1e-5, atol=1e-5)
    assert (tmp_path / "run" / "final" / "model.safetensors").exists() is merge
    if merge:
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
        torch.testing.assert_close(whole(ids).logits, wanted, rtol=1e-4, atol=1e-4)
    header, _ = read(tmp_path / "run" / "checkpoints" / "step-00000002.safetensors")
    assert "base" in header
    about = json.loads((tmp_path / "run" / "run.json").read_text())["model"]
    counts = [sum(p.numel() for p in sft.module.parameters() if p.requires_grad or every) for every in (False, True)]
    assert [about["num_trained"], about["num_parameters"]] == counts


def test_a_plain_module_is_passed_in(tmp_path):
    dpo = trained(DPO(model=Bigram(), ref_model=shifted(Bigram()), learning_rate=1e-2))
    dpo.save(tmp_path / "dpo.pt")
    with pytest.raises(
        ValueError, match=r"model must be given: .* a Bigram, a plain module.*from_checkpoint\(path, model=…\)"
    ):
        DPO.from_checkpoint(tmp_path / "dpo.pt")
    again = DPO.from_checkpoint(tmp_path / "dpo.pt", model=Bigram())
    assert torch.equal(again.reference.model.table_VV, shifted(Bigram()).table_VV)
    assert same_next_step(dpo, again)


def test_frozen_parameters_dtypes_and_float64_stay(tmp_path):
    model = tiny_qwen2().double()
    model.model.embed_tokens.requires_grad_(False)
    sft = trained(SFT(model=model, learning_rate=1e-2))
    sft.save(tmp_path / "sft.pt")
    again = SFT.from_checkpoint(tmp_path / "sft.pt")
    assert again.module.lm_head.weight.dtype == torch.float64
    assert not again.module.model.embed_tokens.weight.requires_grad
    assert same_next_step(sft, again)


def test_an_optimiser_of_ones_own(tmp_path):
    def make(groups):
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    sft = trained(SFT(model=tiny_moe(), optimizer=make, learning_rate=0.1))
    sft.save(tmp_path / "sft.pt")
    assert same_next_step(sft, SFT.from_checkpoint(tmp_path / "sft.pt", optimizer=make))


def test_the_tokenizer_is_in_the_file(tmp_path):
    import tokenizers
    import transformers

    words = {"<pad>": 0, "</s>": 1} | {f"t{i}": i for i in range(2, 20)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="</s>")
    sft = SFT(model=tiny_moe(), tokenizer=tokenizer)
    sft.save(tmp_path / "sft.pt")
    again = SFT.from_checkpoint(tmp_path / "sft.pt")
    assert again.tokenizer.encode("t3 t7") == [3, 7]
    assert (again.tokenizer.eos_token_id, again.tokenizer.pad_token_id) == (1, 0)
    sft.save_pretrained(tmp_path / "folder")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "folder").encode("t3 t7") == [3, 7]


def test_save_pretrained_merges_adapters_and_leaves_the_model_alone(tmp_path):
    from transformers import AutoModelForCausalLM

    sft = trained(SFT(model=tiny_qwen2(), lora={"r": 2}, learning_rate=1e-1))
    before = weights_of(sft).clone()
    sft.save_pretrained(tmp_path / "merged")
    ids = torch.tensor([[2, 3, 4, 5]])
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(opened(ids).logits, sft.model(ids).logits, rtol=1e-4, atol=1e-4)
    with sft.module.disable_adapter():
        assert not torch.allclose(opened(ids).logits, sft.model(ids).logits, atol=1e-3)
    assert torch.equal(weights_of(sft), before)


# ---- the file ----


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "sft.pt"
    trained(SFT(model=tiny_moe())).save(path)
    return path


def test_it_is_one_safetensors_file_and_no_more(saved):
    assert [path.name for path in saved.parent.iterdir()] == ["sft.pt"]
    tensors = load_file(saved)
    assert {name.split("/")[0] for name in tensors} == {"model", "optim", "rng", "checksums"}
    assert tensors["model/lm_head.weight"].shape == (20, 16)
    assert {"exp_avg", "exp_avg_sq", "step"} == {n.rpartition("/")[2] for n in tensors if n.startswith("optim/")}


def half_written(tensors, file, metadata):
    file.write_bytes(b"half")
    raise safetensors.SafetensorError("I/O error: No space left on device")


def no_space(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("function", "broken", "told"),
    [
        ("safetensors.torch.save_file", half_written, r"a\.pt could not be written: I/O error: No space left"),
        ("os.fsync", no_space, r"a\.pt could not be written: .*No space left on device"),
        ("os.replace", no_space, "No space left on device"),
    ],
)
def test_a_failed_write_is_told_with_the_file_and_leaves_the_old_one(function, broken, told, tmp_path, monkeypatch):
    """A full disk may say so at the write, only when it is flushed, or when the file is put in its place."""
    path = tmp_path / "a.pt"
    checkpoint.write(path, {"x": torch.zeros(2)}, {})
    before = path.read_bytes()
    monkeypatch.setattr(function, broken)
    with pytest.raises(OSError, match=told):
        checkpoint.write(path, {"x": torch.ones(2)}, {})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1, -1000])
def test_a_cut_file(saved, keep):
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"sft\.pt is cut off, damaged or no safetensors file"):
        SFT.from_checkpoint(saved)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("write", ["torch.save", "pickle", "old torch.save"])
def test_a_pickle_is_named_and_not_executed(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.pt"
    if write == "pickle":
        path.write_bytes(pickle.dumps(Evil()))
    else:
        torch.save(Evil(), path, _use_new_zipfile_serialization=write == "torch.save")
    with pytest.raises(CheckpointError, match=r"evil.pt is a pickle, as torch.save writes it"):
        SFT.from_checkpoint(path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "content",
    [b"hello, this is a text file of some length", b"\x00" * 64, struct.pack("<Q", 20) + b"x" * 40, b"[1, 2, 3]   ", random.Random(0).randbytes(64)],
    ids=["text", "zeros", "cut", "list", "noise"],
)  # fmt: skip
def test_a_foreign_file(content, tmp_path):
    path = tmp_path / "foreign.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"foreign\.pt is"):
        SFT.from_checkpoint(path)


def test_foreign_safetensors_and_no_file(tmp_path):
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is a safetensors file, but not a checkpoint of strop"):
        SFT.from_checkpoint(tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*nothing\.pt"):
        SFT.from_checkpoint(tmp_path / "nothing.pt")


def test_another_algorithm_another_shape_another_format(saved, tmp_path):
    with pytest.raises(CheckpointError, match="must be a checkpoint of DPO, found one of SFT"):
        DPO.from_checkpoint(saved)
    with pytest.raises(CheckpointError, match=r"must hold '.*' of model as \[.*, found \["):
        SFT.from_checkpoint(saved, model=tiny_moe(intermediate_dim=24))
    with pytest.raises(CheckpointError, match=r"found 'model.layers.1.* only in model"):
        SFT.from_checkpoint(saved, model=tiny_moe(num_layers=2))
    header, tensors = checkpoint.read(saved)
    for other in (1, 3, True, "2", None):
        checkpoint.write(tmp_path / "other.pt", tensors, {**header, "format": other})
        with pytest.raises(CheckpointError, match=f"must be of format 2, found {other!r}: another version wrote it"):
            SFT.from_checkpoint(tmp_path / "other.pt")


def test_a_tokenizer_file_may_not_leave_its_folder(saved, tmp_path):
    header, tensors = checkpoint.read(saved)
    tensors["tokenizer/../../outside"] = torch.ones(3, dtype=torch.uint8)
    checkpoint.write(tmp_path / "evil.pt", tensors, {**header, "tokenizer": "transformers"})
    with pytest.raises(CheckpointError, match="must lie in one folder"):
        SFT.from_checkpoint(tmp_path / "evil.pt")
