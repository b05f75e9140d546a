"""Rows of data: their sources, and their formats, which are TRL's.

| format              | standard                                        | conversational                            |
|---------------------|-------------------------------------------------|-------------------------------------------|
| `language_modeling` | {"text": str}                                   | {"messages": messages}                    |
| `prompt_only`       | {"prompt": str}                                 | {"prompt": messages}                      |
| `prompt_completion` | {"prompt": str, "completion": str}              | the same two with messages                |
| `preference`        | {"prompt": str, "chosen": str, "rejected": str} | the same three with messages              |

Messages are lists of {"role": …, "content": …}. A preference row may omit its prompt, which is then the common beginning of
chosen and rejected. Without a tokenizer, lists of token ids take the place of texts. Other columns stay: reward functions
get them by name.
"""

import glob
import importlib
import itertools
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from strop import _hub
from strop._checks import check_choice, did_you_mean, is_conversation
from strop._types import Json, Row
from strop.data.ahead import Prepare, PreparedAhead
from strop.data.files import SUFFIXES, datasets_package, one_line, read_file
from strop.data.streams import CONTENT, ROLES, Columns, RowFacts, Streamed, is_jsonl, read_files

FORMATS = {
    "language_modeling": '{"text"} or {"messages"}',
    "prompt_only": '{"prompt"}',
    "prompt_completion": '{"prompt", "completion"}',
    "preference": '{"prompt", "chosen", "rejected"} or {"chosen", "rejected"} with a common start',
}
MOST_AT_ONCE = 1000  # datasets up to this size are prepared before the first step, so errors show at once
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "bing": "assistant"}


# ---- where rows come from ----


class Prepared(list[Any]):
    """Rows that an algorithm's `prepare` has returned.

    before   the original rows, for their digest; None for a part of the rows
    """

    before: Sequence[Any] | None = None

    def take(self, indices: Sequence[int], following: Sequence[int] | None = None) -> list[Any]:
        """Return these rows. `following` is ignored, because all rows are prepared."""
        return [self[i] for i in indices]


PreparedRows = Prepared | PreparedAhead


class CheckedRows(list[Any]):
    """A list of rows with the facts that one pass over all of them found."""

    facts: RowFacts | None = None


def prepared(
    dataset: object,
    prepare: Prepare,
    name: str,
    *,
    any_format: bool = False,
    check: Callable[[Sequence[Json], str], None] | None = None,
    with_thread: bool = False,
) -> PreparedRows:
    """Return the dataset's rows as `prepare` returns them. Prepared rows are returned as they are.

    check         called with all rows, raises if a row's columns are wrong. With it, large datasets are prepared in parts,
                  when a step needs them; without it, all rows are prepared here
    with_thread   prepare such parts in a thread ahead of the step
    """
    if isinstance(dataset, (Prepared, PreparedAhead)):
        return dataset
    if not isinstance(dataset, (str, Path)) and hasattr(dataset, "__len__") and not len(dataset):
        raise ValueError(f"{name} must have rows, found none")
    # check a file's rows here in one pass, where its name is known; `check` then uses the facts of that pass
    load = load_rows if not any_format and (name_of(dataset) or check is None) else read_rows
    rows = before = load(dataset)
    if isinstance(rows, Streamed) and rows.on_disk:
        return PreparedAhead(rows, prepare, name, with_thread=with_thread)
    if check is not None:
        rows = CheckedRows(rows) if isinstance(rows, list) else rows
        check(rows, name)
        warn_of_odd_rows(getattr(rows, "facts", None) or facts_of(rows, name), name)
        if len(rows) > MOST_AT_ONCE:
            return PreparedAhead(rows, prepare, name, list(column_counts(rows)), with_thread)
    found = Prepared(prepare(rows, name))
    found.before = before
    return found


def load_rows(
    source: object, *, split: str = "train", limit: int | None = None, seed: int = 0, stream: bool = False
) -> Sequence[Json]:
    """Return the rows of a source, checked to have one known format (if streamed, only the first row). See `read_rows`."""
    rows = read_rows(source, split=split, limit=limit, seed=seed, stream=stream)
    check_rows(rows, where=name_of(source))
    return rows


def read_rows(
    source: object, *, split: str = "train", limit: int | None = None, seed: int = 0, stream: bool = False
) -> Sequence[Json]:
    """Return the rows of a source as they are, whatever their columns.

    source   a list of dicts; a pandas DataFrame; a file (JSONL, a JSON array, CSV, TSV or Parquet), a pattern of files or a list of them,
             "-" for JSONL on standard input; the name of one of strop's tasks; a `datasets.Dataset` or `DatasetDict`,
             a folder `save_to_disk` wrote, or the id of one on the Hub, with a config "owner/name:config"
    split    which part of a task, a DatasetDict or an id; a file is one part
    limit    use only the first `limit` rows
    seed     seed of a task's problems
    stream   leave the rows of JSONL files, Parquet files and Datasets on the disk until a step asks for them
    """
    files = _files_of(source, split)
    found = ", ".join(files) or name_of(source) or "rows"
    cannot_stream = f"stream needs .jsonl files, one .parquet file or a Dataset, found {found:.200}"
    if stream and not all(map(is_jsonl, files)) and [Path(file).suffix.lower() for file in files] != [".parquet"]:
        raise ValueError(cannot_stream)
    rows = _read_files(files, on_disk=stream) if files else _read(source, split, limit, seed)
    if stream and not isinstance(rows, Streamed):
        if not _is_dataset(rows):
            raise ValueError(cannot_stream)
        rows = Streamed(len(rows), rows.__getitem__)
    if is_sharegpt(rows[0] if len(rows) else {}):
        rows = _with_messages(rows)
    if limit is not None:
        rows = rows.select(range(min(limit, len(rows)))) if hasattr(rows, "select") else rows[:limit]
    if not len(rows):
        raise ValueError(f"{name_of(source) or 'the data'} must hold at least one row, found none")
    return rows


def is_sharegpt(row: Any) -> bool:
    """Return whether a row is in ShareGPT's format: {"conversations": [{"from": "human", "value": …}, …]}."""
    turns = row.get("conversations") if isinstance(row, Mapping) else None
    if not is_conversation(turns) or not {"from", "value"} <= turns[0].keys():
        return False
    return not any(row.get(name) for name in CONTENT)


def sharegpt_messages(row: Json) -> Json:
    """Return a row of ShareGPT's format with `messages` in place of `conversations`; other columns stay."""
    turns, others = row["conversations"], {name: value for name, value in row.items() if name != "conversations"}
    said = [] if not (system := others.pop("system", None)) else [{"role": "system", "content": system}]
    for i, turn in enumerate(turns):
        if not isinstance(turn, Mapping) or not {"from", "value"} <= turn.keys():
            raise ValueError(f'conversations[{i}] must be a turn {{"from", "value"}}, found {turn!r:.80}')
        said.append({"role": SPEAKERS.get(turn["from"], turn["from"]), "content": turn["value"]})
    return {"messages": said, **others}


def _with_messages(rows: Any) -> Sequence[Json]:
    """Return rows of ShareGPT's format with `messages`."""

    def change(row: Json, i: int) -> Json:
        try:
            return sharegpt_messages(row)
        except (ValueError, KeyError) as error:
            raise ValueError(f"rows[{i}] must have 'conversations' as the first row has: {error}") from None

    if isinstance(rows, Streamed):
        return rows.mapped(change)
    return [change(row, i) for i, row in enumerate(rows)]


def name_of(source: object) -> str:
    """Return a source's name in errors; "" for rows in memory."""
    return str(source) if isinstance(source, (str, os.PathLike)) else ""


def _files_of(source: Any, split: str) -> list[str]:
    """Return the files that a path, a pattern, a folder or a list of paths names; none for another source."""
    if isinstance(source, Sequence) and not isinstance(source, str):
        return [str(path) for path in source] if all(isinstance(path, (str, os.PathLike)) for path in source) else []
    if not isinstance(source, (str, os.PathLike)):
        return []
    path = Path(source).expanduser()
    if str(source) == "-" or path.is_file():
        return [str(source) if str(source) == "-" else str(path)]
    if any(c in str(source) for c in "*?["):
        if files := sorted(glob.glob(str(path))):
            return files
        raise FileNotFoundError(f"no file matches {source}")
    if path.is_dir() and not _is_saved(path):
        if files := [str(file) for end in SUFFIXES if (file := path / (split + end)).is_file()]:
            return files[:1]
        there = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
        wanted = f"{split}.jsonl (or .csv, .parquet …) or a saved dataset"
        raise FileNotFoundError(f"the folder {path} must hold {wanted}, found {there}")
    if path.suffix in SUFFIXES:
        raise FileNotFoundError(f"no such file: {source}")
    return []


def _is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` of datasets wrote this folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _read_files(paths: Sequence[str], *, on_disk: bool) -> Any:
    """Return the rows of several files, one file after the other."""
    if all(is_jsonl(path) for path in paths):
        return read_files(paths, on_disk=on_disk)
    return read_file(paths[0]) if len(paths) == 1 else [row for path in paths for row in read_file(path)]


def _read(source: Any, split: str, limit: int | None, seed: int) -> Any:
    """Return the rows of a source that is no file."""
    if isinstance(source, (str, os.PathLike)):
        folder = Path(source).expanduser()
        if not _is_saved(folder):
            rows = _read_task(os.fspath(source), split, limit, seed)
            return _read_hub(os.fspath(source), split) if rows is None else rows
        source = datasets_package().load_from_disk(str(folder))
    if _is_dataset(source) or isinstance(source, Streamed):
        return source
    if hasattr(source, "to_dict") and hasattr(source, "columns"):
        return _rows_of_frame(source)
    if isinstance(source, Mapping):  # a DatasetDict, or a plain dict of splits
        check_choice(split, "split", source)
        return read_rows(source[split], split=split, limit=limit, seed=seed)
    if isinstance(source, Sequence):
        return _checked_dicts(source)
    if hasattr(source, "__iter__") and hasattr(source, "features"):
        hint = "take a part of it, list(dataset.take(1000))"
        raise TypeError(f"data must have a length, found a streaming dataset: {hint}")
    raise TypeError(f"data must be a list of dicts, a path, a task's name or a Dataset, found {type(source).__name__}")


def _rows_of_frame(frame: Any) -> list[Json]:
    """Return the rows of a pandas DataFrame. Missing values become None, arrays become lists."""
    present = frame.astype(object).where(frame.notna(), None)
    return [
        {str(name): value.tolist() if hasattr(value, "tolist") else value for name, value in row.items()}
        for row in present.to_dict("records")
    ]


def _read_task(name: str, split: str, limit: int | None, seed: int) -> list[Json] | None:
    """Return the rows of a built-in task; None if no task has this name."""
    tasks = importlib.import_module("strop.tasks")

    if name.removeprefix("task:") not in tasks.available_tasks():
        if name.startswith("task:") or "/" not in name:
            raise ValueError(_unknown_source(name, tasks.available_tasks()))
        return None
    return tasks.load_task(name.removeprefix("task:")).rows(split, limit, seed=seed)


def _unknown_source(name: str, known: Sequence[str]) -> str:
    hint = did_you_mean(name.removeprefix("task:"), known)
    return f"no file, folder or task is called {name!r}{hint} Tasks: {', '.join(known)}. A dataset's id has an owner: owner/name"


def _read_hub(name: str, split: str) -> object:
    place, _, config = name.partition(":")
    package = datasets_package()
    try:
        with _hub.asking(place, "dataset"):
            return package.load_dataset(place, config or None, split=split)
    except Exception as error:  # of many kinds: no network, no such id, no such split
        why = "; ".join([str(error), *getattr(error, "__notes__", ())])
        raise ValueError(f"no file, folder or task is called {name!r}, and datasets cannot load it: {why}") from error


def _is_dataset(source: object) -> bool:
    """Return whether this is a map-style `datasets.Dataset`, without importing the package."""
    return hasattr(source, "column_names") and hasattr(source, "select") and hasattr(source, "__getitem__")


def _checked_dicts(rows: Sequence[Any]) -> list[Json]:
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise TypeError(f"rows[{i}] must be a dict of columns, found {type(row).__name__}")
    return [dict(row) for row in rows]


# ---- which format they are in ----


def detect_format(row: Row, where: str = "the row") -> str:
    """Return the format, one of FORMATS, by the columns."""
    columns = {name for name in CONTENT if row.get(name) is not None}
    if {"chosen", "rejected"} <= columns:
        return "preference"
    if lone := columns & {"chosen", "rejected"}:
        _refuse_null(row, where, ("chosen", "rejected"))
        raise ValueError(f"{where} has {lone.pop()!r} without its counterpart; {_found(row)}")
    if {"prompt", "completion"} <= columns:
        return "prompt_completion"
    if columns & {"text", "messages"}:
        return "language_modeling"
    if "prompt" in columns:
        return "prompt_only"
    _refuse_null(row, where)
    raise ValueError(f"{where} is in no known format: {_found(row)}. Formats: {_listed(FORMATS)}{_way_to_map(row)}")


def _way_to_map(row: Row) -> str:
    """Return, for an error, the options that convert Alpaca's rows, or questions with answers, to a known format."""
    if {"instruction", "output"} <= row.keys():
        text = "{instruction}\\n{input}" if "input" in row else "{instruction}"
        return f". Alpaca's columns: --map completion=output --template $'{text}' --chat"
    questions = next((name for name in ("question", "query", "problem", "input") if name in row), None)
    answers = next((name for name in ("answer", "response", "solution", "output") if name in row), None)
    return f". Perhaps --map prompt={questions},completion={answers}" if questions and answers else ""


def _refuse_null(row: Row, where: str, names: Sequence[str] = CONTENT) -> None:
    """Raise a TypeError if a column holds null, which is a different mistake than a missing column."""
    for name in names:
        if name in row and row[name] is None:
            raise TypeError(f"{where}[{name!r}] must be a text, a list of messages or token ids, found null")


def _found(row: Row) -> str:
    shown = [f"{name} (null)" if name in CONTENT and row[name] is None else name for name in row]
    return f"found the columns {one_line(', '.join(shown)) or '(none)'}"


def _listed(formats: Any) -> str:
    return "; ".join(f"{name} {FORMATS[name]}" for name in formats)


def as_text(content: object) -> str:
    """Return text as it is, messages with their roles and tool calls, ids as numbers."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and isinstance(content[0], dict):
        return "\n".join(_message_text(message) for message in content)
    return " ".join(map(str, content)) if isinstance(content, list) else str(content)


def _message_text(message: Json) -> str:
    content, calls = message.get("content", ""), message.get("tool_calls")
    if not calls:
        return f"{message.get('role', '?')}: {content}"
    called = json.dumps(calls, ensure_ascii=False, default=str)
    return f"{message.get('role', '?')}: {content or ''} {called}".replace("  ", " ")


def check_rows(rows: Any, wanted: Sequence[str] = tuple(FORMATS), *, where: str = "", what: str = "") -> str:
    """Return the wanted format that every row has; raise an error that names the first row without it.

    Of rows that stay on the disk only the first is checked here; the others are checked when they are read.
    what   who wants these formats, for the error ("DPO")
    """
    facts: RowFacts | None = getattr(rows, "facts", None)
    first = facts.format if facts else detect_format(rows[0], _name(where, 0))
    usable = first if first in wanted else _also(first, wanted)
    if usable is None:
        found = f"{where or 'the data'} is {first}: {_found(rows[0])}"
        raise ValueError(f"{what or 'the data'} needs {_listed(wanted)}; {found}")
    if facts is None:
        facts = facts_of(rows, where)
        if isinstance(rows, CheckedRows) or (isinstance(rows, Streamed) and not rows.on_disk):
            rows.facts = facts
    return usable


def facts_of(rows: Any, where: str = "") -> RowFacts:
    """Check every row's columns in one pass and return the facts; raise an error that names the first wrong row."""
    facts = RowFacts(detect_format(rows[0], _name(where, 0)))
    counts, firsts, to_check = _plain_facts(rows, facts.format)
    contents: dict[Columns, Sequence[str]] = {}
    for i, row in to_check:
        names = tuple(row)
        if names not in contents:
            contents[names] = _content_of(names, facts.format)
            firsts[names] = min(firsts.get(names, i), i)
        counts[names] += 1
        if _is_usual(row, contents[names]):
            continue
        try:
            if (found := detect_format(row, _name(where, i))) != facts.format:
                raise ValueError(f"{_name(where, i)} is {found}, the rows before it {facts.format}; {_found(row)}")
            check_contents(row, _name(where, i))
        except (ValueError, TypeError) as error:
            raise at_place(error, rows, i) from None
        facts.num_equal += is_equal_pair(row)
        for role in unknown_roles(row):
            facts.odd_roles[role] = facts.odd_roles.get(role, 0) + 1
    for names in sorted(counts, key=firsts.__getitem__):
        for name in names:
            facts.column_counts[name] = facts.column_counts.get(name, 0) + counts[names]
    return facts


def at_place(error: Exception, rows: object, i: int) -> Exception:
    """Return the error of row i with its line in the file, where that is known."""
    place = rows.place if isinstance(rows, Streamed) else None
    return type(error)(f"{error} ({place(i)})" if place else str(error))


def _plain_facts(rows: Any, wanted: str) -> tuple[Counter[Columns], dict[Columns, int], Iterable[tuple[int, Json]]]:
    """Return what is known of plain rows in the wanted format, by their columns: their number and the first of them; and
    all other rows with their indices."""
    counts: Counter[Columns] = Counter()
    firsts: dict[Columns, int] = {}
    others: list[Iterable[int]] = []
    start = 0
    for file in getattr(rows, "plain", ()):
        usual = file.usual(lambda names: bool(_content_of(names, wanted)))
        for kind, (first, count) in usual.items():
            counts[file.columns[kind]] += count
            firsts.setdefault(file.columns[kind], start + first)
        others.append([start + i for i in file.without(usual)])
        start += len(file.kinds_R)
    if not others:
        return counts, firsts, enumerate(_rows_to_check(rows))
    return counts, firsts, ((i, rows[i]) for i in itertools.chain(*others))


def _content_of(names: Sequence[str], wanted: str) -> Sequence[str]:
    """Return the columns that hold a row's content; none if a row with these columns is not in the wanted format."""
    try:
        return [name for name in names if name in CONTENT] if detect_format(dict.fromkeys(names, "")) == wanted else ()
    except ValueError:
        return ()


def _is_usual(row: Json, content: Sequence[str]) -> bool:
    """Return whether the row is usual: only texts, or only messages of known roles, and no equal pair.

    Nearly all rows are. `facts_of` checks the others, right or wrong, in detail, which takes several times as long.
    """
    kinds = set()
    for name in content:
        value = row[name]
        kinds.add(type(value))
        if type(value) is list and value:
            for message in value:
                if type(message) is not dict or "content" not in message or message.get("role") not in ROLES:
                    return False
        elif type(value) is not str:
            return False
    return len(kinds) == 1 and not is_equal_pair(row)


def is_equal_pair(row: Json) -> bool:
    """Return whether a pair's chosen and rejected completions are equal: nothing can be learned from it."""
    return row.get("chosen") is not None and bool(row["chosen"] == row.get("rejected"))


def unknown_roles(row: Json) -> list[str]:
    """Return the roles of the row's messages that no common chat template knows, once for each message."""
    messages = (row.get(name) for name in CONTENT)
    found = [one for some in messages if isinstance(some, list) for one in some if isinstance(one, Mapping)]
    return [message["role"] for message in found if "role" in message and message["role"] not in ROLES]


def warn_of_odd_rows(facts: RowFacts, name: str) -> None:
    """Warn once of rows that can be trained on but are probably mistakes."""
    if facts.num_equal:
        pairs = f"{facts.num_equal:,} {'pair has' if facts.num_equal == 1 else 'pairs have'}"
        warnings.warn(f"{name}: {pairs} the same completion as chosen and as rejected", stacklevel=4)
    for role, count in facts.odd_roles.items():
        warnings.warn(f"{name}: {odd_role(role)} in {count:,} message{'s' * (count != 1)}", stacklevel=4)


def odd_role(role: str) -> str:
    """Return an unusual role in words, with the usual one that it resembles."""
    return f"the unusual role {role!r}{did_you_mean(role.lower(), ROLES, ' ({})', cutoff=0.5)}"


def column_counts(rows: Any) -> dict[str, int]:
    """Return how many rows have each column."""
    if _is_dataset(rows):  # its columns are the same in all rows
        return dict.fromkeys(rows.column_names, len(rows))
    if facts := getattr(rows, "facts", None):
        return dict(facts.column_counts)
    return dict(Counter(name for row in rows for name in row))


def _rows_to_check(rows: Any) -> Iterable[Json]:
    """Return the rows that a check must see: for a Dataset all rows, but only the columns with a format's content."""
    if isinstance(rows, Streamed) and rows.on_disk:
        return [rows[0]]
    if not _is_dataset(rows):
        return rows
    content = [name for name in rows.column_names if name in CONTENT]
    if not hasattr(rows, "iter") or not content:
        return [rows[0]]
    parts = rows.select_columns(content).iter(1000)
    return (dict(zip(part, row, strict=True)) for part in parts for row in zip(*part.values(), strict=True))


def _also(found: str, wanted: Sequence[str]) -> str | None:
    """Return the wanted format that rows of the found format also satisfy: rows with a completion also have a prompt."""
    return "prompt_only" if "prompt_only" in wanted and found in ("prompt_completion", "preference") else None


def _name(where: str, index: int) -> str:
    return f"{where}: rows[{index}]" if where else f"rows[{index}]"


def check_contents(row: Row, name: str) -> None:
    """Raise unless every column of the format holds a text, messages or ids, and those of a pair are of one kind."""
    kinds = {column: _kind(row[column], f"{name}[{column!r}]") for column in CONTENT if row.get(column) is not None}
    pairs = ("prompt", "completion"), ("chosen", "rejected"), ("prompt", "chosen")
    for a, b in pairs:
        if a in kinds and b in kinds and kinds[a] != kinds[b]:
            raise ValueError(f"{name}: {a} is {kinds[a]} but {b} is {kinds[b]}; both must be of one kind")


def _kind(value: object, name: str) -> str:
    if isinstance(value, str):
        return "text"
    if is_conversation(value):
        for i, message in enumerate(value):
            says = isinstance(message, Mapping) and ("content" in message or message.get("tool_calls"))
            if not says or not isinstance(message.get("role"), str):
                raise ValueError(f'{name}[{i}] must be a message {{"role", "content"}}, found {message!r:.80}')
        return "messages"
    if hasattr(value, "__len__") and not isinstance(value, Mapping):
        return "token ids"
    raise TypeError(f"{name} must be a text, a list of messages or token ids, found {type(value).__name__}")


def with_prompt(row: Json) -> Json:
    """Return a preference row with its prompt: its own, or the common beginning of chosen and rejected."""
    if row.get("prompt") is not None:
        return row
    chosen, rejected = row["chosen"], row["rejected"]
    common = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if common is None:
        if len(chosen) == len(rejected):
            raise ValueError(f"chosen and rejected must differ, found the same twice: {chosen!r:.120}")
        common = min(len(chosen), len(rejected))
    if isinstance(chosen, str) and common and chosen[common - 1] == " ":
        common -= 1  # the space belongs to the word after it, as tokenizers have it
    if common == 0:
        found = f"found {chosen!r:.60} and {rejected!r:.60}"
        raise ValueError(f"chosen and rejected must begin alike where there is no prompt, {found}")
    return {**row, "prompt": chosen[:common], "chosen": chosen[common:], "rejected": rejected[common:]}
