"""The model card of a run, final/README.md, with the model's origin, the evaluations, the curves and the options."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from strop import checksums
from strop._types import Row

if TYPE_CHECKING:
    from strop.training.trainer import Trainer

BARS = "▁▂▃▄▅▆▇█"
SHOWN = ("loss", "reward/mean", "preference/accuracy", "kl", "entropy_estimate", "completion/length")
MOST_BARS = 60


def write_card(trainer: "Trainer", about: Row, run: Path) -> None:
    """Write the card into every folder of the run that holds a model; `about` is its run.json."""
    for listed in (run / "final").rglob(checksums.FILE):  # `save_pretrained` writes this file beside every model
        is_adapter = (listed.parent / "adapter_config.json").exists()
        text = _card(trainer, about, run.resolve().name, is_adapter)
        (listed.parent / "README.md").write_text(text, encoding="utf-8", errors="replace")


def _card(trainer: "Trainer", about: Row, title: str, is_adapter: bool) -> str:
    history, name = trainer.history, about["model"].get("name") or ""
    tags = ["strop", trainer.name.lower(), *(["lora"] if is_adapter else [])]
    head = [f"library_name: {'peft' if is_adapter else 'transformers'}", f"tags: [{', '.join(tags)}]"]
    if "/" in name and not Path(name).exists():  # the name of a model on the Hub
        head.append(f"base_model: {json.dumps(name)}")
    lines = ["---", *head, "---", "", f"# {title}", "", _made_of(trainer, about), ""]
    evaluations = [entry for entry in history.evaluations if len(entry) > 1]
    if evaluations:
        names = [metric for metric in evaluations[-1] if metric.startswith("eval/")]
        rows = [(metric, evaluations[0].get(metric), evaluations[-1][metric]) for metric in names]
        lines += ["## Held out", "", "| metric | first | last |", "|---|---|---|"]
        lines += [f"| {metric} | {_number(first)} | {_number(last)} |" for metric, first, last in rows] + [""]
    curves = {metric: values for metric in SHOWN if len(values := _values(history.steps, metric)) > 1}
    if curves:
        lines += ["## By step", "", "| metric | first | curve | last |", "|---|---|---|---|"]
        lines += [f"| {m} | {_number(v[0])} | `{sparkline(v)}` | {_number(v[-1])} |" for m, v in curves.items()] + [""]
    told = {key: about[key] for key in ("command", "job", "data", "rewards", "versions") if about.get(key)}
    lines += ["## Options", "", "```json", json.dumps({**told, "config": about["config"]}, indent=1), "```", ""]
    return "\n".join(lines)


def _made_of(trainer: "Trainer", about: Row) -> str:
    model = about["model"]
    trained = f", {model['num_trained']:,} of them trained" if model["num_trained"] < model["num_parameters"] else ""
    base = f", from {model['name']}" if model.get("name") else ""
    return (
        f"A {model['class']} of {model['num_parameters']:,} parameters{trained}{base}, trained with {trainer.name} by strop "
        f"{about['versions']['strop']}: {trainer.state.step:,} steps on {about['num_rows']:,} rows."
    )


def sparkline(values: Sequence[float]) -> str:
    """Return a curve as text; with more than MOST_BARS values, each character is the mean of neighbours."""
    if len(values) > MOST_BARS:
        edges = [round(i * len(values) / MOST_BARS) for i in range(MOST_BARS + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(values), max(values)
    return "".join(BARS[round((value - low) / ((high - low) or 1) * (len(BARS) - 1))] for value in values)


def _values(steps: Sequence[Row], metric: str) -> list[float]:
    return [entry[metric] for entry in steps if _is_number(entry.get(metric))]


def _is_number(value: object) -> bool:
    """Return whether the value is a number to show; the metrics file of a resumed run may hold anything."""
    return isinstance(value, (int, float)) and abs(value) < 1e300


def _number(value: object) -> str:
    return f"{value:.4g}" if _is_number(value) else ""
