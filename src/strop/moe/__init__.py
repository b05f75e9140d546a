"""A Mixture-of-Experts transformer from scratch: NumPy only, every gradient by hand, equal to transformers' Mixtral."""
