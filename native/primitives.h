// The primitives on plain arrays: threads, blocks and the order of sums. This file does not use Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace strop {

// Sets out[row] to the sum over the row's tokens, for (rows, cols) log-probs; mask may be null.
template <class T, class Out>
void kl_rows(KlEstimator estimator, const T* log_p, const T* log_q, const uint8_t* mask, size_t rows, size_t cols, Out* out);

enum class AdvantageScale { group, batch, none, leave_one_out, mean };

// Returns false for rewards that only the Python twin handles (not finite, or squares out of range).
template <class T>
bool group_advantages(const T* rewards, size_t groups, size_t group_size, AdvantageScale scale, double ddof, double eps, T* out);

// Computes (r − mean) / (std + eps), where reward i counts lengths[i] times; 0 if it does not count. Returns false as
// above.
template <class T>
bool weighted_advantages(const T* rewards, const int64_t* lengths, size_t n, double ddof, double eps, T* out);

// Computes advantages for the best of k samples; see src/strop/primitives/advantages.py. Returns false if a reward is not finite.
template <class T>
bool pass_at_k_advantages(const T* rewards, size_t groups, size_t group_size, size_t k, T* out);

// Computes generalised advantages over the unmasked tokens, for (rows, cols); mask may be null. See primitives/gae.py.
template <class T>
void gae_rows(const T* rewards, const T* values, const uint8_t* mask, size_t rows, size_t cols, double gamma, double lambda, T* out);

// Returns bins of indices into lengths, by first-fit decreasing; ties keep their order. Every length is in [0, max_length].
std::vector<std::vector<int64_t>> first_fit_decreasing(const int64_t* lengths, size_t count, int64_t max_length);

// Sequences packed into rows of one length; every array is filled completely. See src/strop/primitives/packing.py.
struct PackedRows {
    int64_t* input_ids;
    int64_t* position_ids;
    int64_t* labels;
    int64_t* sequence_ids;
};
inline constexpr int64_t kIgnoredLabel = -100;
inline constexpr int64_t kPaddingSequence = -1;

struct Sequence {
    const int64_t* tokens;
    size_t length;
};

// `order` lists the sequences row by row; row r ends at index `row_ends[r]`. Returns cu_seqlens over the flattened rows, in
// which a row's padding is its own segment.
std::vector<int32_t> collate_rows(const std::vector<Sequence>& sequences, const int64_t* order, const int64_t* row_ends, size_t rows,
                                  size_t row_length, int64_t pad_id, const PackedRows& out);

}  // namespace strop
