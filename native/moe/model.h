// The data of one pass of the transformer: plain structs, shared by the code for every instruction set.
//
// Shapes, as in src/strop/moe/reference: B rows, N real tokens (padding is never here), D hidden, H query heads,
// K key/value heads, G = H/K, C channels of a head, P = C/2 pairs, E experts, J = top-k choices, F intermediate,
// V vocabulary, S capacity of a cache. A: assignments of tokens to experts, grouped by expert.
//
// Layouts. A token is a vector lane: activations are stored in panels of 64 tokens, x_DN[panel][d][token]. A product, a norm
// or a softmax then does the same operations for every token, whatever its neighbours are, so a token's bits do not depend on
// the batch. x_ND is stored token by token, each row padded to a multiple of kPad elements.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arena.h"

namespace strop::moe {

inline constexpr size_t kPanel = 64;  // tokens
inline constexpr size_t kPad = 16;    // elements: at least the longest vector

static inline size_t padded(size_t n) { return (n + kPad - 1) / kPad * kPad; }
static inline size_t panels_of(size_t tokens) { return (tokens + kPanel - 1) / kPanel; }
// Returns the row stride for arrays that products read by columns. It is not a power of two, because then all rows would fall
// into a few sets of the cache.
static inline size_t spread(size_t n) { return padded(n) % 128 == 0 ? padded(n) + kPad : padded(n); }
static inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

struct Config {
    size_t num_layers, D, H, K, C, E, J, F, V;
    double eps;
    bool tied;
};

// The weights, or their gradients, with the names of the reference; matrices are (out, in).
template <class T>
struct LayerWeights {
    T *norm1_D, *wq_OD, *wk_OD, *wv_OD, *wo_DO, *norm2_D, *router_ED, *gate_up_E2FD, *down_EDF;
};
template <class T>
struct Weights {
    T* embedding_VD;
    LayerWeights<T>* layers;
    T* norm_D;
    T* head_VD;  // the embedding if they are tied
};

// Transposed matrices, [panel of 64 outputs][input][output]: tokens are rows and outputs are lanes, so few tokens still use all
// lanes. Transposing pays off if the weights serve many passes; see generate.cpp.
template <class T>
struct Transposed {
    struct Layer {
        T *gate_up_E, *down_E;  // consecutive experts: the gate, then the up projection of each
    };
    Layer* layers;
    T* head;
};

// The tokens of a pass, row after row.
struct Tokens {
    size_t N, B;
    const int64_t* ids_N;
    const int32_t* rows_N;
    const int32_t* positions_N;  // position of each token in its row, counting cached tokens
    const int64_t* starts_B;     // B + 1: the tokens of row b are starts[b] to starts[b + 1]
    // Rows may share a prefix. A shared token is stored once, for all rows from its own up to ends_N[n]; row b has offsets_B[b]
    // tokens of earlier rows, then its own. Null if no row shares tokens.
    const int32_t* ends_N;
    const int32_t* offsets_B;

    size_t end(size_t n) const { return ends_N ? static_cast<size_t>(ends_N[n]) : static_cast<size_t>(rows_N[n]) + 1; }
    size_t offset(size_t b) const { return offsets_B ? static_cast<size_t>(offsets_B[b]) : 0; }
    size_t own(size_t b) const { return static_cast<size_t>(starts_B[b + 1] - starts_B[b]); }
    size_t length(size_t b) const { return offset(b) + own(b); }
};

// The cosines and sines of position·ω_p, one row of P per position.
template <class T>
struct RopeTable {
    const T *cos_SP, *sin_SP;
};

// The keys and values of one layer. In keys_BKCS positions are contiguous (lanes of a score), in values_BKSC channels are, with
// padding. S is a multiple of kPad.
template <class T>
struct KeysValues {
    T *keys, *values;
    size_t S;
};

// The assignments of tokens to experts. Each expert has its own panels, filled in token order; assignment a is column
// a % kPanel of panel a / kPanel.
struct Groups {
    size_t num_panels;
    int32_t* experts;         // expert of each panel
    int32_t* counts;          // tokens in each panel
    int32_t* tokens_A;
    int32_t* assignments_NJ;  // assignment of choice j of token n
    int32_t* first_panels_E;  // E + 1
};

// What a block saves in its forward.
template <class T>
struct BlockSaved {
    T *x_DN, *r1_N, *n1_DN;
    T *q_ON, *context_NO, *max_NH, *sum_NH;
    KeysValues<T> kv;
    T *m_DN, *r2_N, *n2_DN, *n2_ND;
    T *p_EN, *weights_NJ, *total_N;
    int32_t* experts_NJ;
    Groups groups;
    T *x_DA, *gate_up_2FA, *h_FA, *y_AD;
    T* gate_up_A2F;  // replaces gate_up_2FA if the weights are transposed: the gate, then up at padded(F); rows of spread(2·padded(F))
};

template <class T>
struct Pass {
    const Config* config;
    const Weights<T>* weights;
    Tokens tokens;
    RopeTable<T> rope;
    Arena* arena;
    bool saving;               // saves for a backward; otherwise the blocks share one set of buffers
    bool last_only;            // after the last block has written its keys and values, only the last token of each row continues
    KeysValues<T>* caches;     // one per layer, or null
    const Transposed<T>* transposed;  // or null
    T *cos_PN, *sin_PN;        // of the tokens' positions
    T *k_ON, *v_ON, *context_ON, *sum_ND, *sum_DN;  // used only inside a strip's task
    BlockSaved<T>* blocks;
    T *x_DN, *r_N, *h_DN;      // the residual stream after the last block; h = norm(x)
    double* shares_E;          // f_e of the auxiliary loss
    double aux_loss;
};

// The targets of the loss: token n counts if counts_N[n]. num_counted is at least 1.
struct Targets {
    const int64_t* targets_N;
    const uint8_t* counts_N;
    double num_counted;
};

// The wanted log-probs: of targets_M[m] after token from_M[m], under softmax(logits·inverse). M tokens count.
template <class T>
struct Scores {
    size_t M;
    const int32_t* from_M;
    const int64_t *targets_M, *places_M;  // places: their indices in the flattened batch with padding
    double inverse;                       // 1 / temperature
    double *logit_M, *max_M, *total_M;    // the target's logit; max z; Σ exp(s),  s = (z − max)·inverse
    double *weighted_M;                   // Σ s·exp(s)
    double *log_total_M, *entropy_M;      // log Σ exp(s); −Σ p·log p
    T *h_MD, *logits_MV;                  // rows of padded(D) and spread(V); logits only if saving
};

struct AdamW {
    double lr, beta1, beta2, eps, grad_scale;
    double correction1, correction2;  // 1 − β₁ᵗ, √(1 − β₂ᵗ)
};

// One parameter array with its gradient and moments.
template <class T>
struct Updated {
    size_t count;
    T* param;
    const T* grad;
    T *m, *v;
    double weight_decay;
    size_t first_task;  // set by adamw
};

// The sampling options, as in src/strop/moe/sampling.py: temperature 0 is greedy, top_k 0 and top_p 1 keep all tokens.
struct Sampling {
    double temperature;
    int64_t top_k;
    double top_p;
};
inline constexpr size_t kDrawBlock = 64;  // probabilities per partial sum; a draw first finds its block by these sums

// One product C = A·B, for benchmarks: A with any strides, rows of B and C contiguous.
template <class T>
struct Multiplication {
    size_t M, N, K;
    const T* a;
    size_t a_row, a_col;
    const T* b;
    T* c;
};

// The engine as compiled for one instruction set; see model.cpp.
template <class T>
struct Kernels {
    Transposed<T> (*transpose)(const Config& config, const Weights<T>& weights, Arena& arena);
    // Computes h_DN of every token, and the auxiliary loss if saving.
    void (*hidden_states)(Pass<T>& pass);
    // Writes the logits of token n to row rows[n] of `out` (V elements each).
    void (*head)(Pass<T>& pass, const int64_t* rows_N, T* out);
    // Computes gradients from dL/dlogits, in the layout that `head` writes; or from the mean cross-entropy, which it returns.
    void (*backward)(Pass<T>& pass, const int64_t* rows_N, const T* dlogits, double daux, const Weights<T>& grads);
    double (*loss_and_grads)(Pass<T>& pass, const Targets& targets, double daux, const Weights<T>& grads);

    // Computes logit, max, total and weighted of every m; and all parameters' gradients from dL/dlogp and dL/dentropy, which
    // overwrites the logits.
    void (*score)(Pass<T>& pass, Scores<T>& scores);
    void (*score_bwd)(Pass<T>& pass, const Scores<T>& scores, const double* dlogps_M, const double* dentropy_M, const Weights<T>& grads);

    double (*softmax_row)(const T* logits_V, size_t V, double inverse_temperature, double* p_V, double* sums);
    size_t (*greedy_row)(const T* logits_V, size_t V, double* sum);
    void (*adamw)(Updated<T>* arrays, size_t count, const AdamW& step);

    // Single parts, for benchmarks: a list of products in one parallel region, and the norm on panels.
    void (*multiply_all)(const Multiplication<T>* list, size_t count, Arena& arena);
    void (*rms_norm)(size_t D, double eps, size_t N, const T* x_DN, const T* w_D, T* y_DN, T* r_N);
};

}  // namespace strop::moe
