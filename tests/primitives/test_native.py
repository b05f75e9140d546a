"""What only the compiled module promises: the same bits whatever the threads, safety under concurrency and fork."""

import concurrent.futures
import inspect
import os
import pickle
import subprocess
import sys
import time

import numpy as np
import pytest

import strop
from strop import _compiled

pytestmark = pytest.mark.skipif(_compiled.native is None, reason=f"the compiled module is {_compiled.native_status}")


@pytest.fixture
def restore_threads():
    before = strop.get_num_threads()
    yield
    strop.set_num_threads(before)


def large_calls(dtype):
    """Inputs above every threshold for threads: many rows, one long row, few long rows, groups of both kinds."""
    rng = np.random.default_rng(0)
    p = rng.uniform(-6, 0, 600_000).astype(dtype)
    q = (p + rng.standard_normal(p.size)).astype(dtype)
    mask = rng.random(p.size) < 0.7
    return [
        lambda: strop.compute_batch_token_kl_schulman(p, q, 100, mask),
        lambda: strop.compute_batch_token_kl(p, q, 200_000),
        lambda: np.array(strop.compute_token_kl_schulman(p, q)),
        lambda: np.array(strop.compute_token_kl(p, q, mask)),
        lambda: strop.compute_gae(p.reshape(-1, 100), q.reshape(-1, 100), mask=mask.reshape(-1, 100)),
        lambda: strop.compute_batch_group_advantages(p, 6),
        lambda: strop.compute_batch_group_advantages(p, 600, scale="batch"),
        lambda: strop.compute_batch_group_advantages(p, 24, scale="none"),
        lambda: strop.compute_batch_group_advantages(-p, 6, scale="mean"),
        lambda: strop.compute_pass_at_k_advantages(p, 24, k=3),
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("isa", _compiled.native.available_isas() if _compiled.native else [])
def test_threads_do_not_change_a_bit(dtype, isa, restore_threads):
    before = _compiled.native.isa()
    _compiled.native.set_isa(isa)
    try:
        calls = large_calls(dtype)
        results = []
        for threads in (1, 2, 3, 7):
            strop.set_num_threads(threads)
            results.append([call().tobytes() for call in calls])
    finally:
        _compiled.native.set_isa(before)
    assert all(result == results[0] for result in results)


def test_many_threads_at_once(restore_threads):
    strop.set_num_threads(4)
    calls = large_calls(np.float32) + large_calls(np.float64)
    expected = [call().tobytes() for call in calls]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            assert [f.tobytes() for f in pool.map(lambda call: call(), calls)] == expected


def test_large_calls_release_the_interpreter_lock(restore_threads):
    """Another Python thread gets to run while one long call is under way."""
    strop.set_num_threads(1)
    p = np.zeros(40_000_000)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        strop.compute_token_kl(p[:10], p[:10])
        future = pool.submit(strop.compute_token_kl, p, p)
        ticks = 0
        while not future.done():
            time.sleep(0)
            ticks += 1
    assert ticks > 10


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_large_work_is_shared_and_small_work_is_not():
    program = """
import os, numpy as np, strop
strop.set_num_threads(3)
tasks = lambda: len(os.listdir("/proc/self/task"))
before = tasks()
x = np.linspace(-5, 0, 500_000)
strop.compute_token_kl(x[:1000], x[:1000])
assert tasks() == before
strop.compute_token_kl(x, x)
assert tasks() == before + 2
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize(
    "call", ["compute_batch_group_advantages(x)", "compute_batch_token_kl(x, x)", "pack_sequences(n, 99)"]
)
def test_the_process_ends_well_while_a_daemon_thread_computes(call):
    program = f"""
import threading, time, numpy as np, strop
x, n = np.random.random((1024, 32)), np.arange(50)
def work():
    while True: strop.{call}
threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS")
def test_running_out_of_memory_or_threads_does_not_abort():
    """Address space for the arrays but not for another thread's stack or a block of partial sums."""
    program = """
import resource, numpy as np, strop
x = np.zeros(1 << 20)
expected = strop.compute_token_kl_schulman(x, x)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20),) * 2)
strop.set_num_threads(64)
try:
    assert strop.compute_token_kl_schulman(x, x) == expected
except MemoryError:
    pass
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_forked_child_has_threads_of_its_own():
    """In a fresh process, so that no other library's threads are forked."""
    program = """
import os, numpy as np, strop
strop.set_num_threads(3)
x = np.linspace(-5, 0, 500_000)
expected = strop.compute_token_kl(x, x - 1)
pid = os.fork()
if pid == 0:
    right = all(strop.compute_token_kl(x, x - 1) == expected for _ in range(20))
    os._exit(0 if right and len(os.listdir("/proc/self/task")) > 1 else 1)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0
assert strop.compute_token_kl(x, x - 1) == expected
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("name", [n for n in strop.__all__ if n.startswith("compute_")])
def test_compiled_functions_look_like_python_functions(name):
    function = getattr(strop, name)
    assert inspect.signature(function).parameters.keys() == inspect.signature(function.__self__.twin).parameters.keys()
    assert inspect.getdoc(function) == inspect.getdoc(function.__self__.twin)
    assert pickle.loads(pickle.dumps(function)) is function
    assert function.__module__ == "strop"


def test_kernels_refuse_unprepared_arguments():
    with pytest.raises(RuntimeError, match="should have prepared"):
        _compiled.kernels["compute_token_kl"]([1.0], [2.0])


def test_a_million_lengths_in_a_second():
    lengths = np.random.default_rng(0).integers(1, 2049, 1_000_000)
    start = time.process_time()
    bins = strop.pack_sequences(lengths, 4096)
    seconds = time.process_time() - start
    assert sum(map(len, bins)) == 1_000_000
    assert max(int(lengths[b].sum()) for b in bins[:1000]) <= 4096
    assert seconds < 3  # the figure is in the benchmark; this only catches a change of complexity on a busy machine


def run_python(code, **environment):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment)


def test_environment():
    show = "import strop; from strop import _compiled as c; print(strop.get_num_threads(), c.native and c.native.isa(), c.native_status)"
    assert run_python(show, STROP_NUM_THREADS="3", STROP_ISA="baseline").stdout.split()[:2] == ["3", "baseline"]
    assert "switched off by STROP_NATIVE=0" in run_python(show, STROP_NATIVE="0").stdout
    threads = run_python(show, STROP_NUM_THREADS="many")
    assert (
        "RuntimeWarning: STROP_NUM_THREADS must be a whole number from 1 to 1024, found 'many'; using" in threads.stderr
    )
    assert "RuntimeWarning: STROP_ISA must be one of" in run_python(show, STROP_ISA="mmx").stderr


def test_set_num_threads_checks(monkeypatch):
    with pytest.raises(TypeError, match="count must be an int, found float"):
        strop.set_num_threads(2.0)
    with pytest.raises(ValueError, match="count must be at least 1, found 0"):
        strop.set_num_threads(0)
    monkeypatch.setattr(_compiled, "native", None)
    with pytest.warns(RuntimeWarning, match="NumPy runs on one thread"):
        strop.set_num_threads(2)
    assert strop.get_num_threads() == 1
