"""A GRPO step in several processes: what they cost and what they save, against the same step in one process.

On a CPU two processes, with all weights in each or with shards of them (gloo). On a GPU one process under torchrun, with
its weights in one shard: the overhead of FSDP2 itself. Each side is started anew in every round, so sides take turns;
a sample is one step after two that warm up, as the first process measures it.
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import environment
from benchmarks.alone import peak_megabytes
from benchmarks.contenders import step as contenders
from benchmarks.contenders.step import Workload
from benchmarks.harness import Method, ratio, statistics
from benchmarks.text import duration, size

ON_GPU = True
WARM_UP, STEPS, ROUNDS = 2, 5, 5
LAUNCH = ["torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--nproc-per-node"]
CPU_SHAPE = {"vocab_size": 8000, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8,
             "num_key_value_heads": 4}  # fmt: skip
WORKLOADS = {
    "cpu": Workload(name="Qwen2, 9.6M parameters", model_type="qwen2", shape=CPU_SHAPE),
    "cuda": contenders.ON_A_GPU[0],
}
SIDES = {
    "cpu": {"one process": (0, "none"), "2 processes, replicas": (2, "none"), "2 processes, shards": (2, "full")},
    "cuda": {"one process": (0, "none"), "one process, its weights in a shard": (1, "full")},
}


def cases() -> list["ProcessesCase"]:
    return [ProcessesCase(device="cuda" if torch.cuda.is_available() else "cpu")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessesCase:
    device: str

    @property
    def work(self) -> str:
        return f"GRPO step, {WORKLOADS[self.device].name}"

    def measure(self, method: Method) -> dict[str, Any]:
        sides = SIDES[self.device]
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for _ in range(min(ROUNDS, method.rounds)):
            for name, (num_processes, shard) in sides.items():
                found[name].append(_launched(self.device, num_processes, shard))
        samples = {name: [ns for run in runs for ns in run["step_ns"]] for name, runs in found.items()}
        first = next(iter(sides))
        return {
            "work": self.work,
            "labels": {"operator": "processes", **WORKLOADS[self.device].labels()},
            "contenders": {
                name: statistics(samples[name])
                | {
                    "phases_ns": {
                        phase: float(np.median([ns for run in runs for ns in run["phases_ns"][phase]]))
                        for phase in runs[0]["phases_ns"]
                    },
                    "peak_bytes": max(run["peak_bytes"] for run in runs),
                }
                for name, runs in found.items()
            },
            "ratios": {name: ratio(samples[name], samples[first]) for name in sides if name != first},
        }


def _launched(device: str, num_processes: int, shard: str) -> dict[str, Any]:
    launch = [*LAUNCH, str(num_processes), "-m"] if num_processes else []
    command = [sys.executable, "-m", *launch, "benchmarks.suites.processes", device, shard]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment() | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command[1:])} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def _worker(device: str, shard: str) -> None:
    """One side's steps; the first process prints them as JSON."""
    from strop.distributed import world

    torch.set_num_threads(1)
    workload = WORKLOADS[device]
    trainer = contenders.strop_trainer(workload, shard=shard)
    steps = contenders.strop_steps(workload, trainer)
    steps(WARM_UP)
    found = steps(STEPS)
    peaks = [step.peak_bytes for step in found if step.peak_bytes is not None] or [int(peak_megabytes() * 2**20)]
    peak = max(world().gathered(max(peaks)))
    if world().is_first:
        phases = {name: [round(1e9 * step.phases[name], 1) for step in found] for name in found[0].phases}
        times = [round(1e9 * step.seconds, 1) for step in found]
        print(json.dumps({"step_ns": times, "phases_ns": phases, "peak_bytes": peak}))


def summary(measured: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for case in measured:
        for name, facts in case["contenders"].items():
            times = case["ratios"].get(name, {}).get("value")
            rows.append([case["work"], name, duration(facts["median_ns"]), f"{times:.3g}×" if times else "",
                         size(facts["peak_bytes"])])  # fmt: skip
    return ["work", "by", "step", "takes", "peak memory of a process"], rows


if __name__ == "__main__":
    _worker(*sys.argv[1:])
