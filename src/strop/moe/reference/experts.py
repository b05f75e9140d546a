"""One expert: a SwiGLU feed-forward. Shapes: M tokens, D hidden, F intermediate (2F: gate rows, then up rows)."""

import numpy as np

from strop.moe.reference.linear import linear, linear_bwd
from strop.moe.reference.swiglu import swiglu, swiglu_bwd


def expert(x_MD, gate_up_2FD, down_DF):
    """y = swiglu(x·Wgᵀ, x·Wuᵀ)·Wdᵀ"""
    both_M2F, in_saved = linear(x_MD, gate_up_2FD)
    F = down_DF.shape[1]
    gate_MF, up_MF = both_M2F[:, :F], both_M2F[:, F:]
    h_MF, act_saved = swiglu(gate_MF, up_MF)
    y_MD, out_saved = linear(h_MF, down_DF)
    return y_MD, (in_saved, act_saved, out_saved)


def expert_bwd(dy_MD, saved):
    in_saved, act_saved, out_saved = saved
    dh_MF, ddown_DF = linear_bwd(dy_MD, out_saved)                              # y = h·Wdᵀ
    dboth_M2F = np.concatenate(swiglu_bwd(dh_MF, act_saved), axis=-1)           # h = silu(gate)·up
    dx_MD, dgate_up_2FD = linear_bwd(dboth_M2F, in_saved)                       # (gate, up) = x·(Wg, Wu)ᵀ
    return dx_MD, dgate_up_2FD, ddown_DF
