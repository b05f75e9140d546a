"""Every gradient against central differences in float64, and proof that the check can fail.

The loss that is differenced is written here from logits and the auxiliary loss, not taken from `loss_and_grads`.
"""

import importlib

import numpy as np
import pytest
from moe_models import log_softmax, random_batch, random_model, small_config

MODELS = {
    "gqa, top-2 of 3": ({}, {}),
    "mqa": ({"num_kv_heads": 1}, {}),
    "one head for each": ({"num_kv_heads": 4}, {}),
    "top-1": ({"top_k": 1}, {}),
    "top-1, aux": ({"top_k": 1, "aux_loss_coef": 0.5}, {}),
    "top-all": ({"top_k": 3}, {}),
    "top-all, aux, tied": ({"top_k": 3, "aux_loss_coef": 0.3, "tie_embeddings": True}, {}),
    "tied": ({"tie_embeddings": True}, {}),
    "aux": ({"aux_loss_coef": 0.7}, {}),
    "one expert, one layer": ({"num_experts": 1, "top_k": 1, "num_layers": 1}, {}),
    "ntk": ({"rope_alpha": 4.0, "head_dim": 6, "num_experts": 4}, {}),
    "left padding, aux": ({"aux_loss_coef": 0.7}, {"padding": "left"}),
    "padding anywhere, mqa, tied": ({"num_kv_heads": 1, "tie_embeddings": True}, {"padding": "mixed"}),
    "one token": ({"aux_loss_coef": 0.2}, {"shape": (1, 1)}),
}


def loss_of(model, tokens, targets, mask, attention_mask):
    saved = model.engine.forward_saved(tokens, attention_mask)
    counts = mask & attention_mask
    logps = np.take_along_axis(log_softmax(saved.logits_BTV), targets[..., None], -1)[..., 0]
    return -logps[counts].mean() + model.config.aux_loss_coef * saved.aux_loss


def central_differences(model, batch, name, entries, h=1e-4):
    """Fourth order: (8·(L₊₁ − L₋₁) − (L₊₂ − L₋₂)) / 12h, so that truncation stays below rounding."""
    flat = model.params[name].reshape(-1)
    numeric = []
    for entry in entries:
        before = flat[entry]
        losses = {}
        for k in (1, -1, 2, -2):
            flat[entry] = before + k * h
            losses[k] = loss_of(model, *batch)
        flat[entry] = before
        numeric.append((8 * (losses[1] - losses[-1]) - (losses[2] - losses[-2])) / (12 * h))
    return np.array(numeric)


def wrong_tensors(model, batch, grads, entries_per_tensor=10):
    """Names of the tensors whose gradient is off by more than 1e-6 of its own size, on entries where there is any."""
    rng = np.random.default_rng(7)
    wrong = {}
    for name, grad in grads.items():
        flat = grad.reshape(-1)
        some = rng.choice(flat.size, min(flat.size, entries_per_tensor), replace=False)
        largest = np.argsort(-np.abs(flat))[: entries_per_tensor // 2]
        entries = np.union1d(some, largest)
        numeric = central_differences(model, batch, name, entries)
        error = np.linalg.norm(numeric - flat[entries])
        if not error <= 1e-6 * np.linalg.norm(numeric) + 1e-11:
            wrong[name] = error / max(np.linalg.norm(numeric), 1e-30)
    return wrong


def model_and_batch(label, engine):
    changes, batch_settings = MODELS[label]
    config = small_config(**changes)
    tokens, targets, mask, attention_mask = random_batch(config, **batch_settings)
    mask.reshape(-1)[-1] = True  # at least one target counts
    return random_model(config, engine), (tokens, targets, mask, attention_mask)


@pytest.mark.parametrize("label", MODELS)
def test_every_gradient(label, float64_engine):
    model, batch = model_and_batch(label, float64_engine)
    loss, grads = model.loss_and_grads(*batch[:3], attention_mask=batch[3])
    assert loss == pytest.approx(loss_of(model, *batch), rel=1e-12)
    assert list(grads) == list(model.config.parameter_shapes())
    assert wrong_tensors(model, batch, grads) == {}


def test_every_entry_of_a_small_model(float64_engine):
    """No sampling of entries: all of them, once."""
    config = small_config(num_layers=1, hidden_dim=4, num_heads=2, num_kv_heads=1, vocab_size=7, aux_loss_coef=0.2)
    model = random_model(config, float64_engine)
    tokens, targets, mask, attention_mask = random_batch(config, (2, 5))
    _, grads = model.loss_and_grads(tokens, targets, mask)
    assert wrong_tensors(model, (tokens, targets, mask, attention_mask), grads, entries_per_tensor=10**6) == {}


def test_a_router_with_top_1_learns_only_from_the_auxiliary_loss(float64_engine):
    """Renormalised, the one chosen weight is 1 whatever the router says."""
    model, batch = model_and_batch("top-1", float64_engine)
    _, grads = model.loss_and_grads(*batch[:3])
    assert np.abs(grads["model.layers.0.mlp.gate.weight"]).max() < 1e-15


def test_embedding_of_an_absent_token_has_no_gradient(moe_engine):
    config = small_config()
    model = random_model(config, moe_engine, dtype=np.float32)
    _, grads = model.loss_and_grads([[1, 2, 1]], [[2, 1, 3]])
    used = np.abs(grads["model.embed_tokens.weight"]).sum(1) > 0
    assert used.tolist() == [token in (1, 2) for token in range(config.vocab_size)]


# ---- the check has teeth ----


def reference(module):
    return importlib.import_module(f"strop.moe.reference.{module}")


def unrotated(monkeypatch):
    monkeypatch.setattr(reference("attention"), "rope_bwd", lambda dy, cos, sin: dy)


def rotated_forward(monkeypatch):
    monkeypatch.setattr(reference("attention"), "rope_bwd", reference("rope").rope)


def no_router_gradient(monkeypatch):
    def route_bwd(dweights, dp_aux, saved):
        (x, w), *_ = saved
        return np.zeros_like(x), np.zeros_like(w)

    monkeypatch.setattr(reference("moe"), "route_bwd", route_bwd)


def no_renormalisation_path(monkeypatch):
    original = reference("router").route_bwd

    def route_bwd(dweights, dp_aux, saved):
        linear_saved, p, experts, weights, total = saved
        return original(dweights, dp_aux, (linear_saved, p, experts, np.zeros_like(weights), total))

    monkeypatch.setattr(reference("moe"), "route_bwd", route_bwd)


def norm_and_attention_swapped(monkeypatch):
    """The norm's backward on the way into attention's, instead of after it; same for the experts."""
    module = reference("block")

    def block_bwd(dy, dp_aux, saved):
        norm1_saved, attention_saved, norm2_saved, moe_saved = saved
        dn2, dnorm2 = module.rms_norm_bwd(dy, norm2_saved)
        dbranch, *dexperts = module.moe_bwd(dn2, dp_aux, moe_saved)
        dm = dy + dbranch
        dn1, dnorm1 = module.rms_norm_bwd(dm, norm1_saved)
        dbranch, *dattention = module.attention_bwd(dn1, attention_saved)
        grads = {"input_layernorm.weight": dnorm1, "post_attention_layernorm.weight": dnorm2}
        grads |= dict(zip(module.ATTENTION, dattention, strict=True)) | dict(zip(module.EXPERTS, dexperts, strict=True))
        return dm + dbranch, grads

    monkeypatch.setattr(reference("model"), "block_bwd", block_bwd)


def no_auxiliary_gradient(monkeypatch):
    monkeypatch.setattr(reference("model"), "aux_loss_bwd", lambda daux, saved: np.zeros_like(saved[0]))


def norm_without_its_second_path(monkeypatch):
    def rms_norm_bwd(dy, saved):
        n, r, w = saved
        return r * dy * w, (dy * n).sum(0)

    monkeypatch.setattr(reference("block"), "rms_norm_bwd", rms_norm_bwd)


MUTATIONS = {
    unrotated: "self_attn.q_proj.weight",
    rotated_forward: "self_attn.k_proj.weight",
    no_router_gradient: "mlp.gate.weight",
    no_renormalisation_path: "mlp.gate.weight",
    norm_and_attention_swapped: "input_layernorm.weight",
    no_auxiliary_gradient: "mlp.gate.weight",
    norm_without_its_second_path: "input_layernorm.weight",
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_broken_backward_is_noticed(mutation, monkeypatch):
    model, batch = model_and_batch("aux", "numpy")
    mutation(monkeypatch)
    _, grads = model.loss_and_grads(*batch[:3])
    wrong = wrong_tensors(model, batch, grads, 4)
    assert any(name.endswith(MUTATIONS[mutation]) for name in wrong), wrong
    assert max(wrong.values()) > 1e-3  # far from the tolerance, not a rounding accident


@pytest.mark.parametrize("name", list(small_config().parameter_shapes()))
def test_a_zero_or_nan_gradient_is_noticed(name):
    model, batch = model_and_batch("aux", "numpy")
    _, grads = model.loss_and_grads(*batch[:3])
    assert wrong_tensors(model, batch, {name: np.zeros_like(grads[name])}, 4)
    assert wrong_tensors(model, batch, {name: np.full_like(grads[name], np.nan)}, 4)
