// Completions of prompts, token by token, without returning to Python in between.
//
// The weights do not change meanwhile, so the largest ones are transposed once; see Transposed.
#include <algorithm>

#include "../dispatch.h"
#include "engine.h"
#include "sampling.h"

namespace strop::moe {
namespace {

constexpr size_t kWorthTransposing = 4;  // new tokens per row that make transposing pay off

// The unfinished rows: their indices among all rows, and their newest tokens.
struct Going {
    size_t count;
    int32_t *rows, *positions;
    int64_t* ids;
    int64_t* starts;  // row i of the next pass has one token: 0, 1, 2, …
};

Going all_rows(const Tokens& prompts, size_t num_samples, Arena& arena) {
    const size_t count = prompts.B * num_samples;
    Going going{count, take<int32_t>(arena, count), take<int32_t>(arena, count), take<int64_t>(arena, count), take<int64_t>(arena, count + 1)};
    for (size_t row = 0; row < count; ++row) {
        const size_t last = static_cast<size_t>(prompts.starts_B[row / num_samples + 1]) - 1;
        going.rows[row] = static_cast<int32_t>(row);
        going.positions[row] = prompts.positions_N[last] + 1;
        going.starts[row] = static_cast<int64_t>(row);
    }
    going.starts[count] = static_cast<int64_t>(count);
    return going;
}

// Stores the tokens of one step and keeps only the rows that are not finished.
void append(const Completion& wanted, size_t step, const int64_t* tokens, const double* logps, Going& going) {
    size_t kept = 0;
    for (size_t i = 0; i < going.count; ++i) {
        const int32_t row = going.rows[i];
        const size_t at = static_cast<size_t>(row) * wanted.max_new_tokens + step;
        wanted.tokens_BT[at] = tokens[i];
        wanted.logps_BT[at] = logps[i];
        wanted.lengths_B[row] = static_cast<int64_t>(step + 1);
        if (std::find(wanted.ends, wanted.ends + wanted.num_ends, tokens[i]) != wanted.ends + wanted.num_ends) continue;
        going.rows[kept] = row;
        going.positions[kept] = going.positions[i];
        going.ids[kept++] = tokens[i];
    }
    going.count = kept;
}

// Copies a prompt's keys and values from the first row of its samples to the others; a prompt is read once.
template <class T>
void fan_out(const Config& c, const std::vector<KeysValues<T>>& caches, size_t B, size_t num_samples, T* logits_BV) {
    for (size_t b = B; num_samples > 1 && b-- > 0;)
        for (size_t s = num_samples; s-- > 0;) {
            if (b + s > 0) std::copy_n(logits_BV + b * c.V, c.V, logits_BV + (b * num_samples + s) * c.V);
            for (const KeysValues<T>& kv : caches) {
                const size_t keys = c.K * c.C * kv.S, values = c.K * kv.S * padded(c.C), from = b * num_samples;
                if (s) std::copy_n(kv.keys + from * keys, keys, kv.keys + (from + s) * keys);
                if (s) std::copy_n(kv.values + from * values, values, kv.values + (from + s) * values);
            }
        }
}

}  // namespace

template <class T>
bool Engine<T>::generate(const Batch& prompts, const Completion& wanted, const Held<T>* held, const std::function<bool()>& going_on) {
    const Kernels<T>& kernels = *strop::kernels().of<T>().moe;
    const size_t num_rows = prompts.B * wanted.num_samples, S = padded(wanted.capacity), V = config_.V;
    auto owned = start(prompts, false, wanted.num_samples, held ? held->held_B : nullptr);
    prepare_positions(*owned, wanted.capacity);
    Arena& arena = *owned->arena;
    Pass<T>& pass = owned->pass;
    T* own = held ? nullptr : take<T>(arena, config_.num_layers * num_rows * Cache<T>::row_elements(config_, S));
    std::vector<KeysValues<T>> caches = held ? held->cache.layers() : Cache<T>::layers_in(own, config_, num_rows, S);
    pass.caches = caches.data();
    Transposed<T> transposed;
    if (wanted.max_new_tokens >= kWorthTransposing) {
        transposed = kernels.transpose(config_, weights_, arena);
        pass.transposed = &transposed;
    }
    T* logits_BV = take<T>(arena, num_rows * V);
    auto *uniforms = take<double>(arena, num_rows), *logps = take<double>(arena, num_rows);
    auto* tokens = take<int64_t>(arena, num_rows);
    Going going = all_rows(pass.tokens, wanted.num_samples, arena);
    const Arena::Mark mark = arena.mark();

    pass.last_only = true;
    kernels.hidden_states(pass);
    kernels.head(pass, going.starts, logits_BV);
    pass.last_only = false;
    fan_out(config_, caches, prompts.B, wanted.num_samples, logits_BV);
    for (size_t step = 0;; ++step) {
        arena.release(mark);
        for (size_t i = 0; i < going.count; ++i)
            uniforms[i] = wanted.uniforms_BT[static_cast<size_t>(going.rows[i]) * wanted.max_new_tokens + step];
        sample(arena, logits_BV, uniforms, going.count, V, wanted.rule, tokens, logps);
        append(wanted, step, tokens, logps, going);
        if (going.count == 0 || step + 1 == wanted.max_new_tokens) return true;
        if (!going_on()) return false;
        arena.release(mark);
        pass.tokens = {going.count, going.count, going.ids, going.rows, going.positions, going.starts, nullptr, nullptr};
        kernels.hidden_states(pass);
        kernels.head(pass, going.starts, logits_BV);
        for (size_t i = 0; i < going.count; ++i) ++going.positions[i];
    }
}

template bool Engine<float>::generate(const Batch&, const Completion&, const Held<float>*, const std::function<bool()>&);
template bool Engine<double>::generate(const Batch&, const Completion&, const Held<double>*, const std::function<bool()>&);

}  // namespace strop::moe
