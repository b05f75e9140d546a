import strop.ops.linear_dpo_loss.chunked  # noqa: F401 (registers the backends)
from strop.ops.linear_dpo_loss.reference import linear_dpo_loss

__all__ = ["linear_dpo_loss"]
