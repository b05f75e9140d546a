"""The loss of a packed list of tokens by a rule, from hidden states and the LM head.

Shapes: n tokens, H hidden, V the vocabulary.
"""

import torch

from strop._tensors import check_linear_logp, check_tokens
from strop.losses import NLL, PolicyLoss
from strop.losses.policy import check_given
from strop.losses.rules import TokenRule, nll_of, tokens_loss, tokens_of
from strop.ops.head import in_dtype
from strop.ops.library import is_plain
from strop.ops.linear import LMHead, token_loss
from strop.ops.linear_logp import BY_EXACT_ROWS, head_logps
from strop.ops.policy import loss_alone
from strop.ops.registry import op_with_backends


@op_with_backends(torch=None, **BY_EXACT_ROWS)
def linear_token_loss(
    rows,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    rule: TokenRule,
    old_logps: torch.Tensor | None = None,
    ref_logps: torch.Tensor | None = None,
    advantages: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    workspace: int | None = None,
    validate: bool = False,
) -> PolicyLoss:
    """Return Σ weight·(token loss + beta·kl) over tokens; only the reference backend allocates the logits [n, V].

    hidden        [n, H] the hidden states that predict the tokens
    weight, bias  [V, H] and [V] of the LM head, in hidden's dtype (any under autocast); may be tied or frozen
    ids           [n] the tokens
    weights       [n] the weight of each token in the loss
    rule          `NLL`, or a `PolicyRule` whose token loss needs only its own row of logits (no sequence, no entropy)
    old_logps     [n] of the policy that sampled; None: the current policy
    ref_logps     [n] of the reference, for the KL
    advantages    [n]; required by a PolicyRule
    workspace     bytes of working memory; by default 560 MiB, 64 MiB on a CPU

    returns       `PolicyLoss`: three 0-d tensors, and `.metrics` (empty for NLL). Only the loss has a gradient
    """
    check_linear_logp(hidden, weight, ids, bias, temperature, None, workspace, validate)
    check_tokens(ids, hidden, weights=weights, old_logps=old_logps, ref_logps=ref_logps, advantages=advantages)
    check_given(rule, ref_logps, advantages)
    head = LMHead(hidden, weight, bias)
    if rows is not None:
        return token_loss(
            head, ids, weights, rule, rows=rows, old_logps_N=old_logps, ref_logps_N=ref_logps,
            advantages_N=advantages, temperature=float(temperature), workspace=workspace,
            in_graph=not is_plain(hidden),
        )  # fmt: skip
    logps_n, _ = head_logps(rows, head, ids, None, temperature, workspace)
    weights, old_logps, ref_logps, advantages = in_dtype(logps_n.dtype, weights, old_logps, ref_logps, advantages)
    if isinstance(rule, NLL):
        return nll_of(logps_n, weights)
    assert advantages is not None
    return loss_alone(tokens_loss(rule, tokens_of(rule, logps_n, old_logps, advantages), weights, ref_logps))
