"""Tables and figures of the documents, made from the committed results.

A document marks a block by a renderer and a result file; what stands between the marks is generated:

    <!-- generated: primitives_table benchmarks/results/primitives-x86_64-2cores.json -->
    <!-- end generated -->

`python -m strop.bench.report` writes all blocks and figures, `--check` fails where one differs from its JSON.
"""

import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from strop.bench.harness import load

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = ("README.md", "docs/*.md", "docs/**/*.md")
BLOCK = re.compile(
    r"(<!-- generated: (?P<renderer>\w+) (?P<source>\S+) -->\n)(?P<body>.*?)(<!-- end generated -->)", re.DOTALL
)

Result = dict[str, Any]


def duration(nanoseconds: float) -> str:
    for limit, unit in ((1e3, "ns"), (1e6, "µs"), (1e9, "ms")):
        if nanoseconds < limit:
            return f"{nanoseconds / limit * 1e3:.3g} {unit}"
    return f"{nanoseconds / 1e9:.3g} s"


def times(ratio: dict[str, Any]) -> str:
    """A speed-up with its interval; what is not clearly faster says so."""
    text = f"{ratio['value']:.3g}× [{ratio['low']:.3g}, {ratio['high']:.3g}]"
    return {"faster": text, "slower": f"**slower** {text}", "same": f"no difference {text}"}[ratio["verdict"]]


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def provenance(result: Result) -> str:
    machine, threads, versions = result["machine"], result["threads"], result["versions"]
    packages = ", ".join(f"{k} {v}" for k, v in versions.items() if v and k != "strop")
    commit = (result["commit"]["id"] or "unknown")[:9] + ("" if result["commit"]["clean"] else " with changes")
    return (
        f"\n{machine['cpu']}, {threads['usable_cpus']} cores, {machine['instruction_set']}; strop on {threads['strop']} threads"
        f"{', torch on ' + str(threads['torch']) if 'torch' in threads else ''}; {packages}; commit {commit};"
        f" {result['created'][:10]}; `{result['command']}`. Medians of {result['method']['rounds']} interleaved rounds;"
        f" ratios with {result['method']['confidence']:.0%} bootstrap intervals.\n"
    )


def primitives_table(
    result: Result, primitives: tuple[str, ...] = ("advantages", "k3 KL", "token KL", "packing")
) -> str:
    """Every row: our time, and how many times as long the others take."""
    peers = ["numpy", "torch", "rlox"]
    rows = []
    for case in result["cases"]:
        labels = case["labels"]
        if labels["primitive"] not in primitives:
            continue
        cells = [times(case["ratios"][p]) if p in case["ratios"] else "" for p in peers]
        if labels.get("note") and cells[-1]:
            cells[-1] += f" ({labels['note']})"
        name = f"{labels['primitive']} {labels['shape']}"
        rows.append([name, labels["dtype"], duration(case["contenders"]["strop"]["median_ns"]), *cells])
    return table(["work", "dtype", "strop", *(f"faster than {p}" for p in peers)], rows) + provenance(result)


def primitives_summary(result: Result) -> str:
    """The rows of advantages and k3: time, and the ratios to torch and rlox."""
    rows: dict[tuple[str, str], list[str]] = {}
    for case in result["cases"]:
        labels = case["labels"]
        if labels["primitive"] in ("advantages", "k3 KL"):
            cells = rows.setdefault((labels["primitive"], labels["shape"]), [])
            cells.append(duration(case["contenders"]["strop"]["median_ns"]))
            cells += [f"{case['ratios'][p]['value']:.3g}×" if p in case["ratios"] else "" for p in ("torch", "rlox")]
    columns = [
        f"{head} {dtype}" for dtype in ("float64", "float32") for head in ("strop,", "faster than torch,", "than rlox,")
    ]
    return table(["work", *columns], [[f"{a} {b}", *cells] for (a, b), cells in rows.items()]) + provenance(result)


RENDERERS: dict[str, Callable[[Result], str]] = {f.__name__: f for f in (primitives_table, primitives_summary)}


def primitives_figure(result: Result, path: Path, metadata: dict[str, str]) -> None:
    """Speed-up over each peer for every row of advantages and k3, float32."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = [
        c
        for c in result["cases"]
        if c["labels"]["primitive"] in ("advantages", "k3 KL") and c["labels"]["dtype"] == "float32"
    ]
    figure, axes = plt.subplots(figsize=(10, 4.2), layout="constrained")
    peers = [p for p in ("numpy", "torch", "rlox") if any(p in c["ratios"] for c in cases)]
    colours = {"numpy": "#4c72b0", "torch": "#dd8452", "rlox": "#55a868"}
    for k, peer in enumerate(peers):
        ratios = [c["ratios"][peer] for c in cases]
        values = [r["value"] for r in ratios]
        errors = [[r["value"] - r["low"] for r in ratios], [r["high"] - r["value"] for r in ratios]]
        places = [i + (k - (len(peers) - 1) / 2) * 0.27 for i in range(len(cases))]
        axes.bar(
            places, values, 0.27, label=peer, color=colours[peer], yerr=errors, error_kw={"lw": 0.8, "ecolor": "#333"}
        )
    axes.axhline(1, color="black", lw=1)
    axes.set_yscale("log")
    axes.set_yticks([1, 2, 5, 10, 20, 50, 100], ["1×", "2×", "5×", "10×", "20×", "50×", "100×"])
    axes.set_xticks(
        range(len(cases)),
        [c["labels"]["primitive"].replace("advantages", "adv.") + "\n" + c["labels"]["shape"] for c in cases],
        fontsize=8,
    )
    axes.set_ylabel("times as long as strop")
    axes.set_title("CPU primitives, float32: how many times as long the others take")
    axes.legend(frameon=False, ncols=3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, metadata=metadata)
    plt.close(figure)


FIGURES: dict[str, tuple[Callable[[Result, Path, dict[str, str]], None], str]] = {
    "docs/images/primitives.png": (primitives_figure, "benchmarks/results/primitives-x86_64-2cores.json"),
}


def filled(text: str, root: Path) -> str:
    """The document with every block made anew."""

    def fill(match: re.Match[str]) -> str:
        name, source = match["renderer"], match["source"]
        if name not in RENDERERS:
            raise ValueError(f"unknown renderer {name!r}; there are {', '.join(sorted(RENDERERS))}")
        return match[1] + RENDERERS[name](load(root / source)) + match[5]

    if text.count("<!-- generated:") != len(BLOCK.findall(text)):
        raise ValueError("a generated block is not closed by <!-- end generated -->, or its mark is misspelt")
    return BLOCK.sub(fill, text)


def documents(root: Path) -> Iterator[Path]:
    yield from sorted({path for pattern in DOCUMENTS for path in root.glob(pattern)})


def _fingerprint(draw: Callable[..., None], source: Path) -> str:
    """What a figure was made from: the data and the code that draws it."""
    return hashlib.sha256(source.read_bytes() + inspect.getsource(draw).encode()).hexdigest()


def _drawn_from(path: Path) -> str | None:
    """The fingerprint kept in the PNG's text chunk."""
    found = re.search(rb"tEXtComment\x00([0-9a-f]{64})", path.read_bytes()) if path.exists() else None
    return found[1].decode() if found else None


def drifted(root: Path = ROOT) -> list[str]:
    """Documents and figures that differ from their results."""
    wrong = [
        str(p.relative_to(root)) for p in documents(root) if filled(text := p.read_text(encoding="utf-8"), root) != text
    ]
    return wrong + [
        path
        for path, (draw, source) in FIGURES.items()
        if _drawn_from(root / path) != _fingerprint(draw, root / source)
    ]


def write(root: Path = ROOT) -> list[str]:
    """Brings all documents and figures in step; returns those that were not."""
    changed = drifted(root)
    for name in changed:
        path = root / name
        if name in FIGURES:
            draw, source = FIGURES[name]
            path.parent.mkdir(parents=True, exist_ok=True)
            draw(load(root / source), path, {"Comment": _fingerprint(draw, root / source)})
        else:
            path.write_text(filled(path.read_text(encoding="utf-8"), root), encoding="utf-8")
    return changed


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print("usage: python -m strop.bench.report [--check]", file=sys.stderr)
        return 2
    if arguments:
        wrong = drifted()
        for name in wrong:
            print(f"{name} differs from its results: run `make docs`", file=sys.stderr)
        return 1 if wrong else 0
    for name in write():
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
