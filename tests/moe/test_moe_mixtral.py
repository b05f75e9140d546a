"""The outside oracle: transformers' MixtralForCausalLM with the same weights, in memory and through checkpoints."""

import json

import numpy as np
import pytest
from moe_models import random_model, small_config
from safetensors.numpy import load_file
from yardstick import clearly_greedy

from strop.moe import MoEConfig, MoETransformer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch_models import mixtral_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours


def random_config(seed):
    """Any shape: heads from MQA to one for each, top-1 to top-all, tied or not, NTK or not."""
    rng = np.random.default_rng(seed)
    kv_heads, experts = int(rng.integers(1, 4)), int(rng.integers(1, 7))
    return MoEConfig(
        hidden_dim=int(rng.integers(3, 20)) * 2,
        num_layers=int(rng.integers(1, 4)),
        num_heads=kv_heads * int(rng.integers(1, 4)),
        num_kv_heads=kv_heads,
        head_dim=int(rng.integers(2, 9)) * 2,
        num_experts=experts,
        top_k=int(rng.integers(1, experts + 1)),
        intermediate_dim=int(rng.integers(3, 40)),
        vocab_size=int(rng.integers(5, 120)),
        max_seq_len=64,
        rope_base=float(rng.choice([100.0, 1e4, 1e6])),
        rope_alpha=float(rng.choice([1.0, 1.0, 2.5])),
        aux_loss_coef=float(rng.choice([0.0, 0.1, 1.0])),
        tie_embeddings=bool(rng.integers(2)),
        rms_norm_eps=float(rng.choice([1e-5, 1e-6])),
    )


def mixtral_loss(mixtral, tokens, labels, attention_mask=None):
    """Their loss (labels shifted inside, −100 left out) with their auxiliary loss, and the gradients."""
    mask = None if attention_mask is None else torch.from_numpy(attention_mask.astype(np.int64))
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)
    mixtral.zero_grad()
    result = mixtral(
        input_ids=torch.from_numpy(tokens),
        attention_mask=mask,
        position_ids=positions,
        labels=torch.from_numpy(labels),
    )
    result.loss.backward()
    grads = {name: p.grad.numpy() for name, p in mixtral.named_parameters()}
    return result.loss.item(), result.logits.detach().numpy(), grads


def shifted(tokens, counts):
    """targets and mask for strop, labels for Mixtral, of the same meaning."""
    targets, mask = np.roll(tokens, -1, 1), np.roll(counts, -1, 1)
    mask[:, -1] = False
    labels = np.where(counts, tokens, -100)
    labels[:, 0] = -100
    return targets, mask, labels


def compare(model, tokens, counts, attention_mask=None):
    targets, mask, labels = shifted(tokens, counts)
    want_loss, want_logits, want_grads = mixtral_loss(mixtral_of(model), tokens, labels, attention_mask)
    real = np.ones(tokens.shape, bool) if attention_mask is None else attention_mask
    logits = model.forward(tokens, attention_mask)
    assert np.abs(logits - want_logits)[real].max() <= 1e-5
    loss, grads = model.loss_and_grads(tokens, targets, mask, attention_mask=attention_mask)
    assert abs(loss - want_loss) <= 1e-6 * max(1.0, abs(want_loss))
    assert want_grads.keys() == grads.keys()
    for name, want in want_grads.items():
        error = np.linalg.norm(grads[name] - want) / max(np.linalg.norm(want), 1e-6)
        assert error <= 1e-4, f"{name}: {error}"


@pytest.mark.parametrize("seed", range(12))
def test_logits_loss_and_gradients(seed, moe_engine):
    rng = np.random.default_rng(100 + seed)
    config = random_config(seed)
    model = random_model(config, moe_engine, seed=seed, dtype=np.float32, std=0.15)
    shape = (int(rng.integers(1, 4)), int(rng.integers(2, 20)))
    tokens = rng.integers(0, config.vocab_size, shape)
    counts = rng.random(shape) < 0.8
    counts[:, 1] = True
    compare(model, tokens, counts)


@pytest.mark.parametrize("seed", range(20, 24))
def test_left_padding_with_the_auxiliary_loss(seed, moe_engine):
    config = random_config(seed)
    config = MoEConfig(**{**config.to_dict(), "aux_loss_coef": 0.5})
    model = random_model(config, moe_engine, seed=seed, dtype=np.float32, std=0.15)
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size, (3, 9))
    attention_mask = np.arange(9) >= np.array([0, 3, 6])[:, None]
    counts = attention_mask & np.roll(attention_mask, 1, 1)  # padding predicts nothing: not even the first real token
    compare(model, tokens, counts, attention_mask)


# ---- checkpoints, both ways ----


def greedy_mixtral(mixtral, prompt, count):
    ids = torch.from_numpy(prompt)
    result = clearly_greedy(mixtral, ids, max_new_tokens=count, eos_token_id=None, pad_token_id=0)
    return result[:, prompt.shape[1] :].numpy()


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, {"rope_alpha": 4.0, "top_k": 1}])
def test_transformers_opens_a_strop_model(tmp_path, changes, moe_engine):
    ids = {"eos_token_id": (2, 3), "pad_token_id": 0}
    model = random_model(small_config(aux_loss_coef=0.2, **ids, **changes), moe_engine, dtype=np.float32)
    model.save(tmp_path)
    own = MoETransformer.load(tmp_path, moe_engine)
    assert (own.config, own.dtype) == (model.config, np.float32)
    assert all(np.array_equal(own.params[name], param) for name, param in model.params.items())
    mixtral, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, experts_implementation="eager"
    )
    assert not any(info.values()), info
    assert type(mixtral).__name__ == "MixtralForCausalLM"
    prompt = np.random.default_rng(2).integers(0, 11, (3, 5))
    want = greedy_mixtral(mixtral.eval(), prompt, 8)
    got = model.generate(prompt, max_new_tokens=8, temperature=0, eos_token_id=())
    assert got.tokens_BT.tolist() == want.tolist()
    mixtral.save_pretrained(tmp_path / "again")  # and back
    again = MoETransformer.load(tmp_path / "again", moe_engine)
    assert all(np.array_equal(again.params[name], param) for name, param in model.params.items())
    assert again.config.rope_theta == model.config.rope_theta


@pytest.mark.parametrize("how", ["whole", "sharded", "fused", "bfloat16", "float16", "float64"])
def test_strop_opens_a_mixtral(tmp_path, how, moe_engine):
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        intermediate_size=24, vocab_size=50, max_position_embeddings=40, initializer_range=0.3, eos_token_id=[1, 2],
    )  # fmt: skip
    mixtral = transformers.MixtralForCausalLM(config)
    if how in ("bfloat16", "float16", "float64"):
        mixtral = mixtral.to(getattr(torch, how))
    if how == "fused":
        mixtral.save_pretrained(tmp_path, save_original_format=False)
        assert any(key.endswith("mlp.experts.gate_up_proj") for key in load_file(tmp_path / "model.safetensors"))
    else:
        mixtral.save_pretrained(tmp_path, **({"max_shard_size": "20KB"} if how == "sharded" else {}))
    assert (tmp_path / "model.safetensors.index.json").exists() == (how == "sharded")
    model = MoETransformer.load(tmp_path, moe_engine, dtype=np.float32)
    assert model.config.eos_token_ids == (1, 2)
    assert model.config.rope_base == 1e6
    prompt = np.random.default_rng(2).integers(0, 50, (3, 5))
    want = greedy_mixtral(mixtral.float().eval(), prompt, 10)
    got = model.generate(prompt, max_new_tokens=10, temperature=0, eos_token_id=())
    assert got.tokens_BT.tolist() == want.tolist()


def test_saved_config_is_one_transformers_would_write(tmp_path):
    """Every key and value we write survives in what transformers writes of the same model."""
    random_model(small_config(), dtype=np.float32).save(tmp_path / "ours")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    ours = json.loads((tmp_path / "ours" / "config.json").read_text())
    theirs = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert {key: value for key, value in ours.items() if theirs.get(key) != value} == {}


@pytest.mark.parametrize("masked", [False, True])
def test_auxiliary_loss_has_their_value(masked, moe_engine):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config = small_config(num_experts=5, num_layers=3, aux_loss_coef=0.1)
    model = random_model(config, moe_engine, dtype=np.float32)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (3, 8))
    attention_mask = np.arange(8) >= np.array([0, 2, 5])[:, None] if masked else None
    mask = None if attention_mask is None else torch.from_numpy(attention_mask.astype(np.int64))
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        theirs = mixtral_of(model)(
            input_ids=torch.from_numpy(tokens), attention_mask=mask, position_ids=positions, output_router_logits=True
        )
    want = load_balancing_loss_func(theirs.router_logits, config.num_experts, config.top_k, mask).item()
    assert model.engine.forward_saved(tokens, attention_mask).aux_loss == pytest.approx(want, rel=1e-6)
