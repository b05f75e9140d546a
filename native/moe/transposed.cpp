// The transposed weights of the experts and of the head. This file moves data and computes nothing.
#include "layers.h"

namespace strop::STROP_ISA {

template <class T>
T* take_transposed(const T* w_OD, size_t count, size_t O, size_t D, Arena& arena) {
    const size_t panels = panels_of(O);
    T* to = take_panels<T>(arena, D, count * panels);
    parallel_for(count * panels, [&](size_t task) noexcept {
        const size_t first = task % panels * kPanel;
        const T* from = w_OD + (task / panels * O + first) * D;
        to_lanes<T>(D, smaller(O - first, kPanel), [&](size_t i) { return from + i * D; }, panel_of(to, D, task));
    });
    return to;
}

template <class T>
Transposed<T> transpose(const Config& c, const Weights<T>& weights, Arena& arena) {
    Transposed<T> all;
    all.layers = take<typename Transposed<T>::Layer>(arena, c.num_layers);
    for (size_t layer = 0; layer < c.num_layers; ++layer) {
        const LayerWeights<T>& w = weights.layers[layer];
        all.layers[layer].gate_up_E = take_transposed(w.gate_up_E2FD, 2 * c.E, c.F, c.D, arena);
        all.layers[layer].down_E = take_transposed(w.down_EDF, c.E, c.D, c.F, arena);
    }
    all.head = take_transposed(weights.head_VD, 1, c.V, c.D, arena);
    return all;
}

template float* take_transposed<float>(const float*, size_t, size_t, size_t, Arena&);
template double* take_transposed<double>(const double*, size_t, size_t, size_t, Arena&);
template Transposed<float> transpose<float>(const Config&, const Weights<float>&, Arena&);
template Transposed<double> transpose<double>(const Config&, const Weights<double>&, Arena&);

}  // namespace strop::STROP_ISA
