from strop.ops.logp.reference import logp

__all__ = ["logp"]
