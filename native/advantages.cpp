// Group-relative advantages; formulas and conventions in src/strop/primitives/advantages.py.
//
// The first reward of a group is subtracted from all of it. Equal rewards then have deviations, mean and advantages of exactly
// 0 whatever their size, and a large common offset costs no precision.
#include "kernels.h"
#include "simd.h"

namespace strop::STROP_ISA {
namespace {

// Σ(r − shift)
template <class T>
double reward_sum(const T* rewards, size_t n, double shift) {
    Wide total{};
    size_t i = 0;
    for (; i + kWide <= n; i += kWide) total += load_wide(rewards + i) - shift;
    if (i < n) total += lanes_below(n - i) ? load_wide_first(rewards + i, n - i) - shift : Wide{};
    return sum(total);
}

// Σ(r − shift − mean)²
template <class T>
double reward_squares(const T* rewards, size_t n, double shift, double mean) {
    Wide total{};
    size_t i = 0;
    for (; i + kWide <= n; i += kWide) {
        Wide deviation = (load_wide(rewards + i) - shift) - mean;
        total += deviation * deviation;
    }
    if (i < n) {
        Wide deviation = lanes_below(n - i) ? (load_wide_first(rewards + i, n - i) - shift) - mean : Wide{};
        total += deviation * deviation;
    }
    return sum(total);
}

// out = (r − shift − mean)·scale
template <class T>
inline void centre_and_scale(const T* rewards, size_t n, double shift, double mean, double scale, T* out) {
    size_t i = 0;
    for (; i + kWide <= n; i += kWide) store(out + i, ((load_wide(rewards + i) - shift) - mean) * scale);
    if (i < n) store_first(out + i, n - i, ((load_wide_first(rewards + i, n - i) - shift) - mean) * scale);
}

template <class T>
inline bool all_equal(const T* rewards, size_t n) {
    for (size_t i = 1; i < n; ++i)
        if (rewards[i] != rewards[0]) return false;
    return true;
}

// Returns the factor from deviations with this sum of squares to advantages; NaN outside the safe range.
template <class T>
inline double scale_of(double squares, const T* rewards, size_t group_size, const AdvantageRule& rule) {
    if (__builtin_expect(squares >= kSmallestSafeSquares && squares <= kLargestSafeSquares, 1))
        return 1.0 / (__builtin_sqrt(squares * rule.inverse_degrees) + rule.eps);
    return squares == 0.0 && all_equal(rewards, group_size) ? 0.0 : __builtin_nan("");
}

// Returns the factor from a group's deviations to advantages when dividing by its mean, which is 0 only if all rewards are 0;
// NaN if a reward is negative.
template <class T>
inline double scale_by_mean(double mean, const T* rewards, size_t group_size, double eps) {
    for (size_t i = 0; i < group_size; ++i)
        if (!(rewards[i] >= 0)) return __builtin_nan("");
    return mean > 0.0 ? 1.0 / (mean + eps) : 0.0;
}

// A group that fits into a vector stays in a register between its passes.
template <class T, bool full>
bool small_groups(const T* rewards, size_t groups, size_t group_size, const AdvantageRule& rule, T* out) {
    const double inverse_n = 1.0 / static_cast<double>(group_size);
    const BitsOf<double> present = lanes_below(group_size);
    for (size_t g = 0; g < groups; ++g, rewards += group_size, out += group_size) {
        const Wide loaded = full ? load_wide(rewards) : load_wide_first(rewards, group_size);
        Wide deviation = loaded - wide(rewards[0]);
        if constexpr (!full) deviation = present ? deviation : Wide{};
        const double mean = sum(deviation) * inverse_n;
        deviation -= wide(mean);
        if constexpr (!full) deviation = present ? deviation : Wide{};
        double scale = rule.scale;
        if (rule.divisor == AdvantageDivisor::std) scale = scale_of(sum(deviation * deviation), rewards, group_size, rule);
        if (rule.divisor == AdvantageDivisor::mean) scale = scale_by_mean(rewards[0] + mean, rewards, group_size, rule.eps);
        const Wide advantage = deviation * scale;
        if (!__builtin_isfinite(rule.divisor == AdvantageDivisor::std ? scale : scale + sum(deviation))) return false;
        if constexpr (full) store(out, advantage);
        else store_first(out, group_size, advantage);
    }
    return true;
}

template <class T>
bool large_groups(const T* rewards, size_t groups, size_t group_size, const AdvantageRule& rule, T* out) {
    const double inverse_n = 1.0 / static_cast<double>(group_size);
    for (size_t g = 0; g < groups; ++g, rewards += group_size, out += group_size) {
        const double shift = rewards[0];
        const double mean = reward_sum(rewards, group_size, shift) * inverse_n;
        double scale = rule.scale;
        if (rule.divisor == AdvantageDivisor::std)
            scale = scale_of(reward_squares(rewards, group_size, shift, mean), rewards, group_size, rule);
        if (rule.divisor == AdvantageDivisor::mean) scale = scale_by_mean(shift + mean, rewards, group_size, rule.eps);
        if (!__builtin_isfinite(rule.divisor == AdvantageDivisor::std ? scale : scale + mean)) return false;
        centre_and_scale(rewards, group_size, shift, mean, scale, out);
    }
    return true;
}

template <class T>
bool group_advantages(const T* rewards, size_t groups, size_t group_size, const AdvantageRule& rule, T* out) {
    if (group_size > kWide) return large_groups(rewards, groups, group_size, rule, out);
    return group_size == kWide ? small_groups<T, true>(rewards, groups, group_size, rule, out)
                               : small_groups<T, false>(rewards, groups, group_size, rule, out);
}

}  // namespace

extern const RewardSum<float> reward_sum_f32 = reward_sum<float>;
extern const RewardSum<double> reward_sum_f64 = reward_sum<double>;
extern const RewardSquares<float> reward_squares_f32 = reward_squares<float>;
extern const RewardSquares<double> reward_squares_f64 = reward_squares<double>;
extern const GroupAdvantages<float> group_advantages_f32 = group_advantages<float>;
extern const GroupAdvantages<double> group_advantages_f64 = group_advantages<double>;

}  // namespace strop::STROP_ISA
