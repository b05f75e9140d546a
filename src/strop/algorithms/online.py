"""What the algorithms that generate share: prompts in every form a user has them, and what reward functions are given."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from strop.algorithms.inputs import as_rows, declared_pad_id, fit, without_padding
from strop.data.formats import is_conversation
from strop.data.tokenize import encode_prompt, row_named
from strop.models import Policy
from strop.rollout import Rollout, checked_prompts


@dataclass
class Prompt:
    """ids for the model; `shown` and the columns of the dataset's row for reward functions."""

    ids: torch.Tensor
    shown: Any
    columns: dict[str, Any] = field(default_factory=dict)


def as_prompts(
    prompts: Any,
    policy: Policy,
    *,
    mask: Any = None,
    pad_id: int | None = None,
    columns: Mapping[str, Any] | None = None,
    name: str = "prompts",
) -> list[Prompt]:
    """A batch of prompts: ids (B, P) or lists of ids; with a tokenizer texts or conversations; or rows with a "prompt".

    mask      (B, P), 0 at padding; without it padding of ids is what equals the pad id at their sides
    pad_id    None is what tokenizer or model declare
    columns   further columns for reward functions, each with one entry a prompt
    name      of the batch or dataset in errors
    """
    if isinstance(prompts, str) or (is_conversation(prompts) and "role" in prompts[0]):
        raise TypeError(
            f"prompts must be a batch, found a single {'text' if isinstance(prompts, str) else 'conversation'}"
        )
    if isinstance(prompts, Mapping) and "input_ids" in prompts:  # what a tokenizer returns
        mask = prompts.get("attention_mask") if mask is None else mask
        prompts = prompts["input_ids"]
    elif isinstance(prompts, Mapping):  # rows as columns
        if "prompt" not in prompts:
            raise ValueError(
                f"prompts must have 'prompt' or 'input_ids', found {', '.join(map(str, prompts)) or 'none'}"
            )
        columns = {name: values for name, values in prompts.items() if name not in RESERVED} | dict(columns or {})
        prompts = prompts["prompt"]
    if (
        hasattr(prompts, "__len__")
        and not isinstance(prompts, torch.Tensor)
        and len(prompts)
        and _is_one_prompt_of_many(prompts[0])
    ):
        if mask is not None:
            raise ValueError("prompt_mask must be None for prompts that are not ids, found one: texts have no padding")
        found = [_of_row(row, policy, f"{name}[{i}]") for i, row in enumerate(prompts)]
    else:
        found = _of_ids(prompts, policy, mask, declared_pad_id(policy) if pad_id is None else pad_id)
    for name, values in (columns or {}).items():
        if name in RESERVED:
            raise ValueError(f"{name} must not be a column: reward functions get their own under this name")
        if isinstance(values, str) or not hasattr(values, "__len__") or len(values) != len(found):
            size = type(values).__name__ if isinstance(values, str) or not hasattr(values, "__len__") else len(values)
            raise ValueError(f"{name} must have one entry for each of the {len(found)} prompts, found {size}")
        for prompt, value in zip(found, values, strict=True):
            prompt.columns[name] = value
    return found


def prompts_of_dataset(rows: Sequence[Any], trainer: Any, name: str, max_length: int | None = None) -> list[Prompt]:
    """A dataset's prompts, each known to leave room for a completion before the first one is sampled."""
    from strop.data.formats import check_rows

    check_rows(rows, ["prompt_only"], where=name, what=trainer.name)
    prompts = as_prompts(list(rows), trainer.policy, pad_id=trainer.config.pad_id, name=name)
    names = dict.fromkeys(column for prompt in prompts for column in prompt.columns)
    for prompt in prompts:  # a column that some rows lack is None there, whichever rows share a batch
        prompt.columns = {column: prompt.columns.get(column) for column in names}
    checked_prompts(trainer.policy, [prompt.ids for prompt in prompts], trainer.config.sampling, name)
    return below(max_length, prompts, name)


def below(max_length: int | None, prompts: list[Prompt], name: str) -> list[Prompt]:
    """The prompts, none of which fills max_length alone."""
    for i, prompt in enumerate(prompts):
        fit(prompt.ids, prompt.ids[:0], max_length, None, f"{name}[{i}]")
    return prompts


def _is_one_prompt_of_many(first: Any) -> bool:
    return isinstance(first, (str, Mapping)) or is_conversation(first)


def _of_row(row: Any, policy: Policy, name: str) -> Prompt:
    """A text, a conversation, or a row of a dataset."""
    columns: dict[str, Any] = {}
    prompt = row
    if isinstance(row, Mapping):
        if "prompt" not in row:
            raise ValueError(f"{name} must have a column 'prompt', found {', '.join(map(str, row)) or 'none'}")
        if (prompt := row["prompt"]) is None:
            raise TypeError(f"{name}['prompt'] must be a text, a list of messages or token ids, found null")
        columns = {column: value for column, value in row.items() if column not in RESERVED}
    with row_named(name):
        ids = torch.tensor(encode_prompt(prompt, policy.tokenizer, row if isinstance(row, Mapping) else None)).long()
    if not len(ids):
        raise ValueError(f"{name} must hold at least one token, found none in {prompt!r:.60}")
    is_ids = not isinstance(prompt, str) and not is_conversation(prompt)
    return Prompt(ids, shown_ids(ids, policy) if is_ids else prompt, columns)


def _of_ids(prompts: Any, policy: Policy, mask: Any, pad_id: int | None) -> list[Prompt]:
    rows = as_rows(prompts, "prompts", mask)
    if mask is None:
        rows = [without_padding(row, pad_id, policy.eos_ids) for row in rows]
    for index, row in enumerate(rows):
        if not len(row):
            raise ValueError(f"prompts[{index}] must hold at least one token besides padding, found none")
    return [Prompt(row, shown_ids(row, policy)) for row in rows]


RESERVED = ("prompt", "prompts", "completions", "completion_ids", "prompt_ids")  # what reward functions get from here


def shown_ids(ids: torch.Tensor, policy: Policy) -> Any:
    """Ids as reward functions see them: text with a tokenizer, else as they are."""
    if policy.tokenizer is None:
        return ids
    return policy.tokenizer.decode(ids.tolist(), skip_special_tokens=True)


def reward_rows(prompts: Sequence[Prompt], rollout: Rollout, policy: Policy) -> dict[str, list[Any]]:
    """The columns for reward functions, one entry a completion; `prompts` are already one a completion.

    Ids are copies: a function that changes them in place does not change what is trained on.
    """
    given = {
        "completions": [shown_ids(ids, policy) for ids in rollout.completion_ids],
        "prompts": [prompt.shown for prompt in prompts],
        "completion_ids": rollout.completion_ids,
        "prompt_ids": rollout.prompt_ids,
    }
    rows: dict[str, list[Any]] = {
        name: [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
        for name, values in given.items()
    }
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    return rows | {name: [prompt.columns.get(name) for prompt in prompts] for name in names}


def repeated(prompts: Sequence[Prompt], num_samples: int) -> list[Prompt]:
    return [prompt for prompt in prompts for _ in range(num_samples)]


def seed_of(*parts: Any) -> int:
    """A seed from the run's seed, the step and whatever else: a resumed run draws what the other would have."""
    return random.Random("/".join(map(str, parts))).getrandbits(62)


def sample_table(rows: Mapping[str, Sequence[Any]], **columns: Sequence[Any]) -> list[dict[str, Any]]:
    """For `Trainer.samples`: prompt, completion and what else is known of each. Ids as lists, which JSON and tables show."""
    prompts, completions = (
        [value.tolist() if isinstance(value, torch.Tensor) else value for value in rows[name]]
        for name in ("prompts", "completions")
    )
    pairs = zip(prompts, completions, strict=True)
    return [
        {"prompt": prompt, "completion": completion, **{name: values[i] for name, values in columns.items()}}
        for i, (prompt, completion) in enumerate(pairs)
    ]


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    lengths = [len(ids) for ids in rollout.completion_ids]
    return {
        "completion/length": sum(lengths) / len(lengths),
        "completion/truncated_fraction": rollout.finish_reasons.count("length") / len(lengths),
    }
