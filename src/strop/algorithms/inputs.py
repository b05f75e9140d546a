"""What `train_step` is given, as rows of token ids without padding.

B rows; a row is a 1-D int64 tensor on the CPU.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from strop.data.batch import as_ids
from strop.data.formats import is_conversation
from strop.models import Policy

Ids = torch.Tensor


def declared_pad_id(policy: Policy) -> int | None:
    """The pad id that tokenizer or model name; None where neither does, and then no id is padding."""
    inner = getattr(policy.model, "_orig_mod", policy.model)
    for holder in (policy.tokenizer, getattr(inner, "config", None)):
        pad_id = getattr(holder, "pad_token_id", None)
        if isinstance(pad_id, int) and pad_id >= 0:
            return pad_id
    return None


def check_tokenizer(tokenizer: Any) -> None:
    if isinstance(tokenizer, str) or (tokenizer is not None and not callable(getattr(tokenizer, "encode", None))):
        raise TypeError(f"tokenizer must have encode(text) and decode(ids), found a {type(tokenizer).__name__}")


def is_written(rows: Any, name: str, mask: Any = None) -> bool:
    """Whether these are texts or conversations, which a tokenizer makes ids of. They have no padding to mask."""
    if not isinstance(rows, Sequence) or not len(rows):
        return False
    if isinstance(rows, str) or (is_conversation(rows) and "role" in rows[0]):
        raise TypeError(f"{name} must be a batch, found a single {'text' if isinstance(rows, str) else 'conversation'}")
    if not isinstance(rows[0], str) and not is_conversation(rows[0]):
        return False
    if mask is not None:
        raise ValueError(f"{name}_mask must be None for texts and conversations, found one: they have no padding")
    return True


def as_dicts(columns: dict[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows of a dataset from its columns, which must be of one length."""
    (first, values), *others = columns.items()
    for name, other in others:
        if isinstance(other, str) or not hasattr(other, "__len__"):
            raise TypeError(f"{name} must be a batch as {first} is, found {other!r:.60}")
        if len(other) != len(values):
            raise ValueError(f"{name} must have {len(values)} rows as {first} has, found {len(other)}")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def as_rows(ids: Any, name: str, mask: Any = None) -> list[Ids]:
    """Rows of a (B, T) tensor or of a list of 1-D ones; with a mask (B, T) only what stands under its ones."""
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


def without_padding(row: Ids, pad_id: int | None, eos_ids: Sequence[int]) -> Ids:
    """A prompt without padding at its sides. Where the pad id is an EOS too, only the left side's: a prompt may end in one."""
    if pad_id is None:
        return row
    real = (row != pad_id).nonzero().flatten()
    if not len(real):
        return row[:0]
    return row[int(real[0]) : None if pad_id in eos_ids else int(real[-1]) + 1]


def until_eos(row: Ids, pad_id: int | None, eos_ids: Sequence[int]) -> Ids:
    """A completion up to its first EOS and with it; one without EOS up to the padding behind it."""
    ends = torch.isin(row, torch.tensor(list(eos_ids), dtype=row.dtype)).nonzero().flatten()
    if len(ends):
        return row[: int(ends[0]) + 1]
    if pad_id is None or pad_id in eos_ids:
        return row
    real = (row != pad_id).nonzero().flatten()
    return row[: int(real[-1]) + 1 if len(real) else 0]


def fit(prompt: Ids, completion: Ids, max_length: int | None, context: int | None, where: str) -> Ids:
    """The completion as far as it fits behind its prompt; an error where not even the prompt does.

    max_length   the user's limit: completions are cut there
    context      the model's: what is longer, with no limit from the user, is an error rather than cut in silence
    """
    limit = context if max_length is None else max_length if context is None else min(max_length, context)
    if limit is None:
        return completion
    if len(prompt) >= limit:
        whose = "max_length" if max_length is not None and limit == max_length else "the model's context"
        raise ValueError(f"{where}: the prompt must be shorter than {whose}, {limit} tokens, found {len(prompt)}")
    if max_length is None and len(prompt) + len(completion) > limit:
        raise ValueError(
            f"{where}: prompt and completion must fit into the model's context of {limit} tokens, found "
            f"{len(prompt) + len(completion)}; max_length={limit} cuts completions"
        )
    return completion[: limit - len(prompt)]
