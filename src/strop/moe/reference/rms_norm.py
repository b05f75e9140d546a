"""RMSNorm (Zhang & Sennrich 2019). Shapes: N tokens, D hidden."""

import numpy as np


def rms_norm(x_ND, w_D, eps):
    """y = w·n,  n = x·r,  r = (mean x² + eps)^-½"""
    r_N1 = 1 / np.sqrt(np.square(x_ND).mean(-1, keepdims=True) + eps)
    n_ND = x_ND * r_N1
    return w_D * n_ND, (n_ND, r_N1, w_D)


def rms_norm_bwd(dy_ND, saved):
    n_ND, r_N1, w_D = saved
    dw_D = (dy_ND * n_ND).sum(0)                        # dL/dw = Σ_n dy·n
    dn_ND = dy_ND * w_D                                 # dL/dn = dy·w
    via_r_N1 = (dn_ND * n_ND).mean(-1, keepdims=True)   # dr/dx = −r³·x/D = −r²·n/D, so Σ dn·x·dr/dx = −r·n·mean(dn·n)
    dx_ND = r_N1 * (dn_ND - n_ND * via_r_N1)            # dL/dx = r·dn (direct) − r·n·mean(dn·n) (through r)
    return dx_ND, dw_D
