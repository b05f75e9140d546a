// Log-probs and entropies of the tokens that count, computed from the hidden states.
//
// s = (z − max z)/t,  log p_v = s_v − log Σ exp(s),  H = −Σ p·log p.  Logits are stored for kRows tokens at a time or, if a
// backward follows, for all tokens that count.
#include "layers.h"
#include "linear.h"

namespace strop::STROP_ISA {
namespace {

constexpr size_t kRows = 48;      // tokens of a task
constexpr size_t kWorkers = 32;   // the most tasks, each with its own scratch memory

// Returns the hidden state of token n, a column of its panel.
template <class T>
inline void copy_token(size_t D, const T* h_DN, size_t n, T* h_D) {
    const T* from = panel_of(h_DN, D, n / kPanel) + n % kPanel;
    for (size_t d = 0; d < D; ++d) h_D[d] = from[d * kPanel];
}

// Returns Σ_v s_v·p_v, where p_V are the exponentials of s; 0·−inf is 0.
template <class T>
double weighted_sum(const T* logits_V, size_t V, double max, double inverse, const double* p_V) {
    Wide sum{};
    for (size_t v = 0; v < V; v += kWide) {
        const Wide p = load(p_V + v), s = (load_wide_first(logits_V + v, smaller(V - v, kWide)) - wide(max)) * wide(inverse);
        sum += (p > 0.0) & lanes_below(smaller(V - v, kWide)) ? p * s : Wide{};
    }
    return sum_lanes<double>(sum);
}

// Replaces z of one token by dL/dz, from dL/dlogp and dL/dH:
// dlogp/dz_v = ([v = target] − p_v)/t,  dH/dz_v = −p_v·(log p_v + H)/t
template <class T>
void token_bwd(const Scores<T>& scores, size_t m, size_t V, double dlogp, double dentropy, T* z_V) {
    constexpr size_t lanes = Lanes<T>::count;
    const VecOf<T> max = broadcast<T>(static_cast<T>(scores.max_M[m])), inverse = broadcast<T>(static_cast<T>(scores.inverse));
    const VecOf<T> share = broadcast<T>(static_cast<T>(scores.inverse / scores.total_M[m]));
    const VecOf<T> via_logp = broadcast<T>(static_cast<T>(dlogp)), via_entropy = broadcast<T>(static_cast<T>(dentropy));
    const VecOf<T> shift = broadcast<T>(static_cast<T>(scores.entropy_M[m] - scores.log_total_M[m]));
    for (size_t v = 0; v < V; v += lanes) {  // rows are padded to whole vectors
        const VecOf<T> s = (load(z_V + v) - max) * inverse, p = exp_to_one<T>(s) * share;
        if (dentropy == 0) store(z_V + v, -p * via_logp);
        else store(z_V + v, p > T(0) ? -p * (via_logp + via_entropy * (s + shift)) : VecOf<T>{});
    }
    z_V[scores.targets_M[m]] += static_cast<T>(dlogp * scores.inverse);
}

}  // namespace

template <class T>
void score(Pass<T>& pass, Scores<T>& scores) {
    const Config& c = *pass.config;
    Arena& arena = *pass.arena;
    const size_t M = scores.M, D = c.D, V = c.V, Dp = padded(D), Vs = spread(V), blocks = (V + kDrawBlock - 1) / kDrawBlock;
    const size_t tasks = (M + kRows - 1) / kRows, workers = smaller(tasks, kWorkers);
    const T* head = pass.transposed ? pass.transposed->head : take_transposed(pass.weights->head_VD, 1, V, D, arena);
    scores.h_MD = take<T>(arena, M * Dp);
    scores.logits_MV = take<T>(arena, (pass.saving ? M : workers * kRows) * Vs);
    double *p = take<double>(arena, workers * padded(V)), *sums = take<double>(arena, workers * blocks);
    parallel_for(workers, [&](size_t worker) noexcept {
        double *p_V = p + worker * padded(V), *block_sums = sums + worker * blocks;
        for (size_t task = worker * tasks / workers; task < (worker + 1) * tasks / workers; ++task) {
            const size_t first = task * kRows, count = smaller(M - first, kRows);
            T *h = scores.h_MD + first * Dp, *logits = scores.logits_MV + (pass.saving ? first : worker * kRows) * Vs;
            for (size_t i = 0; i < count; ++i) copy_token(D, pass.h_DN, scores.from_M[first + i], h + i * Dp);
            for (size_t v = 0; v < V; v += kPanel)
                multiply(linear_by_rows<T>(h, Dp, D, panel_of(head, D, v / kPanel), smaller(V - v, kPanel), count, logits + v, Vs));
            for (size_t i = 0; i < count; ++i) {
                const size_t m = first + i;
                const T* z_V = logits + i * Vs;
                scores.logit_M[m] = static_cast<double>(z_V[scores.targets_M[m]]);
                scores.max_M[m] = softmax_row(z_V, V, scores.inverse, p_V, block_sums);
                double total = 0;
                for (size_t block = 0; block < blocks; ++block) total += block_sums[block];
                scores.total_M[m] = total;
                scores.weighted_M[m] = weighted_sum(z_V, V, scores.max_M[m], scores.inverse, p_V);
            }
        }
    });
}

template <class T>
void scored_head_bwd(Pass<T>& pass, const Scores<T>& scores, const double* dlogps_M, const double* dentropy_M, T* dh_DN, T* dhead_VD) {
    const Config& c = *pass.config;
    Arena& arena = *pass.arena;
    const size_t M = scores.M, N = pass.tokens.N, D = c.D, V = c.V, Dp = padded(D), Vs = spread(V);
    T *dlogits_MV = scores.logits_MV, *dh_MD = take<T>(arena, M * Dp);
    parallel_for((M + kRows - 1) / kRows, [&](size_t task) noexcept {                       // logits = h·Wᵀ
        const size_t first = task * kRows, count = smaller(M - first, kRows);
        for (size_t m = first; m < first + count; ++m)
            token_bwd(scores, m, V, dlogps_M[m], dentropy_M ? dentropy_M[m] : 0.0, dlogits_MV + m * Vs);
        multiply(linear_bwd_input_rows<T>(dlogits_MV + first * Vs, Vs, V, pass.weights->head_VD, D, count, dh_MD + first * Dp, Dp));
    });
    Product<T> dhead = linear_bwd_weight_rows<T>(dlogits_MV, Vs, V, scores.h_MD, Dp, D, M, dhead_VD, D);
    run_products(&dhead, 1);

    // A token may predict several tokens, if rows differ after it, or none.
    constexpr size_t lanes = Lanes<T>::count;
    const T** rows_N = take<const T*>(arena, N);
    T* none_D = take<T>(arena, Dp);
    for (size_t d = 0; d < Dp; ++d) none_D[d] = 0;
    for (size_t n = 0; n < N; ++n) rows_N[n] = none_D;
    for (size_t m = 0; m < M; ++m) {
        const T*& row_D = rows_N[scores.from_M[m]];
        T* dh_D = dh_MD + m * Dp;
        if (row_D != none_D)
            for (size_t d = 0; d < Dp; d += lanes) store(dh_D + d, load(row_D + d) + load(dh_D + d));
        row_D = dh_D;
    }
    for_tasks(strips_of(N), N * D, [&](size_t task) noexcept {
        const Strip strip = strip_at(N, task);
        to_lanes<T>(D, strip.tokens, [&](size_t i) { return rows_N[strip.first + i]; }, strip_of(dh_DN, D, strip));
    });
}

#define STROP_INSTANTIATE(T)                                    \
    template void score<T>(Pass<T>&, Scores<T>&);               \
    template void scored_head_bwd<T>(Pass<T>&, const Scores<T>&, const double*, const double*, T*, T*);
STROP_INSTANTIATE(float)
STROP_INSTANTIATE(double)

}  // namespace strop::STROP_ISA
