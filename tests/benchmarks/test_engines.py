"""The engines suite: its scenarios, that every contender computes the same numbers, what is recorded and counted."""

import itertools
import resource
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from benchmarks import alone, harness
from benchmarks.contenders import moe as moe_contenders
from benchmarks.contenders.moe import MixtralContender, StropContender
from benchmarks.harness import Case, Contender, Method
from benchmarks.suites import engines
from benchmarks.suites.engines import SCENARIOS, TINY, Scenario, forward_flops, tokens_of
from strop.moe import MoEConfig, available_engines

SMALL = MoEConfig(hidden_dim=16, head_dim=8, num_heads=2, intermediate_dim=16, vocab_size=40, aux_loss_coef=0.0)


@pytest.fixture(scope="module")
def found_contenders():
    """All of them but the compiled one, whose compilation takes long; it has a test of its own."""
    pytest.importorskip("threadpoolctl")
    return [c for c in moe_contenders.contenders() if c.name != "Mixtral compiled"]


def test_scenarios_count_to_22_on_five_axes():
    assert Counter(s.axis for s in SCENARIOS) == {"memory": 9, "kernels": 3, "dispatch": 2, "parallel": 6, "scale": 2}
    assert len({s.work for s in SCENARIOS}) == 22
    memory = [(s.kind, s.shape) for s in SCENARIOS if s.axis == "memory"]
    assert memory == [("train", (2, 8)), *(("forward", (b, 32)) for b in (1, 2, 4, 8)),
                      *(("forward", (2, t)) for t in (8, 16, 32, 64))]  # fmt: skip
    assert [s.kind for s in SCENARIOS if s.axis == "kernels"] == ["matmul", "softmax", "rms_norm"]
    assert [(s.kind, s.workers) for s in SCENARIOS if s.axis == "parallel"] == [
        (kind, workers) for kind in ("forward", "train") for workers in (1, 2, 4)
    ]
    assert [(s.kind, s.hidden) for s in SCENARIOS if s.axis == "scale"] == [("forward", 256), ("train", 256)]


def test_the_model_is_the_one_the_targets_name():
    assert TINY.num_parameters() == 542_528
    assert engines.WIDE.hidden_dim == 256


def test_engines_come_from_the_registry(monkeypatch):
    names = [c.name for c in moe_contenders.contenders()]
    assert set(available_engines()) <= set(names)
    assert names.index("numpy") == len(available_engines()) - 1  # the reference after the engines meant to be fast
    monkeypatch.setattr(moe_contenders, "available_engines", lambda: ["numpy", "another"])
    assert [c.name for c in moe_contenders.contenders()][:2] == ["another", "numpy"]


@pytest.mark.parametrize("scenario", [s for s in SCENARIOS + engines.EXTRA if s.kind not in ("cold", "decode")
                                      and s.hidden == 64], ids=lambda s: s.work)  # fmt: skip
def test_every_contender_computes_the_same(scenario, found_contenders):
    for c in found_contenders:
        c.set_threads(1)
        call = engines.call_of(scenario, c)
        assert call is not None, c.name
        contender = Contender(name=c.name, function=call, expected=engines.expected_of(scenario), tolerance=2e-5)
        contender.check()
        contender.check()  # the learning rate is 0: a training step leaves everything as it was


@pytest.mark.filterwarnings("ignore")
def test_generation_is_the_same(found_contenders, monkeypatch):
    monkeypatch.setattr(engines, "NEW_TOKENS", 4)
    scenario = Scenario(axis="decode", name="x", kind="decode", shape=(3, 5))
    want = engines.expected_of(scenario)
    assert want.shape == (3, 4)
    for c in found_contenders:
        assert np.array_equal(np.asarray(engines.call_of(scenario, c)()), want), c.name


def test_agreement_is_checked_and_a_wrong_engine_stops_the_run(monkeypatch):
    monkeypatch.setitem(engines.CONFIGS, 64, SMALL)
    ours = StropContender("numpy")
    monkeypatch.setattr(engines, "contenders", lambda: [ours])
    found = engines.Agreement(hidden=64).measure(Method())
    assert found["agreement"]["numpy"]["gradients"] < 1e-5
    true = ours.loss_and_grads

    def wrong(*args):
        loss, grads = true(*args)
        grads["model.norm.weight"] = grads["model.norm.weight"] * 1.001
        return loss, grads

    monkeypatch.setattr(ours, "loss_and_grads", wrong)
    with pytest.raises(
        RuntimeError, match=r"numpy does not do the same work at hidden 64: its gradients differ by 0.001"
    ):
        engines.Agreement(hidden=64).measure(Method())


@pytest.mark.parametrize("make", [StropContender, lambda _: MixtralContender(compiled=False)])
def test_a_trained_step_is_the_same_step(make):
    """With a learning rate: the losses of five steps, which depend on the update of every parameter."""
    if make is not StropContender:
        pytest.importorskip("transformers")
    batch = tokens_of(SMALL, (2, 6))
    losses = []
    for trainer in (StropContender("numpy").trainer(SMALL, 1e-2), make("numpy").trainer(SMALL, 1e-2)):
        losses.append([trainer.step(*batch, learning_rate=rate) for rate in (1e-2, 1e-2, 5e-3, 5e-3, 1e-3)])
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


# ---- FLOPs and products -----------------------------------------------------------------------------------------------


def test_flops_by_hand():
    """One token, one layer: 2·m·k·n of each product."""
    config = MoEConfig(hidden_dim=4, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2, num_experts=3, top_k=2,
                       intermediate_dim=5, vocab_size=7)  # fmt: skip
    projections = 2 * 4 * (4 + 2 + 2 + 4)
    attention = 2 * (1 * 2) * 2 + 2 * (1 * 2) * 2  # one visible key: scores and context of two heads with two channels
    assert forward_flops(config, 1, 1) == projections + attention + 2 * 4 * 3 + 2 * (3 * 2 * 4 * 5) + 2 * 4 * 7


@pytest.mark.parametrize("shape", [(2, 8), (3, 5)])
def test_recorded_products_are_all_of_them(shape):
    """Their FLOPs are three forwards, with attention to all keys, which is what the reference multiplies."""
    pairs = moe_contenders.record_products(SMALL, *tokens_of(SMALL, shape))
    recorded = sum(2 * a.size * b.shape[-1] for a, b in pairs)
    tokens, heads = shape[0] * shape[1], SMALL.num_heads * SMALL.head_dim
    hidden_keys = SMALL.num_layers * tokens * 4 * heads * (shape[1] - 1) / 2
    assert recorded == 3 * (forward_flops(SMALL, *shape) + hidden_keys)
    assert all(type(a) is type(b) is np.ndarray for a, b in pairs)


def test_products_of_each_engine_are_the_same_products():
    """What an engine multiplies when it is given pairs: an engine that skipped one would look fast."""
    if "native" not in available_engines():
        pytest.skip("needs the compiled module")
    from benchmarks.contenders import moe_kernels as native

    pairs = moe_contenders.record_products(SMALL, *tokens_of(SMALL, (2, 8)))
    seen = []
    original = native.native.MoEProducts

    def watched(lefts, rights, outs):
        seen.append((lefts, rights, outs))
        return original(lefts, rights, outs)

    class Module:
        MoEProducts = staticmethod(watched)

    native_module, native.native = native.native, Module
    try:
        native._products(pairs)()
    finally:
        native.native = native_module
    lefts, rights, outs = seen[0]
    assert sum(a.size * b.shape[1] for a, b in zip(lefts, rights, strict=True)) >= sum(
        a.size * b.shape[-1] for a, b in pairs
    )
    for a, b, c in zip(lefts, rights, outs, strict=True):
        assert np.allclose(c, a @ b, atol=1e-6)


def test_products_of_mixtral_are_recorded():
    pytest.importorskip("transformers")
    call = MixtralContender(compiled=False).products(SMALL, *tokens_of(SMALL, (2, 8)))
    call()


# ---- what the harness records beside the time ---------------------------------------------------------------------------


def test_cpu_time_collector_and_rates():
    def busy():
        garbage = [[] for _ in range(200)]
        for item in garbage:
            item.append(item)
        return 1.0

    case = Case(
        work="w", labels={}, contenders=[Contender(name="a", function=busy)], tokens=10, flops=1000, collect=True
    )
    found = harness.measure(case, Method(rounds=3))["contenders"]["a"]
    assert found["gc_ns"] > 0
    assert 0 < found["cpu_ns"] < 10 * found["median_ns"]
    assert found["tokens_per_second"] == pytest.approx(10 / found["median_ns"] * 1e9, rel=1e-3)
    assert found["gflops"] == pytest.approx(1000 / found["median_ns"], rel=0.1)
    assert found["finite"] is True
    wrong = Case(work="w", labels={}, contenders=[Contender(name="a", function=lambda: np.inf)], collect=True)
    assert harness.measure(wrong, Method(rounds=3))["contenders"]["a"]["finite"] is False


def test_every_call_is_timed_where_nothing_warms():
    calls = []
    case = Case(work="w", labels={}, contenders=[Contender(name="a", function=lambda: calls.append(1),
                notes=lambda: {"seen": len(calls)})], warm_up=False, rounds=4)  # fmt: skip
    assert harness.measure(case, Method())["contenders"]["a"]["seen"] == 4


def test_a_fresh_process_tells_its_memory_and_allocations(tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text(
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.malloc.restype = ctypes.c_void_p\n"
        "libc.free.argtypes = [ctypes.c_void_p]\n"
        "def alone(count, megabytes):\n"
        "    ballast = bytearray(int(megabytes) * 1_000_000)\n"
        "    def call():\n"
        "        for _ in range(int(count)):\n"
        "            libc.free(libc.malloc(100_000))\n"
        "        return len(ballast)\n"
        "    return call\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    few, many = alone.run_alone("worker", "3", "0"), alone.run_alone("worker", "53", "60")
    assert 55 < many["peak_rss_mb"] - few["peak_rss_mb"] < 65
    if few["allocations"] is None:
        pytest.skip("needs a C compiler and glibc")
    assert many["allocations"] - few["allocations"] == 50
    assert many["allocated_bytes"] - few["allocated_bytes"] == 50 * 100_000
    with pytest.raises(RuntimeError, match="worker x 0 failed in a fresh process: ValueError"):
        alone.run_alone("worker", "x", "0")


def test_the_native_engine_allocates_no_arrays_in_a_step():
    """Its few calls are the wrapper's: pointers and the loss, not activations or gradients."""
    if "native" not in available_engines():
        pytest.skip("needs the compiled module")
    found = alone.run_alone("benchmarks.suites.engines", "memory: train step 2×8", "native")
    if found["allocations"] is None:
        pytest.skip("needs a C compiler and glibc")
    assert found["allocations"] < 20
    assert found["allocated_bytes"] < 20_000


def test_a_new_process_reaches_its_first_forward_in_time_and_memory():
    """Under 0.5 s and 80 MB, the best of three, in CPU time: other work on the machine is not the engine's."""

    def seconds_of_children():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    for name in available_engines():
        contender = engines._cold_contender(StropContender(name))
        at = [seconds_of_children()]
        for _ in range(3):
            contender.function()
            at.append(seconds_of_children())
        assert contender.notes()["peak_rss_mb"] < 80
        assert min(end - start for start, end in itertools.pairwise(at)) < 0.5


def test_load_of_others_is_a_share():
    load = harness.Load()
    sum(range(10**6))
    assert load.by_others() is None or 0 <= load.by_others() <= 1


def test_engines_suite_imports_no_framework():
    program = "import sys, benchmarks.suites.engines, benchmarks.suites.convergence; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"
