// Experts: SwiGLU feed-forwards, y = swiglu(x·Wgᵀ, x·Wuᵀ)·Wdᵀ for the tokens assigned to each.
#include "layers.h"
#include "linear.h"

namespace strop::STROP_ISA {
namespace {

// 1 / (1 + exp(−x)), from exp(−|x|), which does not overflow
template <class T>
inline VecOf<T> sigmoid(VecOf<T> x) {
    const VecOf<T> e = exp_to_one<T>(-absolute<T>(x));
    return (x < T(0) ? e : broadcast<T>(1)) * reciprocal(e + T(1));
}

// h = silu(gate)·up,  silu(g) = g·σ(g): rows of whole vectors, gate and up in rows of `from_row`
template <class T>
inline void swiglu(size_t rows, size_t columns, const T* gate, const T* up, size_t from_row, T* h, size_t h_row) {
    constexpr size_t lanes = Lanes<T>::count;
    for (size_t row = 0; row < rows; ++row)
        for (size_t i = 0; i < columns; i += lanes) {
            const VecOf<T> g = load(gate + row * from_row + i);
            store(h + row * h_row + i, (g * sigmoid<T>(g)) * load(up + row * from_row + i));
        }
}

// Computes dgate, dup and the recomputed h of one token from dh, gate and up; rows are padded to whole vectors.
template <class T>
inline void swiglu_bwd(size_t F, const T* dh_F, const T* gate_F, const T* up_F, T* dgate_F, T* dup_F, T* h_F) {
    constexpr size_t lanes = Lanes<T>::count;
    for (size_t f = 0; f < F; f += lanes) {
        const VecOf<T> dh = load(dh_F + f), gate = load(gate_F + f), up = load(up_F + f);
        const VecOf<T> s = sigmoid<T>(gate), silu = gate * s;
        store(h_F + f, silu * up);
        store(dup_F + f, dh * silu);                                        // dL/dup = dh·silu(g)
        store(dgate_F + f, dh * up * (s + silu * (T(1) - s)));              // dL/dgate = dh·up·silu′,  silu′ = σ + g·σ·(1 − σ)
    }
}

size_t tokens_of(const Groups& groups, size_t e) {
    const size_t first = groups.first_panels_E[e], last = groups.first_panels_E[e + 1];
    return first == last ? 0 : (last - first - 1) * kPanel + static_cast<size_t>(groups.counts[last - 1]);
}

// Transposes what `experts` saved into the rows of gate_up_A2F.
template <class T>
T* take_gate_up_rows(const Config& c, const Groups& groups, const T* gate_up_2FA, Arena& arena) {
    const size_t F = c.F, Fp = padded(F), stride = spread(2 * Fp);
    T* gate_up_A2F = take<T>(arena, groups.num_panels * kPanel * stride);
    parallel_for(2 * groups.num_panels, [&](size_t task) noexcept {
        const size_t panel = task / 2, is_up = task % 2;
        to_rows<T>(F, groups.counts[panel], panel_of(gate_up_2FA, 2 * F, panel) + is_up * F * kPanel,
                   [&](size_t i) { return gate_up_A2F + (panel * kPanel + i) * stride + is_up * Fp; });
    });
    return gate_up_A2F;
}

}  // namespace

template <class T>
void experts(Pass<T>& pass, const LayerWeights<T>& w, BlockSaved<T>& saved) {
    const Config& c = *pass.config;
    const Groups& groups = saved.groups;
    const size_t D = c.D, F = c.F;
    Arena& arena = *pass.arena;
    const size_t columns = groups.num_panels * kPanel;
    for_tasks(strips_of(columns), columns * D, [&](size_t task) noexcept {
        const Strip strip = strip_at(columns, task);
        const size_t count = groups.counts[strip.panel];
        if (strip.column >= count) return;
        const int32_t* token = groups.tokens_A + strip.first;
        to_lanes<T>(D, smaller(count - strip.column, Strip::size), [&](size_t i) { return saved.n2_ND + token[i] * padded(D); },
                    strip_of(saved.x_DA, D, strip));
    });

    auto* products = take<Product<T>>(arena, groups.num_panels);
    for (size_t panel = 0; panel < groups.num_panels; ++panel)
        products[panel] = linear<T>(w.gate_up_E2FD + groups.experts[panel] * 2 * F * D, F, D, panel_of(saved.x_DA, D, panel),
                                    groups.counts[panel], pass.saving ? panel_of(saved.gate_up_2FA, 2 * F, panel) : nullptr);
    for_rows_of(products, groups.num_panels, [&](size_t panel, size_t first, size_t last) {
        constexpr size_t kRows = 24;
        T unsaved[2 * kRows * kPanel];  // without a backward, gate and up stay in the first-level cache
        for (size_t f = first; f < last; f += kRows) {
            Product<T> gate = products[panel];
            gate.M = smaller(last - f, kRows);
            gate.a += f * D;
            gate.c = pass.saving ? gate.c + f * kPanel : unsaved;
            Product<T> up = gate;
            up.a += F * D;
            up.c += (pass.saving ? F : kRows) * kPanel;
            multiply(gate);
            multiply(up);
            swiglu(gate.M, groups.counts[panel], gate.c, up.c, kPanel, panel_of(saved.h_FA, F, panel) + f * kPanel, kPanel);
        }
    });

    T* y_DA = take_panels<T>(arena, D, groups.num_panels);
    for (size_t panel = 0; panel < groups.num_panels; ++panel)
        products[panel] = linear<T>(w.down_EDF + groups.experts[panel] * D * F, D, F, panel_of(saved.h_FA, F, panel),
                                    groups.counts[panel], panel_of(y_DA, D, panel));
    run_products(products, groups.num_panels, [&](size_t panel, size_t first, size_t last) {
        to_rows<T>(last - first, groups.counts[panel], panel_of(y_DA, D, panel) + first * kPanel,
                   [&](size_t i) { return saved.y_AD + (panel * kPanel + i) * padded(D) + first; });
    });
}

template <class T>
void experts_by_rows(Pass<T>& pass, const typename Transposed<T>::Layer& w, BlockSaved<T>& saved) {
    const Config& c = *pass.config;
    const Groups& groups = saved.groups;
    const size_t D = c.D, F = c.F, Dp = padded(D), Fp = padded(F), A = groups.num_panels * kPanel;
    const size_t F_panels = panels_of(F), D_panels = panels_of(D), stride = spread(2 * Fp);
    Arena& arena = *pass.arena;
    T *x_AD = take<T>(arena, A * Dp), *h_AF = take<T>(arena, A * Fp);
    for_tasks(groups.num_panels, A * D, [&](size_t panel) noexcept {
        const int32_t* token = groups.tokens_A + panel * kPanel;
        for (size_t i = 0; i < static_cast<size_t>(groups.counts[panel]); ++i)
            __builtin_memcpy(x_AD + (panel * kPanel + i) * Dp, saved.n2_ND + token[i] * Dp, D * sizeof(T));
    });

    auto* products = take<Product<T>>(arena, c.E * (F_panels > D_panels ? F_panels : D_panels));
    size_t count = 0;
    for (size_t e = 0; e < c.E; ++e)
        for (size_t panel = 0; panel < F_panels && tokens_of(groups, e); ++panel) {
            const size_t first = groups.first_panels_E[e] * kPanel, f = panel * kPanel;
            products[count++] = linear_by_rows<T>(x_AD + first * Dp, Dp, D, panel_of(w.gate_up_E, D, 2 * e * F_panels + panel),
                                                  columns_of<T>(smaller(F - f, kPanel)), tokens_of(groups, e), h_AF + first * Fp + f, Fp);
        }
    for_rows_of(products, count, [&](size_t index, size_t first, size_t last) {
        constexpr size_t kRows = 24;
        T unsaved[2 * kRows * kPanel];
        const size_t a = (products[index].a - x_AD) / Dp, f = static_cast<size_t>(products[index].c - h_AF) % Fp;
        for (size_t row = first; row < last; row += kRows) {
            Product<T> gate = products[index];
            T* h = gate.c + row * Fp;
            gate.M = smaller(last - row, kRows);
            gate.a += row * Dp;
            gate.c = saved.gate_up_A2F ? saved.gate_up_A2F + (a + row) * stride + f : unsaved;
            gate.c_row = saved.gate_up_A2F ? stride : kPanel;
            Product<T> up = gate;
            up.b += F_panels * D * kPanel;
            up.c += saved.gate_up_A2F ? Fp : kRows * kPanel;
            multiply(gate);
            multiply(up);
            swiglu(gate.M, gate.N, gate.c, up.c, gate.c_row, h, Fp);
        }
    });

    count = 0;
    for (size_t e = 0; e < c.E; ++e)
        for (size_t panel = 0; panel < D_panels && tokens_of(groups, e); ++panel) {
            const size_t first = groups.first_panels_E[e] * kPanel, d = panel * kPanel;
            products[count++] = linear_by_rows<T>(h_AF + first * Fp, Fp, F, panel_of(w.down_E, F, e * D_panels + panel),
                                                  columns_of<T>(smaller(D - d, kPanel)), tokens_of(groups, e), saved.y_AD + first * Dp + d, Dp);
        }
    run_products(products, count);
}

namespace {

// The backward processes some assignments of one expert and some of its features at a time, so that the intermediate results
// stay in the second-level cache until the last product has read them.
constexpr size_t kRows = 96, kFeatures = 256;
constexpr size_t kWorkers = 32;  // the most tasks, each with its own scratch memory

// A chunk of one expert's assignments, with its own sum of the weight gradients. Several chunks of an expert are added in order.
struct Chunk {
    size_t expert, first, count;
    bool is_all;  // whether the chunk has all assignments of the expert
};

// The cut into chunks depends only on the number of assignments.
size_t take_chunks(const Config& c, const Groups& groups, Arena& arena, Chunk** chunks) {
    const size_t A = groups.num_panels * kPanel, most = A / 8 < 128 ? 128 : smaller(A / 8, 512);
    *chunks = take<Chunk>(arena, A / most + c.E);
    size_t count = 0;
    for (size_t e = 0; e < c.E; ++e) {
        const size_t tokens = tokens_of(groups, e), parts = (tokens + most - 1) / most;
        for (size_t part = 0; part < parts; ++part) {
            const size_t first = tokens * part / parts, last = tokens * (part + 1) / parts;
            (*chunks)[count++] = {e, groups.first_panels_E[e] * kPanel + first, last - first, parts == 1};
        }
    }
    return count;
}

template <class T>
struct ExpertsBwd {
    size_t D, F;
    const LayerWeights<T>& w;
    const T *gate_up_A2F, *down_panels;  // down_panels[e][panel of 64 features][D][feature], or null: dh = dy·Wd without a stride of F
    const T *dy_ND, *n2_ND, *weights_A;
    const int32_t* tokens_A;
    T *dy_AD, *x_AD, *dx_AD;
};

template <class T>
struct ExpertScratch {
    static constexpr size_t both_row = 2 * kFeatures + kPad, row = kFeatures + kPad;
    T dgate_up[kRows * both_row];  // the gate, then up at kFeatures
    T dh[kRows * row], h[kRows * row];
};

// Processes assignments [a, a + n) and features [f, f + width). With `add` the weights' gradients are added to the existing ones.
template <class T>
void expert_bwd(const ExpertsBwd<T>& of, size_t e, size_t a, size_t n, size_t f, size_t width, bool add, ExpertScratch<T>& s, T* dgate_up_2FD,
                T* ddown_DF) {
    constexpr size_t row = ExpertScratch<T>::row, both_row = ExpertScratch<T>::both_row;
    const size_t D = of.D, F = of.F, Dp = padded(D), Fp = padded(F), stride = spread(2 * Fp), F_panels = panels_of(F);
    const T *dy = of.dy_AD + a * Dp, *x = of.x_AD + a * Dp;
    const auto run = [](Product<T> product, bool accumulate) {
        product.accumulate = accumulate;
        multiply(product);
    };
    for (size_t v = 0; v < width && of.down_panels; v += kPanel)                            // y = h·Wdᵀ
        multiply(linear_by_rows<T>(dy, Dp, D, panel_of(of.down_panels, D, e * F_panels + (f + v) / kPanel), smaller(width - v, kPanel), n,
                                   s.dh + v, row));
    if (!of.down_panels) {
        Product<T> dh = linear_bwd_input_rows<T>(dy, Dp, D, of.w.down_EDF + e * D * F + f, F, n, s.dh, row);
        dh.N = width;
        multiply(dh);
    }
    for (size_t i = 0; i < n; ++i) {                                                        // h = silu(gate)·up
        const T* gate = of.gate_up_A2F + (a + i) * stride + f;
        T* dgate = s.dgate_up + i * both_row;
        swiglu_bwd(width, s.dh + i * row, gate, gate + Fp, dgate, dgate + kFeatures, s.h + i * row);
    }
    run(linear_bwd_weight_rows<T>(dy, Dp, D, s.h, row, width, n, ddown_DF + f, F), add);
    for (size_t is_up = 0; is_up < 2; ++is_up) {                                            // (gate, up) = x·(Wg, Wu)ᵀ
        const T* d = s.dgate_up + is_up * kFeatures;
        const size_t at = (is_up * F + f) * D;
        run(linear_bwd_weight_rows<T>(d, both_row, width, x, Dp, D, n, dgate_up_2FD + at, D), add);
        run(linear_bwd_input_rows<T>(d, both_row, width, of.w.gate_up_E2FD + e * 2 * F * D + at, D, n, of.dx_AD + a * Dp, Dp), f > 0 || is_up);
    }
}

// Computes dL/d expert_j(x_n) = w_nj·dy_n and x_n of a chunk's assignments, then the chunk's part of every gradient.
template <class T>
void chunk_bwd(const ExpertsBwd<T>& of, const Chunk& chunk, ExpertScratch<T>& scratch, T* dgate_up_2FD, T* ddown_DF) {
    constexpr size_t lanes = Lanes<T>::count;
    const size_t Dp = padded(of.D), last = chunk.first + chunk.count;
    for (size_t a = chunk.first; a < last; ++a) {
        const size_t from = of.tokens_A[a] * Dp;
        for (size_t d = 0; d < Dp; d += lanes) {
            store(of.dy_AD + a * Dp + d, of.weights_A[a] * load(of.dy_ND + from + d));
            store(of.x_AD + a * Dp + d, load(of.n2_ND + from + d));
        }
    }
    for (size_t f = 0; f < of.F; f += kFeatures)
        for (size_t a = chunk.first; a < last; a += kRows)
            expert_bwd(of, chunk.expert, a, smaller(last - a, kRows), f, smaller(of.F - f, kFeatures), a > chunk.first, scratch, dgate_up_2FD,
                       ddown_DF);
}

// Copies the down projections into panels of 64 features.
template <class T>
T* take_down_panels(const Config& c, const T* down_EDF, Arena& arena) {
    const size_t D = c.D, F = c.F, panels = panels_of(F);
    T* to = take_panels<T>(arena, D, c.E * panels);
    for_tasks(c.E * panels, c.E * D * F, [&](size_t task) noexcept {
        const size_t first = task % panels * kPanel;
        const T* from = down_EDF + task / panels * D * F + first;
        for (size_t d = 0; d < D; ++d) __builtin_memcpy(panel_of(to, D, task) + d * kPanel, from + d * F, smaller(F - first, kPanel) * sizeof(T));
    });
    return to;
}

// Adds the sums of an expert's chunks in order: to = Σ parts. An expert without tokens gets zeros.
template <class T>
void add_parts(const Config& c, const Chunk* chunks, size_t count, const T* parts, size_t part_size, const LayerWeights<T>& grads) {
    constexpr size_t kElements = 4096;
    const size_t gate_up = 2 * c.F * c.D, blocks = (part_size + kElements - 1) / kElements;
    parallel_for(c.E * blocks, [&](size_t task) noexcept {
        const size_t e = task / blocks, first = task % blocks * kElements, last = smaller(first + kElements, part_size);
        size_t part = 0;
        while (part < count && chunks[part].expert != e) ++part;
        if (part < count && chunks[part].is_all) return;
        for (size_t i = first; i < last;) {  // a block may span both arrays
            const bool is_down = i >= gate_up;
            T* to = is_down ? grads.down_EDF + e * c.D * c.F + (i - gate_up) : grads.gate_up_E2FD + e * gate_up + i;
            const size_t n = smaller(last, is_down ? part_size : gate_up) - i;
            __builtin_memset(to, 0, n * sizeof(T));
            for (size_t p = part; p < count && chunks[p].expert == e; ++p)
                for (size_t k = 0; k < n; ++k) to[k] += parts[p * part_size + i + k];
            i += n;
        }
    });
}

}  // namespace

// Tokens are rows here, so an expert with few tokens still uses all lanes, and the weights are read as they are stored.
template <class T>
void experts_bwd(Pass<T>& pass, const LayerWeights<T>& w, const BlockSaved<T>& saved, const T* dy_ND, T* dx_AD, const LayerWeights<T>& grads) {
    const Config& c = *pass.config;
    const Groups& groups = saved.groups;
    const size_t gate_up = 2 * c.F * c.D, part_size = gate_up + c.D * c.F, A = groups.num_panels * kPanel;
    Arena& arena = *pass.arena;
    T* weights_A = take<T>(arena, A);
    for (size_t i = 0; i < pass.tokens.N * c.J; ++i) weights_A[groups.assignments_NJ[i]] = saved.weights_NJ[i];
    const T* gate_up_A2F = saved.gate_up_A2F ? saved.gate_up_A2F : take_gate_up_rows(c, groups, saved.gate_up_2FA, arena);
    const bool worth_panels = pass.tokens.N * c.J >= c.E * kPanel;  // enough tokens to pay for making them
    const ExpertsBwd<T> of{c.D, c.F, w, gate_up_A2F, worth_panels ? take_down_panels(c, w.down_EDF, arena) : nullptr, dy_ND, saved.n2_ND, weights_A, groups.tokens_A,
                           take<T>(arena, A * padded(c.D)), take<T>(arena, A * padded(c.D)), dx_AD};
    Chunk* chunks;
    const size_t count = take_chunks(c, groups, arena, &chunks), workers = smaller(count, kWorkers);
    T* parts = take<T>(arena, count * part_size);
    auto* scratch = take<ExpertScratch<T>>(arena, workers);
    parallel_for(workers, [&](size_t worker) noexcept {
        for (size_t i = worker * count / workers; i < (worker + 1) * count / workers; ++i) {
            const Chunk& chunk = chunks[i];
            T *part = parts + i * part_size, *dgate_up = chunk.is_all ? grads.gate_up_E2FD + chunk.expert * gate_up : part;
            chunk_bwd(of, chunk, scratch[worker], dgate_up, chunk.is_all ? grads.down_EDF + chunk.expert * c.D * c.F : part + gate_up);
        }
    });
    add_parts(c, chunks, count, parts, part_size, grads);
}

#define STROP_INSTANTIATE(T)                                                                        \
    template void experts<T>(Pass<T>&, const LayerWeights<T>&, BlockSaved<T>&);                     \
    template void experts_by_rows<T>(Pass<T>&, const typename Transposed<T>::Layer&, BlockSaved<T>&); \
    template void experts_bwd<T>(Pass<T>&, const LayerWeights<T>&, const BlockSaved<T>&, const T*, T*, const LayerWeights<T>&);
STROP_INSTANTIATE(float)
STROP_INSTANTIATE(double)

}  // namespace strop::STROP_ISA
