#include "threads.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif
#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace strop {
namespace {

int usable_cpus() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    unsigned count = std::thread::hardware_concurrency();
    return count ? static_cast<int>(count) : 1;
}

std::atomic<int>& thread_count() {
    static std::atomic<int> count{usable_cpus()};
    return count;
}

struct Job {
    void (*body)(void*, size_t) noexcept;
    void* context;
    size_t tasks;
    std::atomic<int> open_places;
    alignas(64) std::atomic<size_t> next{0};  // alone in its cache line: every thread writes it

    void work() noexcept {
        for (size_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(context, task);
    }
};

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// True as soon as ready() is; false after some tens of microseconds. Waking a sleeping thread takes about that long, so a
// thread that has just worked looks out for more work this long before it sleeps.
template <class Ready>
bool spin_until(Ready&& ready) {
    for (int i = 0; i < 1000; ++i) {
        if (ready()) return true;
        pause();
    }
    return false;
}

// Workers wait until a job is posted, join it if it is still open when they notice, and are waited for only if they joined.
//
// A small job is posted, joined and left without a lock. Whoever writes one of a pair and then reads the other, with the
// other side doing the reverse, cannot be overlooked (both are sequentially consistent): a worker says that it works, then
// looks for the job; the caller takes the job away, then looks whether anyone works. The same holds for `posted_` and
// `sleeping_`. The lock is for sleeping only.
class Pool {
  public:
    void run(Job& job, int helpers) {
        if (started_ < helpers) start(helpers);
        job_ = &job;
        ++posted_;
        if (sleeping_ > 0) {
            { std::lock_guard lock(mutex_); }  // a worker that is about to sleep does so first
            wake_.notify_all();
        }
        job.work();
        job_ = nullptr;
        if (spin_until([this] { return working_ == 0; })) return;
        std::unique_lock lock(mutex_);
        caller_sleeps_ = true;
        done_.wait(lock, [this] { return working_ == 0; });
        caller_sleeps_ = false;
    }

  private:
    void start(int helpers) {
        for (; started_ < helpers; ++started_) std::thread([this] { serve(); }).detach();
    }

    void serve() {
        unsigned seen = 0;
        for (;;) {
            const auto posted = [&] { return posted_ != seen; };
            if (!spin_until(posted)) {
                std::unique_lock lock(mutex_);
                ++sleeping_;
                wake_.wait(lock, posted);
                --sleeping_;
            }
            seen = posted_;
            ++working_;
            if (Job* job = job_; job && job->open_places.fetch_sub(1) > 0) job->work();
            if (--working_ == 0 && caller_sleeps_) {
                { std::lock_guard lock(mutex_); }
                done_.notify_one();
            }
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_, done_;
    int started_ = 0;
    alignas(64) std::atomic<Job*> job_{nullptr};
    std::atomic<unsigned> posted_{0};
    alignas(64) std::atomic<int> working_{0};
    std::atomic<int> sleeping_{0};
    std::atomic<bool> caller_sleeps_{false};
};

// The pool is never destroyed: its sleeping threads must outlive static destruction. A forked child has none of them,
// so it starts with a pool of its own.
std::atomic<Pool*> pool{nullptr};
std::atomic<bool> pool_taken{false};

void forget_pool_after_fork() {
    pool = nullptr;
    pool_taken = false;
}

Pool& the_pool() {
    if (!pool.load()) {
#if !defined(_WIN32)
        static const int registered = pthread_atfork(nullptr, nullptr, forget_pool_after_fork);
        (void)registered;
#endif
        pool = new Pool;
    }
    return *pool.load();
}

}  // namespace

int num_threads() { return thread_count().load(std::memory_order_relaxed); }
void set_num_threads(int count) { thread_count() = count; }

void run_tasks(size_t tasks, void (*body)(void*, size_t) noexcept, void* context) {
    size_t helpers = static_cast<size_t>(num_threads()) - 1;
    if (tasks > 0 && helpers > tasks - 1) helpers = tasks - 1;
    if (tasks == 0 || helpers == 0 || pool_taken.exchange(true)) {
        for (size_t task = 0; task < tasks; ++task) body(context, task);
        return;
    }
    Job job{body, context, tasks, static_cast<int>(helpers)};
    the_pool().run(job, static_cast<int>(helpers));
    pool_taken = false;
}

}  // namespace strop
