"""A whole GRPO step: strop against TRL with the same model, weights, prompts, lengths and β.

On a GPU with the shapes of Qwen2-0.5B and SmolLM2-135M in bfloat16: full completions of 256 tokens, lengths that vary (96 on
average, see `step_contenders.raise_the_end`), and short ones with float32 weights under autocast; and strop against itself with
`exact`, alone by `strop bench step --only exact`, and with shared prefixes, by `strop bench step --only 'long prompts'`. Without
a GPU the tiny MoE, strop on its native engine and TRL on transformers' Mixtral, a tiny Qwen2, and the shape of SmolLM2-135M in
float32: short prompts, these with rollouts in bfloat16, and long prompts. The tokens each side made are recorded.

Both sides take turns, a few steps at a time; the first of each turn is not counted. A step is from prompts to updated
weights: generation, rewards, log-probs of the reference, forward, backward, AdamW. TRL's own phases are not told apart but for
generation, which is timed where it calls the model's `generate`. On a GPU strop's step is profiled too, from the end of
generation on (`benchmarks.contenders.step_profile`).
"""

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.contenders import step as contenders
from benchmarks.contenders.step import Step, Workload
from benchmarks.contenders.step_profile import training_profile
from benchmarks.harness import Method, ratio, statistics
from benchmarks.text import duration, size

ON_GPU = True
WARM_UP = 2
STEPS_PER_TURN = 3


def cases(workloads: Sequence[Workload] | None = None) -> list["StepCase"]:
    if workloads is None:
        workloads = contenders.ON_A_GPU if torch.cuda.is_available() else contenders.ON_A_CPU
    return [StepCase(workload=workload) for workload in workloads]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCase:
    workload: Workload

    @property
    def work(self) -> str:
        return f"GRPO step, {self.workload.name}"

    @property
    def labels(self) -> dict[str, Any]:
        return {"operator": "step", **self.workload.labels()}

    def _sides(self, folder: str, trainer: Callable[[], Any]) -> dict[str, Callable[[], Callable[[int], list[Step]]]]:
        """What makes each side; the first is the one others are compared with."""
        workload = self.workload
        sides: dict[str, Callable[[], Any]] = {"strop": lambda: contenders.strop_steps(workload, trainer())}
        if workload.beside is not None:
            name, options = workload.beside
            sides[f"strop, {name}"] = lambda: contenders.strop_steps(
                workload, contenders.strop_trainer(workload, **options)
            )
        for count in workload.trl_micro_batches if contenders.trl_installed() else ():
            name = f"TRL, {count} at a time" if count else "TRL"
            sides[name] = lambda count=count: contenders.trl_steps(workload, f"{folder}/{count}", at_a_time=count)  # type: ignore[misc]
        return sides

    def measure(self, method: Method) -> dict[str, Any]:
        """Samples are single steps; those of a turn lie next to each other."""
        labels, peaks, sides = self.labels, {}, {}
        if not contenders.trl_installed():
            labels["left_out"] = {"TRL": "it is not installed"}
        made: list[Any] = []

        def trainer() -> Any:
            made.append(contenders.strop_trainer(self.workload))
            return made[0]

        with tempfile.TemporaryDirectory() as folder:
            for name, make in self._sides(folder, trainer).items():
                before = contenders.memory_in_use(self.workload)  # of the sides made already, which keep theirs
                sides[name] = make()
                warm = [step.peak_bytes for step in sides[name](WARM_UP)]
                peaks[name] = [peak - before for peak in warm if peak is not None]
            steps: dict[str, list[Step]] = {name: [] for name in sides}
            for _ in range(min(self.workload.rounds, method.rounds)):
                for name, run in sides.items():
                    steps[name] += run(STEPS_PER_TURN)[1:]
        seconds = {name: [round(1e9 * step.seconds, 1) for step in found] for name, found in steps.items()}
        facts = {name: statistics(seconds[name]) | _facts(found, peaks[name]) for name, found in steps.items()}
        if self.workload.device == "cuda":
            facts["strop"]["training"] = _training(steps["strop"], training_profile(made[0], self.workload.prompts()))
        return {
            "work": self.work,
            "labels": labels,
            "contenders": facts,
            "ratios": {name: ratio(seconds[name], seconds["strop"]) for name in seconds if name != "strop"},
        }


def _facts(steps: Sequence[Step], peaks: Sequence[int]) -> dict[str, Any]:
    """Medians of what the steps tell besides their time; the peak is that of the side's first steps."""
    names = dict.fromkeys(name for step in steps for name in step.phases)
    tokens = float(np.median([step.num_tokens for step in steps]))
    found: dict[str, Any] = {
        "phases_ns": {n: round(1e9 * float(np.median([s.phases.get(n, 0.0) for s in steps])), 1) for n in names},
        "generated_tokens": tokens,
        "tokens_per_second": round(tokens / float(np.median([step.seconds for step in steps])), 1),
    }
    return found | ({"peak_bytes": max(peaks)} if peaks else {})


def _training(steps: Sequence[Step], profile: dict[str, Any]) -> dict[str, Any]:
    """From the end of generation to the end of the update: the time without the profiler, and what it saw."""
    seconds = float(np.median([step.seconds - step.phases["generate"] for step in steps]))
    return {"median_ns": round(1e9 * seconds, 1), **profile}


def summary(measured: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for case in measured:
        for name, facts in case["contenders"].items():
            times = case["ratios"].get(name, {}).get("value")
            phases = ", ".join(f"{phase} {duration(ns)}" for phase, ns in facts["phases_ns"].items())
            memory = size(facts["peak_bytes"]) if "peak_bytes" in facts else ""
            rows.append([case["work"], name, duration(facts["median_ns"]), f"{times:.3g}×" if times else "", phases,
                         f"{facts['tokens_per_second']:,.0f}", memory])  # fmt: skip
    return ["work", "by", "step", "takes", "phases", "tokens/s", "peak memory"], rows
