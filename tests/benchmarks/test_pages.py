"""Blocks and figures of the MoE suites from a small result made by hand."""

import json
import re

import pytest
from PIL import Image
from results import RATIO, result_of

from benchmarks import report
from benchmarks.pages import convergence, engines


def facts(milliseconds, **more):
    ns = milliseconds * 1e6
    return {"median_ns": ns, "samples_ns": [ns], "p95_ns": 2 * ns, "iqr_ns": ns / 10, "cpu_ns": ns, "gc_ns": 0.0, "finite": True,
            "peak_rss_mb": 45.2, "allocations": 1234, "allocated_bytes": 2_500_000, "tokens_per_second": 64e3 / milliseconds,
            "gflops": 36 / milliseconds, **more}  # fmt: skip


def timed(work, axis, contenders, ratios=None, **labels):
    return {"work": work, "labels": {"axis": axis, "scenario": work, "hidden": 64, "shape": [2, 32], "workers": 0, **labels},
            "contenders": contenders, "ratios": ratios or {}}  # fmt: skip


@pytest.fixture
def engines_result():
    both = {"native": facts(0.4), "Mixtral eager": facts(2.6)}
    cold = {"native": {k: v for k, v in facts(310).items() if k != "gc_ns"}}
    shares = {
        name: {"median_ns": ns, "samples_ns": [ns]}
        for name, ns in (("step", 1e6), ("products", 2.5e5), ("calls", 1.4e5))
    }
    share_ratios = {"products": RATIO | {"value": 0.25, "low": 0.2, "high": 0.28},
                    "calls": RATIO | {"value": 0.14, "low": 0.12, "high": 0.18}}  # fmt: skip
    cases = [
        {"work": "agreement", "labels": {"axis": "agreement", "hidden": 64},
         "agreement": {"native": {"logits": 2.2e-7, "loss": 2e-8, "gradients": 9e-7}}},
        timed("memory: forward 2×32, by batch", "memory", both, {"Mixtral eager": RATIO}),
        timed("memory: forward 2×32, by length", "memory", both, {"Mixtral eager": RATIO}),
        timed("parallel: inference 2×32, 2 workers", "parallel", both, {"Mixtral eager": RATIO}, workers=2),
        timed("parallel: training 2×8, 2 workers", "parallel", both, {"Mixtral eager": RATIO}, workers=2),
        timed("dispatch: cold, new process to first forward 2×32", "dispatch", cold),
        timed("decode: hidden 64, batch 64, 32 tokens", "decode", both, {"Mixtral eager": RATIO}),
        timed("blas", "blas", {"1 BLAS thread": facts(4.3), "2 BLAS threads": facts(27.95)}, {"2 BLAS threads": RATIO}),
        *(timed("shares", "shares", shares, share_ratios, engine="native", hidden=h) for h in (64, 256)),
    ]  # fmt: skip
    return result_of(*cases)


@pytest.fixture
def convergence_result():
    cases = [
        {"work": f"{task}: {engine}", "labels": {"task": task, "engine": engine}, "steps": [0, 1, 2],
         "losses": [7.0 + shift, 3.0, 1.2], **({"entropy_rate": 1.05} if task == "language" else {})}
        for task in ("memorise", "language") for engine, shift in (("native", 0.0), ("numpy", 0.001))
    ]  # fmt: skip
    return result_of(*cases)


def test_times_and_ratios(engines_result):
    text = engines.engines_summary(engines_result)
    assert "| forward, batch 2 × 32 tokens | 400 µs | 2.6 ms | 6.5× [6, 7] |" in text
    assert "| new process to first forward | 310 ms, 45 MB |  |  |" in text
    assert "BLAS on 1" in text
    assert "Other processes took 4% of the CPU" in text
    assert engines.engines_table(engines_result).count("6.5× [6, 7]") == 4  # decoding is not among them
    assert "6.5× [6, 7]" in engines.engines_decode(engines_result)


def test_what_is_recorded_beside_the_time(engines_result):
    assert (
        "| memory: forward 2×32, by batch | 45 MB | 45 MB | 1,234 (2.5 MB) | 1,234 (2.5 MB) |"
        in engines.engines_memory(engines_result)
    )
    details = engines.engines_details(engines_result)
    assert (
        "| memory: forward 2×32, by batch | native | 400 µs | 800 µs | 40 µs | 400 µs | 0 | 160,000 | 90 | yes |"
        in details
    )
    engines_result["cases"][1]["contenders"]["native"]["finite"] = False
    assert "**no**" in engines.engines_details(engines_result)
    assert "| 64 | native | 2.2e-07 | 2.0e-08 | 9.0e-07 |" in engines.engines_agreement(engines_result)
    assert "takes 4.3 ms with 1 BLAS thread and 27.9 ms with 2 BLAS threads" in engines.engines_blas(engines_result)


def test_shares_are_the_measured_ones(engines_result):
    assert "| native | 64 | 1 ms | 25% [20%, 28%] (250 µs) | 14% [12%, 18%] (140 µs) |" in engines.engines_shares(
        engines_result
    )
    text = engines.engines_host_language(engines_result)
    assert "cost 140 µs whatever the model's size, 14% of a step at hidden 64 and 14% at hidden 256" in text
    assert "products are 25% of a step" in text


def test_convergence_table_states_the_largest_difference(convergence_result):
    text = convergence.convergence_table(convergence_result)
    assert "| A fixed batch, memorised | native | 3 | 7.0000 | 1.2000 |" in text
    assert text.count("1.0e-03") == 2
    assert "entropy rate 1.0500" in text
    assert "interleaved" not in text  # nothing was timed


@pytest.mark.parametrize(("name", "drawn"), report.FIGURES.items(), ids=report.FIGURES)
def test_every_figure_is_drawn_from_its_result_and_carries_its_fingerprint(name, drawn, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(convergence, "NUM_FRAMES", 3)
    draw, source = drawn
    for folder in (name, source):
        (tmp_path / folder).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / source).write_bytes((report.ROOT / source).read_bytes())
    monkeypatch.setattr(report, "FIGURES", {name: (draw, source)})
    assert report.write(tmp_path) == [name]
    assert (tmp_path / name).stat().st_size > 5000
    assert report.drifted(tmp_path) == []
    found = json.loads((tmp_path / source).read_text())
    (tmp_path / source).write_text(json.dumps(found))
    assert report.drifted(tmp_path) == [name]
    if name.endswith("gif"):
        with Image.open(tmp_path / name) as animation:
            assert animation.n_frames == 3
            assert animation.info["duration"] == convergence.FRAME_MILLISECONDS


def test_every_block_of_the_pages_has_a_renderer():
    used = {
        name for path in report.documents(report.ROOT) for name in re.findall(r"generated: (\w+)", path.read_text())
    }
    assert used <= set(report.RENDERERS)
    assert set(report.RENDERERS) <= used, "a renderer nobody uses"
