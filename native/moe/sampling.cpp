// Draws a token from logits, as src/strop/moe/sampling.py does: temperature, top-k, top-p, one draw.
#include "sampling.h"

#include <algorithm>
#include <cmath>

#include "../dispatch.h"
#include "../threads.h"

namespace strop::moe {
namespace {

struct Row {
    size_t V;
    double* p_V;      // exp(z − max)
    double* sums;     // of blocks of p
    int32_t* ids_V;   // scratch

    double total() const {
        double sum = 0;
        for (size_t block = 0; block * kDrawBlock < V; ++block) sum += sums[block];
        return sum;
    }
};

// Returns the first token whose cumulative probability exceeds u: finds the block first, then the token inside it.
size_t draw(const Row& row, double u, double total) {
    const double wanted = u * total;
    double before = 0;
    size_t block = 0;
    for (; (block + 1) * kDrawBlock < row.V && before + row.sums[block] <= wanted; ++block) before += row.sums[block];
    size_t token = block * kDrawBlock;
    const size_t last = std::min(token + kDrawBlock, row.V);
    for (size_t v = token; v < last; ++v) {
        if (row.p_V[v] > 0) token = v;  // rounding may leave none above u: then take the last possible token
        if ((before += row.p_V[v]) > wanted) break;
    }
    return token;
}

// Writes the tokens that top-k and top-p keep to ids_V, by id; returns their number, and their sum in *total.
size_t restrict_to_top(const Row& row, const Sampling& rule, double* total) {
    const auto less_probable = [&](int32_t a, int32_t b) { return row.p_V[a] != row.p_V[b] ? row.p_V[a] < row.p_V[b] : a > b; };
    int32_t *first = row.ids_V, *heap_end = row.ids_V + row.V;
    for (size_t v = 0; v < row.V; ++v) first[v] = static_cast<int32_t>(v);
    std::make_heap(first, heap_end, less_probable);
    const size_t most = rule.top_k > 0 ? std::min(static_cast<size_t>(rule.top_k), row.V) : row.V;

    double mass = *total;
    size_t taken = 0;  // the taken tokens are stored after the heap, the most probable last
    const auto token = [&](size_t rank) { return row.ids_V[row.V - 1 - rank]; };
    const auto take_next = [&] { std::pop_heap(first, heap_end--, less_probable), ++taken; };
    if (rule.top_k > 0) {
        for (mass = 0; taken < most; mass += row.p_V[token(taken - 1)]) take_next();
    }
    size_t kept = rule.top_p < 1 ? 0 : most;
    if (rule.top_p < 1) {
        double before = 0;  // probability of the tokens more probable than the next
        for (; kept < most && (kept == 0 || before < rule.top_p * mass); before += row.p_V[token(kept++)])
            if (taken == kept) take_next();
        mass = before;
    }
    std::copy(row.ids_V + row.V - kept, row.ids_V + row.V, row.ids_V);
    std::sort(row.ids_V, row.ids_V + kept);
    *total = mass;
    return kept;
}

size_t draw_among(const Row& row, size_t count, double u, double total) {
    const double wanted = u * total;
    double sum = 0;
    size_t token = static_cast<size_t>(row.ids_V[0]);
    for (size_t i = 0; i < count; ++i) {
        if (row.p_V[row.ids_V[i]] > 0) token = static_cast<size_t>(row.ids_V[i]);
        if ((sum += row.p_V[row.ids_V[i]]) > wanted) break;
    }
    return token;
}

}  // namespace

template <class T>
void sample(Arena& arena, const T* logits_BV, const double* uniforms_B, size_t B, size_t V, const Sampling& rule, int64_t* tokens_B,
            double* logps_B) {
    const Kernels<T>& kernel = *kernels().of<T>().moe;
    if (rule.temperature == 0) {
        parallel_for(B, [&](size_t b) noexcept {
            double sum;
            tokens_B[b] = static_cast<int64_t>(kernel.greedy_row(logits_BV + b * V, V, &sum));
            logps_B[b] = -std::log(sum);
        });
        return;
    }
    const double inverse = inverse_of(rule.temperature);
    const size_t blocks = (V + kDrawBlock - 1) / kDrawBlock;
    double *p_BV = take<double>(arena, B * padded(V)), *sums_B = take<double>(arena, B * blocks);
    int32_t* ids_BV = take<int32_t>(arena, B * V);
    parallel_for(B, [&](size_t b) noexcept {
        const T* logits_V = logits_BV + b * V;
        const Row row{V, p_BV + b * padded(V), sums_B + b * blocks, ids_BV + b * V};
        const double max = kernel.softmax_row(logits_V, V, inverse, row.p_V, row.sums);
        double total = row.total();
        size_t token;
        if (rule.top_k > 0 || rule.top_p < 1) {
            const size_t count = restrict_to_top(row, rule, &total);
            token = draw_among(row, count, uniforms_B[b], total);
        } else {
            token = draw(row, uniforms_B[b], total);
        }
        tokens_B[b] = static_cast<int64_t>(token);
        logps_B[b] = log_prob(static_cast<double>(logits_V[token]), max, inverse, total);
    });
}

template void sample<float>(Arena&, const float*, const double*, size_t, size_t, const Sampling&, int64_t*, double*);
template void sample<double>(Arena&, const double*, const double*, size_t, size_t, const Sampling&, int64_t*, double*);

}  // namespace strop::moe
