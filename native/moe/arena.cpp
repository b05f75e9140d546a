#include "arena.h"

#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define STROP_FORBID(from, bytes) __asan_poison_memory_region(from, bytes)
#define STROP_ALLOW(from, bytes) __asan_unpoison_memory_region(from, bytes)
#else
#define STROP_FORBID(from, bytes) (void)0
#define STROP_ALLOW(from, bytes) (void)0
#endif

namespace strop::moe {
namespace {

constexpr size_t kLine = 64;            // alignment, and the bytes that may be read after every piece
constexpr size_t kFirstBlock = 1 << 20;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kForbidden = 2 * kLine;  // gap between pieces, so that AddressSanitizer detects an overrun into the next one
#else
constexpr size_t kForbidden = 0;
#endif

size_t rounded(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace

struct Arena::Block {
    Block* older;
    size_t size;
    char* data() { return reinterpret_cast<char*>(this) + kLine; }

    static Block* make(size_t size, Block* older) {
        static_assert(sizeof(Block) <= kLine);
        Block* block = new (::operator new(kLine + size, std::align_val_t{kLine})) Block{older, size};
        STROP_FORBID(block->data(), size);
        return block;
    }
    static void free_all(Block* block) {
        while (block) {
            Block* older = block->older;
            STROP_ALLOW(block->data(), block->size);
            ::operator delete(block, std::align_val_t{kLine});
            block = older;
        }
    }
};

Arena::Arena() noexcept = default;
Arena::~Arena() { Block::free_all(newest_); }

void* Arena::take(size_t bytes) {
    const size_t size = rounded(bytes) + kLine + kForbidden;
    if (!newest_ || used_ + size > newest_->size) {
        size_t block = capacity() > kFirstBlock ? capacity() : kFirstBlock;  // doubles the total
        newest_ = Block::make(block > size ? block : size, newest_);
        used_ = 0;
    }
    void* piece = newest_->data() + used_;
    used_ += size;
    STROP_ALLOW(piece, bytes + kLine);
    return piece;
}

void Arena::reset() {
    used_ = 0;
    if (newest_) STROP_FORBID(newest_->data(), newest_->size);
    if (!newest_ || !newest_->older) return;
    const size_t total = capacity();
    Block::free_all(newest_);
    newest_ = nullptr;
    newest_ = Block::make(total, nullptr);
}

Arena::Mark Arena::mark() const { return {newest_, used_}; }
void Arena::release(const Mark& mark) {
    used_ = mark.block == newest_ ? mark.used : 0;  // a block allocated after the mark holds nothing from before it
    if (newest_) STROP_FORBID(newest_->data() + used_, newest_->size - used_);
}

size_t Arena::capacity() const {
    size_t total = 0;
    for (Block* block = newest_; block; block = block->older) total += block->size;
    return total;
}

}  // namespace strop::moe
