"""`strop data check SOURCE`: what the rows are, how a model sees three of them, and which are bad."""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from strop._checks import is_conversation, printable
from strop._types import Json, Row, Tokenizer
from strop.cli.job import JobConfig, job_options, load_tokenizer, shaped
from strop.cli.options import number_option, option, with_options
from strop.data.files import one_line

app = typer.Typer(no_args_is_help=True, help="Look at data before training on it.")
PROMPTED = "grpo, ppo, online-dpo, distill"
TAKEN_BY = {
    "language_modeling": "sft",
    "prompt_completion": f"sft, {PROMPTED}; with a column label, true or false, also kto",
    "preference": f"dpo, reward, {PROMPTED}",
    "prompt_only": PROMPTED,
}
MOST_TOLD, MOST_CHARACTERS = 20, 1500  # lines about bad rows, characters of a row
EMPTY = ("prompt", "completion", "chosen", "rejected", "text")  # such a text is no error, but is rarely meant
NUMBERED = re.compile(r"\b(?:row|line) \d+")
Spans = list[tuple[bool, list[int]]]  # whether they count, ids


@app.callback()
def _app() -> None:
    """Without this typer would make `check` the command itself."""


def check(
    source: Annotated[str, typer.Argument(help="Files, a folder, - or a dataset's name, as for strop train --data.")],
    tokenizer: Annotated[
        str | None, option("A folder or name: rows are shown as that model sees them.", "--tokenizer", "--model")
    ] = None,
    split: Annotated[str, option("Which split of a dataset or folder.")] = "train",
    show: Annotated[int, number_option("How many rows are shown.")] = 3,
    *,
    given: Json,
) -> None:
    """Say which format the rows have, show some as the model will see them, and name bad ones by line.

    Exits with 1 if there are bad ones.
    """
    from strop.data.formats import check_contents, detect_format

    job = JobConfig(split=split, tokenizer=tokenizer).changed(given)
    rows, wrong = _read(source, job)
    encoder = load_tokenizer(job)
    kinds, spans = Counter[str](), {}
    for where, row in rows:
        try:
            kind = detect_format(row, where)
            check_contents(row, where)
            if encoder is not None:
                spans[where] = spans_of(row, encoder)
            kinds[kind] += 1
        except (ValueError, TypeError) as error:
            told = str(error)
            wrong.append(told if told.startswith(where) else f"{where}: {told}")
    console = Console(highlight=False)
    _tell(console, rows, kinds, wrong)
    if spans:
        _tell_lengths(console, list(spans.values()))
        if any(is_conversation(row.get(name)) for _, row in rows for name in ("prompt", "messages", "chosen")):
            _tell_opening(console, encoder)
    for where, row in rows[:show]:
        if encoder is None or where in spans:
            console.print(f"\n{where}:", style="bold")
            console.print(_drawn(row, spans.get(where), encoder, console.is_terminal))
    if wrong or len(kinds) > 1:
        raise typer.Exit(1)


app.command("check")(with_options(check, job_options("map", "template", "chat")))


def _read(source: str, job: JobConfig) -> tuple[list[tuple[str, Json]], list[str]]:
    """Return every row that can be read and shaped, with its line or number; and what is wrong with the others."""
    from strop.data.files import checked_lines
    from strop.data.formats import is_sharegpt, read_rows, sharegpt_messages

    wrong: list[str] = []
    path = Path(source).expanduser()
    if path.is_file() and path.suffix not in (".json", ".csv", ".tsv", ".parquet"):
        numbered, wrong = checked_lines(path)
        named = [(f"line {number}", row) for number, row in numbered]
    else:
        named = [(f"row {i}", dict(row)) for i, row in enumerate(read_rows(source, split=job.split))]
    found = []
    for where, row in named:
        try:
            row = sharegpt_messages(row) if is_sharegpt(row) else row
            found.append((where, dict(shaped([row], job)[0])))
        except ValueError as error:
            wrong.append(str(error).replace("rows[0]", where))
    return found, wrong


def spans_of(row: Row, tokenizer: Tokenizer | None) -> list[Spans]:
    """Return the lines of tokens a row becomes (two of a pair), each in spans that count or do not."""
    from strop.data.formats import detect_format
    from strop.data.tokenize import encode_preference, encode_prompt, encode_row

    kind = detect_format(row)
    if kind == "prompt_only":
        return [_spans(encode_prompt(row["prompt"], tokenizer, row), [])]
    if kind == "preference":
        prompt, *lines = encode_preference(row, tokenizer)
        return [_spans(prompt, *_line(line)) for line in lines]
    prompt, *line = encode_row(row, tokenizer)
    return [_spans(prompt, *_line(line[0] if len(line) == 1 else tuple(line)), text=not prompt)]


def _line(line: object) -> tuple[Sequence[int], Sequence[bool] | None]:
    """Return ids and which of them count; None: all."""
    return line if isinstance(line, tuple) else (line, None)


def _spans(
    prompt: Sequence[int], completion: Sequence[int], counts: Sequence[bool] | None = None, text: bool = False
) -> Spans:
    flags = [True] * len(completion) if counts is None else list(counts)
    if text and flags:
        flags[0] = False  # nothing predicts the first token of a text
    marked = [*((False, token) for token in prompt), *zip(flags, completion, strict=True)]
    return [(counted, [token for _, token in part]) for counted, part in groupby(marked, key=lambda one: one[0])]


# ---- telling ----


def _tell(console: Console, rows: Sequence[tuple[str, Any]], kinds: Counter[str], wrong: Sequence[str]) -> None:
    columns = Counter(name for _, row in rows for name in row)
    console.print(f"{len(rows):,} row{'s' * (len(rows) != 1)}", style="bold")
    for kind, count in kinds.most_common():
        share = "" if len(kinds) == 1 and count == len(rows) else f" in {count:,} row{'s' * (count != 1)}"
        console.print(f"format: {kind}{share}; for strop train {TAKEN_BY[kind]}")
    if len(kinds) > 1:
        console.print("All rows of one training must be of one format.", style="bold red")
    listed = [f"{name}" if count == len(rows) else f"{name} (in {count:,})" for name, count in columns.items()]
    console.print(f"columns: {one_line(', '.join(listed)) or 'none'}", markup=False)
    for told, places in _oddities(rows).items():
        more = f" and {len(places) - 3:,} more" if len(places) > 3 else ""
        console.print(f"{one_line(told)}: {', '.join(places[:3])}{more}", style="yellow", markup=False)
    if wrong:
        console.print(f"{len(wrong):,} bad:", style="bold red")
        shown = _grouped(wrong)
        for told in shown[:MOST_TOLD]:
            console.print(f"  {one_line(told)}", markup=False)
        if len(shown) > MOST_TOLD:
            console.print(f"  … and {len(shown) - MOST_TOLD:,} more")
    if not kinds and rows:
        console.print("Columns get other names with --map, such as --map prompt=question,completion=answer.")


def _tell_opening(console: Console, tokenizer: Tokenizer | None) -> None:
    from strop.data.templates import opened_beyond

    if opening := opened_beyond(tokenizer):
        console.print(
            f"the chat template opens {opening!r} for a model that generates: so GRPO and environments read it; SFT, DPO and "
            f"KTO train on conversations as the template writes them",
            style="yellow",
            markup=False,
        )


def _oddities(rows: Sequence[tuple[str, Any]]) -> dict[str, list[str]]:
    """Return what is no error but hardly meant, and the places of the rows that have it."""
    from strop.data.formats import is_equal_pair, odd_role, unknown_roles

    empty = {f"empty {column}": [where for where, row in rows if row.get(column) == ""] for column in EMPTY}
    found = {told: places for told, places in empty.items() if places}
    for where, row in rows:
        with contextlib.suppress(TypeError, KeyError):  # messages that are none: named among the bad rows
            told = ["chosen and rejected are the same"] if is_equal_pair(row) else []
            for one in dict.fromkeys([*told, *map(odd_role, unknown_roles(row))]):
                found.setdefault(one, []).append(where)
    return found


def _grouped(wrong: Sequence[str]) -> list[str]:
    """Return what is wrong; once for neighbouring rows that have the same, with the first and the last of them."""
    found = []
    for _, group in groupby(wrong, key=lambda told: NUMBERED.sub("", told, count=1)):
        same = list(group)
        last = NUMBERED.search(same[-1])
        more = f" (and {len(same) - 1:,} more like it, up to {last[0]})" if len(same) > 1 and last else ""
        found += [same[0] + more] if more else same
    return found


def _tell_lengths(console: Console, found: Sequence[list[Spans]]) -> None:
    lines = [line for lines in found for line in lines]
    lengths: dict[str, Callable[[Spans], int]] = {
        "all": lambda line: sum(len(ids) for _, ids in line),
        "that count": lambda line: sum(len(ids) for counted, ids in line if counted),
    }
    for name, length in lengths.items():
        sizes = sorted(map(length, lines))
        if sizes[-1]:
            middle = sizes[len(sizes) // 2]
            console.print(f"tokens, {name}: {sizes[0]:,} to {sizes[-1]:,}, median {middle:,}, {sum(sizes):,} together")


def _drawn(row: Row, lines: list[Spans] | None, tokenizer: Tokenizer | None, on_terminal: bool) -> Text:
    """Return a row as a model sees it: what counts underlined, or else in ⟦ ⟧; without a tokenizer its columns."""
    if lines is None or tokenizer is None:
        from strop.data.formats import as_text

        return Text(printable(_cut("\n".join(f"{name}: {as_text(value)}" for name, value in row.items()))))
    drawn = Text()
    for number, line in enumerate(lines):
        drawn.append(f"{('chosen', 'rejected')[number]}: " if len(lines) == 2 else "")
        for piece in _pieces(line, tokenizer, on_terminal):
            drawn.append_text(piece)
        drawn.append("\n" if number + 1 < len(lines) else "")
    return drawn


def _pieces(line: Spans, tokenizer: Tokenizer, on_terminal: bool) -> Iterator[Text]:
    for counted, ids in line:
        text = printable(_cut(tokenizer.decode(ids, skip_special_tokens=False)))
        yield Text(text if on_terminal or not counted else f"⟦{text}⟧", style="underline" if counted else "dim")


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} … ({len(text):,} characters)"
