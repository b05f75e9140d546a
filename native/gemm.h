// Matrix products whose every element is summed in one fixed order.
//
// An element of C is a single chain of multiply-adds over k = 0, 1, 2, … from 0, whatever tile, block or thread computes it.
// So it depends only on its row of A and its column of B.
#pragma once

#include "simd.h"
#include "threads.h"

namespace strop::STROP_ISA {

// C[m][n] = Σ_k A(m, k)·B[k][n],  A(m, k) = a[m·a_row + k·a_col].
template <class T>
struct Product {
    size_t M, N, K;
    const T* a;
    size_t a_row, a_col;
    const T* b;
    size_t b_row;
    T* c;
    size_t c_row;
    const T* plus = nullptr;  // added to C at the end; same layout as C
    bool accumulate = false;  // start each sum from the value in C
    // After k_block terms the pointers a and b advance by these strides: A and B may be stored in blocks along k.
    size_t k_block = 0, a_step = 0, b_step = 0;

    size_t first_task = 0, task_rows = 0;  // set by for_rows_of
};

// Computes rows [first, last) of the product.
template <class T>
void multiply_rows(const Product<T>& product, size_t first, size_t last);

template <class T>
void multiply(const Product<T>& product) {
    multiply_rows(product, 0, product.M);
}

// Returns the rows per task of about a microsecond: small tasks balance threads better, but a task has at least two tiles.
template <class T>
static inline size_t rows_per_task(const Product<T>& p) {
    constexpr size_t kTask = size_t{1} << 18, kRows = 16;  // product of the factors' bytes; rows
    const size_t by_work = p.M * p.N * p.K / (kTask / sizeof(T)) + 1, by_rows = (p.M + kRows - 1) / kRows;
    const size_t tasks = by_work < by_rows ? by_work : by_rows;
    return tasks == 0 ? 1 : (p.M + tasks - 1) / tasks;
}

// Calls body(index, first, last) for the rows of all products of a list, in one parallel region.
template <class T, class Body>
static void for_rows_of(Product<T>* list, size_t count, Body&& body) {
    constexpr size_t kWorthSharing = size_t{1} << 18;  // multiply-adds: a few microseconds
    size_t tasks = 0, work = 0;
    for (size_t i = 0; i < count; ++i) work += list[i].M * list[i].N * list[i].K;
    if (work < kWorthSharing) {
        for (size_t i = 0; i < count; ++i) body(i, 0, list[i].M);
        return;
    }
    for (size_t i = 0; i < count; ++i) {
        list[i].first_task = tasks;
        list[i].task_rows = rows_per_task(list[i]);
        tasks += (list[i].M + list[i].task_rows - 1) / list[i].task_rows;  // 0 tasks for a product without rows
    }
    parallel_for(tasks, [&](size_t task) noexcept {
        size_t low = 0, high = count;  // the last product that starts at or before this task
        while (high - low > 1) {
            const size_t middle = (low + high) / 2;
            (list[middle].first_task <= task ? low : high) = middle;
        }
        while (low + 1 < count && list[low + 1].first_task <= task) ++low;
        const Product<T>& p = list[low];
        const size_t first = (task - p.first_task) * p.task_rows;
        const size_t last = first + p.task_rows < p.M ? first + p.task_rows : p.M;
        body(low, first, last);
    });
}

// Computes all products of a list in one parallel region; calls after(index, first, last) once those rows are done.
template <class T, class After>
static void run_products(Product<T>* list, size_t count, After&& after) {
    for_rows_of(list, count, [&](size_t i, size_t first, size_t last) {
        multiply_rows(list[i], first, last);
        after(i, first, last);
    });
}

template <class T>
static void run_products(Product<T>* list, size_t count) {
    run_products(list, count, [](size_t, size_t, size_t) {});
}

}  // namespace strop::STROP_ISA
