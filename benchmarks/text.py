"""Format results for people: durations, sizes, ratios, Markdown tables, and where a number comes from."""

from typing import Any

Result = dict[str, Any]


def duration(nanoseconds: float) -> str:
    """Return a duration with three digits and its unit, such as 1.25 ms."""
    for limit, unit in ((1e3, "ns"), (1e6, "µs"), (1e9, "ms")):
        if nanoseconds < limit:
            return f"{nanoseconds / limit * 1e3:.3g} {unit}"
    return f"{nanoseconds / 1e9:.3g} s"


def size(num_bytes: float) -> str:
    """Return a number of bytes with three digits and its unit, such as 3.2 GB."""
    for limit, unit in ((1e3, "B"), (1e6, "kB"), (1e9, "MB")):
        if num_bytes < limit:
            return f"{num_bytes / limit * 1e3:.3g} {unit}"
    return f"{num_bytes / 1e9:.3g} GB"


def times(ratio: dict[str, Any]) -> str:
    """A speed-up with its interval; what is not clearly faster says so."""
    text = f"{ratio['value']:.3g}× [{ratio['low']:.3g}, {ratio['high']:.3g}]"
    return {"faster": text, "slower": f"**slower** {text}", "same": f"no difference {text}"}[ratio["verdict"]]


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def left_out(case: dict[str, Any]) -> dict[str, str]:
    """Return the contenders that a case was run without, with the reason; one that was not installed is no finding."""
    return {name: why for name, why in case["labels"].get("left_out", {}).items() if why != "it is not installed"}


def provenance(result: Result, taken: str | None = None) -> str:
    """Where timings come from, and how they were taken: by default in the method's rounds."""
    method = result["method"]
    taken = taken or f"{method['rounds']} interleaved rounds"
    return f"{origin(result)} Medians of {taken}; ratios with {method['confidence']:.0%} bootstrap intervals.{_load(result)}\n"


def _load(result: Result) -> str:
    others = result.get("load_by_others")
    return "" if others is None else f" Other processes took {others:.0%} of the CPU during the run."


def origin(result: Result) -> str:
    """Machine, threads, versions, commit, date and command."""
    machine, threads, versions = result["machine"], result["threads"], result["versions"]
    packages = ", ".join(f"{k} {v}" for k, v in versions.items() if v and k != "strop")
    commit = (result["commit"]["id"] or "unknown")[:9] + (" with changes" if result["commit"]["clean"] is False else "")
    gpu = result.get("gpu")
    on_gpu = f"{gpu['name']}, driver {gpu.get('driver_version', 'unknown')}; " if gpu else ""
    isa = "" if machine["instruction_set"].startswith("none") else f", {machine['instruction_set']}"
    return (
        f"\n{on_gpu}{machine['cpu']}, {threads['usable_cpus']} cores{isa}; strop on {threads['strop']} threads"
        f"{', torch on ' + str(threads['torch']) if 'torch' in threads else ''}"
        f"{', BLAS on ' + str(threads['blas']) if 'blas' in threads else ''}; {packages}; commit {commit};"
        f" {result['created'][:10]}; `{result['command']}`."
    )
