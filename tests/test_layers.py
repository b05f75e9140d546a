"""Each layer imports alone, and no arrow of the architecture points back."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ["torch._dynamo", "torch", "transformers", "triton", "scipy", "matplotlib", "typer", "rich"]
LAYERS = {
    # layer: what importing it may bring along
    "strop": [],
    "strop._checks": [],
    "strop.primitives": [],
    "strop.moe": [],
    "strop.moe.engine": [],
    "strop.moe.model": [],
    "strop.moe.train": [],
    "strop.moe.weights": [],
    "strop.moe.reference.engine": [],
    "strop.tasks": [],
    "strop.checksums": [],
    "strop.losses": ["torch"],
    "strop.losses.kl": ["torch"],
    "strop.losses.policy": ["torch"],
    "strop.losses.advantages": ["torch"],
    "strop.losses.preference": ["torch"],
    "strop.ops": ["torch"],
    "strop.ops.registry": ["torch"],
    "strop.config": [],
    "strop.logging": [],
    "strop.callbacks": [],
    "strop.algorithms.dpo": ["torch"],
    "strop.models": ["torch"],
    "strop.rollout": ["torch"],
    "strop.rewards": ["torch"],
    "strop.algorithms.grpo": ["torch"],
    "strop.checkpoint": ["torch"],
    "strop.bench.harness": [],
    "benchmarks.report": [],
    "strop.bench.alone": [],
    "strop.bench.suites.primitives": [],
    "strop.bench.suites.engines": [],
    "strop.bench.suites.convergence": [],
    "strop.bench.suites.losses": ["torch"],
    "benchmarks.pages.learning": [],
    "strop.data.formats": [],
    "strop.data.tokenize": [],
    "strop.data.batch": ["torch"],
    "strop.report": [],
    "strop.cli": ["typer", "rich"],
}
KNOWS_NOTHING_OF = {
    "strop.primitives": ["strop.moe", "strop.losses", "strop.ops", "strop.bench", "strop.cli"],
    "strop.moe": ["strop.losses", "strop.ops", "strop.bench", "strop.cli"],
    "strop.moe.reference.engine": ["strop.moe.native", "strop.ops", "strop.bench", "strop.cli"],
    "strop.losses": ["strop.moe", "strop.ops", "strop.bench", "strop.cli"],
    "strop.ops": ["strop.moe", "strop.bench", "strop.cli"],
    "strop.models": ["strop.rollout", "strop.algorithms", "strop.rewards", "strop.bench", "strop.cli"],
    "strop.rollout": ["strop.algorithms", "strop.rewards", "strop.bench", "strop.cli"],
    "strop.rewards": ["strop.models", "strop.rollout", "strop.algorithms", "strop.bench", "strop.cli"],
    "strop.algorithms.grpo": ["strop.tasks", "strop.bench", "strop.cli"],
    "strop.bench.harness": ["strop.cli"],
    "strop.data.batch": ["strop.moe", "strop.ops", "strop.losses", "strop.algorithms", "strop.cli"],
    "strop.report": ["strop.moe", "strop.ops", "strop.losses", "strop.algorithms", "strop.cli"],
}


@functools.cache
def modules_after_imports(needs_torch):
    """{layer: modules after its import}. Each in a child of its own of a process that has imported torch, or nothing."""
    layers = [layer for layer, brings in LAYERS.items() if ("torch" in brings) == needs_torch]
    program = f"import json, os, sys{', torch' if needs_torch else ''}\n"
    program += (
        f"for layer in {layers}:\n"
        "    if os.fork() == 0:\n"
        "        __import__(layer)\n"
        "        print(json.dumps([layer, list(sys.modules)]), flush=True)\n"
        "        os._exit(0)\n"
        "    assert os.wait()[1] == 0, layer\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return {layer: set(modules) for layer, modules in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_alone(layer):
    loaded = modules_after_imports("torch" in LAYERS[layer])[layer]
    assert layer in loaded
    assert {h for h in HEAVY if h in loaded} <= set(LAYERS[layer]) | ({"triton"} if "torch" in LAYERS[layer] else set())
    for other in KNOWS_NOTHING_OF.get(layer, []):
        assert not {m for m in loaded if m == other or m.startswith(other + ".")}


def test_a_model_at_work_brings_in_no_framework():
    """Not only the import: a step, a generation and a checkpoint."""
    program = (
        "import sys, tempfile; from strop.moe import MoEConfig, MoETransformer, available_engines, fit\n"
        "for engine in available_engines():\n"
        "    model = MoETransformer(MoEConfig(vocab_size=20), engine)\n"
        "    fit(model, [{'tokens': [[1, 2, 3]], 'targets': [[2, 3, 4]]}], num_steps=1, progress=False)\n"
        "    model.generate([[1, 2]], max_new_tokens=2)\n"
        "    model.save(folder := tempfile.mkdtemp()); MoETransformer.load(folder, engine)\n"
        "print(sorted({'torch', 'transformers', 'scipy', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_algorithms_from_the_package_cost_nothing_before_they_are_used():
    program = (
        "import sys, strop; before = 'torch' in sys.modules; from strop import GRPO, DPO, SFT, OnlineDPO, BestOfN;"
        "print(before, 'torch' in sys.modules, GRPO.__module__, BestOfN.__name__, 'SFT' in dir(strop), hasattr(strop, 'PPPO'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False True strop.algorithms.grpo BestOfN True False\n", done.stderr


def test_import_is_quick():
    """Of five fresh processes the best, in CPU time, which a busy machine does not stretch: strop over NumPy, and both."""
    program = (
        "import time; a = time.process_time(); import numpy; b = time.process_time(); import strop;"
        "c = time.process_time(); print(b - a, c - b)"
    )
    runs = [
        tuple(
            map(float, subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.split())
        )
        for _ in range(5)
    ]
    assert min(ours for _, ours in runs) < 0.05
    assert min(numpy + ours for numpy, ours in runs) < 0.2
