// Packing sequences into bins and laying the bins out as rows; contract in src/strop/primitives/packing.py.
#include <algorithm>
#include <bit>
#include <numeric>

#include "primitives.h"

namespace strop {
namespace {

// Finds the first of many bins with room for a length, in O(log bins): a tree whose nodes hold the largest room below them.
class FirstFit {
  public:
    FirstFit(size_t bins, int64_t room) : leaves_(std::bit_ceil(std::max<size_t>(bins, 1))), room_(2 * leaves_, room) {}

    // Every bin starts empty with room for any length, so there always is one.
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

// Indices by decreasing length, ties in their original order.
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

std::vector<int32_t> collate_rows(const int64_t* tokens, const int64_t* starts, const int64_t* order, const int64_t* row_ends,
                                  size_t rows, size_t row_length, int64_t pad_id, const PackedRows& out) {
    std::vector<int32_t> cu_seqlens{0};
    size_t at = 0;
    auto close_segment = [&] { cu_seqlens.push_back(static_cast<int32_t>(at)); };

    for (size_t row = 0, k = 0; row < rows; ++row) {
        for (; k < static_cast<size_t>(row_ends[row]); ++k) {
            const int64_t sequence = order[k];
            const int64_t* from = tokens + starts[sequence];
            const int64_t length = starts[sequence + 1] - starts[sequence];
            for (int64_t position = 0; position < length; ++position, ++at) {
                out.input_ids[at] = from[position];
                out.position_ids[at] = position;
                out.labels[at] = position == 0 ? kIgnoredLabel : from[position];
                out.sequence_ids[at] = sequence;
            }
            close_segment();
        }
        const size_t row_end = (row + 1) * row_length;
        if (at == row_end) continue;
        for (int64_t position = 0; at < row_end; ++position, ++at) {
            out.input_ids[at] = pad_id;
            out.position_ids[at] = position;
            out.labels[at] = kIgnoredLabel;
            out.sequence_ids[at] = kPaddingSequence;
        }
        close_segment();
    }
    return cu_seqlens;
}

}  // namespace strop
