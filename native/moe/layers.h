// The layers, forward and backward, in the order of src/strop/moe/reference. A backward returns gradients by writing them;
// only where it says so does it add.
#pragma once

#include "../gemm.h"
#include "layout.h"

namespace strop::STROP_ISA {

// ---- embedding.cpp -----------------------------------------------------------------------------------------------------

template <class T>
void embedding(const Config& c, const T* w_VD, const Tokens& tokens, const Strip& strip, T* x_DN);
// Adds into dw_VD where `add`, otherwise writes all of it.
template <class T>
void embedding_bwd(const Config& c, const Tokens& tokens, const T* dx_DN, bool add, Arena& arena, T* dw_VD);

// ---- rms_norm.cpp ------------------------------------------------------------------------------------------------------

template <class T>
void rms_norm(size_t D, double eps, const Strip& strip, const T* x_DN, const T* w_D, T* y_DN, T* r_N);
// dx_DN = residual_DN + the norm's dL/dx; the two may be the same array.
template <class T>
void rms_norm_bwd(size_t D, size_t N, const T* dy_DN, const T* x_DN, const T* r_N, const T* w_D, const T* residual_DN,
                  Arena& arena, T* dx_DN, T* dw_D);

// ---- linear.h has the products -----------------------------------------------------------------------------------------

// ---- rope.cpp ----------------------------------------------------------------------------------------------------------

template <class T>
void rope_angles(const RopeTable<T>& table, size_t P, const Tokens& tokens, const Strip& strip, T* cos_PN, T* sin_PN);
// In place on one strip of `heads` heads; backwards turns by −φ, which is the transpose of the rotation.
template <class T>
void rope(size_t heads, size_t C, size_t tokens, const T* cos_PN, const T* sin_PN, bool backwards, T* x_ON);

// ---- attention.cpp, attention_bwd.cpp ----------------------------------------------------------------------------------

// q of a strip, and its keys and values in their places, from saved.n1_DN.
template <class T>
void queries_keys_values(Pass<T>& pass, const LayerWeights<T>& w, const Strip& strip, BlockSaved<T>& saved);
// m = x + attention(n1) of a strip. The keys and values of all tokens before it are in their places.
template <class T>
void attention(Pass<T>& pass, const LayerWeights<T>& w, const Strip& strip, BlockSaved<T>& saved);
// dn1_DN from dm_DN.
template <class T>
void attention_bwd(Pass<T>& pass, const LayerWeights<T>& w, const BlockSaved<T>& saved, const T* dm_DN, T* dn1_DN,
                   const LayerWeights<T>& grads);

// ---- router.cpp --------------------------------------------------------------------------------------------------------

// Of one strip: p, the J choices and their weights.
template <class T>
void route(const Config& c, const T* router_ED, const Strip& strip, BlockSaved<T>& saved);
// dlogits_EN of one strip from dweights_NJ and what the auxiliary loss sends to every p.
template <class T>
void route_bwd(const Config& c, const Strip& strip, const BlockSaved<T>& saved, const T* dweights_NJ, const T* dp_aux_E,
               T* dlogits_EN);
// Groups assignments by expert, in the order of the tokens.
void group_by_expert(const Config& c, size_t N, const int32_t* experts_NJ, Groups& groups);

// ---- experts.cpp -------------------------------------------------------------------------------------------------------

// y_AD of every assignment from n2_ND.
template <class T>
void experts(Pass<T>& pass, const LayerWeights<T>& w, BlockSaved<T>& saved);
template <class T>
void experts_by_rows(Pass<T>& pass, const typename Transposed<T>::Layer& w, BlockSaved<T>& saved);
// dx_AD, what each assignment sends to its token, from dy_ND.
template <class T>
void experts_bwd(Pass<T>& pass, const LayerWeights<T>& w, const BlockSaved<T>& saved, const T* dy_ND, T* dx_AD, const LayerWeights<T>& grads);

// ---- moe.cpp -----------------------------------------------------------------------------------------------------------

// p, choices and weights of a strip, and its n2_ND, from n2_DN.
template <class T>
void choose_experts(Pass<T>& pass, const LayerWeights<T>& w, const Strip& strip, BlockSaved<T>& saved);
// What each expert makes of the tokens that chose it: y_AD.
template <class T>
void run_experts(Pass<T>& pass, const LayerWeights<T>& w, BlockSaved<T>& saved);
// y = m + moe(n2) of a strip, when the experts are done.
template <class T>
void add_experts(Pass<T>& pass, const BlockSaved<T>& saved, const Strip& strip, T* y_DN);
// dn2_DN from dy_DN.
template <class T>
void moe_layer_bwd(Pass<T>& pass, const LayerWeights<T>& w, const BlockSaved<T>& saved, const T* dy_DN, const T* dp_aux_E,
                   T* dn2_DN, const LayerWeights<T>& grads);

// ---- transposed.cpp ----------------------------------------------------------------------------------------------------

// `count` matrices (O, D), one after the other, in panels of kPanel outputs.
template <class T>
T* take_transposed(const T* w_OD, size_t count, size_t O, size_t D, Arena& arena);
template <class T>
Transposed<T> transpose(const Config& c, const Weights<T>& weights, Arena& arena);

// ---- block.cpp ---------------------------------------------------------------------------------------------------------

// Memory for all that a block keeps, except its input and its keys and values.
template <class T>
void take_block(Pass<T>& pass, BlockSaved<T>& saved);
// All of a block but the last sum, which the next to come takes for its strips: add_experts. `before` is the block
// before this one, whose sum is taken here; null at the first, which takes the embedding. With `narrow` only the last token of
// each row goes on after the keys.
template <class T>
void block(Pass<T>& pass, const LayerWeights<T>& w, const BlockSaved<T>* before, bool narrow, BlockSaved<T>& saved);
// dy_DN becomes dx_DN.
template <class T>
void block_bwd(Pass<T>& pass, const LayerWeights<T>& w, const BlockSaved<T>& saved, const T* dp_aux_E, T* dy_DN,
               const LayerWeights<T>& grads);

// ---- cross_entropy.cpp -------------------------------------------------------------------------------------------------

// The loss; logits_VN become dL/dlogits.
template <class T>
double cross_entropy(size_t V, size_t N, const Targets& targets, Arena& arena, T* logits_VN);

// ---- scores.cpp --------------------------------------------------------------------------------------------------------

template <class T>
void score(Pass<T>& pass, Scores<T>& scores);
// dL/dlogits in place of scores.logits_MV; dh_DN of every token of the pass and the head's gradient.
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
