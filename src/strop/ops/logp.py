"""The log-probabilities of given tokens, on which every loss is built.

The kernels read the logits once in the forward. In the backward they read and write them once.

Shapes: V the vocabulary; `[..]` any number of leading dimensions, usually [B, T]; N tokens.
"""

import torch

from strop._tensors import can_look, check_logp
from strop.ops.head import first_order
from strop.ops.library import library_op, note_overwritten
from strop.ops.registry import op_with_backends
from strop.ops.rows import check_in_place, fake_gradient, implementation

Logps = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # the public result: log-probs, or log-probs and entropies
Scores = tuple[torch.Tensor, torch.Tensor | None]  # log-probs, and entropies or None


def logp_torch(
    logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor | None, temperature: float, entropy: bool = False,
    in_place: bool = False,
) -> Scores:  # fmt: skip
    """Return log-probs and entropies of checked arguments by their definition. `in_place` has no effect."""
    if mask is not None and can_look(mask) and mask.all():
        mask = None  # no token is masked: this saves a copy of the logits
    in_range = (ids >= 0) & (ids < logits.shape[-1])
    x = logits if logits.dtype == torch.float64 else logits.float()
    if mask is not None:  # before any arithmetic: masked values may be NaN
        x = x.masked_fill(~mask[..., None], 0.0)
    log_probs = (x if temperature == 1 else x / temperature).log_softmax(-1)
    picked = log_probs.gather(-1, torch.where(in_range, ids, 0).long()[..., None]).squeeze(-1)
    logps = picked * torch.where(in_range, 1.0, torch.nan)  # NaN with a NaN gradient for an id outside the vocabulary
    if mask is not None:
        logps = logps.masked_fill(~mask, 0.0)
    if not entropy:
        return logps, None
    # a banned token has p = 0 and contributes 0, not 0·(−inf)
    entropies = -(log_probs.exp() * log_probs.masked_fill(log_probs == -torch.inf, 0.0)).sum(-1)
    return logps, entropies if mask is None else entropies.masked_fill(~mask, 0.0)


def logp_kernels(
    logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor | None, temperature: float, entropy: bool = False,
    in_place: bool = False,
) -> Scores:  # fmt: skip
    """Return log-probs and entropies of checked arguments, by the row kernels."""
    mask_N = None if mask is None else mask.reshape(-1)
    if not (entropy or (logits.requires_grad and torch.is_grad_enabled())):
        return score(logits.detach(), ids.reshape(-1), mask_N, float(temperature)).view(ids.shape), None
    if in_place and logits.requires_grad:
        check_in_place(logits)
    logps_N, entropies_N = _Logp.apply(logits, ids.reshape(-1), mask_N, float(temperature), entropy, in_place)
    return logps_N.view(ids.shape), entropies_N.view(ids.shape) if entropy else None


@op_with_backends(torch=logp_torch, triton=logp_kernels)
def logp(
    logp_by,
    logits: torch.Tensor,
    ids: torch.Tensor,
    *,
    temperature: float = 1.0,
    completion_mask: torch.Tensor | None = None,
    entropy: bool = False,
    in_place: bool = False,
    validate: bool = False,
) -> Logps:
    """Return log softmax(logits / temperature)[ids], and optionally that distribution's entropy; both differentiable.

    logits            [.., V] float32, bfloat16 or float16 (computed in float32), or float64 (computed in float64)
    ids               [..] int64 or int32
    completion_mask   [..] tokens to score; elsewhere the result is 0 without gradient, whatever the values
    entropy           also return −Σ p·log p, [..]
    in_place          let the gradient overwrite the logits, which saves memory; do not read them after backward
    validate          check ids against the vocabulary on a GPU too (waits for the device)

    returns           [..] float32 (float64 for float64); with entropy=True the pair (log-probs, entropies)

    A logit of −inf bans its token. An unmasked id outside the vocabulary is a ValueError on the CPU, NaN on a GPU.
    Gradient, with p = softmax(logits / temperature):
        d logp / d logits = (onehot(id) − p) / temperature
        d H / d logits    = −p·(log p + H) / temperature
    """
    mask = check_logp(logits, ids, temperature, completion_mask, validate)
    logps, entropies = logp_by(logits, ids, mask, temperature, entropy, in_place)
    return logps if entropies is None else (logps, entropies)


class _Logp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, ids_N, mask_N, temperature, entropy, in_place):
        logps_N, stats_2N, entropies_N = logp_forward(logits, ids_N, mask_N, temperature, entropy)
        ctx.save_for_backward(logits, ids_N, mask_N, stats_2N, entropies_N)
        ctx.temperature, ctx.entropy, ctx.in_place, ctx.overwritten = temperature, entropy, in_place, False
        ctx.set_materialize_grads(False)
        return logps_N, entropies_N

    @staticmethod
    def backward(ctx, d_logps_N, d_entropies_N):
        if ctx.overwritten:
            raise RuntimeError("backward of logp(in_place=True) can run once: the gradient has overwritten the logits")
        logits, ids_N, mask_N, stats_2N, entropies_N = ctx.saved_tensors
        d_entropies_N = d_entropies_N if ctx.entropy else None  # a compiled graph passes one for the empty tensor
        if d_logps_N is None and d_entropies_N is None:
            return (None,) * 6
        with torch.no_grad():
            d_logps_N = stats_2N.new_zeros(stats_2N.shape[1]) if d_logps_N is None else d_logps_N.contiguous()
            d_entropies_N = None if d_entropies_N is None else d_entropies_N.contiguous()
            rest = ids_N, mask_N, stats_2N, entropies_N, d_logps_N, d_entropies_N, ctx.temperature
            if ctx.in_place:
                ctx.overwritten = True
                logp_backward_(logits, *rest)
                note_overwritten(logits)
                d_logits = logits.detach()
            else:
                d_logits = logp_backward(logits, *rest)
        return first_order(d_logits, None, None, None, None, None)


# ---- as operators of torch.ops.strop ----


def _fake_forward(logits, ids_N, mask_N, temperature, entropy):
    N = ids_N.shape[0]
    return tuple(logits.new_empty(size, dtype=torch.float32) for size in ((N,), (2, N), (N if entropy else 0,)))


@library_op(
    "logp(Tensor logits, Tensor ids, Tensor? mask, float temperature, bool entropy) -> (Tensor, Tensor, Tensor)",
    _fake_forward,
)
def logp_forward(logits, ids_N, mask_N, temperature, entropy):
    logps_N, stats_2N, entropies_N = implementation("triton").logps(logits, ids_N, mask_N, temperature, entropy)
    return logps_N, stats_2N, logps_N.new_empty(0) if entropies_N is None else entropies_N


@library_op(
    "score(Tensor logits, Tensor ids, Tensor? mask, float temperature) -> Tensor",
    lambda logits, ids_N, *_: logits.new_empty(ids_N.shape, dtype=torch.float32),
)
def score(logits, ids_N, mask_N, temperature):
    """Return log-probs only, saving nothing for a backward."""
    return implementation("triton").logps(logits, ids_N, mask_N, temperature, False, way_back=False)[0]


_BACKWARD = (
    "Tensor ids, Tensor? mask, Tensor stats, Tensor entropies, Tensor d_logps, Tensor? d_entropies, float temperature"
)


@library_op(f"logp_backward(Tensor logits, {_BACKWARD}) -> Tensor", lambda logits, *_: fake_gradient(logits))
def logp_backward(logits, *rest):
    return implementation("triton").logps_bwd(logits, *rest, in_place=False)


@library_op(f"logp_backward_(Tensor(a!) logits, {_BACKWARD}) -> ()", lambda logits, *_: None)
def logp_backward_(logits, *rest):
    implementation("triton").logps_bwd(logits, *rest, in_place=True)
