// Matrices as int8 with one scale for each row (layers/int8.py, whose torch twin gives the same bits): a row is looked
// at twice, from memory and then from the first cache.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

namespace gtp {
namespace {

// Added to a number below 2^22 it leaves, in the last bits, the nearest whole one, ties to even.
constexpr float kWhole = 12582912.0f;
constexpr int32_t kWholeBits = 0x4B400000;

#define GTP_INLINE inline __attribute__((always_inline))

GTP_INLINE float float_of(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

GTP_INLINE int32_t bits_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// Magnitudes compare as whole numbers do.
GTP_INLINE float largest_of(const float* row, int64_t size) {
  int32_t most = 0;
  for (int64_t i = 0; i < size; ++i) most = std::max(most, bits_of(row[i]) & 0x7FFFFFFF);
  return float_of(most);
}

GTP_INLINE float largest_of(const uint16_t* row, int64_t size) {
  int16_t most = 0;
  for (int64_t i = 0; i < size; ++i) most = std::max(most, static_cast<int16_t>(row[i] & 0x7FFF));
  return float_of(static_cast<int32_t>(most) << 16);
}

GTP_INLINE float wide(float x) { return x; }
GTP_INLINE float wide(uint16_t x) { return float_of(static_cast<int32_t>(static_cast<uint32_t>(x) << 16)); }

template <class T>
GTP_INLINE void quantise_rows(const T* matrix, int64_t rows, int64_t columns, int64_t stride, int8_t* out,
                              float* scales) {
  for (int64_t r = 0; r < rows; ++r, matrix += stride, out += columns) {
    const float scale = largest_of(matrix, columns) * (1.0f / 127);
    // What is below has no inverse.
    scales[r] = scale >= std::numeric_limits<float>::min() ? scale : 0.0f;
    const float inverse = scales[r] > 0 ? 1.0f / scales[r] : 0.0f;
    for (int64_t i = 0; i < columns; ++i) {
      const int32_t whole = bits_of(wide(matrix[i]) * inverse + kWhole) - kWholeBits;
      out[i] = static_cast<int8_t>(std::min(std::max(whole, -127), 127));
    }
  }
}

using Rows = void (*)(const void*, int64_t, int64_t, int64_t, int8_t*, float*);

template <class T>
void plain(const void* matrix, int64_t rows, int64_t columns, int64_t stride, int8_t* out, float* scales) {
  quantise_rows(static_cast<const T*>(matrix), rows, columns, stride, out, scales);
}

#if defined(__x86_64__)
template <class T>
__attribute__((target("avx2"))) void wider(const void* matrix, int64_t rows, int64_t columns, int64_t stride,
                                           int8_t* out, float* scales) {
  quantise_rows(static_cast<const T*>(matrix), rows, columns, stride, out, scales);
}
#endif

template <class T>
Rows rows_here() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return wider<T>;
#endif
  return plain<T>;
}

}  // namespace
}  // namespace gtp

using namespace gtp;

// matrix: [rows, columns], rows `stride` elements apart, bf16 where `is_bf16`, else float32, all finite; out: [rows,
// columns]; scales: [rows], 0 for a row of zeros.
extern "C" __attribute__((visibility("default"))) void gtp_quantise(const void* matrix, int64_t is_bf16, int64_t rows,
                                                                    int64_t columns, int64_t stride, int8_t* out,
                                                                    float* scales) {
  (is_bf16 ? rows_here<uint16_t>() : rows_here<float>())(matrix, rows, columns, stride, out, scales);
}
