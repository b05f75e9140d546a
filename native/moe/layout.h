// Conversion between panels, where tokens are lanes, and rows of tokens. This file moves data and computes nothing.
#pragma once

#include "../simd.h"
#include "../threads.h"
#include "model.h"

namespace strop::STROP_ISA {

using namespace strop::moe;

template <size_t... i>
struct Indices {};
template <size_t n, size_t... i>
struct MakeIndices : MakeIndices<n - 1, n - 1, i...> {};
template <size_t... i>
struct MakeIndices<0, i...> {
    using type = Indices<i...>;
};

// One step of a transpose: swaps the off-diagonal blocks of two rows that are `width` apart.
template <class T, size_t width, bool second, size_t... j>
static inline VecOf<T> swapped(VecOf<T> a, VecOf<T> b, Indices<j...>) {
    constexpr size_t lanes = Lanes<T>::count;
    if constexpr (second) return __builtin_shufflevector(a, b, (j & width ? lanes + j : j + width)...);
    else return __builtin_shufflevector(a, b, (j & width ? lanes + j - width : j)...);
}

template <class T, size_t width = Lanes<T>::count / 2>
static inline void transpose_block(VecOf<T> (&v)[Lanes<T>::count]) {
    using All = typename MakeIndices<Lanes<T>::count>::type;
#pragma GCC unroll 16
    for (size_t i = 0; i < Lanes<T>::count; ++i) {
        if (i & width) continue;
        const VecOf<T> a = v[i], b = v[i + width];
        v[i] = swapped<T, width, false>(a, b, All{});
        v[i + width] = swapped<T, width, true>(a, b, All{});
    }
    if constexpr (width > 1) transpose_block<T, width / 2>(v);
}

// Sets to[d·stride + i] = row(i)[d] for i < count. Lanes after the last token, up to a whole vector, become 0.
template <class T, class Row>
static inline void to_lanes(size_t features, size_t count, Row&& row, T* to, size_t stride = kPanel) {
    constexpr size_t lanes = Lanes<T>::count;
    for (size_t i0 = 0; i0 < count; i0 += lanes)
        for (size_t d0 = 0; d0 < features; d0 += lanes) {
            const size_t n = smaller(count - i0, lanes), d = smaller(features - d0, lanes);
            VecOf<T> v[lanes];
#pragma GCC unroll 16
            for (size_t i = 0; i < lanes; ++i) {
                if (i >= n) v[i] = VecOf<T>{};
                else v[i] = d == lanes ? load(row(i0 + i) + d0) : load_first(row(i0 + i) + d0, d);
            }
            transpose_block<T>(v);
#pragma GCC unroll 16
            for (size_t i = 0; i < lanes; ++i)
                if (i < d) store(to + (d0 + i) * stride + i0, v[i]);
        }
}

// Sets row(i)[d] = from[d·stride + i] for i < count.
template <class T, class Row>
static inline void to_rows(size_t features, size_t count, const T* from, Row&& row, size_t stride = kPanel) {
    constexpr size_t lanes = Lanes<T>::count;
    for (size_t i0 = 0; i0 < count; i0 += lanes)
        for (size_t d0 = 0; d0 < features; d0 += lanes) {
            const size_t n = smaller(count - i0, lanes), d = smaller(features - d0, lanes);
            VecOf<T> v[lanes];
#pragma GCC unroll 16
            for (size_t i = 0; i < lanes; ++i) v[i] = i < d ? load(from + (d0 + i) * stride + i0) : VecOf<T>{};
            transpose_block<T>(v);
#pragma GCC unroll 16
            for (size_t i = 0; i < lanes; ++i) {
                if (i >= n) continue;
                if (d == lanes) store(row(i0 + i) + d0, v[i]);
                else store_first(row(i0 + i) + d0, d, v[i]);
            }
        }
}

static inline size_t tokens_in_panel(size_t N, size_t panel) { return smaller(N - panel * kPanel, kPanel); }

// The tokens of one task: a multiple of every vector width, all in one panel.
struct Strip {
    static constexpr size_t size = 16;
    size_t panel, column;  // where it starts in its panel
    size_t first, tokens;
};
static inline size_t strips_of(size_t N, size_t size = Strip::size) { return (N + size - 1) / size; }
static inline Strip strip_at(size_t N, size_t index, size_t size = Strip::size) {
    const size_t first = index * size;
    return {first / kPanel, first % kPanel, first, smaller(N - first, size)};
}

// Returns the number of tokens per task for tasks with matrix products. More tokens per task reuse the weights better, but
// every thread needs at least one task. No result depends on this number.
static inline size_t tokens_per_task(size_t N) {
    const size_t threads = static_cast<size_t>(num_threads());
    return N >= 2 * kPanel * threads ? kPanel : N >= kPanel / 2 * threads ? kPanel / 2 : Strip::size;
}

// Calls body(strip) for all tokens, in one parallel region.
template <class Body>
static void for_strips(size_t N, size_t size, Body&& body) {
    parallel_for(strips_of(N, size), [&](size_t task) noexcept { body(strip_at(N, task, size)); });
}

template <class T>
static inline T* strip_of(T* x, size_t features, const Strip& strip) {
    return x + strip.panel * features * kPanel + strip.column;
}

// Returns the number of columns of a panel to compute, rounded up to whole vectors.
template <class T>
static inline size_t columns_of(size_t tokens) {
    constexpr size_t lanes = Lanes<T>::count;
    return (tokens + lanes - 1) / lanes * lanes;
}

template <class T>
static inline T* panel_of(T* x, size_t features, size_t panel) {
    return x + panel * features * kPanel;
}

template <class T>
static inline T* take_panels(Arena& arena, size_t features, size_t num_panels) {
    return take<T>(arena, features * num_panels * kPanel);
}

}  // namespace strop::STROP_ISA
