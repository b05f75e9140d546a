// The rows of a JSONL file: one pass over its lines, and the order of an epoch.
//
// The pass finds where each row begins, and whether it is plain.
//
// Plain rows are those that src/strop/data/formats.py would find usual: right JSON, and in the columns of a format only texts,
// or only messages of known roles. Most rows are. Every other row, right or wrong, is left to Python, which alone knows the
// errors. So this parser may refuse what Python reads, and must never accept what Python refuses.
#include "rows.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <new>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "threads.h"

namespace nb = nanobind;

namespace strop {
namespace {

using Names = std::vector<std::string>;

constexpr uint8_t kNotPlain = 255;
constexpr size_t kMostColumns = 255;               // sets of columns; rows of further sets are not plain
constexpr size_t kMostKeys = 32, kMostDepth = 64;  // of plain objects
constexpr ptrdiff_t kMostDigits = 1000;            // Python refuses integers of 4,300
constexpr size_t kChunk = size_t{1} << 22;         // bytes of a task

bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

constexpr uint64_t every(uint8_t byte) { return 0x0101010101010101u * byte; }

// Non-zero if one of the 8 bytes is a quote, a backslash, a control character or not ASCII.
uint64_t special(uint64_t bytes) {
    auto zero = [](uint64_t v) { return (v - every(1)) & ~v & every(0x80); };
    return zero(bytes ^ every('"')) | zero(bytes ^ every('\\')) | ((bytes - every(0x20)) & ~bytes & every(0x80)) | (bytes & every(0x80));
}

bool is_special(char c) { return c == '"' || c == '\\' || static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) >= 0x80; }

int hex_digit(char c) {
    if (is_digit(c)) return c - '0';
    const char lower = static_cast<char>(c | 0x20);
    return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

// The code unit of four hexadecimal digits, or −1.
int code_unit(const char* p) {
    int unit = 0;
    for (int i = 0; i < 4; ++i) {
        const int digit = hex_digit(p[i]);
        if (digit < 0) return -1;
        unit = 16 * unit + digit;
    }
    return unit;
}

// The character at p of a JSON string, which is valid, if it is ASCII; else −1.
int ascii_at(const char* p) {
    if (*p != '\\') return static_cast<unsigned char>(*p) < 0x80 ? *p : -1;
    const int unit = p[1] == 'u' ? code_unit(p + 2) : 0;
    switch (p[1]) {
        case 'b': return '\b';
        case 'f': return '\f';
        case 'n': return '\n';
        case 'r': return '\r';
        case 't': return '\t';
        case 'u': return unit < 0x80 ? unit : -1;
        default: return p[1];
    }
}

// True if two valid JSON strings certainly differ; false if they are equal, or differ in how characters are written.
bool differ(std::string_view a, std::string_view b) {
    const size_t shorter = std::min(a.size(), b.size());
    for (size_t i = 0; i < shorter;) {
        if (a[i] != b[i]) {
            const int one = ascii_at(a.data() + i), other = ascii_at(b.data() + i);
            if (one < 0 && other < 0) return a[i] != '\\' && b[i] != '\\';
            return one != other;
        }
        if (a[i] != '\\') {
            ++i;
            continue;
        }
        const size_t length = a[i + 1] == 'u' ? 6 : 2, other_length = b[i + 1] == 'u' ? 6 : 2;
        if (length != other_length || a.compare(i, length, b, i, length) != 0) {
            const int one = ascii_at(a.data() + i), other = ascii_at(b.data() + i);
            return (one >= 0 || other >= 0) && one != other;
        }
        i += length;
    }
    return a.size() != b.size();
}

// The columns of a format, and the roles that chat templates know.
struct Known {
    Names content, roles;

    static bool has(const Names& names, std::string_view name) {
        return std::any_of(names.begin(), names.end(), [&](const std::string& one) { return one == name; });
    }
};

// Reads one line. Every method moves `at_` behind what it reads, and returns false where that is not plain.
class Line {
  public:
    Line(const char* at, const char* end, const Known& known) : at_(at), end_(end), known_(known) {}

    // The line's object up to the line's end; `columns` becomes its keys.
    bool row(std::vector<std::string_view>* columns) {
        columns->clear();
        skip_blanks();
        if (!peek('{')) return false;
        const bool right = object(0, [&](std::string_view key) {
            columns->push_back(key);
            return Known::has(known_.content, key) ? content(key) : value(1);
        });
        if (!right || num_texts_ + num_messages_ == 0 || (num_texts_ && num_messages_)) return false;
        if (chosen_.present && rejected_.present && !pair_differs()) return false;
        skip_blanks();
        return at_ == end_ || *at_ == '\n';
    }

    const char* at() const { return at_; }

  private:
    // What a column says: its text, or its messages' contents, empty views without data where they are no strings.
    struct Said {
        bool present = false;
        std::vector<std::string_view> parts;
    };

    bool peek(char c) const { return at_ < end_ && *at_ == c; }

    void skip_blanks() {
        while (at_ < end_ && is_blank(*at_)) ++at_;
    }

    bool take(char c) {
        if (!peek(c)) return false;
        ++at_;
        return true;
    }

    bool literal(std::string_view word) {
        if (static_cast<size_t>(end_ - at_) < word.size() || std::string_view(at_, word.size()) != word) return false;
        at_ += word.size();
        return true;
    }

    // -?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?
    bool number() {
        const char* begin = at_;
        take('-');
        if (!take('0') && !digits()) return false;
        if (take('.') && !digits()) return false;
        if (take('e') || take('E')) {
            if (!take('+')) take('-');
            if (!digits()) return false;
        }
        return at_ - begin <= kMostDigits;
    }

    bool digits() {
        const char* begin = at_;
        while (at_ < end_ && is_digit(*at_)) ++at_;
        return at_ > begin;
    }

    // A string; `inside` becomes what stands between its quotes.
    bool string(std::string_view* inside) {
        if (!take('"')) return false;
        const char* begin = at_;
        for (;;) {
            for (uint64_t bytes; end_ - at_ >= 8; at_ += 8) {
                std::memcpy(&bytes, at_, 8);
                if (special(bytes)) break;
            }
            while (at_ < end_ && !is_special(*at_)) ++at_;
            if (at_ == end_) return false;
            if (*at_ == '"') break;
            if (*at_ == '\\' ? !escape() : !other_character()) return false;
        }
        *inside = {begin, static_cast<size_t>(at_ - begin)};
        ++at_;
        return true;
    }

    bool escape() {
        if (end_ - at_ < 2) return false;
        if (at_[1] != 'u') {
            if (!std::strchr("\"\\/bfnrt", at_[1]) || !at_[1]) return false;
            at_ += 2;
            return true;
        }
        if (end_ - at_ < 6) return false;
        const int unit = code_unit(at_ + 2);
        at_ += 6;
        if (unit < 0xD800 || unit > 0xDFFF) return unit >= 0;
        if (unit > 0xDBFF || end_ - at_ < 6 || at_[0] != '\\' || at_[1] != 'u') return false;  // half a surrogate pair
        const int low = code_unit(at_ + 2);
        at_ += 6;
        return low >= 0xDC00 && low <= 0xDFFF;
    }

    // One character of UTF-8 that is not ASCII; false for a control character.
    bool other_character() {
        auto byte = [&](ptrdiff_t i) { return i < end_ - at_ ? static_cast<unsigned char>(at_[i]) : 0u; };
        auto follows = [&](ptrdiff_t i, unsigned low = 0x80, unsigned high = 0xBF) { return byte(i) >= low && byte(i) <= high; };
        const unsigned first = byte(0);
        ptrdiff_t length = 0;
        if (first >= 0xC2 && first <= 0xDF) {
            length = follows(1) ? 2 : 0;
        } else if (first >= 0xE0 && first <= 0xEF) {
            length = follows(1, first == 0xE0 ? 0xA0 : 0x80, first == 0xED ? 0x9F : 0xBF) && follows(2) ? 3 : 0;
        } else if (first >= 0xF0 && first <= 0xF4) {
            length = follows(1, first == 0xF0 ? 0x90 : 0x80, first == 0xF4 ? 0x8F : 0xBF) && follows(2) && follows(3) ? 4 : 0;
        }
        at_ += length;
        return length > 0;
    }

    // An object. `member(key)` reads the value of each key. Keys with escapes, repeated keys and many keys are not plain.
    template <class Member>
    bool object(size_t depth, Member&& member) {
        if (depth >= kMostDepth || !take('{')) return false;
        skip_blanks();
        if (take('}')) return true;
        std::string_view keys[kMostKeys];
        for (size_t count = 0;; ++count) {
            skip_blanks();
            if (count == kMostKeys || !string(&keys[count]) || keys[count].find('\\') != std::string_view::npos) return false;
            if (std::find(keys, keys + count, keys[count]) != keys + count) return false;
            skip_blanks();
            if (!take(':')) return false;
            skip_blanks();
            if (!member(keys[count])) return false;
            skip_blanks();
            if (take('}')) return true;
            if (!take(',')) return false;
        }
    }

    template <class Item>
    bool array(size_t depth, Item&& item) {
        if (depth >= kMostDepth || !take('[')) return false;
        skip_blanks();
        if (take(']')) return true;
        for (;;) {
            skip_blanks();
            if (!item()) return false;
            skip_blanks();
            if (take(']')) return true;
            if (!take(',')) return false;
        }
    }

    bool value(size_t depth) {
        if (at_ == end_) return false;
        std::string_view ignored;
        switch (*at_) {
            case '"': return string(&ignored);
            case '{': return object(depth, [&](std::string_view) { return value(depth + 1); });
            case '[': return array(depth, [&] { return value(depth + 1); });
            case 't': return literal("true");
            case 'f': return literal("false");
            case 'n': return literal("null");
            default: return number();
        }
    }

    // A column of a format: a text, or messages.
    bool content(std::string_view column) {
        Said unused;
        Said& said = column == "chosen" ? chosen_ : column == "rejected" ? rejected_ : unused;
        said.present = true;
        if (peek('"')) {
            ++num_texts_;
            return string(&said.parts.emplace_back());
        }
        ++num_messages_;
        size_t count = 0;
        return array(1, [&] { return ++count, message(&said.parts.emplace_back()); }) && count > 0;
    }

    bool message(std::string_view* content) {
        bool has_role = false, has_content = false;
        const bool right = peek('{') && object(2, [&](std::string_view key) {
            if (key == "role") {
                std::string_view role;
                return has_role = string(&role) && Known::has(known_.roles, role);
            }
            if (key == "content") {
                has_content = true;
                if (peek('"')) return string(content);
            }
            return value(3);
        });
        return right && has_role && has_content;
    }

    bool pair_differs() const {
        if (num_messages_ && chosen_.parts.size() != rejected_.parts.size()) return true;
        for (size_t i = 0; i < chosen_.parts.size(); ++i) {
            const std::string_view one = chosen_.parts[i], other = rejected_.parts[i];
            if (one.data() && other.data() && differ(one, other)) return true;
        }
        return false;
    }

    const char* at_;
    const char* const end_;
    const Known& known_;
    size_t num_texts_ = 0, num_messages_ = 0;
    Said chosen_, rejected_;
};

// The rows of a part of the file. kinds[i] is the index of row i's columns, or kNotPlain.
struct Rows {
    std::vector<uint64_t> begins;
    std::vector<uint8_t> kinds;
    std::vector<Names> columns;

    uint8_t kind_of(const std::vector<std::string_view>& names) {
        auto same = [&](const Names& known) { return std::equal(known.begin(), known.end(), names.begin(), names.end()); };
        const auto found = std::find_if(columns.begin(), columns.end(), same);
        const size_t index = static_cast<size_t>(found - columns.begin());
        if (index < columns.size()) return static_cast<uint8_t>(index);
        if (index >= kMostColumns) return kNotPlain;
        columns.emplace_back(names.begin(), names.end());
        return static_cast<uint8_t>(index);
    }
};

bool is_empty(const char* begin, const char* end) {
    return std::all_of(begin, end, [](char c) { return is_blank(c) || c == '\v' || c == '\f'; });
}

// Whole lines, from data + begin to data + end.
Rows scan(const char* data, size_t begin, size_t end, const Known& known) {
    Rows rows;
    std::vector<std::string_view> columns;
    for (const char* at = data + begin; at < data + end;) {
        Line line(at, data + end, known);
        const bool plain = line.row(&columns);
        const char* line_end = line.at();
        if (!plain) {
            const void* found = std::memchr(at, '\n', static_cast<size_t>(data + end - at));
            line_end = found ? static_cast<const char*>(found) : data + end;
        }
        if (plain || !is_empty(at, line_end)) {
            rows.begins.push_back(static_cast<uint64_t>(at - data));
            rows.kinds.push_back(plain ? rows.kind_of(columns) : kNotPlain);
        }
        at = line_end + 1;
    }
    return rows;
}

// Places in the file at which a line begins, about kChunk apart: from `begin` to `size`.
std::vector<size_t> parts_of(const char* data, size_t begin, size_t size) {
    std::vector<size_t> places{begin};
    while (places.back() < size) {
        const size_t wanted = places.back() + kChunk;
        const void* found = wanted < size ? std::memchr(data + wanted, '\n', size - wanted) : nullptr;
        places.push_back(found ? static_cast<size_t>(static_cast<const char*>(found) - data) + 1 : size);
    }
    return places;
}

std::vector<Rows> scan_parts(const char* data, const std::vector<size_t>& places, const Known& known) {
    std::vector<Rows> parts(places.size() - 1);
    std::atomic<bool> enough_memory{true};
    parallel_for(parts.size(), [&](size_t part) {
        try {
            parts[part] = scan(data, places[part], places[part + 1], known);
        } catch (const std::bad_alloc&) {
            enough_memory = false;
        }
    });
    if (!enough_memory) throw std::bad_alloc();
    return parts;
}

// scan_rows(data, begin, content, roles) -> begins (uint64), kinds (uint8), columns
nb::tuple scan_rows(nb::bytes data, size_t begin, Names content, Names roles) {
    const Known known{std::move(content), std::move(roles)};
    std::vector<Rows> parts;
    {
        nb::gil_scoped_release unlocked;
        parts = scan_parts(data.c_str(), parts_of(data.c_str(), std::min(begin, data.size()), data.size()), known);
    }
    size_t count = 0;
    for (const Rows& part : parts) count += part.begins.size();
    nb::bytes begins(nullptr, count * sizeof(uint64_t)), kinds(nullptr, count);
    auto* begin_out = reinterpret_cast<uint64_t*>(PyBytes_AS_STRING(begins.ptr()));
    auto* kind_out = reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(kinds.ptr()));
    Rows all;  // of which only the columns are used
    for (Rows& part : parts) {
        uint8_t kind_of[256];
        std::fill(std::begin(kind_of), std::end(kind_of), kNotPlain);
        for (size_t i = 0; i < part.columns.size(); ++i)
            kind_of[i] = all.kind_of({part.columns[i].begin(), part.columns[i].end()});
        begin_out = std::copy(part.begins.begin(), part.begins.end(), begin_out);
        kind_out = std::transform(part.kinds.begin(), part.kinds.end(), kind_out, [&](uint8_t kind) { return kind_of[kind]; });
        part = {};
    }
    nb::list columns;
    for (const Names& names : all.columns) {
        nb::list one;
        for (const std::string& name : names) one.append(nb::str(name.data(), name.size()));
        columns.append(nb::tuple(one));
    }
    return nb::make_tuple(begins, kinds, columns);
}

// ---- the order of the rows ----

// Python's generator, MT19937, from random.getstate(): 624 words and how many of them are used.
class Twister {
  public:
    explicit Twister(const std::vector<uint32_t>& state) : words_(state.begin(), state.end() - 1), used_(state.back()) {}

    // random.getrandbits(bits), for 1 to 32 bits.
    uint32_t bits(int bits) {
        if (used_ >= kWords) refill();
        uint32_t y = words_[used_++];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        y ^= y >> 18;
        return y >> (32 - bits);
    }

  private:
    static constexpr size_t kWords = 624, kShift = 397;

    void refill() {
        for (size_t i = 0; i < kWords; ++i) {
            const uint32_t y = (words_[i] & 0x80000000u) | (words_[(i + 1) % kWords] & 0x7fffffffu);
            words_[i] = words_[(i + kShift) % kWords] ^ (y >> 1) ^ (y & 1 ? 0x9908b0dfu : 0);
        }
        used_ = 0;
    }

    std::vector<uint32_t> words_;
    size_t used_;
};

// shuffled(count, state) -> the numbers below count (int64), in the order that random.shuffle gives them
nb::bytes shuffled(size_t count, const std::vector<uint32_t>& state) {
    if (state.size() != 625 || count >= uint64_t{1} << 32) throw nb::value_error("shuffled needs a state of 625 words and a count below 2**32");
    nb::bytes result(nullptr, count * sizeof(int64_t));
    auto* order = reinterpret_cast<int64_t*>(PyBytes_AS_STRING(result.ptr()));
    nb::gil_scoped_release unlocked;
    Twister twister(state);
    std::iota(order, order + count, int64_t{0});
    for (size_t i = count; i-- > 1;) {
        const int bits = std::bit_width(i + 1);
        uint32_t other = twister.bits(bits);
        while (other > i) other = twister.bits(bits);
        std::swap(order[i], order[other]);
    }
    return result;
}

}  // namespace

void define_rows(nb::module_& m) {
    m.def("shuffled", &shuffled, nb::arg("count"), nb::arg("state"), "The numbers below count in the order of Python's random.shuffle.");
    m.def("scan_rows", &scan_rows, nb::arg("data"), nb::arg("begin"), nb::arg("content"), nb::arg("roles"),
          "Where the rows of a JSONL file begin, and which columns each plain row has.");
}

}  // namespace strop
