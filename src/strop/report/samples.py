"""Samples as HTML: early and late ones side by side, and all samples of each step, which can be sorted by reward."""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from strop._types import Json
from strop.data.formats import as_text
from strop.report.curves import short
from strop.report.lines import is_number
from strop.report.runs import Run
from strop.report.sample_index import MAX_SAMPLES
from strop.report.svg import escape

FEW_SAMPLES, MAX_SHOWN, MAX_LINES, MAX_KEPT = 4, 700, 12, 20_000


class Side(NamedTuple):
    """A completion: when it was sampled, its reward, and the score of each reward function."""

    when: str
    completion: object
    reward: object = None
    scores: Mapping[str, object] = {}

    @classmethod
    def of(cls, sample: Mapping[str, object]) -> "Side":
        scores = {name.removeprefix("reward/"): v for name, v in sample.items() if name.startswith("reward/")}
        return cls(f"step {sample.get('step', '?')}", sample.get("completion", ""), sample.get("reward"), scores)


def of_run(run: Run) -> tuple[str, str]:
    """Return HTML of early and late samples, and a line that describes it.

    It shows prompts that were sampled both early and late. Without such prompts it shows the first and the last sampled
    step side by side.
    """
    by_prompt: dict[str, list[Json]] = {}
    for sample in run.samples:
        by_prompt.setdefault(as_text(sample.get("prompt", "")), []).append(sample)
    again = {p: s for p, s in by_prompt.items() if s[0].get("step") != s[-1].get("step")}
    if again:
        cards = [card(p, [Side.of(s[0]), Side.of(s[-1])]) for p, s in list(again.items())[:MAX_SAMPLES]]
        return "".join(cards) + by_step(run), "The same prompts at their first and at their last sampled step."
    steps = [s.get("step") for s in run.samples]
    first, last = ([s for s in run.samples if s.get("step") == step] for step in (steps[0], steps[-1]))
    columns = [_pick(first), _pick(last)] if steps[0] != steps[-1] else [_pick(first)[::2], _pick(first)[1::2]]
    made = ["".join(card(s.get("prompt", ""), [Side.of(s)]) for s in column) for column in columns]
    body = f'<div class="pair">{"".join(f"<div>{column}</div>" for column in made)}</div>'
    told = f"Of step {steps[0]}." if steps[0] == steps[-1] else "The first sampled step beside the last."
    return body + by_step(run), told


def by_step(run: Run) -> str:
    """Return the samples of every step. The page's script shows one step at a time, in the chosen order."""
    steps = run.sampled_steps
    parts = []
    for step in steps:
        cards = "".join(_ranked(sample) for sample in run.samples if sample["step"] == step)
        parts.append(f'<div class="of-step" data-step="{escape(step)}">{cards}</div>')
    choices = {"Step": ("steps", steps), "Order": ("order", ("as drawn", "best first", "worst first"))}
    controls = ""
    for label, (kind, values) in choices.items():
        options = "".join(f'<option value="{escape(value)}">{escape(value)}</option>' for value in values)
        controls += f'<label>{label} <select class="{kind}">{options}</select></label> '
    controls = f'<p class="controls">{controls}</p>'
    told = f"All samples of {len(steps)} step{'s' * (len(steps) != 1)}"
    return f'<details class="all-samples"><summary>{told}</summary>{controls}{"".join(parts)}</details>'


def _ranked(sample: Mapping[str, object]) -> str:
    reward = sample.get("reward")
    rank = f' data-reward="{reward}"' if is_number(reward) else ""
    return f"<div{rank}>{card(sample.get('prompt', ''), [Side.of(sample)])}</div>"


def card(prompt: object, sides: Sequence[Side]) -> str:
    drawn = []
    for side in sides:
        others = [s.reward for s in sides if is_number(s.reward) and s.reward != side.reward]
        shown = ""
        if is_number(side.reward):
            trend = "" if not others else " up" if side.reward > max(others) else " down"
            shown = f'<span class="reward{trend}">reward {short(side.reward)}</span>'
        numbers = {name: value for name, value in side.scores.items() if is_number(value)}
        scores = "".join(f'<span class="score">{escape(name)} {short(n)}</span>' for name, n in numbers.items())
        head = f'<div class="when"><span>{escape(side.when)}</span>{shown}{scores}</div>'
        drawn.append(f"<div>{head}{_content(side.completion)}</div>")
    body = f'<div class="pair">{"".join(drawn)}</div>' if len(drawn) > 1 else drawn[0]
    return f'<div class="card sample"><pre class="prompt">{escape(_cut(as_text(prompt)))}</pre>{body}</div>'


def _content(completion: object) -> str:
    """Return a text, or a conversation's turns with their tool calls, as HTML."""
    if not (isinstance(completion, list) and completion and all(isinstance(turn, dict) for turn in completion)):
        return _long_text(as_text(completion))
    turns = []
    for turn in completion:
        content = turn.get("content")
        text = _long_text(content if isinstance(content, str) else as_text(content or "")) if content else ""
        calls = turn.get("tool_calls")
        called = f'<pre class="call">{escape(_cut(json.dumps(calls, ensure_ascii=False)))}</pre>' if calls else ""
        turns.append(f'<div class="turn"><div class="when">{escape(turn.get("role", "?"))}</div>{text}{called}</div>')
    return "".join(turns)


def _pick(samples: Sequence[Json]) -> list[Json]:
    """Return a few samples: one of each prompt first, then more."""
    firsts = {as_text(s.get("prompt", "")): s for s in reversed(samples)}
    chosen = [*reversed(firsts.values())][:MAX_SAMPLES]
    others = [s for s in samples if not any(s is c for c in chosen)]
    return chosen + others[: max(FEW_SAMPLES - len(chosen), 0)]


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN // 2]}\n…\n{text[-MAX_SHOWN // 2 :]}"


def _long_text(text: str) -> str:
    if not text:
        return '<pre class="prompt">(empty)</pre>'
    start = "".join(text[:MAX_SHOWN].splitlines(keepends=True)[:MAX_LINES])
    if len(start) == len(text):
        return f"<pre>{escape(text)}</pre>"
    rest = escape(text[len(start) : MAX_KEPT])
    more = f"<details><summary>{len(text) - len(start):,} more characters</summary><pre>{rest}</pre></details>"
    return f"<pre>{escape(start)}</pre>{more}"
