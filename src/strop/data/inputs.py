"""The inputs of `train_step` as rows of token ids without padding, and prompts from every form that users give.

B rows; a row is a 1-D int64 tensor on the CPU.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from strop._checks import is_conversation
from strop._types import Array, Json, Row, Texts, Tokenizer
from strop.data.batch import Trajectory, as_ids
from strop.data.formats import check_rows
from strop.data.tokenize import encode_prompt, row_named

Ids = torch.Tensor
Padding = tuple[int | None, Sequence[int]]  # the pad id, and the EOS ids
RESERVED = ("prompt", "prompts", "completions", "completion_ids", "prompt_ids")  # arguments that strop itself passes


def check_tokenizer(tokenizer: Tokenizer | None) -> None:
    if isinstance(tokenizer, str) or (tokenizer is not None and not callable(getattr(tokenizer, "encode", None))):
        raise TypeError(f"tokenizer must have encode(text) and decode(ids), found a {type(tokenizer).__name__}")


def is_written(rows: object, name: str, mask: Array | None = None) -> bool:
    """Return whether these are texts or conversations, which need a tokenizer. Raise if they come with a mask."""
    if not isinstance(rows, Sequence) or not len(rows):
        return False
    if isinstance(rows, str) or (is_conversation(rows) and "role" in rows[0]):
        raise TypeError(f"{name} must be a batch, found a single {'text' if isinstance(rows, str) else 'conversation'}")
    if not isinstance(rows[0], str) and not is_conversation(rows[0]):
        return False
    if mask is not None:
        raise ValueError(f"{name}_mask must be None for texts and conversations, found one: they have no padding")
    return True


def as_dicts(columns: Mapping[str, Texts]) -> list[Json]:
    """Return the rows of a dataset from its columns, which must have equal lengths."""
    (first, values), *others = columns.items()
    for name, other in others:
        if isinstance(other, str) or not hasattr(other, "__len__"):
            raise TypeError(f"{name} must be a batch as {first} is, found {other!r:.60}")
        if len(other) != len(values):
            raise ValueError(f"{name} must have {len(values)} rows as {first} has, found {len(other)}")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def as_rows(ids: object, name: str, mask: Any = None) -> list[Ids]:
    """Return the rows of a (B, T) tensor or a list of 1-D ones. With a mask (B, T), keep only the ids where it is 1."""
    if isinstance(ids, np.ndarray):
        ids = torch.as_tensor(ids)
    if isinstance(ids, torch.Tensor) and ids.ndim != 2:
        raise ValueError(f"{name} must have shape [B, T], found {list(ids.shape)}")
    if not isinstance(ids, (torch.Tensor, Sequence)) or isinstance(ids, str) or not len(ids):
        what = "an empty one" if hasattr(ids, "__len__") and not len(ids) else type(ids).__name__
        raise TypeError(f"{name} must be token ids, a tensor [B, T] or a list of rows, found {what}")
    rows = [as_ids(row, f"{name}[{i}]") for i, row in enumerate(ids)]
    if mask is None:
        return rows
    if not hasattr(mask, "__len__") or len(mask) != len(rows):
        found = len(mask) if hasattr(mask, "__len__") else type(mask).__name__
        raise ValueError(f"the mask of {name} must have {len(rows)} rows, found {found}")
    kept = [torch.as_tensor(keep).cpu().bool() for keep in mask]
    for i, (row, keep) in enumerate(zip(rows, kept, strict=True)):
        if keep.shape != row.shape:
            raise ValueError(f"the mask of {name}[{i}] must have shape {list(row.shape)}, found {list(keep.shape)}")
    return [row[keep] for row, keep in zip(rows, kept, strict=True)]


def prompt_rows(ids: object, name: str, mask: Array | None, pad_id: int | None, eos_ids: Sequence[int]) -> list[Ids]:
    """Return prompts or texts without padding: ids where the mask is 0 or, without a mask, pad ids at the sides."""
    rows = as_rows(ids, name, mask)
    return rows if mask is not None else [without_padding(row, pad_id, eos_ids) for row in rows]


def completion_rows(ids: Array, name: str, num_rows: int, pad_id: int | None, eos_ids: Sequence[int]) -> list[Ids]:
    """Return completions, one per prompt, each up to its first EOS."""
    rows = as_rows(ids, name)
    if len(rows) != num_rows:
        raise ValueError(f"{name} must have {num_rows} rows as prompt has, found {len(rows)}")
    return [until_eos(row, pad_id, eos_ids) for row in rows]


def without_padding(row: Ids, pad_id: int | None, eos_ids: Sequence[int]) -> Ids:
    """Return a prompt without padding at its sides. An EOS that is also the pad id stays at the end."""
    if pad_id is None:
        return row
    real = (row != pad_id).nonzero().flatten()
    if not len(real):
        return row[:0]
    return row[int(real[0]) : None if pad_id in eos_ids else int(real[-1]) + 1]


def until_eos(row: Ids, pad_id: int | None, eos_ids: Sequence[int]) -> Ids:
    """Return a completion up to and including its first EOS; without an EOS, up to the padding after it."""
    ends = torch.isin(row, torch.tensor(list(eos_ids), dtype=row.dtype)).nonzero().flatten()
    if len(ends):
        return row[: int(ends[0]) + 1]
    if pad_id is None or pad_id in eos_ids:
        return row
    real = (row != pad_id).nonzero().flatten()
    return row[: int(real[-1]) + 1 if len(real) else 0]


def fit(prompt: Ids, completion: Ids, max_length: int | None, context: int | None, where: str) -> Ids:
    """Return the completion, cut so that it fits after its prompt. Raise a ValueError if the prompt alone does not fit.

    max_length   the user's limit: completions are cut there
    context      the model's limit: without a max_length a longer sequence is an error, so that nothing is cut silently
    """
    limit = context if max_length is None else max_length if context is None else min(max_length, context)
    if limit is None:
        return completion
    if len(prompt) >= limit:
        whose = "max_length" if max_length is not None and limit == max_length else "the model's context"
        raise ValueError(f"{where}: the prompt must be shorter than {whose}, {limit} tokens, found {len(prompt)}")
    if max_length is None and len(prompt) + len(completion) > limit:
        found = f"found {len(prompt) + len(completion)}; max_length={limit} cuts completions"
        raise ValueError(f"{where}: prompt and completion must fit into the model's context, {limit} tokens, {found}")
    return completion[: limit - len(prompt)]


# ---- prompts ----


def as_prompts(
    prompts: Any,
    tokenizer: Tokenizer | None,
    padding: Padding,
    *,
    mask: Array | None = None,
    columns: Row | None = None,
    name: str = "prompts",
) -> list[Trajectory]:
    """Return a batch of prompts as trajectories without completions.

    prompts   ids (B, P) or lists of ids; with a tokenizer texts or conversations; or rows with a "prompt"
    mask      (B, P), 0 at padding; without it, pad ids at the sides of a row are padding
    padding   the result of `Policy.padding`
    columns   further columns for reward functions, each with one entry per prompt
    name      name of the batch or dataset in errors
    """
    if isinstance(prompts, Mapping) and "input_ids" in prompts:  # what a tokenizer returns
        mask = prompts.get("attention_mask") if mask is None else mask
        prompts = prompts["input_ids"]
    elif isinstance(prompts, Mapping):  # rows as columns
        if "prompt" not in prompts:
            there = ", ".join(map(str, prompts)) or "none"
            raise ValueError(f"prompts must have 'prompt' or 'input_ids', found {there}")
        columns = {name: values for name, values in prompts.items() if name not in RESERVED} | dict(columns or {})
        prompts = prompts["prompt"]
    is_list = hasattr(prompts, "__len__") and not isinstance(prompts, torch.Tensor) and len(prompts)
    first = prompts[0] if is_list else None
    if isinstance(prompts, str) or (isinstance(first, Mapping) and "role" in first):
        what = "text" if isinstance(prompts, str) else "conversation"
        raise TypeError(f"prompts must be a batch, found a single {what}")
    starts_with = first[0] if isinstance(first, (list, tuple)) and first else first
    if isinstance(first, str) or isinstance(starts_with, Mapping):
        if mask is not None:
            raise ValueError("prompt_mask must be None for prompts that are not ids, found one: texts have no padding")
        found = [_of_row(row, tokenizer, f"{name}[{i}]") for i, row in enumerate(prompts)]
    else:
        found = _of_ids(prompts, tokenizer, mask, padding)
    for name, values in (columns or {}).items():
        if name in RESERVED:
            raise ValueError(f"{name} must not be a column: reward functions get their own under this name")
        if isinstance(values, str) or not hasattr(values, "__len__") or len(values) != len(found):
            size = type(values).__name__ if isinstance(values, str) or not hasattr(values, "__len__") else len(values)
            raise ValueError(f"{name} must have one entry for each of the {len(found)} prompts, found {size}")
        for prompt, value in zip(found, values, strict=True):
            prompt.row = {**prompt.row, name: value}
    return found


def prompts_of_dataset(
    rows: Sequence[object], tokenizer: Tokenizer | None, padding: Padding, name: str, what: str
) -> list[Trajectory]:
    """Return a dataset's prompts. A row that lacks a column has None there, in every batch."""
    check_rows(rows, ["prompt_only"], where=name, what=what)
    prompts = as_prompts(list(rows), tokenizer, padding, name=name)
    names = dict.fromkeys(column for prompt in prompts for column in prompt.row)
    for prompt in prompts:
        prompt.row = {column: prompt.row.get(column) for column in names}
    return prompts


def check_below(max_length: int | None, prompts: Sequence[Trajectory], name: str) -> None:
    """Raise a ValueError if a prompt alone fills max_length."""
    for i, prompt in enumerate(prompts):
        fit(prompt.ids_T, prompt.ids_T[:0], max_length, None, f"{name}[{i}]")


def _of_row(row: object, tokenizer: Tokenizer | None, name: str) -> Trajectory:
    """Return a text, a conversation, or a row of a dataset as a prompt."""
    columns: Json = {}
    prompt = row
    if isinstance(row, Mapping):
        if "prompt" not in row:
            raise ValueError(f"{name} must have a column 'prompt', found {', '.join(map(str, row)) or 'none'}")
        if (prompt := row["prompt"]) is None:
            raise TypeError(f"{name}['prompt'] must be a text, a list of messages or token ids, found null")
        columns = {column: value for column, value in row.items() if column not in RESERVED}
    with row_named(name):
        ids = torch.tensor(encode_prompt(prompt, tokenizer, row if isinstance(row, Mapping) else None)).long()
    if not len(ids):
        raise ValueError(f"{name} must hold at least one token, found none in {prompt!r:.60}")
    if isinstance(prompt, str) or is_conversation(prompt):
        return Trajectory.of_prompt(ids, row=columns, shown={"prompts": prompt})
    return Trajectory.of_prompt(ids, row=columns, shown=_decoded(ids, tokenizer))


def _of_ids(prompts: Texts, tokenizer: Tokenizer | None, mask: Array | None, padding: Padding) -> list[Trajectory]:
    rows = prompt_rows(prompts, "prompts", mask, *padding)
    for index, row in enumerate(rows):
        if not len(row):
            raise ValueError(f"prompts[{index}] must hold at least one token besides padding, found none")
    return [Trajectory.of_prompt(row, shown=_decoded(row, tokenizer)) for row in rows]


def _decoded(ids: torch.Tensor, tokenizer: Tokenizer | None) -> dict[str, str]:
    return {} if tokenizer is None else {"prompts": tokenizer.decode(ids.tolist(), skip_special_tokens=True)}
