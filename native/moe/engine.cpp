#include "engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../dispatch.h"
#include "sampling.h"

namespace strop::moe {
namespace {

template <class T>
const Kernels<T>& kernels_of() {
    return *strop::kernels().of<T>().moe;
}

template <class T>
Weights<T> by_name(const Config& config, const std::vector<T*>& arrays, std::vector<LayerWeights<T>>& layers) {
    size_t next = 0;
    Weights<T> weights;
    weights.embedding_VD = arrays[next++];
    layers.resize(config.num_layers);
    for (LayerWeights<T>& layer : layers)
        for (T** array : {&layer.norm1_D, &layer.wq_OD, &layer.wk_OD, &layer.wv_OD, &layer.wo_DO, &layer.norm2_D, &layer.router_ED,
                          &layer.gate_up_E2FD, &layer.down_EDF})
            *array = arrays[next++];
    weights.layers = layers.data();
    weights.norm_D = arrays[next++];
    weights.head_VD = config.tied ? weights.embedding_VD : arrays[next++];
    return weights;
}

// Returns 0, 1, 2, …: the rows of logits if each row of a batch has one token.
int64_t* row_numbers(size_t B, Arena& arena) {
    int64_t* rows_B = take<int64_t>(arena, B);
    for (size_t b = 0; b < B; ++b) rows_B[b] = static_cast<int64_t>(b);
    return rows_B;
}

// Returns the places of each row's real tokens, up to the last that counts, with rows sorted by their tokens.
std::vector<std::vector<int64_t>> scored_tokens(const Batch& batch, const uint8_t* counts_BT) {
    std::vector<std::vector<int64_t>> rows(batch.B);
    for (size_t b = 0; b < batch.B; ++b) {
        size_t length = 0;
        for (size_t at = b * batch.T; at < (b + 1) * batch.T; ++at) {
            if (batch.mask_BT && !batch.mask_BT[at]) continue;
            rows[b].push_back(static_cast<int64_t>(at));
            if (counts_BT[at]) length = rows[b].size();
        }
        rows[b].resize(length);
    }
    std::stable_sort(rows.begin(), rows.end(), [&](const std::vector<int64_t>& left, const std::vector<int64_t>& right) {
        return std::lexicographical_compare(left.begin(), left.end(), right.begin(), right.end(),
                                            [&](int64_t a, int64_t b) { return batch.tokens_BT[a] < batch.tokens_BT[b]; });
    });
    return rows;
}

}  // namespace

std::vector<size_t> parameter_sizes(const Config& c) {
    std::vector<size_t> sizes{c.V * c.D};
    for (size_t layer = 0; layer < c.num_layers; ++layer)
        sizes.insert(sizes.end(), {c.D, c.H * c.C * c.D, c.K * c.C * c.D, c.K * c.C * c.D, c.D * c.H * c.C, c.D, c.E * c.D,
                                   c.E * 2 * c.F * c.D, c.E * c.D * c.F});
    sizes.push_back(c.D);
    if (!c.tied) sizes.push_back(c.V * c.D);
    return sizes;
}

std::unique_ptr<Arena> Arenas::borrow() {
    std::lock_guard lock(mutex_);
    if (free_.empty()) return std::make_unique<Arena>();
    std::unique_ptr<Arena> arena = std::move(free_.back());
    free_.pop_back();
    return arena;
}

void Arenas::give_back(std::unique_ptr<Arena> arena) {
    std::lock_guard lock(mutex_);
    free_.push_back(std::move(arena));
}

size_t Arenas::capacity() {
    std::lock_guard lock(mutex_);
    size_t total = 0;
    for (const auto& arena : free_) total += arena->capacity();
    return total;
}

template <class T>
Cache<T>::Cache(const Config& config, size_t B, size_t capacity)
    : config_(config), B_(B), capacity_(capacity), S_(padded(capacity)), data_(new T[config.num_layers * B * row_elements(config, S_) + kPad]()) {}

template <class T>
std::vector<KeysValues<T>> Cache<T>::layers() {
    return layers_in(data_.get(), config_, B_, S_);
}

template <class T>
std::vector<KeysValues<T>> Cache<T>::layers_in(T* data, const Config& config, size_t B, size_t S) {
    std::vector<KeysValues<T>> layers(config.num_layers);
    for (KeysValues<T>& layer : layers) {
        layer = {data, data + B * config.K * config.C * S, S};
        data += B * row_elements(config, S);
    }
    return layers;
}

template <class T>
Cache<T> Cache<T>::select_rows(const int64_t* rows, size_t count) const {
    Cache selected(config_, count, capacity_);
    for (size_t b = 0; b < count; ++b) selected.copy_row(b, *this, static_cast<size_t>(rows[b]), capacity_);
    return selected;
}

template <class T>
void Cache<T>::copy_row(size_t to, const Cache& from, size_t row, size_t length) {
    const size_t K = config_.K, C = config_.C;
    std::vector<KeysValues<T>> there = layers(), here = const_cast<Cache&>(from).layers();
    for (size_t layer = 0; layer < there.size(); ++layer) {
        const KeysValues<T>&source = here[layer], &copy = there[layer];
        for (size_t i = 0; i < K * C; ++i) std::copy_n(source.keys + (row * K * C + i) * source.S, length, copy.keys + (to * K * C + i) * copy.S);
        for (size_t k = 0; k < K; ++k)
            std::copy_n(source.values + (row * K + k) * source.S * padded(C), length * padded(C),
                        copy.values + (to * K + k) * copy.S * padded(C));
    }
}

template <class T>
OwnedPass<T>::OwnedPass(std::shared_ptr<Arenas> from) : arenas(std::move(from)), arena(arenas->borrow()) {
    arena->reset();
}

template <class T>
OwnedPass<T>::~OwnedPass() {
    arenas->give_back(std::move(arena));
}

template <class T>
Engine<T>::Engine(const Config& config, double rope_theta, size_t max_seq_len, const std::vector<T*>& weights)
    : config_(config), rope_theta_(rope_theta), max_seq_len_(max_seq_len), weights_(by_name(config, weights, layers_)) {}

// The table grows with the largest position; a running pass keeps the table it started with.
template <class T>
std::shared_ptr<std::vector<T>> Engine<T>::rope_table(size_t positions) {
    const size_t P = config_.C / 2;
    std::lock_guard lock(rope_mutex_);
    if (rope_ && rope_->size() >= 2 * positions * P) return rope_;
    const size_t size = std::max(positions, std::min(max_seq_len_, std::max<size_t>(128, 2 * positions)));
    auto table = std::make_shared<std::vector<T>>(2 * size * P);
    for (size_t p = 0; p < P; ++p) {
        const double frequency = std::pow(rope_theta_, -2.0 * static_cast<double>(p) / static_cast<double>(config_.C));
        for (size_t position = 0; position < size; ++position) {
            const double angle = static_cast<double>(position) * frequency;
            (*table)[position * P + p] = static_cast<T>(std::cos(angle));
            (*table)[(size + position) * P + p] = static_cast<T>(std::sin(angle));
        }
    }
    return rope_ = table;
}

// Collects the real tokens of a batch; positions count from 0, or from the number of cached tokens.
template <class T>
std::unique_ptr<OwnedPass<T>> Engine<T>::start(const Batch& batch, bool saving, size_t row_step, const int64_t* held_B) {
    auto owned = std::make_unique<OwnedPass<T>>(arenas_);
    Arena& arena = *owned->arena;
    const size_t most = batch.B * batch.T;
    int64_t *ids = take<int64_t>(arena, most), *starts = take<int64_t>(arena, batch.B + 1);
    int32_t *rows = take<int32_t>(arena, most), *positions = take<int32_t>(arena, most);
    owned->rows_N = take<int64_t>(arena, most);
    size_t n = 0, longest = 1;
    for (size_t b = 0; b < batch.B; ++b) {
        starts[b] = static_cast<int64_t>(n);
        size_t position = held_B ? static_cast<size_t>(held_B[b]) : 0;
        for (size_t at = b * batch.T; at < (b + 1) * batch.T; ++at) {
            if (batch.mask_BT && !batch.mask_BT[at]) continue;
            ids[n] = batch.tokens_BT[at];
            rows[n] = static_cast<int32_t>(b * row_step);
            positions[n] = static_cast<int32_t>(position++);
            owned->rows_N[n++] = static_cast<int64_t>(at);
        }
        longest = std::max(longest, position);
    }
    starts[batch.B] = static_cast<int64_t>(n);

    Pass<T>& pass = owned->pass;
    pass.config = &config_;
    pass.weights = &weights_;
    pass.tokens = {n, batch.B, ids, rows, positions, starts, nullptr, nullptr};
    pass.arena = &arena;
    pass.saving = saving;
    prepare_positions(*owned, longest);
    return owned;
}

template <class T>
void Engine<T>::prepare_positions(OwnedPass<T>& owned, size_t positions) {
    owned.rope = rope_table(positions);
    owned.pass.rope = {owned.rope->data(), owned.rope->data() + owned.rope->size() / 2};
}

template <class T>
void Engine<T>::forward(const Batch& batch, T* logits_BTV) {
    auto owned = start(batch, false);
    const Kernels<T>& kernels = kernels_of<T>();
    kernels.hidden_states(owned->pass);
    kernels.head(owned->pass, owned->rows_N, logits_BTV);
}

template <class T>
std::unique_ptr<OwnedPass<T>> Engine<T>::forward_saved(const Batch& batch, T* logits_BTV) {
    auto owned = start(batch, true);
    const Kernels<T>& kernels = kernels_of<T>();
    kernels.hidden_states(owned->pass);
    kernels.head(owned->pass, owned->rows_N, logits_BTV);
    return owned;
}

template <class T>
void Engine<T>::backward(OwnedPass<T>& saved, const T* dlogits_BTV, double daux, const std::vector<T*>& grads) {
    std::vector<LayerWeights<T>> layers;
    kernels_of<T>().backward(saved.pass, saved.rows_N, dlogits_BTV, daux, by_name(config_, grads, layers));
}

template <class T>
double Engine<T>::loss_and_grads(const Batch& batch, const int64_t* targets_BT, const uint8_t* counts_BT, double aux_coef,
                                 const std::vector<T*>& grads) {
    auto owned = start(batch, true);
    const size_t N = owned->pass.tokens.N;
    int64_t* targets = take<int64_t>(*owned->arena, N);
    uint8_t* counts = take<uint8_t>(*owned->arena, N);
    size_t num_counted = 0;
    for (size_t n = 0; n < N; ++n) {
        const int64_t at = owned->rows_N[n];
        targets[n] = targets_BT[at];
        counts[n] = !counts_BT || counts_BT[at];
        num_counted += counts[n];
    }
    std::vector<LayerWeights<T>> layers;
    const Kernels<T>& kernels = kernels_of<T>();
    kernels.hidden_states(owned->pass);
    return kernels.loss_and_grads(owned->pass, {targets, counts, static_cast<double>(std::max<size_t>(num_counted, 1))}, aux_coef,
                                  by_name(config_, grads, layers));
}

// Collects each row's tokens before the last that counts. Rows are sorted by their tokens, so rows with a common prefix are
// neighbours wherever they are in the batch. The prefix that a row shares with the one before it is stored once.
template <class T>
std::unique_ptr<OwnedPass<T>> Engine<T>::start_scores(const Batch& batch, const uint8_t* counts_BT, bool saving) {
    auto owned = std::make_unique<OwnedPass<T>>(arenas_);
    Arena& arena = *owned->arena;
    const size_t B = batch.B, most = B * batch.T;
    int64_t *ids = take<int64_t>(arena, most), *starts = take<int64_t>(arena, B + 1);
    int64_t *targets = take<int64_t>(arena, most), *places = take<int64_t>(arena, most);
    int32_t *rows = take<int32_t>(arena, most), *positions = take<int32_t>(arena, most), *ends = take<int32_t>(arena, most);
    int32_t *offsets = take<int32_t>(arena, B), *from = take<int32_t>(arena, most);
    const std::vector<std::vector<int64_t>> scored = scored_tokens(batch, counts_BT);
    std::vector<int32_t> row, before;  // places in ids of the tokens of this row and of the one before it
    size_t n = 0, m = 0, longest = 1;
    for (size_t b = 0; b < B; ++b) {
        std::swap(row, before);
        row.clear();
        starts[b] = static_cast<int64_t>(n);
        bool shared = true;
        for (const int64_t at : scored[b]) {
            const int64_t token = batch.tokens_BT[at];
            if (counts_BT[at]) {
                from[m] = row.back();
                targets[m] = token;
                places[m++] = at;
            }
            if (at == scored[b].back()) break;
            const size_t position = row.size();
            shared = shared && position < before.size() && ids[before[position]] == token;
            if (shared) {
                row.push_back(before[position]);
            } else {
                ids[n] = token;
                rows[n] = static_cast<int32_t>(b);
                positions[n] = static_cast<int32_t>(position);
                row.push_back(static_cast<int32_t>(n++));
            }
            ends[row.back()] = static_cast<int32_t>(b + 1);
        }
        offsets[b] = static_cast<int32_t>(row.size() - (n - static_cast<size_t>(starts[b])));
        longest = std::max(longest, row.size());
    }
    starts[B] = static_cast<int64_t>(n);

    Pass<T>& pass = owned->pass;
    pass.config = &config_;
    pass.weights = &weights_;
    pass.tokens = {n, B, ids, rows, positions, starts, ends, offsets};
    pass.arena = &arena;
    pass.saving = saving;
    owned->scores.M = m;
    owned->scores.from_M = from;
    owned->scores.targets_M = targets;
    owned->scores.places_M = places;
    prepare_positions(*owned, longest);
    return owned;
}

template <class T>
std::unique_ptr<OwnedPass<T>> Engine<T>::score(const Batch& batch, const uint8_t* counts_BT, double temperature, bool saving,
                                               double* logps_BT, double* entropy_BT) {
    auto owned = start_scores(batch, counts_BT, saving);
    Arena& arena = *owned->arena;
    Scores<T>& s = owned->scores;
    s.inverse = inverse_of(temperature);
    for (double** values : {&s.logit_M, &s.max_M, &s.total_M, &s.weighted_M, &s.log_total_M, &s.entropy_M}) *values = take<double>(arena, s.M);
    if (s.M == 0) return owned;
    const Kernels<T>& kernels = kernels_of<T>();
    owned->transposed = kernels.transpose(config_, weights_, arena);
    owned->pass.transposed = &owned->transposed;
    kernels.hidden_states(owned->pass);
    kernels.score(owned->pass, s);
    for (size_t m = 0; m < s.M; ++m) {
        s.log_total_M[m] = std::log(s.total_M[m]);
        s.entropy_M[m] = s.log_total_M[m] - s.weighted_M[m] / s.total_M[m];  // −Σ p·(s − log Σ exp(s))
        logps_BT[s.places_M[m]] = log_prob(s.logit_M[m], s.max_M[m], s.inverse, s.total_M[m]);
        entropy_BT[s.places_M[m]] = s.entropy_M[m];
    }
    return owned;
}

template <class T>
void Engine<T>::logps(const Batch& batch, const uint8_t* counts_BT, double temperature, double* logps_BT, double* entropy_BT) {
    score(batch, counts_BT, temperature, false, logps_BT, entropy_BT);
}

template <class T>
std::unique_ptr<OwnedPass<T>> Engine<T>::logps_saved(const Batch& batch, const uint8_t* counts_BT, double temperature, double* logps_BT,
                                                     double* entropy_BT) {
    return score(batch, counts_BT, temperature, true, logps_BT, entropy_BT);
}

template <class T>
void Engine<T>::logps_backward(OwnedPass<T>& saved, const double* dlogps_BT, const double* dentropy_BT, const std::vector<T*>& grads) {
    const Scores<T>& s = saved.scores;
    if (s.M == 0) {
        const std::vector<size_t> sizes = parameter_sizes(config_);
        for (size_t i = 0; i < sizes.size(); ++i) std::fill_n(grads[i], sizes[i], T(0));
        return;
    }
    double *dlogps_M = take<double>(*saved.arena, s.M), *dentropy_M = dentropy_BT ? take<double>(*saved.arena, s.M) : nullptr;
    for (size_t m = 0; m < s.M; ++m) {
        dlogps_M[m] = dlogps_BT[s.places_M[m]];
        if (dentropy_BT) dentropy_M[m] = dentropy_BT[s.places_M[m]];
    }
    std::vector<LayerWeights<T>> layers;
    kernels_of<T>().score_bwd(saved.pass, s, dlogps_M, dentropy_M, by_name(config_, grads, layers));
}

template <class T>
void Engine<T>::prefill(const Batch& batch, const Held<T>& held, T* logits_BV) {
    auto owned = start(batch, false, 1, held.held_B);
    auto caches = held.cache.layers();
    owned->pass.caches = caches.data();
    owned->pass.last_only = batch.T > 1;
    const Kernels<T>& kernels = kernels_of<T>();
    kernels.hidden_states(owned->pass);
    kernels.head(owned->pass, row_numbers(batch.B, *owned->arena), logits_BV);
}

template struct OwnedPass<float>;
template struct OwnedPass<double>;
template class Cache<float>;
template class Cache<double>;
template class Engine<float>;
template class Engine<double>;

}  // namespace strop::moe
