"""A real model learns: SmolLM2-135M-Instruct with GRPO as `examples/smollm2_grpo.yaml` sets it up.

The rewards are those of sampled completions, the accuracy that of greedy answers to problems that are never trained on. Every
metric of every step is kept. Without a GPU it is a few small steps, which show that it works and little else. Nothing is
saved but the result: `strop train grpo --config examples/smollm2_grpo.yaml` is the same run with a run folder.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from strop.bench.harness import Method
from strop.cli.job import JobConfig
from strop.cli.train import algorithm_class, build, gather
from strop.logging import ConsoleLogger

ON_GPU = True
ACCURACY = "eval/reward/right_number"
CONFIG = Path("examples/smollm2_grpo.yaml")
ON_A_CPU = ("batch_size=2", "group_size=4", "num_steps=2", "eval_every=1", "num_eval_rows=8", "autocast=none")
DIGITS = 6  # of a metric in the result


def cases() -> list["Learning"]:
    return [Learning(settings=() if torch.cuda.is_available() else ON_A_CPU)]


@dataclass(frozen=True, kw_only=True)
class Learning:
    """One run of GRPO.

    settings   options that differ from the file's, as `strop train --set` takes them
    """

    path: Path = CONFIG
    settings: Sequence[str] = ()

    @property
    def work(self) -> str:
        return f"GRPO as {self.path.as_posix()}"

    def measure(self, method: Method) -> dict[str, Any]:
        job, config = gather(algorithm_class("grpo").Config, self.path, self.settings)
        trainer, rows, eval_rows = build("grpo", job, config)
        if eval_rows is None:
            raise ValueError(f"{self.path} must have held-out rows: num_eval_rows above 0")
        trainer.loggers = [ConsoleLogger(10, file=sys.stderr)]
        history = trainer.train(rows, eval_dataset=eval_rows, progress=False)
        if history.interrupted:
            raise KeyboardInterrupt
        return {
            "work": self.work,
            "labels": {
                "algorithm": "grpo", "model": job.model, "task": job.task, "num_rows": len(rows),
                "num_eval_rows": len(eval_rows), "device": str(trainer.policy.device),
            },
            "settings": list(self.settings),
            "config": _told(job) | config.to_dict(),
            "training": columns(history.steps),
            "evaluations": columns(history.evaluations),
        }  # fmt: skip


def _told(job: JobConfig) -> dict[str, Any]:
    """What the job says beyond its defaults."""
    default = JobConfig()
    return {f.name: asdict(job)[f.name] for f in fields(job) if getattr(job, f.name) != getattr(default, f.name)}


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
        accuracy, steps = case["evaluations"][ACCURACY], case["evaluations"]["steps"]
        rows += [[str(step), f"{value:.1%}"] for step, value in zip(steps, accuracy, strict=True)]
    return ["step", "held-out problems solved"], rows
