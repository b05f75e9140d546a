"""Several processes compute what one does: every metric of five steps and of an evaluation, and the weights afterwards."""

import fcntl
import json
import os
import shutil
import warnings

import preloaded
import pytest
from safetensors import safe_open
from work import CASES, WHOLE, main

# else float64; in bfloat16 layers compute with weights of 16 bits, where autocast converts them at every product
APART = {"moe": 1e-5, "float32": 1e-5}
LOSSES = (
    "grpo",
    "grpo-dr",
    "grpo-batch",
    "grpo-luspo",
    "grpo-cov",
    "grpo-cispo",
    "grpo-sapo",
    "grpo-vespo",
    "grpo-geometric",
)
# A loss is computed of what a model gives, in shards or not: these are compared without shards alone, ...
UNSHARDED = (
    *WHOLE, *LOSSES[1:], "grpo-bnpo", "grpo-sequence", "kto-bco", "kto-apo", "dpo-all", "distill-jsd", "distill-sampled",
    "distill-teacher", "online-ties",
)  # fmt: skip
# ... and the dtype of the weights matters to shards: these with shards alone.
SHARDED = ("dpo-float32", "online-float32", "dpo-lora-bf16")
REPLICAS = [f"none/{name}" for name in CASES if name not in SHARDED]
SHARDS = [f"full/{name}" for name in CASES if name not in UNSHARDED]
# in four processes: what depends on how rows are shared among them, with shards where these matter
OF_FOUR = [f"full/{name}" for name in ("sft-tied", "dpo", "grpo", "grpo-lora", "grpo-again", "ppo", "distill")]
OF_FOUR += [
    f"none/{name}" for name in ("grpo-batch", "grpo-turns", "dpo-all", "online-ties", "sft-float32", "grpo-float32")
]
WORLDS = {2: REPLICAS + SHARDS, 4: OF_FOUR}


def work(folder, size, names):
    """Run cases of work.py in so many processes under torchrun, or in this one. Return the folder of the results."""
    if size == 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of bfloat16 on a CPU
            main(folder, *names)
        return folder
    preloaded.run("work:main", folder, *names, num_processes=size, timeout=600)
    return folder


def made_once(tmp_path_factory, name, make):
    """Return a folder that `make` has filled, once for all pytest workers: one makes it, the others wait."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        folder = tmp_path_factory.mktemp(name)
        make(folder)
        return folder
    folder = tmp_path_factory.getbasetemp().parent / f"{name}-{run}"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)  # what another one that failed left
            folder.mkdir()
            make(folder)
            (folder / "made").touch()
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return (
        made_once(tmp_path_factory, "alone", lambda folder: work(folder, 1, [f"none/{name}" for name in CASES]))
        / "none"
    )


def read(path):
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["steps"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("size", WORLDS)
def test_processes_compute_what_one_does(size, alone, tmp_path):
    work(tmp_path, size, WORLDS[size])
    found = sorted(tmp_path.glob("*/*.safetensors"))
    assert len(found) == len(WORLDS[size])
    for path in found:
        name = path.relative_to(tmp_path)
        steps, weights = read(path)
        wanted_steps, wanted_weights = read(alone / path.name)
        apart = next((bound for kind, bound in APART.items() if kind in path.name), 1e-9)
        if "bf16" in path.name:  # its rounding, not its sums, is what differs: only the loss is compared
            losses = [[step.get("loss", step.get("eval/loss")) for step in one] for one in (steps, wanted_steps)]
            assert losses[0] == pytest.approx(losses[1], rel=5e-3), name
            continue
        for step, wanted in zip(steps, wanted_steps, strict=True):
            assert step == pytest.approx(wanted, rel=0, abs=apart), name
        assert weights.keys() == wanted_weights.keys()
        for key, weight in weights.items():
            assert (weight - wanted_weights[key]).abs().max() <= apart, (name, key)
    assert any(step["grad_norm"] > 1e-3 for step in steps if "grad_norm" in step)


def test_every_case_learns(alone):
    """Else equal weights would say nothing."""
    for path in alone.iterdir():
        steps, _ = read(path)
        assert sum(step.get("grad_norm", 0) > 1e-6 for step in steps) >= 3, path.name
