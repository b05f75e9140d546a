"""Load-balancing loss (Switch Transformer, eq. 4–6), with Mixtral's conventions: one loss over all layers, and f
counts all k choices (so Σ f = k). Shapes: N tokens, E experts, J = k choices; lists have one entry per layer.
"""

import numpy as np


def aux_loss(p_NE_by_layer, experts_NJ_by_layer):
    """E·Σ_e f_e·P_e,  f_e = (tokens that chose e) / tokens,  P_e = mean probability of e;  tokens of all layers"""
    num_tokens, num_experts = p_NE_by_layer[0].shape
    total = num_tokens * len(p_NE_by_layer)
    f_E = sum(np.bincount(experts_NJ.ravel(), minlength=num_experts) for experts_NJ in experts_NJ_by_layer) / total
    P_E = sum(p_NE.sum(0, dtype=np.float64) for p_NE in p_NE_by_layer) / total
    return float(num_experts * (f_E @ P_E)), (f_E, total, p_NE_by_layer[0].dtype)


def aux_loss_bwd(dloss, saved):                         # f counts choices: it is constant, the gradient runs through P
    f_E, total, dtype = saved
    dP_E = dloss * len(f_E) * f_E                       # dL/dP_e = dL·E·f_e
    dp_E = dP_E / total                                 # dL/dp_ne = dL/dP_e / tokens, for every token of every layer
    return dp_E.astype(dtype)
