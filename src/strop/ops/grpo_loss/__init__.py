import strop.ops.grpo_loss.triton  # noqa: F401 (registers the backend)
from strop.ops.grpo_loss.reference import grpo_loss

__all__ = ["grpo_loss"]
