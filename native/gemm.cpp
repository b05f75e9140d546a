// Register-blocked tiles. A full tile and an edge tile differ in their number of sums, not in how a sum is computed.
#include "gemm.h"

namespace strop::STROP_ISA {
namespace {

// A tile of MR rows and NR vectors keeps MR·NR sums in registers: at least 8, because two multiply-adders of latency 4 need
// that many, and at most as many as leave room for NR vectors of B and one value of A.
#if defined(STROP_AVX512)
constexpr int kMaxVectors = 4;
constexpr int rows_of_tile(int vectors) { return vectors == 4 ? 6 : 8; }
#else
constexpr int kMaxVectors = 2;
constexpr int rows_of_tile(int vectors) { return vectors == 2 ? 6 : 8; }
#endif

// Only `tail` columns of the last vector exist; the others are neither read nor written.
template <class T, int MR, int NR, bool whole>
void tile(const Product<T>& p, size_t K, const T* a, const T* b, T* c, const T* plus, size_t tail, bool from_c) {
    constexpr size_t lanes = Lanes<T>::count;
    VecOf<T> sum[MR][NR];
    const auto read = [tail](const T* from, int j) {
        return !whole && j == NR - 1 ? load_first(from + j * lanes, tail) : load(from + j * lanes);
    };
    if (from_c) {
#pragma GCC unroll 8
        for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
            for (int j = 0; j < NR; ++j) sum[i][j] = read(c + i * p.c_row, j);
    } else {
#pragma GCC unroll 8
        for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
            for (int j = 0; j < NR; ++j) sum[i][j] = VecOf<T>{};
    }
    const size_t a_row = p.a_row, a_col = p.a_col, b_row = p.b_row;
    for (size_t k = 0; k < K; ++k, a += a_col, b += b_row) {
        VecOf<T> b_k[NR];
#pragma GCC unroll 8
        for (int j = 0; j < NR; ++j) b_k[j] = read(b, j);
#pragma GCC unroll 8
        for (int i = 0; i < MR; ++i) {
            const VecOf<T> a_ik = broadcast<T>(a[i * a_row]);
#pragma GCC unroll 8
            for (int j = 0; j < NR; ++j) sum[i][j] = multiply_add(a_ik, b_k[j], sum[i][j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < NR; ++j) {
            if (plus) sum[i][j] += read(plus + i * p.c_row, j);
            T* to = c + i * p.c_row + j * lanes;
            if (!whole && j == NR - 1) store_first(to, tail, sum[i][j]);
            else store(to, sum[i][j]);
        }
}

template <class T>
using Tile = void (*)(const Product<T>&, size_t, const T*, const T*, T*, const T*, size_t, bool);

// Indexed by [rows − 1][vectors − 1]; a height above the tile's own never occurs.
template <class T, bool whole>
struct Tiles {
    Tile<T> at[8][kMaxVectors];
    constexpr Tiles() : at{} { fill<1>(); }

    template <int rows>
    constexpr void fill() {
        at[rows - 1][0] = tile<T, rows, 1, whole>;
        if constexpr (rows <= rows_of_tile(2)) at[rows - 1][1] = tile<T, rows, 2, whole>;
        if constexpr (kMaxVectors > 2) {
            if constexpr (rows <= rows_of_tile(3)) at[rows - 1][2] = tile<T, rows, 3, whole>;
            if constexpr (rows <= rows_of_tile(4)) at[rows - 1][3] = tile<T, rows, 4, whole>;
        }
        if constexpr (rows < 8) fill<rows + 1>();
    }
};
template <class T, bool whole>
constexpr Tiles<T, whole> tiles;

}  // namespace

template <class T>
void multiply_rows(const Product<T>& p, size_t first, size_t last) {
    constexpr size_t lanes = Lanes<T>::count, width = kMaxVectors * lanes;
    const size_t k_block = p.k_block ? p.k_block : p.K;
    const T *a = p.a + first * p.a_row, *b = p.b;
    bool from_c = p.accumulate;
    for (size_t k = 0;; k += k_block) {
        const bool is_last = k + k_block >= p.K;
        const size_t K = is_last ? p.K - k : k_block;
        for (size_t n = 0; n < p.N; n += width) {
            const size_t columns = p.N - n < width ? p.N - n : width;
            const size_t vectors = (columns + lanes - 1) / lanes, tail = columns - (vectors - 1) * lanes;
            const size_t height = rows_of_tile(static_cast<int>(vectors));
            for (size_t m = first; m < last; m += height) {
                const size_t rows = last - m < height ? last - m : height;
                const size_t at = m * p.c_row + n;
                const Tile<T> tile = (tail == lanes ? tiles<T, true>.at : tiles<T, false>.at)[rows - 1][vectors - 1];
                tile(p, K, a + (m - first) * p.a_row, b + n, p.c + at,
                     is_last && p.plus ? p.plus + at : nullptr, tail, from_c);
            }
        }
        if (is_last) return;
        a += p.a_step;
        b += p.b_step;
        from_c = true;
    }
}

template void multiply_rows<float>(const Product<float>&, size_t, size_t);
template void multiply_rows<double>(const Product<double>&, size_t, size_t);

}  // namespace strop::STROP_ISA
