"""The losses suite: every contender does the same work, what is timed and recorded; its blocks from a result made by hand."""

import dataclasses
import gc
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from results import result_of

from benchmarks import gpu_timers, harness
from benchmarks.contenders import loss_accuracy
from benchmarks.contenders import losses as peers
from benchmarks.harness import Contender, Method
from benchmarks.pages import losses as pages
from benchmarks.suites import losses

TINY = dataclasses.replace(losses.ON_A_CPU, logits=[(4, 5, 61)], small=(4, 3, 17), heads=[(4, 6, 8, 61)], copy_bytes=64)
QUICK = Method(rounds=3, sample_seconds=1e-6)


# ---- the suite --------------------------------------------------------------------------------------------------------


def test_a_run_on_the_cpu(monkeypatch):
    """Every case of the suite at tiny sizes: all contenders agree, all figures are those of their samples."""
    monkeypatch.setattr(loss_accuracy.Accuracy, "batches", 4)
    measured = [case.measure(QUICK) for case in losses.cases(TINY)]
    timed = [case for case in measured if "strop" in case.get("contenders", ())]
    assert {(c["labels"]["operator"], c["labels"]["way"]) for c in timed} == set(pages.FLOORS)
    for case in timed:
        assert list(case["contenders"])[:1] == ["strop"]
        assert "eager" in case["ratios"]
        assert "left_out" not in case["labels"]
        harness._check_figures(case)
    errors = [case["errors"] for case in measured if "errors" in case]
    assert len(errors) == 2
    for by_dtype in errors:
        for quantities in by_dtype.values():
            for quantity in set(quantities["strop"]) - {"loss"}:  # of which there are only four
                assert losses.error_ratio(quantities, quantity) < 2
        assert 0 < by_dtype["float32"]["strop"]["logp"] < 1e-6
    header, rows = losses.summary(measured)
    assert all(len(row) <= len(header) for row in rows)
    assert rows[0][0] == "grpo_loss forward 4×5·61"


def test_the_sizes_of_the_gpu_are_those_the_documents_promise():
    sizes = losses.ON_A_GPU
    assert [(b * t, v) for b, t, v in sizes.logits] == [(8192, 32768), (8192, 50257), (8192, 131072)]
    assert [(b * t, h, v) for b, t, h, v in sizes.heads] == [(4096, 2048, 131072), (8192, 4096, 151936)]
    assert sizes.small == (4, 64, 32768)
    works = [case.work for case in losses.cases(sizes)]  # nothing is allocated yet
    assert len(works) == len(set(works)) == 3 + 3 * 7 + 2 + (7 + 3) + (5 + 3)


def case_of(*contenders):
    return losses.LossCase(work="w", labels={}, build=lambda: list(contenders))


def test_a_peer_that_fails_is_left_out_and_ours_is_not():
    def fails():
        raise RuntimeError("no such kernel\nmore")

    ours = Contender(name="strop", function=lambda: 1.0, expected=1.0)
    wrong = Contender(name="Liger", function=lambda: 2.0, expected=1.0)
    found = case_of(ours, wrong, Contender(name="eager", function=fails, expected=1.0)).measure(QUICK)
    assert list(found["contenders"]) == ["strop"]
    assert found["labels"]["left_out"]["eager"] == "RuntimeError: no such kernel"
    assert "does not do the same work" in found["labels"]["left_out"]["Liger"]
    with pytest.raises(RuntimeError, match="contender strop does not do the same work"):
        case_of(Contender(name="strop", function=lambda: 2.0, expected=1.0)).measure(QUICK)


@pytest.mark.parametrize("spoil", ["other tokens", "chosen token", "loss", "last gradient missing"])
def test_the_comparison_sees(spoil):
    """A zero off-target gradient, though thousands of times smaller than the rest, must be found."""
    ids = torch.randint(0, 50, (2, 3))
    gradient = 1e-6 * torch.randn(2, 3, 50)
    gradient.scatter_(-1, ids[..., None], 1.0)
    numbers = peers.Numbers(((torch.tensor(0.7),), (gradient,)), ids)
    assert np.allclose(numbers(((torch.tensor(0.7),), (gradient,))), numbers.expected)
    loss, spoilt = torch.tensor(0.7), gradient.clone()
    if spoil == "last gradient missing":
        with pytest.raises(AssertionError, match="another number"):
            numbers(((loss,), ()))
        return
    if spoil == "loss":
        loss = torch.tensor(0.8)
    elif spoil == "chosen token":
        spoilt.scatter_(-1, ids[..., None], 0.9)
    else:
        spoilt = torch.zeros_like(gradient).scatter_(-1, ids[..., None], 1.0)
    assert not np.allclose(numbers(((loss,), (spoilt,))), numbers.expected, rtol=0.05, atol=0.05)


def test_eager_is_the_operator():
    """The ten lines an author would write give what strop's reference gives, gradient included."""
    p = losses.LogitsProblem(4, 5, 61, "cpu", torch.float64)
    b = p.batch
    ours = losses.grpo_loss(p.policy, p.ref, b.ids_BT, b.old_BT, b.rewards_B, b.mask_BT, **losses.OPTIONS).loss
    eager = peers.eager_grpo_loss(p.policy, p.ref, b)
    torch.testing.assert_close(ours, eager.to(ours.dtype))
    gradients = [torch.autograd.grad(loss, p.policy)[0] for loss in (ours, eager)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-9)


def test_the_reading_floor_reads_everything():
    """Through Triton's interpreter: the largest word of every block, wherever it stands."""
    pytest.importorskip("triton")
    program = (
        "import torch; from benchmarks.contenders.read_kernel import read_once\n"
        "x = torch.zeros(3 * 8192 + 5, dtype=torch.int32)\n"
        "x[[1, 8191, 8192 + 77, 3 * 8192 + 4]] = torch.tensor([3, 4, 5, 6], dtype=torch.int32)\n"
        "print(read_once(x.view(torch.float32)).tolist())"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "[4, 5, 0, 6]", done.stderr


def test_products_are_the_ones_of_an_lm_head():
    hidden, weight = torch.randn(6, 4), torch.randn(9, 4)
    logits = torch.empty(6, 9)
    peers.products(1, hidden, weight, logits)()
    torch.testing.assert_close(logits, hidden @ weight.T)


# ---- the GPU's clock, with a GPU made by hand -------------------------------------------------------------------------


@pytest.fixture
def fake_gpu(monkeypatch):
    """Events that read the host's clock, and a record of what happens in which order."""
    happened = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            happened.append("event")
            self.at = time.perf_counter()

        def elapsed_time(self, end):
            return (end.at - self.at) * 1e3

    class Cache:
        def zero_(self):
            happened.append("flush")
            time.sleep(2e-2)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: happened.append("head start"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("wait"))
    monkeypatch.setattr(gpu_timers, "_more_than_the_cache", Cache)
    return happened


def test_the_flush_before_a_call_is_not_timed(fake_gpu):
    timer = gpu_timers.GpuTimer(Contender(name="x", function=lambda s: fake_gpu.append("call"), args=(1,)))
    fake_gpu.clear()
    assert timer.timeit(3) < 2e-2
    assert fake_gpu == ["flush", "head start", "event", "call", "event"] * 3 + ["wait"]
    assert gc.isenabled()


def test_the_wall_clock_waits_before_and_after(fake_gpu):
    timer = gpu_timers.WallGpuTimer(Contender(name="x", function=lambda: (fake_gpu.append("call"), time.sleep(1e-3))))
    fake_gpu.clear()
    assert 2e-3 <= timer.timeit(2) < 3e-2
    assert fake_gpu == ["flush", "wait", "call", "wait"] * 2


def test_a_loop_waits_at_its_end_alone(fake_gpu):
    timer = gpu_timers.LoopGpuTimer(Contender(name="x", function=lambda: (fake_gpu.append("call"), time.sleep(1e-3))))
    fake_gpu.clear()
    assert 3e-3 <= timer.timeit(3) < 3e-2
    assert fake_gpu == ["wait", "call", "call", "call", "wait"]


def test_a_case_takes_its_own_clock():
    class Clock:
        def __init__(self, contender):
            self.seconds = contender.function()

        def timeit(self, number):
            return number * self.seconds

    contenders = [Contender(name="a", function=lambda: 0.01), Contender(name="b", function=lambda: 0.03)]
    found = harness.measure(harness.Case(work="w", labels={}, contenders=contenders, clock=Clock), Method(rounds=3))
    assert found["contenders"]["a"]["median_ns"] == 1e7
    assert found["ratios"]["b"]["value"] == 3.0


def test_a_result_is_named_after_the_gpu():
    host = {"machine": {"architecture": "x86_64"}, "threads": {"usable_cpus": 2}}
    assert harness.machine_name(host) == harness.machine_name({**host, "gpu": None}) == "x86_64-2cores"
    assert harness.machine_name({**host, "gpu": {"name": "NVIDIA H200"}}) == "h200"
    assert harness.machine_name({**host, "gpu": {"name": "NVIDIA GeForce RTX 4090"}}) == "geforce-rtx-4090"


# ---- the pages --------------------------------------------------------------------------------------------------------


def timed(operator, way, V, medians, clock="device", hidden=None, **labels):
    contenders = {}
    for name, (milliseconds, *memory) in medians.items():
        samples = [milliseconds * 1e6 * factor for factor in (0.99, 1.0, 1.01)]
        keys = ("memory_beyond_inputs", "memory_beyond_gradients")
        contenders[name] = harness.statistics(samples) | dict(zip(keys, memory, strict=False))
    ours = contenders["strop"]["samples_ns"]
    ratios = {name: harness.ratio(c["samples_ns"], ours) for name, c in contenders.items() if name != "strop"}
    shape = {"shape": "4096", "hidden": hidden} if hidden else {"shape": "32×256", "floor_bytes": 4_000_000_000}
    return {"work": f"{operator} {way} {V} {clock}", "contenders": contenders, "ratios": ratios,
            "labels": {"operator": operator, "way": way, "vocabulary": V, "clock": clock, "dtype": "bfloat16", **shape, **labels}}  # fmt: skip


@pytest.fixture
def result():
    both = "forward + backward"
    errors = {"strop": {"logp": 2e-7, "gradient": 3e-3}, "eager": {"logp": 2e-7, "gradient": 1e-3}}
    cases = [
        {"work": "device copy", "labels": {"operator": "copy", "bytes": 8_000_000_000},
         "contenders": {"copy": harness.statistics([2e6])}, "ratios": {}},
        timed("grpo_loss", "forward", 32768, {"strop": (0.3, 1000, 1000), "eager": (3.0, 2e9, 2e9), "floor": (0.25,)}),
        timed("grpo_loss", both, 32768, {
            "strop": (0.5, 500e6, 100), "strop in place": (0.45, 100, 100), "eager": (5.0, 9e9, 8e9),
            "torch.compile": (0.5, 1e9, 5e8), "Liger": (0.4, 500e6, 50), "Liger in place": (0.95,), "floor": (0.4,),
        }),
        timed("grpo_loss", both, 32768, {"strop": (0.2,), "eager": (0.4,)}, clock="wall"),
        timed("grpo_loss", both, 32768, {"strop": (0.5,), "Liger": (1.1,)}, clock="loop"),
        timed("linear_grpo_loss", both, 131072, {
            "strop": (11.0, 1.6e9, 1.1e9), "eager": (15.0, 5e9, 4e9), "torch.compile": (12.0,), "floor": (10.0,),
        }, hidden=2048, left_out={"Liger": "RuntimeError: out of memory"}),
        timed("linear_grpo_loss", both, 131072, {"strop": (10.52,), "floor": (10.0,)}, clock="loop", hidden=2048),
        timed("linear_logp", both, 131072, {"strop": (12.0, 0.9e9, 0.4e9), "floor": (10.0,)}, hidden=2048),
        {"work": "accuracy of x", "labels": {"operator": "accuracy"}, "errors": {"bfloat16": errors}},
    ]  # fmt: skip
    gpu = {"name": "NVIDIA H200", "driver_version": "1.2"}
    return result_of(*cases, gpu=gpu, versions={"numpy": "2.4", "liger-kernel": "0.8.0"})


def test_slower_is_as_visible_as_faster(result):
    text = pages.losses_table(result)
    assert "| `grpo_loss` forward + backward, 32×256, V 32,768 | 500 µs | 10× [" in text
    assert "| no difference 1× [" in text
    assert "| **slower** 0.8× [" in text
    assert "| 1.25× [1.25, 1.25] two reads, one write | 1 ms |" in text  # 4 GB at 4 GB a microsecond
    assert "A copy in device memory moved 4,000 GB/s" in text
    assert (
        "Liger was left out of `linear_grpo_loss` forward + backward, 4096 tokens, H 2,048, V 131,072: RuntimeError: out"
        in text
    )
    assert "NVIDIA H200, driver 1.2" in text


def test_targets_say_what_is_missed(result):
    lines = pages.losses_targets(result).splitlines()

    def line(*parts):
        return next(line for line in lines if all(part in line for part in parts))

    assert line("forward, V 32,768, of two reads").endswith("| ≤ 1.1× | 1.2× [1.2, 1.2] | **no** |")
    assert line("V 32,768: Liger's time by ours").endswith("**no** |")
    assert line("V 32,768: Liger in place's time by ours in place").endswith("| 2.111× [2.111, 2.111] | yes |")
    assert line("V 32,768, in a loop: Liger's time by ours").endswith("| ≥ 2× | 2.2× [2.2, 2.2] | yes |")
    assert line("V 131,072: torch.compile's").endswith("yes |")
    assert line("V 131,072: memory beyond the gradients").endswith("| ≤ 600 MB | 563.1 MB | yes |")
    assert line("linear_grpo_loss", "V 131,072, of three products").endswith("| ≤ 1.05× | 1.1× [1.1, 1.1] | **no** |")
    assert line("V 131,072, in a loop, of three products").endswith("| ≤ 1.05× | 1.052× [1.052, 1.052] | **no** |")
    assert line("V 50,257: Liger's").endswith("| ≥ 1.4× |  | not measured |")
    assert line("accuracy of x in bfloat16").endswith("| ≤ 2× | 3.00× | **no** |")


def test_every_contender_with_its_memory(result):
    blocks = {block.__name__: block for block in pages.OPERATOR_BLOCKS}
    assert list(blocks) == [f"losses_{name}" for name in pages.OPERATORS]
    text = blocks["losses_linear_grpo_loss"](result)
    assert "| strop | 11 ms |  | 1.6 GB | 1.1 GB; 563 MB beyond a float32 sum |" in text
    assert "| strop | 12 ms |  | 900 MB | 400 MB |" in blocks["losses_linear_logp"](result)  # which sums no weight
    assert "| floor: three products | 10 ms | strop takes 1.1× [" in text
    assert "`grpo_loss`" not in text
    assert "V 32,768, in a loop | Liger | 1.1 ms | 2.2×" in blocks["losses_grpo_loss"](result)
    assert "from call to result" in blocks["losses_grpo_loss"](result)
    assert "wall" not in pages.losses_summary(result)
    assert "(images/losses.png)" in pages.losses_summary(result)
    assert "| bfloat16 | gradient | 3.00e-03 | 1.00e-03 | 3.00× |" in pages.losses_accuracy(result)
