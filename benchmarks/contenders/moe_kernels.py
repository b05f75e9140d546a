"""Parts of the MoE's engines that run alone: the work is prepared as the engine has it, the call is the engine's function.

Each takes float32 arrays and returns a function that does the work.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from strop import _compiled
from strop.moe.reference.rms_norm import rms_norm
from strop.moe.reference.softmax import softmax

native: Any = _compiled.native


def _matmul(a, b):
    c = np.empty((len(a), b.shape[1]), np.float32)
    run = native.MoEProducts([a], [b], [c]).run

    def call():
        run()
        return c

    return call


def _softmax(z_V):
    """The compiled kernel leaves the division to sampling, which needs it for one token; here it is done."""
    p_V, sums = np.empty(len(z_V) + 16), np.empty(len(z_V) // 64 + 1)

    def call():
        native.moe_softmax(z_V, p_V, sums)
        return p_V[: len(z_V)] / sums.sum()

    return call


def _rms_norm(x, w_D):
    """On one panel: tokens are lanes, so a panel is the transpose of 64 rows."""
    x_DN = np.ascontiguousarray(x.reshape(-1, x.shape[-1]).T)
    assert x_DN.shape[1] == 64, x.shape
    y_DN, r_N = np.empty_like(x_DN), np.empty(64, np.float32)

    def call():
        native.moe_rms_norm(x_DN, w_D, 1e-5, y_DN, r_N)
        return y_DN.T.reshape(x.shape)

    return call


def _products(pairs):
    """All in one parallel region. Where the right factor is a transposed weight, tokens are lanes: y = W·x in panels."""
    lefts, rights = [], []
    for a, b in pairs:
        matrices = zip(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]), strict=True)
        for left, right in [(a, b)] if a.ndim == 2 else matrices:
            if not right.flags.c_contiguous:
                left, right = right.T, left.T
                right = np.pad(right, ((0, 0), (0, -right.shape[1] % 16)))
            lefts.append(left)
            rights.append(np.ascontiguousarray(right))
    outs = [np.empty((len(a), b.shape[1]), np.float32) for a, b in zip(lefts, rights, strict=True)]
    return native.MoEProducts(lefts, rights, outs).run


def _multiply_all(pairs):
    for a, b in pairs:
        a @ b


KERNELS: dict[str, dict[str, Callable[..., Callable[[], Any]]]] = {
    "numpy": {
        "matmul": lambda a, b: lambda: a @ b,
        "softmax": lambda z: lambda: softmax(z),
        "rms_norm": lambda x, w: lambda: rms_norm(x, w, 1e-5)[0],
        "products": lambda pairs: lambda: _multiply_all(pairs),
    },
    "native": {"matmul": _matmul, "softmax": _softmax, "rms_norm": _rms_norm, "products": _products},
}
