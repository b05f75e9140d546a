"""Embedding: row lookup. Shapes: N tokens, V vocabulary, D hidden."""

import numpy as np


def embedding(tokens_N, w_VD):
    """x_n = W[token_n]"""
    return w_VD[tokens_N], (tokens_N, w_VD.shape)


def embedding_bwd(dx_ND, saved):                        # x = onehot(token)·W
    tokens_N, shape_VD = saved
    dw_VD = np.zeros(shape_VD, dx_ND.dtype)
    np.add.at(dw_VD, tokens_N, dx_ND)                   # dL/dW[v] = Σ_{n: token_n = v} dx_n
    return dw_VD
