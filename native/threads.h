// One pool of threads for the whole module.
//
// Work is split into tasks by its size only, each task writes its own result, and results are combined in task order. So no
// result depends on the number of threads or on which one was first.
#pragma once

#include <cstddef>

namespace strop {

// The number of threads a call may use, including the caller. Initially the number of CPUs this process may run on.
int num_threads();
void set_num_threads(int count);

// Runs body(context, task) for every task in [0, tasks). The caller works too. Only one call at a time uses the pool; a
// concurrent call from another thread runs its tasks itself, so calls never wait for each other.
void run_tasks(size_t tasks, void (*body)(void* context, size_t task) noexcept, void* context);

template <class Body>
void parallel_for(size_t tasks, Body&& body) {
    run_tasks(
        tasks, [](void* context, size_t task) noexcept { (*static_cast<Body*>(context))(task); }, &body);
}

// The same for light work on `work` elements. It does not use the pool if the work ends before a second thread could start.
template <class Body>
void for_tasks(size_t tasks, size_t work, Body&& body) {
    if (work > size_t{1} << 14) return parallel_for(tasks, static_cast<Body&&>(body));
    for (size_t task = 0; task < tasks; ++task) body(task);
}

}  // namespace strop
