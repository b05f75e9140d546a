"""Preference losses (DPO and its variants) from hidden states and the LM head.

A pair's loss needs both whole completions, so the log-probs are computed first, by a backend of `linear_logp`.

Shapes: B pairs, T tokens, H hidden, V the vocabulary. Row i of the first half is the chosen completion of pair i, row i
of the second half its rejected one.
"""

from typing import Unpack

import torch

from strop._tensors import Count, check_device, check_floats, check_head, check_linear_logp, check_tensor
from strop.losses import PreferenceLoss, PreferenceRule, sequence_logps
from strop.losses.preference import PreferenceOptions, pairs_loss
from strop.ops.linear import LMHead
from strop.ops.linear_grpo_loss import check_reference
from strop.ops.linear_logp import BY_ROWS, head_logps
from strop.ops.registry import op_with_backends


@op_with_backends(torch=None, **BY_ROWS)
def linear_dpo_loss(
    rows,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ref_hidden: torch.Tensor | None = None,
    ref_weight: torch.Tensor | None = None,
    ref_bias: torch.Tensor | None = None,
    ref_logps: torch.Tensor | None = None,
    temperature: float = 1.0,
    num_pairs: Count | None = None,
    num_tokens: Count | None = None,
    workspace: int | None = None,
    validate: bool = False,
    **rule_options: Unpack[PreferenceOptions],
) -> PreferenceLoss:
    """Return (loss, chosen_rewards, rejected_rewards); only the reference backend allocates the logits [N, V].

    hidden            [2B, T, H], B chosen then B rejected; position t predicts ids[:, t]
    weight, bias      [V, H] and [V] of the LM head, in hidden's dtype (any under autocast); may be tied or frozen
    ids               [2B, T] int64 or int32
    completion_mask   [2B, T] tokens in the loss; the others are dropped before the first product
    ref_hidden        [2B, T, H'] of the reference with ref_weight [V, H'] and ref_bias; or
    ref_logps         [2B] its log-probs summed over each completion, or [2B, T] per token; neither if not needed
    num_pairs, num_tokens   see `strop.losses.preference_loss`
    rule_options      fields of `strop.losses.PreferenceRule`: loss_type="sigmoid", beta=0.1 and so on
    workspace         bytes of working memory; by default 60 MiB to score, 560 MiB (64 MiB on a CPU) for gradients

    returns           `PreferenceLoss`: the loss, the rewards [B] and [B], which have no gradient, and `.metrics`
    """
    rule = PreferenceRule(**rule_options)
    check_head(hidden, weight, bias)
    if hidden.ndim != 3 or hidden.shape[0] % 2:
        raise ValueError(f"hidden must have shape [2B, T, H], chosen then rejected, found {list(hidden.shape)}")
    check_tensor(completion_mask, "completion_mask")
    mask = check_linear_logp(hidden, weight, ids, bias, temperature, completion_mask, workspace, validate)
    assert mask is not None
    head = LMHead(hidden, weight, bias)
    reference = check_reference(head, ref_hidden, ref_weight, ref_bias)
    if ref_logps is not None:
        _check_ref_logps(ref_logps, ids, hidden)
    num_given = (reference is not None) + (ref_logps is not None)
    if num_given == 2 or (not num_given and rule.needs_reference):
        found = "both" if num_given else "neither"
        raise ValueError(f"exactly one of ref_hidden and ref_logps must be given, found {found}")

    logps, _ = head_logps(rows, head, ids, mask, temperature, workspace)
    if reference is not None:
        with torch.no_grad():
            ref_logps, _ = head_logps(rows, reference, ids, mask, temperature, workspace)
    if ref_logps is not None and ref_logps.ndim == 2:
        ref_logps = sequence_logps(ref_logps, mask)
    ref_chosen, ref_rejected = (None, None) if ref_logps is None else ref_logps.chunk(2)
    chosen, rejected = sequence_logps(logps, mask).chunk(2)
    chosen_lengths, rejected_lengths = mask.sum(-1).chunk(2)
    return pairs_loss(
        rule, chosen, rejected, ref_chosen, ref_rejected, chosen_lengths, rejected_lengths, num_pairs, num_tokens
    )


def _check_ref_logps(ref_logps: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor) -> None:
    check_floats(ref_logps, "ref_logps")
    check_device(ref_logps, "ref_logps", hidden, "hidden")
    if ref_logps.shape not in (ids.shape, ids.shape[:1]):
        rows, columns = ids.shape
        raise ValueError(f"ref_logps must have shape [{rows}] or [{rows}, {columns}], found {list(ref_logps.shape)}")
