"""Rotary position embedding (Su et al. 2021) with Mixtral's pairing: channel p is rotated with channel p + C/2.

Shapes: N tokens, H heads, C channels, P = C/2 pairs.
"""

import numpy as np


def rope_frequencies(head_dim, theta):
    """ω_p = θ^(−2p/C), p = 0 … C/2 − 1;  θ is `config.rope_theta`, NTK scaling included"""
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def rope_angles(positions_N, head_dim, theta, dtype):
    """Return cos and sin of position·ω_p. The angles are float64: float32 loses digits at large positions."""
    angles_NP = positions_N[:, None] * rope_frequencies(head_dim, theta)
    return np.cos(angles_NP).astype(dtype), np.sin(angles_NP).astype(dtype)


def rope(x_NHC, cos_NP, sin_NP):
    """(a, b) → (a·cos − b·sin, b·cos + a·sin) for each pair"""
    cos_N1P, sin_N1P = cos_NP[:, None], sin_NP[:, None]
    P = cos_NP.shape[1]
    a_NHP, b_NHP = x_NHC[..., :P], x_NHC[..., P:]
    return np.concatenate((a_NHP * cos_N1P - b_NHP * sin_N1P, b_NHP * cos_N1P + a_NHP * sin_N1P), axis=-1)


def rope_bwd(dy_NHC, cos_NP, sin_NP):                   # y = R(φ)·x and R is orthogonal
    return rope(dy_NHC, cos_NP, -sin_NP)                # dL/dx = R(φ)ᵀ·dy = R(−φ)·dy: rotate back
