// Experts: SwiGLU feed-forwards. y = swiglu(x·Wgᵀ, x·Wuᵀ)·Wdᵀ on the tokens that each was given.
#include "layers.h"
#include "linear.h"

namespace strop::STROP_ISA {
namespace {

// 1 / (1 + exp(−x)), from exp(−|x|), which does not overflow
template <class T>
inline VecOf<T> sigmoid(VecOf<T> x) {
    const VecOf<T> e = exp_to_one<T>(-absolute<T>(x));
    return (x < T(0) ? e : broadcast<T>(1)) * reciprocal(e + T(1));
}

// h = silu(gate)·up,  silu(g) = g·σ(g): rows of whole vectors, gate and up in rows of `from_row`
template <class T>
inline void swiglu(size_t rows, size_t columns, const T* gate, const T* up, size_t from_row, T* h, size_t h_row) {
    constexpr size_t lanes = Lanes<T>::count;
    for (size_t row = 0; row < rows; ++row)
        for (size_t i = 0; i < columns; i += lanes) {
            const VecOf<T> g = load(gate + row * from_row + i);
            store(h + row * h_row + i, (g * sigmoid<T>(g)) * load(up + row * from_row + i));
        }
}

// Of one token: dgate, dup and h again from dh, gate and up; rows are padded to whole vectors.
template <class T>
inline void swiglu_bwd(size_t F, const T* dh_F, const T* gate_F, const T* up_F, T* dgate_F, T* dup_F, T* h_F) {
    constexpr size_t lanes = Lanes<T>::count;
    for (size_t f = 0; f < F; f += lanes) {
        const VecOf<T> dh = load(dh_F + f), gate = load(gate_F + f), up = load(up_F + f);
        const VecOf<T> s = sigmoid<T>(gate), silu = gate * s;
        store(h_F + f, silu * up);
        store(dup_F + f, dh * silu);                                        // dL/dup = dh·silu(g)
        store(dgate_F + f, dh * up * (s + silu * (T(1) - s)));              // dL/dgate = dh·up·silu′,  silu′ = σ + g·σ·(1 − σ)
    }
}

size_t tokens_of(const Groups& groups, size_t e) {
    const size_t first = groups.first_panels_E[e], last = groups.first_panels_E[e + 1];
    return first == last ? 0 : (last - first - 1) * kPanel + static_cast<size_t>(groups.counts[last - 1]);
}

// What `experts` saved, the other way round, in the rows of gate_up_A2F.
template <class T>
T* take_gate_up_rows(const Config& c, const Groups& groups, const T* gate_up_2FA, Arena& arena) {
    const size_t F = c.F, Fp = padded(F), stride = spread(2 * Fp);
    T* gate_up_A2F = take<T>(arena, groups.num_panels * kPanel * stride);
    parallel_for(2 * groups.num_panels, [&](size_t task) noexcept {
        const size_t panel = task / 2, is_up = task % 2;
        to_rows<T>(F, groups.counts[panel], panel_of(gate_up_2FA, 2 * F, panel) + is_up * F * kPanel,
                   [&](size_t i) { return gate_up_A2F + (panel * kPanel + i) * stride + is_up * Fp; });
    });
    return gate_up_A2F;
}

}  // namespace

template <class T>
void experts(Pass<T>& pass, const LayerWeights<T>& w, BlockSaved<T>& saved) {
    const Config& c = *pass.config;
    const Groups& groups = saved.groups;
    const size_t D = c.D, F = c.F;
    Arena& arena = *pass.arena;
    const size_t columns = groups.num_panels * kPanel;
    for_tasks(strips_of(columns), columns * D, [&](size_t task) noexcept {
        const Strip strip = strip_at(columns, task);
        const size_t count = groups.counts[strip.panel];
        if (strip.column >= count) return;
        const int32_t* token = groups.tokens_A + strip.first;
        to_lanes<T>(D, smaller(count - strip.column, Strip::size), [&](size_t i) { return saved.n2_ND + token[i] * padded(D); },
                    strip_of(saved.x_DA, D, strip));
    });

    auto* products = take<Product<T>>(arena, groups.num_panels);
    for (size_t panel = 0; panel < groups.num_panels; ++panel)
        products[panel] = linear<T>(w.gate_up_E2FD + groups.experts[panel] * 2 * F * D, F, D, panel_of(saved.x_DA, D, panel),
                                    groups.counts[panel], pass.saving ? panel_of(saved.gate_up_2FA, 2 * F, panel) : nullptr);
    for_rows_of(products, groups.num_panels, [&](size_t panel, size_t first, size_t last) {
        constexpr size_t kRows = 24;
        T unsaved[2 * kRows * kPanel];  // gate and up stay in the nearest cache where no backward will ask for them
        for (size_t f = first; f < last; f += kRows) {
            Product<T> gate = products[panel];
            gate.M = smaller(last - f, kRows);
            gate.a += f * D;
            gate.c = pass.saving ? gate.c + f * kPanel : unsaved;
            Product<T> up = gate;
            up.a += F * D;
            up.c += (pass.saving ? F : kRows) * kPanel;
            multiply(gate);
            multiply(up);
            swiglu(gate.M, groups.counts[panel], gate.c, up.c, kPanel, panel_of(saved.h_FA, F, panel) + f * kPanel, kPanel);
        }
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
void experts_by_rows(Pass<T>& pass, const typename Transposed<T>::Layer& w, BlockSaved<T>& saved) {
    const Config& c = *pass.config;
    const Groups& groups = saved.groups;
    const size_t D = c.D, F = c.F, Dp = padded(D), Fp = padded(F), A = groups.num_panels * kPanel;
    const size_t F_panels = panels_of(F), D_panels = panels_of(D), stride = spread(2 * Fp);
    Arena& arena = *pass.arena;
    T *x_AD = take<T>(arena, A * Dp), *h_AF = take<T>(arena, A * Fp);
    for_tasks(groups.num_panels, A * D, [&](size_t panel) noexcept {
        const int32_t* token = groups.tokens_A + panel * kPanel;
        for (size_t i = 0; i < static_cast<size_t>(groups.counts[panel]); ++i)
            __builtin_memcpy(x_AD + (panel * kPanel + i) * Dp, saved.n2_ND + token[i] * Dp, D * sizeof(T));
    });

    auto* products = take<Product<T>>(arena, c.E * (F_panels > D_panels ? F_panels : D_panels));
    size_t count = 0;
    for (size_t e = 0; e < c.E; ++e)
        for (size_t panel = 0; panel < F_panels && tokens_of(groups, e); ++panel) {
            const size_t first = groups.first_panels_E[e] * kPanel, f = panel * kPanel;
            products[count++] = linear_by_rows<T>(x_AD + first * Dp, Dp, D, panel_of(w.gate_up_E, D, 2 * e * F_panels + panel),
                                                  columns_of<T>(smaller(F - f, kPanel)), tokens_of(groups, e), h_AF + first * Fp + f, Fp);
        }
    for_rows_of(products, count, [&](size_t index, size_t first, size_t last) {
        constexpr size_t kRows = 24;
        T unsaved[2 * kRows * kPanel];
        const size_t a = (products[index].a - x_AD) / Dp, f = static_cast<size_t>(products[index].c - h_AF) % Fp;
        for (size_t row = first; row < last; row += kRows) {
            Product<T> gate = products[index];
            T* h = gate.c + row * Fp;
            gate.M = smaller(last - row, kRows);
            gate.a += row * Dp;
            gate.c = saved.gate_up_A2F ? saved.gate_up_A2F + (a + row) * stride + f : unsaved;
            gate.c_row = saved.gate_up_A2F ? stride : kPanel;
            Product<T> up = gate;
            up.b += F_panels * D * kPanel;
            up.c += saved.gate_up_A2F ? Fp : kRows * kPanel;
            multiply(gate);
            multiply(up);
            swiglu(gate.M, gate.N, gate.c, up.c, gate.c_row, h, Fp);
        }
    });

    count = 0;
    for (size_t e = 0; e < c.E; ++e)
        for (size_t panel = 0; panel < D_panels && tokens_of(groups, e); ++panel) {
            const size_t first = groups.first_panels_E[e] * kPanel, d = panel * kPanel;
            products[count++] = linear_by_rows<T>(h_AF + first * Fp, Fp, F, panel_of(w.down_E, F, e * D_panels + panel),
                                                  columns_of<T>(smaller(D - d, kPanel)), tokens_of(groups, e), saved.y_AD + first * Dp + d, Dp);
        }
    run_products(products, count);
}

// Tokens are rows here: an expert's few tokens leave no lane idle, and the weights are read as they are stored.
template <class T>
void experts_bwd(Pass<T>& pass, const LayerWeights<T>& w, const BlockSaved<T>& saved, const T* dy_AD, const T* x_AD, T* dx_AD,
                 const LayerWeights<T>& grads) {
    const Config& c = *pass.config;
    const Groups& groups = saved.groups;
    const size_t D = c.D, F = c.F, Dp = padded(D), Fp = padded(F), Fs = spread(F), A = groups.num_panels * kPanel;
    const size_t stride = spread(2 * Fp);  // of rows with the gate, then up from Fp on
    Arena& arena = *pass.arena;
    T *dgate_up_A2F = take<T>(arena, A * stride), *dh_AF = take<T>(arena, A * Fs), *h_AF = take<T>(arena, A * Fs);
    const T* gate_up_A2F = saved.gate_up_A2F ? saved.gate_up_A2F : take_gate_up_rows(c, groups, saved.gate_up_2FA, arena);

    auto* products = take<Product<T>>(arena, 4 * c.E);
    size_t* firsts = take<size_t>(arena, c.E);  // assignment of each used expert's first token
    size_t used = 0;
    for (size_t e = 0; e < c.E; ++e) {                                                      // y = h·Wdᵀ
        const size_t tokens = tokens_of(groups, e), first = groups.first_panels_E[e] * kPanel;
        if (tokens == 0) continue;
        firsts[used] = first;
        products[used++] = linear_bwd_input_rows<T>(dy_AD + first * Dp, Dp, D, w.down_EDF + e * D * F, F, tokens, dh_AF + first * Fs, Fs);
    }
    run_products(products, used, [&](size_t i, size_t first, size_t last) {                 // h = silu(gate)·up
        for (size_t a = firsts[i] + first; a < firsts[i] + last; ++a) {
            const T* gate_F = gate_up_A2F + a * stride;
            T* dgate_F = dgate_up_A2F + a * stride;
            swiglu_bwd(F, dh_AF + a * Fs, gate_F, gate_F + Fp, dgate_F, dgate_F + Fp, h_AF + a * Fs);
        }
    });

    for (size_t e = 0; e < c.E; ++e) {                                                      // (gate, up) = x·(Wg, Wu)ᵀ
        const size_t tokens = tokens_of(groups, e), first = groups.first_panels_E[e] * kPanel;
        const T *dgate = dgate_up_A2F + first * stride, *x = x_AD + first * Dp, *gate_up_2FD = w.gate_up_E2FD + e * 2 * F * D;
        T* dgate_up_2FD = grads.gate_up_E2FD + e * 2 * F * D;
        Product<T>* of_expert = products + 4 * e;
        of_expert[0] = linear_bwd_weight_rows<T>(dy_AD + first * Dp, Dp, D, h_AF + first * Fs, Fs, F, tokens, grads.down_EDF + e * D * F);
        of_expert[1] = linear_bwd_weight_rows<T>(dgate, stride, F, x, Dp, D, tokens, dgate_up_2FD);
        of_expert[2] = linear_bwd_weight_rows<T>(dgate + Fp, stride, F, x, Dp, D, tokens, dgate_up_2FD + F * D);
        of_expert[3] = linear_bwd_input_rows<T>(dgate, stride, 2 * F, gate_up_2FD, D, tokens, dx_AD + first * Dp, Dp);
        of_expert[3].k_block = F;  // from the gate's part of a row to the up projection's
        of_expert[3].a_step = Fp;
        of_expert[3].b_step = F * D;
    }
    run_products(products, 4 * c.E);
}

#define STROP_INSTANTIATE(T)                                                                        \
    template void experts<T>(Pass<T>&, const LayerWeights<T>&, BlockSaved<T>&);                     \
    template void experts_by_rows<T>(Pass<T>&, const typename Transposed<T>::Layer&, BlockSaved<T>&); \
    template void experts_bwd<T>(Pass<T>&, const LayerWeights<T>&, const BlockSaved<T>&, const T*, const T*, T*, const LayerWeights<T>&);
STROP_INSTANTIATE(float)
STROP_INSTANTIATE(double)

}  // namespace strop::STROP_ISA
