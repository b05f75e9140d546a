// Router: softmax over all experts, the k largest, renormalised.
#include "layers.h"
#include "linear.h"

namespace strop::STROP_ISA {
namespace {

// Replaces logits by p = softmax(logits) over the E rows of one vector of tokens.
template <class T>
inline void softmax_over_experts(size_t E, T* z_EN) {
    VecOf<T> max = load(z_EN), sum{};
    for (size_t e = 1; e < E; ++e) max = larger<T>(load(z_EN + e * kPanel), max);
    for (size_t e = 0; e < E; ++e) {
        const VecOf<T> p = exp_to_one<T>(load(z_EN + e * kPanel) - max);
        store(z_EN + e * kPanel, p);
        sum += p;
    }
    for (size_t e = 0; e < E; ++e) store(z_EN + e * kPanel, load(z_EN + e * kPanel) / sum);
}

template <class T>
struct Choice {
    VecOf<T> p;
    BitsOf<T> expert;
};

// Returns the most probable expert after `last`, ordered by probability, then by index: among equals the lower comes first.
template <class T>
inline Choice<T> next_choice(size_t E, const T* p_EN, const Choice<T>& last) {
    Choice<T> best{broadcast<T>(-1), BitsOf<T>{}};
    for (size_t e = 0; e < E; ++e) {
        const VecOf<T> p = load(p_EN + e * kPanel);
        const BitsOf<T> index = BitsOf<T>{} + static_cast<decltype(best.expert[0] + 0)>(e);
        const BitsOf<T> is_left = (p < last.p) | ((p == last.p) & (index > last.expert));
        const BitsOf<T> is_better = is_left & (p > best.p);
        best.p = is_better ? p : best.p;
        best.expert = is_better ? index : best.expert;
    }
    return best;
}

}  // namespace

template <class T>
void route(const Config& c, const T* router_ED, const Strip& strip, BlockSaved<T>& saved) {
    constexpr size_t lanes = Lanes<T>::count;
    T* p_EN = strip_of(saved.p_EN, c.E, strip);
    multiply(linear<T>(router_ED, c.E, c.D, strip_of(saved.n2_DN, c.D, strip), strip.tokens, p_EN));
    for (size_t i = 0; i < strip.tokens; i += lanes) {
        softmax_over_experts(c.E, p_EN + i);
        const size_t count = smaller(strip.tokens - i, lanes), first = strip.first + i;
        VecOf<T> total = load(p_EN + i) - load(p_EN + i);  // 0; NaN if the logits are NaN, which no comparison chooses
        Choice<T> choice{broadcast<T>(__builtin_inff()), BitsOf<T>{} - 1};
        for (size_t j = 0; j < c.J; ++j) {
            choice = next_choice(c.E, p_EN + i, choice);
            total += choice.p;
            for (size_t t = 0; t < count; ++t) {
                saved.experts_NJ[(first + t) * c.J + j] = static_cast<int32_t>(choice.expert[t]);
                saved.weights_NJ[(first + t) * c.J + j] = choice.p[t];
            }
        }
        store(saved.total_N + first, total);
        for (size_t t = 0; t < count; ++t)
            for (size_t j = 0; j < c.J; ++j) saved.weights_NJ[(first + t) * c.J + j] /= total[t];   // weights = c / Σ c
    }
}

template <class T>
void route_bwd(const Config& c, const Strip& strip, const BlockSaved<T>& saved, const T* dweights_NJ, const T* dp_aux_E,
               T* dlogits_EN) {
    constexpr size_t lanes = Lanes<T>::count;
    const T* p_EN = strip_of(saved.p_EN, c.E, strip);
    for (size_t i = 0; i < strip.tokens; i += lanes) {
        T* d_EN = dlogits_EN + i;
        for (size_t e = 0; e < c.E; ++e) store(d_EN + e * kPanel, broadcast<T>(dp_aux_E[e]));       // path through the auxiliary loss
        for (size_t t = 0; t < smaller(strip.tokens - i, lanes); ++t) {
            const size_t n = strip.first + i + t;
            const T *dw_J = dweights_NJ + n * c.J, *w_J = saved.weights_NJ + n * c.J;
            T via_total = 0;
            for (size_t j = 0; j < c.J; ++j) via_total += dw_J[j] * w_J[j];
            for (size_t j = 0; j < c.J; ++j)                                                        // dL/dc_j = (dw_j − Σ dw·w) / Σc
                d_EN[saved.experts_NJ[n * c.J + j] * kPanel + t] += (dw_J[j] - via_total) / saved.total_N[n];
        }
        VecOf<T> through_sum{};
        for (size_t e = 0; e < c.E; ++e) through_sum += load(d_EN + e * kPanel) * load(p_EN + e * kPanel + i);
        for (size_t e = 0; e < c.E; ++e)                                                            // dL/dz = p·(dp − Σ dp·p)
            store(d_EN + e * kPanel, load(p_EN + e * kPanel + i) * (load(d_EN + e * kPanel) - through_sum));
    }
}

void group_by_expert(const Config& c, size_t N, const int32_t* experts_NJ, Groups& groups) {
    int32_t* next_E = groups.first_panels_E;  // first the count of each expert, then the place of its next token
    for (size_t e = 0; e <= c.E; ++e) next_E[e] = 0;
    for (size_t a = 0; a < N * c.J; ++a) ++next_E[experts_NJ[a]];
    size_t num_panels = 0;
    for (size_t e = 0; e < c.E; ++e) {
        size_t left = static_cast<size_t>(next_E[e]);
        next_E[e] = static_cast<int32_t>(num_panels * kPanel);
        for (; left; left -= smaller(left, kPanel), ++num_panels) {
            groups.experts[num_panels] = static_cast<int32_t>(e);
            groups.counts[num_panels] = static_cast<int32_t>(smaller(left, kPanel));
        }
    }
    groups.num_panels = num_panels;
    for (size_t n = 0; n < N; ++n)
        for (size_t j = 0; j < c.J; ++j) {
            const int32_t a = next_E[experts_NJ[n * c.J + j]]++;
            groups.tokens_A[a] = static_cast<int32_t>(n);
            groups.assignments_NJ[n * c.J + j] = a;
        }
    for (size_t e = 0, panel = 0; e <= c.E; ++e) {
        while (panel < num_panels && static_cast<size_t>(groups.experts[panel]) < e) ++panel;
        groups.first_panels_E[e] = static_cast<int32_t>(panel);
    }
}

#define STROP_INSTANTIATE(T)                                                                \
    template void route<T>(const Config&, const T*, const Strip&, BlockSaved<T>&);          \
    template void route_bwd<T>(const Config&, const Strip&, const BlockSaved<T>&, const T*, const T*, T*);
STROP_INSTANTIATE(float)
STROP_INSTANTIATE(double)

}  // namespace strop::STROP_ISA
