// One transformer block, pre-norm with two residual connections: m = x + attention(norm₁(x)),  y = m + moe(norm₂(m))
#include "layers.h"

namespace strop::STROP_ISA {

template <class T>
void take_block(Pass<T>& pass, BlockSaved<T>& s) {
    const Config& c = *pass.config;
    Arena& arena = *pass.arena;
    const size_t N = pass.tokens.N, num_panels = panels_of(N), tokens = num_panels * kPanel, O = c.H * c.C;
    s.r1_N = take<T>(arena, tokens);
    s.n1_DN = take_panels<T>(arena, c.D, num_panels);
    s.q_ON = take_panels<T>(arena, O, num_panels);
    s.context_NO = take<T>(arena, N * padded(O));
    s.max_NH = take<T>(arena, N * c.H);
    s.sum_NH = take<T>(arena, N * c.H);
    s.m_DN = take_panels<T>(arena, c.D, num_panels);
    s.r2_N = take<T>(arena, tokens);
    s.n2_DN = take_panels<T>(arena, c.D, num_panels);
    s.n2_ND = take<T>(arena, N * padded(c.D));
    s.p_EN = take_panels<T>(arena, c.E, num_panels);
    s.weights_NJ = take<T>(arena, N * c.J);
    s.total_N = take<T>(arena, tokens);
    s.experts_NJ = take<int32_t>(arena, N * c.J);

    const size_t expert_panels = N * c.J / kPanel + smaller(c.E, N * c.J);  // at most: every expert's last panel may be short
    s.groups.experts = take<int32_t>(arena, expert_panels);
    s.groups.counts = take<int32_t>(arena, expert_panels);
    s.groups.tokens_A = take<int32_t>(arena, expert_panels * kPanel);
    s.groups.assignments_NJ = take<int32_t>(arena, N * c.J);
    s.groups.first_panels_E = take<int32_t>(arena, c.E + 1);
    s.x_DA = take_panels<T>(arena, c.D, expert_panels);
    s.gate_up_2FA = take_panels<T>(arena, 2 * c.F, expert_panels);
    s.h_FA = take_panels<T>(arena, c.F, expert_panels);
    s.y_AD = take<T>(arena, expert_panels * kPanel * padded(c.D));
}

template <class T>
void block(Pass<T>& pass, const LayerWeights<T>& w, BlockSaved<T>& saved, T* y_DN) {
    const Config& c = *pass.config;
    rms_norm(c.D, c.eps, pass.tokens.N, saved.x_DN, w.norm1_D, saved.n1_DN, saved.r1_N);
    attention(pass, w, saved);
    rms_norm(c.D, c.eps, pass.tokens.N, saved.m_DN, w.norm2_D, saved.n2_DN, saved.r2_N);
    moe_layer(pass, w, saved, y_DN);
}

template <class T>
void block_bwd(Pass<T>& pass, const LayerWeights<T>& w, const BlockSaved<T>& saved, const T* dp_aux_E, T* dy_DN,
               const LayerWeights<T>& grads) {
    const Config& c = *pass.config;
    const size_t N = pass.tokens.N;
    const Arena::Mark mark = pass.arena->mark();
    T *dn_DN = take_panels<T>(*pass.arena, c.D, panels_of(N)), *d_DN = dy_DN;
    moe_layer_bwd(pass, w, saved, d_DN, dp_aux_E, dn_DN, grads);                                        // e = moe(n2)
    rms_norm_bwd(c.D, N, dn_DN, saved.m_DN, saved.r2_N, w.norm2_D, d_DN, *pass.arena, d_DN, grads.norm2_D);  // y = m + e
    attention_bwd(pass, w, saved, d_DN, dn_DN, grads);                                                  // a = attention(n1)
    rms_norm_bwd(c.D, N, dn_DN, saved.x_DN, saved.r1_N, w.norm1_D, d_DN, *pass.arena, d_DN, grads.norm1_D);  // m = x + a
    pass.arena->release(mark);
}

#define STROP_INSTANTIATE(T)                                                                    \
    template void take_block<T>(Pass<T>&, BlockSaved<T>&);                                      \
    template void block<T>(Pass<T>&, const LayerWeights<T>&, BlockSaved<T>&, T*);               \
    template void block_bwd<T>(Pass<T>&, const LayerWeights<T>&, const BlockSaved<T>&, const T*, T*, const LayerWeights<T>&);
STROP_INSTANTIATE(float)
STROP_INSTANTIATE(double)

}  // namespace strop::STROP_ISA
