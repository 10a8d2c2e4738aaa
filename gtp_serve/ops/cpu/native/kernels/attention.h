// Attention over the paged cache.  A row takes its keys in blocks of fixed positions, in order, so that its result
// depends neither on the rest of the batch nor on how its prompt was cut.
#pragma once

namespace gtp {
namespace GTP_ISA {

// The sequence that a row belongs to.
inline int64_t sequence_of(const AttentionOp& o, int64_t row) {
  if (!o.starts) return row;
  return std::upper_bound(o.starts, o.starts + o.sequences + 1, row) - o.starts - 1;
}

template <class T>
inline void attend_row(const AttentionOp& o, int64_t row, int64_t head, float* scores, float* mixed) {
  const int64_t width = o.kv_heads * o.size, kv = head / (o.heads / o.kv_heads);
  const int64_t* table = o.tables + sequence_of(o, row) * o.table_row;
  const int64_t last = o.positions[row], first = o.window > 0 ? std::max<int64_t>(0, last - o.window + 1) : 0;
  const T* q = static_cast<const T*>(o.q) + row * o.q_row + head * o.size;
  const auto at = [&](const void* cache, int64_t position) {
    const int64_t block = std::clamp<int64_t>(table[position / o.block_size], 0, o.num_blocks - 1);
    return static_cast<const T*>(cache) + (block * o.block_size + position % o.block_size) * width + kv * o.size;
  };
  float largest = -std::numeric_limits<float>::infinity(), total = 0.0f;
  for (int64_t position = first; position <= last; ++position) {
    scores[position - first] = dot(q, at(o.keys, position), o.size) * static_cast<float>(o.scale);
    largest = std::max(largest, scores[position - first]);
  }
  std::fill(mixed, mixed + o.size, 0.0f);
  for (int64_t position = first; position <= last; ++position) {
    float power[kLanes];
    spill(power, exp(all(scores[position - first] - largest)));
    total += power[0];
    const T* value = at(o.values, position);
    for (int64_t i = 0; i < o.size; ++i) mixed[i] += power[0] * widen(value[i]);
  }
  T* out = static_cast<T*>(o.out) + (row * o.heads + head) * o.size;
  for (int64_t i = 0; i < o.size; ++i) out[i] = rounded<T>(mixed[i] / total);
}

inline void attention(const Op& op, const Context& context) {
  const auto& o = static_cast<const AttentionOp&>(op);
  float *mixed = reinterpret_cast<float*>(context.own), *scores = mixed + o.size;
  for (int64_t piece; (piece = context.next()) < context.rows * o.heads;) {
    const int64_t row = piece / o.heads, head = piece % o.heads;
    o.dtype == kBF16 ? attend_row<bf16>(o, row, head, scores, mixed) : attend_row<float>(o, row, head, scores, mixed);
  }
}

inline Scratch attention_scratch(const Op& op, int64_t, int) {
  const auto& o = static_cast<const AttentionOp&>(op);
  return {0, static_cast<size_t>(o.max_context + o.size) * sizeof(float)};
}
inline int attention_phases(const Op&, int64_t) { return 1; }

}  // namespace GTP_ISA
}  // namespace gtp
