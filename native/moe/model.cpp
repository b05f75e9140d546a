// The whole transformer on the real tokens of a batch: h = norm(block_L(… block_1(embedding(tokens)))), logits = h·Wᵀ
#include "layers.h"
#include "linear.h"

namespace strop::STROP_ISA {
namespace {

template <class T>
KeysValues<T> take_keys_values(Pass<T>& pass) {
    const Config& c = *pass.config;
    size_t longest = 0;
    for (size_t b = 0; b < pass.tokens.B; ++b) longest = pass.tokens.length(b) > longest ? pass.tokens.length(b) : longest;
    const size_t S = padded(longest), rows = pass.tokens.B * c.K;
    return {take<T>(*pass.arena, rows * c.C * S), take<T>(*pass.arena, rows * S * padded(c.C)), S};
}

// Returns E·Σ_e f_e·P_e over the tokens of all layers; f_e is the share of tokens that chose e, P_e its mean probability.
template <class T>
double aux_loss(Pass<T>& pass) {
    const Config& c = *pass.config;
    const size_t N = pass.tokens.N;
    const double total = static_cast<double>(N * c.num_layers);
    pass.shares_E = take<double>(*pass.arena, c.E);
    double loss = 0;
    for (size_t e = 0; e < c.E; ++e) {
        double chosen = 0, probability = 0;
        for (size_t layer = 0; layer < c.num_layers; ++layer) {
            const BlockSaved<T>& saved = pass.blocks[layer];
            for (size_t a = 0; a < N * c.J; ++a) chosen += saved.experts_NJ[a] == static_cast<int32_t>(e);
            for (size_t n = 0; n < N; ++n) probability += panel_of(saved.p_EN, c.E, n / kPanel)[e * kPanel + n % kPanel];
        }
        pass.shares_E[e] = chosen / total;
        loss += pass.shares_E[e] * (probability / total);
    }
    return static_cast<double>(c.E) * loss;
}

// Allocates the memory that all blocks share.
template <class T>
void take_scratch(Pass<T>& pass) {
    const Config& c = *pass.config;
    Arena& arena = *pass.arena;
    const size_t num_panels = panels_of(pass.tokens.N), O = c.H * c.C, KC = c.K * c.C;
    pass.cos_PN = take_panels<T>(arena, c.C / 2, num_panels);
    pass.sin_PN = take_panels<T>(arena, c.C / 2, num_panels);
    pass.k_ON = take_panels<T>(arena, KC, num_panels);
    pass.v_ON = take_panels<T>(arena, KC, num_panels);
    pass.context_ON = take_panels<T>(arena, O, num_panels);
    pass.sum_ND = take<T>(arena, pass.tokens.N * padded(c.D));
    pass.sum_DN = take_panels<T>(arena, c.D, num_panels);
}

template <class T>
void hidden_states(Pass<T>& pass) {
    const Config& c = *pass.config;
    Arena& arena = *pass.arena;
    const size_t num_panels = panels_of(pass.tokens.N);
    take_scratch(pass);
    pass.x_DN = take_panels<T>(arena, c.D, num_panels);
    pass.blocks = take<BlockSaved<T>>(arena, c.num_layers);
    const BlockSaved<T>* before = nullptr;
    for (size_t layer = 0; layer < c.num_layers; ++layer) {
        BlockSaved<T>& saved = pass.blocks[layer];
        if (layer == 0 || pass.saving) {
            take_block(pass, saved);
            if (!pass.caches) saved.kv = take_keys_values(pass);
        } else {
            saved = pass.blocks[0];
        }
        if (pass.caches) saved.kv = pass.caches[layer];
        saved.x_DN = pass.x_DN;
        if (pass.saving) pass.x_DN = take_panels<T>(arena, c.D, num_panels);  // otherwise y may overwrite x, which is no longer needed
        const bool narrow = pass.last_only && layer + 1 == c.num_layers;
        const Arena::Mark mark = arena.mark();
        block(pass, pass.weights->layers[layer], before, narrow, saved);
        if (!narrow) arena.release(mark);  // memory that only this block needed
        before = &saved;
    }
    pass.r_N = take<T>(arena, num_panels * kPanel);
    pass.h_DN = take_panels<T>(arena, c.D, num_panels);
    const size_t N = pass.tokens.N;  // fewer than before if only the last tokens continued
    for_tasks(strips_of(N, kPanel), N * c.D, [&](size_t task) noexcept {
        const Strip strip = strip_at(N, task, kPanel);
        add_experts(pass, *before, strip, pass.x_DN);
        rms_norm(c.D, c.eps, strip, pass.x_DN, pass.weights->norm_D, pass.h_DN, pass.r_N);
    });
    if (pass.saving) pass.aux_loss = aux_loss(pass);
}

// Writes the logits of `tokens` columns of h to out + rows[i]·V, token by token, in tiles that stay in the cache.
template <class T>
void head_to_rows(const Config& c, const T* head_VD, size_t tokens, const T* h_DN, const int64_t* rows_N, T* out) {
    constexpr size_t kRows = 48;
    const size_t num_panels = panels_of(tokens), blocks = (c.V + kRows - 1) / kRows;
    parallel_for(num_panels * blocks, [&](size_t task) noexcept {
        const size_t panel = task / blocks, first = task % blocks * kRows, rows = smaller(c.V - first, kRows);
        const size_t count = tokens_in_panel(tokens, panel);
        const int64_t* row = rows_N + panel * kPanel;
        T logits_VN[kRows * kPanel];
        multiply(linear<T>(head_VD + first * c.D, rows, c.D, panel_of(h_DN, c.D, panel), count, logits_VN));
        to_rows<T>(rows, count, logits_VN, [&](size_t i) { return out + row[i] * c.V + first; });
    });
}

// The same with transposed weights, to rows 0, 1, 2, … of `out`.
template <class T>
void head_by_rows(const Config& c, const T* transposed, size_t tokens, const T* h_DN, Arena& arena, T* out) {
    const size_t stride = padded(c.D), V_panels = panels_of(c.V);
    T* h_ND = take<T>(arena, tokens * stride);
    for_tasks(strips_of(tokens), tokens * c.D, [&](size_t task) noexcept {
        const Strip strip = strip_at(tokens, task);
        to_rows<T>(c.D, strip.tokens, strip_of(h_DN, c.D, strip), [&](size_t i) { return h_ND + (strip.first + i) * stride; });
    });
    // Strip by strip, so that the thread that samples from a row has written most of it.
    const size_t num_strips = strips_of(tokens);
    auto* products = take<Product<T>>(arena, num_strips * V_panels);
    for (size_t i = 0; i < num_strips * V_panels; ++i) {
        const Strip strip = strip_at(tokens, i / V_panels);
        const size_t panel = i % V_panels;
        products[i] = linear_by_rows<T>(h_ND + strip.first * stride, stride, c.D, panel_of(transposed, c.D, panel),
                                        smaller(c.V - panel * kPanel, kPanel), strip.tokens, out + strip.first * c.V + panel * kPanel, c.V);
    }
    run_products(products, num_strips * V_panels);
}

template <class T>
void head(Pass<T>& pass, const int64_t* rows_N, T* out) {
    const Config& c = *pass.config;
    if (pass.transposed) head_by_rows(c, pass.transposed->head, pass.tokens.N, pass.h_DN, *pass.arena, out);
    else head_to_rows(c, pass.weights->head_VD, pass.tokens.N, pass.h_DN, rows_N, out);
}

// Computes, from dL/dh, the gradient of every weight below the head, and of the embedding. If tied, the head's is already there.
template <class T>
void model_bwd(Pass<T>& pass, const T* dh_DN, double daux, const Weights<T>& grads) {
    const Config& c = *pass.config;
    const Weights<T>& w = *pass.weights;
    Arena& arena = *pass.arena;
    const size_t N = pass.tokens.N, num_panels = panels_of(N);
    T* d_DN = take_panels<T>(arena, c.D, num_panels);
    __builtin_memset(d_DN, 0, c.D * num_panels * kPanel * sizeof(T));
    rms_norm_bwd(c.D, N, dh_DN, pass.x_DN, pass.r_N, w.norm_D, d_DN, arena, d_DN, grads.norm_D);  // h = norm(x)
    T* dp_aux_E = take<T>(arena, c.E);                                                      // dL/dp_ne = dL·E·f_e / tokens
    for (size_t e = 0; e < c.E; ++e)
        dp_aux_E[e] = static_cast<T>(daux * static_cast<double>(c.E) * pass.shares_E[e] / static_cast<double>(N * c.num_layers));
    for (size_t layer = c.num_layers; layer-- > 0;)
        block_bwd(pass, w.layers[layer], pass.blocks[layer], dp_aux_E, d_DN, grads.layers[layer]);
    embedding_bwd(c, pass.tokens, d_DN, c.tied, arena, grads.embedding_VD);                 // tied: one matrix, used at both ends
}

// Computes dL/dh and the gradient of the head from dL/dlogits, which is in panels.
template <class T>
T* head_bwd(Pass<T>& pass, const T* dlogits_VN, const Weights<T>& grads) {
    const Config& c = *pass.config;
    Arena& arena = *pass.arena;
    const size_t N = pass.tokens.N, num_panels = panels_of(N);
    T* dh_DN = take_panels<T>(arena, c.D, num_panels);
    T* h_ND = take<T>(arena, N * padded(c.D));
    parallel_for(strips_of(N), [&](size_t task) noexcept {
        const Strip strip = strip_at(N, task);
        to_rows<T>(c.D, strip.tokens, strip_of(pass.h_DN, c.D, strip), [&](size_t i) { return h_ND + (strip.first + i) * padded(c.D); });
    });
    auto* products = take<Product<T>>(arena, num_panels + 1);                               // logits = h·Wᵀ
    for (size_t panel = 0; panel < num_panels; ++panel)
        products[panel] = linear_bwd_input<T>(pass.weights->head_VD, c.V, c.D, panel_of(dlogits_VN, c.V, panel), tokens_in_panel(N, panel),
                                              panel_of(dh_DN, c.D, panel));
    products[num_panels] = linear_bwd_weight<T>(dlogits_VN, c.V, h_ND, c.D, N, grads.head_VD);
    run_products(products, num_panels + 1);
    return dh_DN;
}

template <class T>
void backward(Pass<T>& pass, const int64_t* rows_N, const T* dlogits, double daux, const Weights<T>& grads) {
    const size_t V = pass.config->V, N = pass.tokens.N;
    T* dlogits_VN = take_panels<T>(*pass.arena, V, panels_of(N));
    constexpr size_t kColumns = 256;
    const size_t blocks = (V + kColumns - 1) / kColumns;
    parallel_for(panels_of(N) * blocks, [&](size_t task) noexcept {
        const size_t panel = task / blocks, first = task % blocks * kColumns;
        const int64_t* row = rows_N + panel * kPanel;
        to_lanes<T>(smaller(V - first, kColumns), tokens_in_panel(N, panel), [&](size_t i) { return dlogits + row[i] * V + first; },
                    panel_of(dlogits_VN, V, panel) + first * kPanel);
    });
    model_bwd(pass, head_bwd(pass, dlogits_VN, grads), daux, grads);
}

// L = CE + α·aux,  α = daux
template <class T>
double loss_and_grads(Pass<T>& pass, const Targets& targets, double daux, const Weights<T>& grads) {
    const Config& c = *pass.config;
    const size_t N = pass.tokens.N, num_panels = panels_of(N);
    T* logits_VN = take_panels<T>(*pass.arena, c.V, num_panels);
    auto* products = take<Product<T>>(*pass.arena, num_panels);
    for (size_t panel = 0; panel < num_panels; ++panel)
        products[panel] = linear<T>(pass.weights->head_VD, c.V, c.D, panel_of(pass.h_DN, c.D, panel), tokens_in_panel(N, panel),
                                    panel_of(logits_VN, c.V, panel));
    run_products(products, num_panels);
    const double loss = cross_entropy(c.V, N, targets, *pass.arena, logits_VN) + daux * pass.aux_loss;
    model_bwd(pass, head_bwd(pass, logits_VN, grads), daux, grads);
    return loss;
}

template <class T>
void score_bwd(Pass<T>& pass, const Scores<T>& scores, const double* dlogps_M, const double* dentropy_M, const Weights<T>& grads) {
    T* dh_DN = take_panels<T>(*pass.arena, pass.config->D, panels_of(pass.tokens.N));
    scored_head_bwd(pass, scores, dlogps_M, dentropy_M, dh_DN, grads.head_VD);
    model_bwd(pass, dh_DN, 0.0, grads);
}

template <class T>
void multiply_all(const Multiplication<T>* list, size_t count, Arena& arena) {
    auto* products = take<Product<T>>(arena, count);
    for (size_t i = 0; i < count; ++i) {
        const Multiplication<T>& m = list[i];
        products[i] = Product<T>{m.M, m.N, m.K, m.a, m.a_row, m.a_col, m.b, m.N, m.c, m.N};
    }
    run_products(products, count);
}

template <class T>
void rms_norm_all(size_t D, double eps, size_t N, const T* x_DN, const T* w_D, T* y_DN, T* r_N) {
    for_strips(N, tokens_per_task(N), [&](const Strip& strip) { rms_norm(D, eps, strip, x_DN, w_D, y_DN, r_N); });
}

template <class T>
constexpr moe::Kernels<T> table{transpose<T>,   hidden_states<T>, head<T>,  backward<T>,     loss_and_grads<T>,
                                score<T>,       score_bwd<T>,     softmax_row<T>, greedy_row<T>,    adamw<T>, multiply_all<T>, rms_norm_all<T>};

}  // namespace

extern const moe::Kernels<float> moe_f32;
extern const moe::Kernels<double> moe_f64;
const moe::Kernels<float> moe_f32 = table<float>;
const moe::Kernels<double> moe_f64 = table<double>;

}  // namespace strop::STROP_ISA
