"""What only the native engine promises: the same bits whatever stands around a token, memory kept, safety in threads."""

import concurrent.futures
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from moe_models import random_batch, random_model, same_bits, small_config

import strop
from strop import _compiled
from strop.moe import MoEConfig, MoETransformer
from strop.moe.engine import MoEEngine
from strop.moe.optim import adamw_update
from strop.moe.sampling import sample

pytestmark = pytest.mark.skipif(_compiled.native is None, reason=f"the compiled module is {_compiled.native_status}")


# Sizes below, at and above a vector, a tile and a panel of 64 tokens; G = 1, 2, 4 and 12 query heads per key/value head.
CONFIGS = {
    "tiny": MoEConfig(max_seq_len=600),
    "odd": small_config(
        hidden_dim=19, head_dim=6, intermediate_dim=37, vocab_size=101, num_experts=5, top_k=3, max_seq_len=600
    ),
    "mha tied": small_config(hidden_dim=33, num_kv_heads=4, head_dim=10, tie_embeddings=True, max_seq_len=600),
    "mqa top-1": small_config(num_heads=12, num_kv_heads=1, head_dim=2, top_k=1, vocab_size=67, max_seq_len=600),
    "top-all": small_config(hidden_dim=48, num_experts=9, top_k=9, intermediate_dim=64, max_seq_len=600),
}


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


def native_model(config, dtype=np.float32, seed=0):
    return random_model(config, "native", seed=seed, dtype=dtype, std=0.2)


# ---- equal to the reference ----


@pytest.mark.parametrize(("dtype", "rel"), [(np.float64, 1e-12), (np.float32, 5e-5)])
@pytest.mark.parametrize("shape", [(1, 1), (2, 8), (3, 70), (1, 300)])
def test_values_and_gradients_of_the_float64_reference(config, dtype, rel, shape, isa):
    """70 tokens of 3 rows fill more than three panels; 300 keys are more than one block of attention."""
    model = native_model(config, dtype)
    twin = MoETransformer(config, "numpy", params={n: p.astype(np.float64) for n, p in model.params.items()})
    tokens, targets, mask, attention_mask = random_batch(config, shape, padding="mixed")
    found, wanted = model.forward(tokens, attention_mask), twin.forward(tokens, attention_mask)
    assert np.abs(found - wanted).max() <= rel * np.abs(wanted).max()
    loss, grads = model.loss_and_grads(tokens, targets, mask, attention_mask=attention_mask)
    want_loss, want_grads = twin.loss_and_grads(tokens, targets, mask, attention_mask=attention_mask)
    assert loss == pytest.approx(want_loss, rel=rel)
    for name, want in want_grads.items():
        assert np.abs(grads[name] - want).max() <= rel * max(np.abs(want).max(), 1e-6), name


def test_ties_of_the_router_go_to_the_lower_index(isa):
    """Equal experts have equal probabilities; two choices out of five must be experts 0 and 1, whose gradients then live."""
    config = small_config(num_experts=5, top_k=2, num_layers=1, max_seq_len=40)
    model = native_model(config, np.float64)
    model.params["model.layers.0.mlp.gate.weight"][...] = 0.25
    tokens, targets, _, _ = random_batch(config, (3, 40))
    _, grads = model.loss_and_grads(tokens, targets)
    used = grads["model.layers.0.mlp.experts.down_proj"].any((1, 2))
    assert used.tolist() == [True, True, False, False, False]


def test_adamw_of_the_reference(isa):
    rng = np.random.default_rng(0)
    engine = native_model(small_config()).engine
    for dtype, rel in ((np.float32, 1e-6), (np.float64, 1e-14)):
        for count in (1, 7, 16, 8192, 8192 * 3 + 5):
            arrays = [rng.standard_normal(count).astype(dtype) for _ in range(3)]
            arrays.append(rng.random(count).astype(dtype))
            param, grad, m, v = arrays
            twins = [array.astype(np.float64) for array in arrays]
            options = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "grad_scale": 0.5}
            for step in (1, 2):
                engine.adamw_update_all([param], [grad], [m], [v], step=step, weight_decays=[0.1], **options)
                adamw_update(*twins, step=step, weight_decay=0.1, **options)
            for found, wanted in zip(arrays, twins, strict=True):
                assert np.abs(found - wanted).max() <= 4 * rel * np.abs(wanted).max()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("vocab_size", [1, 7, 64, 1000])
def test_sampling_of_the_reference(dtype, vocab_size, isa):
    rng = np.random.default_rng(0)
    engine = native_model(small_config(vocab_size=vocab_size), dtype).engine
    logits = (3 * rng.standard_normal((40, vocab_size))).astype(dtype)
    logits[0] = 0.0  # ties
    logits[1, : vocab_size // 2] = -np.inf  # banned tokens
    uniforms = rng.random(40)
    uniforms[2] = 0.0
    for temperature in (0.0, 0.6, 1.0):
        for top_k, top_p in ((0, 1.0), (5, 1.0), (0, 0.8), (20, 0.3), (2000, 1e-9)):
            rules = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
            tokens, logps = engine.sample(logits, uniforms, **rules)
            with np.errstate(divide="ignore"):
                want_tokens, want_logps = sample(logits, uniforms, **rules)
            assert tokens.tolist() == want_tokens.tolist()
            assert np.abs(logps - want_logps).max() < (1e-6 if temperature == 0 and dtype == np.float32 else 1e-12)


# ---- the same bits ----


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_row_has_the_same_bits_in_any_batch(config, dtype, isa):
    """Batch 1 against 7 and 100, beside other rows, in another place."""
    model = native_model(config, dtype)
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, config.vocab_size, (100, 13))
    alone = [model.forward(tokens[row : row + 1]) for row in range(100)]
    for rows in (np.arange(7), np.arange(100), np.arange(100)[::-1]):
        together = model.forward(tokens[rows].copy())
        assert all(same_bits(together[i : i + 1], alone[row]) for i, row in enumerate(rows))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_padding_changes_no_bit(config, dtype, isa):
    model = native_model(config, dtype)
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, config.vocab_size, (3, 21))
    plain = model.forward(tokens)
    for left, right in ((5, 0), (0, 3), (17, 64)):
        padded = np.pad(tokens, ((0, 0), (left, right)), constant_values=1)
        mask = np.zeros(padded.shape, bool)
        mask[:, left : left + 21] = True
        assert same_bits(model.forward(padded, mask)[:, left : left + 21], plain)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_threads_change_no_bit(config, dtype, isa, restore_threads):
    model = native_model(config, dtype)
    tokens, targets, mask, attention_mask = random_batch(config, (5, 40), padding="mixed")
    results = []
    for threads in (1, 2, 3, 7):
        strop.set_num_threads(threads)
        loss, grads = model.loss_and_grads(tokens, targets, mask, attention_mask=attention_mask)
        logits = model.forward(tokens, attention_mask)
        results.append((logits.tobytes(), loss, *(grad.tobytes() for grad in grads.values())))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_prefill_decode_and_training_have_the_same_bits(config, dtype, isa):
    """Ragged prompts, then one token at a time, across the boundary between two blocks of keys (256)."""
    model = native_model(config, dtype)
    rng = np.random.default_rng(5)
    length, first = 262, 250
    tokens = rng.integers(0, config.vocab_size, (3, length))
    mask = np.ones(tokens.shape, bool)
    mask[1, :40] = False
    mask[2, 3:9] = False
    training = model.engine.forward_saved(tokens, mask)
    assert same_bits(model.forward(tokens, mask), training.logits_BTV)
    prompt, prompt_mask = tokens[:, :first].copy(), mask[:, :first].copy()
    cache = model.engine.new_cache(3, length)
    logits = model.engine.prefill(prompt, prompt_mask, cache)
    assert same_bits(logits, training.logits_BTV[:, first - 1].copy())
    for column in range(first, length):
        if column == first + 4:
            cache = cache.select_rows(np.array([0, 1, 2]))
        logits = model.engine.decode(tokens[:, column].copy(), cache)
        assert same_bits(logits, training.logits_BTV[:, column].copy())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "rule",
    [
        {"temperature": 0},
        {"temperature": 1.3, "num_samples": 3},
        {"temperature": 0.9, "top_k": 9, "top_p": 0.8, "num_samples": 2, "eos_token_id": list(range(3, 9))},
    ],
    ids=["greedy", "samples", "top-k, top-p and ends"],
)
def test_completions_have_the_bits_of_prefill_decode_and_sample(config, dtype, rule, isa, monkeypatch):
    """The compiled loop, on transposed weights, against the loop in Python that every engine has."""
    model = native_model(config, dtype)
    rng = np.random.default_rng(8)
    prompts = [rng.integers(0, config.vocab_size, length).tolist() for length in (3, 17, 1, 70, 9)]
    found = model.generate(prompts, max_new_tokens=12, seed=1, **rule)
    monkeypatch.setattr(type(model.engine), "complete", MoEEngine.complete)
    wanted = model.generate(prompts, max_new_tokens=12, seed=1, **rule)
    assert same_bits(found.tokens_BT, wanted.tokens_BT)
    assert same_bits(found.logps_BT, wanted.logps_BT)
    assert same_bits(found.lengths_B, wanted.lengths_B)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("max_new_tokens", [2, 6])
def test_rows_that_go_on_have_the_bits_of_rows_read_anew(config, dtype, max_new_tokens, isa):
    """Three turns, rows of different lengths, some of which wait for a turn, across two blocks of keys (256)."""
    model = native_model(config, dtype)
    rng = np.random.default_rng(9)
    options = {"max_new_tokens": max_new_tokens, "temperature": 1.1, "eos_token_id": list(range(3, 9))}
    rows = {row: rng.integers(0, config.vocab_size, length).tolist() for row, length in enumerate((3, 250, 1, 70, 9))}
    known = {}
    for turn, now in enumerate(((0, 1, 2, 3, 4), (4, 1, 0), (3, 2, 1, 4))):
        prompts = [rows[row] for row in now]
        uniforms = rng.random((len(now), max_new_tokens))
        wanted = model.generate(prompts, uniforms=uniforms, **options)
        cache = model.engine.new_cache(len(now), max(map(len, prompts)) + max_new_tokens + turn)
        for at, row in enumerate(now):
            if row in known:
                cache.copy_row(at, *known[row])
        new = [prompt[held:] for prompt, held in zip(prompts, cache.lengths_B, strict=True)]
        assert turn == 0 or sum(map(len, new)) < sum(map(len, prompts)) / 2
        found = model.generate(new, uniforms=uniforms, cache=cache, **options)
        assert same_bits(found.tokens_BT, wanted.tokens_BT)
        assert same_bits(found.logps_BT, wanted.logps_BT)
        for at, row in enumerate(now):
            rows[row] = [*rows[row], *found.completions[at].tolist()]
            assert cache.lengths_B[at] == len(rows[row]) - 1
            rows[row] += rng.integers(0, config.vocab_size, 1 + turn).tolist()
            known[row] = cache, at


def test_later_tokens_cannot_change_earlier_logits(isa):
    """Even a later token that overflows leaves earlier ones as they are."""
    config = CONFIGS["tiny"]
    model = native_model(config)
    tokens = np.random.default_rng(7).integers(1, config.vocab_size, (2, 30))
    wanted = model.forward(tokens)[:, :20].copy()
    model.params["model.embed_tokens.weight"][0] = np.inf
    tokens[:, 20:] = 0
    assert same_bits(model.forward(tokens)[:, :20].copy(), wanted)


# ---- memory and threads ----


def test_memory_is_kept_and_does_not_grow():
    config = CONFIGS["tiny"]
    model = native_model(config)
    tokens, targets, _, _ = random_batch(config, (4, 33))
    _, out = model.loss_and_grads(tokens, targets)

    def step():
        model.loss_and_grads(tokens, targets, out=out)
        model.forward(tokens)
        saved = model.engine.forward_saved(tokens)
        other = model.engine.forward_saved(tokens)
        model.engine.backward(saved, saved.logits_BTV, out=out)
        del saved, other
        cache = model.engine.new_cache(4, 40)
        logits = model.engine.prefill(tokens, None, cache)
        model.engine.decode(tokens[:, 0].copy(), cache)
        model.engine.sample(logits, np.zeros(4), temperature=1.0, top_k=0, top_p=1.0)
        model.generate(tokens, max_new_tokens=20, seed=0)
        counts = np.arange(33) > np.zeros((4, 1))
        model.engine.logps(tokens, counts)
        model.engine.logps_backward(model.engine.logps_saved(tokens, counts), np.ones(tokens.shape))
        return model.engine.compiled.workspace_bytes()

    step(), step()
    sizes = {step() for _ in range(5)}
    assert len(sizes) == 1


def test_a_saved_forward_outlives_its_engine():
    config = CONFIGS["odd"]
    model = native_model(config)
    tokens, _, _, _ = random_batch(config, (2, 9))
    saved = model.engine.forward_saved(tokens)
    wanted = saved.logits_BTV.copy()
    del model
    assert np.array_equal(saved.logits_BTV, wanted)
    del saved


def test_two_models_and_one_model_in_several_threads(restore_threads):
    strop.set_num_threads(2)
    models = [native_model(CONFIGS["tiny"], seed=0), native_model(CONFIGS["odd"], seed=1)]
    batches = [random_batch(model.config, (4, 17)) for model in models]

    def work(index):
        model, (tokens, targets, mask, _) = models[index % 2], batches[index % 2]
        loss, grads = model.loss_and_grads(tokens, targets, mask)
        generated = model.generate(tokens[:, :5], max_new_tokens=6, seed=0)
        return loss, generated.tokens_BT.tobytes(), *(grad.tobytes() for grad in grads.values())

    wanted = [work(0), work(1)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert all(found == wanted[i % 2] for i, found in enumerate(pool.map(work, range(12))))


@pytest.mark.parametrize("vocab_size", [1, 5, 16, 64, 65])
def test_greedy_among_nan_stays_in_the_vocabulary(vocab_size, isa):
    engine = native_model(small_config()).engine
    for dtype in (np.float32, np.float64):
        logits = np.full((2, vocab_size), np.nan, dtype)
        tokens, _ = engine.sample(logits, np.zeros(2), temperature=0, top_k=0, top_p=1.0)
        assert tokens.max() < vocab_size


def test_integer_settings_keep_float64(isa):
    """An int where a float is usual must not send float64 arrays to the float32 kernel."""
    engine = native_model(small_config(), np.float64).engine
    logits = np.random.default_rng(0).standard_normal((3, 50))
    _, logps = engine.sample(logits, np.zeros(3), temperature=0, top_k=0, top_p=1)
    assert np.abs(logps - sample(logits, np.zeros(3), temperature=0)[1]).max() <= 1e-14
    param, grad, m, v = np.ones(9), np.ones(9), np.zeros(9), np.zeros(9)
    engine.adamw_update_all([param], [grad], [m], [v], step=1, lr=1, beta1=0, beta2=0, eps=1e-8, weight_decays=[0])
    assert np.abs(param).max() <= 2e-8  # 1 − lr·sign(grad)


def test_adamw_refuses_arrays_that_do_not_match():
    engine = native_model(small_config()).engine
    settings = {"step": 1, "lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decays": [0.0]}
    good, short, double = np.ones(9, np.float32), np.ones(8, np.float32), np.ones(9)
    with pytest.raises(ValueError, match="another size"):
        engine.adamw_update_all([good], [short], [good.copy()], [good.copy()], **settings)
    with pytest.raises(ValueError, match="as many"):
        engine.adamw_update_all([good], [], [good.copy()], [good.copy()], **settings)
    with pytest.raises(TypeError, match="one float type"):
        engine.adamw_update_all([good], [double], [good.copy()], [good.copy()], **settings)
    with pytest.raises(TypeError, match="contiguous"):
        engine.adamw_update_all([np.ones(18, np.float32)[::2]], [good], [good.copy()], [good.copy()], **settings)


def test_gradients_of_another_size_are_refused():
    config = small_config()
    model = native_model(config)
    tokens, targets, *_ = random_batch(config)
    _, grads = model.loss_and_grads(tokens, targets)
    for name, shape in config.parameter_shapes().items():
        wrong = {**grads, name: np.zeros((*shape[:-1], shape[-1] - 1), np.float32)}
        with pytest.raises(ValueError, match="another size than its parameter"):
            model.loss_and_grads(tokens, targets, out=wrong)
    tied = native_model(small_config(tie_embeddings=True))
    assert tied.loss_and_grads(tokens, targets, out=tied.loss_and_grads(tokens, targets)[1])[0] > 0


def test_an_interrupt_ends_generate(restore_threads):
    strop.set_num_threads(1)  # a machine of many cores would be done before
    model = native_model(CONFIGS["tiny"])

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        started = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):  # alone it would take a second or more
            model.generate(np.zeros((500, 1), np.int64), max_new_tokens=590)
        assert time.perf_counter() - started < 5
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert model.generate([[1, 2]], max_new_tokens=3).tokens_BT.shape == (1, 3)


PROGRAMS = {
    "a child after a fork": """
import os
wanted = model.forward(tokens).tobytes()
child = os.fork()
if child == 0:
    os._exit(model.forward(tokens).tobytes() != wanted)
assert os.waitpid(child, 0)[1] == 0
assert model.forward(tokens).tobytes() == wanted
""",
    "daemon threads at the end": """
import threading, time
def work():
    while True:
        model.generate(tokens, max_new_tokens=30)
        model.loss_and_grads(tokens, tokens)
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
""",
    "more threads than CPUs": """
import strop
wanted = model.forward(tokens).tobytes()
strop.set_num_threads(9)
assert all(model.forward(tokens).tobytes() == wanted for _ in range(50))
""",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs(program):
    start = """
import numpy as np
from strop.moe import MoEConfig, MoETransformer
model = MoETransformer(MoEConfig(), "native")
tokens = np.arange(128).reshape(4, 32)
"""
    done = subprocess.run([sys.executable, "-c", start + PROGRAMS[program]], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
