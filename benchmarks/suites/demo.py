"""`strop demo` on three seeds: what is solved before and after GRPO, the seconds of each stage, and the way there."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Method
from benchmarks.suites.learning import columns, run_command
from strop.training.logging import read_metrics

SEEDS = (0, 1, 2)
CURVES = ("step", "eval/accuracy", "reward/mean", "kl", "entropy", "completion/length")
SCORES = ("greedy", "sampled", "best_of")


def cases() -> list["DemoRun"]:
    return [DemoRun(seed=seed) for seed in SEEDS]


@dataclass(frozen=True, kw_only=True)
class DemoRun:
    """One demo; the steps are those the command takes."""

    seed: int
    steps: int = 400
    sft_steps: int = 200

    @property
    def work(self) -> str:
        return f"strop demo --seed {self.seed}"

    def measure(self, method: Method) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "demo"
            steps = f"--steps={self.steps}", f"--sft-steps={self.sft_steps}"
            run_command("demo", f"--output={folder}", f"--seed={self.seed}", *steps)
            found = json.loads((folder / "demo.json").read_text(encoding="utf-8"))
            metrics = read_metrics(folder / "grpo" / "metrics.jsonl")
        for row in metrics:  # the reward is 1 for a right answer and 0 for any other
            if "eval/reward/mean" in row:
                row["eval/accuracy"] = row["eval/reward/mean"]
        metrics = [{name: row[name] for name in CURVES if name in row} for row in metrics]
        return {
            "work": self.work,
            "labels": {"seed": self.seed, **found["task"]},
            "before": {name: found["before"][name] for name in SCORES},
            "after": {name: found["after"][name] for name in SCORES},
            "seconds": {name: round(seconds, 2) for name, seconds in found["seconds"].items()},
            "training": columns([row for row in metrics if "eval/accuracy" not in row]),
            "evaluations": columns([row for row in metrics if "eval/accuracy" in row]),
        }


def summary(measured: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [case["work"], *(f"{case[when]['greedy']:.1%}" for when in ("before", "after")), f"{sum(case['seconds'].values()):.0f} s"]
        for case in measured
    ]  # fmt: skip
    return ["work", "solved after SFT", "after GRPO", "seconds"], rows
