"""The suite `generation` on a page: rollouts alone, against transformers and vLLM, and against the memory's bandwidth."""

from typing import Any

from benchmarks.text import Result, duration, left_out, provenance, table, times


def generation_table(result: Result) -> str:
    """Every contender at every workload; what was left out, and why."""
    header = ["work", "by", "a rollout", "strop is faster by", "tokens", "tokens / s", "of the limit", "first rollout"]
    rows = []
    for case in result["cases"]:
        for name, facts in case["contenders"].items():
            rows.append([
                _work(case), name, duration(facts["median_ns"]), _faster(case, name), f"{facts['generated_tokens']:,.0f}",
                f"{facts['tokens_per_second']:,.0f}", f"{facts['share_of_limit']:.2g}", _first(facts),
            ])  # fmt: skip
        rows += [[_work(case), name, f"left out: {why}", *[""] * 5] for name, why in left_out(case).items()]
    return table(header, rows) + "\n" + _limit(result) + _origin(result) + "\n"


def generation_summary(result: Result) -> str:
    """The same for the front page: what was measured of models that are not tiny, without rates."""
    header = ["a rollout", "by", "takes", "strop is faster by"]
    rows = [
        [_work(case), name, duration(facts["median_ns"]), _faster(case, name)]
        for case in result["cases"]
        if not case["labels"]["model"].startswith("tiny")
        for name, facts in case["contenders"].items()
    ]
    return table(header, rows) + "\n" + _origin(result) + "\n"


def families_table(result: Result) -> str:
    """Return a line for each tiny model on a CPU: strop's engine, `generate`, and strop without its engine."""
    header = ["model", "a rollout", "strop is faster than `generate` by", "than without its engine by"]
    rows = []
    for case in result["cases"]:
        name = case["labels"]["model"].removeprefix("tiny ") + (
            ", varied lengths" if case["labels"]["lengths"] == "varied" else ""
        )
        took = duration(case["contenders"]["strop"]["median_ns"])
        rows.append([name, took, _faster(case, "transformers"), _faster(case, "fallback")])
    labels = result["cases"][0]["labels"]
    what = (
        f"{labels['completions']} rollouts of {labels['new_tokens']} tokens after {labels['prompt_tokens']}, two layers, "
        f"{labels['dtype']}.\n"
    )
    return table(header, rows) + "\n" + what + _origin(result) + "\n"


def _work(case: dict[str, Any]) -> str:
    labels = case["labels"]
    most = "at most " if labels["lengths"] == "varied" else ""
    return (
        f"{labels['model']}, {labels['completions']} × {most}{labels['new_tokens']:,} tokens after"
        f" {labels['prompt_tokens']:,}, {labels['dtype']}"
    )


def _faster(case: dict[str, Any], name: str) -> str:
    return times(case["ratios"][name]) if name in case["ratios"] else ""


def _first(facts: dict[str, Any]) -> str:
    """Seconds in a fresh process, and in one that finds its kernels on disk."""
    if "first_seconds" not in facts:
        return ""
    cached = f"; {facts['first_seconds_cached']:.3g} s" if "first_seconds_cached" in facts else ""
    return f"{facts['first_seconds']:.3g} s{cached}"


def _limit(result: Result) -> str:
    speed = result["cases"][0]["labels"]["bytes_per_second"] / 1e12
    return (
        f"The limit reads every weight once for each token of the longest completion, at {speed:.2g} TB/s, what a copy reaches here;"
        f" 1 would be all of it. First rollout: in a fresh process with nothing compiled; with kernels on disk. An engine's start counts.\n"
    )


def _origin(result: Result) -> str:
    counts = sorted({len(f["samples_ns"]) for case in result["cases"] for f in case["contenders"].values()})
    return provenance(result, f"{' and '.join(map(str, counts))} rollouts of each side, which take turns")
