import strop.ops.linear_logp.chunked  # noqa: F401 (registers the backends)
from strop.ops.linear_logp.reference import linear_logp

__all__ = ["linear_logp"]
