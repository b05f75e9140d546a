import strop.ops.linear_grpo_loss.chunked  # noqa: F401 (registers the backends)
from strop.ops.linear_grpo_loss.reference import linear_grpo_loss

__all__ = ["linear_grpo_loss"]
