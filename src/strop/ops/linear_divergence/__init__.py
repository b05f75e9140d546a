import strop.ops.linear_divergence.chunked  # noqa: F401 (registers the backends)
from strop.ops.linear_divergence.reference import linear_divergence

__all__ = ["linear_divergence"]
