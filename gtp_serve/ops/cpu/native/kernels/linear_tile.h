// A tile of outputs: a few rows of activations by a few rows of weights, their running sums in registers.
#pragma once

#include "linear_order.h"

namespace gtp {
namespace GTP_ISA {

constexpr int64_t kLead = 4 << 10;            // how far the stream of weights runs ahead, if that may be chosen
constexpr int64_t kNear = 16 << 10;           // what may be fetched ahead of its use into the first cache
constexpr int64_t kBehind = 512;              // bytes of the next rows that one row's stream leaves to the processor

constexpr int64_t kPieceStep = 24;            // outputs of a piece are a multiple of it: whole tiles and vectors
// Outputs of a piece at most, and how many pieces each thread should find.
struct PieceSize {
  int64_t most_columns, each_thread;
};
constexpr PieceSize piece_size(int64_t) { return {96, 8}; }

// As many as registers hold the sums of, and what is multiplied.
#if defined(__AVX2__)
constexpr int kTileRows = 4, kTileColumns = 3;
#else
constexpr int kTileRows = 2, kTileColumns = 1;
#endif
// Columns of a tile of one row: so many sums wait for nobody's last product.
constexpr int kRowColumns = 4;

#if defined(__AVX2__) && defined(__FMA__)
template <class O, int kRows, int kColumns, int kFetch>
inline void whole_tile(const int16_t* x, int64_t x_row, const int8_t* w, int64_t w_row, int64_t size, float* y,
                       int64_t y_row, uintptr_t ahead);
#endif

// y[m * y_row + n] = the product of x[m * x_row ...], an arranged row, and w[n * w_row ...] of `size` elements.
// Meanwhile the rows of weights that begin at `ahead` are fetched, in the order in which they lie: memory is read as
// one stream, although several rows are in use at once.  kFetch: bytes of each of those weights, 0 to fetch none; it
// may reach past the end of anything, a fetch of nothing is no fault.
template <class O, int kRows, int kColumns, int kFetch>
inline void tile(const typename O::Packed* x, int64_t x_row, const typename O::Weight* w, int64_t w_row, int64_t size,
                 float* y, int64_t y_row, uintptr_t ahead) {
#if defined(__AVX2__) && defined(__FMA__)
  if constexpr (kIsWhole<O>) {
    whole_tile<O, kRows, kColumns, kFetch>(x, x_row, w, w_row, size, y, y_row, ahead);
    return;
  } else
#endif
  {
  using W = typename O::Weight;
  Vec sums[kRows][kColumns];
  GTP_UNROLL
  for (int m = 0; m < kRows; ++m)
    GTP_UNROLL
    for (int n = 0; n < kColumns; ++n) sums[m][n] = zero();
  const auto add_half = [&](auto half, const typename O::Packed* inputs, const W* weights, int64_t weights_row) {
    constexpr int kHalf = decltype(half)::value;
    typename O::Term weight[kColumns];
    GTP_UNROLL
    for (int n = 0; n < kColumns; ++n) weight[n] = O::template weights<kHalf>(weights + n * weights_row);
    GTP_UNROLL
    for (int m = 0; m < kRows; ++m) {
      const auto term = O::template inputs<kHalf>(inputs + m * x_row);
      GTP_UNROLL
      for (int n = 0; n < kColumns; ++n) sums[m][n] = O::add(term, weight[n], sums[m][n]);
    }
  };
  const auto step = [&](const typename O::Packed* inputs, const W* weights, int64_t weights_row) {
    add_half(std::integral_constant<int, 0>(), inputs, weights, weights_row);
    add_half(std::integral_constant<int, 1>(), inputs, weights, weights_row);
  };
  int64_t at = 0;
  for (; at + O::kStep <= size; at += O::kStep) {
    if constexpr (kFetch > 0) {
      constexpr int kBytes = kColumns * O::kStep * kFetch;
      GTP_UNROLL
      for (int byte = 0; byte < kBytes; byte += 64) prefetch(ahead + byte);
      ahead += kBytes;
    }
    step(x + at, w + at, w_row);
  }
  if (at < size) {
    W padded[kColumns * O::kStep] = {};
    for (int n = 0; n < kColumns; ++n) std::memcpy(padded + n * O::kStep, w + n * w_row + at, (size - at) * sizeof(W));
    step(x + at, padded, O::kStep);
  }
  constexpr int kCount = kRows * kColumns;
  Vec total[(kCount + 3) / 4 * 4];
  GTP_UNROLL
  for (int i = 0; i < (kCount + 3) / 4 * 4; ++i) total[i] = i < kCount ? sums[i / kColumns][i % kColumns] : zero();
  float products[(kCount + 3) / 4 * 4];
  GTP_UNROLL
  for (int i = 0; i < kCount; i += 4) sum_four(total + i, products + i);
  GTP_UNROLL
  for (int m = 0; m < kRows; ++m)
    GTP_UNROLL
    for (int n = 0; n < kColumns; ++n) y[m * y_row + n] = products[m * kColumns + n];
  }
}

#if defined(__AVX2__) && defined(__FMA__)
// The same of whole numbers.
template <class O, int kRows, int kColumns, int kFetch>
inline void whole_tile(const int16_t* x, int64_t x_row, const int8_t* w, int64_t w_row, int64_t size, float* y,
                       int64_t y_row, uintptr_t ahead) {
  constexpr int kCount = (kRows * kColumns + 3) / 4 * 4;
  Vec total[kCount];
  GTP_UNROLL
  for (int i = 0; i < kCount; ++i) total[i] = zero();
  for (int64_t block = 0; block * O::kBlock < size; ++block) {
    typename O::Term sums[kRows][kColumns];
    GTP_UNROLL
    for (int m = 0; m < kRows; ++m)
      GTP_UNROLL
      for (int n = 0; n < kColumns; ++n) sums[m][n] = O::none();
    const auto add_half = [&](auto half, const int16_t* inputs, const int8_t* weights, int64_t weights_row) {
      constexpr int kHalf = decltype(half)::value;
      typename O::Term weight[kColumns];
      GTP_UNROLL
      for (int n = 0; n < kColumns; ++n) weight[n] = O::template weights<kHalf>(weights + n * weights_row);
      GTP_UNROLL
      for (int m = 0; m < kRows; ++m) {
        const auto term = O::template inputs<kHalf>(inputs + m * x_row);
        GTP_UNROLL
        for (int n = 0; n < kColumns; ++n) sums[m][n] = O::add(term, weight[n], sums[m][n]);
      }
    };
    const auto step = [&](const int16_t* inputs, const int8_t* weights, int64_t weights_row) {
      add_half(std::integral_constant<int, 0>(), inputs, weights, weights_row);
      add_half(std::integral_constant<int, 1>(), inputs, weights, weights_row);
    };
    const int64_t stop = std::min(size, (block + 1) * O::kBlock);
    int64_t at = block * O::kBlock;
    for (; at + O::kStep <= stop; at += O::kStep) {
      if constexpr (kFetch > 0) {
        constexpr int kBytes = kColumns * O::kStep * kFetch;
        GTP_UNROLL
        for (int byte = 0; byte < kBytes; byte += 64) prefetch(ahead + byte);
        ahead += kBytes;
      }
      step(x + at, w + at, w_row);
    }
    if (at < stop) {
      int8_t padded[kColumns * O::kStep] = {};
      for (int n = 0; n < kColumns; ++n) std::memcpy(padded + n * O::kStep, w + n * w_row + at, stop - at);
      step(x + at, padded, O::kStep);
    }
    GTP_UNROLL
    for (int m = 0; m < kRows; ++m) {
      const Vec scale = all(O::scales(x + m * x_row, size)[block]);
      GTP_UNROLL
      for (int n = 0; n < kColumns; ++n)
        total[m * kColumns + n] = fma(from_whole(sums[m][n]), scale, total[m * kColumns + n]);
    }
  }
  float sums[kCount];
  GTP_UNROLL
  for (int i = 0; i < kCount; i += 4) sum_four(total + i, sums + i);
  GTP_UNROLL
  for (int m = 0; m < kRows; ++m)
    GTP_UNROLL
    for (int n = 0; n < kColumns; ++n) y[m * y_row + n] = sums[m * kColumns + n];
}
#endif

template <class O, int kFetch, int kRows>
inline void tile_of_columns(int columns, const typename O::Packed* x, int64_t x_row, const typename O::Weight* w,
                            int64_t w_row, int64_t size, float* y, int64_t y_row, uintptr_t ahead) {
  if constexpr (kRows == 1)
    if (columns == kRowColumns) return tile<O, 1, kRowColumns, kFetch>(x, x_row, w, w_row, size, y, y_row, ahead);
  if constexpr (kTileColumns >= 3)
    if (columns == 3) return tile<O, kRows, 3, kFetch>(x, x_row, w, w_row, size, y, y_row, ahead);
  if constexpr (kTileColumns >= 2)
    if (columns == 2) return tile<O, kRows, 2, kFetch>(x, x_row, w, w_row, size, y, y_row, ahead);
  tile<O, kRows, 1, kFetch>(x, x_row, w, w_row, size, y, y_row, ahead);
}

// `rows` up to kTileRows, `columns` up to kTileColumns (kRowColumns for one row).
template <class O, int kFetch>
inline void any_tile(int rows, int columns, const typename O::Packed* x, int64_t x_row, const typename O::Weight* w,
                     int64_t w_row, int64_t size, float* y, int64_t y_row, uintptr_t ahead) {
  if constexpr (kTileRows >= 4)
    if (rows == 4) return tile_of_columns<O, kFetch, 4>(columns, x, x_row, w, w_row, size, y, y_row, ahead);
  if constexpr (kTileRows >= 3)
    if (rows == 3) return tile_of_columns<O, kFetch, 3>(columns, x, x_row, w, w_row, size, y, y_row, ahead);
  if (rows == 2) return tile_of_columns<O, kFetch, 2>(columns, x, x_row, w, w_row, size, y, y_row, ahead);
  tile_of_columns<O, kFetch, 1>(columns, x, x_row, w, w_row, size, y, y_row, ahead);
}

// How many of `left` rows the next tile takes: one left over alone would use registers badly.
inline int tile_rows(int64_t left) {
  if (left == kTileRows + 1) return static_cast<int>((left + 1) / 2);
  return static_cast<int>(std::min<int64_t>(left, kTileRows));
}

// The products of `rows` arranged rows with `columns` rows of weights, which are read as they lie.
// following: weights that are wanted next.
template <class O>
inline void multiply_rows(const typename O::Packed* x, int64_t x_row, int64_t rows, const typename O::Weight* w,
                          int64_t w_row, int64_t columns, int64_t size, float* y, int64_t y_row,
                          const typename O::Weight* following) {
  constexpr int kBytes = sizeof(typename O::Weight);
  int taken;
  for (int64_t n = 0; n < columns; n += taken) {
    const int64_t left = columns - n;
    taken = rows > 1 ? static_cast<int>(std::min<int64_t>(left, kTileColumns)) : left >= kRowColumns ? kRowColumns : 1;
    const auto* here = w + n * w_row;
    const auto next = reinterpret_cast<uintptr_t>(n + taken < columns ? here + taken * w_row : following);
    // The rows after these: for one row, which is done with them soon, from a little behind their beginning on, else from
    // a little before it.  What is too much for the first cache waits in the second; long rows are streams that the
    // processor follows by itself.
    const int64_t group = taken * w_row * kBytes;
    const bool fetches = group <= (rows > 1 ? 4 * kNear : kNear);
    const auto ahead = rows > 1 ? next - std::min(kLead, group) / 4 : next + kBehind;
    for (int64_t m = 0; m < rows;) {
      const int high = tile_rows(rows - m);
      const auto* inputs = x + m * x_row;
      if (m == 0 && fetches)
        any_tile<O, kBytes>(high, taken, inputs, x_row, here, w_row, size, y + n, y_row, ahead);
      else
        any_tile<O, 0>(high, taken, inputs, x_row, here, w_row, size, y + m * y_row + n, y_row, 0);
      m += high;
    }
  }
}

}  // namespace GTP_ISA
}  // namespace gtp
