"""`strop data check SOURCE`: show the rows' format, how a model sees three rows, and which rows are bad."""

import contextlib
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from strop._checks import is_conversation, printable
from strop._types import Json, Row, Tokenizer
from strop.cli.job import JobConfig, job_options, load_tokenizer, shaped
from strop.cli.options import number_option, option, with_options
from strop.cli.train import ALGORITHMS
from strop.data.ahead import PART
from strop.data.files import one_line

app = typer.Typer(no_args_is_help=True, help="Look at data before training on it.")
PROMPTED = ", ".join(name for name, command in ALGORITHMS.items() if command.prompted)
TAKEN_BY = {
    "language_modeling": "sft",
    "prompt_completion": f"sft, {PROMPTED}; with a column label, true or false, also kto",
    "preference": f"dpo, reward, {PROMPTED}",
    "prompt_only": PROMPTED,
}
MOST_TOLD, MOST_CHARACTERS = 20, 1500  # lines about bad rows, characters of a row
EMPTY = ("prompt", "completion", "chosen", "rejected", "text")  # an empty text here is no error, but is rarely intended
NUMBERED = re.compile(r"\b(?:row|line) \d+")
Spans = list[tuple[bool, list[int]]]  # (in the loss or not, ids)


@app.callback()
def _app() -> None:
    """Do nothing. Without this callback typer would make `check` the command itself."""


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
    job = JobConfig(split=split, tokenizer=tokenizer).changed(given)
    encoder = load_tokenizer(job)
    found = Findings(encoder, show)
    rows = _read(source, job)
    while part := list(islice(rows, PART)):
        found.add(part)
    console = Console(highlight=False)
    _tell(console, found)
    _tell_lengths(console, found)
    if found.has_conversations:
        _tell_opening(console, encoder)
    for where, row, lines in found.shown:
        console.print(f"\n{where}:", style="bold")
        console.print(_drawn(row, lines, encoder, console.is_terminal))
    if found.wrong or len(found.kinds) > 1:
        raise typer.Exit(1)


app.command("check")(with_options(check, job_options("map", "template", "chat")))


def _read(source: str, job: JobConfig) -> Iterator[tuple[str, Json | ValueError]]:
    """Yield the line or number of every row with the shaped row, or with the error of reading it."""
    from strop.data.files import checked_lines
    from strop.data.formats import is_sharegpt, read_rows, sharegpt_messages

    path = Path(source).expanduser()
    if path.is_file() and path.suffix not in (".json", ".csv", ".tsv", ".parquet"):
        named: Iterable[tuple[str, Any]] = ((f"line {number}", row) for number, row in checked_lines(path))
    else:
        named = ((f"row {i}", dict(row)) for i, row in enumerate(read_rows(source, split=job.split)))
    for where, row in named:
        if isinstance(row, ValueError):
            yield where, row
            continue
        try:
            row = sharegpt_messages(row) if is_sharegpt(row) else row
            yield where, dict(shaped([row], job)[0])
        except ValueError as error:
            yield where, ValueError(str(error).replace("rows[0]", where))


class Findings:
    """The facts about rows that are read once and not stored.

    places    oddity (probably a mistake, but no error) → the rows that have it
    lengths   for every sequence made from a row: its number of tokens, and how many of them are in the loss
    shown     the first rows, each with its token sequences if there is a tokenizer
    """

    def __init__(self, encoder: Tokenizer | None, show: int):
        self.encoder, self.show = encoder, show
        self.num_rows, self.has_conversations = 0, False
        self.columns, self.kinds = Counter[str](), Counter[str]()
        self.wrong: list[str] = []
        self.places: dict[str, list[str]] = {}
        self.lengths = array("q"), array("q")
        self.shown: list[tuple[str, Json, list[Spans] | None]] = []

    def add(self, rows: Sequence[tuple[str, Json | ValueError]]) -> None:
        """Add more rows to all fields."""
        from strop.data.formats import check_contents, detect_format

        right: dict[str, tuple[str, Json]] = {}
        wrong: dict[str, str] = {}
        for where, row in rows:
            if isinstance(row, ValueError):
                wrong[where] = str(row)
                continue
            self.num_rows += 1
            self.columns.update(row.keys())
            for told in _oddities(row):
                self.places.setdefault(told, []).append(where)
            try:
                kind = detect_format(row, where)
                check_contents(row, where)
                right[where] = kind, row
            except (ValueError, TypeError) as error:
                wrong[where] = str(error)
        lines = {} if self.encoder is None else self._encoded(right, wrong)
        for where, row in rows:
            if where in wrong:
                self.wrong.append(wrong[where] if wrong[where].startswith(where) else f"{where}: {wrong[where]}")
            else:
                self.kinds[right[where][0]] += 1
            shows = where in lines if self.encoder is not None else not isinstance(row, ValueError)
            if shows and len(self.shown) < self.show:
                self.shown.append((where, row, lines.get(where)))  # type: ignore[arg-type]

    def _encoded(self, rows: dict[str, tuple[str, Json]], wrong: dict[str, str]) -> dict[str, list[Spans]]:
        """Return the token sequences of each row. Add rows that cannot be encoded to `wrong`."""
        found: dict[str, list[Spans]] = {}
        for kind in {kind for kind, _ in rows.values()}:
            same = {where: row for where, (its, row) in rows.items() if its == kind}
            try:
                found |= zip(same, lines_of([*same.values()], kind, self.encoder), strict=True)
            except (ValueError, TypeError):
                for where, row in same.items():
                    try:
                        (found[where],) = lines_of([row], kind, self.encoder)
                    except (ValueError, TypeError) as error:
                        wrong[where] = str(error).removeprefix("rows[0]: ")
        for where, lines in found.items():
            row = rows[where][1]
            self.has_conversations |= any(is_conversation(row.get(name)) for name in ("prompt", "messages", "chosen"))
            for line in lines:
                self.lengths[0].append(sum(len(ids) for _, ids in line))
                self.lengths[1].append(sum(len(ids) for counted, ids in line if counted))
        return found


def lines_of(rows: Sequence[Json], kind: str, tokenizer: Any) -> list[list[Spans]]:
    """Return the token sequences of each row (two for a pair), each cut into spans inside and outside the loss."""
    from strop.data.tokenize import encode_preferences, encode_prompts, encode_rows

    if kind == "prompt_only":
        return [
            [_spans(ids, [], [])] for ids in encode_prompts([(row["prompt"], row) for row in rows], tokenizer, "rows")
        ]
    if kind == "preference":
        pairs = encode_preferences(rows, tokenizer, "rows")
        return [[_spans(prompt, *chosen), _spans(prompt, *rejected)] for prompt, chosen, rejected in pairs]
    return [[_spans(*line)] for line in encode_rows(rows, tokenizer, "rows")]


def _spans(prompt: Sequence[int], completion: Sequence[int], counts: Sequence[bool]) -> Spans:
    marked = [*((False, token) for token in prompt), *zip(counts, completion, strict=True)]
    if marked and not prompt:
        marked[0] = False, marked[0][1]  # nothing predicts the first token of a text
    return [(counted, [token for _, token in part]) for counted, part in groupby(marked, key=lambda one: one[0])]


# ---- output ----


def _tell(console: Console, found: Findings) -> None:
    num_rows, kinds, wrong = found.num_rows, found.kinds, found.wrong
    console.print(f"{num_rows:,} row{'s' * (num_rows != 1)}", style="bold")
    for kind, count in kinds.most_common():
        share = "" if len(kinds) == 1 and count == num_rows else f" in {count:,} row{'s' * (count != 1)}"
        console.print(f"format: {kind}{share}; for strop train {TAKEN_BY[kind]}")
    if len(kinds) > 1:
        console.print("All rows of one training must be of one format.", style="bold red")
    listed = [f"{name}" if count == num_rows else f"{name} (in {count:,})" for name, count in found.columns.items()]
    console.print(f"columns: {one_line(', '.join(listed)) or 'none'}", markup=False)
    for told, places in sorted(found.places.items(), key=lambda item: not item[0].startswith("empty ")):
        more = f" and {len(places) - 3:,} more" if len(places) > 3 else ""
        console.print(f"{one_line(told)}: {', '.join(places[:3])}{more}", style="yellow", markup=False)
    if wrong:
        console.print(f"{len(wrong):,} bad:", style="bold red")
        shown = _grouped(wrong)
        for told in shown[:MOST_TOLD]:
            console.print(f"  {one_line(told)}", markup=False)
        if len(shown) > MOST_TOLD:
            console.print(f"  … and {len(shown) - MOST_TOLD:,} more")
    if not kinds and num_rows:
        console.print("Columns get other names with --map, such as --map prompt=question,completion=answer.")


def _tell_opening(console: Console, tokenizer: Tokenizer | None) -> None:
    from strop.data.templates import opened_beyond

    opening = ""
    with contextlib.suppress(Exception):  # a template may refuse these plain messages, though it takes the rows
        opening = opened_beyond(tokenizer)
    if opening:
        console.print(
            f"the chat template opens {opening!r} for a model that generates. GRPO and environments read it so; SFT, DPO and "
            f"KTO train on conversations as the template writes them.",
            style="yellow",
            markup=False,
        )


def _oddities(row: Json) -> list[str]:
    """Return what is odd about a row: no error, but probably a mistake."""
    from strop.data.formats import is_equal_pair, odd_role, unknown_roles

    found = [f"empty {column}" for column in EMPTY if row.get(column) == ""]
    with contextlib.suppress(TypeError, KeyError):  # malformed messages: reported among the bad rows
        found += ["chosen and rejected are the same"] if is_equal_pair(row) else []
        found += map(odd_role, unknown_roles(row))
    return list(dict.fromkeys(found))


def _grouped(wrong: Sequence[str]) -> list[str]:
    """Return the errors. Neighbouring rows with the same error are one entry with the first and the last row."""
    found = []
    for _, group in groupby(wrong, key=lambda told: NUMBERED.sub("", told, count=1)):
        same = list(group)
        last = NUMBERED.search(same[-1])
        more = f" (and {len(same) - 1:,} more like it, up to {last[0]})" if len(same) > 1 and last else ""
        found += [same[0] + more] if more else same
    return found


def _tell_lengths(console: Console, found: Findings) -> None:
    for name, lengths in zip(("all", "that count"), found.lengths, strict=True):
        sizes = sorted(lengths)
        if sizes and sizes[-1]:
            middle = sizes[len(sizes) // 2]
            console.print(f"tokens, {name}: {sizes[0]:,} to {sizes[-1]:,}, median {middle:,}, {sum(sizes):,} together")


def _drawn(row: Row, lines: list[Spans] | None, tokenizer: Tokenizer | None, on_terminal: bool) -> Text:
    """Return a row as a model sees it, with the loss tokens underlined or in ⟦ ⟧. Without a tokenizer, return its columns."""
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
