// Products of a block of rows with weights as they lie, for vectors of 16 lanes: tiles of 4 by 4 outputs, whose sums take
// half of the registers and are added up together.
//
// Memory is the narrow place.  One or two rows are done with a line of weights before the next one comes: they read the
// weights as one stream, which the processor runs ahead of by itself.  More rows use each weight several times and take
// four rows of weights at once, which no processor follows: what the next ones need is asked for, a line or two in each
// step of the first tiles, into the second cache.
#pragma once

#include "linear_order.h"

namespace gtp {
namespace GTP_ISA {

constexpr int kTileRows = 4, kTileColumns = 4;
constexpr int64_t kLead = 4 << 10;              // bytes of a piece's weights that are asked for before it begins
constexpr int kStreamRows = 2;                  // rows that read weights as one stream
constexpr int64_t kNearInputs = 20 << 10;       // bytes of arranged rows that stay in the first cache beside weights
constexpr int64_t kGroupsAhead = 2;             // groups of kTileColumns rows of weights between use and fetch
constexpr int64_t kLongGroup = 64 << 10;        // bytes of a group that are four long streams
constexpr int64_t kPieceStep = 16;              // outputs of a piece are a multiple of it: whole tiles and vectors

// Outputs of a piece at most, and how many pieces each thread should find: few where they are streams, each of which
// begins slowly.
struct PieceSize {
  int64_t most_columns, each_thread;
};
constexpr PieceSize piece_size(int64_t rows) { return rows <= kStreamRows ? PieceSize{768, 2} : PieceSize{192, 8}; }

// Lane 4 * m + n = the sum of the lanes of x[m][n], in the order of sum().
inline __attribute__((always_inline)) Vec sum_sixteen(const Vec (&x)[4][4]) {
  Vec quarters[4];
  GTP_UNROLL
  for (int n = 0; n < 4; ++n) {
    const auto halves = [&](int m) __attribute__((always_inline)) {
      return add(_mm512_shuffle_f32x4(x[m][n], x[m + 1][n], 0x44), _mm512_shuffle_f32x4(x[m][n], x[m + 1][n], 0xee));
    };
    const Vec a = halves(0), b = halves(2);
    quarters[n] = add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  const auto pairs = [&](int n) __attribute__((always_inline)) {
    const __m512d a = _mm512_castps_pd(quarters[n]), b = _mm512_castps_pd(quarters[n + 1]);
    return add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  };
  const Vec a = pairs(0), b = pairs(2);
  return add(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

// y[m * y_row + n] = the sum of the lanes of sums[m][n].
template <int kRows, int kColumns>
inline __attribute__((always_inline)) void put_sums(const Vec (&sums)[kRows][kColumns], float* y, int64_t y_row) {
  Vec all_sums[4][4];
  GTP_UNROLL
  for (int m = 0; m < 4; ++m)
    GTP_UNROLL
    for (int n = 0; n < 4; ++n) all_sums[m][n] = m < kRows && n < kColumns ? sums[m][n] : zero();
  const Vec found = sum_sixteen(all_sums);
  const __m128 row[4] = {_mm512_castps512_ps128(found), _mm512_extractf32x4_ps(found, 1),
                         _mm512_extractf32x4_ps(found, 2), _mm512_extractf32x4_ps(found, 3)};
  GTP_UNROLL
  for (int m = 0; m < kRows; ++m) _mm_mask_storeu_ps(y + m * y_row, (1 << kColumns) - 1, row[m]);
}

// Weights that are fetched while others are used, so many bytes in each step of a tile.  They may lie past the end of
// anything: a fetch of nothing is no fault.
struct Ahead {
  uintptr_t address;
  int64_t bytes;
  void step() {
    for (int64_t byte = 0; byte < bytes; byte += 64) prefetch_second(address + byte);
    address += bytes;
  }
};

// sums[m][n] += the products of x[m * x_row ...] and w[n * w_row ...] from element `at` to `stop`.
// kStream: one row of weights after the other, as they lie, else all at once.
template <class O, int kRows, int kColumns, bool kStream, bool kFetch, class Sums>
inline __attribute__((always_inline)) void add_products(const typename O::Packed* x, int64_t x_row,
                                                        const typename O::Weight* w, int64_t w_row, int64_t at,
                                                        int64_t stop, Sums (&sums)[kRows][kColumns], Ahead& ahead) {
  using W = typename O::Weight;
  const auto add_half = [&](auto half, int64_t place, const W* weights, int64_t weights_row, int first,
                            auto count) __attribute__((always_inline)) {
    constexpr int kHalf = decltype(half)::value, kCount = decltype(count)::value;
    typename O::Term weight[kCount];
    GTP_UNROLL
    for (int n = 0; n < kCount; ++n) weight[n] = O::template weights<kHalf>(weights + n * weights_row);
    GTP_UNROLL
    for (int m = 0; m < kRows; ++m) {
      const auto term = O::template inputs<kHalf>(x + m * x_row + place);
      GTP_UNROLL
      for (int n = 0; n < kCount; ++n) sums[m][first + n] = O::add(term, weight[n], sums[m][first + n]);
    }
  };
  const auto step = [&](int64_t place, const W* weights, int64_t weights_row, int first,
                        auto count) __attribute__((always_inline)) {
    add_half(std::integral_constant<int, 0>(), place, weights, weights_row, first, count);
    add_half(std::integral_constant<int, 1>(), place, weights, weights_row, first, count);
  };
  const int64_t whole = at + (stop - at) / O::kStep * O::kStep;
  if constexpr (kStream) {
    GTP_UNROLL
    for (int n = 0; n < kColumns; ++n)
      for (int64_t place = at; place < whole; place += O::kStep)
        step(place, w + n * w_row + place, 0, n, std::integral_constant<int, 1>());
  } else {
    for (int64_t place = at; place < whole; place += O::kStep) {
      if constexpr (kFetch) ahead.step();
      step(place, w + place, w_row, 0, std::integral_constant<int, kColumns>());
    }
  }
  if (whole < stop) {
    W padded[kColumns * O::kStep] = {};
    for (int n = 0; n < kColumns; ++n)
      std::memcpy(padded + n * O::kStep, w + n * w_row + whole, (stop - whole) * sizeof(W));
    step(whole, padded, O::kStep, 0, std::integral_constant<int, kColumns>());
  }
}

// y[m * y_row + n] = the product of x[m * x_row ...], an arranged row, and w[n * w_row ...] of `size` elements.
template <class O, int kRows, int kColumns, bool kFetch>
__attribute__((noinline)) void tile(const typename O::Packed* x, int64_t x_row, const typename O::Weight* w,
                                    int64_t w_row, int64_t size, float* y, int64_t y_row, Ahead ahead) {
  constexpr bool kStream = kRows <= kStreamRows && !kFetch;
  Vec sums[kRows][kColumns];
  GTP_UNROLL
  for (int m = 0; m < kRows; ++m)
    GTP_UNROLL
    for (int n = 0; n < kColumns; ++n) sums[m][n] = zero();
  if constexpr (kIsWhole<O>) {
    for (int64_t block = 0; block * O::kBlock < size; ++block) {
      typename O::Term whole[kRows][kColumns];
      GTP_UNROLL
      for (int m = 0; m < kRows; ++m)
        GTP_UNROLL
        for (int n = 0; n < kColumns; ++n) whole[m][n] = O::none();
      add_products<O, kRows, kColumns, kStream, kFetch>(x, x_row, w, w_row, block * O::kBlock,
                                                        std::min(size, (block + 1) * O::kBlock), whole, ahead);
      GTP_UNROLL
      for (int m = 0; m < kRows; ++m) {
        const Vec scale = all(O::scales(x + m * x_row, size)[block]);
        GTP_UNROLL
        for (int n = 0; n < kColumns; ++n) sums[m][n] = fma(from_whole(whole[m][n]), scale, sums[m][n]);
      }
    }
  } else {
    add_products<O, kRows, kColumns, kStream, kFetch>(x, x_row, w, w_row, 0, size, sums, ahead);
  }
  put_sums(sums, y, y_row);
}

// f(number, a constant), of 1 to kMost.
template <int kMost, class F>
inline void with_constant(int number, F f) {
  if constexpr (kMost > 1)
    if (number < kMost) return with_constant<kMost - 1>(number, f);
  f(std::integral_constant<int, kMost>());
}

// How many of `left` rows the next tile takes: one left over alone would use registers badly.
inline int tile_rows(int64_t left) {
  if (left == kTileRows + 1) return 3;
  return static_cast<int>(std::min<int64_t>(left, kTileRows));
}

// The products of `rows` arranged rows with `columns` rows of weights, which are read as they lie.
// following: weights that are wanted next.
template <class O>
inline void multiply_rows(const typename O::Packed* x, int64_t x_row, int64_t rows, const typename O::Weight* w,
                          int64_t w_row, int64_t columns, int64_t size, float* y, int64_t y_row,
                          const typename O::Weight* following) {
  constexpr int64_t kBytes = sizeof(typename O::Weight);
  const int64_t near = kNearInputs / std::max<int64_t>(size * sizeof(typename O::Packed) * kTileRows, 1);
  const int64_t block = std::max<int64_t>(near, 2) * kTileRows;
  for (int64_t top = 0; top < rows; top += block) {
    const int64_t high = std::min(block, rows - top);
    const int64_t shares = high >= 4 * kTileRows ? 4 : high >= 2 * kTileRows ? 2 : 1;  // tiles that fetch
    for (int64_t n = 0; n < columns; n += kTileColumns) {
      const int width = static_cast<int>(std::min<int64_t>(columns - n, kTileColumns));
      const int64_t group = kTileColumns * w_row * kBytes, later = n + kGroupsAhead * kTileColumns;
      const auto* wanted = later < columns ? w + later * w_row : following + (later - columns) * w_row;
      Ahead ahead{reinterpret_cast<uintptr_t>(wanted), kTileColumns * O::kStep * kBytes / shares};
      // Later blocks find the weights where the first one left them.
      const bool fetches = rows > kStreamRows && top == 0 && group <= kLongGroup;
      for (int64_t m = 0; m < high;) {
        const int count = tile_rows(high - m);
        const bool fetching = fetches && m < shares * kTileRows;
        with_constant<kTileRows>(count, [&](auto some_rows) {
          with_constant<kTileColumns>(width, [&](auto some_columns) {
            (fetching ? tile<O, some_rows, some_columns, true> : tile<O, some_rows, some_columns, false>)(
                x + (top + m) * x_row, x_row, w + n * w_row, w_row, size, y + (top + m) * y_row + n, y_row, ahead);
          });
        });
        if (fetching) ahead.address += group / shares;
        m += count;
      }
    }
  }
}

}  // namespace GTP_ISA
}  // namespace gtp
