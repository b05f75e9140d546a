#include "arena.h"

#include <new>

namespace strop::moe {
namespace {

constexpr size_t kLine = 64;           // alignment, and the room behind every piece
constexpr size_t kFirstBlock = 1 << 20;

size_t rounded(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace

struct Arena::Block {
    Block* older;
    size_t size;
    char* data() { return reinterpret_cast<char*>(this) + kLine; }

    static Block* make(size_t size, Block* older) {
        static_assert(sizeof(Block) <= kLine);
        return new (::operator new(kLine + size, std::align_val_t{kLine})) Block{older, size};
    }
    static void free_all(Block* block) {
        while (block) {
            Block* older = block->older;
            ::operator delete(block, std::align_val_t{kLine});
            block = older;
        }
    }
};

Arena::Arena() noexcept = default;
Arena::~Arena() { Block::free_all(newest_); }

void* Arena::take(size_t bytes) {
    const size_t size = rounded(bytes) + kLine;
    if (!newest_ || used_ + size > newest_->size) {
        size_t block = capacity() > kFirstBlock ? capacity() : kFirstBlock;  // doubles the whole
        newest_ = Block::make(block > size ? block : size, newest_);
        used_ = 0;
    }
    void* piece = newest_->data() + used_;
    used_ += size;
    return piece;
}

void Arena::reset() {
    used_ = 0;
    if (!newest_ || !newest_->older) return;
    const size_t total = capacity();
    Block::free_all(newest_);
    newest_ = nullptr;
    newest_ = Block::make(total, nullptr);
}

Arena::Mark Arena::mark() const { return {newest_, used_}; }
void Arena::release(const Mark& mark) {
    if (mark.block == newest_) used_ = mark.used;
}

size_t Arena::capacity() const {
    size_t total = 0;
    for (Block* block = newest_; block; block = block->older) total += block->size;
    return total;
}

}  // namespace strop::moe
