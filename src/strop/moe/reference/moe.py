"""Mixture of experts: each token goes to its k experts, and their outputs are summed with the router's weights.

The A = N·J assignments are sorted by expert, so that each expert is one matrix product over its tokens.

Shapes: N tokens, D hidden, E experts, F intermediate, J = k choices, A = N·J assignments.
"""

import numpy as np

from strop.moe.reference.experts import expert, expert_bwd
from strop.moe.reference.router import route, route_bwd


def moe(x_ND, router_ED, gate_up_E2FD, down_EDF, top_k):
    """y_n = Σ_j weights_nj · expert_{e_nj}(x_n)"""
    weights_NJ, experts_NJ, p_NE, router_saved = route(x_ND, router_ED, top_k)
    order_A = np.argsort(experts_NJ.ravel(), kind="stable")  # assignment a = n·J + j, grouped by expert
    ends_E = np.cumsum(np.bincount(experts_NJ.ravel(), minlength=len(router_ED)))
    x_AD = x_ND[order_A // top_k]

    y_AD = np.empty((order_A.size, x_ND.shape[1]), x_ND.dtype)
    used = []
    for e, (start, end) in enumerate(zip([0, *ends_E[:-1]], ends_E, strict=True)):
        if start < end:  # skip experts without tokens
            y_MD, saved = expert(x_AD[start:end], gate_up_E2FD[e], down_EDF[e])
            y_AD[order_A[start:end]] = y_MD  # back to the order of the assignments
            used.append((e, order_A[start:end], saved))

    y_NJD = y_AD.reshape(*experts_NJ.shape, -1)
    y_ND = np.einsum("nj,njd->nd", weights_NJ, y_NJD)
    return y_ND, (p_NE, experts_NJ), (weights_NJ, y_NJD, used, router_saved, gate_up_E2FD.shape, down_EDF.shape)


def moe_bwd(dy_ND, dp_aux_E, saved):
    weights_NJ, y_NJD, used, router_saved, gate_up_shape, down_shape = saved
    dweights_NJ = np.einsum("nd,njd->nj", dy_ND, y_NJD)                         # dL/dw_nj = dy_n·expert_j(x_n)
    dy_AD = (weights_NJ[..., None] * dy_ND[:, None]).reshape(-1, dy_ND.shape[1])  # dL/d expert_j(x_n) = w_nj·dy_n

    dgate_up_E2FD, ddown_EDF = np.zeros(gate_up_shape, dy_ND.dtype), np.zeros(down_shape, dy_ND.dtype)
    dx_AD = np.empty_like(dy_AD)
    for e, assigned_M, expert_saved in used:
        dx_AD[assigned_M], dgate_up_E2FD[e], ddown_EDF[e] = expert_bwd(dy_AD[assigned_M], expert_saved)

    dx_via_experts_ND = dx_AD.reshape(y_NJD.shape).sum(1)                       # x_n feeds its k experts
    dx_via_router_ND, drouter_ED = route_bwd(dweights_NJ, dp_aux_E, router_saved)
    dx_ND = dx_via_experts_ND + dx_via_router_ND                                # and the router
    return dx_ND, drouter_ED, dgate_up_E2FD, ddown_EDF
