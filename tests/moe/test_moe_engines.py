"""What the contract promises, for every engine: parity with the reference, padding, in-place weights, the cache."""

import numpy as np
import pytest
from moe_models import log_softmax, random_batch, random_model, same, small_config

from strop import _compiled
from strop.moe import EngineUnavailable, MoEConfig, MoETransformer, available_engines
from strop.moe import engines as engine_module
from strop.moe.engines import engine_class

CONFIGS = {
    "gqa": {"aux_loss_coef": 0.3},
    "mqa tied": {"num_kv_heads": 1, "tie_embeddings": True},
    "top-1": {"top_k": 1, "num_experts": 5},
    "wide": {"hidden_dim": 40, "head_dim": 10, "intermediate_dim": 33, "vocab_size": 101, "num_experts": 6, "top_k": 4},
}


@pytest.fixture(params=CONFIGS)
def model(request, moe_engine):
    return random_model(small_config(**CONFIGS[request.param]), moe_engine, dtype=np.float32, std=0.25)


def close(found, wanted, rel=2e-5):
    scale = max(np.abs(wanted).max(), 1e-6)
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= rel * scale


def float64_twin(model):
    return MoETransformer(model.config, "numpy", params={n: p.astype(np.float64) for n, p in model.params.items()})


def test_padding_anywhere_equals_the_row_without_it(model):
    rng = np.random.default_rng(0)
    tokens, _, _, attention_mask = random_batch(model.config, (5, 10), padding="mixed")
    tokens[~attention_mask] = rng.integers(0, model.config.vocab_size, (~attention_mask).sum())  # garbage under padding
    logits = model.forward(tokens, attention_mask)
    assert not logits[~attention_mask].any()
    for row in range(5):
        real = attention_mask[row]
        close(logits[row, real], model.forward(tokens[row : row + 1, real])[0])


def test_a_padded_batch_has_the_gradients_of_its_rows(moe_engine):
    """Mean over counted targets of all rows = rows alone, weighted by how many targets each has."""
    model = random_model(small_config(), moe_engine, dtype=np.float32)
    tokens, targets, mask, attention_mask = random_batch(model.config, (4, 8), padding="left")
    mask[:, -1] = True
    loss, grads = model.loss_and_grads(tokens, targets, mask, attention_mask=attention_mask)
    counts = (mask & attention_mask).sum(1)
    want_loss, want = 0.0, dict.fromkeys(grads, 0.0)
    for row, real in enumerate(attention_mask):
        pick = np.s_[row : row + 1, real]
        row_loss, row_grads = model.loss_and_grads(tokens[pick], targets[pick], mask[pick])
        want_loss += row_loss * counts[row] / counts.sum()
        want = {name: want[name] + row_grads[name] * (counts[row] / counts.sum()) for name in grads}
    assert loss == pytest.approx(want_loss, rel=1e-5)
    for name in grads:
        close(grads[name], want[name], 1e-4)


def test_backward_of_given_gradients(model):
    """forward_saved + backward is loss_and_grads taken apart; several may be alive; padding's gradient is ignored."""
    tokens, targets, mask, attention_mask = random_batch(model.config, (3, 7), padding="left")
    counts = mask & attention_mask
    want_loss, want = model.loss_and_grads(tokens, targets, mask, attention_mask=attention_mask)
    saved = model.engine.forward_saved(tokens, attention_mask)
    other = model.engine.forward_saved(tokens[:, ::-1].copy(), None)
    p = np.exp(log_softmax(saved.logits_BTV))
    dlogits = (p - np.eye(model.config.vocab_size)[targets]) * (counts / counts.sum())[..., None]
    dlogits = dlogits.astype(np.float32)
    dlogits[~attention_mask] = 1e6
    coefficient = model.config.aux_loss_coef
    grads = model.engine.backward(saved, dlogits, coefficient)
    for name in want:
        close(grads[name], want[name], 1e-4)
    loss = -log_softmax(saved.logits_BTV.astype(np.float64))[(*np.nonzero(counts), targets[counts])].mean()
    assert loss + coefficient * saved.aux_loss == pytest.approx(want_loss, rel=1e-5)
    assert np.abs(other.logits_BTV - model.forward(tokens[:, ::-1].copy())).max() < 1e-5


def test_out_is_written_over_not_added_to(model):
    tokens, targets, _, _ = random_batch(model.config)
    _, want = model.loss_and_grads(tokens, targets)
    want = {name: grad.copy() for name, grad in want.items()}
    out = {name: np.full_like(grad, np.nan) for name, grad in want.items()}
    _, grads = model.loss_and_grads(tokens, targets, out=out)
    assert grads is out
    for name in want:
        same(out[name], want[name], model.engine.name)
    saved = model.engine.forward_saved(tokens)
    dlogits = np.ones_like(saved.logits_BTV)
    fresh = model.engine.backward(saved, dlogits)
    assert model.engine.backward(model.engine.forward_saved(tokens), dlogits, 0.0, out) is out
    for name in want:
        same(out[name], fresh[name], model.engine.name)


def test_weights_changed_in_place_are_seen(model):
    tokens, _, _, _ = random_batch(model.config)
    before = model.forward(tokens)
    for param in model.params.values():
        param *= 1.5
    after = model.forward(tokens)
    assert np.abs(after - before).max() > 1e-2
    close(after, float64_twin(model).forward(tokens))
    logits = model.engine.prefill(tokens, None, model.engine.new_cache(len(tokens), 8))
    close(logits, after[:, -1])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_weights_reach_every_output(moe_engine, bad):
    """In logits, loss and log-probs, whichever tensor holds it: the router's choice must not hide it."""
    config = small_config()
    tokens, targets, *_ = random_batch(config)
    counts = np.arange(tokens.shape[1]) > np.zeros((len(tokens), 1))
    for name in config.parameter_shapes():
        model = random_model(config, moe_engine, dtype=np.float32)
        model.params[name][...] = bad
        with np.errstate(all="ignore"):
            assert not np.isfinite(model.forward(tokens)).any(), name
            assert not np.isfinite(model.loss_and_grads(tokens, targets)[0]), name
            assert not np.isfinite(model.engine.logps(tokens, counts)[0][counts]).any(), name


def test_results_belong_to_the_caller(model):
    tokens, targets, _, _ = random_batch(model.config)
    first = model.forward(tokens)
    kept = first.copy()
    _, grads = model.loss_and_grads(tokens, targets)
    kept_grads = {name: grad.copy() for name, grad in grads.items()}
    model.forward(tokens[:, ::-1].copy())
    model.loss_and_grads(tokens[:, ::-1].copy(), targets)
    assert np.array_equal(first, kept)
    assert all(np.array_equal(grads[name], kept_grads[name]) for name in grads)


def test_no_counted_target_gives_no_gradient(moe_engine):
    model = random_model(small_config(), moe_engine, dtype=np.float32)
    tokens, targets, mask, _ = random_batch(model.config)
    loss, grads = model.loss_and_grads(tokens, np.full_like(targets, -100), np.zeros_like(mask))
    assert loss == 0
    assert not any(grad.any() for grad in grads.values())


# ---- the cache ----


def test_prefill_then_decode_is_the_forward(model):
    tokens, _, _, attention_mask = random_batch(model.config, (4, 9), padding="left")
    want = model.forward(tokens, attention_mask)
    for split in (1, 5, 8):
        ragged = attention_mask[:, :split].any(1)  # rows whose prompt has begun by then
        rows = np.nonzero(ragged)[0]
        prompt = np.ascontiguousarray(tokens[rows, :split])
        cache = model.engine.new_cache(len(rows), 9)
        logits = model.engine.prefill(prompt, np.ascontiguousarray(attention_mask[rows, :split]), cache)
        close(logits, want[rows, split - 1])
        for column in range(split, 9):
            logits = model.engine.decode(np.ascontiguousarray(tokens[rows, column]), cache)
            close(logits, want[rows, column])
        assert cache.lengths_B.tolist() == attention_mask[rows].sum(1).tolist()


def test_cache_rows_can_be_dropped_and_repeated(model):
    tokens, _, _, _ = random_batch(model.config, (3, 6))
    want = model.forward(tokens)
    cache = model.engine.new_cache(3, 10)
    model.engine.prefill(tokens[:, :4].copy(), None, cache)
    rows = np.array([2, 0, 2])
    chosen = cache.select_rows(rows)
    assert (chosen.capacity, chosen.lengths_B.tolist()) == (10, [4, 4, 4])
    close(model.engine.decode(tokens[rows, 4], chosen), want[rows, 4])
    close(model.engine.decode(tokens[:, 4].copy(), cache), want[:, 4])  # the original is untouched
    close(model.engine.decode(tokens[rows, 5], chosen), want[rows, 5])


def test_a_cache_takes_several_tokens_and_rows_of_other_caches(model):
    """Rows of different lengths, right-padded, behind what two caches of other capacities hold of them."""
    tokens, _, _, _ = random_batch(model.config, (3, 9))
    want = model.forward(tokens)
    short, long = model.engine.new_cache(2, 4), model.engine.new_cache(1, 20)
    model.engine.prefill(tokens[:2, :3].copy(), None, short)
    model.engine.prefill(tokens[2:, :5].copy(), None, long)
    cache = model.engine.new_cache(3, 9)
    for to, (held, row) in enumerate(((short, 0), (short, 1), (long, 0))):
        cache.copy_row(to, held, row)
    assert cache.lengths_B.tolist() == [3, 3, 5]
    new = np.stack([tokens[0, 3:7], tokens[1, 3:7], np.append(tokens[2, 5:8], 0)])
    mask = np.array([[True] * 4, [True] * 4, [True] * 3 + [False]])
    close(model.engine.prefill(new, mask, cache), want[[0, 1, 2], [6, 6, 7]])
    assert cache.lengths_B.tolist() == [7, 7, 8]
    close(model.engine.decode(tokens[[0, 1, 2], [7, 7, 8]], cache), want[[0, 1, 2], [7, 7, 8]])


def test_generation_goes_on_from_a_cache(model):
    """A second turn draws what it draws when all is read anew, and the cache has all but the last token."""
    prompts, options = [[5, 6, 7], [8]], {"max_new_tokens": 5, "eos_token_id": [0, 4, 8], "seed": 3}
    cache = model.engine.new_cache(2, 20)
    first = model.generate(prompts, cache=cache, **options)
    heard = [[*prompt, *said.tolist(), 2, 3] for prompt, said in zip(prompts, first.completions, strict=True)]
    assert cache.lengths_B.tolist() == [len(row) - 3 for row in heard]
    going = [row[held:] for row, held in zip(heard, cache.lengths_B, strict=True)]
    found, wanted = model.generate(going, cache=cache, **options), model.generate(heard, **options)
    assert found.tokens_BT.tolist() == wanted.tokens_BT.tolist()
    close(found.logps_BT, wanted.logps_BT)
    assert cache.lengths_B.tolist() == [len(row) + n - 1 for row, n in zip(heard, found.lengths_B, strict=True)]


@pytest.mark.parametrize(
    ("rows", "capacity", "options", "match"),
    [
        (3, 20, {}, "cache must have a row for each of the 2 prompts, found 3"),
        (2, 7, {}, "cache must have room for 8 tokens in a row, found 7"),
        (2, 20, {"num_samples": 2}, "num_samples must be 1 with a cache, found 2"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused(model, rows, capacity, options, match):
    with pytest.raises(ValueError, match=match):
        model.generate([[5, 6, 7], [8]], max_new_tokens=5, cache=model.engine.new_cache(rows, capacity), **options)


# ---- the registry ----


def test_unknown_engine_lists_the_known_ones():
    with pytest.raises(ValueError, match="engine must be one of 'numpy', 'native', found 'cuda'"):
        MoETransformer(MoEConfig(), "cuda")


def test_native_without_the_compiled_module_says_why(monkeypatch):
    monkeypatch.setattr(_compiled, "native", None)
    monkeypatch.setattr(_compiled, "native_status", "switched off")
    with pytest.raises(
        EngineUnavailable, match="needs the compiled module, which is switched off; engine='numpy' runs"
    ):
        MoETransformer(MoEConfig())
    assert "native" not in available_engines()


def test_another_engine_can_be_registered(monkeypatch):
    class Doubling(engine_class("numpy")):
        name = "doubling"
        dtypes = (np.float32,)

        def forward(self, tokens_BT, attention_mask_BT=None):
            return 2 * super().forward(tokens_BT, attention_mask_BT)

    monkeypatch.setattr(engine_module, "_LOADERS", dict(engine_module._LOADERS))
    engine_module.register_engine("doubling", lambda: Doubling)
    config = small_config()
    doubled, plain = MoETransformer(config, "doubling"), MoETransformer(config, "numpy")
    same(doubled.forward([[1, 2]]), 2 * plain.forward([[1, 2]]), "numpy")
    with pytest.raises(TypeError, match="dtype must be float32 for engine='doubling', found float64"):
        MoETransformer(config, "doubling", dtype=np.float64)
