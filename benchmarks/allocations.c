// Counts the heap allocations of a process: built at need and loaded before the C library (LD_PRELOAD) by alone.py.
// Python's own small objects come from its pool and are not seen; their pool's pages are.
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);

static atomic_ulong calls, bytes;

static void count(size_t size) {
    atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&bytes, size, memory_order_relaxed);
}

unsigned long strop_allocation_calls(void) { return calls; }
unsigned long strop_allocation_bytes(void) { return bytes; }

void* malloc(size_t size) { return count(size), __libc_malloc(size); }
void* calloc(size_t items, size_t size) { return count(items * size), __libc_calloc(items, size); }
void* realloc(void* old, size_t size) { return count(size), __libc_realloc(old, size); }
void* memalign(size_t alignment, size_t size) { return count(size), __libc_memalign(alignment, size); }
void* aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }
int posix_memalign(void** out, size_t alignment, size_t size) {
    *out = memalign(alignment, size);
    return *out ? 0 : ENOMEM;
}
