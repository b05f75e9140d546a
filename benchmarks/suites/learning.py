"""A real model learns: SmolLM2-135M-Instruct with GRPO, to add as `examples/smollm2_grpo.yaml` sets it up, and to use a
calculator as `examples/calculator.yaml` does.

The rewards are those of sampled completions, the accuracy that of greedy answers to problems that are never trained on. Every
metric of every step is kept, and of the first and the last step with samples the worst and the best. Without a GPU it is a few small
steps, which show that it works and little else. The command `strop train grpo --config …` runs as a user runs it, and
the result is read from its run folder.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.harness import Method
from strop.training.logging import read_metrics

ON_GPU = True
CONFIGS = {  # and the metric that is the accuracy
    Path("examples/smollm2_grpo.yaml"): "eval/reward/right_number",
    Path("examples/calculator.yaml"): "eval/reward/right",
}
ON_A_CPU = ("batch_size=2", "group_size=4", "num_steps=2", "eval_every=1", "num_eval_rows=8", "autocast=none")
DIGITS = 6  # of a metric in the result


def cases() -> list["Learning"]:
    settings = () if torch.cuda.is_available() else ON_A_CPU
    return [Learning(path=path, accuracy=accuracy, settings=settings) for path, accuracy in CONFIGS.items()]


@dataclass(frozen=True, kw_only=True)
class Learning:
    """One run of GRPO.

    accuracy   the metric of held-out problems solved
    settings   options that differ from the file's, as `strop train --set` takes them
    """

    path: Path
    accuracy: str
    settings: Sequence[str] = ()

    @property
    def work(self) -> str:
        return f"GRPO as {self.path.as_posix()}"

    def measure(self, method: Method) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "run"
            settings = [f"--set={setting}" for setting in self.settings]
            run_command("train", "grpo", f"--config={self.path}", f"--output={folder}", *settings)
            about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
            rows = read_metrics(folder / "metrics.jsonl")
            samples = _worst_and_best(folder / "samples.jsonl")
        evaluations = [row for row in rows if any(name.startswith("eval/") for name in row)]
        if not evaluations:
            raise ValueError(f"{self.path} must have held-out rows: num_eval_rows above 0")
        job = about["job"]
        return {
            "work": self.work,
            "labels": {
                "algorithm": "grpo", "model": job["model"], "task": job.get("task") or job["environment"],
                "accuracy": self.accuracy, "num_rows": about["num_rows"], "num_eval_rows": job["num_eval_rows"],
                "device": about["model"]["device"],
            },
            "settings": list(self.settings),
            "config": {name: value for name, value in job.items() if name != "output"} | about["config"],
            "training": columns([row for row in rows if row not in evaluations]),
            "evaluations": columns(evaluations),
            "samples": samples,
        }  # fmt: skip


def _worst_and_best(path: Path) -> list[dict[str, Any]]:
    """By reward, of the first and of the last step that has samples."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    steps = dict.fromkeys(sample["step"] for sample in (*found[:1], *found[-1:]))
    by_reward = [sorted((s for s in found if s["step"] == step), key=lambda s: s["reward"]) for step in steps]
    return [sample for samples in by_reward for sample in (samples[0], samples[-1])]


def run_command(*arguments: str) -> None:
    """`strop …` in a process of its own; what it says goes where this process's errors go."""
    subprocess.run([sys.executable, "-m", "strop", *arguments], check=True, cwd=ROOT, stdout=sys.stderr.fileno())


def columns(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    """Metrics by name, one value a row; None where a row has none of it."""
    names = [name for name in dict.fromkeys(n for row in rows for n in row) if name not in ("step", "time")]
    found: dict[str, list[float | None]] = {"steps": [row["step"] for row in rows]}
    return found | {name: [_short(row.get(name)) for row in rows] for name in names}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


def summary(measured: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for case in measured:
        accuracy, steps = case["evaluations"][case["labels"]["accuracy"]], case["evaluations"]["steps"]
        rows += [[case["work"], str(step), f"{value:.1%}"] for step, value in zip(steps, accuracy, strict=True)]
    return ["work", "step", "held-out problems solved"], rows
