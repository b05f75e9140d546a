// Linear map without bias, weights stored (out, in): y = x·Wᵀ, as products on panels.
#pragma once

#include "../gemm.h"
#include "layout.h"

namespace strop::STROP_ISA {

// The number of rows of a panel that stay in the second-level cache while the weights are read.
inline constexpr size_t kPanelRows = 512;
inline constexpr size_t kLinearRows = 128;  // the same for transposed weights in the first-level cache, for all rows of a task

// Computes y_ON = W·x_DN on one panel.
template <class T>
static inline Product<T> linear(const T* w_OD, size_t O, size_t D, const T* x_DN, size_t tokens, T* y_ON) {
    Product<T> p{O, columns_of<T>(tokens), D, w_OD, D, 1, x_DN, kPanel, y_ON, kPanel};
    p.k_block = kPanelRows;
    p.a_step = kPanelRows;
    p.b_step = kPanelRows * kPanel;
    return p;
}

// The same with transposed weights, for one of their panels: y_NO = x_ND·Wᵀ, `outputs` columns. Each element is summed in the
// same order.
template <class T>
static inline Product<T> linear_by_rows(const T* x_ND, size_t x_row, size_t D, const T* panel_DO, size_t outputs, size_t tokens, T* y_NO,
                                        size_t y_row) {
    Product<T> p{tokens, outputs, D, x_ND, x_row, 1, panel_DO, kPanel, y_NO, y_row};
    p.k_block = kLinearRows;
    p.a_step = kLinearRows;
    p.b_step = kLinearRows * kPanel;
    return p;
}

// Computes dL/dx = Wᵀ·dy on one panel, with tokens as lanes.
template <class T>
static inline Product<T> linear_bwd_input(const T* w_OD, size_t O, size_t D, const T* dy_ON, size_t tokens, T* dx_DN) {
    Product<T> p{D, columns_of<T>(tokens), O, w_OD, 1, D, dy_ON, kPanel, dx_DN, kPanel};
    p.k_block = kPanelRows;
    p.a_step = kPanelRows * D;
    p.b_step = kPanelRows * kPanel;
    return p;
}

// Computes dL/dW = Σ_n dy_n·x_nᵀ over all tokens in order; dy is in panels, x token by token.
template <class T>
static inline Product<T> linear_bwd_weight(const T* dy_ON, size_t O, const T* x_ND, size_t D, size_t tokens, T* dw_OD) {
    Product<T> p{O, D, tokens, dy_ON, kPanel, 1, x_ND, padded(D), dw_OD, D};
    p.k_block = kPanel;
    p.a_step = O * kPanel;
    p.b_step = kPanel * padded(D);
    return p;
}

// Computes dL/dx = dy·W for tokens as rows, with features as lanes, so no lane is idle however few tokens there are.
template <class T>
static inline Product<T> linear_bwd_input_rows(const T* dy_NO, size_t dy_row, size_t O, const T* w_OD, size_t D, size_t tokens, T* dx_ND,
                                               size_t dx_row) {
    Product<T> p{tokens, D, O, dy_NO, dy_row, 1, w_OD, D, dx_ND, dx_row};
    p.k_block = kLinearRows;
    p.a_step = kLinearRows;
    p.b_step = kLinearRows * D;
    return p;
}

// Computes dL/dW with dy and x both token by token.
template <class T>
static inline Product<T> linear_bwd_weight_rows(const T* dy_NO, size_t dy_row, size_t O, const T* x_ND, size_t x_row, size_t D, size_t tokens,
                                                T* dw_OD, size_t dw_row) {
    constexpr size_t kTokens = 96;
    Product<T> p{O, D, tokens, dy_NO, 1, dy_row, x_ND, x_row, dw_OD, dw_row};
    p.k_block = kTokens;
    p.a_step = kTokens * dy_row;
    p.b_step = kTokens * x_row;
    return p;
}

}  // namespace strop::STROP_ISA
