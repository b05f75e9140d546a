#pragma once

#include "model.h"

namespace strop::moe {

// One token a row, and its log-prob under the distribution it was drawn from (under softmax(logits) where greedy).
template <class T>
void sample(Arena& arena, const T* logits_BV, const double* uniforms_B, size_t B, size_t V, const Sampling& rule, int64_t* tokens_B,
            double* logps_B);

}  // namespace strop::moe
