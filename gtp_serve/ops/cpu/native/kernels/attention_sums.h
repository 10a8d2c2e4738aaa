// The arithmetic of attention: scores of some queries with a block of keys, what becomes of the running sums with them,
// and how sums of one part of a context are joined to those of the parts before.
#pragma once

#include "tile.h"

namespace gtp {
namespace GTP_ISA {

constexpr int64_t kKeyBlock = 64;   // keys whose scores are computed together
#if defined(__AVX2__) && defined(__FMA__)
constexpr int kMostRows = 6;        // queries whose sums are in registers at once
#else
constexpr int kMostRows = 2;
#endif

// A row's state so far: `mixed` is the sum of exp(score - base) * value, `total` that of exp(score - base).  The base is
// a score of the row's, and no other lies more than kSlack above it: scaling anew for each larger one takes longer than
// the powers themselves, and sums of floats are as exact whatever their scale.
//
// `total` is the sum over its lanes, which are added up once, at the end.
struct Sums {
  alignas(sizeof(Vec)) float total[kLanes];
  float base;
};
constexpr float kNothing = -std::numeric_limits<float>::infinity();
inline Sums no_sums() { return {{}, kNothing}; }
constexpr float kSlack = 5.5f;  // of natural logarithms: a power is at most 2^8

// Words of 32 bits that a key is turned into, and the floats of a query that meet them.
template <class T>
inline int64_t key_words(int64_t size) {
  return (size * static_cast<int64_t>(sizeof(T)) + 15) / 16 * 4;
}
inline int64_t query_floats(int64_t size) { return (size + 7) / 8 * 8; }

// scores[r][key] = scale * sum over e of q[r][e] * key[e], e ascending, for R rows and V vectors of keys.
template <class T, int R, int V>
inline void score_rows(const float* q, int64_t q_row, const float* keys, int64_t words, Vec scale, float* scores) {
  Vec sums[R][V];
  GTP_UNROLL
  for (int r = 0; r < R; ++r)
    GTP_UNROLL
    for (int v = 0; v < V; ++v) sums[r][v] = zero();
  // Of factors and vectors of keys the fewer are held in registers beside the sums.
  const auto meet = [&](int64_t e, auto key) __attribute__((always_inline)) {
    if (R < V) {
      Vec factor[R];
      GTP_UNROLL
      for (int r = 0; r < R; ++r) factor[r] = all(q[r * q_row + e]);
      GTP_UNROLL
      for (int v = 0; v < V; ++v) {
        const Vec part = key(v);
        GTP_UNROLL
        for (int r = 0; r < R; ++r) sums[r][v] = fma(factor[r], part, sums[r][v]);
      }
    } else {
      Vec part[V];
      GTP_UNROLL
      for (int v = 0; v < V; ++v) part[v] = key(v);
      GTP_UNROLL
      for (int r = 0; r < R; ++r) {
        const Vec factor = all(q[r * q_row + e]);
        GTP_UNROLL
        for (int v = 0; v < V; ++v) sums[r][v] = fma(factor, part[v], sums[r][v]);
      }
    }
  };
  for (int64_t word = 0; word < words; ++word, keys += kKeyBlock) {
    if (sizeof(T) == 2) {
      const auto* pairs = reinterpret_cast<const bf16*>(keys);
      meet(2 * word, [&](int v) __attribute__((always_inline)) { return load_even(pairs + v * 2 * kLanes); });
      meet(2 * word + 1, [&](int v) __attribute__((always_inline)) { return load_odd(pairs + v * 2 * kLanes); });
    } else {
      meet(word, [&](int v) __attribute__((always_inline)) { return load(keys + v * kLanes); });
    }
  }
  GTP_UNROLL
  for (int r = 0; r < R; ++r)
    GTP_UNROLL
    for (int v = 0; v < V; ++v) spill(scores + r * kKeyBlock + v * kLanes, mul(sums[r][v], scale));
}

// Vectors of sums that one load of values feeds.  Of bf16 they are two, the first and the second of kLanes pairs, which
// are cheap to widen; finish() puts them in order.
template <class T>
constexpr int kStep = sizeof(T) == 2 ? 2 : 1;

// A row of the sums, in floats.
template <class T>
inline int64_t mixed_floats(int64_t size) {
  return (size + kStep<T> * kLanes - 1) / (kStep<T> * kLanes) * kStep<T> * kLanes;
}

// A block's values, wherever each lies.  While one is used, as much of the key in the same place of the next block is
// asked for: evenly, since a processor that has asked for all that it can wait for does nothing else.
template <class T>
struct Scattered {
  using Element = T;
  const T *const *rows, *const *next_keys;
  const T* operator[](int64_t key) const { return rows[key]; }
  template <int kCount>
  void fetch(int64_t key, int64_t column) const {
    GTP_UNROLL
    for (int at = 0; at < kCount; at += 64 / sizeof(T)) __builtin_prefetch(next_keys[key] + column + at, 0, 2);
  }
};

// The same as float32, one row behind the other, each in the order of the sums.
struct Panel {
  using Element = float;
  const float* rows;
  int64_t row;
  const float* operator[](int64_t key) const { return rows + key * row; }
  template <int kCount>
  void fetch(int64_t, int64_t) const {}
};

// A row of the panel; `count` elements at `value`, 0 past them.
template <class T>
inline void widen_value(const T* value, int64_t count, float* wide) {
  constexpr int kPart = kStep<T> * kLanes;
  for (int64_t at = 0; at < count; at += kPart) {
    T edge[kPart] = {};
    const T* from = value + at;
    if (count - at < kPart) std::memcpy(edge, from, (count - at) * sizeof(T)), from = edge;
    if constexpr (sizeof(T) == 2)
      spill(wide + at, load_even(from)), spill(wide + at + kLanes, load_odd(from));
    else
      spill(wide + at, load(from));
  }
}

// mixed[r] += sum over keys of power[r][key] * value[key], keys ascending, for R rows and V vectors of the head.
// `count`: elements from `column` on that exist, at least V * kLanes where Whole.
template <int R, int V, bool Whole, class Values>
inline void mix_columns(const float* powers, const Values& values, int64_t first, int64_t stop, int64_t column,
                        float* mixed, int64_t mixed_row, int64_t count) {
  using T = typename Values::Element;
  constexpr int kWords = V / kStep<T>;
  Vec sums[R][V];
  GTP_UNROLL
  for (int r = 0; r < R; ++r)
    GTP_UNROLL
    for (int v = 0; v < V; ++v) sums[r][v] = load(mixed + r * mixed_row + column + v * kLanes);
  for (int64_t key = first; key < stop; ++key) {
    const T* value = values[key] + column;
    values.template fetch<V * kLanes>(key, column);
    T edge[V * kLanes];
    if (!Whole) {
      std::memset(edge, 0, sizeof edge);
      std::memcpy(edge, value, count * sizeof(T));
      value = edge;
    }
    const auto read = [&](int w, Vec* part) __attribute__((always_inline)) {
      if constexpr (sizeof(T) == 2)
        part[0] = load_even(value + w * 2 * kLanes), part[1] = load_odd(value + w * 2 * kLanes);
      else
        part[0] = load(value + w * kLanes);
    };
    // Of powers and vectors of values the fewer are held in registers beside the sums.
    if constexpr (R < V) {
      Vec power[R];
      GTP_UNROLL
      for (int r = 0; r < R; ++r) power[r] = all(powers[r * kKeyBlock + key]);
      GTP_UNROLL
      for (int w = 0; w < kWords; ++w) {
        Vec part[kStep<T>];
        read(w, part);
        GTP_UNROLL
        for (int r = 0; r < R; ++r)
          GTP_UNROLL
          for (int i = 0; i < kStep<T>; ++i) sums[r][kStep<T> * w + i] = fma(power[r], part[i], sums[r][kStep<T> * w + i]);
      }
    } else {
      Vec part[V];
      GTP_UNROLL
      for (int w = 0; w < kWords; ++w) read(w, part + w * kStep<T>);
      GTP_UNROLL
      for (int r = 0; r < R; ++r) {
        const Vec power = all(powers[r * kKeyBlock + key]);
        GTP_UNROLL
        for (int v = 0; v < V; ++v) sums[r][v] = fma(power, part[v], sums[r][v]);
      }
    }
  }
  GTP_UNROLL
  for (int r = 0; r < R; ++r)
    GTP_UNROLL
    for (int v = 0; v < V; ++v) spill(mixed + r * mixed_row + column + v * kLanes, sums[r][v]);
}

// How many vectors of sums of R rows registers hold beside what they are multiplied with.
constexpr int vectors_of(int R) { return kLanes == 16 ? 4 : kMostRows == 2 ? 1 : R == 1 ? 8 : R <= 3 ? 4 : 2; }

template <int R, class Values>
inline void mix_rows(const float* powers, const Values& values, int64_t first, int64_t stop, int64_t size, float* mixed,
                     int64_t mixed_row) {
  constexpr int kLeast = kStep<typename Values::Element>, kMost = std::max(vectors_of(R), kLeast);
  int64_t at = 0;
  for (; at + kMost * kLanes <= size; at += kMost * kLanes)
    mix_columns<R, kMost, true>(powers, values, first, stop, at, mixed, mixed_row, size - at);
  for (; at + kLeast * kLanes <= size; at += kLeast * kLanes)
    mix_columns<R, kLeast, true>(powers, values, first, stop, at, mixed, mixed_row, size - at);
  if (at < size) mix_columns<R, kLeast, false>(powers, values, first, stop, at, mixed, mixed_row, size - at);
}

// The keys of a block that a row sees: its part of [0, kKeyBlock), empty where stop <= first.
struct Seen {
  int64_t first, stop;
  bool any() const { return first < stop; }
};

// Rows of one tile with the same limits where `together`; otherwise each with its own: a hidden key is not multiplied
// by 0 but left out, since what lies in its place may not be a number.
template <int R, class Values>
inline void mix_tile(const float* powers, const Values& values, const Seen* seen, int64_t size, float* mixed,
                     int64_t mixed_row) {
  int64_t first = seen[0].first, stop = seen[0].stop;
  for (int r = 1; r < R; ++r) first = std::max(first, seen[r].first), stop = std::min(stop, seen[r].stop);
  if (R > 1 && first >= stop) first = stop = kKeyBlock;  // nothing that all see: each alone
  const auto alone = [&](int r, int64_t from, int64_t to) {
    if (from < to) mix_rows<1>(powers + r * kKeyBlock, values, from, to, size, mixed + r * mixed_row, mixed_row);
  };
  if (R > 1)
    for (int r = 0; r < R; ++r) alone(r, seen[r].first, std::min(first, seen[r].stop));
  if (first < stop) mix_rows<R>(powers, values, first, stop, size, mixed, mixed_row);
  if (R > 1)
    for (int r = 0; r < R; ++r) alone(r, std::max(stop, seen[r].first), seen[r].stop);
}

// Scores of keys that a row does not see made -infinity, and its sums scaled to the largest of them where that is far
// above what they are scaled to.
inline void raise(float* scores, Seen seen, Sums& sums, float* mixed, int64_t size) {
  for (int64_t key = 0; key < seen.first; ++key) scores[key] = kNothing;
  for (int64_t key = seen.stop; key < kKeyBlock; ++key) scores[key] = kNothing;
  Vec largest = load(scores);
  for (int at = kLanes; at < kKeyBlock; at += kLanes) largest = max(largest, load(scores + at));
  if (!any_above(largest, sums.base + kSlack)) return;
  const float found = fold_max(largest);
  if (sums.base > kNothing) {
    const Vec shrink = exp_of_small(all(sums.base - found));
    spill(sums.total, mul(load(sums.total), shrink));
    for (int64_t at = 0; at < size; at += kLanes) spill(mixed + at, mul(load(mixed + at), shrink));
  }
  sums.base = found;
}

// Scores to powers.  Where all scores are -infinity every power is 0, whatever is taken away.
inline void soften(float* scores, Sums& sums) {
  const Vec base = all(sums.base > kNothing ? sums.base : 0.0f);
  Vec total = load(sums.total);
  constexpr int kTogether = 4;
  for (int at = 0; at < kKeyBlock; at += kTogether * kLanes) {
    Vec powers[kTogether];
    exp_of_smalls([&](int i) { return sub(load(scores + at + i * kLanes), base); }, powers);
    GTP_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      spill(scores + at + i * kLanes, powers[i]);
      total = add(total, powers[i]);
    }
  }
  spill(sums.total, total);
}

// Joins the sums of the next split to those of the ones before.
inline void join(Sums& all_sums, float* all_mixed, const Sums& sums, const float* mixed, int64_t size) {
  const float largest = std::max(all_sums.base, sums.base), base = largest > kNothing ? largest : 0.0f;
  const Vec before = exp_of_small(all(all_sums.base - base)), now = exp_of_small(all(sums.base - base));
  const auto add_up = [&](float* all, const float* some) {
    spill(all, fma(load(some), now, mul(load(all), before)));
  };
  all_sums.base = largest;
  add_up(all_sums.total, sums.total);
  for (int64_t at = 0; at < size; at += kLanes) add_up(all_mixed + at, mixed + at);
}

// The arithmetic as attention.h uses it, in float32.
//   put_query   a query as score() reads it, in so many floats
//   fill_panel  the values of keys [low, high) of a block side by side, where many queries share them
//   place       which element of kStep vectors of sums a lane of one of them is
template <class T>
struct Plain {
  static constexpr bool kWidensKeys = sizeof(T) == 2;
  static void put_query(const T* q, int64_t size, float* to, int64_t room) {
    for (int64_t e = 0; e < size; ++e) to[e] = widen(q[e]);
    std::fill(to + size, to + room, 0.0f);
  }
  template <class Key, int R, int V>
  static void score(const float* q, int64_t q_row, const float* keys, int64_t words, Vec scale, float* scores) {
    score_rows<Key, R, V>(q, q_row, keys, words, scale, scores);
  }
  static void soften(float* scores, Sums& sums) { gtp::GTP_ISA::soften(scores, sums); }
  static void fill_panel(const T* const* values, int64_t low, int64_t high, int64_t size, float* panel, int64_t row) {
    for (int64_t key = low; key < high; ++key) widen_value(values[key], size, panel + key * row);
  }
  static Scattered<T> scattered(const T* const* values, const T* const* next_keys, int64_t) { return {values, next_keys}; }
  static Panel panel(const float* rows, int64_t row) { return {rows, row}; }
  template <int R, class Values>
  static void mix(const float* powers, const Values& values, const Seen* seen, int64_t size, float* mixed,
                  int64_t mixed_row) {
    mix_tile<R>(powers, values, seen, size, mixed, mixed_row);
  }
  static constexpr int place(int part, int lane) { return kStep<T> * lane + part; }
};

// How rows of T are attended.
template <class T>
struct ArithmeticOf {
  using Type = Plain<T>;
};

template <class T, class Arithmetic>
inline void finish(const Sums& sums, const float* mixed, T* out, int64_t size) {
  const Vec total = all(fold_sum(load(sums.total)));
  for (int64_t at = 0; at < size; at += kStep<T> * kLanes) {
    float wide[2 * kLanes];
    for (int part = 0; part < kStep<T>; ++part) {
      float lane[kLanes];
      spill(lane, div(load(mixed + at + part * kLanes), total));
      for (int i = 0; i < kLanes; ++i) wide[Arithmetic::place(part, i)] = lane[i];
    }
    for (int part = 0; part < kStep<T>; ++part) {
      const int64_t start = at + part * kLanes, left = size - start;
      if (left >= kLanes)
        store(out + start, load(wide + part * kLanes));
      else if (left > 0)
        store_some(out + start, load(wide + part * kLanes), left);
    }
  }
}

}  // namespace GTP_ISA
}  // namespace gtp
