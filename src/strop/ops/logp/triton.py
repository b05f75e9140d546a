"""`logp` by the row kernels: one read of the logits forward; one read and one write backward."""

import torch

from strop._tensors import check_logp
from strop.ops.library import first_order, library_op, note_overwritten
from strop.ops.logp.reference import logp
from strop.ops.registry import on_gpu, on_gpu_or_interpreted
from strop.ops.rows import check_in_place, fake_gradient, implementation


@logp.backend("triton", when=on_gpu, by_name=on_gpu_or_interpreted)
def logp_triton(
    logits: torch.Tensor,
    ids: torch.Tensor,
    *,
    temperature: float = 1.0,
    completion_mask: torch.Tensor | None = None,
    entropy: bool = False,
    in_place: bool = False,
    validate: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    mask = check_logp(logits, ids, temperature, completion_mask, validate)
    if in_place and logits.requires_grad:
        check_in_place(logits)
    mask_N = None if mask is None else mask.reshape(-1)
    logps_N, entropies_N = _Logp.apply(logits, ids.reshape(-1), mask_N, float(temperature), entropy, in_place)
    logps = logps_N.view(ids.shape)
    return (logps, entropies_N.view(ids.shape)) if entropy else logps


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
        d_entropies_N = d_entropies_N if ctx.entropy else None  # a compiled graph gives the empty one a gradient
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
    """Log-probs alone, with no way back."""
    logps_N, _, _ = implementation("triton").logps(logits, ids_N, mask_N, temperature, False, way_back=False)
    return logps_N


_BACKWARD = (
    "Tensor ids, Tensor? mask, Tensor stats, Tensor entropies, Tensor d_logps, Tensor? d_entropies, float temperature"
)


@library_op(f"logp_backward(Tensor logits, {_BACKWARD}) -> Tensor", lambda logits, *_: fake_gradient(logits))
def logp_backward(logits, *rest):
    return implementation("triton").logps_bwd(logits, *rest, in_place=False)


@library_op(f"logp_backward_(Tensor(a!) logits, {_BACKWARD}) -> ()", lambda logits, *_: None)
def logp_backward_(logits, *rest):
    implementation("triton").logps_bwd(logits, *rest, in_place=True)
