"""Preference losses (DPO and its relatives) from hidden states and the LM head.

Shapes: B pairs, T tokens, H hidden, V the vocabulary. Row i of the first half is the chosen completion of pair i, row i
of the second half its rejected one.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from strop._tensors import Count, GivenHead, RefHead, check_device, check_floats, check_head, check_tensor
from strop.losses import PreferenceLoss, PreferenceRule, sequence_logps
from strop.losses.preference import pairs_loss
from strop.ops.linear_grpo_loss.reference import check_reference
from strop.ops.linear_logp.reference import check_linear_logp, linear_logp
from strop.ops.registry import op


@op
def linear_dpo_loss(
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
    **rule_options: Any,
) -> PreferenceLoss:
    """loss, chosen_rewards, rejected_rewards = linear_dpo_loss(…), without ever holding [N, V] (but in this reference).

    hidden            [2B, T, H], B chosen then B rejected; position t predicts ids[:, t]
    weight, bias      [V, H] and [V] of the LM head, of hidden's dtype (any under autocast); tied or frozen heads too
    ids               [2B, T] int64 or int32
    completion_mask   [2B, T] tokens that count; the others are dropped before the first product
    ref_hidden        [2B, T, H'] of the reference with ref_weight [V, H'] and ref_bias; or
    ref_logps         [2B] its log-probs summed over each completion, or [2B, T] per token; neither for a rule without one
    num_pairs, num_tokens   see `strop.losses.preference_loss`
    rule_options      fields of `strop.losses.PreferenceRule`: loss_type="sigmoid", beta=0.1 and so on
    workspace         bytes of working memory; by default 60 MiB to score, 560 MiB (64 MiB on a CPU) for gradients

    returns           `PreferenceLoss`: the loss, the rewards [B] and [B] without gradient, and `.metrics`
    """
    head, ref = (hidden, weight, bias), (ref_hidden, ref_weight, ref_bias)
    loss_options = {"num_pairs": num_pairs, "num_tokens": num_tokens, **rule_options}
    score_options = {"temperature": temperature, "workspace": workspace, "validate": validate}
    return composed(linear_logp.reference, head, ref, ids, completion_mask, ref_logps, loss_options, score_options)


def composed(
    linear_logp_of: Callable[..., torch.Tensor],
    head: GivenHead,
    ref: RefHead,
    ids: torch.Tensor,
    completion_mask: torch.Tensor,
    ref_logps: torch.Tensor | None,
    loss_options: dict[str, Any],
    score_options: dict[str, Any],
) -> PreferenceLoss:
    """By log-probs; linear_logp_of: one backend of `linear_logp`."""
    counts = {name: loss_options.pop(name, None) for name in ("num_pairs", "num_tokens")}
    rule = PreferenceRule(**loss_options)
    mask = _check(rule, head, ref, ids, completion_mask, ref_logps, score_options)
    hidden, weight, bias = head
    score_options = {**score_options, "completion_mask": mask, "validate": False}
    sums = sequence_logps(linear_logp_of(hidden, weight, ids, bias=bias, **score_options), mask)
    if ref[0] is not None:
        with torch.no_grad():
            ref_logps = linear_logp_of(ref[0], ref[1], ids, bias=ref[2], **score_options)
    if ref_logps is not None and ref_logps.ndim == 2:
        ref_logps = sequence_logps(ref_logps, mask)
    refs = (None, None) if ref_logps is None else ref_logps.chunk(2)
    return pairs_loss(rule, *sums.chunk(2), *refs, *mask.sum(-1).chunk(2), **counts)


def _check(
    rule: PreferenceRule,
    head: GivenHead,
    ref: RefHead,
    ids: torch.Tensor,
    completion_mask: torch.Tensor,
    ref_logps: torch.Tensor | None,
    score_options: Mapping[str, Any],
) -> torch.Tensor:
    hidden, weight, bias = head
    check_head(hidden, weight, bias)
    if hidden.ndim != 3 or hidden.shape[0] % 2:
        raise ValueError(f"hidden must have shape [2B, T, H], chosen then rejected, found {list(hidden.shape)}")
    check_tensor(completion_mask, "completion_mask")
    temperature, workspace, validate = (score_options[name] for name in ("temperature", "workspace", "validate"))
    mask = check_linear_logp(hidden, weight, ids, bias, temperature, completion_mask, workspace, validate)
    assert mask is not None
    check_reference(head, ref)
    num_given = (ref[0] is not None) + (ref_logps is not None)
    if num_given == 2 or (not num_given and rule.needs_reference):
        found = "both" if num_given else "neither"
        raise ValueError(f"exactly one of ref_hidden and ref_logps must be given, found {found}")
    if ref_logps is not None:
        check_floats(ref_logps, "ref_logps")
        check_device(ref_logps, "ref_logps", hidden, "hidden")
        if ref_logps.shape not in (ids.shape, ids.shape[:1]):
            rows, columns = ids.shape
            raise ValueError(
                f"ref_logps must have shape [{rows}] or [{rows}, {columns}], found {list(ref_logps.shape)}"
            )
    return mask
