"""Rotary position embedding (Su et al. 2021), Mixtral's pairing: channel p turns with channel p + C/2.

Shapes: N tokens, H heads, C channels, P = C/2 pairs.
"""

import numpy as np


def rope_frequencies(head_dim, theta):
    """ω_p = θ^(−2p/C), p = 0 … C/2 − 1;  θ is `config.rope_theta`, NTK scaling included"""
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def rope_angles(positions_N, head_dim, theta, dtype):
    """cos and sin of position·ω_p; angles are taken in float64, where float32 would lose digits at far positions"""
    angles_NP = positions_N[:, None] * rope_frequencies(head_dim, theta)
    return np.cos(angles_NP).astype(dtype), np.sin(angles_NP).astype(dtype)


def rope(x_NHC, cos_NP, sin_NP):
    """(a, b) → (a·cos − b·sin, b·cos + a·sin) for each pair"""
    cos_N1P, sin_N1P = cos_NP[:, None], sin_NP[:, None]
    a_NHP, b_NHP = np.split(x_NHC, 2, axis=-1)
    y_NHC = np.empty_like(x_NHC)
    ya_NHP, yb_NHP = np.split(y_NHC, 2, axis=-1)  # views
    ya_NHP[...] = a_NHP * cos_N1P - b_NHP * sin_N1P
    yb_NHP[...] = b_NHP * cos_N1P + a_NHP * sin_N1P
    return y_NHC


def rope_bwd(dy_NHC, cos_NP, sin_NP):                   # y = R(φ)·x and R is orthogonal
    return rope(dy_NHC, cos_NP, -sin_NP)                # dL/dx = R(φ)ᵀ·dy = R(−φ)·dy: rotate back
