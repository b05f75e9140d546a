// One pool of threads for the whole module.
//
// Work is cut into tasks by its size alone, each task writes its own result, and whoever combines the results does so
// in task order: no result depends on how many threads ran or which of them was first.
#pragma once

#include <cstddef>

namespace strop {

// Threads a call may use, the caller among them; at first the CPUs this process may run on.
int num_threads();
void set_num_threads(int count);

// Runs body(context, task) for every task in [0, tasks). The caller works too. One call at a time has the pool; a call
// made meanwhile from another thread runs its tasks itself, so calls never wait for each other.
void run_tasks(size_t tasks, void (*body)(void* context, size_t task) noexcept, void* context);

template <class Body>
void parallel_for(size_t tasks, Body&& body) {
    run_tasks(
        tasks, [](void* context, size_t task) noexcept { (*static_cast<Body*>(context))(task); }, &body);
}

// The same for `work` elements to be moved or so: without the pool where that is done before a second thread has begun.
template <class Body>
void for_tasks(size_t tasks, size_t work, Body&& body) {
    if (work > size_t{1} << 14) return parallel_for(tasks, static_cast<Body&&>(body));
    for (size_t task = 0; task < tasks; ++task) body(task);
}

}  // namespace strop
