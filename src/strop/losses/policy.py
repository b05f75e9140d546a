"""Policy-gradient losses as pure functions of log-probs (GRPO and its variants, GSPO, GMPO, CISPO, SAPO, VESPO, RLOO).

A loss consists of a formula for one token (`token_policy_loss`) and a fixed weight for each token (`token_weights`):

    policy_loss = Σ weights · token_loss        loss = policy_loss + beta·kl − entropy_coef·entropy

kl and entropy are reduced with the same weights. The fused kernels compute the same formulas and weights.

    loss_type   token                                       weight of an unmasked token
    grpo        −min(r·A, clip(r)·A)                        1 / (length of its sequence · sequences)    arXiv 2402.03300
    bnpo        the same                                    1 / tokens
    dapo        the same                                    1 / tokens of the whole update              arXiv 2503.14476
    dr_grpo     the same                                    1 / (max_completion_length · sequences)     arXiv 2503.20783
    luspo       the same                                    1 / sequences                               arXiv 2602.05261
    cispo       −stop_gradient(min(r, high))·A·log π        1 / tokens of the whole update              arXiv 2506.13585
    sapo        −4/τ·σ(τ·(r − 1))·A, τ by the sign of A     1 / (length of its sequence · sequences)    arXiv 2511.20347
    vespo       −stop_gradient(φ(Π r))·A·log π              1 / tokens of the whole update              arXiv 2602.10693

double_sided, dppo_tv, dppo_kl, clip_cov and kl_cov are in `strop.config.policy_losses`; all weigh as dapo.

r is the ratio π/π_old of the token. With importance_level="sequence" it is the geometric mean over the token's sequence
(GSPO, arXiv 2507.18071); with "geometric" the tokens' ratios are clipped before that mean (GMPO, arXiv 2507.20673).
Π r is the product over the sequence, φ(w) = w^k·exp(λ − λw).

A `PolicyRule` holds these choices. The formulas take packed tokens, [N] each. The public functions take `[B, T]` with a
mask and pack it first.

Shapes: B sequences, T tokens; N tokens of all sequences.
"""

from typing import Unpack

import torch

from strop._checks import check_choice
from strop._tensors import (
    Count,
    as_completion_mask,
    as_divisor,
    check_device,
    check_floats,
    check_like,
    check_shape,
    check_total,
    in_float,
)
from strop.config.policy_losses import KL_ESTIMATORS, ClipEps, PolicyRule
from strop.losses.rules import (
    NLL,
    Metrics,
    PolicyLoss,
    PolicyOptions,
    TokenRule,
    Tokens,
    kl_of,
    token_loss,
    tokens_loss,
    tokens_metrics,
    tokens_of,
)


def policy_loss(
    logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    ref_logps: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    marked: torch.Tensor | None = None,
    num_tokens: Count | None = None,
    num_sequences: Count | None = None,
    **rule_options: Unpack[PolicyOptions],
) -> PolicyLoss:
    """Return the loss of a batch, or a micro-batch's share of it.

    logps             [B, T] of the policy, any floating dtype; computed in float32 (float64 for float64)
    old_logps         [B, T] of the policy that sampled the tokens; None: the current policy, so the ratio is 1
    advantages        [B], or [B, T] for one per token
    completion_mask   [B, T] tokens in the loss (None: all); other tokens affect neither value nor gradient
    ref_logps         [B, T] of the reference; if given, the kl is computed
    entropy           [B, T] entropies, for the bonus entropy_coef·entropy and the metrics
    marked            [B, T] bool, of `covariance_marks`, for clip_cov and kl_cov
    num_tokens, num_sequences   see `token_weights`
    rule_options      fields of `PolicyRule`: loss_type="grpo", clip_eps=0.2 and so on; beta needs ref_logps,
                      entropy_coef needs entropy

    returns           (loss, policy_loss, kl) with `.metrics`; loss = policy_loss + beta·kl − entropy_coef·entropy

    The gradient goes to logps (and entropy), never to old_logps, ref_logps or advantages.
    """
    return rows_loss(
        PolicyRule(**rule_options), logps, old_logps, advantages, completion_mask, ref_logps=ref_logps, entropy=entropy,
        marked=marked, num_tokens=num_tokens, num_sequences=num_sequences,
    )  # fmt: skip


def rows_loss(
    rule: PolicyRule,
    logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor | None,
    *,
    ref_logps: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    marked: torch.Tensor | None = None,
    num_tokens: Count | None = None,
    num_sequences: Count | None = None,
) -> PolicyLoss:
    """Return `policy_loss` for a given rule."""
    for needed, name, coefficient in ((ref_logps, "ref_logps", "beta"), (entropy, "entropy", "entropy_coef")):
        if needed is None and (value := getattr(rule, coefficient)):
            raise ValueError(
                f"{name} must be given where {coefficient} is above 0, found None with {coefficient}={value}"
            )
    if rule.type.marks and marked is None:
        raise ValueError(f"marked must be given for {rule.loss_type!r}, which policy_loss takes, found None")
    tokens = _tokens_of_rows(rule, logps, old_logps, advantages, completion_mask, marked)
    assert tokens.mask_N is not None
    mask_BT = tokens.mask_N.view(logps.shape)
    weights_BT = weights_of(rule, mask_BT, num_tokens, num_sequences, tokens.logps_N.dtype)
    ref_N = None if ref_logps is None else _like_tokens(ref_logps, logps, tokens, "ref_logps").detach()
    entropy_N = None if entropy is None else _like_tokens(entropy, logps, tokens, "entropy")
    return tokens_loss(rule, tokens, weights_BT.reshape(-1), ref_N, entropy_N)


def token_policy_loss(
    logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    *,
    completion_mask: torch.Tensor | None = None,
    **rule_options: Unpack[PolicyOptions],
) -> torch.Tensor:
    """Return the unweighted loss of each token, [B, T]; arguments as in `policy_loss`.

    completion_mask   where it is 0 the result is 0 without gradient; None: no token is masked
    rule_options      fields of `PolicyRule`

    Gradient with respect to logp: −A·r if the token's ratio r is not clipped, else 0. With importance_level="sequence"
    each token of a sequence gets the mean gradient. cispo: −A·min(r, high), clipped or not. sapo: −4·A·r·σ·(1 − σ).
    vespo: −A·φ.
    """
    rule = PolicyRule(**rule_options)
    tokens = _tokens_of_rows(rule, logps, old_logps, advantages, completion_mask)
    return token_loss(rule, tokens).view(logps.shape)


def token_weights(
    completion_mask: torch.Tensor,
    loss_type: str,
    *,
    max_completion_length: int | None = None,
    num_tokens: Count | None = None,
    num_sequences: Count | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the weight of each token, [B, T], 0 where the mask is 0: loss = Σ weights · token_loss.

    max_completion_length   the run's limit, for dr_grpo
    num_tokens              unmasked tokens in the whole batch, of which this may be a part (bnpo, dapo, cispo, vespo)
    num_sequences           sequences in the whole batch (grpo, dr_grpo, luspo, sapo)

    Without these counts the mask is taken as the whole batch. With them the losses of micro-batches add up to the loss
    of the batch. They may be 0-d tensors on a GPU; the CPU does not wait for them.
    """
    if isinstance(completion_mask, torch.Tensor) and completion_mask.ndim != 2:
        raise ValueError(f"completion_mask must have shape [B, T], found {list(completion_mask.shape)}")
    mask_BT = as_completion_mask(completion_mask, completion_mask, "completion_mask")
    rule = PolicyRule(loss_type=loss_type, max_completion_length=max_completion_length)
    return weights_of(rule, mask_BT, num_tokens, num_sequences, dtype)


def weights_of(
    rule: PolicyRule, mask_BT: torch.Tensor, num_tokens: Count | None, num_sequences: Count | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return `token_weights` for a given rule."""
    count, tokens = weight_counts(mask_BT, rule, num_tokens, num_sequences)
    active_BT = mask_BT.to(dtype)
    per_token_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1).to(dtype) if tokens is None else tokens
    return active_BT / (as_divisor(count, "count", active_BT) * per_token_B1)


def weight_counts(
    mask_BT: torch.Tensor, rule: PolicyRule, num_tokens: Count | None, num_sequences: Count | None
) -> tuple[Count, int | None]:
    """Return (count, tokens) for the weight 1/(count·tokens); tokens None: the length of the token's sequence."""
    if rule.type.weight == "tokens":
        count = mask_BT.sum() if num_tokens is None else check_total(num_tokens, "num_tokens")
    else:
        count = mask_BT.shape[0] if num_sequences is None else check_total(num_sequences, "num_sequences")
    return rule.weight_divisors(count, count)


def rloo_loss(
    logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    clip_eps: ClipEps = 0.2,
    num_sequences: Count | None = None,
) -> PolicyLoss:
    """Return the loss of REINFORCE leave-one-out (arXiv 2402.14740), with one clipped ratio per completion.

        r = exp(Σ logp − Σ old)      loss = mean over sequences of −min(r·A, clip(r)·A)

    logps             [B, T]
    old_logps         [B] sums over the unmasked tokens, or [B, T] per token; None: the current policy
    advantages        [B], as returned by `rloo_advantages`
    completion_mask   [B, T]; a fully masked sequence adds 0
    num_sequences     sequences in the whole batch, of which this may be a part

    returns           (loss, policy_loss, kl) with `.metrics`; the kl is 0, because RLOO subtracts it from the rewards
    """
    mask_BT = _check_tokens(logps, completion_mask)
    mask_B1 = mask_BT.any(-1, keepdim=True)
    logps_B1 = _active(logps, mask_BT).sum(-1, keepdim=True)
    old_B1 = None
    if old_logps is not None:
        check_floats(old_logps, "old_logps")
        if old_logps.ndim == 1:
            check_shape(old_logps, "old_logps", logps.shape[:1])
            old_B1 = in_float(old_logps)[:, None]
        else:
            check_like(old_logps, "old_logps", logps, "logps")
            old_B1 = _active(old_logps, mask_BT).sum(-1, keepdim=True)
    check_floats(advantages, "advantages")
    check_shape(advantages, "advantages", logps.shape[:1])
    # one "token" per sequence: with length 1, grpo's weight is the mean over sequences
    return policy_loss(logps_B1, old_B1, advantages, mask_B1, clip_eps=clip_eps, num_sequences=num_sequences)


def kl_estimate(logps: torch.Tensor, ref_logps: torch.Tensor, estimator: str = "k3") -> torch.Tensor:
    """Return an estimate of KL(policy ‖ reference) for each sampled token (Schulman 2020, "Approximating KL").

    With d = log π_ref − log π_θ (reference minus policy, as in TRL, verl and strop's primitives):

        k1 = −d                 unbiased, may be negative
        k2 = d²/2               biased, never negative; the mean of its gradient is the KL's gradient
        k3 = exp(d) − d − 1     unbiased, never negative; used in GRPO's loss

    logps       [..] log-probs of the policy, any floating dtype
    ref_logps   [..] those of the reference; no gradient flows into them
    estimator   "k1", "k2" or "k3"

    returns     [..] float32 (float64 for float64)

    Value and gradient are accurate to the dtype's precision, however close the two policies are:
        d k1 / d logp = 1        d k2 / d logp = −d        d k3 / d logp = 1 − exp(d)
    """
    check_floats(logps, "logps")
    check_like(ref_logps, "ref_logps", logps, "logps")
    check_choice(estimator, "estimator", KL_ESTIMATORS)
    return kl_of(in_float(logps), in_float(ref_logps.detach()), estimator)


def policy_metrics(
    logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    ref_logps: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    **rule_options: Unpack[PolicyOptions],
) -> Metrics:
    """Return training metrics, 0-d tensors without gradient; arguments as in `policy_loss`.

    rule_options   fields of `PolicyRule`

    All are plain means over the unmasked tokens, so loss types can be compared; 0 if every token is masked.

    clip_fraction         share of tokens whose ratio is clipped (cispo: whose weight is; sapo and vespo: 0)
    clip_fraction_low, clip_fraction_high, clip_fraction_delta     share clipped by each bound
    ratio/mean, ratio/min, ratio/max
    approx_kl             k3 estimate of KL(old ‖ policy): the change of the policy since the rollout
    kl, entropy           if ref_logps, entropy are given
    """
    rule = PolicyRule(**rule_options)
    tokens = _tokens_of_rows(rule, logps, old_logps, advantages, completion_mask)
    ref_N = None if ref_logps is None else _like_tokens(ref_logps, logps, tokens, "ref_logps")
    entropy_N = None if entropy is None else _like_tokens(entropy, logps, tokens, "entropy")
    return tokens_metrics(rule, tokens, ref_N, entropy_N)


def covariance_marks(
    logps: torch.Tensor,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor | None,
    *,
    rule: PolicyRule,
    seed: int = 0,
) -> torch.Tensor:
    """Return the tokens that Clip-Cov or KL-Cov (arXiv 2505.22617) mark, [B, T] bool, by the rule's loss type.

        covariance of a token = (A − mean of A)·(log π − mean of log π)     means over the unmasked tokens

    kl_cov marks the share cov_fraction with the largest covariances, clip_cov as many, drawn by the seed, of those between
    cov_bounds; one at least, if there is one. Give all tokens of an update: of a part, others would be marked.
    """
    tokens = _tokens_of_rows(rule, logps, None, advantages, completion_mask)
    assert tokens.mask_N is not None
    at_n = tokens.mask_N.nonzero()[:, 0]
    logps_n, advantages_n = (values_N.detach()[at_n].double() for values_N in (tokens.logps_N, tokens.advantages_N))
    covariances_n = (advantages_n - advantages_n.mean()) * (logps_n - logps_n.mean())
    num = max(int(rule.cov_fraction * len(at_n)), 1)
    if rule.loss_type == "kl_cov":
        chosen_m = covariances_n.topk(min(num, len(at_n))).indices
    else:
        low, high = rule.cov_bounds
        candidates = ((covariances_n > low) & (covariances_n < high)).nonzero()[:, 0]
        order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
        chosen_m = candidates[order[:num].to(candidates.device)]
    return torch.zeros_like(tokens.mask_N).index_fill(0, at_n[chosen_m], True).view(logps.shape)


# ---- tokens in rows ----


def check_given(rule: TokenRule, ref_logps: torch.Tensor | None, advantages: torch.Tensor | None) -> None:
    """Raise unless a token's loss needs only its own row of logits and the rule's inputs are given."""
    if isinstance(rule, NLL):
        return
    if not rule.row_suffices:
        raise ValueError(f"rule must be one that a row alone gives, found {rule}")
    if advantages is None:
        raise ValueError("advantages must be given for a PolicyRule, found None")
    if rule.beta and ref_logps is None:
        raise ValueError(f"ref_logps must be given where beta is above 0, found None with beta={rule.beta}")


def _tokens_of_rows(
    rule: PolicyRule,
    logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor | None,
    marked: torch.Tensor | None = None,
) -> Tokens:
    mask_BT = _check_tokens(logps, completion_mask)
    logps_BT = _active(logps, mask_BT)
    old_BT = None
    if old_logps is not None:
        check_like(old_logps, "old_logps", logps, "logps")
        old_BT = _active(old_logps.detach(), mask_BT).to(logps_BT.dtype)
    advantages_BT = _active(per_token(advantages, logps), mask_BT).to(logps_BT.dtype)
    B, T = logps_BT.shape
    return tokens_of(
        rule,
        logps_BT.reshape(-1),
        None if old_BT is None else old_BT.reshape(-1),
        advantages_BT.reshape(-1),
        sequence_N=torch.arange(B, device=logps_BT.device)[:, None].expand(B, T).reshape(-1),
        num_sequences=B,
        mask_N=mask_BT.reshape(-1),
        marked_N=None if marked is None else as_completion_mask(marked, logps, "logps").reshape(-1),
    )


def _check_tokens(logps: torch.Tensor, completion_mask: torch.Tensor | None) -> torch.Tensor:
    """Return the mask as booleans; raise unless logps are [B, T] floats."""
    check_floats(logps, "logps")
    if logps.ndim != 2:
        raise ValueError(f"logps must have shape [B, T], found {list(logps.shape)}")
    if completion_mask is None:
        return torch.ones_like(logps, dtype=torch.bool)
    return as_completion_mask(completion_mask, logps, "logps")


def _active(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return the values with 0 where the mask is 0. Call it before any arithmetic: 0·NaN would be NaN."""
    return in_float(values_BT).masked_fill(~mask_BT, 0.0)


def _like_tokens(values: torch.Tensor, logps: torch.Tensor, tokens: Tokens, name: str) -> torch.Tensor:
    check_like(values, name, logps, "logps")
    return tokens.active(in_float(values).reshape(-1)).to(tokens.logps_N.dtype)


def per_token(advantages: torch.Tensor, logps: torch.Tensor) -> torch.Tensor:
    """Return advantages [B] or [B, T] as [B, T]; raise if their shape does not match the log-probs."""
    check_floats(advantages, "advantages")
    if advantages.shape != logps.shape and advantages.shape != logps.shape[:1]:  # `in` fails on symbolic sizes
        rows, columns = logps.shape
        raise ValueError(f"advantages must have shape [{rows}] or [{rows}, {columns}], found {list(advantages.shape)}")
    check_device(advantages, "advantages", logps, "logps")
    advantages = advantages.detach()
    return advantages[:, None].expand_as(logps) if advantages.ndim == 1 else advantages
