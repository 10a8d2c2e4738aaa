// AVX-512 for a machine without it: the native CPU ops are compiled with this header in front (emulate_avx512.py), and
// SIMDe computes what their intrinsics say.  Slow, and bit for bit what the instructions give, but for the order inside
// vdpbf16ps, which is the processor's own affair.
#pragma once
#include <cmath>
#include <cstring>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

// What SIMDe 0.7.4 lacks, or names wrongly.

inline simde__m512i emulated_cvtepu16_epi32(simde__m256i a) {
  const simde__m256i_private from = simde__m256i_to_private(a);
  simde__m512i_private to;
  for (int i = 0; i < 16; ++i) to.u32[i] = from.u16[i];
  return simde__m512i_from_private(to);
}

inline simde__m256i emulated_cvtepi32_epi16(simde__m512i a) {
  const simde__m512i_private from = simde__m512i_to_private(a);
  simde__m256i_private to;
  for (int i = 0; i < 16; ++i) to.i16[i] = static_cast<int16_t>(from.i32[i]);
  return simde__m256i_from_private(to);
}

inline simde__m512i emulated_cvtps_epi32(simde__m512 a) {
  const simde__m512_private from = simde__m512_to_private(a);
  simde__m512i_private to;
  for (int i = 0; i < 16; ++i) to.i32[i] = static_cast<int32_t>(std::nearbyint(from.f32[i]));
  return simde__m512i_from_private(to);
}

inline simde__m512 emulated_cvtepi32_ps(simde__m512i a) {
  const simde__m512i_private from = simde__m512i_to_private(a);
  simde__m512_private to;
  for (int i = 0; i < 16; ++i) to.f32[i] = static_cast<float>(from.i32[i]);
  return simde__m512_from_private(to);
}

inline simde__m256 emulated_extractf32x8_ps(simde__m512 a, int half) {
  const simde__m512_private from = simde__m512_to_private(a);
  simde__m256_private to;
  for (int i = 0; i < 8; ++i) to.f32[i] = from.f32[8 * half + i];
  return simde__m256_from_private(to);
}

inline simde__mmask16 emulated_cmp_ps_mask(simde__m512 a, simde__m512 b, int how) {
  const simde__m512_private x = simde__m512_to_private(a), y = simde__m512_to_private(b);
  simde__mmask16 mask = 0;
  for (int i = 0; i < 16; ++i) {
    const float p = x.f32[i], q = y.f32[i];
    bool holds = false;
    switch (how) {
      case _CMP_LT_OQ: holds = p < q; break;
      case _CMP_LE_OQ: holds = p <= q; break;
      case _CMP_GE_OQ: holds = p >= q; break;
      case _CMP_UNORD_Q: holds = p != p || q != q; break;
      default: __builtin_trap();  // add the comparison
    }
    if (holds) mask |= static_cast<simde__mmask16>(1u << i);
  }
  return mask;
}

inline simde__m512 emulated_shuffle_f32x4(simde__m512 a, simde__m512 b, int how) {
  const simde__m512_private x = simde__m512_to_private(a), y = simde__m512_to_private(b);
  simde__m512_private to;
  for (int i = 0; i < 16; ++i) {
    const int quarter = how >> (i / 4 * 2) & 3;
    to.f32[i] = (i < 8 ? x : y).f32[4 * quarter + i % 4];
  }
  return simde__m512_from_private(to);
}

inline simde__m512 emulated_scalef_ps(simde__m512 a, simde__m512 b) {
  const simde__m512_private x = simde__m512_to_private(a), y = simde__m512_to_private(b);
  simde__m512_private to;
  for (int i = 0; i < 16; ++i) to.f32[i] = x.f32[i] * std::exp2(std::floor(y.f32[i]));
  return simde__m512_from_private(to);
}

// To the nearest, ties to even; what is too small for a normal number is 0.
inline simde__m512bh emulated_cvtne2ps_pbh(simde__m512 high, simde__m512 low) {
  const simde__m512_private halves[2] = {simde__m512_to_private(low), simde__m512_to_private(high)};
  simde__m512i_private to;
  for (int i = 0; i < 32; ++i) {
    const float from = halves[i / 16].f32[i % 16];
    uint32_t bits;
    std::memcpy(&bits, &from, 4);
    if (from != from) bits |= 0x400000;
    else bits = std::fpclassify(from) == FP_SUBNORMAL ? 0 : bits + 0x7fff + (bits >> 16 & 1);
    to.u16[i] = static_cast<uint16_t>(bits >> 16);
  }
  const simde__m512i whole = simde__m512i_from_private(to);
  simde__m512bh pairs;
  std::memcpy(&pairs, &whole, sizeof pairs);
  return pairs;
}

inline void emulated_mask_storeu_ps(void* to, unsigned mask, simde__m128 a) {
  const simde__m128_private from = simde__m128_to_private(a);
  for (int i = 0; i < 4; ++i)
    if (mask >> i & 1) std::memcpy(static_cast<float*>(to) + i, &from.f32[i], 4);
}

#undef _mm512_madd_epi16
#undef _mm512_shuffle_f32x4
#undef _mm512_scalef_ps
#undef _mm_mask_storeu_ps
#undef _mm512_cvtne2ps_pbh
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepi32_epi16
#undef _mm512_cvtps_epi32
#undef _mm512_cvtepi32_ps
#undef _mm512_extractf32x8_ps
#undef _mm512_cmp_ps_mask
#undef _mm512_mask_cmp_ps_mask
#define _mm512_shuffle_f32x4(a, b, how) emulated_shuffle_f32x4(a, b, how)
#define _mm_mask_storeu_ps(to, mask, a) emulated_mask_storeu_ps(to, mask, a)
#define _mm512_scalef_ps(a, b) emulated_scalef_ps(a, b)
#define _mm512_cvtne2ps_pbh(a, b) emulated_cvtne2ps_pbh(a, b)
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)
#define _mm512_cvtepu16_epi32(a) emulated_cvtepu16_epi32(a)
#define _mm512_cvtepi32_epi16(a) emulated_cvtepi32_epi16(a)
#define _mm512_cvtps_epi32(a) emulated_cvtps_epi32(a)
#define _mm512_cvtepi32_ps(a) emulated_cvtepi32_ps(a)
#define _mm512_extractf32x8_ps(a, half) emulated_extractf32x8_ps(a, half)
#define _mm512_cmp_ps_mask(a, b, how) emulated_cmp_ps_mask(a, b, how)
#define _mm512_mask_cmp_ps_mask(mask, a, b, how) \
  static_cast<simde__mmask16>((mask) & emulated_cmp_ps_mask(a, b, how))

// The sources choose by these; set after SIMDe has looked at what the compiler really has.
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VL__ 1
#define __AVX512DQ__ 1
#ifdef EMULATE_BF16
#define __AVX512BF16__ 1
#endif
