// AdamW in one pass over param, grad, m and v.
//
// g = grad_scale·grad,  m = β₁·m + (1 − β₁)·g,  v = β₂·v + (1 − β₂)·g²
// θ = θ·(1 − lr·decay) − lr·m̂ / (√v̂ + eps),  m̂ = m / (1 − β₁ᵗ),  v̂ = v / (1 − β₂ᵗ)
#include "layers.h"

namespace strop::STROP_ISA {

template <class T>
void adamw(size_t count, T* param, const T* grad, T* m, T* v, const AdamW& step) {
    constexpr size_t lanes = Lanes<T>::count, kTask = size_t{1} << 13;
    const T beta1 = static_cast<T>(step.beta1), share1 = static_cast<T>((1 - step.beta1) * step.grad_scale);
    const T beta2 = static_cast<T>(step.beta2), share2 = static_cast<T>((1 - step.beta2) * step.grad_scale * step.grad_scale);
    const T uncorrected2 = static_cast<T>(1 / step.correction2), eps = static_cast<T>(step.eps);
    const T lr = static_cast<T>(step.lr / step.correction1), keep = static_cast<T>(1 - step.lr * step.weight_decay);
    const auto update = [&](VecOf<T> g, VecOf<T>& p, VecOf<T>& m_i, VecOf<T>& v_i) {
        m_i = m_i * beta1 + g * share1;
        v_i = v_i * beta2 + g * g * share2;
        p = p * keep - m_i * lr / (square_root(v_i) * uncorrected2 + eps);
    };
    parallel_for((count + kTask - 1) / kTask, [&](size_t task) noexcept {
        size_t i = task * kTask;
        const size_t last = i + kTask < count ? i + kTask : count;
        for (; i + lanes <= last; i += lanes) {
            VecOf<T> p = load(param + i), m_i = load(m + i), v_i = load(v + i);
            update(load(grad + i), p, m_i, v_i);
            store(param + i, p), store(m + i, m_i), store(v + i, v_i);
        }
        if (const size_t n = last - i; n > 0) {
            VecOf<T> p = load_first(param + i, n), m_i = load_first(m + i, n), v_i = load_first(v + i, n);
            update(load_first(grad + i, n), p, m_i, v_i);
            store_first(param + i, n, p), store_first(m + i, n, m_i), store_first(v + i, n, v_i);
        }
    });
}

template void adamw<float>(size_t, float*, const float*, float*, float*, const AdamW&);
template void adamw<double>(size_t, double*, const double*, double*, double*, const AdamW&);

}  // namespace strop::STROP_ISA
