// KL between two policies from the log-probs of tokens; formulas in src/strop/primitives/kl.py.
//
// Each formula has two forms: `usual` for vectors whose arguments are all within `limit`, and `any` for every double.
#include "kernels.h"
#include "simd.h"

namespace strop::STROP_ISA {
namespace {

// exp(p)·(p − q). Near the reference, terms of opposite signs nearly cancel, so float32 is computed in double.
struct TokenKl {
    using Arithmetic = double;
    static constexpr double limit = 700.0;
    static Wide argument(Wide p, Wide) { return p; }

    static Wide usual(Wide p, Wide q) {
        auto e = exp_parts<double>(p);
        return e.s * ((e.r + e.t) + 1.0) * (p - q);
    }

    // A token of probability 0 contributes 0, whatever q is.
    static Wide any(Wide p, Wide q) { return p == -__builtin_inf() ? Wide{} : exp_of_any(p) * (p - q); }
};

// exp(d) − d − 1 with d = q − p.
template <class T>
struct SchulmanKl {
    using Arithmetic = T;
    // Beyond the limit, rounding d to float changes exp(d) by more than 5e-7; in double, 2^n is no normal number.
    static constexpr T limit = sizeof(T) == sizeof(float) ? 8 : 700;
    static VecOf<T> argument(VecOf<T> p, VecOf<T> q) { return q - p; }

    // s·(1 + r + t) − (n·ln 2 + r) − 1, with the large parts combined first so that nothing cancels. For n = 0 only t is left.
    static VecOf<T> usual(VecOf<T> p, VecOf<T> q) {
        auto e = exp_parts<T>(q - p);
        VecOf<T> s_less_1 = e.s - T(1);
        VecOf<T> constant = (s_less_1 - e.n * Lanes<T>::ln2_high) - e.n * Lanes<T>::ln2_low;
        return s_less_1 * e.r + (e.s * e.t + constant);
    }

    static Wide any(Wide p, Wide q) {
        Wide d = q - p;
        d = d > 710.0 ? wide(710.0) : d;  // exp is infinite there; the bound avoids inf − inf
        Wide near = SchulmanKl<double>::usual(p, q);
        return absolute<double>(d) < 1.0 ? near : exp_of_any(d) - (d + 1.0);
    }
};

// One vector of tokens; T is the type of the arithmetic, Input that in memory. p = q = 0 contributes 0 to either formula, so
// masked and absent lanes hold it.
template <class T>
struct Tokens {
    VecOf<T> p, q;
};

template <class T, bool masked, class Input>
inline Tokens<T> tokens_at(const Input* p, const Input* q, const uint8_t* mask) {
    constexpr bool same = sizeof(T) == sizeof(Input);
    if constexpr (masked && same) return {load_counted(p, mask), load_counted(q, mask)};
    else if constexpr (masked) return {load_wide_counted(p, mask), load_wide_counted(q, mask)};
    else if constexpr (same) return {load(p), load(q)};
    else return {load_wide(p), load_wide(q)};
}

// Adds the last n tokens of a row, fewer than a vector has.
template <class T, bool masked, class Input>
inline Tokens<T> last_tokens(const Input* p, const Input* q, const uint8_t* mask, size_t n) {
    constexpr size_t lanes = Lanes<T>::count;
    Input p_padded[lanes] = {}, q_padded[lanes] = {};
    uint8_t mask_padded[lanes] = {};
    for (size_t i = 0; i < n; ++i) {
        p_padded[i] = p[i];
        q_padded[i] = q[i];
        if constexpr (masked) mask_padded[i] = mask[i];
    }
    return tokens_at<T, masked>(p_padded, q_padded, mask_padded);
}

// Handles vectors that have a value beyond the limit. It is rare, so it is not inlined into the calling loop.
template <class Input, class Formula, bool masked>
[[gnu::noinline, gnu::cold]] Wide sum_of_any(const Input* p, const Input* q, const uint8_t* mask, size_t n) {
    Wide total{};
    size_t i = 0;
    for (; i + kWide <= n; i += kWide) {
        auto v = tokens_at<double, masked>(p + i, q + i, mask + (masked ? i : 0));
        total += Formula::any(v.p, v.q);
    }
    if (i < n) {
        auto v = last_tokens<double, masked>(p + i, q + i, mask + (masked ? i : 0), n - i);
        total += Formula::any(v.p, v.q);
    }
    return total;
}

// Adds four vectors at a time: their limits are checked together, and floats are added in a tree before conversion to double.
template <class Input, class Formula, bool masked>
double block(const Input* p, const Input* q, const uint8_t* mask, size_t n) {
    using T = typename Formula::Arithmetic;
    constexpr size_t lanes = Lanes<T>::count;
    auto mask_at = [&](size_t i) { return masked ? mask + i : nullptr; };
    auto at = [&](size_t i) { return tokens_at<T, masked>(p + i, q + i, mask_at(i)); };
    auto argument = [](const Tokens<T>& v) { return Formula::argument(v.p, v.q); };
    auto usual = [](const Tokens<T>& v) { return Formula::usual(v.p, v.q); };

    Wide total{};
    size_t i = 0;
    for (; i + 4 * lanes <= n; i += 4 * lanes) {
        const Tokens<T> a = at(i), b = at(i + lanes), c = at(i + 2 * lanes), d = at(i + 3 * lanes);
        const auto farthest = farther(farther(argument(a), argument(b)), farther(argument(c), argument(d)));
        if (any_above(absolute<T>(farthest), Formula::limit)) total += sum_of_any<Input, Formula, masked>(p + i, q + i, mask_at(i), 4 * lanes);
        else total += widened_sum((usual(a) + usual(b)) + (usual(c) + usual(d)));
    }
    for (; i < n; i += lanes) {
        const size_t left = n - i < lanes ? n - i : lanes;
        const Tokens<T> v = left == lanes ? at(i) : last_tokens<T, masked>(p + i, q + i, mask_at(i), left);
        if (any_above(absolute<T>(argument(v)), Formula::limit)) total += sum_of_any<Input, Formula, masked>(p + i, q + i, mask_at(i), left);
        else total += widened_sum(usual(v));
    }
    return sum(total);
}

template <class Input, class Formula>
double kl_block(const Input* p, const Input* q, const uint8_t* mask, size_t n) {
    return mask ? block<Input, Formula, true>(p, q, mask, n) : block<Input, Formula, false>(p, q, nullptr, n);
}

}  // namespace

extern const KlBlock<float> token_kl_f32 = kl_block<float, TokenKl>;
extern const KlBlock<double> token_kl_f64 = kl_block<double, TokenKl>;
extern const KlBlock<float> schulman_kl_f32 = kl_block<float, SchulmanKl<float>>;
extern const KlBlock<double> schulman_kl_f64 = kl_block<double, SchulmanKl<double>>;

}  // namespace strop::STROP_ISA
