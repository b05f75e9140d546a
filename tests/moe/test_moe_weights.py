"""Checkpoints that are wrong, and saving that is interrupted."""

import json
import os

import numpy as np
import pytest
from moe_models import random_model, small_config
from safetensors.numpy import load_file, save_file

from strop.moe import MoETransformer, weights

EXPERT = "model.layers.1.block_sparse_moe.experts.2.w3.weight"


@pytest.fixture
def folder(tmp_path):
    random_model(small_config(), dtype=np.float32).save(tmp_path / "model")
    return tmp_path / "model"


def load(folder):
    return MoETransformer.load(folder, "numpy")


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "gone"}))


def test_layout_on_disk(folder):
    tensors = load_file(folder / "model.safetensors")
    model = load(folder)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    gate_up = model.params["model.layers.1.mlp.experts.gate_up_proj"]
    assert np.array_equal(tensors[EXPERT], gate_up[2, 6:])  # w3 is the up projection, the second half
    assert np.array_equal(tensors[EXPERT.replace("w3", "w1")], gate_up[2, :6])
    assert np.array_equal(tensors[EXPERT.replace("w3", "w2")], model.params["model.layers.1.mlp.experts.down_proj"][2])


def test_loaded_parameters_can_be_trained(folder):
    assert all(param.flags.writeable and param.flags.c_contiguous for param in load(folder).params.values())


def test_float64_stays(tmp_path):
    model = random_model(small_config())
    model.save(tmp_path)
    again = load(tmp_path)
    assert again.dtype == np.float64
    assert np.array_equal(again.params["lm_head.weight"], model.params["lm_head.weight"])
    assert MoETransformer.load(tmp_path, "numpy", dtype=np.float32).dtype == np.float32


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.pop(EXPERT), ValueError, f"lacks tensor '{EXPERT}'$"),
        (lambda t: t.update({"model.layers.2.surprise": np.ones(3)}), ValueError, "has the unknown tensor 'model.layers.2.surprise'$"),
        (lambda t: t.update({EXPERT: np.ones((8, 6), np.float32)}), ValueError, rf"{EXPERT} in .* must have the shape \(6, 8\), found \(8, 6\)"),
        (lambda t: t.update({EXPERT: np.ones((6, 8), np.int64)}), TypeError, f"{EXPERT} in .* must be BF16, F16, F32 or F64, found I64"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(folder, change, error, message):
    change_tensors(folder, change)
    with pytest.raises(error, match=message):
        load(folder)


def test_a_tied_head_stored_twice_is_loaded_once(tmp_path):
    model = random_model(small_config(tie_embeddings=True), dtype=np.float32)
    model.save(tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    assert list(load(tmp_path).params) == list(model.params)


def test_a_tied_head_with_other_weights_is_refused(tmp_path):
    random_model(small_config(tie_embeddings=True), dtype=np.float32).save(tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": np.ones((11, 8), np.float32)}))
    with pytest.raises(ValueError, match=r"lm_head.weight in .* must equal model.embed_tokens.weight .*, found others"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_truncated_file(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model.safetensors is truncated or no safetensors file"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type in config.json must be 'mixtral', found 'llama'"),
        ({"hidden_size": "gone"}, "config.json lacks 'hidden_size'"),
        ({"sliding_window": 8}, "sliding_window in config.json must be None .*, found 8"),
        ({"hidden_act": "gelu"}, "hidden_act in config.json must be 'silu' .*, found 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout in config.json must be 0.0 .*, found 0.1"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise in config.json must be 0.0 .*, found 0.1"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type .* 'default' .*, found 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}}, "rope_type .*, found 'linear'"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2}},
            "rope_type .*, found 'linear'",
        ),  # beside the newer key
        ({"rope_parameters": [1]}, "rope_parameters in config.json must be an object, found list"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads must be at least 1, found 0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config in config.json must be None"),
        ({"num_experts_per_tok": 9}, "top_k must be at most num_experts=3, found 9"),
        ({"num_hidden_layers": 3}, r"lacks tensor 'model.layers.2.*' \(and 15 more\)"),
    ],
)
def test_config_that_strop_cannot_run(folder, changes, message):
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        load(folder)


OLDER = {  # as Mixtral's first checkpoints have it: rope_theta at the top, no head_dim, no keys of strop
    "rope_parameters": "gone", "rope_theta": 500.0, "strop_rope_base": "gone", "strop_rope_alpha": "gone",
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        (OLDER, {"rope_base": 500.0, "rope_alpha": 1.0, "head_dim": 4}),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 500.0}}, {"rope_theta": 500.0}),  # as in transformers
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}, {"rope_theta": 777.0}),
        ({"sliding_window": 24}, {"max_seq_len": 24}),  # longer than any row
    ],
)
def test_settings_of_other_programs(folder, changes, wanted):
    change_config(folder, **changes)
    config = weights.from_mixtral(json.loads((folder / "config.json").read_text()))
    assert {name: getattr(config, name) for name in wanted} == wanted


def test_what_a_config_leaves_out_is_mixtrals_default(folder):
    config = json.loads((folder / "config.json").read_text()) | {"num_attention_heads": 16, "rope_parameters": None}
    for name in ("num_key_value_heads", "bos_token_id", "eos_token_id", "rms_norm_eps", "strop_rope_base"):
        del config[name]
    found = weights.from_mixtral(config)
    assert (found.num_kv_heads, found.bos_token_id, found.eos_token_id) == (8, 1, 2)
    assert (found.rope_theta, found.rms_norm_eps) == (1e6, 1e-5)


def test_missing_files(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"folder must be a directory with config.json"):
        load(tmp_path / "nowhere")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"must hold model.safetensors or model.safetensors.index.json"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(FileNotFoundError, match=r"names model-1.safetensors, found no such file"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json must be JSON"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"must hold config.json, found none"):
        load(folder)


@pytest.mark.parametrize("when", ["writing", "renaming"])
def test_an_interrupted_save_leaves_the_last_good_checkpoint(folder, monkeypatch, when):
    before = load(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}

    def half_then_killed(tensors, path, metadata=None):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    def killed(*_):
        raise KeyboardInterrupt

    if when == "writing":
        monkeypatch.setattr(weights, "save_file", half_then_killed)
    else:
        monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        random_model(small_config(), seed=9, dtype=np.float32).save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert np.array_equal(load(folder).params["lm_head.weight"], before.params["lm_head.weight"])


def test_saving_keeps_other_files_and_replaces_ours(folder):
    (folder / "tokenizer.json").write_text("{}")
    other = random_model(small_config(), seed=9, dtype=np.float32)
    other.save(folder)
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert np.array_equal(load(folder).params["lm_head.weight"], other.params["lm_head.weight"])


def test_saving_over_a_file_is_refused(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(NotADirectoryError, match="folder must be a directory, found a file"):
        random_model(small_config()).save(tmp_path / "taken")
