// The softmax of one row of logits in double precision, as sampling needs it.
#include "layers.h"

namespace strop::STROP_ISA {
namespace {

// As many of the n floats or doubles as a vector of doubles holds; −inf in lanes beyond them.
template <class T>
inline Wide wide_at(const T* from, size_t n) {
    if (n >= kWide) return load_wide(from);
    return lanes_below(n) ? load_wide_first(from, n) : wide(-__builtin_inf());
}

}  // namespace

// p_v = exp(logits_v/t − max), and the sum of each block of kDrawBlock of them; returns max logits/t. p_V has room for
// whole vectors.
template <class T>
double softmax_row(const T* logits_V, size_t V, double temperature, double* p_V, double* sums) {
    Wide top = wide(-__builtin_inf());
    for (size_t v = 0; v < V; v += kWide) top = larger<double>(wide_at(logits_V + v, V - v), top);
    const double inverse = 1.0 / temperature, max = max_lanes<double>(top) * inverse;
    for (size_t first = 0; first < V; first += kDrawBlock) {
        Wide sum{};
        for (size_t v = first; v < smaller(first + kDrawBlock, V); v += kWide) {
            const Wide p = exp_to_one<double>(multiply_add(wide_at(logits_V + v, V - v), wide(inverse), wide(-max)));
            store(p_V + v, p);
            sum += p;
        }
        sums[first / kDrawBlock] = sum_lanes<double>(sum);
    }
    return max;
}

template double softmax_row<float>(const float*, size_t, double, double*, double*);
template double softmax_row<double>(const double*, size_t, double, double*, double*);

}  // namespace strop::STROP_ISA
