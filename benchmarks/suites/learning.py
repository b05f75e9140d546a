"""A real model learns: SmolLM2-135M-Instruct with GRPO, to add as `examples/smollm2_grpo.yaml` sets it up, and to use a
calculator as `examples/calculator.yaml` does.

The rewards are those of sampled completions. The accuracy is that of greedy answers to problems that are never trained on.
Every metric of every step is kept. Of the first and the last step with samples, the worst and the best sample are kept.
Without a GPU the run is a few small steps, which show that it works and little else. The command `strop train grpo
--config …` runs as a user runs it, and the result is read from its run folder.
"""

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.training import TrainingCase, first_and_last, read_curves, run_strop

ON_GPU = True
ACCURACIES = {  # of each run's config file, the metric that is the accuracy
    Path("examples/smollm2_grpo.yaml"): "eval/reward/right_number",
    Path("examples/calculator.yaml"): "eval/reward/right",
}
ON_A_CPU = ("batch_size=2", "group_size=4", "num_steps=2", "eval_every=1", "num_eval_rows=8", "autocast=none")


def cases() -> list[TrainingCase]:
    settings = () if torch.cuda.is_available() else ON_A_CPU
    return [grpo(path, accuracy, settings) for path, accuracy in ACCURACIES.items()]


def grpo(path: Path, accuracy: str, settings: Sequence[str] = ()) -> TrainingCase:
    """Return the case of one run of GRPO.

    accuracy   the metric of held-out problems solved
    settings   options that differ from the file's, as `strop train --set` takes them
    """
    train = functools.partial(_run_grpo, path, settings)
    return TrainingCase(work=f"GRPO as {path.as_posix()}", labels={"accuracy": accuracy}, train=train)


def _run_grpo(path: Path, settings: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        options = [f"--set={setting}" for setting in settings]
        run_strop("train", "grpo", f"--config={path}", f"--output={folder}", *options)
        about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        curves = read_curves(folder / "metrics.jsonl")
        samples = _worst_and_best(folder / "samples.jsonl")
    if not curves["evaluations"]["steps"]:
        raise ValueError(f"{path} must have held-out rows: num_eval_rows above 0")
    job = about["job"]
    return {
        "labels": {
            "algorithm": "grpo", "model": job["model"], "task": job.get("task") or job["environment"],
            "num_rows": about["num_rows"], "num_eval_rows": job["num_eval_rows"], "device": about["model"]["device"],
        },
        "settings": list(settings),
        "config": {name: value for name, value in job.items() if name != "output"} | about["config"],
        **curves,
        "samples": samples,
    }  # fmt: skip


def _worst_and_best(path: Path) -> list[dict[str, Any]]:
    """Return the samples with the lowest and the highest reward, of the first and of the last step with samples."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    steps = dict.fromkeys(sample["step"] for sample in (*found[:1], *found[-1:]))
    by_reward = [sorted((s for s in found if s["step"] == step), key=lambda s: s["reward"]) for step in steps]
    return [sample for samples in by_reward for sample in (samples[0], samples[-1])]


def summary(measured: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    return first_and_last(
        measured, "held-out problems solved", lambda case: case["evaluations"][case["labels"]["accuracy"]], ".1%"
    )
