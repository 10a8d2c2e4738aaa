// What attention needs of vectors: folds, blocks of keys turned so that lanes are keys, and the exponential of numbers
// that are at most 0.
#pragma once

namespace gtp {
namespace GTP_ISA {

#if defined(__AVX2__) && defined(__FMA__)
// The lanes in halves, in the order of sum(): i with i + n/2, then i with i + n/4, ...
template <class F>
inline float fold(__m256 x, F f) {
  const __m128 half = f(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 quarter = f(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(f(quarter, _mm_movehdup_ps(quarter)));
}
inline float fold_sum(__m256 x) {
  return fold(x, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
}
inline float fold_max(__m256 x) {
  return fold(x, [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
}
#endif

// any_above: whether a lane is above a limit.
//
// Four columns of 32 bits of kLanes rows: quad() puts rows i, i + 4, ... beside one another, 128 bits of each, so that
// turning needs no step across those 128 bits.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
inline float fold_sum(Vec x) {
  return fold_sum(_mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)));
}
inline float fold_max(Vec x) {
  return fold_max(_mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)));
}
inline bool any_above(Vec x, float limit) { return _mm512_cmp_ps_mask(x, all(limit), _CMP_GT_OQ) != 0; }
inline Vec quad(const uint8_t* const* rows, int64_t offset) {
  const auto at = [&](int i) { return _mm_loadu_ps(reinterpret_cast<const float*>(rows[i] + offset)); };
  Vec x = _mm512_castps128_ps512(at(0));
  x = _mm512_insertf32x4(x, at(4), 1);
  x = _mm512_insertf32x4(x, at(8), 2);
  return _mm512_insertf32x4(x, at(12), 3);
}
inline void turn(Vec (&x)[4]) {
  const Vec a = _mm512_unpacklo_ps(x[0], x[1]), b = _mm512_unpackhi_ps(x[0], x[1]);
  const Vec c = _mm512_unpacklo_ps(x[2], x[3]), d = _mm512_unpackhi_ps(x[2], x[3]);
  x[0] = _mm512_shuffle_ps(a, c, 0x44), x[1] = _mm512_shuffle_ps(a, c, 0xee);
  x[2] = _mm512_shuffle_ps(b, d, 0x44), x[3] = _mm512_shuffle_ps(b, d, 0xee);
}
// y, but 0 where x < limit
inline Vec zero_where_below(Vec y, Vec x, Vec limit) {
  return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), zero());
}
#elif defined(__AVX2__) && defined(__FMA__)
inline bool any_above(Vec x, float limit) { return _mm256_movemask_ps(_mm256_cmp_ps(x, all(limit), _CMP_GT_OQ)) != 0; }
inline Vec quad(const uint8_t* const* rows, int64_t offset) {
  const auto at = [&](int i) { return _mm_loadu_ps(reinterpret_cast<const float*>(rows[i] + offset)); };
  return _mm256_insertf128_ps(_mm256_castps128_ps256(at(0)), at(4), 1);
}
inline void turn(Vec (&x)[4]) {
  const Vec a = _mm256_unpacklo_ps(x[0], x[1]), b = _mm256_unpackhi_ps(x[0], x[1]);
  const Vec c = _mm256_unpacklo_ps(x[2], x[3]), d = _mm256_unpackhi_ps(x[2], x[3]);
  x[0] = _mm256_shuffle_ps(a, c, 0x44), x[1] = _mm256_shuffle_ps(a, c, 0xee);
  x[2] = _mm256_shuffle_ps(b, d, 0x44), x[3] = _mm256_shuffle_ps(b, d, 0xee);
}
// y, but 0 where x < limit
inline Vec zero_where_below(Vec y, Vec x, Vec limit) {
  return _mm256_andnot_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ), y);
}
#else
inline float fold_sum(Vec x) { return sum(x); }
inline float fold_max(Vec x) {
  float largest = x.lane[0];
  for (int i = 1; i < kLanes; ++i) largest = x.lane[i] > largest ? x.lane[i] : largest;
  return largest;
}
inline bool any_above(Vec x, float limit) {
  bool found = false;
  for (int i = 0; i < kLanes; ++i) found |= x.lane[i] > limit;
  return found;
}
inline Vec quad(const uint8_t* const* rows, int64_t offset) {
  Vec x;
  for (int part = 0; part < kLanes / 4; ++part) std::memcpy(x.lane + 4 * part, rows[4 * part] + offset, 16);
  return x;
}
inline void turn(Vec (&x)[4]) {
  for (int part = 0; part < kLanes; part += 4)
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < i; ++j) std::swap(x[i].lane[part + j], x[j].lane[part + i]);
}
// y, but 0 where x < limit
inline Vec zero_where_below(Vec y, Vec x, Vec limit) {
  return each([&](int i) { return x.lane[i] < limit.lane[i] ? 0.0f : y.lane[i]; });
}
#endif

// y[i] = e^x(i) for x(i) below 88, otherwise as exp(): 0 below -87.3, NaN for NaN.  Several at a time, step by step: one
// alone would wait for each of its steps.
template <int N, class F>
inline void exp_of_smalls(F x, Vec (&y)[N]) {
  const Vec lowest = all(-87.33654f);
  Vec n[N], r[N];
  const auto each_one = [](auto f) {
    GTP_UNROLL
    for (int i = 0; i < N; ++i) f(i);
  };
  each_one([&](int i) { r[i] = max(lowest, x(i)); });  // the second where one is NaN
  each_one([&](int i) { n[i] = nearest(mul(r[i], all(1.44269504088896341f))); });
  each_one([&](int i) { r[i] = fma(n[i], all(-0.693359375f), r[i]); });
  each_one([&](int i) { r[i] = fma(n[i], all(2.12194440e-4f), r[i]); });
  each_one([&](int i) { y[i] = fma(all(1.9875691500e-4f), r[i], all(1.3981999507e-3f)); });
  each_one([&](int i) { y[i] = fma(y[i], r[i], all(8.3334519073e-3f)); });
  each_one([&](int i) { y[i] = fma(y[i], r[i], all(4.1665795894e-2f)); });
  each_one([&](int i) { y[i] = fma(y[i], r[i], all(1.6666665459e-1f)); });
  each_one([&](int i) { y[i] = fma(y[i], r[i], all(5.0000001201e-1f)); });
  each_one([&](int i) { y[i] = add(fma(mul(r[i], r[i]), y[i], r[i]), all(1.0f)); });
  each_one([&](int i) { y[i] = zero_where_below(scaled_by_power(y[i], n[i]), x(i), lowest); });
}
inline Vec exp_of_small(Vec x) {
  Vec y[1];
  exp_of_smalls([x](int) { return x; }, y);
  return y[0];
}
// A block of at most `count` rows of `bytes` each, turned: put(word, row, x) is given the word-th 32 bits of the kLanes
// rows from `row` on.  Rows past `count`, up to the next kLanes, and what is past `bytes`, up to the next 16, is 0.
template <class F>
inline void turn_rows(const uint8_t* const* rows, int64_t count, int64_t bytes, F put) {
  alignas(64) static const uint8_t nothing[16] = {};
  const int64_t whole = bytes / 16 * 16;
  for (int64_t first = 0; first < count; first += kLanes) {
    const uint8_t* mine[kLanes];
    const bool all_there = count - first >= kLanes;
    if (all_there) {
      for (int i = 0; i < kLanes; ++i) mine[i] = rows[first + i];
    }
    uint8_t kept[kLanes][16];
    for (int64_t at = 0; at < bytes; at += 16) {
      Vec x[4];
      if (all_there && at < whole) {
        for (int i = 0; i < 4; ++i) x[i] = quad(mine + i, at);
      } else {
        const uint8_t* edge[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          edge[i] = nothing;
          if (first + i >= count) continue;
          std::memset(kept[i], 0, 16);
          std::memcpy(kept[i], rows[first + i] + at, std::min<int64_t>(16, bytes - at));
          edge[i] = kept[i];
        }
        for (int i = 0; i < 4; ++i) x[i] = quad(edge + i, 0);
      }
      turn(x);
      for (int i = 0; i < 4; ++i) put(at / 4 + i, first, x[i]);
    }
  }
}

}  // namespace GTP_ISA
}  // namespace gtp
