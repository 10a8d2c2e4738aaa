// Attention over the paged cache, in float32 unless attention_dots.h does it.  A row takes its keys in blocks that lie
// at fixed positions of its sequence, with a running scale; blocks are summed up in splits, at fixed positions too,
// which are joined in their order.  So its result depends on its own context alone: not on the batch, on how a prompt
// was cut into chunks, or on how many threads share a long context.
#pragma once

#include "attention_dots.h"
#include "attention_memory.h"
#include "attention_sums.h"

namespace gtp {
namespace GTP_ISA {

constexpr int64_t kSplit = 512;        // positions that one thread sums up alone
constexpr int64_t kManySequences = 4;  // for each thread: so many are taken whole
constexpr int64_t kFewPieces = 32;     // so few pieces are cut at splits, for threads to share
constexpr size_t kSplitMemory = size_t{32} << 20;

// Positions [start + low, start + high) of a sequence, and where the keys and values of a KV head lie.
template <class T>
struct KeyBlock {
  int64_t start, low, high;
  const T *keys[kKeyBlock], *values[kKeyBlock];

  // Those of the block at `at` that are in [first, stop).  What is not there may be asked for, as anything may.
  void find(const AttentionOp& o, int64_t sequence, int64_t kv, int64_t at, int64_t first, int64_t stop) {
    start = at, low = first - at, high = std::min(stop - at, kKeyBlock);
    const int64_t width = o.kv_heads * o.size, *table = o.tables + sequence * o.table_row;
    int64_t entry = first / o.block_size, inside = first % o.block_size;
    for (int64_t key = low; key < high; ++entry, inside = 0) {
      const int64_t number = std::clamp<int64_t>(table[entry], 0, o.num_blocks - 1);
      int64_t place = (number * o.block_size + inside) * width + kv * o.size;
      for (; inside < o.block_size && key < high; ++inside, ++key, place += width) {
        keys[key] = static_cast<const T*>(o.keys) + place;
        values[key] = static_cast<const T*>(o.values) + place;
      }
    }
    const auto* anything = static_cast<const T*>(o.keys);
    std::fill(keys, keys + std::min(low, kKeyBlock), anything);
    std::fill(keys + std::max<int64_t>(high, 0), keys + kKeyBlock, anything);
  }
};

// Positions that a row sees; nothing outside its table.
inline Seen seen_by(const AttentionOp& o, int64_t row) {
  const int64_t last = std::min(o.positions[row], o.max_context - 1);
  return {o.window > 0 ? std::max<int64_t>(0, last - o.window + 1) : 0, last + 1};
}

// Some rows of a sequence and the heads of a KV head: `rows * group` queries, those of a row beside one another.
template <class T>
struct Tile {
  using Arithmetic = typename ArithmeticOf<T>::Type;
  using Block = KeyBlock<T>;
  const AttentionOp& o;
  const TileMemory& memory;
  const int64_t group, sequence, row, rows, kv, queries;
  int64_t earliest = 0, latest = -1;  // positions that some row sees

  Tile(const AttentionOp& op, const TileMemory& own, int64_t s, int64_t first_row, int64_t count, int64_t kv_head)
      : o(op), memory(own), group(group_of(op)), sequence(s), row(first_row), rows(count), kv(kv_head),
        queries(count * group) {
    for (int64_t i = 0; i < rows; ++i) {
      const Seen seen = seen_by(o, row + i);
      for (int64_t g = 0; g < group; ++g) memory.limits[i * group + g] = seen;
      earliest = i == 0 ? seen.first : std::min(earliest, seen.first);
      latest = std::max(latest, seen.stop - 1);
    }
  }

  void load_queries() const {
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t head = kv * group + i % group;
      auto* rotated = reinterpret_cast<T*>(memory.all_mixed);  // not in use yet
      if (o.before) rotate_query(*o.before, row + i / group, head, rotated);
      const T* q = o.before ? rotated : static_cast<const T*>(o.q) + (row + i / group) * o.q_row + head * o.size;
      Arithmetic::put_query(q, o.size, memory.q + i * memory.q_row, memory.q_row);
    }
  }

  // What the rows bring of this KV head, if it was not put into the cache before.
  void cache() const {
    for (int64_t i = 0; o.before && i < rows; ++i) cache_head<T>(*o.before, row + i, kv);
  }

  // Sums over the positions of one split; false where no row sees any.
  // following: what is wanted after this tile, to be fetched meanwhile; may be null.
  bool sum_split(int64_t split, const Block* following) const {
    const int64_t first = std::max(earliest, split * kSplit), stop = std::min(latest + 1, (split + 1) * kSplit);
    if (first >= stop) return false;
    std::fill(memory.sums, memory.sums + queries, no_sums());
    std::fill(memory.mixed, memory.mixed + queries * memory.mixed_row, 0.0f);
    Block one, two, *now = &one, *next = &two;
    const auto find_at = [&](int64_t start, Block& block) {
      if (start > latest && following) block = *following;
      else block.find(o, sequence, kv, start, std::max(first, start), latest + 1);
    };
    int64_t start = first / kKeyBlock * kKeyBlock;
    for (find_at(start, *now); start < stop; std::swap(now, next)) {
      start += kKeyBlock;
      find_at(start, *next);  // may be of the next split: it is only fetched
      sum_block(*now, *next);
    }
    return true;
  }

  static void fetch(const T* row, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(reinterpret_cast<const uint8_t*>(row) + at, 0, 2);
  }

  void sum_block(Block& block, const Block& next) const {
    const int64_t bytes = o.size * static_cast<int64_t>(sizeof(T)), low = block.low, high = block.high;
    // Keys before `low` are hidden from all: any key stands in for them.
    for (int64_t key = 0; key < low; ++key) block.keys[key] = block.keys[low];
    // Memory is asked for the next block a little at a time: for its values while these keys are turned, for its keys
    // between the rows' scores, or where rows are few while these values are used.
    const bool shares = shares_blocks(), widens = shares && Arithmetic::kWidensKeys;
    float* turned = memory.keys;
    for (int64_t key = 0; key < high; key += kLanes) {
      for (int64_t i = std::max(key, next.low), stop = std::min(key + kLanes, next.high); i < stop; ++i)
        fetch(next.values[i], bytes);
      const auto* rows = reinterpret_cast<const uint8_t* const*>(block.keys + key);
      const int64_t count = std::min<int64_t>(kLanes, high - key);
      float* here = turned + key;
      if (widens)
        turn_rows(rows, count, bytes, [here](int64_t word, int64_t row, Vec x) {
          spill(here + 2 * word * kKeyBlock + row, even_of(x)), spill(here + (2 * word + 1) * kKeyBlock + row, odd_of(x));
        });
      else
        turn_rows(rows, count, bytes, [here](int64_t word, int64_t row, Vec x) { spill(here + word * kKeyBlock + row, x); });
    }
    // A block with fewer keys than the next one asks for the rest at once.
    for (int64_t i = std::max((high + kLanes - 1) / kLanes * kLanes, next.low); i < next.high; ++i)
      fetch(next.values[i], bytes);
    for (int64_t i = std::max(high, next.low); !shares && i < next.high; ++i) fetch(next.keys[i], bytes);
    for (int64_t i = 0; i < queries; ++i) {
      const Seen seen = memory.limits[i];
      memory.seen[i] = {std::max(seen.first - block.start, int64_t{0}), std::min(seen.stop - block.start, kKeyBlock)};
    }
    const int64_t columns = (high + kLanes - 1) / kLanes * kLanes, words = key_words<T>(o.size);
    widens ? score<float>(columns, 2 * words) : score<T>(columns, words);
    const int64_t share = shares ? kKeyBlock / queries + 1 : 0;
    for (int64_t i = 0, key = std::max(next.low, int64_t{0}); i < queries; ++i) {
      for (const int64_t stop = std::min(next.high, key + share); key < stop; ++key) fetch(next.keys[key], bytes);
      if (!memory.seen[i].any()) continue;
      float* scores = memory.scores + i * kKeyBlock;
      raise(scores, memory.seen[i], memory.sums[i], memory.mixed + i * memory.mixed_row, memory.mixed_row);
      Arithmetic::soften(scores, memory.sums[i]);
    }
    if (!shares) return mix(Arithmetic::scattered(block.values, next.keys, o.size), o.size);
    Arithmetic::fill_panel(block.values, low, high, o.size, memory.values, memory.mixed_row);
    mix(Arithmetic::panel(memory.values, memory.mixed_row), memory.mixed_row);
  }

  // Whether so many queries meet each key and value that preparing it once, in memory, costs less than each time.
  bool shares_blocks() const { return sizeof(T) == 2 && queries > kMostRows; }

  // Scores of the block's first `count` keys, a multiple of kLanes; Key: what they are turned into, `words` each.
  template <class Key>
  void score(int64_t count, int64_t words) const {
    by_rows([&](auto rows, int64_t i) { score_some<Key, rows>(i, count, words); });
  }

  template <class Key, int R>
  void score_some(int64_t i, int64_t count, int64_t words) const {
    constexpr int V = vectors_of(R);
    const float* q = memory.q + i * memory.q_row;
    float* scores = memory.scores + i * kKeyBlock;
    const Vec scale = all(static_cast<float>(o.scale));
    int64_t at = 0;
    for (; at + V * kLanes <= count; at += V * kLanes)
      Arithmetic::template score<Key, R, V>(q, memory.q_row, memory.keys + at, words, scale, scores + at);
    for (; at < count; at += kLanes)
      Arithmetic::template score<Key, R, 1>(q, memory.q_row, memory.keys + at, words, scale, scores + at);
  }

  template <class Values>
  void mix(const Values& values, int64_t size) const {
    by_rows([&](auto rows, int64_t i) {
      Arithmetic::template mix<rows>(memory.scores + i * kKeyBlock, values, memory.seen + i, size,
                                     memory.mixed + i * memory.mixed_row, memory.mixed_row);
    });
  }

  // f(how many queries, a constant; the first of them) for all queries.
  template <class F>
  void by_rows(F f) const {
    int64_t i = 0;
    for (; i + kMostRows <= queries; i += kMostRows) f(std::integral_constant<int, kMostRows>(), i);
    rest_by_rows<kMostRows - 1>(f, i);
  }

  template <int R, class F>
  void rest_by_rows(F f, int64_t i) const {
    if (i + R == queries) return f(std::integral_constant<int, R>(), i);
    if constexpr (R > 1) rest_by_rows<R - 1>(f, i);
  }

  // Of query i: all its splits in order, when their sums are kept one after another.
  T* out(int64_t i) const {
    return static_cast<T*>(o.out) + ((row + i / group) * o.heads + kv * group + i % group) * o.size;
  }

  bool sees_split(int64_t i, int64_t split) const {
    const Seen seen = memory.limits[i];
    return seen.any() && seen.first / kSplit <= split && split <= (seen.stop - 1) / kSplit;
  }

  // The whole tile by one thread.
  void attend(const Block* following) const {
    cache();
    load_queries();
    const auto size = static_cast<size_t>(memory.mixed_row);
    std::fill(memory.all_sums, memory.all_sums + queries, no_sums());
    std::fill(memory.all_mixed, memory.all_mixed + queries * memory.mixed_row, 0.0f);
    for (int64_t split = earliest / kSplit; split * kSplit <= latest; ++split) {
      if (!sum_split(split, following)) continue;
      for (int64_t i = 0; i < queries; ++i) {
        if (!sees_split(i, split)) continue;
        const float* mixed = memory.mixed + i * memory.mixed_row;
        float* all_mixed = memory.all_mixed + i * memory.mixed_row;
        if (split == memory.limits[i].first / kSplit) {
          memory.all_sums[i] = memory.sums[i];
          std::memcpy(all_mixed, mixed, size * sizeof(float));
        } else {
          join(memory.all_sums[i], all_mixed, memory.sums[i], mixed, memory.mixed_row);
        }
      }
    }
    for (int64_t i = 0; i < queries; ++i)
      finish<T, Arithmetic>(memory.all_sums[i], memory.all_mixed + i * memory.mixed_row, out(i), o.size);
  }
};

// How an operation is cut into pieces.
struct Cut {
  int64_t tiles = 0, splits = 1;  // splits > 1: sums are kept, and joined in a second phase
  // The base and, from the next vectors on, the total and what is mixed.
  static int64_t kept_floats(const AttentionOp& o) { return TileMemory::kept_floats(o) + 2 * kLanes; }

  static int64_t most_splits(const AttentionOp& o, int64_t rows) {
    const int64_t splits = (o.max_context + kSplit - 1) / kSplit;
    const size_t memory = static_cast<size_t>(rows * o.heads * splits * kept_floats(o)) * sizeof(float);
    return memory <= kSplitMemory ? splits : 1;
  }

  Cut(const AttentionOp& o, int64_t rows) {
    const int64_t step = rows_of_tile(o);
    if (!o.starts)
      tiles = rows;
    else
      for (int64_t s = 0; s < o.sequences; ++s) tiles += (o.starts[s + 1] - o.starts[s] + step - 1) / step;
    if (tiles * o.kv_heads >= kFewPieces || most_splits(o, rows) == 1) return;
    int64_t latest = 0;
    for (int64_t row = 0; row < rows; ++row) latest = std::max(latest, o.positions[row]);
    splits = std::min(latest / kSplit + 1, most_splits(o, rows));
  }

  // Rows of the tile-th tile: f(sequence, first row, rows).
  template <class F>
  static void with_tile(const AttentionOp& o, int64_t tile, F f) {
    if (!o.starts) return f(tile, tile, int64_t{1});
    const int64_t step = rows_of_tile(o);
    for (int64_t s = 0; s < o.sequences; ++s) {
      const int64_t count = o.starts[s + 1] - o.starts[s], tiles = (count + step - 1) / step;
      if (tile < tiles) return f(s, o.starts[s] + tile * step, std::min(step, count - tile * step));
      tile -= tiles;
    }
  }
};

template <class T>
inline void attention_pieces(const AttentionOp& o, const Context& context) {
  const Cut cut(o, context.rows);
  const TileMemory memory(o, context.own);
  const int64_t width = Cut::kept_floats(o), group = group_of(o);
  // Last tiles first: in a prompt they see the most.
  const auto tile_at = [&](int64_t tile, int64_t kv, auto f) {
    Cut::with_tile(o, cut.tiles - 1 - tile, [&](int64_t sequence, int64_t row, int64_t rows) {
      f(Tile<T>(o, memory, sequence, row, rows, kv));
    });
  };
  auto* kept = reinterpret_cast<float*>(context.shared);
  const auto place = [&](const Tile<T>& tile, int64_t i, int64_t split) {
    const int64_t row = tile.row + i / group, head = tile.kv * group + i % group;
    return kept + ((row * o.heads + head) * cut.splits + split) * width;
  };
  if (cut.splits == 1) {
    // Where there are many sequences, a thread takes all heads of one: what lies side by side is read by one core.
    const int64_t together = !o.starts && cut.tiles >= kManySequences * context.threads ? o.kv_heads : 1;
    const int64_t pieces = cut.tiles * o.kv_heads / together;
    // A tile of one row is done before memory gives its first keys: they are asked for while the one before it is done.
    KeyBlock<T> first_keys;
    const auto find_first = [&](int64_t tile) -> const KeyBlock<T>* {
      if (o.starts || tile >= cut.tiles * o.kv_heads) return nullptr;
      const int64_t row = cut.tiles - 1 - tile / o.kv_heads;
      const Seen seen = seen_by(o, row);
      first_keys.find(o, row, tile % o.kv_heads, seen.first / kKeyBlock * kKeyBlock, seen.first, seen.stop);
      return &first_keys;
    };
    for (int64_t later, piece = context.next(); piece < pieces; piece = later) {
      later = context.next();
      for (int64_t at = piece * together; at < (piece + 1) * together; ++at) {
        const auto* following = find_first(at + 1 < (piece + 1) * together ? at + 1 : later * together);
        tile_at(at / o.kv_heads, at % o.kv_heads, [&](const Tile<T>& tile) { tile.attend(following); });
      }
    }
  } else if (context.phase == 0) {
    for (int64_t piece; (piece = context.next()) < cut.tiles * cut.splits * o.kv_heads;) {
      const int64_t split = piece / o.kv_heads % cut.splits;
      tile_at(piece / o.kv_heads / cut.splits, piece % o.kv_heads, [&](const Tile<T>& tile) {
        // Who sees the row's own position, which is in its last split, puts it there.
        if (std::clamp<int64_t>(tile.latest / kSplit, 0, cut.splits - 1) == split) tile.cache();
        tile.load_queries();
        if (!tile.sum_split(split, nullptr)) return;
        for (int64_t i = 0; i < tile.queries; ++i) {
          float* to = place(tile, i, split);
          to[0] = memory.sums[i].base;
          spill(to + kLanes, load(memory.sums[i].total));
          std::memcpy(to + 2 * kLanes, memory.mixed + i * memory.mixed_row, memory.mixed_row * sizeof(float));
        }
      });
    }
  } else {
    for (int64_t piece; (piece = context.next()) < cut.tiles * o.kv_heads;) {
      tile_at(piece / o.kv_heads, piece % o.kv_heads, [&](const Tile<T>& tile) {
        for (int64_t i = 0; i < tile.queries; ++i) {
          const Seen seen = memory.limits[i];
          const int64_t first = seen.first / kSplit;
          const auto kept_sums = [](const float* at) {
            Sums sums;
            spill(sums.total, load(at + kLanes)), sums.base = at[0];
            return sums;
          };
          float* total = place(tile, i, first);
          if (!seen.any()) std::fill(total, total + width, 0.0f);
          Sums sums = kept_sums(total);
          for (int64_t split = first + 1; split * kSplit < seen.stop; ++split) {
            const float* next = place(tile, i, split);
            join(sums, total + 2 * kLanes, kept_sums(next), next + 2 * kLanes, memory.mixed_row);
          }
          finish<T, typename Tile<T>::Arithmetic>(sums, total + 2 * kLanes, tile.out(i), o.size);
        }
      });
    }
  }
}

inline void attention(const Op& op, const Context& context) {
  const auto& o = static_cast<const AttentionOp&>(op);
  o.dtype == kBF16 ? attention_pieces<bf16>(o, context) : attention_pieces<float>(o, context);
}

inline Scratch attention_scratch(const Op& op, int64_t rows, int) {
  const auto& o = static_cast<const AttentionOp&>(op);
  const int64_t splits = Cut::most_splits(o, rows);
  const int64_t kept = splits > 1 ? rows * o.heads * splits * Cut::kept_floats(o) : 0;
  return {static_cast<size_t>(kept) * sizeof(float), TileMemory::size(o)};
}

inline int attention_phases(const Op& op, int64_t rows) {
  return Cut(static_cast<const AttentionOp&>(op), rows).splits > 1 ? 2 : 1;
}

}  // namespace GTP_ISA
}  // namespace gtp
