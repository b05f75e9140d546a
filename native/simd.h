// Vectors as wide as the instruction set this file is compiled for.
//
// Every kernel file is compiled once per instruction set (CMakeLists.txt) and chosen at run time (dispatch.cpp).
// STROP_ISA names the namespace. Include no standard header with inline code here or in a kernel file: the linker
// keeps one copy of an inline function, and the copy compiled for AVX-512 would then run everywhere.
#pragma once

#include <stddef.h>
#include <stdint.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef STROP_ISA
#error "compile kernel files through strop_add_kernels() in CMakeLists.txt, which names the instruction set"
#endif

namespace strop::STROP_ISA {

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define STROP_AVX512
inline constexpr size_t kBytes = 64;
#elif defined(__AVX2__) && defined(__FMA__)
#define STROP_AVX2
inline constexpr size_t kBytes = 32;
#else
inline constexpr size_t kBytes = 16;
#endif

// Lanes<double> and Lanes<float>: a full vector of each. Wide holds one half of a float vector as doubles.
template <class T>
struct Lanes;

template <>
struct Lanes<double> {
    static constexpr size_t count = kBytes / sizeof(double);
    typedef double Vec __attribute__((vector_size(kBytes)));
    typedef int64_t Bits __attribute__((vector_size(kBytes)));
    typedef uint8_t MaskBytes __attribute__((vector_size(count)));
    static constexpr int mantissa_bits = 52;
    static constexpr int64_t one = int64_t{1023} << 52;                 // the bits of 1.0
    static constexpr double round = 6755399441055744.0;                 // 1.5·2^52, see exp_parts
    static constexpr double ln2_high = 6.93147180369123816490e-01;      // the upper 33 bits of ln 2: n·ln2_high is exact
    static constexpr double ln2_low = 1.90821492927058770002e-10;
};

template <>
struct Lanes<float> {
    static constexpr size_t count = kBytes / sizeof(float);
    typedef float Vec __attribute__((vector_size(kBytes)));
    typedef int32_t Bits __attribute__((vector_size(kBytes)));
    typedef uint8_t MaskBytes __attribute__((vector_size(count)));
    static constexpr int mantissa_bits = 23;
    static constexpr int32_t one = 127 << 23;
    static constexpr float round = 12582912.0f;
    static constexpr float ln2_high = 0.693145751953125f;
    static constexpr float ln2_low = 1.428606765330187e-06f;
};

template <class T>
using VecOf = typename Lanes<T>::Vec;
template <class T>
using BitsOf = typename Lanes<T>::Bits;

typedef VecOf<double> Wide;
typedef float HalfVec __attribute__((vector_size(kBytes / 2)));
inline constexpr size_t kWide = Lanes<double>::count;

static inline Wide wide(double x) { return x - Wide{}; }

// ---- loads and stores; a "first" variant touches only the memory of the first `count` lanes, the others read as 0 ----

template <class T>
static inline VecOf<T> load(const T* from) {
    VecOf<T> v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
}

static inline Wide widen(HalfVec v) {
#if defined(STROP_AVX512)
    return (Wide)_mm512_cvtps_pd((__m256)v);
#else
    return __builtin_convertvector(v, Wide);
#endif
}

static inline HalfVec narrow(Wide v) {
#if defined(STROP_AVX512)
    return (HalfVec)_mm512_cvtpd_ps((__m512d)v);
#else
    return __builtin_convertvector(v, HalfVec);
#endif
}

static inline Wide load_wide(const double* from) { return load(from); }

static inline Wide load_wide(const float* from) {
    HalfVec v;
    __builtin_memcpy(&v, from, sizeof v);
    return widen(v);
}

static inline void store(double* to, Wide v) { __builtin_memcpy(to, &v, sizeof v); }

static inline void store(float* to, Wide v) {
    HalfVec half = narrow(v);
    __builtin_memcpy(to, &half, sizeof half);
}

static inline void store(float* to, VecOf<float> v) { __builtin_memcpy(to, &v, sizeof v); }

template <class T>
static inline VecOf<T> broadcast(T x) {
    return x - VecOf<T>{};
}

// All bits set in the lanes below `count`.
template <class T>
static inline BitsOf<T> first_lanes(size_t count) {
    BitsOf<T> lane;
    for (size_t i = 0; i < Lanes<T>::count; ++i) lane[i] = static_cast<decltype(lane[0] + 0)>(i);
    return lane < static_cast<decltype(lane[0] + 0)>(count);
}

// All bits set in the lanes below `count`.
static inline BitsOf<double> lanes_below(size_t count) {
    BitsOf<double> lane;
    for (size_t i = 0; i < kWide; ++i) lane[i] = static_cast<int64_t>(i);
    return lane < static_cast<int64_t>(count);
}

static inline Wide load_wide_first(const double* from, size_t count) {
#if defined(STROP_AVX512)
    return (Wide)_mm512_maskz_loadu_pd(static_cast<__mmask8>((1u << count) - 1), from);
#elif defined(STROP_AVX2)
    return (Wide)_mm256_maskload_pd(from, (__m256i)lanes_below(count));
#else
    Wide v{};
    for (size_t i = 0; i < count; ++i) v[i] = from[i];
    return v;
#endif
}

#if defined(STROP_AVX2)
static inline __m128i half_lanes_below(size_t count) {
    return _mm_cmplt_epi32(_mm_setr_epi32(0, 1, 2, 3), _mm_set1_epi32(static_cast<int>(count)));
}
#endif

static inline Wide load_wide_first(const float* from, size_t count) {
#if defined(STROP_AVX512)
    return (Wide)_mm512_cvtps_pd(_mm256_maskz_loadu_ps(static_cast<__mmask8>((1u << count) - 1), from));
#elif defined(STROP_AVX2)
    return (Wide)_mm256_cvtps_pd(_mm_maskload_ps(from, half_lanes_below(count)));
#else
    Wide v{};
    for (size_t i = 0; i < count; ++i) v[i] = from[i];
    return v;
#endif
}

static inline void store_first(double* to, size_t count, Wide v) {
#if defined(STROP_AVX512)
    _mm512_mask_storeu_pd(to, static_cast<__mmask8>((1u << count) - 1), (__m512d)v);
#elif defined(STROP_AVX2)
    _mm256_maskstore_pd(to, (__m256i)lanes_below(count), (__m256d)v);
#else
    for (size_t i = 0; i < count; ++i) to[i] = v[i];
#endif
}

static inline void store_first(float* to, size_t count, Wide v) {
    HalfVec half = narrow(v);
#if defined(STROP_AVX512)
    _mm256_mask_storeu_ps(to, static_cast<__mmask8>((1u << count) - 1), (__m256)half);
#elif defined(STROP_AVX2)
    _mm_maskstore_ps(to, half_lanes_below(count), (__m128)half);
#else
    for (size_t i = 0; i < count; ++i) to[i] = half[i];
#endif
}

static inline void store_first(float* to, size_t count, VecOf<float> v) {
#if defined(STROP_AVX512)
    _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), (__m512)v);
#elif defined(STROP_AVX2)
    _mm256_maskstore_ps(to, (__m256i)first_lanes<float>(count), (__m256)v);
#else
    for (size_t i = 0; i < count; ++i) to[i] = v[i];
#endif
}

static inline VecOf<double> load_first(const double* from, size_t count) { return load_wide_first(from, count); }

static inline VecOf<float> load_first(const float* from, size_t count) {
#if defined(STROP_AVX512)
    return (VecOf<float>)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
#elif defined(STROP_AVX2)
    return (VecOf<float>)_mm256_maskload_ps(from, (__m256i)first_lanes<float>(count));
#else
    VecOf<float> v{};
    for (size_t i = 0; i < count; ++i) v[i] = from[i];
    return v;
#endif
}

// Loads the values whose mask byte is not 0; the other lanes are 0, whatever is in memory.
static inline Wide load_counted(const double* from, const uint8_t* mask) {
#if defined(STROP_AVX512)
    __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(mask));
    return (Wide)_mm512_maskz_loadu_pd(static_cast<__mmask8>(_mm_test_epi8_mask(bytes, bytes)), from);
#else
    Lanes<double>::MaskBytes bytes;
    __builtin_memcpy(&bytes, mask, sizeof bytes);
    return __builtin_convertvector(bytes, BitsOf<double>) != 0 ? load(from) : Wide{};
#endif
}

static inline VecOf<float> load_counted(const float* from, const uint8_t* mask) {
#if defined(STROP_AVX512)
    __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(mask));
    return (VecOf<float>)_mm512_maskz_loadu_ps(_mm_test_epi8_mask(bytes, bytes), from);
#else
    Lanes<float>::MaskBytes bytes;
    __builtin_memcpy(&bytes, mask, sizeof bytes);
    return __builtin_convertvector(bytes, BitsOf<float>) != 0 ? load(from) : VecOf<float>{};
#endif
}

static inline Wide load_wide_counted(const double* from, const uint8_t* mask) { return load_counted(from, mask); }

static inline Wide load_wide_counted(const float* from, const uint8_t* mask) {
#if defined(STROP_AVX512)
    __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(mask));
    return (Wide)_mm512_cvtps_pd(_mm256_maskz_loadu_ps(static_cast<__mmask8>(_mm_test_epi8_mask(bytes, bytes)), from));
#else
    Lanes<double>::MaskBytes bytes;
    __builtin_memcpy(&bytes, mask, sizeof bytes);
    return __builtin_convertvector(bytes, BitsOf<double>) != 0 ? load_wide(from) : Wide{};
#endif
}

// ---- across lanes ----------------------------------------------------------------------------------------------------

// Returns the sum of the lanes, always added in the same tree.
static inline double sum(Wide v) {
#if defined(STROP_AVX512)
    return _mm512_reduce_add_pd((__m512d)v);
#elif defined(STROP_AVX2)
    __m128d half = _mm_add_pd(_mm256_castpd256_pd128((__m256d)v), _mm256_extractf128_pd((__m256d)v, 1));
    return _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)));
#else
    return v[0] + v[1];
#endif
}

// Returns the sum of the lower and the upper half of a vector of floats, as doubles.
static inline Wide widened_sum(VecOf<float> v) {
    HalfVec half[2];
    __builtin_memcpy(half, &v, sizeof v);
    return widen(half[0]) + widen(half[1]);
}
static inline Wide widened_sum(Wide v) { return v; }

template <class T>
static inline VecOf<T> absolute(VecOf<T> v) {
    constexpr auto all_but_sign = ~((BitsOf<T>{} + 1) << (8 * sizeof(T) - 1));
    return (VecOf<T>)((BitsOf<T>)v & all_but_sign);
}

// Returns, for each lane, the value of larger magnitude.
static inline Wide farther(Wide a, Wide b) {
#if defined(STROP_AVX512)
    return (Wide)_mm512_range_pd((__m512d)a, (__m512d)b, 0b0011);
#elif defined(STROP_AVX2)
    return (Wide)_mm256_max_pd((__m256d)absolute<double>(a), (__m256d)absolute<double>(b));
#else
    return absolute<double>(a) > absolute<double>(b) ? a : b;
#endif
}
static inline VecOf<float> farther(VecOf<float> a, VecOf<float> b) {
#if defined(STROP_AVX512)
    return (VecOf<float>)_mm512_range_ps((__m512)a, (__m512)b, 0b0011);
#elif defined(STROP_AVX2)
    return (VecOf<float>)_mm256_max_ps((__m256)absolute<float>(a), (__m256)absolute<float>(b));
#else
    return absolute<float>(a) > absolute<float>(b) ? a : b;
#endif
}

static inline bool any_above(Wide v, double limit) {
#if defined(STROP_AVX512)
    return _mm512_cmp_pd_mask((__m512d)v, _mm512_set1_pd(limit), _CMP_GT_OQ) != 0;
#elif defined(STROP_AVX2)
    return _mm256_movemask_pd(_mm256_cmp_pd((__m256d)v, _mm256_set1_pd(limit), _CMP_GT_OQ)) != 0;
#else
    return v[0] > limit || v[1] > limit;
#endif
}
static inline bool any_above(VecOf<float> v, float limit) {
#if defined(STROP_AVX512)
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#elif defined(STROP_AVX2)
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)v, _mm256_set1_ps(limit), _CMP_GT_OQ)) != 0;
#else
    return v[0] > limit || v[1] > limit || v[2] > limit || v[3] > limit;
#endif
}

// Return the sum and the maximum of the lanes of either type, always in the same tree: halves are folded onto each other.
template <class T>
static inline T sum_lanes(VecOf<T> v) {
#if defined(STROP_AVX512)
    if constexpr (sizeof(T) == sizeof(float)) return _mm512_reduce_add_ps((__m512)v);
    else return _mm512_reduce_add_pd((__m512d)v);
#endif
    T lane[Lanes<T>::count];
    __builtin_memcpy(lane, &v, sizeof v);
    for (size_t half = Lanes<T>::count / 2; half > 0; half /= 2)
        for (size_t i = 0; i < half; ++i) lane[i] += lane[i + half];
    return lane[0];
}

template <class T>
static inline T max_lanes(VecOf<T> v) {
#if defined(STROP_AVX512)
    if constexpr (sizeof(T) == sizeof(float)) return _mm512_reduce_max_ps((__m512)v);
    else return _mm512_reduce_max_pd((__m512d)v);
#endif
    T lane[Lanes<T>::count];
    __builtin_memcpy(lane, &v, sizeof v);
    for (size_t half = Lanes<T>::count / 2; half > 0; half /= 2)
        for (size_t i = 0; i < half; ++i) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
    return lane[0];
}

// ---- arithmetic whose rounding must not be left to the compiler ----------------------------------------------------------

// Returns a·b + c, rounded once if the instruction set has fused multiply-add (all except the baseline).
static inline VecOf<float> multiply_add(VecOf<float> a, VecOf<float> b, VecOf<float> c) {
#if defined(STROP_AVX512)
    return (VecOf<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(STROP_AVX2)
    return (VecOf<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
static inline VecOf<double> multiply_add(VecOf<double> a, VecOf<double> b, VecOf<double> c) {
#if defined(STROP_AVX512)
    return (VecOf<double>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(STROP_AVX2)
    return (VecOf<double>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
    return a * b + c;
#endif
}

static inline VecOf<float> square_root(VecOf<float> v) {
#if defined(STROP_AVX512)
    return (VecOf<float>)_mm512_sqrt_ps((__m512)v);
#elif defined(STROP_AVX2)
    return (VecOf<float>)_mm256_sqrt_ps((__m256)v);
#else
    for (size_t i = 0; i < Lanes<float>::count; ++i) v[i] = __builtin_sqrtf(v[i]);
    return v;
#endif
}
static inline VecOf<double> square_root(VecOf<double> v) {
#if defined(STROP_AVX512)
    return (VecOf<double>)_mm512_sqrt_pd((__m512d)v);
#elif defined(STROP_AVX2)
    return (VecOf<double>)_mm256_sqrt_pd((__m256d)v);
#else
    for (size_t i = 0; i < Lanes<double>::count; ++i) v[i] = __builtin_sqrt(v[i]);
    return v;
#endif
}

// Returns 1/v for v of ordinary size, to within a unit in the last place. With AVX-512 a float division takes as long as an
// exp. A 14-bit table look-up, which every such CPU rounds alike, and one Newton step take a fifth of that.
static inline VecOf<float> reciprocal(VecOf<float> v) {
#if defined(STROP_AVX512)
    const __m512 r = _mm512_rcp14_ps((__m512)v);
    return (VecOf<float>)_mm512_fmadd_ps(r, _mm512_fnmadd_ps((__m512)v, r, _mm512_set1_ps(1)), r);
#else
    return 1.0f / v;
#endif
}
static inline VecOf<double> reciprocal(VecOf<double> v) { return 1.0 / v; }

template <class T>
static inline VecOf<T> larger(VecOf<T> a, VecOf<T> b) {
    return a > b ? a : b;
}

// ---- exp ---------------------------------------------------------------------------------------------------------------

// (e^r − 1 − r) / r² for |r| ≤ ln 2 / 2: minimax polynomials of relative error 2e-16 (degree 9) and 3e-9 (degree 5).
template <class T>
struct ExpTail;
template <>
struct ExpTail<double> {
    static constexpr int degree = 9;
    static constexpr double coefficient[] = {
        0.500000000000000102,   0.166666666666666439,    0.0416666666666243088,   0.00833333333335619763,  0.00138888889171383656,
        0.000198412697846710997, 0.0000248015213963431171, 2.75573555035311833e-6, 2.76200466540104369e-7, 2.50681697378129036e-8};
};
template <>
struct ExpTail<float> {
    static constexpr int degree = 5;
    static constexpr double coefficient[] = {0.500000001338754291,   0.166666665322865214,   0.0416664654472849833,
                                             0.00833336072609805539, 0.00139336065260636437, 0.00019857802288709481};
};

// exp(x) = s·(1 + r + t)  with  n = round(x / ln 2),  s = 2^n,  r = x − n·ln 2,  t = e^r − 1 − r.
// t comes from r² times a polynomial, so it keeps its relative precision however small r is.
template <class Vec>
struct ExpParts {
    Vec n, s, r, t;
};

// Adding 1.5·2^mantissa_bits rounds to an integer and leaves it in the low bits; a shift then makes it an exponent. s is right
// while 2^n is a normal number.
template <class T>
static inline ExpParts<VecOf<T>> exp_parts(VecOf<T> x) {
    using L = Lanes<T>;
    using Tail = ExpTail<T>;
    VecOf<T> rounded = x * T(1.4426950408889634074) + L::round;
    VecOf<T> n = rounded - L::round;
    VecOf<T> s = (VecOf<T>)(((BitsOf<T>)rounded << L::mantissa_bits) + L::one);
    VecOf<T> r = (x - n * L::ln2_high) - n * L::ln2_low;
    VecOf<T> p = T(Tail::coefficient[Tail::degree]) - VecOf<T>{};
#pragma GCC unroll 16
    for (int k = Tail::degree - 1; k >= 0; --k) p = p * r + T(Tail::coefficient[k]);
    return {n, s, r, r * r * p};
}

// Returns exp for every double, including NaN and the infinities: 2^n is multiplied in two halves, so that results below the
// smallest normal number and near the largest are right.
static inline Wide exp_of_any(Wide x) {
    x = x > 710.0 ? wide(710.0) : x;    // infinite
    x = x < -746.0 ? wide(-746.0) : x;  // 0
    ExpParts<Wide> e = exp_parts<double>(x);
    using L = Lanes<double>;
    auto power_of_two = [](Wide k) { return (Wide)(((BitsOf<double>)(k + L::round) << L::mantissa_bits) + L::one); };
    Wide half = (e.n * 0.5 + L::round) - L::round;
    return ((e.r + e.t) + 1.0) * power_of_two(half) * power_of_two(e.n - half);
}

// Returns exp(x) for x ≤ 0, as softmax and sigmoid need it. Results below the smallest normal number are 0; NaN stays NaN.
template <class T>
static inline VecOf<T> exp_to_one(VecOf<T> x) {
    constexpr T smallest = sizeof(T) == sizeof(float) ? T(-87.0) : T(-708.0);
    ExpParts<VecOf<T>> e = exp_parts<T>(x < smallest ? broadcast<T>(smallest) : x);
    return x < smallest ? VecOf<T>{} : e.s * ((e.r + e.t) + T(1));
}

}  // namespace strop::STROP_ISA
