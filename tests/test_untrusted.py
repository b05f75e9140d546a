"""A checkpoint and a folder of a model are input from anywhere: damage is found, code is not run, sizes are not believed."""

import builtins
import copy
import functools
import importlib
import json
import os
import random
import socket
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from mutations import write_with_checksums
from tiny_qwen2 import tiny_qwen2
from trained_models import shifted, tiny_moe, weights_of

from strop import checkpoint, checkpoint_file, checksums
from strop.algorithms.sft import SFT
from strop.callbacks import EarlyStopping
from strop.checkpoint import CheckpointError
from strop.models import load_model
from strop.moe import MoETransformer
from strop.tasks import CharTokenizer

ROWS = [{"prompt": [2 + i % 7, 3], "completion": [4 + i, 1]} for i in range(6)]
MOE, QWEN2 = tiny_moe, functools.partial(tiny_qwen2, num_hidden_layers=1)


def saved(path, model, **options):
    sft = SFT(model=model, **options)
    sft.train_step([[2, 3]], [[4, 1]])
    sft.save(path)
    return checkpoint.read(path)


def with_lora_of_ones_own():
    import peft

    lora = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return {"model": peft.get_peft_model(QWEN2(), lora)}


MAKE = {
    "moe": lambda: {"model": MOE()},
    "hf": lambda: {"model": QWEN2()},
    "lora": lambda: {"model": QWEN2(), "lora": {"r": 2}},
    "own lora": with_lora_of_ones_own,
}


@functools.cache
def _example(kind):
    with tempfile.TemporaryDirectory() as folder:
        header, tensors = saved(Path(folder) / "sft.pt", **MAKE[kind]())
        return header, {name: tensor.clone() for name, tensor in tensors.items()}


def example(kind):
    """Header and tensors of a checkpoint, for a test to change."""
    header, tensors = _example(kind)
    return copy.deepcopy(header), dict(tensors)


@pytest.fixture
def moe_file(tmp_path):
    header, tensors = example("moe")
    checkpoint.write(tmp_path / "sft.pt", tensors, header)
    return tmp_path / "sft.pt", header, tensors


@pytest.fixture(autouse=True)
def no_code(monkeypatch):
    """Nobody is asked, nothing is fetched."""

    def never(*args, **kwargs):
        raise AssertionError("a question or a connection")

    monkeypatch.setattr(builtins, "input", never)
    monkeypatch.setattr(socket.socket, "connect", never)


def refused(path, match, **arguments):
    with pytest.raises(CheckpointError, match=match) as caught:
        SFT.from_checkpoint(path, **arguments)
    assert "\n" not in str(caught.value)


# ---- checksums ----


def test_the_checksum_by_hand():
    """The CRC-32 of the sums of 64 rows of 509 words, then of what is left: in Python's own numbers."""
    import zlib

    data = random.Random(0).randbytes(2 * checksums.BLOCK + 1001)
    words = np.frombuffer(data, "<u8", 2 * 64 * 509).tolist()
    sums = b""
    for block in range(2):
        for column in range(509):
            total = sum(words[block * 64 * 509 + row * 509 + column] for row in range(64))
            sums += (total % 2**64).to_bytes(8, "little")
    want = zlib.crc32(sums + data[2 * checksums.BLOCK :])
    assert checksums.checksum(data) == want
    assert checksums.checksum(b"123456789") == 0xCBF43926  # of CRC-32's own definition
    assert checksums.checksum(b"") == 0


def test_a_checksum_finds_flips_and_blocks_that_changed_places():
    data = np.frombuffer(random.Random(1).randbytes(checksums.BLOCK + 4096), np.uint8)
    want, draw = checksums.checksum(data), random.Random(2)
    for _ in range(300):
        other = data.copy()
        other[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        assert checksums.checksum(other) != want
    for size in (512, 4096):  # a sector, a page: all pairs of the first with another
        for place in range(size, len(data) - size, size):
            other = data.copy()
            other[:size], other[place : place + size] = data[place : place + size], data[:size]
            assert checksums.checksum(other) != want


def test_every_flipped_bit_of_a_checkpoint_is_found(moe_file):
    """In the length, the index, the header, the checksums, the tensors: 400 places of one file."""
    path, _, tensors = moe_file
    whole, draw = path.read_bytes(), random.Random(0)
    places = [*range(8), *(draw.randrange(len(whole)) for _ in range(392))]
    for place in places:
        data = bytearray(whole)
        data[place] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"sft\.pt "):
            checkpoint.read(path)
    path.write_bytes(whole)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in checkpoint.read(path)[1].items())


def test_the_damaged_tensor_is_named(moe_file):
    path, _, tensors = moe_file
    whole = bytearray(path.read_bytes())
    place = bytes(whole).index(tensors["optim/lm_head.weight/exp_avg"].numpy().tobytes())
    whole[place + 5] ^= 8
    path.write_bytes(whole)
    refused(path, r"sft\.pt is damaged: the checksum of 'optim/lm_head.weight/exp_avg' must be \w{8}, found \w{8}")


def test_resume_goes_on_from_the_newest_checkpoint_that_is_whole(tmp_path):
    """A bit of the newest is flipped, deep in its tensors: the result is that of the undisturbed run."""
    options = {"batch_size": 2, "learning_rate": 1e-2, "save_every": 2, "keep_checkpoints": 0}
    SFT(model=MOE(), **options).train(ROWS, num_steps=6, output_dir=tmp_path)
    for step in (4, 6):
        path = tmp_path / "checkpoints" / f"step-0000000{step}.safetensors"
        data = bytearray(path.read_bytes())
        data[-5000] ^= 1
        path.write_bytes(data)
    again = SFT(model=MOE(), **options)
    with (
        pytest.warns(
            UserWarning, match=r"step-00000006\.safetensors is damaged: the checksum .*; taking the one before"
        ),
        pytest.warns(
            UserWarning, match=r"step-00000004\.safetensors is damaged: the checksum .*; taking the one before"
        ),
    ):
        history = again.train(ROWS, num_steps=8, output_dir=tmp_path, resume=True)
    assert [entry["step"] for entry in history.steps] == list(range(1, 9))
    whole = SFT(model=MOE(), **options)
    whole.train(ROWS, num_steps=8)
    assert torch.equal(weights_of(again), weights_of(whole))


def test_a_file_that_cannot_be_flushed_is_no_checkpoint(tmp_path, monkeypatch):
    """The disk says at fsync that it lost what was written; the old file stays."""
    path = tmp_path / "a.pt"
    checkpoint.write(path, {"x": torch.zeros(2)}, {})
    before = path.read_bytes()

    def broken(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match=r"a\.pt could not be written: .*Input/output error"):
        checkpoint.write(path, {"x": torch.ones(2)}, {})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


# ---- the folder of a model ----


def written(folder, kind, tokenizer=None):
    sft = SFT(model=MOE() if kind == "moe" else QWEN2(), tokenizer=tokenizer)
    sft.save_pretrained(folder)
    return sft


@pytest.mark.parametrize("kind", ["moe", "hf"])
def test_a_flipped_bit_of_a_final_folder_is_found(kind, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "final"
    sft = written(folder, kind, CharTokenizer("abc"))
    listed = json.loads((folder / "checksums.json").read_text())
    assert listed.keys() == {file.name for file in folder.iterdir()} - {"checksums.json"}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= listed.keys()
    model, tokenizer = load_model(folder)
    assert tokenizer.encode("cab") == CharTokenizer("abc").encode("cab")
    opened = AutoModelForCausalLM.from_pretrained(folder)  # which looks at none of this
    ids = torch.tensor([[2, 3, 4]])
    torch.testing.assert_close(opened(ids).logits, sft.model(ids).logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(ids).logits, sft.model(ids).logits, rtol=1e-4, atol=1e-4)
    for name in listed:
        whole = (folder / name).read_bytes()
        data = bytearray(whole)
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)
        match = f"{name} must have the checksum .*damaged, or was changed on purpose: then delete .*checksums.json"
        with pytest.raises(ValueError, match=match):
            load_model(folder)
        (folder / name).write_bytes(whole)


def test_a_final_folder_changed_on_purpose(tmp_path):
    """The error says what to do, and that does it."""
    written(tmp_path, "hf")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    (tmp_path / "notes.txt").write_text("a file beside them is nobody's business")
    with pytest.raises(ValueError, match=r"delete .*checksums\.json"):
        load_model(tmp_path)
    (tmp_path / "checksums.json").unlink()
    assert load_model(tmp_path)[0].config.max_position_embeddings == 128
    (tmp_path / "checksums.json").write_text("[]")
    with pytest.raises(ValueError, match=r"checksums\.json must hold an object"):
        load_model(tmp_path)


def test_strops_own_moe_is_verified_and_saved_over(tmp_path):
    sft = written(tmp_path, "moe")
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text() + "\n")
    with pytest.raises(ValueError, match=r"config\.json must have the checksum"):
        MoETransformer.load(tmp_path)
    sft.module.moe.save(tmp_path)  # other files now, of which the old checksums say nothing
    assert MoETransformer.load(tmp_path).config == sft.module.moe.config


def test_a_folder_half_old_and_half_new_is_found(tmp_path, monkeypatch):
    """Killed while the files were put in their places: whichever came last, the folder does not agree with itself."""
    whole = os.replace
    for survived in (1, 2):
        folder = tmp_path / str(survived)
        written(folder, "moe")
        count = 0

        def replace(source, target):
            nonlocal count
            if Path(target).parent == folder:  # noqa: B023
                count += 1
                if count > survived:  # noqa: B023
                    raise KeyboardInterrupt
            whole(source, target)

        other = SFT(model=shifted(MOE()))
        other.module.config.eos_token_id = 2
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.os, "replace", replace)
            with pytest.raises(KeyboardInterrupt):
                other.save_pretrained(folder)
        with pytest.raises(ValueError, match="must have the checksum"):
            load_model(folder)


# ---- code ----


@pytest.mark.parametrize("entry", ["strop.__main__:x", "os:system", "strop.tasks.tokenizer:json.loads", "Mine"])
def test_a_tokenizer_entry_is_never_imported(entry, moe_file, monkeypatch):
    path, header, tensors = moe_file
    checkpoint.write(path, tensors, {**header, "tokenizer": entry})
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"{name} is imported"))
    refused(
        path, r"tokenizer must be given: .*which is not strop's or transformers'; from_checkpoint\(path, tokenizer=…\)"
    )
    tokenizer = CharTokenizer("abcdefgh")
    assert SFT.from_checkpoint(path, tokenizer=tokenizer).tokenizer == tokenizer


def test_a_tokenizer_of_ones_own_is_passed_in_again(tmp_path):
    class Mine(CharTokenizer):
        pass

    header, tensors = saved(tmp_path / "sft.pt", MOE(), tokenizer=Mine("abcdefgh"))
    assert header["tokenizer"] == "Mine"
    assert not any(name.startswith("tokenizer/") for name in tensors)
    refused(tmp_path / "sft.pt", "tokenizer must be given: .* was written with a 'Mine'")
    header, _ = saved(tmp_path / "own.pt", MOE(), tokenizer=CharTokenizer("abcdefgh"))
    assert header["tokenizer"] == "strop"
    assert SFT.from_checkpoint(tmp_path / "own.pt").tokenizer == CharTokenizer("abcdefgh")


def bytes_tensor(text):
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({"tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["org/repo--x.Y", null]}}'}, "names code in 'auto_map'"),
        ({"tokenizer_config.json": '{"\\u0061uto_map": {"AutoTokenizer": ["x.Y", null]}}'}, "names code in 'auto_map'"),
        ({"deep/tokenizer_config.json": '{"auto_map": ["x.Y"]}'}, "names code in 'auto_map'"),
        ({"config.json": '{"auto_map": {"AutoConfig": "x.Y"}, "model_type": "x"}'}, "names code in 'auto_map'"),
        ({"tokenizer_config.json": '{"tokenizer_class": "NoSuchTokenizer"}'}, "tokenizer must be given: .*cannot be opened"),
        ({"tokenizer_config.json": "[1]"}, "must be a JSON object"),
        ({"tokenizer.json": "{}"}, "tokenizer must be given: .*cannot be opened"),
        ({"../../outside": "x"}, "must lie in one folder"),
        ({"/tmp/outside": "x"}, "must lie in one folder"),
        ({"a\0b": "x"}, "must lie in one folder"),
        ({"a": "x", "a/b": "x"}, "the tokenizer has no file"),
        ({}, "tokenizer must be given: .*cannot be opened"),
    ],
)  # fmt: skip
def test_tokenizer_files_that_name_code_or_leave_their_folder(files, match, moe_file):
    path, header, tensors = moe_file
    more = {f"tokenizer/{name}": bytes_tensor(text) for name, text in files.items()}
    checkpoint.write(path, tensors | more, {**header, "tokenizer": "transformers"})
    refused(path, match)


MODEL_CODE = [
    ({"attention": "org/kernel"}, "attention must be one of None, eager, sdpa, .*found 'org/kernel'"),
    ({"attention": "kernels-community/flash-attn"}, "attention must be one of"),
    ({"attention": "flash_attention_2"}, "needs the package flash_attn"),
    ({"config.attn_implementation": "org/kernel"}, "must have no 'attn_implementation'"),
    ({"config._attn_implementation": "org/kernel"}, "must have no '_attn_implementation'"),
    ({"config.experts_implementation": "org/kernel"}, "must have no 'experts_implementation'"),
    ({"config.text_config": {"attn_implementation": "org/kernel"}}, "must have no 'attn_implementation'"),
    ({"config.auto_map": {"AutoModelForCausalLM": "org/repo--modeling.Evil"}}, "must have no 'auto_map'"),
    ({"config.model_type": "evil", "config.auto_map": {"AutoConfig": "x.Y"}}, "must have no 'auto_map'"),
    ({"config.trust_remote_code": True}, "must have no 'trust_remote_code'"),
    ({"config.quantization_config": {"quant_method": "bitsandbytes"}}, "must have no 'quantization_config'"),
    ({"generation_config.custom_generate": "org/repo"}, "must have no 'custom_generate'"),
    ({"config.model_type": "evil"}, "cannot be rebuilt: .*evil"),
    ({"config.model_type": "bert"}, "cannot be rebuilt"),
    ({"config.model_type": "llama"}, "transformers makes a LlamaForCausalLM of its config"),
    ({"config.to_dict": 5}, "cannot be rebuilt"),
    ({"config.dtype": "load"}, None),  # a function of torch in place of a dtype: not called, and the dtype is given
    ({"dtype": "load"}, "dtype must be one of float32"),
    ({"device": "evil:0"}, "cannot be rebuilt"),
    ({"class": "os.system"}, "class must be the name of a class"),
]  # fmt: skip


def put_at(about, changes):
    about = copy.deepcopy(about)
    for place, value in changes.items():
        *parents, leaf = place.split(".")
        inner = about
        for parent in parents:
            inner = inner[parent]
        inner[leaf] = value
    return about


@pytest.mark.parametrize(("changes", "match"), MODEL_CODE)
def test_a_model_config_names_no_code(changes, match, tmp_path):
    path = tmp_path / "sft.pt"
    header, tensors = example("hf")
    checkpoint.write(path, tensors, {**header, "model": put_at(header["model"], changes)})
    if match is None:
        assert SFT.from_checkpoint(path).module.dtype == torch.float32
        return
    refused(path, match)
    if "class" not in changes:  # the object in place of the description
        assert torch.equal(
            SFT.from_checkpoint(path, model=QWEN2()).module.lm_head.weight, tensors["model/lm_head.weight"]
        )


ADAPTER_CODE = [
    ({"peft_type": "PROMPT_TUNING", "tokenizer_name_or_path": "org/evil", "prompt_tuning_init": "TEXT"}, "of the type LORA"),
    ({"peft_type": "XLORA"}, "of the type LORA"),
    ({"peft_type": None}, "of the type LORA"),
    ({"megatron_config": {"a": 1}, "megatron_core": "antigravity"}, "must have no 'megatron_co"),
    ({"megatron_core": "antigravity"}, "must have no 'megatron_core'"),
    ({"corda_config": {"cache_file": "evil.pt"}}, "must have no 'corda_config'"),
    ({"loftq_config": {"x": 1}}, "must have no 'loftq_config'"),
    ({"layer_replication": [[0, 1], [0, 1]]}, "must have no 'layer_replication'"),
    ({"r": 10**13}, r"must hold '.*lora_A.*' of model as \[10000000000000, 16\]"),
    ({"r": "2"}, "cannot be rebuilt"),
    ({"target_modules": ["nothing"]}, "cannot be rebuilt|only in"),
    ({"auto_mapping": {"base_model_class": "system", "parent_library": "os"}}, None),
    ({"base_model_name_or_path": "org/evil", "revision": "x"}, None),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "match"), ADAPTER_CODE)
def test_an_adapter_names_no_code(changes, match, tmp_path):
    path = tmp_path / "sft.pt"
    header, tensors = example("own lora")
    model = put_at(header["model"], {f"adapters.default.{name}": value for name, value in changes.items()})
    checkpoint.write(path, tensors, {**header, "model": model})
    if match is None:
        found = SFT.from_checkpoint(path).module.peft_config["default"]
        assert (found.auto_mapping, found.base_model_name_or_path, found.revision) == (None, None, None)
    else:
        refused(path, match)


def test_a_folder_with_code_of_its_own_is_not_asked_about(tmp_path):
    QWEN2().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    code = {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}, "model_type": "evil"}
    (tmp_path / "config.json").write_text(json.dumps(config | code))
    (tmp_path / "evil.py").write_text("raise AssertionError('this is run')")
    with pytest.raises(
        ValueError, match=r"has code of its own, which is not run: load_model\(…, trust_remote_code=True\)"
    ):
        load_model(tmp_path)


# ---- sizes ----


@pytest.mark.parametrize(
    "changes",
    [{"vocab_size": 10**12}, {"hidden_dim": 10**7, "intermediate_dim": 10**7}, {"num_layers": 10**12}, {"num_experts": 10**9}],
)  # fmt: skip
def test_a_moe_of_terabytes_is_not_believed(changes, moe_file):
    path, header, tensors = moe_file
    header["model"]["config"] |= changes
    checkpoint.write(path, tensors, header)
    refused(path, r"must hold '.*' of model as \[|of more tensors than it holds")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"vocab_size": 10**13}, r"must hold '.*' of model as \[10000000000000, 16\], found \[32, 16\]"),  # 640 TB
        ({"intermediate_size": 10**13}, "must hold"),
        ({"hidden_size": 4 * 10**6}, "must hold"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' of at most 10000"),
        ({"num_hidden_layers": 9_000, "layer_types": ["full_attention"] * 9_000}, "of more tensors than it holds"),
        ({"num_labels": 10**9}, "'num_labels' of at most 10000"),
    ],
)  # fmt: skip
def test_a_hugging_face_model_of_terabytes_is_not_believed(changes, match, tmp_path):
    path = tmp_path / "sft.pt"
    header, tensors = example("hf")
    header["model"]["config"] |= changes
    checkpoint.write(path, tensors, header)
    refused(path, match)


def test_tables_that_no_file_holds_are_not_believed(tmp_path):
    """GPT-J computes its positions: a table of 10¹² rows, of which the checkpoint has not a byte."""
    import transformers

    sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "rotary_dim": 4}
    path = tmp_path / "sft.pt"
    header, tensors = saved(path, transformers.GPTJForCausalLM(transformers.GPTJConfig(**sizes)))
    header["model"]["config"]["n_positions"] = 10**12
    checkpoint.write(path, tensors, header)
    refused(path, "with tables of [0-9,]{18,} bytes, more than a model has")


@pytest.mark.parametrize("given", [False, True])
def test_a_lora_option_of_terabytes_is_not_believed(given, tmp_path):
    path = tmp_path / "sft.pt"
    header, tensors = example("lora")
    header["config"]["lora"]["r"] = 10**13
    checkpoint.write(path, tensors, header)
    refused(path, "must hold adapters of rank 10000000000000 .*found 2|found \\[2\\]", model=QWEN2() if given else None)


# ---- the header ----


BAD_HEADERS = [
    ("state.step", "x", "state.step must be a whole number from 0 to 2⁵³, found 'x'"),
    ("state.step", -1, "state.step must be a whole number from 0"),
    ("state.step", True, "state.step must be a whole number from 0 to 2⁵³, found True"),
    ("state.step", 2**70, "state.step must be a whole number"),
    ("state.step", 1.0, "state.step must be a whole number"),
    ("state.seconds", -0.5, "state.seconds must be a number of at least 0, found -0.5"),
    ("state.seconds", 10**400, "state.seconds must be a number of at least 0, found a whole number of more than 40 digits"),
    ("state.position", 7, "state.position must be at most num_rows=0, found 7"),
    ("state.first_step", 7, "state.first_step must be at most step=1, found 7"),
    ("state.more", 7, "state must have no 'more', found one"),
    ("state", None, "state must be an object, found None"),
    ("config.optim.learning_rate", "1e-4", "config.optim.learning_rate must be written as 0.0001, found '1e-4'"),
    ("config.optim.learning_rate", "x", "config: .*learning_rate must be a number in plain decimal digits.*found 'x'"),
    ("config.optim.learning_rate", -1.0, "config: learning_rate must be at least 0, found -1.0"),
    ("config.optim.learning_rate", True, "config"),
    ("config.run.batch_size", 0, "config: batch_size must be at least 1, found 0"),
    ("config.run.nonsense", 1, "config: .*nonsense"),
    ("config.batch_size", 1, "config"),
    ("config.run", 5, "config: run must be a RunConfig or a dict, found int"),
    ("algorithm", "SFT\nx", "algorithm must be the name of a class"),
    ("algorithm", 5, "algorithm must be the name of a class, found 5"),
    ("model", {}, "model.kind must be one of plain, moe, hf, found None"),
    ("model.kind", "pickle", "model.kind must be one of plain, moe, hf, found 'pickle'"),
    ("model.kind", ["moe"], "model.kind must be one of plain, moe, hf, found a list of 1"),
    ("model.kind", "plain", "model must have no 'config'"),
    ("model.class", "Other", "it must be a MoEForCausalLM"),
    ("model.engine", "os", "engine must be one of"),
    ("model.dtype", "float16", "cannot be rebuilt"),
    ("model.frozen", ["nothing"], "frozen must name weights of model, found 'nothing'"),
    ("model.frozen", "x", "model.frozen must be a list, found 'x'"),
    ("model.config.top_k", 3, "top_k must be at most num_experts=2, found 3"),
    ("model.config.rope_base", "x", "rope_base must be a number"),
    ("optim.groups", [], "must have 2 parameter groups, found 0"),
    ("optim.groups", 5, "optim.groups must be a list, found 5"),
    ("optim.params", {"nothing": {}}, "has optimiser state of 'nothing', which is not trained here"),
    ("rng.python", [3, [], None], r"rng.python\[1\] must be a list of 625, found a list of 0"),
    ("rng.numpy", ["MT19937", 700, 0, 0.0], r"rng.numpy\[1\] must be a place from 0 to 624, found 700"),
    ("rng.numpy", ["PCG64", 1, 0, 0.0], r"rng.numpy\[0\] must be 'MT19937', found 'PCG64'"),
    ("callbacks", [["EarlyStopping", {"best": "x", "num_bad": 0}]], "the state of EarlyStopping.best must be a number or null"),
    ("callbacks", [["EarlyStopping", {}]], "the state of EarlyStopping must have 'best', found none"),
    ("callbacks", [5], r"callbacks\[0\] must be a list of 2, found 5"),
    ("extra", [], r"extra must be an object, found a list of 0"),
    ("ref", {"kind": "x"}, "ref.kind must be one of"),
    ("more", 1, "the header must have no 'more', found one"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "value", "match"), BAD_HEADERS)
def test_a_malformed_header_is_one_error(place, value, match, moe_file):
    path, header, tensors = moe_file
    checkpoint.write(path, tensors, put_at(header, {place: value}))
    refused(path, match, callbacks=[EarlyStopping("loss")])


@pytest.mark.parametrize(
    "name",
    ["version", "algorithm", "config", "model", "tokenizer", "state", "optim", "rng", "extra", "callbacks"],
)
def test_nothing_may_be_missing(name, moe_file):
    path, header, tensors = moe_file
    del header[name]
    checkpoint.write(path, tensors, header)
    refused(path, f"the header must have '{name}', found none")


OPTIONS = [
    ("lr", "1e-4", r"optim.groups\[0\].lr must be as .* is, found '1e-4'"),
    ("lr", -1.0, r"optim.groups\[0\].lr must be as"),
    ("lr", None, r"optim.groups\[0\].lr must be as"),
    ("betas", [0.9], r"optim.groups\[0\].betas must be as"),
    ("betas", [0.9, "x"], r"optim.groups\[0\].betas must be as"),
    ("params", [], r"optim.groups\[0\] must have options of plain values, found 'params': a list of 0"),
    ("other", {"a": 1}, r"optim.groups\[0\] must have options of plain values, found 'other': an object of 1"),
    ("betas", {"a": 1}, r"optim.groups\[0\] must have options of plain values, found 'betas'"),
    ("amsgrad", 1, r"optim.groups\[0\].amsgrad must be as False is, found 1"),
    ("maximize", True, r"optim.groups\[0\].maximize must be as False is, found"),
    ("differentiable", True, r"optim.groups\[0\].differentiable must be as False is, found"),
    ("weight_decay", None, r"optim.groups\[0\].weight_decay must be as"),
    ("weight_decay", -3.0, r"optim.groups\[0\].weight_decay must be as"),
    ("eps", -5.0, r"optim.groups\[0\].eps must be as"),
    ("betas", [5.0, 5.0], r"optim.groups\[0\].betas must be as"),
]


@pytest.mark.parametrize(("name", "value", "match"), OPTIONS)
def test_options_of_the_optimiser(name, value, match, moe_file):
    path, header, tensors = moe_file
    header["optim"]["groups"][0][name] = value
    checkpoint.write(path, tensors, header)
    refused(path, match)


def test_a_value_beside_the_tensor_of_its_name(moe_file):
    path, header, tensors = moe_file
    header["optim"]["params"]["lm_head.weight"] = {"step": "x"}
    checkpoint.write(path, tensors, header)
    refused(path, "must hold 'step' of 'lm_head.weight' once, found a tensor and a value")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.int64])
def test_weights_are_of_floats(dtype, tmp_path):
    path = tmp_path / "sft.pt"
    SFT(model=tiny_qwen2()).save(path)
    header, tensors = checkpoint.read(path)
    name = next(name for name in tensors if name.startswith("model/"))
    checkpoint.write(path, {**tensors, name: tensors[name].to(dtype)}, header)
    refused(path, f"must hold '{name.removeprefix('model/')}' of model as torch.float32, found {dtype}")


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_resume_passes_over_what_is_no_file(kind, tmp_path):
    options = {"batch_size": 2, "learning_rate": 1e-2, "save_every": 2, "keep_checkpoints": 0}
    SFT(model=MOE(), **options).train(ROWS, num_steps=2, output_dir=tmp_path)
    odd = tmp_path / "checkpoints" / "step-00000009.safetensors"
    odd.mkdir() if kind == "folder" else odd.symlink_to(tmp_path / "nowhere")
    again = SFT(model=MOE(), **options)
    with pytest.warns(UserWarning, match=r"no checkpoint at .*step-00000009\.safetensors; taking the one before"):
        history = again.train(ROWS, num_steps=4, output_dir=tmp_path, resume=True)
    assert [entry["step"] for entry in history.steps] == [1, 2, 3, 4]


def test_checksums_name_files_of_their_folder(tmp_path):
    (tmp_path / "outside").write_text("secret")
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("../outside", str(tmp_path / "outside")):
        (folder / "checksums.json").write_text(json.dumps({name: "00000000"}))
        with pytest.raises(ValueError, match=r"checksums\.json must name files of its folder, found"):
            checksums.verify(folder)


def test_an_option_the_optimiser_gets_later(moe_file):
    """A scheduler of torch leaves initial_lr in the groups, and is made after the checkpoint is loaded."""
    path, header, tensors = moe_file
    header["optim"]["groups"][0]["initial_lr"] = 0.5
    checkpoint.write(path, tensors, header)
    assert SFT.from_checkpoint(path).optimizer.param_groups[0]["initial_lr"] == 0.5


@pytest.mark.parametrize(
    ("name", "new", "match"),
    [
        ("optim/lm_head.weight/exp_avg", None, "must hold the tensors exp_avg, exp_avg_sq, step of 'lm_head.weight'"),
        ("optim/lm_head.weight/other", torch.ones(2), "must hold the tensors exp_avg, exp_avg_sq, step"),
        ("optim/lm_head.weight/exp_avg", torch.ones(2), r"must hold 'exp_avg' of 'lm_head.weight' as \[20, 16\] .*found \[2\]"),
        ("optim/lm_head.weight/step", torch.tensor(float("nan")), "finite count of steps"),
        ("optim/lm_head.weight/step", torch.tensor(3), "must hold 'step'"),
        ("model/lm_head.weight", None, "found 'lm_head.weight' only in model"),
        ("model/lm_head.weight", torch.ones(20, 16).double(), "must hold 'lm_head.weight' of model as torch.float32"),
        ("rng/torch", None, "rng must hold the states of torch, numpy"),
        ("rng/torch", torch.ones(5056, dtype=torch.uint8), "rng/torch must be a state of torch's generator"),
        ("rng/torch", torch.ones(7, dtype=torch.uint8), "rng/torch must be a state of torch's generator"),
        ("rng/numpy", torch.full((624,), -1), "rng/numpy must hold 624 words of 32 bits"),
        ("rng/numpy", torch.ones(3, dtype=torch.int64), "rng/numpy must hold 624 words"),
        ("rng/cuda/0", torch.ones(3), "rng/cuda/0 must be bytes"),
        ("other/x", torch.ones(3), "must hold tensors of model, optim, .*found 'other/x'"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(name, new, match, moe_file):
    path, header, tensors = moe_file
    tensors = {key: tensor for key, tensor in tensors.items() if key != name} | ({} if new is None else {name: new})
    checkpoint.write(path, tensors, header)
    refused(path, match)


def test_the_text_of_a_header(moe_file):
    """What json.loads lets pass and JSON does not have; bytes that are no text; nesting without end."""
    path, header, tensors = moe_file
    text = json.dumps(header)
    for bad, match in (
        (text.replace('"step": 1', '"step": NaN'), "NaN is no number of JSON"),
        (
            text.replace('"seconds": ', '"seconds": 1e999, "old": '),
            "state.seconds must be a number of at least 0, found inf",
        ),
        (text.replace('"step": 1', '"step": 1, "step": 1'), "a name stands twice"),
        ("[" * 200_000, "nested too deeply"),
        (text.replace('"extra": {}', '"extra": {"a": ' + "[" * 50 + "]" * 50 + "}"), "at most 20 levels"),
        ("7", "must be of format 2, found None"),
        ("", "its header is not JSON"),
    ):
        assert bad != text
        write_with_checksums(path, bad, tensors)
        refused(path, match)


@pytest.mark.parametrize("shape", [[2**63, 0], [0, 10**30], [0, -1], [0, 1.0], [True, 0], "x", 0, [[]]])
def test_shapes_that_no_tensor_has(shape, moe_file):
    """Of no bytes, so that only the shape is wrong."""
    path, _, _ = moe_file
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    index = json.loads(data[8 : 8 + length])
    index["extra/x"] = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    text = json.dumps(index).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    refused(path, "is no safetensors file")


def test_two_places_of_one_tensor(moe_file):
    path, header, tensors = moe_file
    kept = {name: tensor for name, tensor in tensors.items() if name != "model/lm_head.weight"}
    for aliases, match in (
        (
            {"model/lm_head.weight": "nothing"},
            "aliases must be new names of tensors, found 'model/lm_head.weight' for 'nothing'",
        ),
        ({"model/model.norm.weight": "rng/torch"}, "aliases must be new names"),
        ({"model/lm_head.weight": "checksums"}, "aliases must be new names"),
        ({"model/lm_head.weight": 5}, "aliases.'model/lm_head.weight' must be a text, found 5"),
    ):
        write_with_checksums(path, json.dumps({**header, "aliases": aliases}), kept)
        refused(path, match)


def test_a_refused_checkpoint_changes_nothing(moe_file):
    """The last check of all fails: weights, optimiser, state and generators are as before."""
    path, header, tensors = moe_file
    tensors["rng/numpy"] = torch.ones(3, dtype=torch.int64)
    sft = SFT(model=shifted(MOE()))
    sft.train_step([[5, 6]], [[7, 1]])
    sft.train_step([[5, 6]], [[7, 1]])
    before = weights_of(sft).clone(), copy.deepcopy(sft.optimizer.state_dict()), copy.deepcopy(sft.state)
    random_state = torch.get_rng_state()
    with pytest.raises(CheckpointError, match="rng/numpy"):
        checkpoint.put(sft, header, tensors, path)
    assert torch.equal(weights_of(sft), before[0])
    assert sft.state == before[2]
    assert sft.optimizer.state_dict()["param_groups"] == before[1]["param_groups"]
    for index, state in before[1]["state"].items():
        assert all(torch.equal(sft.optimizer.state_dict()["state"][index][key], value) for key, value in state.items())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_callback_of_ones_own_that_cannot_take_its_state(moe_file):
    class Mine(EarlyStopping):
        def load_state_dict(self, state):
            self.best = state["nothing"]

    path, header, tensors = moe_file
    checkpoint.write(path, tensors, {**header, "callbacks": [["Mine", {"a": 1}]]})
    refused(path, "the state of Mine does not fit: KeyError: 'nothing'", callbacks=[Mine("loss")])


def test_frozen_weights_of_the_moe_stay_frozen(tmp_path):
    """As those of a Hugging Face model do; they were trained after from_checkpoint."""
    sft = SFT(model=MOE())
    sft.module.get_parameter("lm_head.weight").requires_grad_(False)
    sft = SFT(model=sft.module, learning_rate=1e-2)
    sft.train_step([[2, 3]], [[4, 1]])
    sft.save(tmp_path / "sft.pt")
    again = SFT.from_checkpoint(tmp_path / "sft.pt")
    assert [name for name, p in again.module.named_parameters() if not p.requires_grad] == ["lm_head.weight"]


def test_the_format_number():
    assert checkpoint.FORMAT == checkpoint_file.FORMAT == 2
