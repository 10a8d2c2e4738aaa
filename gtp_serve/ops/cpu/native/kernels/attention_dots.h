// The arithmetic of attention_sums.h for processors that multiply bf16 in pairs: scores take two elements of a head at
// once, sums two keys.  Weights of keys are rounded to bf16 for that, as are those that they are divided by.
//
// Keys of even and odd positions make a pair, whatever a step sees of them, and what is hidden of a pair is 0 in both
// factors: so a row's sums are the same whoever is computed beside it.
#pragma once

#include "attention_sums.h"

#if defined(__AVX512BF16__)
namespace gtp {
namespace GTP_ISA {

constexpr uint32_t kFirstOfPair = 0xffff, kSecondOfPair = 0xffff0000, kBothOfPair = 0xffffffff;

// scores[r][key] = scale * sum over pairs of elements of q[r] * key, ascending, for R rows and V vectors of keys.
template <int R, int V>
inline void score_pairs(const float* q, int64_t q_row, const float* keys, int64_t words, Vec scale, float* scores) {
  Vec sums[R][V];
  GTP_UNROLL
  for (int r = 0; r < R; ++r)
    GTP_UNROLL
    for (int v = 0; v < V; ++v) sums[r][v] = zero();
  for (int64_t word = 0; word < words; ++word, keys += kKeyBlock) {
    Vec part[V];
    GTP_UNROLL
    for (int v = 0; v < V; ++v) part[v] = load(keys + v * kLanes);
    GTP_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec pair = all(q[r * q_row + word]);
      GTP_UNROLL
      for (int v = 0; v < V; ++v) sums[r][v] = dot_pairs(pair, part[v], sums[r][v]);
    }
  }
  GTP_UNROLL
  for (int r = 0; r < R; ++r)
    GTP_UNROLL
    for (int v = 0; v < V; ++v) spill(scores + r * kKeyBlock + v * kLanes, mul(sums[r][v], scale));
}

// Scores to powers, which take the first half of their memory, as bf16.  e^x is 2^n * 2^f with x / ln(2) = n + f and
// 0 <= f < 1, and 2^f the polynomial of the fourth degree that is never further from it than 2.7e-6 of it (Remez), a
// thousandth of what rounding to bf16 takes.
inline void soften_pairs(float* scores, Sums& sums) {
  constexpr float kPerE = 1.44269504088896341f;
  const float base = sums.base > kNothing ? sums.base : 0.0f;
  const Vec slope = all(kPerE), shift = all(-base * kPerE);
  constexpr int kCount = kKeyBlock / kLanes;
  Vec x[kCount], f[kCount], power[kCount];
  const auto each = [](auto step) __attribute__((always_inline)) {
    GTP_UNROLL
    for (int i = 0; i < kCount; ++i) step(i);
  };
  each([&](int i) { x[i] = fma(load(scores + i * kLanes), slope, shift); });
  each([&](int i) { f[i] = above_whole(x[i]); });
  each([&](int i) { power[i] = fma(f[i], all(1.353416792e-2f), all(5.201146061e-2f)); });
  each([&](int i) { power[i] = fma(f[i], power[i], all(2.414427569e-1f)); });
  each([&](int i) { power[i] = fma(f[i], power[i], all(6.930038345e-1f)); });
  each([&](int i) { power[i] = fma(f[i], power[i], all(1.000002593f)); });
  each([&](int i) { power[i] = scaled_by_whole(power[i], x[i]); });
  Vec total = load(sums.total);
  GTP_UNROLL
  for (int i = 0; i < kCount; i += 2) {
    const Vec pairs = narrow_both(power[i], power[i + 1]);
    spill(scores + i / 2 * kLanes, pairs);
    total = dot_pairs(pairs, all_bits(0x3f803f80), total);
  }
  spill(sums.total, total);
}

// Elements whose pairs fill two vectors.
constexpr int64_t kPairStep = 2 * kLanes;

// Of the values of two keys, kPairStep elements from `column` on; `count` of them exist.
inline void pair_values(const bf16* first, const bf16* second, int64_t count, Vec* part) {
  bf16 edge[2][kPairStep];
  if (count < kPairStep) {
    std::memset(edge, 0, sizeof edge);
    std::memcpy(edge[0], first, count * sizeof(bf16));
    std::memcpy(edge[1], second, count * sizeof(bf16));
    first = edge[0], second = edge[1];
  }
  interleave(first, second, part[0], part[1]);
}

// A block's values, wherever each lies; what is needed of the next block is asked for meanwhile, as by Scattered.
struct ScatteredPairs {
  const bf16 *const *rows, *const *next_keys;
  int64_t size;
  template <int V>
  void read(int64_t pair, int64_t column, uint32_t seen, Vec (&part)[V]) const {
    // A key that is not seen may be nowhere.
    const bf16* first = rows[2 * pair + (seen & kFirstOfPair ? 0 : 1)] + column;
    const bf16* second = rows[2 * pair + (seen & kSecondOfPair ? 1 : 0)] + column;
    GTP_UNROLL
    for (int v = 0; v < V; v += 2) {
      pair_values(first + v * kLanes, second + v * kLanes, size - column - v * kLanes, part + v);
      for (int key = 0; key < 2; ++key) __builtin_prefetch(next_keys[2 * pair + key] + column + v * kLanes, 0, 2);
    }
  }
};

// The same side by side, as words, one row of them for each pair.
struct PanelOfPairs {
  const float* words;
  int64_t row;
  template <int V>
  void read(int64_t pair, int64_t column, uint32_t, Vec (&part)[V]) const {
    GTP_UNROLL
    for (int v = 0; v < V; ++v) part[v] = load(words + pair * row + column + v * kLanes);
  }
};

// A row of the panel, of `size` elements.
inline void put_pair(const bf16* first, const bf16* second, int64_t size, float* words) {
  for (int64_t at = 0; at < size; at += kPairStep) {
    Vec part[2];
    pair_values(first + at, second + at, size - at, part);
    spill(words + at, part[0]), spill(words + at + kLanes, part[1]);
  }
}

// mixed[r] += sum over pairs of keys of power[r] * value, keys [first, stop) of the block, ascending.
template <int R, int V, class Values>
inline void mix_pair_columns(const float* powers, const Values& values, int64_t first, int64_t stop, int64_t column,
                             float* mixed, int64_t mixed_row) {
  Vec sums[R][V];
  GTP_UNROLL
  for (int r = 0; r < R; ++r)
    GTP_UNROLL
    for (int v = 0; v < V; ++v) sums[r][v] = load(mixed + r * mixed_row + column + v * kLanes);
  const auto add_pair = [&](int64_t pair, uint32_t seen) __attribute__((always_inline)) {
    Vec part[V];
    values.read(pair, column, seen, part);
    if (seen != kBothOfPair)
      for (int v = 0; v < V; ++v) part[v] = and_bits(part[v], all_bits(seen));
    GTP_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec power = all(powers[r * kKeyBlock + pair]);
      GTP_UNROLL
      for (int v = 0; v < V; ++v) sums[r][v] = dot_pairs(power, part[v], sums[r][v]);
    }
  };
  int64_t pair = first / 2;
  if (first % 2) add_pair(pair++, kSecondOfPair);
  for (; 2 * pair + 1 < stop; ++pair) add_pair(pair, kBothOfPair);
  if (2 * pair < stop) add_pair(pair, kFirstOfPair);
  GTP_UNROLL
  for (int r = 0; r < R; ++r)
    GTP_UNROLL
    for (int v = 0; v < V; ++v) spill(mixed + r * mixed_row + column + v * kLanes, sums[r][v]);
}

template <int R, class Values>
inline void mix_pairs(const float* powers, const Values& values, int64_t first, int64_t stop, float* mixed,
                      int64_t mixed_row) {
  constexpr int kMost = 4;
  int64_t at = 0;
  for (; at + kMost * kLanes <= mixed_row; at += kMost * kLanes)
    mix_pair_columns<R, kMost>(powers, values, first, stop, at, mixed, mixed_row);
  for (; at < mixed_row; at += 2 * kLanes) mix_pair_columns<R, 2>(powers, values, first, stop, at, mixed, mixed_row);
}

// As mix_tile.  Pairs that all rows see whole are taken together, what else a row sees by itself: powers of keys that a
// row does not see are 0, but what lies in such a key's place may not be a number.  A pair is never taken in halves by
// one row and whole by another that sees both: processors may add its products in another order than one by one.
template <int R, class Values>
inline void mix_tile_pairs(const float* powers, const Values& values, const Seen* seen, float* mixed, int64_t mixed_row) {
  int64_t first = seen[0].first, stop = seen[0].stop;
  bool same = true;
  for (int r = 1; r < R; ++r) {
    same &= seen[r].first == seen[0].first && seen[r].stop == seen[0].stop;
    first = std::max(first, seen[r].first), stop = std::min(stop, seen[r].stop);
  }
  if (same) {
    if (first < stop) mix_pairs<R>(powers, values, first, stop, mixed, mixed_row);
    return;
  }
  first = (first + 1) / 2 * 2, stop = stop / 2 * 2;
  if (first >= stop) first = stop = kKeyBlock;  // nothing that all see: each alone
  const auto alone = [&](int r, int64_t from, int64_t to) {
    if (from < to) mix_pairs<1>(powers + r * kKeyBlock, values, from, to, mixed + r * mixed_row, mixed_row);
  };
  for (int r = 0; r < R; ++r) alone(r, seen[r].first, std::min(first, seen[r].stop));
  if (first < stop) mix_pairs<R>(powers, values, first, stop, mixed, mixed_row);
  for (int r = 0; r < R; ++r) alone(r, std::max(stop, seen[r].first), seen[r].stop);
}

// See ArithmeticOf.
struct Dots {
  static constexpr bool kWidensKeys = false;
  static void put_query(const bf16* q, int64_t size, float* to, int64_t room) {
    auto* pairs = reinterpret_cast<bf16*>(to);
    std::memcpy(pairs, q, size * sizeof(bf16));
    std::fill(pairs + size, pairs + 2 * room, bf16{0});
  }
  template <class, int R, int V>
  static void score(const float* q, int64_t q_row, const float* keys, int64_t words, Vec scale, float* scores) {
    score_pairs<R, V>(q, q_row, keys, words, scale, scores);
  }
  static void soften(float* scores, Sums& sums) { soften_pairs(scores, sums); }
  static void fill_panel(const bf16* const* values, int64_t low, int64_t high, int64_t size, float* panel, int64_t row) {
    // A key that is not there is left out by whoever sees the other of its pair alone: any stands in for it.
    for (int64_t key = low / 2 * 2; key < high; key += 2)
      put_pair(values[std::max(key, low)], values[std::min(key + 1, high - 1)], size, panel + key / 2 * row);
  }
  static ScatteredPairs scattered(const bf16* const* values, const bf16* const* next_keys, int64_t size) {
    return {values, next_keys, size};
  }
  static PanelOfPairs panel(const float* words, int64_t row) { return {words, row}; }
  template <int R, class Values>
  static void mix(const float* powers, const Values& values, const Seen* seen, int64_t, float* mixed, int64_t mixed_row) {
    mix_tile_pairs<R>(powers, values, seen, mixed, mixed_row);
  }
  static constexpr int place(int part, int lane) { return interleaved_place(part, lane); }
};

template <>
struct ArithmeticOf<bf16> {
  using Type = Dots;
};

}  // namespace GTP_ISA
}  // namespace gtp
#endif
