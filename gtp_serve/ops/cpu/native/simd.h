// Vectors of float32 with the few operations that kernels need, one definition for each instruction set: this header is
// compiled once for each, with GTP_ISA as the namespace.  A kernel's sums run over lanes in one fixed order, so a
// result depends on its own inputs alone; it may differ between instruction sets.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Before a loop over the registers of a tile: unless it is unrolled before anything else, compilers keep them in memory.
#if defined(__clang__)
#define GTP_UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define GTP_UNROLL _Pragma("GCC unroll 32")
#else
#define GTP_UNROLL
#endif

namespace gtp {
namespace GTP_ISA {

using bf16 = uint16_t;

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

// To the nearest, ties to even; a NaN stays one.
inline bf16 narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return static_cast<bf16>((bits >> 16) | 0x40);
  return static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <class T>
inline T rounded(float x);
template <>
inline float rounded<float>(float x) { return x; }
template <>
inline bf16 rounded<bf16>(float x) { return narrow(x); }

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
constexpr int kLanes = 16;
using Vec = __m512;
inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec all(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const bf16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline Vec load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
// What narrow() keeps of each, in the upper halves; whatever in the lower ones.
inline __m512i narrowed(Vec x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_mask_or_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x400000));
}
inline void store(bf16* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(narrowed(x), 16)));
}
inline Vec through_bf16(Vec x) {
  return _mm512_castsi512_ps(_mm512_and_si512(narrowed(x), _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec nearest(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// a * 2^n, n whole and between -126 and 127
inline Vec scaled_by_power(Vec a, Vec n) {
  const __m512i power = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
  return mul(a, _mm512_castsi512_ps(power));
}
inline void spill(float* p, Vec x) { _mm512_storeu_ps(p, x); }
// Of 2 * kLanes bf16, those at even and at odd places.
inline Vec load_even(const bf16* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
inline Vec load_odd(const bf16* p) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), upper));
}
// The same of pairs in a register.
inline Vec even_of(Vec pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16)); }
inline Vec odd_of(Vec pairs) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs), upper));
}
#if defined(__AVX512BF16__)
inline __m512bh load_pairs(const bf16* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }
// Of vectors of pairs of bf16: sums + the products of both.
inline Vec dot_pairs(Vec a, Vec b, Vec sums) {
  return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
// Both as bf16, `first` before `second`; numbers that are too small for a normal one become 0.
inline Vec narrow_both(Vec first, Vec second) { return reinterpret_cast<Vec>(_mm512_cvtne2ps_pbh(second, first)); }
// Pairs of a[i] and b[i], 2 * kLanes of them: low[lane] is that of interleaved_place(0, lane), high[lane] of (1, lane).
inline void interleave(const bf16* a, const bf16* b, Vec& low, Vec& high) {
  const __m512i first = _mm512_loadu_si512(a), second = _mm512_loadu_si512(b);
  low = _mm512_castsi512_ps(_mm512_unpacklo_epi16(first, second));
  high = _mm512_castsi512_ps(_mm512_unpackhi_epi16(first, second));
}
// a * 2^n, n the whole number at or below x; 0 for -infinity
inline Vec scaled_by_whole(Vec a, Vec x) { return _mm512_scalef_ps(a, x); }
// x - n; 0 for infinities
inline Vec above_whole(Vec x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
constexpr int interleaved_place(int part, int lane) { return lane / 4 * 8 + part * 4 + lane % 4; }
inline Vec all_bits(uint32_t bits) { return _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(bits))); }
inline Vec and_bits(Vec a, Vec b) { return _mm512_and_ps(a, b); }
#endif
// Whole numbers of 16 bits (put_whole: of floats that are whole and fit), and their products in pairs added to sums of
// 32 bits.
inline __m512i whole(const int16_t* p) { return _mm512_loadu_si512(p); }
inline __m512i widened(const int8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m512i whole_zero() { return _mm512_setzero_si512(); }
inline __m512i add_pairs(__m512i a, __m512i b, __m512i sums) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sums, a, b);
#else
  return _mm512_add_epi32(sums, _mm512_madd_epi16(a, b));
#endif
}
inline Vec from_whole(__m512i a) { return _mm512_cvtepi32_ps(a); }
inline void put_whole(int16_t* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x)));
}
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kLanes = 8;
using Vec = __m256;
inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec all(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const bf16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Vec load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
// What narrow() keeps of each, in the upper halves; whatever in the lower ones.
inline __m256i narrowed(Vec x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(up, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), nan);
}
inline Vec through_bf16(Vec x) {
  return _mm256_castsi256_ps(_mm256_and_si256(narrowed(x), _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
inline void store(bf16* p, Vec x) {
  const __m256i kept = _mm256_srli_epi32(narrowed(x), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(kept, kept), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec nearest(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// a * 2^n, n whole and between -126 and 127
inline Vec scaled_by_power(Vec a, Vec n) {
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return mul(a, _mm256_castsi256_ps(power));
}
inline void spill(float* p, Vec x) { _mm256_storeu_ps(p, x); }
// Of 2 * kLanes bf16, those at even and at odd places.
inline Vec load_even(const bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), 16));
}
// The mask stays in memory, and so does what it is for: a tile needs every register for its sums.
alignas(32) constexpr uint32_t kUpperHalves[8] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
                                                  0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};
inline Vec load_odd(const bf16* p) {
  const auto& pairs = *reinterpret_cast<const bf16(*)[2 * kLanes]>(p);
  Vec x;
  asm("vmovups %1, %0\n\tvandps %2, %0, %0" : "=x"(x) : "m"(pairs), "m"(kUpperHalves));
  return x;
}
// The same of pairs in a register.
inline Vec even_of(Vec pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16)); }
inline Vec odd_of(Vec pairs) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(pairs), upper));
}
// Whole numbers of 16 bits (put_whole: of floats that are whole and fit), and their products in pairs added to sums of
// 32 bits.
inline __m256i whole(const int16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m256i widened(const int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline __m256i whole_zero() { return _mm256_setzero_si256(); }
inline __m256i add_pairs(__m256i a, __m256i b, __m256i sums) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
}
inline Vec from_whole(__m256i a) { return _mm256_cvtepi32_ps(a); }
inline void put_whole(int16_t* p, Vec x) {
  const __m256i kept = _mm256_cvtps_epi32(x);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(kept, kept), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
#else
constexpr int kLanes = 8;
struct Vec {
  float lane[kLanes];
};
template <class F>
inline Vec each(F f) {
  Vec out;
  for (int i = 0; i < kLanes; ++i) out.lane[i] = f(i);
  return out;
}
inline Vec zero() { return each([](int) { return 0.0f; }); }
inline Vec all(float x) { return each([=](int) { return x; }); }
inline Vec load(const float* p) { return each([=](int i) { return p[i]; }); }
inline Vec load(const bf16* p) { return each([=](int i) { return widen(p[i]); }); }
inline Vec load(const int8_t* p) { return each([=](int i) { return static_cast<float>(p[i]); }); }
inline void store(float* p, Vec x) { std::memcpy(p, x.lane, sizeof x.lane); }
inline void store(bf16* p, Vec x) {
  for (int i = 0; i < kLanes; ++i) p[i] = narrow(x.lane[i]);
}
inline Vec through_bf16(Vec x) { return each([&](int i) { return widen(narrow(x.lane[i])); }); }
inline Vec fma(Vec a, Vec b, Vec c) { return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; }); }
inline Vec add(Vec a, Vec b) { return each([&](int i) { return a.lane[i] + b.lane[i]; }); }
inline Vec sub(Vec a, Vec b) { return each([&](int i) { return a.lane[i] - b.lane[i]; }); }
inline Vec mul(Vec a, Vec b) { return each([&](int i) { return a.lane[i] * b.lane[i]; }); }
inline Vec div(Vec a, Vec b) { return each([&](int i) { return a.lane[i] / b.lane[i]; }); }
inline Vec max(Vec a, Vec b) { return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; }); }
inline Vec min(Vec a, Vec b) { return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; }); }
inline Vec nearest(Vec a) { return each([&](int i) { return std::nearbyint(a.lane[i]); }); }
inline Vec load_even(const bf16* p) {
  bf16 pairs[2 * kLanes];
  std::memcpy(pairs, p, sizeof pairs);
  return each([&](int i) { return widen(pairs[2 * i]); });
}
inline Vec load_odd(const bf16* p) {
  bf16 pairs[2 * kLanes];
  std::memcpy(pairs, p, sizeof pairs);
  return each([&](int i) { return widen(pairs[2 * i + 1]); });
}
inline Vec even_of(Vec pairs) { return load_even(reinterpret_cast<const bf16*>(pairs.lane)); }
inline Vec odd_of(Vec pairs) { return load_odd(reinterpret_cast<const bf16*>(pairs.lane)); }
inline Vec scaled_by_power(Vec a, Vec n) {
  return each([&](int i) {
    const uint32_t bits = n.lane[i] == n.lane[i] ? static_cast<uint32_t>(static_cast<int>(n.lane[i]) + 127) << 23 : 0;
    float power;
    std::memcpy(&power, &bits, 4);
    return a.lane[i] * power;
  });
}
inline void spill(float* p, Vec x) { std::memcpy(p, x.lane, sizeof x.lane); }
inline void put_whole(int16_t* p, Vec x) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int16_t>(x.lane[i]);
}
#endif

// Lanes are added in halves: i and i + n/2, then i and i + n/4, ...
inline float sum(Vec x) {
  float lane[kLanes];
  spill(lane, x);
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

#if defined(__AVX2__) && defined(__FMA__)
// Lanes i and i + 4, after i and i + 8 where there are so many.
inline __m128 quarter(__m256 x) { return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)); }
#if defined(__AVX512DQ__)
inline __m128 quarter(__m512 x) {
  return quarter(_mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)));
}
#endif
// sums[i] = sum(x[i]) for four vectors.
inline void sum_four(const Vec* x, float* sums) {
  const __m128 a = quarter(x[0]), b = quarter(x[1]), c = quarter(x[2]), d = quarter(x[3]);
  const __m128 ab = _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
  const __m128 cd = _mm_add_ps(_mm_movelh_ps(c, d), _mm_movehl_ps(d, c));
  _mm_storeu_ps(sums, _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd)));
}
#else
inline void sum_four(const Vec* x, float* sums) {
  for (int i = 0; i < 4; ++i) sums[i] = sum(x[i]);
}
#endif

// Asks for a line of memory to be brought near; the address need not be anybody's.
inline void prefetch(uintptr_t address) { __builtin_prefetch(reinterpret_cast<const void*>(address)); }
// The same, but not nearer than the second cache.
inline void prefetch_second(uintptr_t address) { __builtin_prefetch(reinterpret_cast<const void*>(address), 0, 2); }

// A vector whose first `count` lanes are read and whose others are 0.
template <class T>
inline Vec load_some(const T* p, int64_t count) {
  T padded[kLanes] = {};
  std::memcpy(padded, p, count * sizeof(T));
  return load(padded);
}
template <class T>
inline void store_some(T* p, Vec x, int64_t count) {
  T padded[kLanes];
  store(padded, x);
  std::memcpy(p, padded, count * sizeof(T));
}

// Whether every lane is one of low ... high; NaN is not.
inline bool all_within(Vec x, float low, float high) {
#if defined(__AVX512F__)
  return _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(x, all(low), _CMP_GE_OQ), x, all(high), _CMP_LE_OQ) == 0xffff;
#elif defined(__AVX2__) && defined(__FMA__)
  const Vec inside = _mm256_and_ps(_mm256_cmp_ps(x, all(low), _CMP_GE_OQ), _mm256_cmp_ps(x, all(high), _CMP_LE_OQ));
  return _mm256_movemask_ps(inside) == 0xff;
#else
  bool inside = true;
  for (int i = 0; i < kLanes; ++i) inside &= x.lane[i] >= low && x.lane[i] <= high;
  return inside;
#endif
}

// e^x to about 2 units in the last place: 2^n * e^r with |r| <= ln(2) / 2, a polynomial of degree 6 for e^r (the
// coefficients of Cephes' expf).  Below -87.3 it is 0; above 88.3 infinity; NaN stays NaN.
//
// Of several vectors side by side, none of which waits for another; x within the bounds.
template <int kCount>
inline void exp_within(const Vec (&x)[kCount], Vec (&y)[kCount]) {
  const auto each_of = [](auto f) __attribute__((always_inline)) {
    GTP_UNROLL
    for (int i = 0; i < kCount; ++i) f(i);
  };
  Vec n[kCount], r[kCount];
  each_of([&](int i) { n[i] = nearest(mul(x[i], all(1.44269504088896341f))); });
  each_of([&](int i) { r[i] = fma(n[i], all(-0.693359375f), x[i]); });
  each_of([&](int i) { r[i] = fma(n[i], all(2.12194440e-4f), r[i]); });
  each_of([&](int i) { y[i] = fma(all(1.9875691500e-4f), r[i], all(1.3981999507e-3f)); });
  each_of([&](int i) { y[i] = fma(y[i], r[i], all(8.3334519073e-3f)); });
  each_of([&](int i) { y[i] = fma(y[i], r[i], all(4.1665795894e-2f)); });
  each_of([&](int i) { y[i] = fma(y[i], r[i], all(1.6666665459e-1f)); });
  each_of([&](int i) { y[i] = fma(y[i], r[i], all(5.0000001201e-1f)); });
  each_of([&](int i) { y[i] = add(fma(mul(r[i], r[i]), y[i], r[i]), all(1.0f)); });
  each_of([&](int i) { y[i] = scaled_by_power(y[i], n[i]); });
}

inline Vec exp(Vec x) {
  const Vec inside[1] = {min(max(x, all(-87.33654f)), all(88.37626f))};
  Vec found[1];
  exp_within(inside, found);
  const Vec y = found[0];
  if (all_within(x, -87.33654f, 88.37626f)) return y;
  float in[kLanes], out[kLanes];
  spill(in, x);
  spill(out, y);
  for (int i = 0; i < kLanes; ++i) {
    if (in[i] != in[i]) out[i] = in[i];
    if (in[i] < -87.33654f) out[i] = 0.0f;
    if (in[i] > 88.37626f) out[i] = std::numeric_limits<float>::infinity();
  }
  return load(out);
}

// x / (1 + e^-x)
inline Vec silu(Vec x) { return div(x, add(all(1.0f), exp(sub(zero(), x)))); }
template <int kCount>
inline void silu(Vec (&x)[kCount]) {
  bool within = true;
  Vec negative[kCount], power[kCount];
  GTP_UNROLL
  for (int i = 0; i < kCount; ++i) {
    negative[i] = sub(zero(), x[i]);
    within &= all_within(negative[i], -87.33654f, 88.37626f);
  }
  if (within) exp_within(negative, power);
  GTP_UNROLL
  for (int i = 0; i < kCount; ++i) x[i] = within ? div(x[i], add(all(1.0f), power[i])) : silu(x[i]);
}
inline Vec sigmoid(Vec x) { return div(all(1.0f), add(all(1.0f), exp(sub(zero(), x)))); }

}  // namespace GTP_ISA
}  // namespace gtp
