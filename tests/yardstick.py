"""A backend against float64, the error of eager torch in the same dtype being the yardstick.

Every parity test of the operators ends here. A gradient of logits is compared on the target column and off it
separately: the first is one number in V and a thousand times larger, so it would hide the rest.
"""

import codecs
import locale

import pytest
import torch

from strop.config.policy_losses import POLICY_LOSSES
from strop.losses import IMPORTANCE_LEVELS, POLICY_LOSS_TYPES
from strop.ops import registry

FACTOR = 2.0
KERNELS = ("triton", "exact")  # backends of Triton's kernels
LEVELS = {  # of those that do not take every level
    "cispo": ("token", "sequence"), "sapo": ("token", "sequence"), "double_sided": ("token", "sequence"),
    "vespo": ("token",), "dppo_tv": ("token",), "dppo_kl": ("token",),
}  # fmt: skip
RULES = [  # every loss type with every importance level it takes
    (loss_type, level)
    for loss_type in POLICY_LOSS_TYPES
    for level in IMPORTANCE_LEVELS
    if not POLICY_LOSSES[loss_type].marks and (level in LEVELS.get(loss_type, IMPORTANCE_LEVELS))
]
needs_compiler = pytest.mark.skipif(
    codecs.lookup(locale.getencoding()).name == "ascii", reason="torch opens its templates in the locale's encoding"
)


def clip_of(loss_type, high=1.1):
    """high: of cispo, where it is the bound of the ratio itself"""
    return {"cispo": (0.2, high), "sapo": None, "vespo": None, "kl_cov": None}.get(loss_type, (0.2, 0.28))


def backends(name, dtype=torch.float32):
    """The operator's backends that take this dtype: float64 is computed by the reference and the chunks in torch."""
    return [b for b in registry.backends(name) if not (b in KERNELS and dtype == torch.float64)]


def backend_fixture(*names, dtype=torch.float32, fast=False):
    """Return a fixture that runs a test on each backend the operators have for this dtype; `fast` omits the reference."""
    params = [b for b in backends(names[0], dtype) if not (fast and b == registry.REFERENCE)]

    @pytest.fixture(params=params)
    def backend(request):
        with registry.use_backend(**dict.fromkeys(names, request.param)):
            yield request.param

    return backend


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def options_of_case(case):
    """The options of a policy loss that TRL computed, from tests/golden."""
    options = {name: case[name] for name in ("loss_type", "beta", "max_completion_length")}
    return options | {"importance_level": case["level"], "clip_eps": (case["eps_low"], case["eps_high"])}


def cut_off(backend, dtype):
    """Triton's interpreter cuts bfloat16 off where a GPU rounds: one unit of the last place more."""
    return torch.finfo(dtype).eps if backend in KERNELS and dtype == torch.bfloat16 else 0.0


def check(found, exact, eager, what="result", *, allowance=0.0, scale=0.0):
    """|found − exact| at most twice |eager − exact|, at its largest and relative to each number; NaN and inf in place.

    found, eager   in the dtype under test
    exact          float64
    allowance      a further error relative to the numbers
    scale          of the terms whose difference they are, where that is more than the numbers: float32 rounds those.
                   One number, or one for each
    """
    dtype, exact = found.dtype, exact.detach()
    scale = torch.as_tensor(scale, dtype=torch.float64, device=exact.device).expand(exact.shape)
    found, eager = (x.detach().to(exact.device, torch.float64) for x in (found, eager))
    assert found.shape == exact.shape, f"{what}: shape {list(found.shape)} and not {list(exact.shape)}"
    finite = exact.isfinite()
    assert torch.equal(found[~finite].nan_to_num(7.0), exact[~finite].nan_to_num(7.0)), f"{what}: NaN or inf elsewhere"
    assert found[finite].isfinite().all(), f"{what}: NaN or inf where float64 has a number"
    found, exact, eager, scale = found[finite], exact[finite], eager[finite], scale[finite]
    if not exact.numel():
        return
    error, eager_error, size = (found - exact).abs(), (eager - exact).abs(), exact.abs()
    noise = 3e-7 * max(scale.max(), size.max())
    most = FACTOR * eager_error.max() + allowance * size.max() + noise
    assert error.max() <= most, f"{what}: an error of {error.max():.3g}, allowed {most:.3g}"
    # a GPU's exp gives 0 below the smallest normal number, and the gradient is that times up to a few hundred
    normal = size >= 512 * torch.finfo(dtype).tiny
    if normal.any():
        noise = 3e-7 * scale[normal]
        relative, eager_relative = ((e[normal] - noise).clamp(min=0) / size[normal] for e in (error, eager_error))
        most = FACTOR * eager_relative.max() + 1e-5 + allowance
        assert relative.max() <= most, f"{what}: a relative error of {relative.max():.3g}, allowed {most:.3g}"


def check_gradient(found, exact, eager, ids, what="gradient", *, coefficient=1.0, allowance=0.0, p=None):
    """`check` of a gradient [.., V] on the column of the ids [..] and off it.

    coefficient   on the target it is coefficient·(1 − p), off it −coefficient·p
    p             given where the coefficient off the target is itself a difference, as the entropy's log p + H
    """
    V = exact.shape[-1]
    ids = ids.to(exact.device).long()
    target = torch.zeros_like(exact, dtype=torch.bool).scatter_(-1, ids.clamp(0, V - 1)[..., None], True)
    found, eager = found.to(exact.device), eager.to(exact.device)
    check(found[target], exact[target], eager[target], f"{what} on the target", allowance=allowance, scale=coefficient)
    scale = 0.0 if p is None else coefficient * p.to(exact.device).double()[~target]
    check(found[~target], exact[~target], eager[~target], f"{what} off the target", allowance=allowance, scale=scale)


def check_sums(found, exact, eager, what="result", *, allowance=0.0, least=0.0):
    """|found − exact| at most twice |eager − exact|, relative to the largest: each element is a sum with cancellation.

    least   the size of the terms, where it may be more than that of the sums
    """
    assert found.shape == exact.shape, f"{what}: shape {list(found.shape)} and not {list(exact.shape)}"
    if not exact.numel():
        return
    error, eager_error = ((x.detach().double() - exact).abs().max().item() for x in (found, eager))
    most = 2 * eager_error + (1e-6 + allowance) * max(exact.abs().max().item(), least)
    assert error <= most, f"{what}: an error of {error:.3g}, allowed {most:.3g}, eager {eager_error:.3g}"


def same(found, expected, *, scale=0.0):
    """Two ways to one result, through a BLAS or torch's kernels: equal but for the rounding of its largest number.

    Their bits are for the CPU, the threads and the version to choose. What strop sums itself, masks and copies have
    `torch.equal`. 64 units of the last place, or 2 in 16 bits, to which a float32 is rounded in the end.

    found, expected   tensors, or as many of each
    scale             of the terms, where the result is a difference of larger ones
    """
    if not isinstance(expected, torch.Tensor):
        for one, other in zip(found, expected, strict=True):
            same(one, other, scale=scale)
        return
    sizes = expected.detach()[expected.isfinite()].abs()
    size = max(scale, sizes.max().item() if sizes.numel() else 0.0)
    units = 2 if expected.dtype.itemsize == 2 else 64
    most = units * torch.finfo(expected.dtype).eps * size
    torch.testing.assert_close(found, expected, rtol=0, atol=most, equal_nan=True)


def clearly_greedy(model, ids, **options):
    """transformers' greedy completion; each token ahead of the second by more than float32 can err, so that ids are equal."""
    output = model.generate(ids, do_sample=False, output_scores=True, return_dict_in_generate=True, **options)
    for scores in output.scores:
        first, second = scores.topk(2).values.T
        assert (first - second).min() > 1e-4, "another seed: two tokens are as good as equal"
    return output.sequences


def check_logps(model, rollout, rtol, atol=None):
    """Hold the log-probs of a rollout against those of a forward of each of its rows alone."""
    for prompt, completion, logps in zip(rollout.prompt_ids, rollout.completion_ids, rollout.logps, strict=True):
        with torch.no_grad():
            ids = torch.cat([prompt, completion])[None].to(model.device)
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float().cpu()
        wanted = logits.log_softmax(-1).gather(-1, completion[:, None])[:, 0]
        torch.testing.assert_close(logps, wanted, rtol=rtol, atol=rtol if atol is None else atol)


def eager_logps(logits, ids, temperature=1.0):
    """What a user would write in torch, in the dtype of the logits but for the arithmetic of the softmax."""
    return (logits.float() / temperature).log_softmax(-1).gather(-1, ids.long()[..., None]).squeeze(-1)
