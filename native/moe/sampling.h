#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "model.h"

namespace strop::moe {

// 1/t, finite however cold.
inline double inverse_of(double temperature) { return std::min(1.0 / temperature, std::numeric_limits<double>::max()); }

// Of a token with this logit: log softmax(z/t),  total = Σ exp((z − max)/t). One function for sampling and scoring, so that what was
// drawn has the same log-prob again, bit for bit.
inline double log_prob(double logit, double max, double inverse, double total) { return (logit - max) * inverse - std::log(total); }

// One token a row, and its log-prob under the distribution it was drawn from (under softmax(logits) where greedy).
template <class T>
void sample(Arena& arena, const T* logits_BV, const double* uniforms_B, size_t B, size_t V, const Sampling& rule, int64_t* tokens_B,
            double* logps_B);

}  // namespace strop::moe
