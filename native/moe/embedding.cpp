// Embedding: row lookup. x_n = W[token_n]
#include "layers.h"

namespace strop::STROP_ISA {

template <class T>
void embedding(const Config& c, const T* w_VD, const Tokens& tokens, const Strip& strip, T* x_DN) {
    const int64_t* ids = tokens.ids_N + strip.first;
    to_lanes<T>(c.D, strip.tokens, [&](size_t i) { return w_VD + ids[i] * c.D; }, strip_of(x_DN, c.D, strip));
}

// dL/dW[v] = Σ_{n: token_n = v} dx_n, in token order. A task computes some features of every token.
template <class T>
void embedding_bwd(const Config& c, const Tokens& tokens, const T* dx_DN, bool add, Arena& arena, T* dw_VD) {
    constexpr size_t lanes = Lanes<T>::count;
    const size_t stride = padded(c.D);
    T* dx_ND = take<T>(arena, tokens.N * stride);
    parallel_for(strips_of(tokens.N), [&](size_t task) noexcept {
        const Strip strip = strip_at(tokens.N, task);
        to_rows<T>(c.D, strip.tokens, strip_of(dx_DN, c.D, strip), [&](size_t i) { return dx_ND + (strip.first + i) * stride; });
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
    template void embedding<T>(const Config&, const T*, const Tokens&, const Strip&, T*); \
    template void embedding_bwd<T>(const Config&, const Tokens&, const T*, bool, Arena&, T*);
STROP_INSTANTIATE(float)
STROP_INSTANTIATE(double)

}  // namespace strop::STROP_ISA
