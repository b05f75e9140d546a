"""A checkpoint is input from anywhere: it names no code that is run, and its sizes are not believed."""

import builtins
import importlib
import json
import socket

import pytest
import torch
from example_checkpoints import MOE, QWEN2, example, put_at, refused, saved

from strop.algorithms.sft import SFT
from strop.models import load_model
from strop.tasks import CharTokenizer
from strop.training import checkpoint


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


# ---- code ----


@pytest.mark.parametrize("entry", ["strop.__main__:x", "os:system", "strop.tasks.tokenizer:json.loads", "Mine"])
def test_a_tokenizer_entry_is_never_imported(entry, moe_file, monkeypatch):
    path, header, tensors = moe_file
    checkpoint.write(path, tensors, {**header, "tokenizer": entry})
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"{name} is imported"))
    refused(
        path,
        r"tokenizer must be given: .*it must be strop's or transformers', found a .*; from_checkpoint\(path, tokenizer=…\)",
    )
    tokenizer = CharTokenizer("abcdefgh")
    assert SFT.from_checkpoint(path, tokenizer=tokenizer).tokenizer == tokenizer


def test_a_tokenizer_of_ones_own_is_passed_in_again(tmp_path):
    class Mine(CharTokenizer):
        pass

    header, tensors = saved(tmp_path / "sft.pt", MOE(), tokenizer=Mine("abcdefgh"))
    assert header["tokenizer"] == "Mine"
    assert not any(name.startswith("tokenizer/") for name in tensors)
    refused(tmp_path / "sft.pt", "tokenizer must be given: .* found a 'Mine'")
    header, _ = saved(tmp_path / "own.pt", MOE(), tokenizer=CharTokenizer("abcdefgh"))
    assert header["tokenizer"] == "strop"
    assert SFT.from_checkpoint(tmp_path / "own.pt").tokenizer == CharTokenizer("abcdefgh")


def bytes_tensor(text):
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({"tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["org/repo--x.Y", null]}}'}, "must have no 'auto_map'"),
        ({"tokenizer_config.json": '{"\\u0061uto_map": {"AutoTokenizer": ["x.Y", null]}}'}, "must have no 'auto_map'"),
        ({"deep/tokenizer_config.json": '{"auto_map": ["x.Y"]}'}, "must have no 'auto_map'"),
        ({"config.json": '{"auto_map": {"AutoConfig": "x.Y"}, "model_type": "x"}'}, "must have no 'auto_map'"),
        ({"tokenizer_config.json": '{"tokenizer_class": "NoSuchTokenizer"}'}, "tokenizer must be given: .*cannot be rebuilt"),
        ({"tokenizer_config.json": "[1]"}, "cannot be rebuilt"),
        ({"tokenizer.json": "{}"}, "tokenizer must be given: .*cannot be rebuilt"),
        ({"../../outside": "x"}, "must lie in one folder"),
        ({"/tmp/outside": "x"}, "must lie in one folder"),
        ({"a\0b": "x"}, "embedded null byte"),
        ({"a": "x", "a/b": "x"}, "cannot be rebuilt: FileExistsError|cannot be rebuilt: NotADirectoryError"),
        ({}, "tokenizer must be given: .*cannot be rebuilt"),
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
