#include "primitives.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <new>

#include "dispatch.h"
#include "threads.h"

namespace strop {
namespace {

// Sums are computed over blocks of this many elements, and the blocks are added in order. So neither the number of threads nor
// the length of a row changes how an element is rounded.
constexpr size_t kBlock = 1024;

// Below about 10 µs of work, threads cost more than they save.
template <class T>
constexpr size_t kParallelElements = (size_t{1} << 17) / sizeof(T);

// Neumaier's compensated sum, whose error does not grow with the number of blocks.
struct CompensatedSum {
    double total = 0.0, lost = 0.0;

    void add(double x) {
        double sum = total + x;
        lost += std::fabs(total) >= std::fabs(x) ? (total - sum) + x : (x - sum) + total;
        total = sum;
    }
    // An infinite or NaN total has no meaningful correction.
    double value() const { return std::isfinite(total) ? total + lost : total; }
};

size_t blocks_of(size_t n) { return (n + kBlock - 1) / kBlock; }
size_t block_length(size_t n, size_t block) { return block + 1 < blocks_of(n) ? kBlock : n - block * kBlock; }

// Returns the number of consecutive work items per task, large enough to be worth a thread.
constexpr size_t kTaskElements = size_t{1} << 11;

// Calls body(first, last) over [0, items), in tasks of about kTaskElements elements each.
template <class Body>
void for_ranges(size_t items, size_t elements_per_item, bool parallel, Body&& body) {
    if (!parallel) return body(size_t{0}, items);
    size_t per_task = elements_per_item < kTaskElements ? kTaskElements / (elements_per_item + 1) + 1 : 1;
    parallel_for((items + per_task - 1) / per_task, [&](size_t task) noexcept {
        size_t first = task * per_task;
        body(first, first + per_task < items ? first + per_task : items);
    });
}

// Returns Σ block_sum(start, length) over n elements.
template <class T, class BlockSum>
double sum_in_blocks(size_t n, BlockSum&& block_sum) {
    const bool parallel = n >= kParallelElements<T>;
    const size_t blocks = blocks_of(n);
    std::unique_ptr<double[]> partial(new double[blocks]);
    for_ranges(blocks, kBlock, parallel, [&](size_t first, size_t last) {
        for (size_t b = first; b < last; ++b) partial[b] = block_sum(b * kBlock, block_length(n, b));
    });
    CompensatedSum total;
    for (size_t b = 0; b < blocks; ++b) total.add(partial[b]);
    return total.value();
}

}  // namespace

template <class T, class Out>
void kl_rows(KlEstimator estimator, const T* log_p, const T* log_q, const uint8_t* mask, size_t rows, size_t cols, Out* out) {
    const KlBlock<T> block_sum = kernels().of<T>().kl(estimator);
    auto sum_blocks = [&](size_t offset, size_t n) { return block_sum(log_p + offset, log_q + offset, mask ? mask + offset : nullptr, n); };

    if (cols >= kParallelElements<T>) {  // few long rows: the threads share each row
        for (size_t row = 0; row < rows; ++row)
            out[row] = static_cast<Out>(sum_in_blocks<T>(cols, [&](size_t start, size_t n) { return sum_blocks(row * cols + start, n); }));
        return;
    }
    for_ranges(rows, cols, rows * cols >= kParallelElements<T>, [&](size_t first, size_t last) {
        for (size_t row = first; row < last; ++row) {
            CompensatedSum total;
            for (size_t b = 0; b < blocks_of(cols); ++b) total.add(sum_blocks(row * cols + b * kBlock, block_length(cols, b)));
            out[row] = static_cast<Out>(total.value());
        }
    });
}

template void kl_rows<float, float>(KlEstimator, const float*, const float*, const uint8_t*, size_t, size_t, float*);
template void kl_rows<float, double>(KlEstimator, const float*, const float*, const uint8_t*, size_t, size_t, double*);
template void kl_rows<double, double>(KlEstimator, const double*, const double*, const uint8_t*, size_t, size_t, double*);

namespace {

// Returns 1 / (std of all rewards + eps); 0 if all are equal; NaN if the sums leave the safe range.
template <class T>
double batch_scale(const T* rewards, size_t n, double ddof, double eps) {
    const TypedKernels<T>& k = kernels().of<T>();
    const double shift = rewards[0];
    const double mean = sum_in_blocks<T>(n, [&](size_t at, size_t length) { return k.reward_sum(rewards + at, length, shift); }) / n;
    const double squares =
        sum_in_blocks<T>(n, [&](size_t at, size_t length) { return k.reward_squares(rewards + at, length, shift, mean); });
    if (squares >= kSmallestSafeSquares && squares <= kLargestSafeSquares) return 1.0 / (std::sqrt(squares / (n - ddof)) + eps);
    for (size_t i = 0; i < n; ++i)
        if (rewards[i] != rewards[0]) return std::nan("");
    return std::isfinite(shift) ? 0.0 : std::nan("");
}

}  // namespace

template <class T>
bool group_advantages(const T* rewards, size_t groups, size_t group_size, AdvantageScale scale, double ddof, double eps, T* out) {
    const size_t n = groups * group_size;
    if (n == 0) return true;
    const double size = static_cast<double>(group_size);
    AdvantageRule rule{AdvantageDivisor::fixed, 1.0 / (size - ddof), eps, 1.0};
    if (scale == AdvantageScale::group) rule.divisor = AdvantageDivisor::std;
    if (scale == AdvantageScale::mean) rule.divisor = AdvantageDivisor::mean;
    if (scale == AdvantageScale::leave_one_out && group_size > 1) rule.scale = size / (size - 1.0);
    if (scale == AdvantageScale::batch) {
        rule.scale = batch_scale(rewards, n, ddof, eps);
        if (std::isnan(rule.scale)) return false;
    }
    const GroupAdvantages<T> kernel = kernels().of<T>().group_advantages;
    if (n < kParallelElements<T>) return kernel(rewards, groups, group_size, rule, out);
    std::atomic<bool> finished{true};
    for_ranges(groups, group_size, true, [&](size_t first, size_t last) {
        if (!kernel(rewards + first * group_size, last - first, group_size, rule, out + first * group_size)) finished = false;
    });
    return finished;
}

// A few passes over one number per sequence, which is too little work for threads.
template <class T>
bool weighted_advantages(const T* rewards, const int64_t* lengths, size_t n, double ddof, double eps, T* out) {
    size_t first = 0;
    while (first < n && lengths[first] == 0) ++first;
    const double shift = first < n ? rewards[first] : 0.0;  // equal rewards become exactly 0
    auto weighted = [&](auto&& term) {
        CompensatedSum total;
        for (size_t i = first; i < n; ++i)
            if (lengths[i]) total.add(static_cast<double>(lengths[i]) * term(rewards[i] - shift));
        return total.value();
    };
    const double count = weighted([](double) { return 1.0; });
    const double mean = count > 0.0 ? weighted([](double x) { return x; }) / count : 0.0;
    const double squares = weighted([mean](double x) { return (x - mean) * (x - mean); });
    const bool equal = weighted([](double x) { return x == 0.0 ? 0.0 : 1.0; }) == 0.0;
    if (!equal && !(squares >= kSmallestSafeSquares && squares <= kLargestSafeSquares && count > ddof)) return false;
    const double scale = equal ? 0.0 : 1.0 / (std::sqrt(squares / (count - ddof)) + eps);
    for (size_t i = 0; i < n; ++i) {
        if (!std::isfinite(rewards[i]) || lengths[i] < 0) return false;
        out[i] = lengths[i] ? static_cast<T>((rewards[i] - shift - mean) * scale) : T{0};
    }
    return true;
}

// Each gap between neighbours, sorted by reward, counts for all rewards above it.
template <class T>
bool pass_at_k_advantages(const T* rewards, size_t groups, size_t group_size, size_t k, T* out) {
    std::atomic<bool> finished{true};
    for_ranges(groups, group_size, groups * group_size >= kParallelElements<T>, [&](size_t first, size_t last) {
        std::unique_ptr<size_t[]> order(new (std::nothrow) size_t[group_size]);
        std::unique_ptr<double[]> share(new (std::nothrow) double[group_size]);  // C(m, k − 1) / C(G − 1, k − 1)
        if (!order || !share) finished = false;
        if (!finished) return;
        share[group_size - 1] = 1.0;
        for (size_t m = group_size - 1; m > 0; --m)
            share[m - 1] = m + 1 > k ? share[m] * static_cast<double>(m + 1 - k) / static_cast<double>(m) : 0.0;
        for (size_t g = first; g < last; ++g) {
            const T* of = rewards + g * group_size;
            for (size_t i = 0; i < group_size; ++i) {
                order[i] = i;
                if (!std::isfinite(of[i])) finished = false;
            }
            if (!finished) return;
            std::sort(order.get(), order.get() + group_size, [of](size_t a, size_t b) { return of[a] < of[b]; });
            double advantage = 0.0;
            for (size_t m = 0; m < group_size; ++m) {
                if (m) advantage += (static_cast<double>(of[order[m]]) - of[order[m - 1]]) * share[m];
                out[g * group_size + order[m]] = static_cast<T>(advantage);
            }
        }
    });
    return finished;
}

// Each step needs the result of the next token, so a row is a chain of multiply-adds; four rows at a time hide the latency.
template <class T>
void gae_rows(const T* rewards, const T* values, const uint8_t* mask, size_t rows, size_t cols, double gamma, double lambda, T* out) {
    constexpr size_t kRows = 4;
    const double decay = gamma * lambda;
    for_ranges((rows + kRows - 1) / kRows, kRows * cols, rows * cols >= kParallelElements<T>, [&](size_t first, size_t last) {
        for (size_t block = first; block < last; ++block) {
            const size_t start = block * kRows, count = start + kRows < rows ? kRows : rows - start;
            double value[kRows] = {}, advantage[kRows] = {};
            for (size_t t = cols; t-- > 0;) {
                for (size_t row = 0; row < count; ++row) {
                    const size_t at = (start + row) * cols + t;
                    const bool counts = !mask || mask[at];
                    const double found = (rewards[at] + gamma * value[row] - values[at]) + decay * advantage[row];
                    out[at] = counts ? static_cast<T>(found) : T{0};
                    advantage[row] = counts ? found : advantage[row];
                    value[row] = counts ? static_cast<double>(values[at]) : value[row];
                }
            }
        }
    });
}

template void gae_rows<float>(const float*, const float*, const uint8_t*, size_t, size_t, double, double, float*);
template void gae_rows<double>(const double*, const double*, const uint8_t*, size_t, size_t, double, double, double*);

template bool group_advantages<float>(const float*, size_t, size_t, AdvantageScale, double, double, float*);
template bool group_advantages<double>(const double*, size_t, size_t, AdvantageScale, double, double, double*);
template bool weighted_advantages<float>(const float*, const int64_t*, size_t, double, double, float*);
template bool weighted_advantages<double>(const double*, const int64_t*, size_t, double, double, double*);
template bool pass_at_k_advantages<float>(const float*, size_t, size_t, size_t, float*);
template bool pass_at_k_advantages<double>(const double*, size_t, size_t, size_t, double*);

}  // namespace strop
