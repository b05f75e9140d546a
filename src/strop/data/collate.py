"""Training batches: right-padded, or several sequences packed into a row.

B rows (of a packed batch: bins), T tokens. A row is what a model is trained on: the ids of a prompt, whose tokens never
count, and of a completion, whose tokens do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from strop.primitives import collate_packed, pack_sequences

Row = tuple[Any, Any]  # prompt_ids, completion_ids: 1-D integers, as a tensor, an array or a list


@dataclass
class SequenceBatch:
    """Right-padded rows. For a causal model padding behind a row changes nothing before it, and positions count from 0.

    completion_mask_BT is 1 where a token counts. The first token of a sequence never does: nothing before it predicts it.
    position_ids_BT and sequence_ids_BT are only there for packed rows: positions count from 0 in each sequence, sequence
    ids say which row of the list a token is from, −1 on padding; tokens attend only within their sequence.
    places_N are those of the tokens that count among all B·T: told here, where finding them waits for no GPU.
    """

    input_ids_BT: torch.Tensor
    attention_mask_BT: torch.Tensor
    completion_mask_BT: torch.Tensor
    position_ids_BT: torch.Tensor | None = None
    sequence_ids_BT: torch.Tensor | None = None
    places_N: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.input_ids_BT)

    @property
    def is_packed(self) -> bool:
        return self.sequence_ids_BT is not None

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return int(self.attention_mask_BT.sum())

    @property
    def num_completion_tokens(self) -> int:
        """Tokens that count: what a token mean divides by."""
        return int(self.completion_mask_BT.sum())

    def to(self, device: torch.device | str) -> "SequenceBatch":
        moved = {name: on_device(tensor, device) for name, tensor in vars(self).items() if tensor is not None}
        return SequenceBatch(**moved)


def on_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """`tensor.to(device)` that does not wait until a GPU has done all its work, as a copy from ordinary memory does."""
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def collate(rows: Sequence[Row], pad_id: int = 0, device: torch.device | str = "cpu") -> SequenceBatch:
    """Rows of (prompt_ids, completion_ids) as one right-padded batch."""
    prompts, completions = _checked(rows)
    num_prompt_B = torch.tensor([p.numel() for p in prompts])
    num_tokens_B = num_prompt_B + torch.tensor([c.numel() for c in completions])
    positions_T = torch.arange(int(num_tokens_B.max()))
    attention_mask_BT = positions_T < num_tokens_B[:, None]
    input_ids_BT = torch.full(attention_mask_BT.shape, pad_id)
    input_ids_BT[attention_mask_BT] = torch.cat([ids for row in zip(prompts, completions, strict=True) for ids in row])
    completion_mask_BT = attention_mask_BT & (positions_T >= num_prompt_B.clamp(min=1)[:, None])
    places_N = completion_mask_BT.flatten().nonzero()[:, 0]
    return SequenceBatch(input_ids_BT, attention_mask_BT, completion_mask_BT, places_N=places_N).to(device)


def collate_into_bins(
    rows: Sequence[Row], max_length: int, pad_id: int = 0, device: torch.device | str = "cpu"
) -> SequenceBatch:
    """Rows packed into as few batch rows of at most max_length tokens as first-fit decreasing finds."""
    prompts, completions = _checked(rows)
    sequences = [torch.cat(row) for row in zip(prompts, completions, strict=True)]
    packed = collate_packed(sequences, pack_sequences(sequences, max_length), pad_id=pad_id)
    sequence_ids_BT, position_ids_BT = packed["sequence_ids"], packed["position_ids"]
    attention_mask_BT = sequence_ids_BT >= 0
    num_prompt_N = torch.tensor([max(len(p), 1) for p in prompts])
    completion_mask_BT = attention_mask_BT & (position_ids_BT >= num_prompt_N[sequence_ids_BT.clamp(min=0)])
    places_N = completion_mask_BT.flatten().nonzero()[:, 0]
    masks = attention_mask_BT, completion_mask_BT
    return SequenceBatch(packed["input_ids"], *masks, position_ids_BT, sequence_ids_BT, places_N).to(device)


def _checked(rows: Sequence[Row]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The prompts and the completions as ids on the CPU."""
    if len(rows) == 0:
        raise ValueError("rows must hold at least one row, found none")
    prompts, completions = [], []
    for i, row in enumerate(rows):
        if len(row) != 2:
            raise ValueError(f"rows[{i}] must be (prompt_ids, completion_ids), found {len(row)} things")
        prompt = as_ids(row[0], f"rows[{i}]: prompt_ids")
        completion = as_ids(row[1], f"rows[{i}]: completion_ids")
        if prompt.numel() + completion.numel() == 0:
            raise ValueError(f"rows[{i}] must hold at least one token, found an empty prompt and an empty completion")
        prompts.append(prompt)
        completions.append(completion)
    return prompts, completions


def as_ids(ids: Any, name: str) -> torch.Tensor:
    """1-D int64 on the CPU from a tensor, an array or a list of token ids."""
    if isinstance(ids, torch.Tensor) and ids.dtype == torch.int64 and ids.ndim == 1 and ids.device.type == "cpu":
        return ids  # as the ids of a rollout are, many times a step
    try:
        tensor = ids.detach() if isinstance(ids, torch.Tensor) else torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError):  # text, None, rows of unequal lengths
        raise TypeError(f"{name} must hold token ids, found {ids!r:.60}") from None
    if tensor.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, found shape {list(tensor.shape)}")
    if tensor.numel() and (tensor.is_floating_point() or tensor.dtype == torch.bool):  # an empty list is a float tensor
        raise TypeError(f"{name} must hold integers, found {tensor.dtype}")
    return tensor.to("cpu", torch.int64)
