"""Tables and figures of the documents, made from the committed results.

A document marks a block by a renderer and a result file; what stands between the marks is generated:

    <!-- generated: primitives_table benchmarks/results/primitives-x86_64-2cores.json -->
    <!-- end generated -->

`python -m benchmarks.report` writes all blocks and figures, `--check` fails where one differs from its JSON. A block whose
result is not there yet is empty, and its figure is not asked for.
"""

import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import ROOT
from benchmarks.harness import load
from benchmarks.pages import (
    ahead,
    algorithms,
    convergence,
    demo,
    engines,
    generation,
    guess,
    landing,
    learning,
    losses,
    models,
    primitives,
    processes,
    step,
)
from benchmarks.text import Result

DOCUMENTS = ("README.md", "docs/*.md", "docs/**/*.md")
BLOCK = re.compile(
    r"(<!-- generated: (?P<renderer>\w+) (?P<source>\S+) -->\n)(?P<body>.*?)(<!-- end generated -->)", re.DOTALL
)

RENDERERS: dict[str, Callable[[Result], str]] = {
    renderer.__name__: renderer
    for renderer in (
        primitives.primitives_table,
        primitives.primitives_summary,
        engines.engines_summary,
        engines.engines_table,
        engines.engines_decode,
        engines.engines_memory,
        engines.engines_details,
        engines.engines_agreement,
        engines.engines_blas,
        engines.engines_shares,
        engines.engines_host_language,
        convergence.convergence_table,
        losses.losses_summary,
        losses.losses_table,
        losses.losses_targets,
        losses.losses_accuracy,
        *losses.OPERATOR_BLOCKS,
        generation.generation_table,
        generation.generation_summary,
        generation.families_table,
        landing.landing_table,
        step.step_table,
        step.step_summary,
        step.exact_table,
        processes.processes_table,
        processes.scaling_table,
        ahead.ahead_table,
        step.step_training,
        learning.learning_summary,
        learning.learning_table,
        learning.calculator_table,
        demo.demo_summary,
        demo.demo_table,
        guess.guess_table,
        models.models_summary,
        models.models_table,
        algorithms.algorithms_table,
    )
}

PRIMITIVES, ENGINES, CONVERGENCE = (
    f"benchmarks/results/{suite}-x86_64-2cores.json" for suite in ("primitives", "engines", "convergence")
)
LOSSES = "benchmarks/results/losses-h200.json"
STEP, STEP_ON_GPU = "benchmarks/results/step-x86_64-2cores.json", "benchmarks/results/step-h200.json"
LEARNING, CALCULATOR = (f"benchmarks/results/{name}-h200.json" for name in ("learning", "calculator"))
AHEAD = "benchmarks/results/ahead.json"
DEMO = "benchmarks/results/demo-x86_64-2cores.json"
GUESS = "benchmarks/results/guess-x86_64-2cores.json"
ALGORITHMS = "benchmarks/results/algorithms-x86_64-2cores.json"
FIGURES: dict[str, tuple[Callable[[Result, Path, dict[str, str]], None], str]] = {
    "docs/images/primitives.png": (primitives.primitives_figure, PRIMITIVES),
    "docs/images/engines.png": (engines.engines_figure, ENGINES),
    "docs/images/engines-scaling.png": (engines.engines_scaling_figure, ENGINES),
    "docs/images/losses.png": (losses.losses_figure, LOSSES),
    "docs/images/ahead.png": (ahead.ahead_figure, AHEAD),
    "docs/images/step.png": (step.step_figure, STEP),
    "docs/images/step-h200.png": (step.step_figure, STEP_ON_GPU),
    "docs/images/demo.png": (demo.demo_figure, DEMO),
    "docs/images/guess.png": (guess.guess_figure, GUESS),
    "docs/images/algorithms.png": (algorithms.algorithms_figure, ALGORITHMS),
    "docs/images/learning.png": (learning.learning_figure, LEARNING),
    "docs/images/calculator.png": (learning.calculator_figure, CALCULATOR),
    "docs/images/convergence.png": (convergence.convergence_figure, CONVERGENCE),
    "docs/images/convergence.gif": (convergence.convergence_animation, CONVERGENCE),
}


def filled(text: str, root: Path) -> str:
    """The document with every block made anew."""

    def fill(match: re.Match[str]) -> str:
        name, path = match["renderer"], root / match["source"]
        if name not in RENDERERS:
            raise ValueError(f"unknown renderer {name!r}; there are {', '.join(sorted(RENDERERS))}")
        return match[1] + (RENDERERS[name](load(path)) if path.exists() else "") + match[5]

    if len(re.findall(r"<!--\s*generated", text, re.IGNORECASE)) != len(BLOCK.findall(text)):
        raise ValueError("a generated block is not closed by <!-- end generated -->, or its mark is misspelt")
    return BLOCK.sub(fill, text)


def documents(root: Path) -> Iterator[Path]:
    yield from sorted({path for pattern in DOCUMENTS for path in root.glob(pattern)})


def _fingerprint(draw: Callable[..., None], source: Path) -> str:
    """What a figure was made from: the data, and the module with the code that draws it."""
    return hashlib.sha256(source.read_bytes() + inspect.getsource(inspect.getmodule(draw)).encode()).hexdigest()  # type: ignore[arg-type]


def _drawn_from(path: Path) -> str | None:
    """The fingerprint kept in the PNG's text chunk or the GIF's comment."""
    found = re.search(rb"(?:tEXtComment\x00|!\xfe@)([0-9a-f]{64})", path.read_bytes()) if path.exists() else None
    return found[1].decode() if found else None


def drifted(root: Path = ROOT) -> list[str]:
    """Documents and figures that differ from their results."""
    wrong = [
        str(p.relative_to(root)) for p in documents(root) if filled(text := p.read_text(encoding="utf-8"), root) != text
    ]
    return wrong + [
        path
        for path, (draw, source) in FIGURES.items()
        if (root / source).exists() and _drawn_from(root / path) != _fingerprint(draw, root / source)
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
        print("usage: python -m benchmarks.report [--check]", file=sys.stderr)
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
