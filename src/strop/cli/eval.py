"""`strop eval MODEL --task …`: a model's mean reward with a 95 % interval."""

import json
import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import typer

from strop._types import Json
from strop.cli.generate import ABOUT_MODEL, OF_JOB, MaxNewTokens, MaxTurns, Settings, make_job, make_sampler
from strop.cli.job import DEFAULT_EVAL_ROWS, job_options, load_data, load_rewards, load_task
from strop.cli.options import number_option, option, with_options


def evaluate(
    model: Annotated[str, typer.Argument(help=ABOUT_MODEL)],
    num_rows: Annotated[int | None, number_option("How many problems; by default 200, or all.", low=2)] = None,
    split: Annotated[str, option("Which split of a task or dataset.")] = "test",
    max_turns: MaxTurns = 8,
    max_new_tokens: MaxNewTokens = None,
    temperature: Annotated[float, number_option("0 is greedy.", whole=False)] = 0.0,
    batch_size: Annotated[int, number_option("Prompts sampled together.", low=1)] = 64,
    seed: Annotated[int, number_option()] = 0,
    settings: Settings = None,
    as_json: Annotated[bool, option("One JSON object.", "--json")] = False,
    *,
    given: Json,
) -> None:
    """Rewards of a model's completions: their mean with a 95 % interval, for each reward function."""
    limit = num_rows if "data" not in given else num_rows or DEFAULT_EVAL_ROWS  # a task may have fewer than 200
    job = make_job(given, settings, model=model, split=split, num_rows=limit)
    task = load_task(job)
    found_rows = load_data(job, task)
    rows = [dict(found_rows[i]) for i in range(min(len(found_rows), num_rows or DEFAULT_EVAL_ROWS))]
    functions = load_rewards(job, task)
    if not functions and job.environment is None:
        raise ValueError("eval needs a reward: --reward file.py:function, a --task that has one, or an --environment")
    best = make_sampler(
        job, task, rows, n=1, seed=seed, temperature=temperature, max_new_tokens=max_new_tokens, max_turns=max_turns,
        reward_fn=functions or None,
    )  # fmt: skip
    from strop.environments.tools import ToolBox

    names = best.score.names
    if best.player is not None and isinstance(best.player.make, ToolBox):
        names = names[1:]  # the first is the reward of turns, which tools do not give
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


command = with_options(evaluate, job_options(*OF_JOB, "map", "template"))


def summary(values: Sequence[float], rounds: int = 2000) -> Json:
    """Return the mean and its 95 % interval: Wilson's if all values are 0 or 1, else by bootstrap."""
    mean, n = sum(values) / len(values), len(values)
    if set(values) <= {0.0, 1.0}:
        z = 1.959963984540054
        centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
        low, high = max(0.0, centre - half), min(1.0, centre + half)  # rounding may exceed [0, 1]
        return {"mean": mean, "low": low, "high": high, "interval": "wilson"}
    draws = np.random.default_rng(0).choice(np.asarray(values, float), (rounds, n)).mean(1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return {"mean": mean, "low": float(low), "high": float(high), "interval": "bootstrap"}


def _shown(value: float, how: str) -> str:
    return f"{value:.1%}" if how == "right" else f"{value:.4g}"
