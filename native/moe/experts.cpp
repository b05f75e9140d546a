// Experts: SwiGLU feed-forwards. y = swiglu(x·Wgᵀ, x·Wuᵀ)·Wdᵀ on the tokens that each was given.
#include "layers.h"
#include "linear.h"

namespace strop::STROP_ISA {
namespace {

// 1 / (1 + exp(−x)), from exp(−|x|), which does not overflow
template <class T>
inline VecOf<T> sigmoid(VecOf<T> x) {
    const VecOf<T> e = exp_to_one<T>(-absolute<T>(x));
    return (x < T(0) ? e : broadcast<T>(1)) / (e + T(1));
}

// h = silu(gate)·up,  silu(g) = g·σ(g)
template <class T>
inline void swiglu(size_t rows, size_t tokens, const T* gate_FA, const T* up_FA, T* h_FA) {
    constexpr size_t lanes = Lanes<T>::count;
    for (size_t f = 0; f < rows; ++f)
        for (size_t i = 0; i < tokens; i += lanes) {
            const size_t at = f * kPanel + i;
            const VecOf<T> gate = load(gate_FA + at);
            store(h_FA + at, (gate * sigmoid<T>(gate)) * load(up_FA + at));
        }
}

// dgate and dup from dh, in the place of dgate_FA and dup_FA.
template <class T>
inline void swiglu_bwd(size_t rows, size_t tokens, const T* dh_FA, const T* gate_FA, const T* up_FA, T* dgate_FA, T* dup_FA) {
    constexpr size_t lanes = Lanes<T>::count;
    for (size_t f = 0; f < rows; ++f)
        for (size_t i = 0; i < tokens; i += lanes) {
            const size_t at = f * kPanel + i;
            const VecOf<T> dh = load(dh_FA + at), gate = load(gate_FA + at), up = load(up_FA + at);
            const VecOf<T> s = sigmoid<T>(gate), silu = gate * s;
            store(dup_FA + at, dh * silu);                                      // dL/dup = dh·silu(g)
            store(dgate_FA + at, dh * up * (s + silu * (T(1) - s)));            // dL/dgate = dh·up·silu′,  silu′ = σ + g·σ·(1 − σ)
        }
}

}  // namespace

template <class T>
void experts(Pass<T>& pass, const LayerWeights<T>& w, BlockSaved<T>& saved) {
    const Config& c = *pass.config;
    const Groups& groups = saved.groups;
    const size_t D = c.D, F = c.F;
    Arena& arena = *pass.arena;
    auto* products = take<Product<T>>(arena, groups.num_panels);
    for (size_t panel = 0; panel < groups.num_panels; ++panel)
        products[panel] = linear<T>(w.gate_up_E2FD + groups.experts[panel] * 2 * F * D, F, D, panel_of(saved.x_DA, D, panel),
                                    groups.counts[panel], panel_of(saved.gate_up_2FA, 2 * F, panel));
    run_products(products, groups.num_panels, [&](size_t panel, size_t first, size_t last) {
        const Product<T>& gate = products[panel];
        Product<T> up = gate;
        up.a = gate.a + F * D;
        up.c = gate.c + F * kPanel;
        multiply_rows(up, first, last);
        swiglu(last - first, groups.counts[panel], gate.c + first * kPanel, up.c + first * kPanel,
               panel_of(saved.h_FA, F, panel) + first * kPanel);
    });

    T* y_DA = take_panels<T>(arena, D, groups.num_panels);
    for (size_t panel = 0; panel < groups.num_panels; ++panel)
        products[panel] = linear<T>(w.down_EDF + groups.experts[panel] * D * F, D, F, panel_of(saved.h_FA, F, panel),
                                    groups.counts[panel], panel_of(y_DA, D, panel));
    run_products(products, groups.num_panels, [&](size_t panel, size_t first, size_t last) {
        to_rows<T>(last - first, groups.counts[panel], panel_of(y_DA, D, panel) + first * kPanel,
                   [&](size_t i) { return saved.y_AD + (panel * kPanel + i) * padded(D) + first; });
    });
}

template <class T>
void experts_bwd(Pass<T>& pass, const LayerWeights<T>& w, const BlockSaved<T>& saved, const T* dy_DA, const T* x_AD,
                 const T* h_AF, T* dx_AD, const LayerWeights<T>& grads) {
    const Config& c = *pass.config;
    const Groups& groups = saved.groups;
    const size_t D = c.D, F = c.F, num_panels = groups.num_panels;
    Arena& arena = *pass.arena;
    T* dh_FA = take_panels<T>(arena, F, num_panels);
    T* dgate_up_2FA = take_panels<T>(arena, 2 * F, num_panels);
    T* dx_DA = take_panels<T>(arena, D, num_panels);
    auto* products = take<Product<T>>(arena, num_panels + c.E);
    const auto tokens_of = [&](size_t e) {
        const size_t first = groups.first_panels_E[e], last = groups.first_panels_E[e + 1];
        return first == last ? 0 : (last - first - 1) * kPanel + static_cast<size_t>(groups.counts[last - 1]);
    };

    for (size_t panel = 0; panel < num_panels; ++panel)                                     // y = h·Wdᵀ
        products[panel] = linear_bwd_input<T>(w.down_EDF + groups.experts[panel] * D * F, D, F, panel_of(dy_DA, D, panel),
                                              groups.counts[panel], panel_of(dh_FA, F, panel));
    for (size_t e = 0; e < c.E; ++e) {
        const size_t first = groups.first_panels_E[e];
        products[num_panels + e] = linear_bwd_weight<T>(panel_of(dy_DA, D, first), D, h_AF + first * kPanel * padded(F), F,
                                                        tokens_of(e), grads.down_EDF + e * D * F);
    }
    run_products(products, num_panels + c.E, [&](size_t panel, size_t first, size_t last) {
        if (panel >= num_panels) return;
        const T* gate = panel_of(saved.gate_up_2FA, 2 * F, panel) + first * kPanel;         // h = silu(gate)·up
        T* dgate = panel_of(dgate_up_2FA, 2 * F, panel) + first * kPanel;
        swiglu_bwd(last - first, groups.counts[panel], panel_of(dh_FA, F, panel) + first * kPanel, gate, gate + F * kPanel,
                   dgate, dgate + F * kPanel);
    });

    for (size_t panel = 0; panel < num_panels; ++panel)                                     // (gate, up) = x·(Wg, Wu)ᵀ
        products[panel] = linear_bwd_input<T>(w.gate_up_E2FD + groups.experts[panel] * 2 * F * D, 2 * F, D,
                                              panel_of(dgate_up_2FA, 2 * F, panel), groups.counts[panel], panel_of(dx_DA, D, panel));
    for (size_t e = 0; e < c.E; ++e) {
        const size_t first = groups.first_panels_E[e];
        products[num_panels + e] = linear_bwd_weight<T>(panel_of(dgate_up_2FA, 2 * F, first), 2 * F, x_AD + first * kPanel * padded(D), D,
                                                        tokens_of(e), grads.gate_up_E2FD + e * 2 * F * D);
    }
    run_products(products, num_panels + c.E, [&](size_t panel, size_t first, size_t last) {
        if (panel >= num_panels) return;
        to_rows<T>(last - first, groups.counts[panel], panel_of(dx_DA, D, panel) + first * kPanel,
                   [&](size_t i) { return dx_AD + (panel * kPanel + i) * padded(D) + first; });
    });
}

#define STROP_INSTANTIATE(T)                                                                        \
    template void experts<T>(Pass<T>&, const LayerWeights<T>&, BlockSaved<T>&);                     \
    template void experts_bwd<T>(Pass<T>&, const LayerWeights<T>&, const BlockSaved<T>&, const T*, const T*, const T*, T*, \
                                 const LayerWeights<T>&);
STROP_INSTANTIATE(float)
STROP_INSTANTIATE(double)

}  // namespace strop::STROP_ISA
