"""Each layer imports alone, and no arrow of the architecture points back."""

import subprocess
import sys

import pytest

HEAVY = ["torch", "transformers", "triton", "scipy", "matplotlib", "typer", "rich"]
LAYERS = {
    # layer: what importing it may bring along
    "strop": [],
    "strop.primitives": [],
    "strop.ops": ["torch"],
    "strop.ops.registry": ["torch"],
    "strop.bench.harness": [],
    "strop.bench.report": [],
    "strop.bench.suites.primitives": [],
    "strop.cli": ["typer", "rich"],
}
KNOWS_NOTHING_OF = {
    "strop.primitives": ["strop.ops", "strop.bench", "strop.cli"],
    "strop.ops": ["strop.bench", "strop.cli"],
    "strop.bench.harness": ["strop.cli"],
}


def modules_after_import(name):
    program = f"import sys; import {name}; print('\\n'.join(sys.modules))"
    return set(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    )


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_alone(layer):
    loaded = modules_after_import(layer)
    assert {h for h in HEAVY if h in loaded} <= set(LAYERS[layer]) | ({"triton"} if "torch" in LAYERS[layer] else set())
    for other in KNOWS_NOTHING_OF.get(layer, []):
        assert not {m for m in loaded if m == other or m.startswith(other + ".")}


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
