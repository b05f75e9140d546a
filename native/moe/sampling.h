#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "model.h"

namespace strop::moe {

// Returns 1/t, limited to a finite number for very small t.
inline double inverse_of(double temperature) { return std::min(1.0 / temperature, std::numeric_limits<double>::max()); }

// Returns log softmax(z/t) of the token with this logit; total = Σ exp((z − max)/t). Sampling and scoring share this function,
// so a drawn token gets the same log-prob again, bit for bit.
inline double log_prob(double logit, double max, double inverse, double total) { return (logit - max) * inverse - std::log(total); }

// Draws one token per row and writes its log-prob under the distribution it was drawn from; greedy: under softmax(logits).
template <class T>
void sample(Arena& arena, const T* logits_BV, const double* uniforms_B, size_t B, size_t V, const Sampling& rule, int64_t* tokens_B,
            double* logps_B);

}  // namespace strop::moe
