"""One transformer block, pre-norm with two residual connections.

Shapes: N tokens, D hidden, O = heads·channels, E experts, F intermediate.
"""

from strop.moe.reference.attention import attention, attention_bwd
from strop.moe.reference.moe import moe, moe_bwd
from strop.moe.reference.rms_norm import rms_norm, rms_norm_bwd

ATTENTION = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight")
EXPERTS = ("mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def block(x_ND, weights, config, angles, layout, cache=None):
    """m = x + attention(norm₁(x)),  y = m + moe(norm₂(m))"""
    n1_ND, norm1_saved = rms_norm(x_ND, weights["input_layernorm.weight"], config.rms_norm_eps)
    wq_OD, wk_OD, wv_OD, wo_DO = (weights[name] for name in ATTENTION)
    a_ND, attention_saved = attention(n1_ND, wq_OD, wk_OD, wv_OD, wo_DO, config.head_dim, angles, layout, cache)
    m_ND = x_ND + a_ND
    n2_ND, norm2_saved = rms_norm(m_ND, weights["post_attention_layernorm.weight"], config.rms_norm_eps)
    router_ED, gate_up_E2FD, down_EDF = (weights[name] for name in EXPERTS)
    e_ND, routing, moe_saved = moe(n2_ND, router_ED, gate_up_E2FD, down_EDF, config.top_k)
    return m_ND + e_ND, routing, (norm1_saved, attention_saved, norm2_saved, moe_saved)


def block_bwd(dy_ND, dp_aux_E, saved):
    norm1_saved, attention_saved, norm2_saved, moe_saved = saved
    dn2_ND, *dexperts = moe_bwd(dy_ND, dp_aux_E, moe_saved)                     # e = moe(n2)
    dm_via_moe_ND, dnorm2_D = rms_norm_bwd(dn2_ND, norm2_saved)                 # n2 = norm₂(m)
    dm_ND = dy_ND + dm_via_moe_ND                                               # y = m + e: residual + branch

    dn1_ND, *dattention = attention_bwd(dm_ND, attention_saved)                 # a = attention(n1)
    dx_via_attention_ND, dnorm1_D = rms_norm_bwd(dn1_ND, norm1_saved)           # n1 = norm₁(x)
    dx_ND = dm_ND + dx_via_attention_ND                                         # m = x + a: residual + branch

    grads = {"input_layernorm.weight": dnorm1_D, "post_attention_layernorm.weight": dnorm2_D}
    grads.update(zip(ATTENTION, dattention, strict=True))
    grads.update(zip(EXPERTS, dexperts, strict=True))
    return dx_ND, grads
