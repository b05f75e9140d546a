// Mixture of experts: y_n = Σ_j weights_nj · expert_{e_nj}(x_n)
#include "layers.h"
#include "linear.h"

namespace strop::STROP_ISA {
namespace {

// Sets to_D = Σ_j weight(j)·row(j)_D, with j in the router's order
template <class T, class Weight, class Row>
inline void weighted_sum(size_t D, size_t J, Weight&& weight, Row&& row, T* to_D) {
    constexpr size_t lanes = Lanes<T>::count;
    for (size_t d = 0; d < D; d += lanes) {  // rows are padded to whole vectors
        VecOf<T> sum = broadcast<T>(weight(0)) * load(row(0) + d);
        for (size_t j = 1; j < J; ++j) sum = multiply_add(broadcast<T>(weight(j)), load(row(j) + d), sum);
        store(to_D + d, sum);
    }
}

template <class T>
inline T dot(size_t D, const T* a_D, const T* b_D) {
    constexpr size_t lanes = Lanes<T>::count;
    VecOf<T> sum{};
    size_t d = 0;
    for (; d + lanes <= D; d += lanes) sum = multiply_add(load(a_D + d), load(b_D + d), sum);
    if (d < D) sum = multiply_add(load_first(a_D + d, D - d), load_first(b_D + d, D - d), sum);
    return sum_lanes<T>(sum);
}

// Sets y_DN = x_DN + rows; the rows, token by token, are transposed into `scratch`.
template <class T>
inline void add_rows(size_t D, size_t tokens, const T* rows_ND, const T* x_DN, T* y_DN, T* scratch_DN) {
    constexpr size_t lanes = Lanes<T>::count;
    to_lanes<T>(D, tokens, [&](size_t i) { return rows_ND + i * padded(D); }, scratch_DN);
    for (size_t d = 0; d < D; ++d)
        for (size_t i = 0; i < tokens; i += lanes)
            store(y_DN + d * kPanel + i, load(x_DN + d * kPanel + i) + load(scratch_DN + d * kPanel + i));
}

}  // namespace

template <class T>
void choose_experts(Pass<T>& pass, const LayerWeights<T>& w, const Strip& strip, BlockSaved<T>& saved) {
    const size_t D = pass.config->D, stride = padded(D);
    route(*pass.config, w.router_ED, strip, saved);
    to_rows<T>(D, strip.tokens, strip_of(saved.n2_DN, D, strip), [&](size_t i) { return saved.n2_ND + (strip.first + i) * stride; });
}

template <class T>
void run_experts(Pass<T>& pass, const LayerWeights<T>& w, BlockSaved<T>& saved) {
    group_by_expert(*pass.config, pass.tokens.N, saved.experts_NJ, saved.groups);
    if (pass.transposed) experts_by_rows(pass, pass.transposed->layers[&w - pass.weights->layers], saved);
    else experts(pass, w, saved);
}

template <class T>
void add_experts(Pass<T>& pass, const BlockSaved<T>& saved, const Strip& strip, T* y_DN) {
    const Config& c = *pass.config;
    const Groups& groups = saved.groups;
    const size_t D = c.D, stride = padded(D);
    for (size_t n = strip.first; n < strip.first + strip.tokens; ++n)
        weighted_sum<T>(D, c.J, [&](size_t j) { return saved.weights_NJ[n * c.J + j]; },
                        [&](size_t j) { return saved.y_AD + groups.assignments_NJ[n * c.J + j] * stride; }, pass.sum_ND + n * stride);
    add_rows<T>(D, strip.tokens, pass.sum_ND + strip.first * stride, strip_of(saved.m_DN, D, strip), strip_of(y_DN, D, strip),
                strip_of(pass.sum_DN, D, strip));
}

template <class T>
void moe_layer_bwd(Pass<T>& pass, const LayerWeights<T>& w, const BlockSaved<T>& saved, const T* dy_DN, const T* dp_aux_E,
                   T* dn2_DN, const LayerWeights<T>& grads) {
    const Config& c = *pass.config;
    const Groups& groups = saved.groups;
    const size_t N = pass.tokens.N, num_panels = panels_of(N), D = c.D, stride = padded(D), A = groups.num_panels * kPanel;
    Arena& arena = *pass.arena;
    T *dy_ND = take<T>(arena, N * stride), *dweights_NJ = take<T>(arena, N * c.J);
    T *dlogits_EN = take_panels<T>(arena, c.E, num_panels), *via_router_DN = take_panels<T>(arena, D, num_panels);
    parallel_for(strips_of(N), [&](size_t task) noexcept {
        const Strip strip = strip_at(N, task);
        to_rows<T>(D, strip.tokens, strip_of(dy_DN, D, strip), [&](size_t i) { return dy_ND + (strip.first + i) * stride; });
        for (size_t n = strip.first; n < strip.first + strip.tokens; ++n)
            for (size_t j = 0; j < c.J; ++j)                                                // dL/dw_nj = dy_n·expert_j(x_n)
                dweights_NJ[n * c.J + j] = dot<T>(D, dy_ND + n * stride, saved.y_AD + groups.assignments_NJ[n * c.J + j] * stride);
        T* dlogits = strip_of(dlogits_EN, c.E, strip);
        route_bwd(c, strip, saved, dweights_NJ, dp_aux_E, dlogits);
        multiply(linear_bwd_input<T>(w.router_ED, c.E, D, dlogits, strip.tokens, strip_of(via_router_DN, D, strip)));
    });

    T* dx_AD = take<T>(arena, A * stride);
    experts_bwd(pass, w, saved, dy_ND, dx_AD, grads);

    T *sum_ND = take<T>(arena, N * stride), *sum_DN = take_panels<T>(arena, D, num_panels);
    Product<T> drouter = linear_bwd_weight<T>(dlogits_EN, c.E, saved.n2_ND, D, N, grads.router_ED);
    parallel_for(strips_of(N) + 1, [&](size_t task) noexcept {
        if (task == strips_of(N)) return multiply(drouter);
        const Strip strip = strip_at(N, task);
        for (size_t n = strip.first; n < strip.first + strip.tokens; ++n)                                     // x_n feeds its k experts
            weighted_sum<T>(D, c.J, [](size_t) { return T(1); },
                            [&](size_t j) { return dx_AD + groups.assignments_NJ[n * c.J + j] * stride; }, sum_ND + n * stride);
        add_rows<T>(D, strip.tokens, sum_ND + strip.first * stride, strip_of(via_router_DN, D, strip), strip_of(dn2_DN, D, strip),
                    strip_of(sum_DN, D, strip));                                            // and the router
    });
}

#define STROP_INSTANTIATE(T)                                                                    \
    template void choose_experts<T>(Pass<T>&, const LayerWeights<T>&, const Strip&, BlockSaved<T>&); \
    template void run_experts<T>(Pass<T>&, const LayerWeights<T>&, BlockSaved<T>&);             \
    template void add_experts<T>(Pass<T>&, const BlockSaved<T>&, const Strip&, T*);             \
    template void moe_layer_bwd<T>(Pass<T>&, const LayerWeights<T>&, const BlockSaved<T>&, const T*, const T*, T*, const LayerWeights<T>&);
STROP_INSTANTIATE(float)
STROP_INSTANTIATE(double)

}  // namespace strop::STROP_ISA
