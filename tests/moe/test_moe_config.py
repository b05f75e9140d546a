"""The config: presets, what it computes, and every value it refuses."""

import json
import tracemalloc
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
from moe_models import random_batch, random_model

from strop.moe import MoEConfig


def test_field_names_are_a_decision():
    assert [field.name for field in fields(MoEConfig)] == [
        "hidden_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "num_experts", "top_k", "intermediate_dim",
        "vocab_size", "max_seq_len", "rope_base", "rope_alpha", "aux_loss_coef", "tie_embeddings", "rms_norm_eps",
        "bos_token_id", "eos_token_id", "pad_token_id",
    ]  # fmt: skip


def test_presets():
    tiny = MoEConfig.preset("tiny")
    assert (tiny.hidden_dim, tiny.num_layers, tiny.num_heads, tiny.num_kv_heads, tiny.head_dim) == (64, 2, 4, 1, 16)
    assert (tiny.num_experts, tiny.top_k, tiny.intermediate_dim, tiny.vocab_size) == (4, 2, 128, 1000)
    assert (tiny.rope_base, tiny.tie_embeddings) == (10000.0, False)
    assert MoEConfig.preset("small").hidden_dim == 256
    assert MoEConfig.preset("tiny", top_k=1).top_k == 1
    with pytest.raises(ValueError, match="preset must be one of 'tiny', 'small', found 'huge'"):
        MoEConfig.preset("huge")
    with pytest.raises(FrozenInstanceError):
        tiny.top_k = 1


def test_parameter_count_by_hand():
    # per layer: norms 2·64, q and o 2·64·64, k and v 2·64·16, router 4·64, experts 4·3·64·256; two tables, one norm
    layer = 128 + 8192 + 2048 + 256 + 196608
    config = MoEConfig.preset("tiny", intermediate_dim=256)
    assert config.num_parameters() == 2 * layer + 2 * 64000 + 64 == 542_528
    assert config.num_parameters(active=True) == 542_528 - 2 * 2 * 3 * 64 * 256
    assert MoEConfig.preset("tiny", intermediate_dim=256, tie_embeddings=True).num_parameters() == 542_528 - 64000


def test_ntk_scaling_by_hand():
    assert MoEConfig(head_dim=16, rope_base=10000.0, rope_alpha=1.0).rope_theta == 10000.0
    assert MoEConfig(head_dim=4, rope_base=100.0, rope_alpha=3.0).rope_theta == pytest.approx(900.0)  # 3^(4/2)


def test_memory_estimate_is_near_what_is_allocated():
    config = MoEConfig.preset("tiny")
    model = random_model(config, dtype=np.float32, std=0.02)
    tokens, targets, _, _ = random_batch(config, (4, 64))
    model.loss_and_grads(tokens, targets)
    tracemalloc.start()
    model.loss_and_grads(tokens, targets)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    weights_and_moments = 3 * 4 * config.num_parameters()
    assert 0.5 < (peak + weights_and_moments) / config.memory_bytes(4, 64, training=True) < 2
    tracemalloc.start()
    model.forward(tokens)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0.5 < (peak + weights_and_moments / 3) / config.memory_bytes(4, 64) < 2
    assert config.memory_bytes(1, 1) < 1.1 * 4 * config.num_parameters()
    assert config.memory_bytes(1, 1, dtype=np.float64) == 2 * config.memory_bytes(1, 1)


def test_numpy_numbers_become_pythons():
    ids = np.array([5, 7])
    config = MoEConfig(
        vocab_size=ids.max() + 1, rope_base=np.float32(500), eos_token_id=list(ids), pad_token_id=np.uint8(3)
    )
    assert json.dumps(config.to_dict())
    assert config == MoEConfig(vocab_size=8, rope_base=500.0, eos_token_id=(5, 7), pad_token_id=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, found 0"),
        ({"vocab_size": -5}, "vocab_size must be at least 1, found -5"),
        ({"num_heads": 6, "num_kv_heads": 4}, "num_heads must be a multiple of num_kv_heads=4, found 6"),
        ({"head_dim": 15}, r"head_dim must be even \(RoPE rotates pairs of channels\), found 15"),
        ({"head_dim": 2, "rope_alpha": 2.0}, "rope_alpha must be 1 for head_dim=2 .*, found 2.0"),
        ({"top_k": 5}, "top_k must be at most num_experts=4, found 5"),
        ({"rope_base": 0.0}, "rope_base must be finite and above 0, found 0.0"),
        ({"rope_alpha": float("nan")}, "rope_alpha must be finite and above 0, found nan"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be finite and above 0, found 0.0"),
        ({"aux_loss_coef": -0.1}, "aux_loss_coef must be finite and at least 0, found -0.1"),
        ({"eos_token_id": 1000}, "eos_token_id must be below vocab_size=1000, found 1000"),
        ({"eos_token_id": (3, 2000)}, "eos_token_id must be below vocab_size=1000, found 2000"),
        ({"pad_token_id": -1}, "pad_token_id must be at least 0, found -1"),
    ],
)
def test_refused_values(changes, message):
    with pytest.raises(ValueError, match=message):
        MoEConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 2.0}, "num_layers must be an int, found float"),
        ({"top_k": True}, "top_k must be an int, found bool"),
        ({"rope_base": "big"}, "rope_base must be a number, found str"),
        ({"tie_embeddings": 1}, "tie_embeddings must be a bool, found int"),
        ({"bos_token_id": 1.5}, "bos_token_id must be an int, found float"),
    ],
)
def test_refused_types(changes, message):
    with pytest.raises(TypeError, match=message):
        MoEConfig(**changes)
