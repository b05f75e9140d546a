"""Rows of SFT, DPO, KTO and RewardModel as trajectories: prompt and completion, or a pair of them."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from strop._types import Array, Json, Texts, Tokenizer
from strop.data.ahead import PreparedAhead
from strop.data.batch import LEAST_SHARED, Trajectory, num_equal
from strop.data.formats import Prepared, check_rows, detect_format, load_rows, with_prompt
from strop.data.inputs import Ids, Padding, as_dicts, completion_rows, fit, is_written, prompt_rows
from strop.data.streams import Streamed
from strop.data.tokenize import LossMask, encode_preferences

Pair = tuple[Trajectory, Trajectory]  # chosen, rejected; in OnlineDPO first and second, before it is known


@dataclass
class Limits:
    """The limits of every trajectory. Ids are arrays or tensors.

    check_ids    raises if an id is not in the model's vocabulary
    context      the most tokens the model reads; None is no limit
    max_length   the user's limit: completions are cut there; None cuts nothing
    """

    check_ids: Callable[[Ids, str], None]
    context: int | None
    max_length: int | None
    _highest: int = -1  # the highest id checked so far: ids below it are valid

    def check(self, ids: Ids, where: str) -> None:
        """Raise a ValueError if an id is not in the model's vocabulary."""
        if len(ids) and (ids.min() < 0 or ids.max() > self._highest):
            self.check_ids(ids, where)
            self._highest = int(ids.max())

    def trajectory(
        self, prompt: Ids, completion: Ids, where: str, loss_mask: LossMask | None = None, **known: Any
    ) -> Trajectory:
        """Return prompt and completion as a trajectory, cut to the limits."""
        fitted = fit(prompt, completion, self.max_length, self.context, where)
        ids = np.concatenate([prompt, fitted])
        trained = np.ones(len(ids), dtype=bool)
        trained[: max(len(prompt), 1)] = False  # nothing predicts the first token
        if loss_mask is not None:
            trained[len(prompt) :] &= loss_mask[: len(fitted)]
        return Trajectory(torch.from_numpy(ids), torch.from_numpy(trained), num_prompt=len(prompt), **known)

    def pair(
        self, prompt: Ids, chosen: Ids, rejected: Ids, where: str,
        loss_masks: tuple[LossMask | None, LossMask | None] = (None, None),
    ) -> Pair:  # fmt: skip
        """Return a trajectory for each completion of the prompt; raise if prompt or a completion is empty or too long."""
        if not len(prompt):
            raise ValueError(f"{where}: the prompt must have at least one token, found none")
        self.check(prompt, f"{where}: the prompt")
        trajectories = []
        for name, completion, loss_mask in zip(("chosen", "rejected"), (chosen, rejected), loss_masks, strict=True):
            if not len(completion):
                raise ValueError(f"{where}: {name} must have at least one token, found none")
            self.check(completion, f"{where}: {name}")
            trajectories.append(self.trajectory(prompt, completion, f"{where}, {name}", loss_mask))
        return trajectories[0], trajectories[1]


def as_array(ids: Sequence[int]) -> Any:
    """Return the ids as an int64 array: it is faster to make than a tensor and serves the same here."""
    return np.array(ids, dtype=np.int64)


def pairs_of_rows(rows: Sequence[Any], tokenizer: Tokenizer | None, limits: Limits, name: str) -> list[Pair]:
    """Return the pairs of a dataset's rows; errors call them name[0] and so on."""
    pairs = []
    for i, (prompt, chosen, rejected) in enumerate(encode_preferences(rows, tokenizer, name)):
        ids = [as_array(part) for part in (prompt, chosen[0], rejected[0])]
        pairs.append(limits.pair(ids[0], ids[1], ids[2], f"{name}[{i}]", (chosen[1], rejected[1])))
    return pairs


def pairs_of_columns(
    prompt: Texts,
    chosen: Texts,
    rejected: Texts,
    prompt_mask: Array | None,
    tokenizer: Tokenizer | None,
    padding: Padding,
    limits: Limits,
) -> list[Pair]:
    """Return the pairs from the arguments of `train_step`: ids, or with a tokenizer texts or conversations."""
    if is_written(prompt, "prompt", prompt_mask):
        rows = as_dicts({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        check_rows(rows, ["preference"], where="pairs", what="train_step")
        return pairs_of_rows(rows, tokenizer, limits, "pairs")
    prompts = prompt_rows(prompt, "prompt", prompt_mask, *padding)
    better = completion_rows(chosen, "chosen", len(prompts), *padding)
    worse = completion_rows(rejected, "rejected", len(prompts), *padding)
    return [limits.pair(*ids, f"pair {i}") for i, ids in enumerate(zip(prompts, better, worse, strict=True))]


def as_label(label: object, where: str) -> bool:
    """Return KTO's label of a completion as a bool."""
    label = label.item() if isinstance(label, np.generic) else label
    if not isinstance(label, (bool, int)) or label not in (True, False):
        raise TypeError(f"{where}: label must be true or false, found {label!r}")
    return bool(label)


def unpaired_rows(dataset: object) -> Any:
    """Return the dataset. Turn each pair into two labelled completions: chosen with true, rejected with false."""
    if isinstance(dataset, (Prepared, PreparedAhead)) or not len(rows := load_rows(dataset)):
        return dataset
    if detect_format(rows[0]) != "preference":
        return rows

    pair = functools.lru_cache(maxsize=1)(lambda i: with_prompt(dict(rows[i])))  # a pass over all reads each pair once

    def get(i: int) -> Json:
        name = ("chosen", "rejected")[i % 2]
        row = pair(i // 2)
        others = {column: value for column, value in row.items() if column not in ("chosen", "rejected")}
        return {**others, "completion": row[name], "label": name == "chosen"}

    place = rows.place if isinstance(rows, Streamed) else None
    return Streamed(
        2 * len(rows), get, on_disk=isinstance(rows, Streamed) and rows.on_disk,
        place=None if place is None else lambda i: f"{('chosen', 'rejected')[i % 2]}, {place(i // 2)}",
        files=rows.files if isinstance(rows, Streamed) else (),
    )  # fmt: skip


def num_tokens_of(pairs: Sequence[Pair], shared: bool = False) -> list[int]:
    """Return the number of tokens of each pair: both completions, each with its prompt, or with `shared` with one for both."""
    twice = [num_equal(*(one.ids_T.numpy() for one in pair)) if shared else 0 for pair in pairs]
    return [
        len(chosen) + len(rejected) - (num if num >= LEAST_SHARED else 0)
        for (chosen, rejected), num in zip(pairs, twice, strict=True)
    ]
