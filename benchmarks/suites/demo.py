"""`strop demo` on three seeds: what is solved before and after GRPO, the seconds of each stage, and the way there."""

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.training import TrainingCase, first_and_last, read_curves, run_strop

SEEDS = (0, 1, 2)
CURVES = ("eval/reward/mean", "reward/mean", "kl", "entropy", "completion/length")
SCORES = ("greedy", "sampled", "best_of")


def cases() -> list[TrainingCase]:
    return [demo(seed) for seed in SEEDS]


def demo(seed: int, *options: str) -> TrainingCase:
    """Return the case of one demo; options are those of the command, beside the seed and the output."""
    return TrainingCase(work=f"strop demo --seed {seed}", train=functools.partial(_run_demo, seed, options))


def _run_demo(seed: int, options: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "demo"
        run_strop("demo", f"--output={folder}", f"--seed={seed}", *options)
        found = json.loads((folder / "demo.json").read_text(encoding="utf-8"))
        curves = read_curves(folder / "grpo" / "metrics.jsonl", CURVES)
    # The reward is 1 for a right answer and 0 for any other.
    curves["evaluations"]["eval/accuracy"] = curves["evaluations"].pop("eval/reward/mean")
    return {
        "labels": {"seed": seed, **found["task"]},
        "before": {name: found["before"][name] for name in SCORES},
        "after": {name: found["after"][name] for name in SCORES},
        "seconds": {name: round(seconds, 2) for name, seconds in found["seconds"].items()},
        **curves,
    }


def summary(measured: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    return first_and_last(measured, "solved", lambda case: [case[w]["greedy"] for w in ("before", "after")], ".1%")
