"""Each layer imports alone, and no arrow of the architecture points back: arrows are read from the source."""

import ast
import collections
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

import strop

SOURCE = Path(strop.__file__).parent
# A room may import what stands before it in this list, also inside functions. Rooms in one row know nothing of each other.
HOUSE = [
    ["_types"],
    ["_checks"],
    ["_contained", "_native", "_hub", "_install", "_trl", "checksums", "process_failures", "sample_metrics"],
    ["_compiled", "user_code"],
    ["_tensors", "config", "distributed"],
    ["primitives"],
    ["moe", "losses", "tasks"],
    ["data"],
    ["ops"],
    ["models"],
    ["rollout", "rewards"],
    ["environments"],
    ["training"],
    ["callbacks", "logging", "algorithms"],
    ["report"],
    ["cli"],
    ["__main__"],
]

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
    "strop.rollout.client": ["torch"],
    "strop.rollout.openai_server": ["torch"],
    "strop.rewards": ["torch"],
    "strop.algorithms.grpo": ["torch"],
    "strop.training.checkpoint": ["torch"],
    "benchmarks.harness": [],
    "benchmarks.report": [],
    "benchmarks.alone": [],
    "benchmarks.suites.primitives": [],
    "benchmarks.suites.engines": [],
    "benchmarks.suites.convergence": [],
    "benchmarks.suites.losses": ["torch"],
    "benchmarks.pages.learning": [],
    "strop.data.formats": [],
    "strop.data.tokenize": [],
    "strop.data.batch": ["torch"],
    "strop.training.logging": [],
    "strop.training.callbacks": [],
    "strop.training.trainer": ["torch"],
    "strop.report": [],
    "strop.cli": ["typer", "rich"],
}


def room_of(module):
    return module.split(".")[1] if "." in module else "strop"


def modules():
    paths = sorted(SOURCE.rglob("*.py"))
    names = (".".join(("strop", *path.relative_to(SOURCE).with_suffix("").parts)) for path in paths)
    return {name.removesuffix(".__init__"): path for name, path in zip(names, paths, strict=True)}


def imports(source, known):
    """Modules of strop a file imports: at its top, inside functions, and by `import_module("strop.…")`.

    What stands under TYPE_CHECKING is for the type checker alone. Of a name made at run time the part before it counts.
    """
    tree = ast.parse(source)
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            texts = (part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant))
            found.add(next(texts, "").rstrip("."))
    return {name for name in found if name == "strop" or name.startswith("strop.")}


def arrows():
    known = modules()
    return {name: imports(path.read_text(encoding="utf-8"), known) - {name} for name, path in known.items()}


def test_every_room_has_its_place():
    assert {room for row in HOUSE for room in row} == {room_of(name) for name in modules()} - {"strop"} | {"_native"}


def test_no_arrow_points_back():
    """But from `strop` itself, which offers primitives, and algorithms by name."""
    floor = {room: number for number, row in enumerate(HOUSE) for room in row}
    between = [
        (name, target) for name, targets in arrows().items() for target in targets if "strop" not in (name, target)
    ]
    crossing = [(name, target) for name, target in between if room_of(name) != room_of(target)]
    wrong = [f"{name} → {target}" for name, target in crossing if floor[room_of(target)] >= floor[room_of(name)]]
    assert wrong == []


def test_no_files_import_each_other():
    """Nor in a circle: each file can be read after those it imports. A package's __init__ offers what its files define."""
    graph, done, circles = arrows(), set(), []

    def visit(name, path):
        if name in path:
            circles.append(" → ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for target in sorted(graph.get(name, ())):
                if not name.startswith(target + "."):
                    visit(target, [*path, name])
            done.add(name)

    for name in graph:
        visit(name, [])
    assert circles == []


def test_no_two_classes_have_the_same_name():
    places = collections.defaultdict(list)
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{name}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import strop.ops", {"strop.ops"}),
        ("def f():\n    from strop.cli import train", {"strop.cli.train"}),
        ("def f():\n    from strop.cli.train import run", {"strop.cli.train"}),
        ("if TYPE_CHECKING:\n    from strop.cli import train", set()),
        ("import importlib\nx = importlib.import_module(f'strop.algorithms.{name}')", {"strop.algorithms"}),
        ("import json", set()),
    ],
)
def test_the_reader_of_imports_misses_none(source, found):
    assert imports(source, {"strop.cli.train"}) == found


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
    """Of five fresh processes the best, in CPU time, which a busy machine does not stretch: less than NumPy's own."""
    program = (
        "import time; a = time.process_time(); import numpy; b = time.process_time(); import strop;"
        "c = time.process_time(); print(b - a, c - b)"
    )
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout for _ in range(5)]
    numpy, ours = (min(seconds) for seconds in zip(*(map(float, run.split()) for run in runs), strict=True))
    assert ours < numpy


def test_one_file_knows_torch_distributed_and_only_inside_functions():
    """So a run without torchrun has nothing to do with it; torch itself imports parts of it."""
    knowing, at_top = set(), set()
    for name, path in modules().items():
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                before = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                used = [before + alias.name for alias in node.names]
            else:
                used = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
            if any(module.startswith("torch.distributed") for module in used):
                knowing.add(name)
                at_top |= {name} if node in tree.body else set()
    assert knowing == {"strop.distributed"}
    assert not at_top
