"""Router: softmax over all experts, the k largest, renormalised. Shapes: N tokens, D hidden, E experts, J = k choices."""

import numpy as np

from strop.moe.reference.linear import linear, linear_bwd
from strop.moe.reference.softmax import softmax, softmax_bwd


def route(x_ND, w_ED, top_k):
    """p = softmax(x·Wᵀ),  c = the k largest of p,  weights = c / Σ c

    Among equal probabilities the lower index comes first (a stable sort), so the choice does not depend on the machine.
    """
    logits_NE, linear_saved = linear(x_ND, w_ED)
    p_NE = softmax(logits_NE)
    experts_NJ = np.argsort(-p_NE, axis=-1, kind="stable")[:, :top_k]
    c_NJ = np.take_along_axis(p_NE, experts_NJ, axis=-1)
    total_N1 = c_NJ.sum(-1, keepdims=True)
    weights_NJ = c_NJ / total_N1
    return weights_NJ, experts_NJ, p_NE, (linear_saved, p_NE, experts_NJ, weights_NJ, total_N1)


def route_bwd(dweights_NJ, dp_aux_E, saved):
    """Return dx_ND and dw_ED. dp_aux_E is the auxiliary loss's gradient for each token's p, the second path."""
    linear_saved, p_NE, experts_NJ, weights_NJ, total_N1 = saved
    via_total_N1 = (dweights_NJ * weights_NJ).sum(-1, keepdims=True)
    dc_NJ = (dweights_NJ - via_total_N1) / total_N1     # weights = c/Σc:  dL/dc_j = (dw_j − Σ_i dw_i·w_i) / Σc
    dp_NE = np.broadcast_to(dp_aux_E, p_NE.shape).copy()  # path through the auxiliary loss
    rows_N1 = np.arange(len(p_NE))[:, None]
    dp_NE[rows_N1, experts_NJ] += dc_NJ                 # path through the choices; an unchosen expert gets nothing here
    dlogits_NE = softmax_bwd(dp_NE, p_NE)               # every expert gets something here
    return linear_bwd(dlogits_NE, linear_saved)         # dx_ND, dw_ED
