import strop.ops.linear_token_loss.chunked  # noqa: F401 (registers the backends)
from strop.ops.linear_token_loss.reference import linear_token_loss

__all__ = ["linear_token_loss"]
