// The memory of one pass: allocated piece by piece, freed all at once, and reused by the next pass.
#pragma once

#include <cstddef>

namespace strop::moe {

// A pass larger than all earlier ones allocates further blocks, and `reset` replaces them by one large block. So a second pass
// of the same size allocates nothing. Every member is compiled once, in arena.cpp (see simd.h).
class Arena {
  public:
    Arena() noexcept;
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // Aligned to a cache line, not initialised, and readable for a vector's width beyond its end.
    void* take(size_t bytes);
    void reset();

    // Frees what was allocated since `mark`, as far as it lies in the newest block; `reset` frees the rest.
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
    size_t used_ = 0;  // bytes used in the newest block
};

template <class T>
static inline T* take(Arena& arena, size_t count) {
    return static_cast<T*>(arena.take(count * sizeof(T)));
}

}  // namespace strop::moe
