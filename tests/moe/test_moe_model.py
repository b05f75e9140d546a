"""`MoETransformer`: initial weights, generation, refused input."""

import copy
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from moe_models import log_softmax, random_model, same, small_config

from strop.moe import MoEConfig, MoETransformer
from strop.moe.model import initial_params

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]]


@pytest.fixture
def model(moe_engine):
    return random_model(small_config(), moe_engine, dtype=np.float32)


def test_initial_weights():
    config = MoEConfig.preset("tiny")
    params = initial_params(config, 42)
    assert list(params) == list(config.parameter_shapes())
    assert {name: param.shape for name, param in params.items()} == config.parameter_shapes()
    for name, param in params.items():
        assert param.dtype == np.float32
        if name.endswith("norm.weight"):
            assert (param == 1).all()
        else:
            assert 0.015 < param.std() < 0.025
    again, other = (initial_params(config, seed) for seed in (42, 43))
    double = initial_params(config, 42, np.float64)
    assert np.array_equal(params["lm_head.weight"], again["lm_head.weight"])
    assert not np.array_equal(params["lm_head.weight"], other["lm_head.weight"])
    assert np.array_equal(params["lm_head.weight"], double["lm_head.weight"].astype(np.float32))


def test_given_parameters_are_shared(moe_engine):
    config = small_config()
    params = initial_params(config, 0)
    model = MoETransformer(config, moe_engine, params=params)
    before = model.forward([[1, 2]])
    params["lm_head.weight"] *= 2
    assert model.forward([[1, 2]]) == pytest.approx(2 * before, rel=1e-6)


def test_parameters_change_in_place_only(model):
    tokens, name = [[1, 2, 3]], "lm_head.weight"
    before = model.forward(tokens)
    model.params[name] *= 2
    assert model.forward(tokens) == pytest.approx(2 * before, rel=1e-5)
    model.params[name][...] = 0
    assert (model.forward(tokens) == 0).all()
    for change in (
        lambda: model.params.__setitem__(name, model.params[name] + 1),
        lambda: model.params.__delitem__(name),
        lambda: model.params.update({name: np.ones((11, 8))}),
        lambda: model.params.pop(name),
        lambda: model.params.clear(),
    ):
        with pytest.raises(TypeError, match=r"params must keep the engine's arrays: write into them, params\['"):
            change()
    with pytest.raises(AttributeError):
        model.params = {}
    snapshot = copy.deepcopy(model.params)
    snapshot[name] = np.ones(3)  # a plain dict


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_independent(model, how):
    tokens = [[1, 2, 3]]
    twin = how(model)
    assert (twin.config, twin.engine.name, twin.dtype) == (model.config, model.engine.name, model.dtype)
    before = model.forward(tokens)
    same(twin.forward(tokens), before, model.engine.name)
    twin.params["lm_head.weight"] += 1
    same(model.forward(tokens), before, model.engine.name)
    assert np.abs(twin.forward(tokens) - before).max() > 0.1


def test_repr_and_count(model):
    assert model.num_parameters() == sum(param.size for param in model.params.values())
    assert f"{model.num_parameters():,} parameters, engine=" in repr(model)


# ---- generation ----


def greedy_by_forward(model, prompt, count):
    row = list(prompt)
    for _ in range(count):
        logits = model.forward([row])[0, -1]
        first, second = np.sort(logits)[:-3:-1]
        assert first - second > 1e-4, "another seed: two tokens are as good as equal"
        row.append(int(logits.argmax()))
    return row[len(prompt) :]


def test_greedy_is_the_argmax_of_the_forward(model):
    result = model.generate(PROMPTS, max_new_tokens=8, temperature=0)
    assert result.tokens_BT.tolist() == [greedy_by_forward(model, prompt, 8) for prompt in PROMPTS]
    assert result.lengths_B.tolist() == [8, 8, 8]


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 4}, {"top_p": 0.8}])
def test_log_probs_are_those_of_the_training_forward(model, settings):
    from strop.moe.sampling import sampling_logps

    result = model.generate(PROMPTS, max_new_tokens=8, seed=3, **settings)
    for prompt, tokens, logps in zip(PROMPTS, result.completions, result.logps_BT, strict=True):
        logits = model.forward([[*prompt, *tokens]])[0, len(prompt) - 1 : -1]
        want = sampling_logps(logits, **settings)[np.arange(8), tokens]
        assert logps == pytest.approx(want, abs=1e-4)


def test_greedy_log_probs_are_the_models(model):
    result = model.generate([[1, 2]], max_new_tokens=3, temperature=0)
    logits = model.forward([[1, 2, *result.tokens_BT[0]]])[0, 1:-1]
    want = log_softmax(logits.astype(np.float64))[np.arange(3), result.tokens_BT[0]]
    assert result.logps_BT[0] == pytest.approx(want, abs=1e-5)


def test_seed(model):
    settings = {"max_new_tokens": 12, "temperature": 1.5}
    first, again = (model.generate(PROMPTS, seed=5, **settings) for _ in range(2))
    assert np.array_equal(first.tokens_BT, again.tokens_BT)
    same(first.logps_BT, again.logps_BT, model.engine.name)
    assert not np.array_equal(first.tokens_BT, model.generate(PROMPTS, seed=6, **settings).tokens_BT)


def test_settings_may_be_numpys_numbers(model):
    plain = model.generate([[1, 2]], max_new_tokens=4, temperature=0.5, top_k=3, top_p=0.75, seed=0, pad_token_id=1)
    numpys = model.generate(
        [[1, 2]], max_new_tokens=np.int64(4), temperature=np.float32(0.5), top_k=np.int64(3), top_p=np.float32(0.75),
        seed=0, pad_token_id=np.int64(1),
    )  # fmt: skip
    assert np.array_equal(plain.tokens_BT, numpys.tokens_BT)
    same(plain.logps_BT, numpys.logps_BT, model.engine.name)


def test_a_list_and_a_padded_array_are_the_same(model):
    tokens = np.array([[7, 7, 7, 1, 2, 3], [4, 8, 8, 8, 8, 8], [5, 6, 7, 8, 9, 10]])
    mask = np.array([[0, 0, 0, 1, 1, 1], [1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    want = model.generate(PROMPTS, max_new_tokens=6, seed=1)
    found = model.generate(tokens, attention_mask=mask, max_new_tokens=6, seed=1)
    assert np.array_equal(found.tokens_BT, want.tokens_BT)


def test_eos_ends_a_row_and_only_it(model):
    free = model.generate(PROMPTS, max_new_tokens=10, temperature=0)
    eos = int(free.tokens_BT[0, 2])
    result = model.generate(PROMPTS, max_new_tokens=10, temperature=0, eos_token_id=eos, pad_token_id=9)
    for row, length in enumerate(result.lengths_B):
        whole = free.tokens_BT[row].tolist()
        want = whole.index(eos) + 1 if eos in whole else 10
        assert length == want
        assert result.completions[row].tolist() == whole[:want]
        assert set(result.tokens_BT[row, want:]) <= {9}
        assert not result.logps_BT[row, want:].any()
        assert result.logps_BT[row, :want] == pytest.approx(free.logps_BT[row, :want], abs=1e-5)
    assert result.lengths_B[0] == free.tokens_BT[0].tolist().index(eos) + 1 < 10


def test_eos_of_the_config_and_early_end(moe_engine):
    config = small_config(eos_token_id=tuple(range(11)), pad_token_id=0)
    result = random_model(config, moe_engine, dtype=np.float32).generate(PROMPTS, max_new_tokens=10, seed=0)
    assert result.tokens_BT.shape == (3, 1)  # any token ends a row
    assert result.lengths_B.tolist() == [1, 1, 1]


def test_samples_of_one_prompt_stand_together(model):
    result = model.generate(PROMPTS, max_new_tokens=5, num_samples=3, seed=0, temperature=2.0)
    repeated = model.generate(
        [prompt for prompt in PROMPTS for _ in range(3)], max_new_tokens=5, seed=0, temperature=2.0
    )
    assert np.array_equal(result.tokens_BT, repeated.tokens_BT)
    assert len({tuple(row) for row in result.tokens_BT[:3].tolist()}) > 1


def test_generation_may_fill_the_last_position(model):
    assert model.generate([[1] * 20], max_new_tokens=4, seed=0).tokens_BT.shape == (1, 4)


# ---- refused input ----


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.forward([[1, 11]]), ValueError,
         r"tokens must be from 0 to 10 \(vocab_size=11\), found 11 at row 0, column 1"),
        (lambda m: m.forward([[1], [-1]]), ValueError, "found -1 at row 1, column 0"),
        (lambda m: m.forward([[1] * 25]), ValueError,
         "tokens must have at most max_seq_len=24 tokens in a row, found 25"),
        (lambda m: m.forward(np.zeros((0, 4), int)), ValueError, r"at least one row .*, found shape \(0, 4\)"),
        (lambda m: m.forward(np.zeros((4, 0), int)), ValueError, r"at least one row .*, found shape \(4, 0\)"),
        (lambda m: m.forward([1, 2]), ValueError, r"tokens must have the shape \(batch, tokens\), found \(2,\)"),
        (lambda m: m.forward([[1.0, 2.0]]), TypeError, "tokens must be integers, found float64"),
        (lambda m: m.forward([[True, False]]), TypeError, "tokens must be integers, found bool"),
        (lambda m: m.forward([[1, 2], [3]]), ValueError, "tokens must be rectangular"),
        (lambda m: m.forward([[1, 2]], [[1, 1, 1]]), ValueError,
         r"attention_mask must have the shape \(1, 2\) of tokens, found \(1, 3\)"),
        (lambda m: m.forward([[1, 2]], [[1, 2]]), ValueError, "attention_mask must hold only 0 and 1, found 2"),
        (lambda m: m.forward([[1, 2], [3, 4]], [[1, 1], [0, 0]]), ValueError,
         "attention_mask must keep at least one token in each row, found none in row 1"),
        (lambda m: m.loss_and_grads([[1, 2]], [[1, 2, 3]]), ValueError,
         r"targets must have the shape \(1, 2\) of tokens, found \(1, 3\)"),
        (lambda m: m.loss_and_grads([[1, 2]], [[1, -100]]), ValueError,
         "targets must be from 0 to 10 .* found -100 at row 0, column 1"),
        (lambda m: m.loss_and_grads([[1, 2]], [[1.0, 2.0]]), TypeError, "targets must be integers, found float64"),
        (lambda m: m.loss_and_grads([[1, 2]], [[1, 2]], [1, 1]), ValueError,
         r"mask must have the shape \(1, 2\) of tokens, found \(2,\)"),
        (lambda m: m.loss_and_grads([[1, 2]], [[1, 2]], [[0.5, 1]]), ValueError,
         "mask must hold only 0 and 1, found 0.5"),
        (lambda m: m.generate([], max_new_tokens=1), ValueError, "prompts must hold at least one prompt, found 0"),
        (lambda m: m.generate([[1], []], max_new_tokens=1), ValueError, r"prompts\[1\] must be a row of at least one"),
        (lambda m: m.generate([[1], [0.5]], max_new_tokens=1), TypeError, r"prompts\[1\] must be integers"),
        (lambda m: m.generate([[1], [99]], max_new_tokens=1), ValueError, "found 99 at row 1"),
        (lambda m: m.generate([[1]], max_new_tokens=0), ValueError, "max_new_tokens must be at least 1, found 0"),
        (lambda m: m.generate([[1]], max_new_tokens=2, num_samples=0), ValueError, "num_samples must be at least 1"),
        (lambda m: m.generate([[1, 2]], max_new_tokens=23), ValueError,
         r"max_new_tokens must be at most 22 after a prompt of 2 tokens \(max_seq_len=24\), found 23"),
        (lambda m: m.generate([[1]], max_new_tokens=2, eos_token_id=11), ValueError,
         "eos_token_id must be below vocab_size=11, found 11"),
        (lambda m: m.generate([[1]], max_new_tokens=2, pad_token_id="x"), TypeError,
         "pad_token_id must be an int, found str"),
        (lambda m: m.generate([[1]], max_new_tokens=2, temperature=-1), ValueError, "temperature must be finite"),
        (lambda m: m.generate([[1]], max_new_tokens=2, attention_mask=[[1]]), ValueError,
         "attention_mask must be left out for a list of prompts"),
    ],
)  # fmt: skip
def test_refused_input(model, call, error, message):
    with pytest.raises(error, match=message):
        call(model)


def test_refused_parameters():
    config = small_config()
    params, turned = initial_params(config, 0), np.zeros((8, 11), np.float32)
    wrong = {
        "params lacks tensor 'lm_head.weight'": {n: p for n, p in params.items() if n != "lm_head.weight"},
        "params has the unknown tensor 'x'": {**params, "x": np.ones(1)},
        r"params\['lm_head.weight'\] must have the shape \(11, 8\), found \(8, 11\)": params
        | {"lm_head.weight": turned},
        r"params\['lm_head.weight'\] must be C-contiguous": params | {"lm_head.weight": turned.T},
    }
    for message, given in wrong.items():
        with pytest.raises(ValueError, match=message):
            MoETransformer(config, "numpy", params=given)
    with pytest.raises(TypeError, match=r"params\['lm_head.weight'\] must be float32 as model.norm.weight is"):
        MoETransformer(config, "numpy", params={**params, "lm_head.weight": np.zeros((11, 8))})
    with pytest.raises(TypeError, match=r"params\['model.norm.weight'\] must be a NumPy array, found list"):
        MoETransformer(config, "numpy", params={**params, "model.norm.weight": [1.0] * 8})
    frozen = np.ones(8, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match=r"params\['model.norm.weight'\] must be writable, found a read-only array"):
        MoETransformer(config, "numpy", params={**params, "model.norm.weight": frozen})
    with pytest.raises(TypeError, match="dtype must be float32 or float64 for engine='numpy', found float16"):
        MoETransformer(config, "numpy", dtype=np.float16)
    with pytest.raises(TypeError, match="config must be a MoEConfig, found dict"):
        MoETransformer({}, "numpy")


def test_padding_may_be_longer_than_the_model(model):
    """Only real tokens count towards max_seq_len."""
    tokens, mask = np.zeros((1, 30), int), np.zeros((1, 30), int)
    tokens[0, -3:], mask[0, -3:] = [1, 2, 3], 1
    assert model.forward(tokens, mask)[0, -1] == pytest.approx(model.forward([[1, 2, 3]])[0, -1], abs=1e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
def test_a_fresh_process_is_light(moe_engine):
    """Imports neither torch nor rich; first forward in little memory."""
    program = (
        "import sys, numpy as np; from strop.moe import MoEConfig, MoETransformer; "
        f"MoETransformer(MoEConfig.preset('tiny'), {moe_engine!r}).forward(np.ones((2, 32), int)); "
        # VmHWM, not ru_maxrss: that one counts the parent before exec
        "peak = [line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0]; "
        "print('torch' in sys.modules, 'rich' in sys.modules, int(peak) // 1024)"
    )
    one_thread = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # each has memory of its own
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=one_thread)
    torch_loaded, rich_loaded, megabytes = result.stdout.split()
    assert (torch_loaded, rich_loaded) == ("False", "False")
    assert int(megabytes) < 80
