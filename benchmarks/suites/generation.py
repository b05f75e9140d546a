"""Rollouts alone: strop's engine against transformers' `generate` and vLLM, where that is installed.

On a GPU in bfloat16 with the shapes of Qwen2-0.5B, SmolLM2-135M and Qwen2-7B and random weights: 8 prompts × 8 samples, full and
varied lengths; 512 completions of very different lengths; prompts of 4,096 tokens; a tiny model of each of today's families
(`--only tiny`). Without one these tiny models, and beside the others strop without its engine.

Each contender is a process of its own, and they take turns. The limit that a rollout is held against: every weight read once for each
token of the longest completion, at the bandwidth that a copy reaches here. The first rollout of a process is told apart: with
nothing compiled before, and once more with the kernels of the first process on disk.
"""

import dataclasses
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.contenders import generation as contenders
from benchmarks.contenders.generation import Failed, Made, Side, Workload
from benchmarks.harness import Method, ratio, statistics
from benchmarks.text import duration

ON_GPU = True
ROUNDS = 7  # at most, on a GPU
TOO_LONG = "it would take minutes"
COMPILED = ("strop",)  # who finds kernels on disk in a second process; an engine whose start takes a minute has one


def cases(workloads: Sequence[Workload] | None = None) -> list["GenerationCase"]:
    """Those of one model next to each other share its processes."""
    if workloads is None:
        workloads = contenders.ON_A_GPU if torch.cuda.is_available() else contenders.ON_A_CPU
    sides, models = Sides(), [workload.model for workload in workloads]
    last = [model != after for model, after in zip(models, [*models[1:], None], strict=True)]
    return [GenerationCase(workload=w, sides=sides, last=is_last) for w, is_last in zip(workloads, last, strict=True)]


class Sides:
    """The processes of the model at hand. A contender that cannot start is left out, and why is kept; strop's failure is an error."""

    def __init__(self) -> None:
        self.asked_first: Workload | None = None  # of this model
        self.running: dict[str, Side] = {}
        self.left_out: dict[str, str] = {}
        self.first: dict[str, dict[str, float]] = {}
        self.caches: list[tempfile.TemporaryDirectory[str]] = []  # of compiled kernels, one a contender

    def of(self, workload: Workload) -> dict[str, Side]:
        if self.asked_first is None or self.asked_first.model != workload.model:
            self.close()
            self.asked_first = workload
            self.bytes_per_second = contenders.bandwidth(workload.model.device)
            self.left_out = contenders.left_out(workload.model)
            if not workload.transformers:
                self.left_out["transformers"] = TOO_LONG
            self._start([name for name in contenders.CONTENDERS if name not in self.left_out], workload)
        return self.running

    def _start(self, names: Sequence[str], workload: Workload) -> None:
        """All processes at once, for most of a start is imports; then the first rollouts, one after the other."""
        made: dict[str, list[Side]] = {}
        for name in names:
            self.caches.append(tempfile.TemporaryDirectory())
            again = [self.caches[-1].name] if name in COMPILED else []
            made[name] = [Side(name, workload.model, cache) for cache in (self.caches[-1].name, *again)]
        for wanted in (self._wait, self._first):
            for name, sides in list(made.items()):
                try:
                    wanted(name, sides, workload)
                except Failed as error:
                    if name == "strop":
                        raise
                    self.left_out[name] = str(error)
                    del made[name]
        self.running = {name: sides[0] for name, sides in made.items()}

    def _wait(self, name: str, sides: Sequence[Side], workload: Workload) -> None:
        for side in sides:
            side.start()

    def _first(self, name: str, sides: Sequence[Side], workload: Workload) -> None:
        seconds = [side.rollout(workload, 0).seconds for side in sides]
        for side in sides[1:]:
            side.close()
        found = {"first_seconds": sides[0].start() + seconds[0]}
        if len(seconds) > 1:
            found["first_seconds_cached"] = seconds[1]
        self.first[name] = {key: round(value, 3) for key, value in found.items()}

    def close(self) -> None:
        for side in self.running.values():
            side.close()
        for cache in self.caches:
            cache.cleanup()
        self.running, self.first, self.caches, self.asked_first = {}, {}, [], None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationCase:
    """last: of its model, whose processes end with it"""

    workload: Workload
    sides: Sides
    last: bool = False

    @property
    def labels(self) -> dict[str, Any]:
        return self.workload.labels()

    @property
    def work(self) -> str:
        found = self.labels
        about = "at most " if self.workload.varied else ""
        return f"generation, {found['model']}, {found['completions']} × {about}{found['new_tokens']:,} after {found['prompt_tokens']:,}"

    def measure(self, method: Method) -> dict[str, Any]:
        """A sample is one rollout. The first one of each contender at this workload is not counted."""
        workload, running = self.workload, dict(self.sides.of(self.workload))
        left_out = dict(self.sides.left_out)
        if not workload.transformers:
            left_out["transformers"] = TOO_LONG
            running.pop("transformers", None)
        made: dict[str, list[Made]] = {name: [] for name in running}
        rounds = method.rounds if workload.model.device == "cpu" else min(ROUNDS, method.rounds)
        for round_ in range(1 + rounds):
            for name in list(running):
                try:
                    rollout = running[name].rollout(workload, seed=round_)
                except Failed as error:
                    if name == "strop":
                        raise
                    left_out[name] = str(error)
                    del running[name], made[name]
                    continue
                made[name] += [rollout] if round_ else []
        bytes_read, speed = contenders.weight_bytes(workload.model), self.sides.bytes_per_second
        samples = {name: [round(1e9 * one.seconds, 1) for one in found] for name, found in made.items()}
        facts = {name: _facts(found, bytes_read / speed) for name, found in made.items()}
        first = self.sides.first if self.sides.asked_first == workload else {}
        about = {"weight_bytes": bytes_read, "bytes_per_second": round(speed), "left_out": left_out}
        if self.last:
            self.sides.close()
        return {
            "work": self.work,
            "labels": {**self.labels, **about},
            "contenders": {n: statistics(samples[n]) | facts[n] | first.get(n, {}) for n in made},
            "ratios": {name: ratio(samples[name], samples["strop"]) for name in samples if name != "strop"},
        }


def _facts(made: Sequence[Made], seconds_a_step: float) -> dict[str, Any]:
    """Medians: tokens of a rollout, its longest completion, tokens a second, and the share that the limit is of its time."""
    tokens, longest = ([float(number(one.lengths)) for one in made] for number in (sum, max))
    rates = [count / one.seconds for count, one in zip(tokens, made, strict=True)]
    shares = [steps * seconds_a_step / one.seconds for steps, one in zip(longest, made, strict=True)]
    return {
        "generated_tokens": float(np.median(tokens)),
        "longest": float(np.median(longest)),
        "tokens_per_second": round(float(np.median(rates)), 1),
        "share_of_limit": round(float(np.median(shares)), 4),
    }


def summary(measured: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for case in measured:
        for name, facts in case["contenders"].items():
            times = case["ratios"].get(name, {}).get("value")
            first = f"{facts['first_seconds']:.3g} s" if "first_seconds" in facts else ""
            rows.append([case["work"], name, duration(facts["median_ns"]), f"{times:.3g}×" if times else "",
                         f"{facts['tokens_per_second']:,.0f}", f"{facts['share_of_limit']:.1%}", first])  # fmt: skip
    return ["work", "by", "a rollout", "takes", "tokens/s", "of the limit", "first rollout"], rows
