// The beginning of a row's ids in order, and the mass of all of them: what a token is drawn from.
#pragma once

namespace gtp {
namespace GTP_ISA {

constexpr int64_t kOrderBlock = 64;  // logits whose largest is found first, where few are wanted

// Sorts as (logit descending, id ascending) when sorted downwards.  Adding zero turns -0 into 0.
inline uint64_t order_key(float logit, int64_t id) {
  const float number = logit + 0.0f;
  int32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  const auto sortable = static_cast<uint32_t>(bits ^ ((bits >> 31) & 0x7fffffff)) ^ 0x80000000u;
  return static_cast<uint64_t>(sortable) << 32 | static_cast<uint32_t>(INT32_MAX - id);
}

inline int64_t id_of(uint64_t key) { return INT32_MAX - static_cast<int64_t>(key & 0xffffffffu); }

// Without what is no number.
inline float largest_of(const float* logits, int64_t count) {
  Vec most = all(-std::numeric_limits<float>::infinity());
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) most = max(load(logits + at), most);  // of NaN and another the second
  float lane[kLanes];
  spill(lane, most);
  float found = *std::max_element(lane, lane + kLanes);
  for (; at < count; ++at)
    if (logits[at] > found) found = logits[at];
  return found;
}

struct OrderMemory {
  float *largest, *sorted;  // of each block
  uint64_t* keys;

  static int64_t most_blocks(int64_t vocab) { return (vocab + kLanes - 1) / kLanes; }
  static size_t size(int64_t vocab) {
    return padded_bytes(2 * most_blocks(vocab) * sizeof(float)) + vocab * sizeof(uint64_t);
  }
  OrderMemory(uint8_t* memory, int64_t vocab)
      : largest(reinterpret_cast<float*>(memory)), sorted(largest + most_blocks(vocab)),
        keys(reinterpret_cast<uint64_t*>(memory + padded_bytes(2 * most_blocks(vocab) * sizeof(float)))) {}
};

// Keys of at least the first `width` ids; how many.  Each of the `width` blocks with the largest logits has one that is
// no smaller than the smallest of these largest: so many are above it, and nothing below it is among the first.
inline int64_t gather_keys(const float* logits, int64_t vocab, int64_t width, const OrderMemory& memory) {
  int64_t size = kOrderBlock;
  while (size > kLanes && vocab < 2 * width * size) size /= 2;
  const int64_t blocks = (vocab + size - 1) / size;
  float threshold = -std::numeric_limits<float>::infinity();
  for (int64_t block = 0; block < blocks; ++block)
    memory.largest[block] = largest_of(logits + block * size, std::min(size, vocab - block * size));
  if (width <= blocks) {
    std::copy(memory.largest, memory.largest + blocks, memory.sorted);
    std::nth_element(memory.sorted, memory.sorted + width - 1, memory.sorted + blocks, std::greater<float>());
    threshold = memory.sorted[width - 1];
  }
  int64_t count = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    if (memory.largest[block] < threshold) continue;
    for (int64_t id = block * size, stop = std::min(id + size, vocab); id < stop; ++id)
      if (logits[id] >= threshold) memory.keys[count++] = order_key(logits[id], id);
  }
  if (count >= width) return count;
  for (int64_t id = 0; id < vocab; ++id) memory.keys[id] = order_key(logits[id], id);  // some are no numbers
  return vocab;
}

// The sum of exp((logit - best) / temperature), each term in float32, the sum in float64.
inline double mass_of(const float* logits, int64_t vocab, float best, float temperature) {
  constexpr int kTogether = 4, kStep = kTogether * kLanes;
  double total = 0.0;
  float part[kStep];
  for (int64_t first = 0; first < vocab; first += kStep) {
    const int64_t count = std::min<int64_t>(kStep, vocab - first);
    Vec x[kTogether], y[kTogether];
    const float* from = logits + first;
    if (count < kStep) {
      std::fill(part, part + kStep, -std::numeric_limits<float>::infinity());
      std::copy(from, from + count, part);
      from = part;
    }
    GTP_UNROLL
    for (int i = 0; i < kTogether; ++i)
      x[i] = max(div(sub(load(from + i * kLanes), all(best)), all(temperature)), all(-87.33654f));
    exp_within(x, y);
    // Four terms of a lane in float32, then lanes in float64: as exact as float32 terms allow.
    total += static_cast<double>(sum(add(add(y[0], y[1]), add(y[2], y[3]))));
  }
  return total;
}

inline void order(const Op& op, const Context& context) {
  const auto& o = static_cast<const OrderOp&>(op);
  const OrderMemory memory(context.own, o.vocab);
  for (int64_t row; (row = context.next()) < context.rows;) {
    const float* logits = o.logits + row * o.logits_row;
    const int64_t count = gather_keys(logits, o.vocab, o.width, memory);
    if (o.width < count)
      std::nth_element(memory.keys, memory.keys + o.width - 1, memory.keys + count, std::greater<uint64_t>());
    std::sort(memory.keys, memory.keys + o.width, std::greater<uint64_t>());
    for (int64_t i = 0; i < o.width; ++i) {
      const int64_t id = id_of(memory.keys[i]);
      o.ids[row * o.width + i] = id;
      o.top[row * o.width + i] = logits[id];
    }
    o.mass[row] = mass_of(logits, o.vocab, o.top[row * o.width], o.temperatures[row]);
  }
}

inline Scratch order_scratch(const Op& op, int64_t, int) {
  return {0, OrderMemory::size(static_cast<const OrderOp&>(op).vocab)};
}

}  // namespace GTP_ISA
}  // namespace gtp
