// Backward of attention.cpp: through Wo, the softmax, the rotation, and Wq, Wk, Wv.
//
// Probabilities are recomputed from q, k and the saved maximum and sum of each query, for a block of queries at a time.
#include "layers.h"
#include "linear.h"

namespace strop::STROP_ISA {
namespace {

constexpr size_t kQueries = 64;   // queries of a block
constexpr size_t kWorkers = 32;   // the most tasks, each with its own scratch memory

// One row of a batch and one query head. q, dcontext and dq point to this head in rows of `stride`; the keys of `offset` tokens
// shared with earlier rows come before those of the row's own `tokens`.
template <class T>
struct HeadRow {
    size_t C, offset, tokens, S, stride, H;
    const T *q_TC, *dcontext_TC;
    const T *max_TH, *sum_TH;
    const T *keys_CS, *keys_SC, *values_CS;
    T *dq_TC, *dk_SC, *dv_SC;  // dk and dv: this head's gradients of its keys and values
};

// Computes p_ts and dL/dscore_ts of queries [first, first + n) for the keys up to the last query.
template <class T>
void scores_bwd(const HeadRow<T>& r, size_t first, size_t n, T* p_TS, T* ds_TS) {
    constexpr size_t lanes = Lanes<T>::count;
    const T scale = T(1) / static_cast<T>(__builtin_sqrt(static_cast<double>(r.C)));
    const size_t num_keys = r.offset + first + n;
    for (size_t t = 0; t < n; ++t) {
        const size_t visible = r.offset + first + t + 1;
        const VecOf<T> max = broadcast<T>(-r.max_TH[(first + t) * r.H]);
        const T share = T(1) / r.sum_TH[(first + t) * r.H];
        T *p = p_TS + t * r.S, *ds = ds_TS + t * r.S;
        VecOf<T> sum{};
        for (size_t s = 0; s < num_keys; s += lanes) {
            const BitsOf<T> seen = first_lanes<T>(visible > s ? visible - s : 0);
            const VecOf<T> p_s = seen ? exp_to_one<T>(multiply_add(load(p + s), broadcast<T>(scale), max)) * share : VecOf<T>{};
            const VecOf<T> dp = seen ? load(ds + s) : VecOf<T>{};
            store(p + s, p_s);
            store(ds + s, dp);
            sum = multiply_add(dp, p_s, sum);
        }
        const T through_sum = sum_lanes<T>(sum);
        for (size_t s = 0; s < num_keys; s += lanes)                   // dL/dscore = p·(dp − Σ dp·p)/√C; 0 at hidden keys
            store(ds + s, load(p + s) * (load(ds + s) - through_sum) * scale);
    }
}

template <class T>
void attend_bwd(const HeadRow<T>& r, T* p_TS, T* ds_TS) {
    constexpr size_t lanes = Lanes<T>::count;
    const size_t Cp = padded(r.C);
    for (size_t first = 0; first < r.tokens; first += kQueries) {
        const size_t n = smaller(r.tokens - first, kQueries), num_keys = r.offset + first + n;
        const size_t columns = (num_keys + lanes - 1) / lanes * lanes;
        const T *q = r.q_TC + first * r.stride, *dcontext = r.dcontext_TC + first * r.stride;
        multiply(Product<T>{n, columns, r.C, q, r.stride, 1, r.keys_CS, r.S, p_TS, r.S});              // q·kᵀ
        multiply(Product<T>{n, columns, r.C, dcontext, r.stride, 1, r.values_CS, r.S, ds_TS, r.S});    // dp = dcontext·vᵀ
        scores_bwd(r, first, n, p_TS, ds_TS);
        multiply(Product<T>{n, r.C, num_keys, ds_TS, r.S, 1, r.keys_SC, Cp, r.dq_TC + first * r.stride, r.stride});  // dq = ds·k

        Product<T> dk{num_keys, r.C, n, ds_TS, 1, r.S, q, r.stride, r.dk_SC, Cp};                      // dk = dsᵀ·q
        Product<T> dv{num_keys, r.C, n, p_TS, 1, r.S, dcontext, r.stride, r.dv_SC, Cp};                // dv = pᵀ·dcontext
        dk.accumulate = dv.accumulate = true;
        multiply(dk);
        multiply(dv);
    }
}

// The rows of the pass in the layouts that attention's backward needs.
template <class T>
struct Rows {
    T *n1_ND, *q_NO, *dcontext_NO, *dq_NO;   // token by token
    T *keys, *values;                        // keys_BKSC, values_BKCS: transposed from the saved ones
    T *dk_BHSC, *dv_BHSC;
};

template <class T>
Rows<T> rows_of(Pass<T>& pass, const BlockSaved<T>& saved, const T* dcontext_ON) {
    const Config& c = *pass.config;
    const Tokens& tokens = pass.tokens;
    const size_t N = tokens.N, O = c.H * c.C, S = saved.kv.S, Cp = padded(c.C);
    Arena& arena = *pass.arena;
    Rows<T> rows;
    rows.n1_ND = take<T>(arena, N * padded(c.D));
    rows.q_NO = take<T>(arena, N * padded(O));
    rows.dcontext_NO = take<T>(arena, N * padded(O));
    rows.dq_NO = take<T>(arena, N * padded(O));
    rows.keys = take<T>(arena, tokens.B * c.K * S * Cp);
    rows.values = take<T>(arena, tokens.B * c.K * c.C * S);
    rows.dk_BHSC = take<T>(arena, tokens.B * c.H * S * Cp);
    rows.dv_BHSC = take<T>(arena, tokens.B * c.H * S * Cp);

    const size_t num_strips = strips_of(N);
    parallel_for(num_strips + tokens.B * c.K, [&](size_t task) noexcept {
        if (task < num_strips) {
            const Strip strip = strip_at(N, task);
            const auto to = [&](size_t features, const T* from, T* rows_out) {
                to_rows<T>(features, strip.tokens, strip_of(from, features, strip),
                           [&](size_t i) { return rows_out + (strip.first + i) * padded(features); });
            };
            to(c.D, saved.n1_DN, rows.n1_ND);
            to(O, saved.q_ON, rows.q_NO);
            to(O, dcontext_ON, rows.dcontext_NO);
            return;
        }
        const size_t row = task - num_strips, count = tokens.length(row / c.K);
        T* keys_SC = rows.keys + row * S * Cp;
        const T* values_SC = saved.kv.values + row * S * Cp;
        to_rows<T>(c.C, count, saved.kv.keys + row * c.C * S, [&](size_t s) { return keys_SC + s * Cp; }, S);
        to_lanes<T>(c.C, count, [&](size_t s) { return values_SC + s * Cp; }, rows.values + row * c.C * S, S);
    });
    return rows;
}

template <class T>
void attend_bwd_all(Pass<T>& pass, const BlockSaved<T>& saved, const Rows<T>& rows) {
    const Config& c = *pass.config;
    const Tokens& tokens = pass.tokens;
    const size_t O = c.H * c.C, S = saved.kv.S, Cp = padded(c.C), G = c.H / c.K;
    const size_t items = tokens.B * c.H, workers = smaller(items, kWorkers);
    T* scratch = take<T>(*pass.arena, workers * 2 * kQueries * S);
    parallel_for(workers, [&](size_t worker) noexcept {
        T *p_TS = scratch + worker * 2 * kQueries * S, *ds_TS = p_TS + kQueries * S;
        for (size_t item = worker; item < items; item += workers) {
            const size_t b = item / c.H, h = item % c.H, row = b * c.K + h / G, start = tokens.starts_B[b];
            const size_t at = start * padded(O) + h * c.C;
            T *dk = rows.dk_BHSC + item * S * Cp, *dv = rows.dv_BHSC + item * S * Cp;
            __builtin_memset(dk, 0, tokens.length(b) * Cp * sizeof(T));
            __builtin_memset(dv, 0, tokens.length(b) * Cp * sizeof(T));
            attend_bwd(HeadRow<T>{c.C, tokens.offset(b), tokens.own(b), S, padded(O), c.H, rows.q_NO + at, rows.dcontext_NO + at,
                                  saved.max_NH + start * c.H + h, saved.sum_NH + start * c.H + h, saved.kv.keys + row * c.C * S,
                                  rows.keys + row * S * Cp, rows.values + row * c.C * S, rows.dq_NO + at, dk, dv},
                       p_TS, ds_TS);
        }
    });
}

// Returns the gradient of token n's key or value: Σ over the rows that have it and the query heads of its key/value head.
template <class T>
void sum_heads(const Config& c, const Tokens& tokens, size_t S, const T* d_BHSC, size_t n, T* sum_KC) {
    const size_t G = c.H / c.K, Cp = padded(c.C);
    for (size_t k = 0; k < c.K; ++k) {
        T* sum_C = sum_KC + k * c.C;
        for (size_t i = 0; i < c.C; ++i) sum_C[i] = 0;
        for (size_t b = tokens.rows_N[n]; b < tokens.end(n); ++b) {
            const T* d_C = d_BHSC + ((b * c.H + k * G) * S + tokens.positions_N[n]) * Cp;
            for (size_t g = 0; g < G; ++g)
                for (size_t i = 0; i < c.C; ++i) sum_C[i] += d_C[g * S * Cp + i];
        }
    }
}

}  // namespace

template <class T>
void attention_bwd(Pass<T>& pass, const LayerWeights<T>& w, const BlockSaved<T>& saved, const T* dm_DN, T* dn1_DN,
                   const LayerWeights<T>& grads) {
    const Config& c = *pass.config;
    const Tokens& tokens = pass.tokens;
    const size_t N = tokens.N, num_panels = panels_of(N), O = c.H * c.C, KC = c.K * c.C;
    Arena& arena = *pass.arena;
    T* dcontext_ON = take_panels<T>(arena, O, num_panels);
    auto* products = take<Product<T>>(arena, num_panels + 3);
    for (size_t panel = 0; panel < num_panels; ++panel)                                     // m = x + context·Woᵀ
        products[panel] = linear_bwd_input<T>(w.wo_DO, c.D, O, panel_of(dm_DN, c.D, panel), tokens_in_panel(N, panel),
                                              panel_of(dcontext_ON, O, panel));
    products[num_panels] = linear_bwd_weight<T>(dm_DN, c.D, saved.context_NO, O, N, grads.wo_DO);
    run_products(products, num_panels + 1);

    const Rows<T> rows = rows_of(pass, saved, dcontext_ON);
    attend_bwd_all(pass, saved, rows);                                                      // context = attend(q, k, v)

    T *dq_ON = dcontext_ON, *dk_ON = take_panels<T>(arena, KC, num_panels), *dv_ON = take_panels<T>(arena, KC, num_panels);
    T *dk_NO = take<T>(arena, N * padded(KC)), *dv_NO = take<T>(arena, N * padded(KC));
    parallel_for(strips_of(N), [&](size_t task) noexcept {
        const Strip strip = strip_at(N, task);
        for (size_t n = strip.first; n < strip.first + strip.tokens; ++n) {
            sum_heads(c, tokens, saved.kv.S, rows.dk_BHSC, n, dk_NO + n * padded(KC));
            sum_heads(c, tokens, saved.kv.S, rows.dv_BHSC, n, dv_NO + n * padded(KC));
        }
        const auto to = [&](size_t features, const T* from, T* lanes_out) {
            to_lanes<T>(features, strip.tokens, [&](size_t i) { return from + (strip.first + i) * padded(features); },
                        strip_of(lanes_out, features, strip));
        };
        to(O, rows.dq_NO, dq_ON);
        to(KC, dk_NO, dk_ON);
        to(KC, dv_NO, dv_ON);
        const T *cos = strip_of(pass.cos_PN, c.C / 2, strip), *sin = strip_of(pass.sin_PN, c.C / 2, strip);
        rope(c.H, c.C, strip.tokens, cos, sin, true, strip_of(dq_ON, O, strip));                   // q = R(φ)·(x·Wqᵀ): rotate back
        rope(c.K, c.C, strip.tokens, cos, sin, true, strip_of(dk_ON, KC, strip));                  // v is not rotated
    });

    for (size_t panel = 0; panel < num_panels; ++panel)                                     // x feeds queries, keys and values
        products[panel] = linear_bwd_input<T>(w.wq_OD, O, c.D, panel_of(dq_ON, O, panel), tokens_in_panel(N, panel),
                                              panel_of(dn1_DN, c.D, panel));
    products[num_panels] = linear_bwd_weight<T>(dq_ON, O, rows.n1_ND, c.D, N, grads.wq_OD);
    products[num_panels + 1] = linear_bwd_weight<T>(dk_ON, KC, rows.n1_ND, c.D, N, grads.wk_OD);
    products[num_panels + 2] = linear_bwd_weight<T>(dv_ON, KC, rows.n1_ND, c.D, N, grads.wv_OD);
    run_products(products, num_panels + 3, [&](size_t panel, size_t first, size_t last) {
        if (panel >= num_panels) return;
        const size_t count = tokens_in_panel(N, panel);
        T* dx_DN = panel_of(dn1_DN, c.D, panel);
        Product<T> via_k = linear_bwd_input<T>(w.wk_OD, KC, c.D, panel_of(dk_ON, KC, panel), count, dx_DN);
        Product<T> via_v = linear_bwd_input<T>(w.wv_OD, KC, c.D, panel_of(dv_ON, KC, panel), count, dx_DN);
        via_k.accumulate = via_v.accumulate = true;
        multiply_rows(via_k, first, last);
        multiply_rows(via_v, first, last);
    });
}

template void attention_bwd<float>(Pass<float>&, const LayerWeights<float>&, const BlockSaved<float>&, const float*, float*,
                                   const LayerWeights<float>&);
template void attention_bwd<double>(Pass<double>&, const LayerWeights<double>&, const BlockSaved<double>&, const double*, double*,
                                    const LayerWeights<double>&);

}  // namespace strop::STROP_ISA
