// Packing of sequences into bins, and of bins into rows; the contract is in src/strop/primitives/packing.py.
#include <algorithm>
#include <bit>
#include <numeric>

#include "primitives.h"

namespace strop {
namespace {

// A tree that finds the first bin with room for a length in O(log bins). Each node holds the largest room below it.
class FirstFit {
  public:
    FirstFit(size_t bins, int64_t room) : leaves_(std::bit_ceil(std::max<size_t>(bins, 1))), room_(2 * leaves_, room) {}

    // Empty bins have room for any length, so there always is one.
    size_t take(int64_t length) {
        size_t node = 1;
        while (node < leaves_) node = room_[2 * node] >= length ? 2 * node : 2 * node + 1;
        const size_t bin = node - leaves_;
        room_[node] -= length;
        for (node /= 2; node >= 1; node /= 2) {
            const int64_t largest = std::max(room_[2 * node], room_[2 * node + 1]);
            if (room_[node] == largest) break;
            room_[node] = largest;
        }
        return bin;
    }

  private:
    size_t leaves_;
    std::vector<int64_t> room_;
};

// Returns the indices by decreasing length; ties keep their original order.
std::vector<int64_t> longest_first(const int64_t* lengths, size_t count) {
    std::vector<int64_t> order(count);
    std::iota(order.begin(), order.end(), int64_t{0});
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return lengths[a] > lengths[b]; });
    return order;
}

}  // namespace

std::vector<std::vector<int64_t>> first_fit_decreasing(const int64_t* lengths, size_t count, int64_t max_length) {
    std::vector<std::vector<int64_t>> bins;
    FirstFit first_fit(count, max_length);
    for (int64_t index : longest_first(lengths, count)) {
        const size_t bin = first_fit.take(lengths[index]);
        if (bin == bins.size()) bins.emplace_back();
        bins[bin].push_back(index);
    }
    return bins;
}

std::vector<int32_t> collate_rows(const std::vector<Sequence>& sequences, const int64_t* order, const int64_t* row_ends, size_t rows,
                                  size_t row_length, int64_t pad_id, const PackedRows& out) {
    std::vector<int32_t> cu_seqlens{0};
    size_t at = 0;
    // One segment of `length` tokens: positions count from 0, and no token predicts the first one.
    auto close_segment = [&](size_t length, int64_t sequence) {
        std::iota(out.position_ids + at, out.position_ids + at + length, int64_t{0});
        std::fill_n(out.sequence_ids + at, length, sequence);
        at += length;
        cu_seqlens.push_back(static_cast<int32_t>(at));
    };
    for (size_t row = 0, k = 0; row < rows; ++row) {
        for (; k < static_cast<size_t>(row_ends[row]); ++k) {
            const Sequence& sequence = sequences[static_cast<size_t>(order[k])];
            std::copy_n(sequence.tokens, sequence.length, out.input_ids + at);
            std::copy_n(sequence.tokens, sequence.length, out.labels + at);
            if (sequence.length > 0) out.labels[at] = kIgnoredLabel;
            close_segment(sequence.length, order[k]);
        }
        const size_t padding = (row + 1) * row_length - at;
        if (padding == 0) continue;
        std::fill_n(out.input_ids + at, padding, pad_id);
        std::fill_n(out.labels + at, padding, kIgnoredLabel);
        close_segment(padding, kPaddingSequence);
    }
    return cu_seqlens;
}

}  // namespace strop
