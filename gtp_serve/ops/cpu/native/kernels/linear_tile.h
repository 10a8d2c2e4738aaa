// A tile of outputs: a few rows of activations by a few rows of weights, their running sums in registers.
#pragma once

namespace gtp {
namespace GTP_ISA {

// As many as registers hold a chain of each product, and what is multiplied; two chains where there are more registers.
#if defined(__AVX512F__)
constexpr int kTileRows = 4, kTileColumns = 3, kSumsAtOnce = 24;
#elif defined(__AVX2__)
constexpr int kTileRows = 4, kTileColumns = 3, kSumsAtOnce = 12;
#else
constexpr int kTileRows = 2, kTileColumns = 1, kSumsAtOnce = 4;
#endif
// Columns of a tile of one row.
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
  Vec first[kRows][kColumns], second[kRows][kColumns];
  W padded[kColumns * O::kStep];
  const int64_t whole = size / O::kStep * O::kStep;
  if (whole < size) {
    std::memset(padded, 0, sizeof padded);
    for (int n = 0; n < kColumns; ++n)
      std::memcpy(padded + n * O::kStep, w + n * w_row + whole, (size - whole) * sizeof(W));
  }
  const auto add_chain = [&](auto chain, Vec (&sums)[kRows][kColumns], const typename O::Packed* inputs,
                             const W* weights, int64_t weights_row) {
    constexpr int kChain = decltype(chain)::value;
    typename O::Term weight[kColumns];
    for (int n = 0; n < kColumns; ++n) weight[n] = O::template weights<kChain>(weights + n * weights_row);
    for (int m = 0; m < kRows; ++m) {
      const auto term = O::template inputs<kChain>(inputs + m * x_row);
      for (int n = 0; n < kColumns; ++n) sums[m][n] = O::add(term, weight[n], sums[m][n]);
    }
  };
  const auto clear = [](Vec (&sums)[kRows][kColumns]) {
    for (auto& row : sums)
      for (Vec& sum : row) sum = zero();
  };
  const auto fetch = [&] {
    if constexpr (kFetch > 0) {
      constexpr int kBytes = kColumns * O::kStep * kFetch;
      for (int byte = 0; byte < kBytes; byte += 64) prefetch(ahead + byte);
      ahead += kBytes;
    }
  };
  constexpr std::integral_constant<int, 0> kFirst;
  constexpr std::integral_constant<int, 1> kSecond;
  if constexpr (kRows * kColumns > kSumsAtOnce / 2) {
    // One chain after the other: a tile of this size leaves no registers for both.
    clear(first);
    for (int64_t at = 0; at < whole; at += O::kStep) fetch(), add_chain(kFirst, first, x + at, w + at, w_row);
    if (whole < size) add_chain(kFirst, first, x + whole, padded, O::kStep);
    clear(second);
    for (int64_t at = 0; at < whole; at += O::kStep) add_chain(kSecond, second, x + at, w + at, w_row);
    if (whole < size) add_chain(kSecond, second, x + whole, padded, O::kStep);
  } else {
    clear(first), clear(second);
    for (int64_t at = 0; at < whole; at += O::kStep) {
      fetch();
      add_chain(kFirst, first, x + at, w + at, w_row), add_chain(kSecond, second, x + at, w + at, w_row);
    }
    if (whole < size)
      add_chain(kFirst, first, x + whole, padded, O::kStep), add_chain(kSecond, second, x + whole, padded, O::kStep);
  }
  constexpr int kCount = kRows * kColumns;
  Vec total[(kCount + 3) / 4 * 4];
  for (int i = 0; i < kCount; ++i) total[i] = add(first[i / kColumns][i % kColumns], second[i / kColumns][i % kColumns]);
  for (int i = kCount; i < (kCount + 3) / 4 * 4; ++i) total[i] = zero();
  float sums[(kCount + 3) / 4 * 4];
  for (int i = 0; i < kCount; i += 4) sum_four(total + i, sums + i);
  for (int m = 0; m < kRows; ++m)
    for (int n = 0; n < kColumns; ++n) y[m * y_row + n] = sums[m * kColumns + n];
  }
}

#if defined(__AVX2__) && defined(__FMA__)
// The same of whole numbers.
template <class O, int kRows, int kColumns, int kFetch>
inline void whole_tile(const int16_t* x, int64_t x_row, const int8_t* w, int64_t w_row, int64_t size, float* y,
                       int64_t y_row, uintptr_t ahead) {
  constexpr int kCount = (kRows * kColumns + 3) / 4 * 4;
  Vec total[kCount];
  for (int i = 0; i < kCount; ++i) total[i] = zero();
  for (int64_t block = 0; block * O::kBlock < size; ++block) {
    typename O::Term sums[kRows][kColumns];
    for (int m = 0; m < kRows; ++m)
      for (int n = 0; n < kColumns; ++n) sums[m][n] = O::none();
    const auto add_half = [&](auto half, const int16_t* inputs, const int8_t* weights, int64_t weights_row) {
      constexpr int kHalf = decltype(half)::value;
      typename O::Term weight[kColumns];
      for (int n = 0; n < kColumns; ++n) weight[n] = O::template weights<kHalf>(weights + n * weights_row);
      for (int m = 0; m < kRows; ++m) {
        const auto term = O::template inputs<kHalf>(inputs + m * x_row);
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
    for (int m = 0; m < kRows; ++m) {
      const Vec scale = all(O::scales(x + m * x_row, size)[block]);
      for (int n = 0; n < kColumns; ++n)
        total[m * kColumns + n] = fma(from_whole(sums[m][n]), scale, total[m * kColumns + n]);
    }
  }
  float sums[kCount];
  for (int i = 0; i < kCount; i += 4) sum_four(total + i, sums + i);
  for (int m = 0; m < kRows; ++m)
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

}  // namespace GTP_ISA
}  // namespace gtp
