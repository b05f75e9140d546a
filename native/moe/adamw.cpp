// AdamW of all arrays in one parallel region and one pass over param, grad, m and v.
//
// g = grad_scale·grad,  m = β₁·m + (1 − β₁)·g,  v = β₂·v + (1 − β₂)·g²
// θ = θ·(1 − lr·decay) − lr·m̂ / (√v̂ + eps),  m̂ = m / (1 − β₁ᵗ),  v̂ = v / (1 − β₂ᵗ)
#include "layers.h"

namespace strop::STROP_ISA {
namespace {

constexpr size_t kTask = size_t{1} << 13;  // elements

template <class T>
struct Factors {
    T beta1, share1, beta2, share2, uncorrected2, eps, lr, keep;

    Factors(const AdamW& step, double weight_decay)
        : beta1(static_cast<T>(step.beta1)), share1(static_cast<T>((1 - step.beta1) * step.grad_scale)),
          beta2(static_cast<T>(step.beta2)), share2(static_cast<T>((1 - step.beta2) * step.grad_scale * step.grad_scale)),
          uncorrected2(static_cast<T>(1 / step.correction2)), eps(static_cast<T>(step.eps)),
          lr(static_cast<T>(step.lr / step.correction1)), keep(static_cast<T>(1 - step.lr * weight_decay)) {}

    void update(VecOf<T> g, VecOf<T>& p, VecOf<T>& m, VecOf<T>& v) const {
        m = m * beta1 + g * share1;
        v = v * beta2 + g * g * share2;
        p = p * keep - m * lr / (square_root(v) * uncorrected2 + eps);
    }
};

template <class T>
void update(const Updated<T>& a, const AdamW& step, size_t i, size_t last) {
    constexpr size_t lanes = Lanes<T>::count;
    const Factors<T> factors(step, a.weight_decay);
    for (; i + lanes <= last; i += lanes) {
        VecOf<T> p = load(a.param + i), m = load(a.m + i), v = load(a.v + i);
        factors.update(load(a.grad + i), p, m, v);
        store(a.param + i, p), store(a.m + i, m), store(a.v + i, v);
    }
    if (const size_t n = last - i; n > 0) {
        VecOf<T> p = load_first(a.param + i, n), m = load_first(a.m + i, n), v = load_first(a.v + i, n);
        factors.update(load_first(a.grad + i, n), p, m, v);
        store_first(a.param + i, n, p), store_first(a.m + i, n, m), store_first(a.v + i, n, v);
    }
}

}  // namespace

template <class T>
void adamw(Updated<T>* arrays, size_t count, const AdamW& step) {
    size_t tasks = 0;
    for (size_t i = 0; i < count; ++i) {
        arrays[i].first_task = tasks;
        tasks += (arrays[i].count + kTask - 1) / kTask;
    }
    parallel_for(tasks, [&](size_t task) noexcept {
        size_t i = 0;
        while (i + 1 < count && arrays[i + 1].first_task <= task) ++i;
        const size_t first = (task - arrays[i].first_task) * kTask;
        update(arrays[i], step, first, smaller(first + kTask, arrays[i].count));
    });
}

template void adamw<float>(Updated<float>*, size_t, const AdamW&);
template void adamw<double>(Updated<double>*, size_t, const AdamW&);

}  // namespace strop::STROP_ISA
