"""Log-probs and entropies without the logits: by hand, against differences, engine against engine, bit for bit with sampling."""

import math

import numpy as np
import pytest
from moe_models import log_softmax, random_batch, random_model, same, same_bits, small_config

import strop
from strop import _compiled
from strop.moe import MoEConfig, MoETransformer, _inputs
from strop.moe.reference import engine as reference_engine
from strop.moe.reference.logps import logps, logps_bwd

NATIVE = pytest.mark.skipif(_compiled.native is None, reason=f"the compiled module is {_compiled.native_status}")

# Sizes below, at and above a vector, a tile, a panel of 64 tokens and a slice of 256 features.
CONFIGS = {
    "tiny": MoEConfig(max_seq_len=200),
    "odd": small_config(
        hidden_dim=19, head_dim=6, intermediate_dim=37, vocab_size=101, num_experts=5, top_k=3, max_seq_len=200
    ),
    "tied, wide experts": small_config(
        hidden_dim=33, num_kv_heads=4, head_dim=10, intermediate_dim=600, tie_embeddings=True, max_seq_len=200
    ),
    "mqa top-1": small_config(num_heads=12, num_kv_heads=1, head_dim=2, top_k=1, vocab_size=67, max_seq_len=200),
}


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


def scored_batch(config, shape=(6, 12), *, padding="mixed", seed=1):
    """Rows that begin alike: 1 and 2 for half their length, 3 wholly as 2, 4 for one token less than the mask leaves."""
    tokens, _, mask, attention_mask = random_batch(config, shape, padding=padding, seed=seed)
    for row, length in ((1, shape[1] // 2), (2, shape[1] // 2), (3, shape[1]), (4, shape[1] - 1)):
        if row < shape[0]:
            tokens[row, :length] = tokens[row - 1, :length]
            attention_mask[row, :length] = attention_mask[row - 1, :length]
    tokens, attention_mask = _inputs.as_batch(tokens, attention_mask, config)
    return tokens, _inputs.as_counts(mask, tokens, attention_mask, "mask"), attention_mask


def from_logits(model, tokens, counts, attention_mask, temperature):
    """The same by way of all logits, row by row without its padding."""
    found, entropy = np.zeros(tokens.shape), np.zeros(tokens.shape)
    for row in range(len(tokens)):
        real = np.arange(tokens.shape[1]) if attention_mask is None else np.nonzero(attention_mask[row])[0]
        logits = model.forward(tokens[row : row + 1, real])[0].astype(np.float64)
        log_p = log_softmax(logits / temperature)
        for before, at in enumerate(real[1:]):
            if counts[row, at]:
                found[row, at] = log_p[before, tokens[row, at]]
                entropy[row, at] = -(np.exp(log_p[before]) * log_p[before]).sum()
    return found, entropy


# ---- by hand ----


def test_by_hand():
    ln2 = math.log(2)
    logits = np.array([[0.0, 0.0, ln2], [-np.inf, 3.0, 3.0]])  # p = ¼, ¼, ½ and 0, ½, ½
    found, entropy, saved = logps(logits, np.array([2, 1]), 1.0)
    assert found == pytest.approx([-ln2, -ln2], rel=1e-15)
    assert entropy == pytest.approx([1.5 * ln2, ln2], rel=1e-15)
    d = logps_bwd(np.array([1.0, 2.0]), np.zeros(2), saved)
    assert d == pytest.approx(np.array([[-0.25, -0.25, 0.5], [0.0, 1.0, -1.0]]), abs=1e-15)
    # −p·(log p + H): −¼·(−2 + 1.5)·ln 2 = ⅛·ln 2, −½·(−1 + 1.5)·ln 2 = −¼·ln 2; flat among what is possible: 0
    d = logps_bwd(np.zeros(2), np.ones(2), saved)
    assert d == pytest.approx(np.array([[ln2 / 8, ln2 / 8, -ln2 / 4], [0.0, 0.0, 0.0]]), abs=1e-15)


def test_temperature_by_hand():
    """softmax((0, 2·ln 3)/2) = ¼, ¾; gradients are halved."""
    found, _, saved = logps(np.array([[0.0, 2 * math.log(3)]]), np.array([0]), 2.0)
    assert found == pytest.approx([math.log(0.25)], rel=1e-14)
    assert logps_bwd(np.ones(1), np.zeros(1), saved) == pytest.approx(np.array([[0.375, -0.375]]))


# ---- every engine ----


@pytest.mark.parametrize("padding", [None, "left", "mixed"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_equal_those_of_the_logits(moe_engine, padding, temperature):
    model = random_model(small_config(), moe_engine, dtype=np.float32)
    batch = scored_batch(model.config, padding=padding)
    found = model.engine.logps(*batch, temperature=temperature)
    saved = model.engine.logps_saved(*batch, temperature=temperature)
    for value, again, want in zip(
        found, (saved.logps_BT, saved.entropy_BT), from_logits(model, *batch, temperature), strict=True
    ):
        assert value.dtype == np.float64
        assert np.abs(value - again).max() <= (0 if moe_engine == "native" else 1e-5)
        assert not value[~batch[1]].any()
        assert np.abs(value - want).max() < 1e-5
    assert (found[0][batch[1]] < 0).all()
    assert (found[1][batch[1]] > 0).all()


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True, "num_kv_heads": 1}, {"top_k": 1}], ids=str)
@pytest.mark.parametrize("padding", [None, "mixed"])
def test_gradients_against_differences(float64_engine, changes, padding):
    model = random_model(small_config(**changes), float64_engine)
    assert not wrong_gradients(model, padding)


def wrong_gradients(model, padding):
    """Names of the tensors whose gradient is off by more than 1e-6 of its size; of Σ a·logp + Σ b·entropy."""
    batch = scored_batch(model.config, (6, 7), padding=padding)
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, *batch[0].shape))

    def loss():
        found, entropy = model.engine.logps(*batch, temperature=0.8)
        return (a * found).sum() + (b * entropy).sum()

    grads = model.engine.logps_backward(model.engine.logps_saved(*batch, temperature=0.8), a, b)
    wrong, h = [], 1e-4
    for name, param in model.params.items():
        flat, grad = param.reshape(-1), grads[name].reshape(-1)
        entries = np.union1d(rng.choice(flat.size, min(flat.size, 6), replace=False), np.argsort(-np.abs(grad))[:4])
        for entry in entries:
            before, losses = flat[entry], {}
            for k in (1, -1, 2, -2):
                flat[entry] = before + k * h
                losses[k] = loss()
            flat[entry] = before
            difference = (8 * (losses[1] - losses[-1]) - (losses[2] - losses[-2])) / (12 * h)
            if abs(difference - grad[entry]) > 1e-6 * max(np.abs(grad).max(), 1e-3):
                wrong.append(name)
    return wrong


@pytest.mark.parametrize("broken", ["no entropy", "no target", "no temperature"])
def test_a_broken_backward_is_noticed(broken, monkeypatch):
    def mutated(dlogps_M, dentropy_M, saved):
        if broken == "no entropy":
            return logps_bwd(dlogps_M, 0 * dentropy_M, saved)
        d_MV = logps_bwd(dlogps_M, dentropy_M, saved)
        if broken == "no temperature":
            return d_MV * saved[4]
        d_MV[np.arange(len(d_MV)), saved[3]] -= dlogps_M / saved[4]
        return d_MV

    monkeypatch.setattr(reference_engine, "logps_bwd", mutated)
    assert len(wrong_gradients(random_model(small_config(), "numpy"), "mixed")) > 10


def test_garbage_where_nothing_counts_changes_nothing(moe_engine):
    model = random_model(small_config(), moe_engine, dtype=np.float32)
    tokens, counts, mask = scored_batch(model.config)
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((2, *tokens.shape))

    def scored(tokens, a, b):
        saved = model.engine.logps_saved(tokens, counts, mask)
        return saved.logps_BT, saved.entropy_BT, *model.engine.logps_backward(saved, a, b).values()

    want = scored(tokens, a, b)
    other = np.where(mask, tokens, rng.integers(0, model.config.vocab_size, tokens.shape))
    last = tokens.shape[1] - 1 - counts[:, ::-1].argmax(1)  # of each row that counts; what stands behind it is not read
    behind = (np.arange(tokens.shape[1]) > last[:, None]) & counts.any(1)[:, None]
    other = np.where(behind, rng.integers(0, model.config.vocab_size, tokens.shape), other)
    a, b = (np.where(counts, d, np.nan) for d in (a, b))
    for found, wanted in zip(scored(other, a, b), want, strict=True):
        assert np.abs(found - wanted).max() <= 1e-5 * max(np.abs(wanted).max(), 1e-3)


def test_nothing_counts(moe_engine):
    model = random_model(small_config(), moe_engine, dtype=np.float32)
    tokens, counts, mask = scored_batch(model.config)
    saved = model.engine.logps_saved(tokens, np.zeros_like(counts), mask)
    assert not saved.logps_BT.any()
    assert not saved.entropy_BT.any()
    out = {name: np.full_like(param, np.nan) for name, param in model.params.items()}
    grads = model.engine.logps_backward(saved, np.ones(tokens.shape), np.ones(tokens.shape), out)
    assert grads is out
    assert not any(grad.any() for grad in grads.values())
    counts[1:] = False  # and where it is so in most rows
    assert np.isfinite(model.engine.logps(tokens, counts, mask)[0]).all()


def test_gradients_are_written_over_and_several_passes_live(moe_engine):
    model = random_model(small_config(), moe_engine, dtype=np.float32)
    tokens, counts, mask = scored_batch(model.config)
    ones = np.ones(tokens.shape)
    first, second = (model.engine.logps_saved(tokens, counts, mask, temperature=t) for t in (1.0, 0.5))
    want = model.engine.logps_backward(model.engine.logps_saved(tokens, counts, mask), ones)
    out = {name: np.full_like(param, np.nan) for name, param in model.params.items()}
    model.engine.logps_backward(second, ones, ones)
    model.engine.logps_backward(first, ones, None, out)
    for name in want:
        same(out[name], want[name], moe_engine)


def test_drawn_tokens_get_the_same_log_prob_again(moe_engine):
    """Bit for bit in the native engine, in float64 before anything is rounded; in NumPy as far as its products go."""
    model = random_model(MoEConfig(vocab_size=300, max_seq_len=64), moe_engine, dtype=np.float32, std=0.1)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 300, length).tolist() for length in (9, 1, 17)]
    for temperature in (1.0, 0.7):
        made = model.generate(
            prompts, max_new_tokens=15, num_samples=4, temperature=temperature, seed=3, eos_token_id=range(20)
        )
        rows = [(prompts[i // 4], row.tolist()) for i, row in enumerate(made.completions)]
        tokens, mask = _inputs.left_padded([prompt + row for prompt, row in rows])
        counts = np.zeros(mask.shape, bool)
        for row, (_, completion) in enumerate(rows):
            counts[row, counts.shape[1] - len(completion) :] = True
        found, _ = model.logps(tokens, counts, attention_mask=mask, temperature=temperature)
        drawn = np.concatenate([row[:n] for row, n in zip(made.logps_BT, made.lengths_B, strict=True)])
        if moe_engine == "native":
            assert same_bits(found[counts], drawn)
        assert np.abs(found[counts] - drawn).max() < 1e-5


def test_first_tokens_and_padding_never_count(moe_engine):
    model = random_model(small_config(), moe_engine)
    tokens, _, _, mask = random_batch(model.config, (4, 7), padding="left")
    found, entropy = model.logps(tokens, attention_mask=mask)
    wanted = mask & (mask.cumsum(1) > 1)
    assert np.array_equal(found != 0, wanted)
    assert np.array_equal(entropy != 0, wanted)
    assert (model.logps(tokens[:, :1])[0] == 0).all()  # one token: nothing is predicted


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"temperature": 0}, ValueError, r"temperature must be finite and above 0"),
        ({"temperature": "hot"}, TypeError, r"temperature must be a number, found str"),
        ({"mask": np.ones((1, 2))}, ValueError, r"mask must have the shape \(3, 6\) of tokens, found \(1, 2\)"),
        ({"mask": np.full((3, 6), 2)}, ValueError, r"mask must hold only 0 and 1, found 2"),
    ],
)
def test_refuses(moe_engine, arguments, error, match):
    model = random_model(small_config(), moe_engine)
    with pytest.raises(error, match=match):
        model.logps(np.ones((3, 6), int), **arguments)


# ---- the native engine ----


@NATIVE
@pytest.mark.parametrize(("dtype", "rel"), [(np.float64, 1e-11), (np.float32, 1e-4)])
@pytest.mark.parametrize("shape", [(1, 2), (2, 8), (7, 70)])
def test_native_against_the_reference(config, dtype, rel, shape, isa):
    """70 tokens of 7 rows: more than one task of scores, chunks of experts, strips that see other strips' keys."""
    model = random_model(config, "native", dtype=dtype, std=0.2)
    twin = MoETransformer(config, "numpy", params={n: p.astype(np.float64) for n, p in model.params.items()})
    batch = scored_batch(config, shape)
    saved, want = (m.engine.logps_saved(*batch, temperature=0.7) for m in (model, twin))
    for found, wanted in ((saved.logps_BT, want.logps_BT), (saved.entropy_BT, want.entropy_BT)):
        assert np.abs(found - wanted).max() <= 2 * rel
    a, b = np.random.default_rng(0).standard_normal((2, *shape))
    for dentropy in (None, b):
        grads = model.engine.logps_backward(model.engine.logps_saved(*batch, temperature=0.7), a, dentropy)
        want_grads = twin.engine.logps_backward(want, a, dentropy)
        for name, wanted in want_grads.items():
            assert grads[name].dtype == dtype
            assert np.abs(grads[name] - wanted).max() <= rel * max(np.abs(wanted).max(), 1e-6), name


@NATIVE
def test_many_tokens_of_an_expert(isa):
    """Several chunks of one expert, whose gradients are added up, and experts with none; 1,100 tokens."""
    config = small_config(num_experts=3, top_k=1, num_layers=1, intermediate_dim=20, max_seq_len=110)
    model = random_model(config, "native")
    model.params["model.layers.0.mlp.gate.weight"][...] = 0.0  # every token goes to expert 0
    twin = MoETransformer(config, "numpy", params=dict(model.params))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (10, 110))
    counts = np.ones(tokens.shape, bool)
    counts[:, 0] = False
    ones = np.ones(tokens.shape)
    grads, want = (m.engine.logps_backward(m.engine.logps_saved(tokens, counts), ones, ones) for m in (model, twin))
    for name, wanted in want.items():
        assert np.abs(grads[name] - wanted).max() <= 1e-11 * max(np.abs(wanted).max(), 1e-6), name
    assert not grads["model.layers.0.mlp.experts.down_proj"][1:].any()


@NATIVE
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_log_probs_have_the_same_bits_in_any_batch_and_with_any_threads(config, dtype, isa, restore_threads):
    model = random_model(config, "native", dtype=dtype, std=0.2)
    tokens, counts, mask = scored_batch(config, (7, 40))
    together = model.engine.logps(tokens, counts, mask, temperature=1.3)
    order = np.array([3, 6, 1, 0, 5, 2, 4])
    for found, wanted in zip(
        model.engine.logps(tokens[order], counts[order], mask[order], temperature=1.3), together, strict=True
    ):
        assert same_bits(found, wanted[order])
    for row in range(7):
        pick = np.s_[row : row + 1]
        alone = model.engine.logps(tokens[pick], counts[pick], mask[pick], temperature=1.3)
        for found, wanted in zip(alone, together, strict=True):
            assert same_bits(found, wanted[pick])
    results = []
    for threads in (1, 2, 3, 7):
        strop.set_num_threads(threads)
        saved = model.engine.logps_saved(tokens, counts, mask, temperature=1.3)
        grads = model.engine.logps_backward(saved, np.ones(tokens.shape), np.ones(tokens.shape))
        results.append((saved.logps_BT.tobytes(), *(grad.tobytes() for grad in grads.values())))
    assert all(result == results[0] for result in results)
    assert results[0][0] == together[0].tobytes()


@NATIVE
def test_shared_prefixes_are_computed_once(restore_threads):
    """Sixteen completions of one prompt take little more memory than one: their prompt is there once."""
    strop.set_num_threads(2)  # each has memory of its own
    config = MoEConfig(max_seq_len=300)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (16, 260))
    alike = tokens.copy()
    alike[:, :250] = tokens[0, :250]
    counts = np.zeros(tokens.shape, bool)
    counts[:, 250:] = True

    def taken(tokens):
        model = MoETransformer(config)
        for _ in range(2):
            model.engine.logps_backward(model.engine.logps_saved(tokens, counts), np.ones(tokens.shape))
        return model.engine.compiled.workspace_bytes()

    wanted = taken(alike)
    assert wanted <= 0.5 * taken(tokens)  # which grows by doubling
    others = rng.integers(0, config.vocab_size, alike.shape)
    others[:, :250] = others[0, :250]
    mixed = np.stack([alike[:8], others[:8]], 1).reshape(alike.shape)  # two prompts in turns: no order matters
    assert taken(mixed) <= 0.5 * taken(tokens)
