// RMSNorm. y = w·n,  n = x·r,  r = (mean x² + eps)^-½
#include "layers.h"

namespace strop::STROP_ISA {
namespace {

// Returns Σ_d term(d) for one vector of tokens: four partial sums, added in a tree, so the order is the same for every token.
template <class T, class Term>
inline VecOf<T> sum_over_features(size_t D, Term&& term) {
    VecOf<T> sum[4] = {};
    size_t d = 0;
    for (; d + 4 <= D; d += 4)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sum[i] = term(d + i, sum[i]);
    for (; d < D; ++d) sum[0] = term(d, sum[0]);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

}  // namespace

template <class T>
void rms_norm(size_t D, double eps, const Strip& strip, const T* x_DN, const T* w_D, T* y_DN, T* r_N) {
    constexpr size_t lanes = Lanes<T>::count;
    for (size_t i = 0; i < strip.tokens; i += lanes) {
        const T* x = strip_of(x_DN, D, strip) + i;
        T* y = strip_of(y_DN, D, strip) + i;
        const VecOf<T> squares = sum_over_features<T>(D, [&](size_t d, VecOf<T> sum) {
            const VecOf<T> x_d = load(x + d * kPanel);
            return multiply_add(x_d, x_d, sum);
        });
        const VecOf<T> r = T(1) / square_root(squares / static_cast<T>(D) + static_cast<T>(eps));
        store(r_N + strip.first + i, r);
        for (size_t d = 0; d < D; ++d) store(y + d * kPanel, (load(x + d * kPanel) * r) * w_D[d]);
    }
}

template <class T>
void rms_norm_bwd(size_t D, size_t N, const T* dy_DN, const T* x_DN, const T* r_N, const T* w_D, const T* residual_DN,
                  Arena& arena, T* dx_DN, T* dw_D) {
    constexpr size_t lanes = Lanes<T>::count;
    const size_t num_strips = strips_of(N);
    T* parts = take<T>(arena, num_strips * D);  // dL/dw of each strip
    parallel_for(num_strips, [&](size_t task) noexcept {
        const Strip strip = strip_at(N, task);
        T* part_D = parts + task * D;
        for (size_t d = 0; d < D; ++d) part_D[d] = 0;
        for (size_t i = 0; i < strip.tokens; i += lanes) {
            const size_t at = strip.panel * D * kPanel + strip.column + i;
            const T *dy = dy_DN + at, *x = x_DN + at, *residual = residual_DN + at;
            T* dx = dx_DN + at;
            const VecOf<T> r = load(r_N + strip.first + i);
            const BitsOf<T> real = first_lanes<T>(strip.tokens - i);
            const VecOf<T> via_r = sum_over_features<T>(D, [&](size_t d, VecOf<T> sum) {
                const VecOf<T> n = load(x + d * kPanel) * r, dy_d = load(dy + d * kPanel);
                part_D[d] += sum_lanes<T>(real ? dy_d * n : VecOf<T>{});              // dL/dw = Σ_n dy·n
                return multiply_add(dy_d * w_D[d], n, sum);                           // Σ_d dn·n,  dn = dy·w
            }) / static_cast<T>(D);
            for (size_t d = 0; d < D; ++d) {
                const VecOf<T> n = load(x + d * kPanel) * r, dn = load(dy + d * kPanel) * w_D[d];
                store(dx + d * kPanel, load(residual + d * kPanel) + r * (dn - n * via_r));  // r·dn − r·n·mean(dn·n)
            }
        }
    });
    for (size_t d = 0; d < D; ++d) {
        T sum = 0;
        for (size_t strip = 0; strip < num_strips; ++strip) sum += parts[strip * D + d];
        dw_D[d] = sum;
    }
}

#define STROP_INSTANTIATE(T)                                                                \
    template void rms_norm<T>(size_t, double, const Strip&, const T*, const T*, T*, T*);    \
    template void rms_norm_bwd<T>(size_t, size_t, const T*, const T*, const T*, const T*, const T*, Arena&, T*, T*);
STROP_INSTANTIATE(float)
STROP_INSTANTIATE(double)

}  // namespace strop::STROP_ISA
