"""SwiGLU (Shazeer 2020): a SiLU gate times a linear path. Shapes: M tokens, F intermediate."""

import numpy as np


def sigmoid(x):
    """1 / (1 + exp(−x)), computed with tanh, which does not overflow"""
    return 0.5 * np.tanh(0.5 * x) + 0.5


def swiglu(gate_MF, up_MF):
    """h = silu(gate)·up,  silu(g) = g·σ(g)"""
    s_MF = sigmoid(gate_MF)
    silu_MF = gate_MF * s_MF
    return silu_MF * up_MF, (silu_MF, s_MF, up_MF)


def swiglu_bwd(dh_MF, saved):
    silu_MF, s_MF, up_MF = saved
    dup_MF = dh_MF * silu_MF                            # dL/dup = dh·silu(g)
    dsilu_MF = s_MF + silu_MF * (1 - s_MF)              # silu′ = σ + g·σ·(1 − σ)
    dgate_MF = dh_MF * up_MF * dsilu_MF                 # dL/dgate = dh·up·silu′(g)
    return dgate_MF, dup_MF
