import strop.ops.logp.triton  # noqa: F401 (registers the backend)
from strop.ops.logp.reference import logp

__all__ = ["logp"]
