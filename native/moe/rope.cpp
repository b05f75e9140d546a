// Rotary position embedding with Mixtral's pairing: channel p is rotated with channel p + C/2.
#include "layers.h"

namespace strop::STROP_ISA {

template <class T>
void rope_angles(const RopeTable<T>& table, size_t P, const Tokens& tokens, const Strip& strip, T* cos_PN, T* sin_PN) {
    const int32_t* positions = tokens.positions_N + strip.first;
    to_lanes<T>(P, strip.tokens, [&](size_t i) { return table.cos_SP + positions[i] * P; }, strip_of(cos_PN, P, strip));
    to_lanes<T>(P, strip.tokens, [&](size_t i) { return table.sin_SP + positions[i] * P; }, strip_of(sin_PN, P, strip));
}

// (a, b) → (a·cos − b·sin, b·cos + a·sin) for each pair; backward (a·cos + b·sin, b·cos − a·sin)
template <class T>
void rope(size_t heads, size_t C, size_t tokens, const T* cos_PN, const T* sin_PN, bool backwards, T* x_ON) {
    constexpr size_t lanes = Lanes<T>::count;
    const size_t P = C / 2;
    for (size_t p = 0; p < P; ++p)
        for (size_t i = 0; i < tokens; i += lanes) {
            const VecOf<T> cos = load(cos_PN + p * kPanel + i);
            VecOf<T> sin = load(sin_PN + p * kPanel + i);
            if (backwards) sin = -sin;
            for (size_t head = 0; head < heads; ++head) {
                T* a_at = x_ON + (head * C + p) * kPanel + i;
                T* b_at = a_at + P * kPanel;
                const VecOf<T> a = load(a_at), b = load(b_at);
                store(a_at, multiply_add(a, cos, -(b * sin)));
                store(b_at, multiply_add(b, cos, a * sin));
            }
        }
}

#define STROP_INSTANTIATE(T)                                                                    \
    template void rope_angles<T>(const RopeTable<T>&, size_t, const Tokens&, const Strip&, T*, T*); \
    template void rope<T>(size_t, size_t, size_t, const T*, const T*, bool, T*);
STROP_INSTANTIATE(float)
STROP_INSTANTIATE(double)

}  // namespace strop::STROP_ISA
