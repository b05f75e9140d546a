"""Softmax over the last axis; its backward needs only its result."""

import numpy as np


def softmax(z):
    """p_i = exp(z_i − max z) / Σ_j exp(z_j − max z);  z = −inf gives exactly 0"""
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return p


def softmax_bwd(dp, p):                                 # dp_i/dz_j = p_i·(δ_ij − p_j)
    through_sum = (dp * p).sum(-1, keepdims=True)
    return p * (dp - through_sum)                       # dL/dz_j = p_j·(dp_j − Σ_i dp_i·p_i)
