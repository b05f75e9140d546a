#include "threads.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif
#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace strop {
namespace {

constexpr int kMaxThreads = 1024;

int usable_cpus() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    unsigned count = std::thread::hardware_concurrency();
    return count ? static_cast<int>(count) : 1;
}

std::atomic<int>& thread_count() {
    static std::atomic<int> count{usable_cpus() < kMaxThreads ? usable_cpus() : kMaxThreads};
    return count;
}

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// True as soon as ready() is; false after kPatience. Waking a sleeping thread takes tens of microseconds, so a thread that
// has just worked looks out for more work as long as a caller may need to come back with it: a step of training or decoding
// in Python comes every few hundred microseconds and has dozens of jobs. After kSpin it does so only while nothing else
// wants its CPU.
constexpr std::chrono::microseconds kSpin{20}, kPatience{200};

template <class Ready>
bool spin_until(Ready&& ready) {
    const auto start = std::chrono::steady_clock::now();
    for (;;) {
        for (int i = 0; i < 32; ++i) {
            if (ready()) return true;
            pause();
        }
        const auto waited = std::chrono::steady_clock::now() - start;
        if (waited > kPatience) return false;
        if (waited > kSpin) std::this_thread::yield();
    }
}

using Body = void (*)(void*, size_t) noexcept;

// One participant's share of a job, in a cache line of its own. The ticket is (number of the job, next task). A task is
// claimed by advancing the ticket, which fails as soon as it has changed; and it is taken away before any other field is
// written. So whoever claims a task has read the other fields of the same job.
struct alignas(64) Desk {
    std::atomic<uint64_t> ticket{0};
    std::atomic<uint64_t> end{0};
    std::atomic<Body> body{nullptr};
    std::atomic<void*> context{nullptr};

    static constexpr uint64_t kNoTicket = 0;  // jobs are counted from 1
    static uint32_t job_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }

    void put(uint32_t job, Body new_body, void* new_context, size_t first, size_t last) {
        ticket.store(kNoTicket, std::memory_order_relaxed);
        end.store(last, std::memory_order_release);
        body.store(new_body, std::memory_order_relaxed);
        context.store(new_context, std::memory_order_relaxed);
        ticket = uint64_t{job} << 32 | first;  // sequentially consistent: see Pool
    }

    // Runs what is left of this job here; how many tasks that were.
    size_t work(uint32_t job) noexcept {
        size_t done = 0;
        uint64_t seen = ticket.load(std::memory_order_acquire);
        while (job_of(seen) == job && static_cast<uint32_t>(seen) < end.load(std::memory_order_acquire)) {
            const Body run = body.load(std::memory_order_relaxed);
            void* const with = context.load(std::memory_order_relaxed);
            if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
            run(with, static_cast<uint32_t>(seen));
            ++done;
            seen = ticket.load(std::memory_order_acquire);
        }
        return done;
    }
};

// Every participant has a contiguous share of the tasks on its desk: the same one each time a job comes again, so that what
// it read then is still in its cache. Whoever is done helps at the other desks, so a worker that sleeps or was
// interrupted holds nobody up. Nothing is locked, except to sleep: a worker says that it sleeps and then looks at its desk
// once more, the caller fills the desks and then looks whether anyone sleeps; so one of the two always notices.
class Pool {
  public:
    void run(size_t tasks, Body body, void* context, int participants) {
        if (started_ < participants) participants = start(participants);
        if (++jobs_ == 0) ++jobs_;
        const uint32_t job = jobs_;
        done_.store(0, std::memory_order_relaxed);
        const auto first = [&](int at) { return tasks * static_cast<size_t>(at) / static_cast<size_t>(participants); };
        for (int at = participants - 1; at >= 0; --at) desks_[at].put(job, body, context, first(at), first(at + 1));
        if (sleeping_ > 0) {
            { std::lock_guard lock(mutex_); }  // a worker that is about to sleep does so first
            wake_.notify_all();
        }
        done_ += work(0, job, participants);
        const auto finished = [&] { return done_ == tasks; };
        if (spin_until(finished)) return;
        std::unique_lock lock(mutex_);
        caller_sleeps_ = true;
        finished_.wait(lock, finished);
        caller_sleeps_ = false;
    }

  private:
    // How many participants there are then: where the system gives no more threads, the work is done by those it gave.
    int start(int wanted) {
        try {
            for (; started_ < wanted; ++started_) std::thread([this, at = started_.load()] { serve(at); }).detach();
        } catch (const std::system_error&) {
        }
        return started_;
    }

    size_t work(int at, uint32_t job, int participants) noexcept {
        size_t done = desks_[at].work(job);
        for (int other = 1; other < participants; ++other) done += desks_[(at + other) % participants].work(job);
        return done;
    }

    void serve(int at) {
        Desk& desk = desks_[at];
        uint32_t seen = 0;
        for (;;) {
            uint32_t job = 0;
            const auto posted = [&] { return (job = Desk::job_of(desk.ticket)) != seen && job != 0; };
            if (!spin_until(posted)) {
                std::unique_lock lock(mutex_);
                ++sleeping_;
                wake_.wait(lock, posted);
                --sleeping_;
            }
            seen = job;
            const size_t done = work(at, job, started_);
            if (done == 0) continue;
            done_ += done;
            if (caller_sleeps_) {
                { std::lock_guard lock(mutex_); }
                finished_.notify_one();
            }
        }
    }

    Desk desks_[kMaxThreads];  // the caller's first
    std::mutex mutex_;
    std::condition_variable wake_, finished_;
    std::atomic<int> started_{1};  // the caller needs no start
    uint32_t jobs_ = 0;
    alignas(64) std::atomic<size_t> done_{0};
    std::atomic<bool> caller_sleeps_{false};
    alignas(64) std::atomic<int> sleeping_{0};
};

// The pool is never destroyed: its sleeping threads must outlive static destruction. A forked child has none of them,
// so it starts with a pool of its own.
std::atomic<Pool*> pool{nullptr};
std::atomic<bool> pool_taken{false};

void forget_pool_after_fork() {
    pool = nullptr;
    pool_taken = false;
}

// Null where there is no memory for it.
Pool* the_pool() {
    if (!pool.load()) {
#if !defined(_WIN32)
        static const int registered = pthread_atfork(nullptr, nullptr, forget_pool_after_fork);
        (void)registered;
#endif
        pool = new (std::nothrow) Pool;
    }
    return pool;
}

}  // namespace

int num_threads() { return thread_count().load(std::memory_order_relaxed); }
void set_num_threads(int count) { thread_count() = count < kMaxThreads ? count : kMaxThreads; }

void run_tasks(size_t tasks, void (*body)(void*, size_t) noexcept, void* context) {
    size_t participants = static_cast<size_t>(num_threads());
    if (participants > tasks) participants = tasks;
    if (participants <= 1 || pool_taken.load(std::memory_order_relaxed) || pool_taken.exchange(true)) {
        for (size_t task = 0; task < tasks; ++task) body(context, task);
        return;
    }
    if (Pool* workers = the_pool()) {
        workers->run(tasks, body, context, static_cast<int>(participants));
    } else {
        for (size_t task = 0; task < tasks; ++task) body(context, task);
    }
    pool_taken = false;
}

}  // namespace strop
