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

    const size_t expert_panels = N * c.J / kPanel + smaller(c.E, N * c.J);  // an upper bound: every expert's last panel may be incomplete
    s.groups.experts = take<int32_t>(arena, expert_panels);
    s.groups.counts = take<int32_t>(arena, expert_panels);
    s.groups.tokens_A = take<int32_t>(arena, expert_panels * kPanel);
    s.groups.assignments_NJ = take<int32_t>(arena, N * c.J);
    s.groups.first_panels_E = take<int32_t>(arena, c.E + 1);
    s.x_DA = take_panels<T>(arena, c.D, expert_panels);
    s.gate_up_2FA = pass.saving && !pass.transposed ? take_panels<T>(arena, 2 * c.F, expert_panels) : nullptr;
    s.gate_up_A2F = pass.saving && pass.transposed ? take<T>(arena, expert_panels * kPanel * spread(2 * padded(c.F))) : nullptr;
    s.h_FA = take_panels<T>(arena, c.F, expert_panels);
    s.y_AD = take<T>(arena, expert_panels * kPanel * padded(c.D));
}

namespace {

// Returns whether no row has tokens in two strips. Then a strip's queries need only keys of that strip, or of a cache.
bool rows_in_one_strip(const Tokens& tokens, size_t size) {
    if (tokens.ends_N) return false;
    for (size_t n = size; n < tokens.N; n += size)
        if (tokens.rows_N[n - 1] == tokens.rows_N[n]) return false;
    return true;
}

// Collects the last token of each row in new panels.
template <class T>
T* take_last(const Tokens& tokens, size_t features, const T* x_DN, Arena& arena) {
    T* last_DB = take_panels<T>(arena, features, panels_of(tokens.B));
    for (size_t b = 0; b < tokens.B; ++b) {
        const size_t n = tokens.starts_B[b + 1] - 1;
        const T* from = panel_of(x_DN, features, n / kPanel) + n % kPanel;
        T* to = panel_of(last_DB, features, b / kPanel) + b % kPanel;
        for (size_t d = 0; d < features; ++d) to[d * kPanel] = from[d * kPanel];
    }
    return last_DB;
}

template <class T>
void go_on_with_last(Pass<T>& pass, BlockSaved<T>& saved) {
    const Config& c = *pass.config;
    Tokens& tokens = pass.tokens;
    saved.x_DN = take_last(tokens, c.D, saved.x_DN, *pass.arena);
    saved.q_ON = take_last(tokens, c.H * c.C, saved.q_ON, *pass.arena);
    int32_t *rows_B = take<int32_t>(*pass.arena, tokens.B), *positions_B = take<int32_t>(*pass.arena, tokens.B);
    for (size_t b = 0; b < tokens.B; ++b) {
        rows_B[b] = tokens.rows_N[tokens.starts_B[b + 1] - 1];
        positions_B[b] = tokens.positions_N[tokens.starts_B[b + 1] - 1];
    }
    tokens.N = tokens.B;
    tokens.rows_N = rows_B;
    tokens.positions_N = positions_B;
}

}  // namespace

// A parallel region processes a strip until it needs results of other strips: their keys, or their choices of experts.
template <class T>
void block(Pass<T>& pass, const LayerWeights<T>& w, const BlockSaved<T>* before, bool narrow, BlockSaved<T>& saved) {
    const Config& c = *pass.config;
    const size_t N = pass.tokens.N, size = tokens_per_task(N);
    const auto to_keys = [&](const Strip& strip) {
        if (before) {
            add_experts(pass, *before, strip, saved.x_DN);
        } else {
            embedding(c, pass.weights->embedding_VD, pass.tokens, strip, saved.x_DN);
            rope_angles(pass.rope, c.C / 2, pass.tokens, strip, pass.cos_PN, pass.sin_PN);
        }
        rms_norm(c.D, c.eps, strip, saved.x_DN, w.norm1_D, saved.n1_DN, saved.r1_N);
        queries_keys_values(pass, w, strip, saved);
    };
    const auto to_choice = [&](const Strip& strip) {
        attention(pass, w, strip, saved);
        rms_norm(c.D, c.eps, strip, saved.m_DN, w.norm2_D, saved.n2_DN, saved.r2_N);
        choose_experts(pass, w, strip, saved);
    };
    if (!narrow && rows_in_one_strip(pass.tokens, size)) {
        for_strips(N, size, [&](const Strip& strip) { to_keys(strip), to_choice(strip); });
    } else {
        for_strips(N, size, to_keys);
        if (narrow) go_on_with_last(pass, saved);
        for_strips(pass.tokens.N, tokens_per_task(pass.tokens.N), to_choice);
    }
    run_experts(pass, w, saved);
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
    template void block<T>(Pass<T>&, const LayerWeights<T>&, const BlockSaved<T>*, bool, BlockSaved<T>&); \
    template void block_bwd<T>(Pass<T>&, const LayerWeights<T>&, const BlockSaved<T>&, const T*, T*, const LayerWeights<T>&);
STROP_INSTANTIATE(float)
STROP_INSTANTIATE(double)

}  // namespace strop::STROP_ISA
