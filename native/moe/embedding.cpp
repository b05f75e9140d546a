// Embedding: row lookup. x_n = W[token_n]
#include "layers.h"

namespace strop::STROP_ISA {

template <class T>
void embedding(const Config& c, const T* w_VD, const Tokens& tokens, T* x_DN) {
    parallel_for(panels_of(tokens.N), [&](size_t panel) noexcept {
        const int64_t* ids = tokens.ids_N + panel * kPanel;
        to_lanes<T>(
            c.D, tokens_in_panel(tokens.N, panel), [&](size_t i) { return w_VD + ids[i] * c.D; }, panel_of(x_DN, c.D, panel));
    });
}

// dL/dW[v] = Σ_{n: token_n = v} dx_n, in the order of the tokens. A task has some of the features of every token.
template <class T>
void embedding_bwd(const Config& c, const Tokens& tokens, const T* dx_DN, bool add, Arena& arena, T* dw_VD) {
    constexpr size_t lanes = Lanes<T>::count;
    const size_t stride = padded(c.D);
    T* dx_ND = take<T>(arena, tokens.N * stride);
    parallel_for(panels_of(tokens.N), [&](size_t panel) noexcept {
        to_rows<T>(c.D, tokens_in_panel(tokens.N, panel), panel_of(dx_DN, c.D, panel),
                   [&](size_t i) { return dx_ND + (panel * kPanel + i) * stride; });
    });
    const size_t zero_rows = add ? 0 : c.V;
    constexpr size_t kRows = 256;
    parallel_for((zero_rows + kRows - 1) / kRows, [&](size_t task) noexcept {
        const size_t first = task * kRows, last = smaller(first + kRows, zero_rows);
        __builtin_memset(dw_VD + first * c.D, 0, (last - first) * c.D * sizeof(T));
    });
    constexpr size_t kFeatures = 4 * lanes;
    parallel_for((c.D + kFeatures - 1) / kFeatures, [&](size_t task) noexcept {
        const size_t first = task * kFeatures, last = smaller(first + kFeatures, c.D);
        for (size_t n = 0; n < tokens.N; ++n) {
            T* dw_D = dw_VD + tokens.ids_N[n] * c.D;
            for (size_t d = first; d < last; ++d) dw_D[d] += dx_ND[n * stride + d];
        }
    });
}

#define STROP_INSTANTIATE(T)                                                    \
    template void embedding<T>(const Config&, const T*, const Tokens&, T*);     \
    template void embedding_bwd<T>(const Config&, const Tokens&, const T*, bool, Arena&, T*);
STROP_INSTANTIATE(float)
STROP_INSTANTIATE(double)

}  // namespace strop::STROP_ISA
