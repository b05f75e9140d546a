// Memory of one pass: taken piece by piece, given back all at once, kept for the next pass.
#pragma once

#include <cstddef>

namespace strop::moe {

// A pass that is larger than any before it takes further blocks from the system; `reset` melts them into one. So from the
// second pass of a size on nothing is allocated. Every member is compiled once, in arena.cpp (see simd.h).
class Arena {
  public:
    Arena() noexcept;
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // Aligned to a cache line, not initialised, and readable for a vector's width beyond its end.
    void* take(size_t bytes);
    void reset();

    // What was taken since `mark` is given back, as far as it stands in the newest block; `reset` does the rest.
    struct Mark {
        void* block;
        size_t used;
    };
    Mark mark() const;
    void release(const Mark& mark);
    size_t capacity() const;

  private:
    struct Block;
    Block* newest_ = nullptr;
    size_t used_ = 0;  // of the newest block
};

template <class T>
static inline T* take(Arena& arena, size_t count) {
    return static_cast<T*>(arena.take(count * sizeof(T)));
}

}  // namespace strop::moe
