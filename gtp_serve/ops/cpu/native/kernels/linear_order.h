// In which order the terms of a dot product are added.  It is a matter of the instruction set, of the types and of the
// product's own length; every path of linear.h, whatever its blocking, adds in this order and so gives the same bits.
//
// A row is read in steps of two halves, whose products are added to one vector of running sums, one half after the other;
// at the end its lanes are added in halves (as in sum()).  Terms past the end of a row are 0 * 0.  An order tells
//   Packed    what a row of activations is kept as, once arranged and padded with zeros to whole steps
//   kStep     elements of a step
//   weights   a half of a step of a weight's row, as it lies
//   inputs    what belongs to it, of an arranged row
//   add       the two multiplied and added to the sums
//   arrange   a whole step
//   kInOrder  whether that leaves elements where they are
#pragma once

namespace gtp {
namespace GTP_ISA {

// Terms lie as they are used: the first kLanes elements of a step are its first half.
template <class W>
struct Straight {
  using Weight = W;
  using Packed = float;
  using Term = Vec;
  static constexpr bool kInOrder = true;
  static constexpr int kStep = 2 * kLanes;
  template <int kHalf>
  static Term weights(const W* p) { return load(p + kHalf * kLanes); }
  template <int kHalf>
  static Term inputs(const float* p) { return load(p + kHalf * kLanes); }
  static Vec add(Term a, Term b, Vec sums) { return fma(a, b, sums); }
  template <class X>
  static void arrange(const X* from, float* to) {
    spill(to, load(from)), spill(to + kLanes, load(from + kLanes));
  }
};

#if defined(__AVX2__) && defined(__FMA__)
// bf16 in pairs: widening those at even places is a shift, those at odd places a mask, neither moves across lanes.  The
// even places of a step are its first half.
struct Paired {
  using Weight = bf16;
  using Packed = float;
  using Term = Vec;
  static constexpr bool kInOrder = false;
  static constexpr int kStep = 2 * kLanes;
  template <int kHalf>
  static Term weights(const bf16* p) { return kHalf ? load_odd(p) : load_even(p); }
  template <int kHalf>
  static Term inputs(const float* p) { return load(p + kHalf * kLanes); }
  static Vec add(Term a, Term b, Vec sums) { return fma(a, b, sums); }
  static void arrange(const bf16* from, float* to) { spill(to, load_even(from)), spill(to + kLanes, load_odd(from)); }
  static void arrange(const float* from, float* to) {
    for (int i = 0; i < kLanes; ++i) to[i] = from[2 * i], to[kLanes + i] = from[2 * i + 1];
  }
};
#endif

#if defined(__AVX512BF16__)
// Two products of bf16 in one instruction: a lane of a chain takes two neighbours.
struct Dotted {
  using Weight = bf16;
  using Packed = bf16;
  using Term = __m512bh;
  static constexpr bool kInOrder = true;
  static constexpr int kStep = 4 * kLanes;
  template <int kHalf>
  static Term weights(const bf16* p) { return load_pairs(p + kHalf * 2 * kLanes); }
  template <int kHalf>
  static Term inputs(const bf16* p) { return load_pairs(p + kHalf * 2 * kLanes); }
  static Vec add(Term a, Term b, Vec sums) { return _mm512_dpbf16_ps(sums, a, b); }
  static void arrange(const bf16* from, bf16* to) { std::memcpy(to, from, kStep * sizeof(bf16)); }
};
#endif

#if defined(__AVX2__) && defined(__FMA__)
// int8 weights by activations as whole numbers of 16 bits, one scale for each block of a row: sums within a block are
// exact, so they have no order, and a product of two takes one instruction.  An arranged row ends with its scales.
struct Whole {
  using Weight = int8_t;
  using Packed = int16_t;
#if defined(__AVX512F__)
  using Term = __m512i;
#else
  using Term = __m256i;
#endif
  static constexpr bool kInOrder = false;
  static constexpr int kStep = 4 * kLanes;
  static constexpr int64_t kBlock = 2048;  // 127 * 32767 as often fits a sum of 32 bits
  template <int kHalf>
  static Term weights(const int8_t* p) { return widened(p + kHalf * 2 * kLanes); }
  template <int kHalf>
  static Term inputs(const int16_t* p) { return whole(p + kHalf * 2 * kLanes); }
  static Term none() { return whole_zero(); }
  static Term add(Term a, Term b, Term sums) { return add_pairs(a, b, sums); }
  static int64_t blocks(int64_t size) { return (size + kBlock - 1) / kBlock; }
  static int64_t padded(int64_t size) { return (size + kStep - 1) / kStep * kStep; }
  static const float* scales(const int16_t* row, int64_t size) {
    return reinterpret_cast<const float*>(row + padded(size));
  }
};
#endif

template <class O>
constexpr bool kIsWhole = false;
#if defined(__AVX2__) && defined(__FMA__)
template <>
constexpr bool kIsWhole<Whole> = true;
#endif

template <class X, class W>
struct OrderOf {
  using Type = Straight<W>;
};
#if defined(__AVX2__) && defined(__FMA__)
template <class X>
struct OrderOf<X, bf16> {
  using Type = Paired;
};
#endif
#if defined(__AVX512BF16__)
template <>
struct OrderOf<bf16, bf16> {
  using Type = Dotted;
};
#endif
template <class X, class W>
using Order = typename OrderOf<X, W>::Type;

// What linear.h uses: as `dot`, but for weights that it has a way of its own for.
template <class X, class W>
struct LinearOrderOf {
  using Type = Order<X, W>;
};
#if defined(__AVX2__) && defined(__FMA__)
template <class X>
struct LinearOrderOf<X, int8_t> {
  using Type = Whole;
};
#endif
template <class X, class W>
using LinearOrder = typename LinearOrderOf<X, W>::Type;

// Elements of an arranged row.
template <class O>
inline int64_t arranged_size(int64_t size) {
  if constexpr (kIsWhole<O>) size = O::padded(size) + O::blocks(size) * 2;
  return (size + O::kStep - 1) / O::kStep * O::kStep;
}

// A row as whole numbers of 16 bits: a block's scale is the power of two that brings its largest number just below 2^15;
// a number is rounded to the nearest, ties to even, so that bf16 within 2^-7 of the largest is exact.  A block with a
// number that is not finite has no scale, and so no product either.
template <class O, class X>
inline void arrange_whole(const X* from, int64_t size, int16_t* to) {
  auto* scales = reinterpret_cast<float*>(to + O::padded(size));
  for (int64_t first = 0; first < size; first += O::kBlock) {
    const int64_t count = std::min(O::kBlock, size - first);
    Vec largest = zero();
    bool finite = true;
    each_vector<X>(count, [&](int64_t at, auto read, auto) {
      const Vec x = read(from + first + at), size_of_x = max(x, sub(zero(), x));
      finite &= all_within(x, -std::numeric_limits<float>::max(), std::numeric_limits<float>::max());
      largest = max(largest, size_of_x);
    });
    float lane[kLanes], most = 0.0f;
    spill(lane, largest);
    for (float each : lane) most = std::max(most, each);
    const int power = most > 0 ? std::max(std::ilogb(most), -100) - 14 : 0;
    *scales++ = finite ? std::ldexp(1.0f, power) : std::numeric_limits<float>::quiet_NaN();
    const Vec inverse = all(finite ? std::ldexp(1.0f, -power) : 0.0f);
    const Vec low = all(-32767.0f), high = all(32767.0f);
    each_vector<X>(count, [&](int64_t at, auto read, auto) {
      const Vec whole = nearest(min(max(mul(read(from + first + at), inverse), low), high));
      if (count - at >= kLanes) return put_whole(to + first + at, whole);
      int16_t edge[kLanes];
      put_whole(edge, whole);
      std::memcpy(to + first + at, edge, (count - at) * sizeof(int16_t));
    });
  }
  std::fill(to + size, to + O::padded(size), int16_t{0});
}

// `from` as O reads it, to `to`, arranged_size() elements and 64-byte aligned.
template <class O, class X>
inline void arrange_row(const X* from, int64_t size, typename O::Packed* to) {
  if constexpr (kIsWhole<O>) {
    arrange_whole<O>(from, size, to);
    return;
  } else {
  int64_t at = 0;
  for (; at + O::kStep <= size; at += O::kStep) O::arrange(from + at, to + at);
  if (at == size) return;
  X padded[O::kStep] = {};
  std::memcpy(padded, from + at, (size - at) * sizeof(X));
  O::arrange(padded, to + at);
  }
}

}  // namespace GTP_ISA
}  // namespace gtp
