"""The front page's one table: strop's times beside those of the libraries people know, from the results of three suites.

vLLM is not installed where the suites run. What it took is in benchmarks/recorded.json, with where that comes from, and
stands in the table as recorded: a range, and a ratio without an interval.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.harness import load
from benchmarks.pages import generation, losses, step
from benchmarks.text import Result, duration, table, times

RESULTS = Path(__file__).resolve().parents[1] / "results"
RECORDED = json.loads((RESULTS.parent / "recorded.json").read_text(encoding="utf-8"))
LOSSES = (("grpo_loss", losses.BOTH), ("linear_grpo_loss", losses.BOTH))
SET_UPS = {  # how a peer was run, as the table names it
    "TRL": "TRL, transformers generation",
    "transformers": "transformers, generate with a growing cache",
    "Liger": "Liger, its loss function",
}


def landing_table(result: Result) -> str:
    """`result` is that of a GRPO step; below it come rollouts and losses, where they are measured."""
    rows = []
    for case in result["cases"]:
        work = f"GRPO step, {step._work(case)}"
        rows += [_row(work, case, ("TRL",)), _computed_row(work, case)]
    found = [result]
    if (RESULTS / "generation-h200.json").exists():
        found.append(load(RESULTS / "generation-h200.json"))
        for case in found[-1]["cases"]:
            work = f"rollout, {generation._work(case)}"
            rows += [_row(work, case, ("transformers",)), _row(work, case, ("vLLM",)) or _recorded_row(work, case)]
    if (RESULTS / "losses-h200.json").exists():
        found.append(load(RESULTS / "losses-h200.json"))
        timed = losses._timed(found[-1])
        for kind in LOSSES:
            cases = [c for c in timed if (c["labels"]["operator"], c["labels"]["way"]) == kind and losses._by_device(c)]
            rows += [_row(losses._work(case), case, ("Liger",)) for case in cases[-1:]]
    shown = [row for row in rows if row is not None]
    header = ["work", "strop takes", "compared with", "which takes", "strop is faster by"]
    return table(header, shown) + "\n" + origin(found) + "\n"


def _row(work: str, case: dict[str, Any], peers: tuple[str, ...]) -> list[str] | None:
    name = next((name for peer in peers for name in case["ratios"] if name.startswith(peer)), None)
    if name is None:
        return None
    own, other = (duration(case["contenders"][side]["median_ns"]) for side in ("strop", name))
    return [work, own, SET_UPS.get(name, name), other, times(case["ratios"][name])]


def _recorded_row(work: str, case: dict[str, Any]) -> list[str] | None:
    """A peer's recorded range, where the workload is the same."""
    if case["work"] not in RECORDED["seconds"]:
        return None
    low, high = RECORDED["seconds"][case["work"]]
    own = case["contenders"]["strop"]["median_ns"]
    name = f"{RECORDED['peer']} {RECORDED['version']}, recorded"
    ratio = " to ".join(f"{seconds / (own / 1e9):.3g}" for seconds in (low, high))
    return [work, duration(own), name, f"{low} to {high} s", f"{ratio}×"]


def _computed_row(work: str, case: dict[str, Any]) -> list[str] | None:
    """TRL with vLLM, which did not run together: TRL's step without its generation, plus the recorded generation.

    In favour of TRL: bringing new weights to vLLM is not counted. Medians are added, so there is no interval.
    """
    labels, own = case["labels"], case["contenders"]["strop"]["median_ns"]
    of = f"generation, {labels['model']}, {labels['completions']} × {labels['new_tokens']} after {labels['prompt_tokens']}"
    if "TRL" not in case["contenders"] or of not in RECORDED["seconds"]:
        return None
    facts = case["contenders"]["TRL"]
    rest = facts["median_ns"] - facts["phases_ns"]["generate"]
    took = [rest + 1e9 * seconds for seconds in RECORDED["seconds"][of]]
    shown = " to ".join(f"{ns / 1e9:.3g}" for ns in took)
    ratio = " to ".join(f"{ns / own:.3g}" for ns in took)
    return [work, duration(own), f"TRL, {RECORDED['peer']} generation, computed", f"{shown} s", f"{ratio}×"]


def origin(found: list[Result]) -> str:
    """In short: the machine, the packages that matter, the commits."""
    gpu = found[0]["gpu"]["name"]
    versions = {name: one["versions"].get(name) for one in found for name in ("torch", "trl", "vllm", "liger-kernel")}
    versions |= {name: v for one in found for name, v in one["versions"].items() if name in versions and v}
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    commits = ", ".join(dict.fromkeys((one["commit"]["id"] or "unknown")[:9] for one in found))
    return (
        f"{gpu}, {packages}, commit {commits}. Medians; ratios with 95 % intervals; docs/benchmarks.md says how they are"
        f" taken.\nRecorded: {RECORDED['peer']} ran apart, on an {RECORDED['gpu']}, {RECORDED['date']}, not in turns with"
        f" strop; its samples were not kept, so there is no interval.\nComputed: {RECORDED['peer']}'s recorded rollout plus"
        f" what TRL's own step took besides generation; they did not run together, and bringing new weights to"
        f" {RECORDED['peer']} is not counted.\n"
    )
