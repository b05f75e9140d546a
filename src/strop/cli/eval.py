"""`strop eval MODEL --task …`: a model's rewards with 95 % intervals, on one or several sets of problems."""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from strop._types import Json
from strop.cli.generate import ABOUT_MODEL, OF_JOB, MaxNewTokens, MaxTurns, Settings, make_job, make_sampler
from strop.cli.job import (
    DEFAULT_EVAL_ROWS,
    JobConfig,
    job_options,
    load_data,
    load_model_and_tokenizer,
    load_rewards,
    load_task,
    named_sets,
)
from strop.cli.options import number_option, option, with_options
from strop.sample_metrics import answer_of, interval, sample_metrics

if TYPE_CHECKING:
    from strop.algorithms.best_of_n import BestOfN


def evaluate(
    model: Annotated[str, typer.Argument(help=ABOUT_MODEL)],
    task: Annotated[list[str] | None, option("addition, sorting, …; may be repeated.")] = None,
    environment: Annotated[list[str] | None, option("file.py:Class for several turns; may be repeated.")] = None,
    num_rows: Annotated[int | None, number_option("How many problems; by default 200, or all.", low=2)] = None,
    samples: Annotated[int, number_option("Completions of each problem, for mean@k, pass@k and maj@k.", low=1)] = 1,
    answer: Annotated[str | None, option("For maj@k: a pattern whose last match is the answer.")] = None,
    split: Annotated[str, option("Which split of a task or dataset.")] = "test",
    max_turns: MaxTurns = 8,
    max_new_tokens: MaxNewTokens = None,
    temperature: Annotated[
        float | None, number_option("0 is greedy, the default; with several samples 1 is the default.", whole=False)
    ] = None,
    batch_size: Annotated[int, number_option("Prompts sampled together.", low=1)] = 64,
    seed: Annotated[int, number_option()] = 0,
    settings: Settings = None,
    as_json: Annotated[bool, option("One JSON object, or with several sets one per line.", "--json")] = False,
    *,
    given: Json,
) -> None:
    """Rewards of a model's completions: their mean with a 95 % interval, for each reward function and set of problems."""
    temperature = (0.0 if samples == 1 else 1.0) if temperature is None else temperature
    if samples > 1 and not temperature:
        raise ValueError("temperature must be above 0 with several samples, which would be equal, found 0")
    limit = num_rows if "data" not in given else num_rows or DEFAULT_EVAL_ROWS  # a task may have fewer than 200
    job = make_job(given, settings, model=model, split=split, num_rows=limit)
    jobs = list(_sets(job, task or (), environment or ()))
    loaded = None
    for name, one in jobs:
        found_task = load_task(one)
        found_rows = load_data(one, found_task)
        rows = [dict(found_rows[i]) for i in range(min(len(found_rows), num_rows or DEFAULT_EVAL_ROWS))]
        functions = load_rewards(one, found_task)
        if not functions and one.environment is None:
            wanted = "--reward file.py:function, a --task that has one, or an --environment"
            raise ValueError(f"eval needs a reward: {wanted}")
        loaded = loaded or load_model_and_tokenizer(one, found_task)
        best = make_sampler(
            one, found_task, rows, n=samples, seed=seed, temperature=temperature, max_new_tokens=max_new_tokens,
            max_turns=max_turns, reward_fn=functions or None, loaded=loaded,
        )  # fmt: skip
        rewards = _rewards(best, rows, batch_size, answer)
        if as_json:
            named = {"set": name} if len(jobs) > 1 else {}
            print(json.dumps({"model": model, **named, "num_rows": len(rows), "rewards": rewards}))
            continue
        for metric, found in rewards.items():
            is_binary = found["interval"] == "wilson" or f"{metric.rpartition('/')[0]}/pass@1" in rewards
            how = "right" if is_binary else "mean"
            low, high = (_shown(found[end], how) for end in ("low", "high"))
            shown = f"{name} " if len(jobs) > 1 else ""
            print(f"{shown}{metric}: {_shown(found['mean'], how)} [{low}, {high}] {how}, of {len(rows):,}")


command = with_options(
    evaluate, job_options(*(name for name in OF_JOB if name not in ("task", "environment")), "map", "template")
)


def _sets(job: JobConfig, tasks: Sequence[str], environments: Sequence[str]) -> Iterator[tuple[str, JobConfig]]:
    """Yield the name and the job of each set: of each named file, or of each task and each environment."""
    if len(tasks) > 1 or len(environments) > 1:
        if job.data is not None:
            raise ValueError("several tasks or environments have their own rows: give --data without them, or with one")
        for task in tasks:
            yield task, job.changed({"task": task})
        for environment in environments:
            yield environment.rpartition(":")[2], job.changed({"environment": environment})
        return
    job = job.changed({"task": next(iter(tasks), None), "environment": next(iter(environments), None)})
    for name, files in named_sets(job.data).items() if job.data is not None else [("", None)]:
        yield name, job.changed({"data": files})


def _rewards(best: "BestOfN", rows: Sequence[Json], batch_size: int, answer: str | None) -> dict[str, Json]:
    """Return the mean and the interval of each reward function, or of each of its metrics of several samples."""
    from strop.environments.tools import ToolBox

    names = best.score.names
    if best.player is not None and isinstance(best.player.make, ToolBox):
        names = names[1:]  # the first is the reward of turns, which tools do not give
    scores: dict[str, list[float]] = {name: [] for name in names}
    answers = []
    for start in range(0, len(rows), batch_size):
        best.generate(rows[start : start + batch_size])
        answers += [answer_of(text, answer) for text in best.all_completions]
        for name, values in scores.items():
            values += best.columns[name].tolist()
    if best.n == 1:
        return {name: interval(values) for name, values in scores.items()}
    return {
        f"{name}/{metric}": interval(values_P.tolist())
        for name, values in scores.items()
        for metric, values_P in sample_metrics(np.asarray(values).reshape(-1, best.n), answers).items()
    }


def _shown(value: float, how: str) -> str:
    return f"{value:.1%}" if how == "right" else f"{value:.4g}"
