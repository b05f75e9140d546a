// The kernels that exist once per instruction set, and the table through which the rest of the module calls them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace strop {

namespace moe {
template <class T>
struct Kernels;  // moe/model.h
}

enum class KlEstimator { token, schulman };

// Returns Σ over n tokens; mask may be null. Sums are in double for either T.
template <class T>
using KlBlock = double (*)(const T* log_p, const T* log_q, const uint8_t* mask, size_t n);

// Return the sums of one block of rewards: Σ(r − shift), and Σ(r − shift − mean)².
template <class T>
using RewardSum = double (*)(const T* rewards, size_t n, double shift);
template <class T>
using RewardSquares = double (*)(const T* rewards, size_t n, double shift, double mean);

// How centred rewards become advantages: multiplied by a fixed scale; or divided by their group's std + eps, with
// std = sqrt(squares · inverse_degrees); or divided by their group's mean + eps.
enum class AdvantageDivisor { fixed, std, mean };
struct AdvantageRule {
    AdvantageDivisor divisor;
    double inverse_degrees;
    double eps;
    double scale;
};

// Returns false, with `out` incomplete, if a group's rewards are not finite or outside the range in which squares are exact, or
// if a negative reward would be divided by a mean.
template <class T>
using GroupAdvantages = bool (*)(const T* rewards, size_t groups, size_t group_size, const AdvantageRule& rule, T* out);

template <class T>
struct TypedKernels {
    KlBlock<T> token_kl, schulman_kl;
    RewardSum<T> reward_sum;
    RewardSquares<T> reward_squares;
    GroupAdvantages<T> group_advantages;
    const moe::Kernels<T>* moe;

    KlBlock<T> kl(KlEstimator estimator) const {
        return estimator == KlEstimator::token ? token_kl : schulman_kl;
    }
};

struct Kernels {
    const char* isa;
    TypedKernels<float> f32;
    TypedKernels<double> f64;

    template <class T>
    const TypedKernels<T>& of() const {
        if constexpr (sizeof(T) == sizeof(float)) return f32;
        else return f64;
    }
};

// Squares of deviations in this range neither overflow nor lose precision; outside it the caller rescales.
inline constexpr double kSmallestSafeSquares = 1e-280;
inline constexpr double kLargestSafeSquares = 1e280;

}  // namespace strop
