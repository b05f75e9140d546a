"""Several sequences in a row of a batch, each attending only to itself: fewer padded tokens, the same log-probs.

B rows, T tokens, N sequences.
"""

from collections.abc import Sequence
from typing import Any

import torch

from strop.data.collate import SequenceBatch, collate, collate_into_bins
from strop.losses import sequence_logps
from strop.models import Policy


def collate_rows(rows: Sequence[Any], policy: Policy, packing: bool, max_length: int | None) -> SequenceBatch:
    """Rows of (prompt_ids, completion_ids), padded or packed into rows of at most max_length tokens (or the context)."""
    if not packing:
        return collate(rows, policy.pad_id, policy.device)
    longest = max(len(prompt) + len(completion) for prompt, completion in rows)
    return collate_into_bins(rows, max_length or policy.max_length or longest, policy.pad_id, policy.device)


def sums_of_sequences(
    logps_BT: torch.Tensor, batch: SequenceBatch, num_sequences: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logps_N, lengths_N): each sequence's log-prob and number of tokens that count, in the order of the list."""
    mask_BT = batch.completion_mask_BT.bool()
    if not batch.is_packed:
        return sequence_logps(logps_BT, mask_BT), mask_BT.sum(-1)
    assert batch.sequence_ids_BT is not None
    owners = batch.sequence_ids_BT[mask_BT]
    logps_N = logps_BT.new_zeros(num_sequences).index_add(0, owners, logps_BT[mask_BT])
    return logps_N, torch.bincount(owners, minlength=num_sequences)


@torch.no_grad()
def check_packing(policy: Policy) -> None:
    """Two sequences in a row must score as they do apart: some models see only one causal mask and would leak."""
    if policy.kind != "hf":
        raise ValueError(f"packing must be False but for Hugging Face models, found a {type(policy.model).__name__}")
    ids = torch.arange(1, 9)
    rows = [(ids[:2], ids[2:5]), (ids[3:5], ids[5:8])]
    apart = policy.logps(collate(rows, device=policy.device)).sum()
    together = policy.logps(collate_into_bins(rows, 10, device=policy.device)).sum()
    half = next(policy.model.parameters()).dtype in (torch.bfloat16, torch.float16)
    if not torch.allclose(apart, together, rtol=1e-2 if half else 1e-4):
        raise ValueError(
            f"packing must be False: {type(policy.model).__name__} lets the sequences of a row see one another "
            f"(log-probs {together.item():.6g} packed, {apart.item():.6g} apart)"
        )
