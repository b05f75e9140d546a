// The softmax of one row of logits, for sampling.
#include "layers.h"

namespace strop::STROP_ISA {
namespace {

// Loads up to one vector of doubles from n floats or doubles; the lanes beyond them are −inf.
template <class T>
inline Wide wide_at(const T* from, size_t n) {
    if (n >= kWide) return load_wide(from);
    return lanes_below(n) ? load_wide_first(from, n) : wide(-__builtin_inf());
}

}  // namespace

// Computes p_v = exp((logits_v − max)/t) in double, and the sum of each block of kDrawBlock of them; returns max. The maximum is
// subtracted before dividing: the difference is exact where it matters, and 0 at the maximum for any t. p_V has room for whole
// vectors.
template <class T>
double softmax_row(const T* logits_V, size_t V, double inverse_temperature, double* p_V, double* sums) {
    Wide top = wide(-__builtin_inf());
    for (size_t v = 0; v < V; v += kWide) top = larger<double>(wide_at(logits_V + v, V - v), top);
    const double max = max_lanes<double>(top);
    for (size_t first = 0; first < V; first += kDrawBlock) {
        Wide sum{};
        for (size_t v = first; v < smaller(first + kDrawBlock, V); v += kWide) {
            const Wide p = exp_to_one<double>((wide_at(logits_V + v, V - v) - wide(max)) * wide(inverse_temperature));
            store(p_V + v, p);
            sum += p;
        }
        sums[first / kDrawBlock] = sum_lanes<double>(sum);
    }
    return max;
}

// Returns the most probable token, the first among equals, and in *sum Σ_v exp(logits_v − max). Terms and sums of four terms
// have the precision of the logits, the rest is in double.
template <class T>
size_t greedy_row(const T* logits_V, size_t V, double* sum) {
    constexpr size_t lanes = Lanes<T>::count, four = 4 * lanes;
    const auto at = [&](size_t v) {  // −inf beyond the last
        if (v + lanes <= V) return load(logits_V + v);
        return v < V ? (first_lanes<T>(V - v) ? load_first(logits_V + v, V - v) : broadcast<T>(-__builtin_inff())) : broadcast<T>(-__builtin_inff());
    };
    const auto maximum = [&](VecOf<T> top, auto&& z, size_t v) {
        return larger<T>(larger<T>(larger<T>(z(v), z(v + lanes)), larger<T>(z(v + 2 * lanes), z(v + 3 * lanes))), top);
    };
    const auto whole = [&](size_t v) { return load(logits_V + v); };
    VecOf<T> top = broadcast<T>(-__builtin_inff());
    size_t v = 0;
    for (; v + four <= V; v += four) top = maximum(top, whole, v);
    const T max = max_lanes<T>(maximum(top, at, v));

    const auto terms = [&](auto&& z, size_t from) {
        const auto e = [&](size_t at_v) { return exp_to_one<T>(z(at_v) - max); };
        return widened_sum((e(from) + e(from + lanes)) + (e(from + 2 * lanes) + e(from + 3 * lanes)));
    };
    Wide total{};
    for (v = 0; v + four <= V; v += four) total += terms(whole, v);
    *sum = sum_lanes<double>(total + terms(at, v));

    const auto is_here = [&](size_t from) { return any_above(load(logits_V + from) == max ? broadcast<T>(1) : VecOf<T>{}, T(0)); };
    for (v = 0; v + lanes <= V && !is_here(v);) v += lanes;
    while (v + 1 < V && logits_V[v] != max) ++v;
    return smaller(v, V - 1);  // the last token if none is found, as with NaN
}

template size_t greedy_row<float>(const float*, size_t, double*);
template size_t greedy_row<double>(const double*, size_t, double*);
template double softmax_row<float>(const float*, size_t, double, double*, double*);
template double softmax_row<double>(const double*, size_t, double, double*, double*);

}  // namespace strop::STROP_ISA
