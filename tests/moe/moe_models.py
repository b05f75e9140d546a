"""Models and helpers the MoE tests share."""

import numpy as np

from strop.moe import MoEConfig, MoETransformer


def small_config(**changes):
    """A model of a few hundred parameters per layer: GQA with two query heads per key/value head, top-2 of 3."""
    attention = {"hidden_dim": 8, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "rope_base": 100.0}
    experts = {"num_experts": 3, "top_k": 2, "intermediate_dim": 6, "aux_loss_coef": 0.0}
    return MoEConfig(**{"vocab_size": 11, "max_seq_len": 24, **attention, **experts, **changes})


def random_model(config, engine="numpy", *, seed=0, dtype=np.float64, std=0.4):
    """Weights far larger than an initial model's: attention that is not uniform, norms that are not 1."""
    rng = np.random.default_rng(seed)
    model = MoETransformer(config, engine, dtype=dtype)
    for param in model.params.values():
        param[...] = (param.ndim == 1) + std * rng.standard_normal(param.shape)
    return model


def random_batch(config, shape=(3, 6), *, seed=1, padding=None):
    """tokens, targets, target mask and attention mask; padding "left", "mixed" or None."""
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, config.vocab_size, (2, *shape))
    mask = rng.random(shape) < 0.7
    attention_mask = np.ones(shape, bool)
    if padding == "left":
        for row in range(shape[0]):
            attention_mask[row, : (row * 2) % shape[1]] = False
    elif padding == "mixed":
        attention_mask = rng.random(shape) < 0.7
        attention_mask[:, shape[1] // 2] = True
    return tokens, targets, mask, attention_mask


def same(found, wanted, engine):
    """Bit for bit on the native engine, which has one order for every sum; NumPy's products are those of a BLAS."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    if engine == "native":
        assert np.array_equal(found, wanted)
    else:
        np.testing.assert_allclose(found, wanted, rtol=0, atol=64 * np.finfo(wanted.dtype).eps * np.abs(wanted).max())


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))
