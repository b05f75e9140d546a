"""How strop reads every causal type of transformers in the documents: packed or padded, which rollouts, what is refused."""

import re
from collections import Counter

from benchmarks.text import Result, table

SHORTER = (
    (r"^(right|refused|silently wrong|raw failure): ", ""),
    (r"^hf, ", ""),
    (r", no cuda graphs: torch\.float64 on cpu", ""),
    (r"model must be causal, found.*", "not causal"),
    (r" \(relative error [^)]*\)| \(off by [^)]*\)", ""),
    (r"packed sequences \(.*\)$", "packed sequences"),
    (r"a cache of slots \(.*?\)(?=;|$)", "a cache of slots"),
    (r"; told where they end, .*", ""),
    (r"; by .*", ""),
    (r"transformers' generate, prompts of one length together", "`generate` by length"),
    (r"transformers' generate", "`generate`"),
    (r"a forward of the whole row for each token", "full forwards"),
    (r"(fused|its own) layers$", r"engine, \1 layers"),
)


def models_summary(result: Result) -> str:
    """Return how many settings are right, refused or wrong, and by which ways."""
    cases = [case for case in result["cases"] if case["result"] != "not built"]
    counts = Counter(case["result"] for case in cases)
    reads = Counter(_short(case["training"]).split(":")[0] for case in cases if case["result"] == "right")
    ways = Counter(_short(case["rollouts"]).split(":")[0] for case in cases if case["result"] == "right")
    rows = [
        ["right", str(counts["right"])],
        ["refused with a reason", str(counts["refused"])],
        ["wrong numbers", str(counts["silently wrong"])],
        ["other errors", str(counts["raw failure"])],
    ]
    types, built = ({case["type"] for case in some} for some in (result["cases"], cases))
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    told = (
        f"Of {len(types)} types {len(types - built)} have no tiny model; {len(cases)} settings of the others were measured. "
        f"Training of those that are right: {_listed(reads)}. Rollouts: {_listed(ways)}. {versions}, {result['date']}."
    )
    return f"{table(['settings', 'number'], rows)}\n{told}\n"


def models_table(result: Result) -> str:
    """Return a line for each type and way: settings that are read alike stand in one line."""
    ways: dict[tuple[str, str, str], list[str]] = {}
    for case in result["cases"]:
        if case["result"] == "not built":
            key = case["type"], "no tiny model was built", ""
        else:
            key = case["type"], _short(case["training"]), _short(case["rollouts"])
        ways.setdefault(key, []).append(case["setting"])
    num_settings = Counter(case["type"] for case in result["cases"])
    rows = []
    for (kind, training, rollouts), settings in ways.items():
        which = "all" if len(settings) == num_settings[kind] else ", ".join(settings)
        same = training == rollouts == "not causal"
        rows.append([kind, which, "refused: not causal" if same else training, "" if same else rollouts])
    return table(["type", "settings", "training", "rollouts"], rows)


def _short(told: str) -> str:
    for pattern, shorter in SHORTER:
        told = re.sub(pattern, shorter, told)
    return told.replace("|", "\\|").replace("<", "&lt;")


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
