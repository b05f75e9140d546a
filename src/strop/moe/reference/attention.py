"""Causal self-attention with RoPE and shared key/value heads (GQA; with one such head MQA).

Shapes: B rows, T queries of a row, S keys, N real tokens, D hidden, H query heads, K key/value heads, G = H/K,
C channels of a head, O = H·C or K·C outputs of a projection.
"""

import numpy as np

from strop.moe.reference.linear import linear, linear_bwd
from strop.moe.reference.rope import rope, rope_bwd
from strop.moe.reference.softmax import softmax, softmax_bwd


def attention(x_ND, wq_OD, wk_OD, wv_OD, wo_DO, head_dim, angles, layout, cache=None):
    """y = attend(RoPE(x·Wqᵀ), RoPE(x·Wkᵀ), x·Wvᵀ)·Woᵀ

    cache   None, or this layer's (keys_BSKC, values_BSKC): new tokens are written to it, queries attend to all
    """
    q_NO, q_saved = linear(x_ND, wq_OD)
    k_NO, k_saved = linear(x_ND, wk_OD)
    v_NO, v_saved = linear(x_ND, wv_OD)
    q_NHC = rope(q_NO.reshape(len(x_ND), -1, head_dim), *angles)
    k_NKC = rope(k_NO.reshape(len(x_ND), -1, head_dim), *angles)
    v_NKC = v_NO.reshape(len(x_ND), -1, head_dim)

    q_BTHC, k_BSKC, v_BSKC = layout.grid(q_NHC), layout.grid(k_NKC), layout.grid(v_NKC)
    if cache is not None:
        keys_BSKC, values_BSKC = cache
        keys_BSKC[layout.rows_N, layout.positions_N] = k_NKC
        values_BSKC[layout.rows_N, layout.positions_N] = v_NKC
        end = int(layout.positions_N.max()) + 1
        k_BSKC, v_BSKC = keys_BSKC[:, :end], values_BSKC[:, :end]

    context_BTHC, core_saved = attend(q_BTHC, k_BSKC, v_BSKC, layout.first_B)
    context_NO = layout.flat(context_BTHC).reshape(len(x_ND), -1)
    y_ND, o_saved = linear(context_NO, wo_DO)
    return y_ND, (q_saved, k_saved, v_saved, o_saved, core_saved, head_dim, angles, layout)


def attention_bwd(dy_ND, saved):
    q_saved, k_saved, v_saved, o_saved, core_saved, head_dim, angles, layout = saved
    num_tokens = len(dy_ND)
    dcontext_NO, dwo_DO = linear_bwd(dy_ND, o_saved)                            # y = context·Woᵀ
    dcontext_BTHC = layout.grid(dcontext_NO.reshape(num_tokens, -1, head_dim))
    dq_BTHC, dk_BSKC, dv_BSKC = attend_bwd(dcontext_BTHC, core_saved)           # context = attend(q, k, v)

    dq_NHC = rope_bwd(layout.flat(dq_BTHC), *angles)                            # q = R(φ)·(x·Wqᵀ)
    dk_NKC = rope_bwd(layout.flat(dk_BSKC), *angles)                            # k = R(φ)·(x·Wkᵀ)
    dv_NKC = layout.flat(dv_BSKC)                                               # v is not rotated

    dx_via_q_ND, dwq_OD = linear_bwd(dq_NHC.reshape(num_tokens, -1), q_saved)
    dx_via_k_ND, dwk_OD = linear_bwd(dk_NKC.reshape(num_tokens, -1), k_saved)
    dx_via_v_ND, dwv_OD = linear_bwd(dv_NKC.reshape(num_tokens, -1), v_saved)
    dx_ND = dx_via_q_ND + dx_via_k_ND + dx_via_v_ND                             # x feeds queries, keys and values
    return dx_ND, dwq_OD, dwk_OD, dwv_OD, dwo_DO


def attend(q_BTHC, k_BSKC, v_BSKC, first_B):
    """context = softmax(q·kᵀ/√C where s ≤ first + t, else −inf)·v

    The G query heads of one key/value head are folded into the rows of one product: (G·T, C)·(C, S).
    """
    B, T, H, C = q_BTHC.shape
    S, K = k_BSKC.shape[1:3]
    G = H // K
    q_BKXC = q_BTHC.reshape(B, T, K, G, C).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, C)
    k_BKSC, v_BKSC = k_BSKC.transpose(0, 2, 1, 3), v_BSKC.transpose(0, 2, 1, 3)

    scores_BKXS = (q_BKXC @ k_BKSC.swapaxes(-1, -2)) * C**-0.5
    hidden_BTS = np.arange(S) > first_B[:, None, None] + np.arange(T)[:, None]
    scores_BKGTS = scores_BKXS.reshape(B, K, G, T, S)  # a view
    np.copyto(scores_BKGTS, -np.inf, where=hidden_BTS[:, None, None])
    p_BKXS = softmax(scores_BKXS)

    context_BKXC = p_BKXS @ v_BKSC
    context_BTHC = context_BKXC.reshape(B, K, G, T, C).transpose(0, 3, 1, 2, 4).reshape(B, T, H, C)
    return context_BTHC, (q_BKXC, k_BKSC, v_BKSC, p_BKXS)


def attend_bwd(dcontext_BTHC, saved):
    q_BKXC, k_BKSC, v_BKSC, p_BKXS = saved
    B, T, H, C = dcontext_BTHC.shape
    K = k_BKSC.shape[1]
    G = H // K
    dcontext_BKXC = dcontext_BTHC.reshape(B, T, K, G, C).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, C)

    dp_BKXS = dcontext_BKXC @ v_BKSC.swapaxes(-1, -2)                           # dL/dp = dcontext·vᵀ
    dv_BKSC = p_BKXS.swapaxes(-1, -2) @ dcontext_BKXC                           # dL/dv = pᵀ·dcontext, summed over G
    dscores_BKXS = softmax_bwd(dp_BKXS, p_BKXS)                                 # 0 where p is 0: hidden keys get nothing
    dscores_BKXS *= C**-0.5                                                     # scores = q·kᵀ/√C
    dq_BKXC = dscores_BKXS @ k_BKSC                                             # dL/dq = dscores·k/√C
    dk_BKSC = dscores_BKXS.swapaxes(-1, -2) @ q_BKXC                            # dL/dk = dscoresᵀ·q/√C, summed over G

    dq_BTHC = dq_BKXC.reshape(B, K, G, T, C).transpose(0, 3, 1, 2, 4).reshape(B, T, H, C)
    return dq_BTHC, dk_BKSC.transpose(0, 2, 1, 3), dv_BKSC.transpose(0, 2, 1, 3)
