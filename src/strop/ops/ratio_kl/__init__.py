import strop.ops.ratio_kl.triton  # noqa: F401 (registers the backend)
from strop.ops.ratio_kl.reference import ratio_kl

__all__ = ["ratio_kl"]
