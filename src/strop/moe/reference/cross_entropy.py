"""Cross-entropy, the mean over the unmasked targets. Shapes: N tokens, V vocabulary."""

import numpy as np


def cross_entropy(logits_NV, targets_N, counts_N):
    """L = −(1/M)·Σ_{n counts} log softmax(logits_n)[target_n],  M the number of these n;  L = 0 if M = 0"""
    targets_N = np.where(counts_N, targets_N, 0)  # a masked target may be an invalid id
    z_NV = logits_NV - logits_NV.max(-1, keepdims=True)
    exp_NV = np.exp(z_NV)
    sum_N1 = exp_NV.sum(-1, keepdims=True)
    logp_N = z_NV[np.arange(len(z_NV)), targets_N] - np.log(sum_N1[:, 0])
    num_loss_tokens = max(int(counts_N.sum()), 1)
    loss = -logp_N.sum(where=counts_N, dtype=np.float64) / num_loss_tokens
    return float(loss), (exp_NV, sum_N1, targets_N, counts_N, num_loss_tokens)


def cross_entropy_bwd(saved):                           # of L itself: dL = 1
    exp_NV, sum_N1, targets_N, counts_N, num_loss_tokens = saved
    share_N1 = (counts_N / num_loss_tokens)[:, None].astype(exp_NV.dtype)
    dlogits_NV = exp_NV * (share_N1 / sum_N1)           # dL/dz_nv = (softmax_nv …
    dlogits_NV[np.arange(len(exp_NV)), targets_N] -= share_N1[:, 0]  # … − [v = target_n]) / M
    return dlogits_NV
