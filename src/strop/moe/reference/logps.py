"""Log-probs of tokens under softmax(logits / temperature), and entropies. Shapes: M scored tokens, V vocabulary."""

import numpy as np

from strop.moe.sampling import sampling_logps


def logps(logits_MV, targets_M, temperature):
    """log p = log softmax(z/t) in float64, as in sampling,  H = −Σ p·log p"""
    log_p_MV = sampling_logps(logits_MV, temperature=temperature)
    p_MV = np.exp(log_p_MV)
    logps_M = log_p_MV[np.arange(len(targets_M)), targets_M]
    log_p_MV = np.where(p_MV == 0, 0.0, log_p_MV)  # so that p·log p is 0, not 0·(−inf) = NaN
    entropy_M = -(p_MV * log_p_MV).sum(-1)
    return logps_M, entropy_M, (log_p_MV, p_MV, entropy_M, targets_M, temperature, logits_MV.dtype)


def logps_bwd(dlogps_M, dentropy_M, saved):
    log_p_MV, p_MV, entropy_M, targets_M, temperature, dtype = saved
    ds_MV = -p_MV * dlogps_M[:, None]                                       # dlogp/ds_v = [v = target] − p_v,  s = z/t
    ds_MV[np.arange(len(targets_M)), targets_M] += dlogps_M
    ds_MV -= p_MV * (log_p_MV + entropy_M[:, None]) * dentropy_M[:, None]   # dH/ds_v = −p_v·(log p_v + H)
    return (ds_MV / temperature).astype(dtype)                              # dL/dz = dL/ds / t
