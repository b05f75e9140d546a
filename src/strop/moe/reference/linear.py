"""Linear map without bias, weights stored (out, in). Shapes: N tokens, D inputs, O outputs."""


def linear(x_ND, w_OD):
    """y = x·Wᵀ"""
    return x_ND @ w_OD.T, (x_ND, w_OD)


def linear_bwd(dy_NO, saved):
    x_ND, w_OD = saved
    dx_ND = dy_NO @ w_OD                                # dL/dx = dy·W
    dw_OD = dy_NO.T @ x_ND                              # dL/dW = dyᵀ·x
    return dx_ND, dw_OD
