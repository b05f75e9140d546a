// Causal self-attention with RoPE and shared key/value heads (GQA; MQA where there is one).
//
// y = attend(RoPE(x·Wqᵀ), RoPE(x·Wkᵀ), x·Wvᵀ)·Woᵀ
//
// A query processes the keys in blocks of kBlock positions counted from 0, so the order of its sums depends only on its position:
// prefill, decoding and training give the same bits. The softmax is rescaled from block to block.
#include "layers.h"
#include "linear.h"

namespace strop::STROP_ISA {
namespace {

constexpr size_t kBlock = 256;     // keys
constexpr size_t kHeads = 8;       // query heads that are processed together for each block of keys
constexpr size_t kTaskTokens = 4;  // queries of a task

template <class T>
inline T exp_of(T x) {
    return exp_to_one<T>(broadcast<T>(x))[0];
}

// Replaces s by p = exp(s/√C − max) for n keys; updates the running maximum and the sum in each lane.
template <class T>
inline T exponentials(size_t n, T scale, T* s, T* max) {
    constexpr size_t lanes = Lanes<T>::count;
    VecOf<T> top = broadcast<T>(-__builtin_inff());
    for (size_t j = 0; j < n; j += lanes) {
        const BitsOf<T> seen = first_lanes<T>(n - j);
        top = larger<T>(seen ? load(s + j) : top, top);
    }
    const T largest = max_lanes<T>(top) * scale;
    *max = largest > *max ? largest : *max;
    VecOf<T> sum{};
    for (size_t j = 0; j < n; j += lanes) {
        const BitsOf<T> seen = first_lanes<T>(n - j);
        const VecOf<T> p = seen ? exp_to_one<T>(multiply_add(load(s + j), broadcast<T>(scale), broadcast<T>(-*max))) : VecOf<T>{};
        store(s + j, p);
        sum += p;
    }
    return sum_lanes<T>(sum);
}

// For one token and `heads` query heads of one key/value head: context_HC = softmax(q·kᵀ/√C over keys ≤ position)·v
template <class T>
void attend_token(size_t C, size_t heads, size_t num_keys, const T* q, const T* keys_CS, const T* values_SC, size_t S,
                  T* context_HC, T* max_H, T* sum_H) {
    constexpr size_t lanes = Lanes<T>::count;
    const T scale = T(1) / static_cast<T>(__builtin_sqrt(static_cast<double>(C)));
    T scores[kHeads * kBlock];
    for (size_t h = 0; h < heads; ++h) max_H[h] = -__builtin_inff(), sum_H[h] = 0;
    for (size_t first = 0; first < num_keys; first += kBlock) {
        const size_t n = smaller(num_keys - first, kBlock);
        Product<T> dots{heads, (n + lanes - 1) / lanes * lanes, C, q, C * kPanel, kPanel, keys_CS + first, S, scores, kBlock};
        multiply(dots);
        for (size_t h = 0; h < heads; ++h) {
            const T max_before = max_H[h];
            const T sum = exponentials(n, scale, scores + h * kBlock, &max_H[h]);
            const T rescale = first ? exp_of<T>(max_before - max_H[h]) : T(0);
            sum_H[h] = first ? sum_H[h] * rescale + sum : sum;
            if (first)
                for (size_t i = 0; i < C; ++i) context_HC[h * C + i] *= rescale;
        }
        Product<T> mix{heads, C, n, scores, kBlock, 1, values_SC + first * padded(C), padded(C), context_HC, C};
        mix.accumulate = first > 0;
        multiply(mix);
    }
    for (size_t h = 0; h < heads; ++h)
        for (size_t i = 0; i < C; ++i) context_HC[h * C + i] /= sum_H[h];
}

template <class T>
void attend(const Config& c, const Tokens& tokens, const Strip& strip, BlockSaved<T>& saved) {
    const size_t G = c.H / c.K, O = c.H * c.C, S = saved.kv.S, end = strip.first + strip.tokens;
    const size_t chunks = (strip.tokens + kTaskTokens - 1) / kTaskTokens;
    parallel_for(chunks * c.K, [&](size_t task) noexcept {
        const size_t k = task / chunks, first = strip.first + task % chunks * kTaskTokens;
        for (size_t n = first; n < smaller(first + kTaskTokens, end); ++n) {
            const size_t row = static_cast<size_t>(tokens.rows_N[n]) * c.K + k;
            const T* keys_CS = saved.kv.keys + row * c.C * S;
            const T* values_SC = saved.kv.values + row * S * padded(c.C);
            for (size_t g = 0; g < G; g += kHeads) {
                const size_t head = k * G + g;
                const T* q = panel_of(saved.q_ON, O, n / kPanel) + head * c.C * kPanel + n % kPanel;
                attend_token(c.C, smaller(G - g, kHeads), static_cast<size_t>(tokens.positions_N[n]) + 1, q, keys_CS, values_SC, S,
                             saved.context_NO + n * padded(O) + head * c.C, saved.max_NH + n * c.H + head,
                             saved.sum_NH + n * c.H + head);
            }
        }
    });
}

// Copies the rotated keys and values of one strip to all rows that have these tokens.
template <class T>
void store_keys_values(const Config& c, const Tokens& tokens, const Strip& strip, const T* k_ON, const T* v_ON, const KeysValues<T>& kv) {
    const int32_t *rows = tokens.rows_N + strip.first, *positions = tokens.positions_N + strip.first;
    for (size_t k = 0; k < c.K; ++k) {
        const T *from_k = k_ON + k * c.C * kPanel, *from_v = v_ON + k * c.C * kPanel;
        for (size_t t = 0; t < strip.tokens;) {
            const size_t last_row = tokens.end(strip.first + t);
            size_t end = t + 1;  // consecutive tokens that belong to the same rows
            while (end < strip.tokens && rows[end] == rows[t] && tokens.end(strip.first + end) == last_row) ++end;
            for (size_t row = rows[t]; row < last_row; ++row) {
                T* key = kv.keys + (row * c.K + k) * c.C * kv.S + positions[t];
                for (size_t i = 0; i < c.C; ++i)
                    for (size_t at = t; at < end; ++at) key[i * kv.S + at - t] = from_k[i * kPanel + at];
            }
            t = end;
        }
        const auto value = [&](size_t row, size_t t) { return kv.values + ((row * c.K + k) * kv.S + positions[t]) * padded(c.C); };
        to_rows<T>(c.C, strip.tokens, from_v, [&](size_t t) { return value(rows[t], t); });
        for (size_t t = 0; t < strip.tokens; ++t)
            for (size_t row = rows[t] + 1; row < tokens.end(strip.first + t); ++row)
                __builtin_memcpy(value(row, t), value(rows[t], t), c.C * sizeof(T));
    }
}

}  // namespace

template <class T>
void queries_keys_values(Pass<T>& pass, const LayerWeights<T>& w, const Strip& strip, BlockSaved<T>& saved) {
    const Config& c = *pass.config;
    const size_t O = c.H * c.C, KC = c.K * c.C;
    const T* x_DN = strip_of(saved.n1_DN, c.D, strip);
    T *q_ON = strip_of(saved.q_ON, O, strip), *k_ON = strip_of(pass.k_ON, KC, strip), *v_ON = strip_of(pass.v_ON, KC, strip);
    Product<T> products[] = {linear<T>(w.wq_OD, O, c.D, x_DN, strip.tokens, q_ON), linear<T>(w.wk_OD, KC, c.D, x_DN, strip.tokens, k_ON),
                             linear<T>(w.wv_OD, KC, c.D, x_DN, strip.tokens, v_ON)};
    run_products(products, 3);
    const T *cos = strip_of(pass.cos_PN, c.C / 2, strip), *sin = strip_of(pass.sin_PN, c.C / 2, strip);
    rope(c.H, c.C, strip.tokens, cos, sin, false, q_ON);
    rope(c.K, c.C, strip.tokens, cos, sin, false, k_ON);
    store_keys_values(c, pass.tokens, strip, k_ON, v_ON, saved.kv);
}

template <class T>
void attention(Pass<T>& pass, const LayerWeights<T>& w, const Strip& strip, BlockSaved<T>& saved) {
    const Config& c = *pass.config;
    const size_t O = c.H * c.C;
    attend(c, pass.tokens, strip, saved);
    const T* rows = saved.context_NO + strip.first * padded(O);
    T* context_ON = strip_of(pass.context_ON, O, strip);
    to_lanes<T>(O, strip.tokens, [&](size_t i) { return rows + i * padded(O); }, context_ON);
    Product<T> output = linear<T>(w.wo_DO, c.D, O, context_ON, strip.tokens, strip_of(saved.m_DN, c.D, strip));
    output.plus = strip_of(saved.x_DN, c.D, strip);                                         // m = x + context·Woᵀ
    run_products(&output, 1);
}

#define STROP_INSTANTIATE(T)                                                                                    \
    template void queries_keys_values<T>(Pass<T>&, const LayerWeights<T>&, const Strip&, BlockSaved<T>&);       \
    template void attention<T>(Pass<T>&, const LayerWeights<T>&, const Strip&, BlockSaved<T>&);
STROP_INSTANTIATE(float)
STROP_INSTANTIATE(double)

}  // namespace strop::STROP_ISA
