"""Differentiable operators on torch tensors. Each is a torch reference with faster backends behind it; see registry."""

from strop.ops.logp import logp

__all__ = ["logp"]
