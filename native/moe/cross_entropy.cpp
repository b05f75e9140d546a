// Cross-entropy, the mean over the targets that count.
//
// L = −(1/M)·Σ_{n counts} log softmax(logits_n)[target_n],  M the number that count
#include "layers.h"

namespace strop::STROP_ISA {

template <class T>
double cross_entropy(size_t V, size_t N, const Targets& targets, Arena& arena, T* logits_VN) {
    constexpr size_t lanes = Lanes<T>::count;
    const size_t vectors = (N + lanes - 1) / lanes;
    double* losses_N = take<double>(arena, N);
    parallel_for(vectors, [&](size_t vector) noexcept {  // a task processes one vector of tokens with all their logits
        const size_t first = vector * lanes, count = smaller(N - first, lanes);
        T* z = panel_of(logits_VN, V, first / kPanel) + first % kPanel;
        VecOf<T> share{};                                                                   // 1/M where the target counts
        for (size_t i = 0; i < count; ++i) share[i] = targets.counts_N[first + i] ? static_cast<T>(1.0 / targets.num_counted) : T(0);
        VecOf<T> at_target{};
        for (size_t i = 0; i < count; ++i)
            if (targets.counts_N[first + i]) at_target[i] = z[targets.targets_N[first + i] * kPanel + i];

        VecOf<T> max = load(z), sum{};
        for (size_t v = 1; v < V; ++v) max = larger<T>(load(z + v * kPanel), max);
        for (size_t v = 0; v < V; ++v) {
            const VecOf<T> e = exp_to_one<T>(load(z + v * kPanel) - max);
            store(z + v * kPanel, e);
            sum += e;
        }
        const VecOf<T> scale = share / sum;
        for (size_t v = 0; v < V; ++v)                                                      // dL/dz_nv = (softmax_nv …
            store(z + v * kPanel, share != T(0) ? load(z + v * kPanel) * scale : VecOf<T>{});
        for (size_t i = 0; i < count; ++i) {
            losses_N[first + i] = 0;
            if (!targets.counts_N[first + i]) continue;
            z[targets.targets_N[first + i] * kPanel + i] -= share[i];                       // … − [v = target_n]) / M
            losses_N[first + i] = __builtin_log(static_cast<double>(sum[i])) + (static_cast<double>(max[i]) - static_cast<double>(at_target[i]));
        }
    });
    double total = 0;
    for (size_t n = 0; n < N; ++n) total += losses_N[n];
    return total / targets.num_counted;
}

template double cross_entropy<float>(size_t, size_t, const Targets&, Arena&, float*);
template double cross_entropy<double>(size_t, size_t, const Targets&, Arena&, double*);

}  // namespace strop::STROP_ISA
