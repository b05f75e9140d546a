// The layers, forward and backward, in the order of src/strop/moe/reference. A backward overwrites the gradient arrays,
// unless its comment says that it adds to them.
#pragma once

#include "../gemm.h"
#include "layout.h"

namespace strop::STROP_ISA {

// ---- embedding.cpp -----------------------------------------------------------------------------------------------------

template <class T>
void embedding(const Config& c, const T* w_VD, const Tokens& tokens, const Strip& strip, T* x_DN);
// Adds to dw_VD if `add`, else overwrites all of it.
template <class T>
void embedding_bwd(const Config& c, const Tokens& tokens, const T* dx_DN, bool add, Arena& arena, T* dw_VD);

// ---- rms_norm.cpp ------------------------------------------------------------------------------------------------------

template <class T>
void rms_norm(size_t D, double eps, const Strip& strip, const T* x_DN, const T* w_D, T* y_DN, T* r_N);
// Sets dx_DN = residual_DN + the norm's dL/dx; both may be the same array.
template <class T>
void rms_norm_bwd(size_t D, size_t N, const T* dy_DN, const T* x_DN, const T* r_N, const T* w_D, const T* residual_DN,
                  Arena& arena, T* dx_DN, T* dw_D);

// ---- linear.h has the products -----------------------------------------------------------------------------------------

// ---- rope.cpp ----------------------------------------------------------------------------------------------------------

template <class T>
void rope_angles(const RopeTable<T>& table, size_t P, const Tokens& tokens, const Strip& strip, T* cos_PN, T* sin_PN);
// Rotates `heads` heads of one strip in place; the backward rotates by −φ, the transpose of the rotation.
template <class T>
void rope(size_t heads, size_t C, size_t tokens, const T* cos_PN, const T* sin_PN, bool backwards, T* x_ON);

// ---- attention.cpp, attention_bwd.cpp ----------------------------------------------------------------------------------

// Computes a strip's queries from saved.n1_DN, and writes its keys and values to the arrays of the row.
template <class T>
void queries_keys_values(Pass<T>& pass, const LayerWeights<T>& w, const Strip& strip, BlockSaved<T>& saved);
// Computes m = x + attention(n1) of a strip. The keys and values of all earlier tokens must be written already.
template <class T>
void attention(Pass<T>& pass, const LayerWeights<T>& w, const Strip& strip, BlockSaved<T>& saved);
// Computes dn1_DN from dm_DN.
template <class T>
void attention_bwd(Pass<T>& pass, const LayerWeights<T>& w, const BlockSaved<T>& saved, const T* dm_DN, T* dn1_DN,
                   const LayerWeights<T>& grads);

// ---- router.cpp --------------------------------------------------------------------------------------------------------

// Computes p, the J choices and their weights for one strip.
template <class T>
void route(const Config& c, const T* router_ED, const Strip& strip, BlockSaved<T>& saved);
// Computes dlogits_EN of one strip from dweights_NJ and the auxiliary loss's gradient of p.
template <class T>
void route_bwd(const Config& c, const Strip& strip, const BlockSaved<T>& saved, const T* dweights_NJ, const T* dp_aux_E,
               T* dlogits_EN);
// Groups the assignments by expert, in token order.
void group_by_expert(const Config& c, size_t N, const int32_t* experts_NJ, Groups& groups);

// ---- experts.cpp -------------------------------------------------------------------------------------------------------

// Computes y_AD of every assignment from n2_ND.
template <class T>
void experts(Pass<T>& pass, const LayerWeights<T>& w, BlockSaved<T>& saved);
template <class T>
void experts_by_rows(Pass<T>& pass, const typename Transposed<T>::Layer& w, BlockSaved<T>& saved);
// Computes dx_AD, each assignment's gradient for its token, from dy_ND.
template <class T>
void experts_bwd(Pass<T>& pass, const LayerWeights<T>& w, const BlockSaved<T>& saved, const T* dy_ND, T* dx_AD, const LayerWeights<T>& grads);

// ---- moe.cpp -----------------------------------------------------------------------------------------------------------

// Computes p, choices and weights of a strip, and its n2_ND, from n2_DN.
template <class T>
void choose_experts(Pass<T>& pass, const LayerWeights<T>& w, const Strip& strip, BlockSaved<T>& saved);
// Computes y_AD: each expert's outputs for the tokens that chose it.
template <class T>
void run_experts(Pass<T>& pass, const LayerWeights<T>& w, BlockSaved<T>& saved);
// Computes y = m + moe(n2) of a strip, after all experts have run.
template <class T>
void add_experts(Pass<T>& pass, const BlockSaved<T>& saved, const Strip& strip, T* y_DN);
// Computes dn2_DN from dy_DN.
template <class T>
void moe_layer_bwd(Pass<T>& pass, const LayerWeights<T>& w, const BlockSaved<T>& saved, const T* dy_DN, const T* dp_aux_E,
                   T* dn2_DN, const LayerWeights<T>& grads);

// ---- transposed.cpp ----------------------------------------------------------------------------------------------------

// Transposes `count` consecutive matrices (O, D) into panels of kPanel outputs.
template <class T>
T* take_transposed(const T* w_OD, size_t count, size_t O, size_t D, Arena& arena);
template <class T>
Transposed<T> transpose(const Config& c, const Weights<T>& weights, Arena& arena);

// ---- block.cpp ---------------------------------------------------------------------------------------------------------

// Allocates everything a block keeps, except its input and its keys and values.
template <class T>
void take_block(Pass<T>& pass, BlockSaved<T>& saved);
// Runs a block except its last sum, add_experts, which the next block does for its own strips. `before` is the previous block,
// whose sum is done here; it is null for the first block, which reads the embedding. With `narrow` only the last token of each
// row continues after the keys and values are written.
template <class T>
void block(Pass<T>& pass, const LayerWeights<T>& w, const BlockSaved<T>* before, bool narrow, BlockSaved<T>& saved);
// Replaces dy_DN by dx_DN.
template <class T>
void block_bwd(Pass<T>& pass, const LayerWeights<T>& w, const BlockSaved<T>& saved, const T* dp_aux_E, T* dy_DN,
               const LayerWeights<T>& grads);

// ---- cross_entropy.cpp -------------------------------------------------------------------------------------------------

// Returns the loss and replaces logits_VN by dL/dlogits.
template <class T>
double cross_entropy(size_t V, size_t N, const Targets& targets, Arena& arena, T* logits_VN);

// ---- scores.cpp --------------------------------------------------------------------------------------------------------

template <class T>
void score(Pass<T>& pass, Scores<T>& scores);
// Replaces scores.logits_MV by dL/dlogits; computes dh_DN of every token of the pass, and the head's gradient.
template <class T>
void scored_head_bwd(Pass<T>& pass, const Scores<T>& scores, const double* dlogps_M, const double* dentropy_M, T* dh_DN, T* dhead_VD);

// ---- softmax.cpp -------------------------------------------------------------------------------------------------------

template <class T>
double softmax_row(const T* logits_V, size_t V, double inverse_temperature, double* p_V, double* sums);
template <class T>
size_t greedy_row(const T* logits_V, size_t V, double* sum);

// ---- adamw.cpp ---------------------------------------------------------------------------------------------------------

template <class T>
void adamw(Updated<T>* arrays, size_t count, const AdamW& step);

}  // namespace strop::STROP_ISA
