"""Matrix products on a CPU by oneDNN, where they take less time than torch's own.

torch multiplies float32 matrices by MKL. On AMD's CPUs MKL does not use AVX-512, so oneDNN takes half of its time. And with the
few rows of a decode step, MKL copies the whole weight into another layout at every call, which `packed` does once.

Shapes: N tokens, H inputs and E outputs of a layer.
"""

import functools
from pathlib import Path

import torch

FEWEST_WEIGHTS = 2**16  # callers leave products with a smaller matrix to torch, which is as fast there

TEMPORARY_BYTES = 2**24  # of results that are then copied to where they belong: oneDNN takes memory of its own


@functools.cache
def has_onednn() -> bool:
    """Return whether this torch has oneDNN's product, found by one that is compared with torch's own."""
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        return False
    x_NH, weight_EH = torch.arange(12.0).view(3, 4), torch.arange(20.0).view(5, 4)
    try:
        with torch.autocast("cpu", enabled=False):
            found_NE, wanted_NE = (
                product(x_NH, torch.ops.mkldnn._reorder_linear_weight(weight_EH, 3)),
                x_NH @ weight_EH.T,
            )
    except (AttributeError, RuntimeError, NotImplementedError):  # these operators are not part of torch's promises
        return False
    return torch.equal(found_NE, wanted_NE)


@functools.cache
def is_faster() -> bool:
    """Return whether oneDNN's float32 products are faster than MKL's for many rows too: on AMD's CPUs with AVX-512.

    This is decided by the kind of CPU and not by measuring, so that a run and its continuation compute alike.
    """
    cpuinfo = Path("/proc/cpuinfo")
    is_amd = cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text(encoding="utf-8", errors="replace")
    return is_amd and torch.backends.cpu.get_cpu_capability().startswith("AVX512") and has_onednn()


def takes(a: torch.Tensor) -> bool:
    """Return whether a product of `a` and a matrix of at least FEWEST_WEIGHTS elements is faster by oneDNN."""
    return a.dtype == torch.float32 and a.device.type == "cpu" and is_faster()


def packed(weight_EH: torch.Tensor, num_rows: int) -> torch.Tensor | None:
    """Return a large weight in the layout of oneDNN's kernels for about so many rows; None if there is no such layout."""
    if weight_EH.dtype not in (torch.float32, torch.bfloat16) or not has_onednn():
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight_EH, num_rows)


def product(x_NH: torch.Tensor, weight_EH: torch.Tensor, bias_E: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weightᵀ + bias. The weight may be packed."""
    return torch.ops.mkldnn._linear_pointwise(x_NH, weight_EH, bias_E, "none", [], "")


def parts(out_NE: torch.Tensor) -> list[slice]:
    """Return slices of the rows of a result that have at most TEMPORARY_BYTES each."""
    num_rows = max(1, TEMPORARY_BYTES // max(1, out_NE[0].nbytes)) if len(out_NE) else 1
    return [slice(start, start + num_rows) for start in range(0, len(out_NE), num_rows)]
