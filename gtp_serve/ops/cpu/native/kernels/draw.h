// A token is drawn from a row's ids in order (logit descending, id ascending), of which top-k, top-p and min-p each keep
// a beginning, as ops/sampling.py has it.  Only as much of the order is found as the row's own draw needs.
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

struct DrawMemory {
  float *largest, *sorted;  // of each block
  float* weights;           // of ids in order, as many as whole vectors
  uint64_t* keys;
  double* sums;
  uint16_t* ranges;  // of each id

  static int64_t most_blocks(int64_t vocab) { return (vocab + kLanes - 1) / kLanes; }
  static int64_t floats(int64_t vocab) { return (2 + kLanes) * most_blocks(vocab); }
  static size_t size(int64_t vocab) {
    return padded_bytes(floats(vocab) * sizeof(float)) + vocab * (sizeof(uint64_t) + sizeof(double) + sizeof(uint16_t));
  }
  DrawMemory(uint8_t* memory, int64_t vocab)
      : largest(reinterpret_cast<float*>(memory)), sorted(largest + most_blocks(vocab)),
        weights(sorted + most_blocks(vocab)),
        keys(reinterpret_cast<uint64_t*>(memory + padded_bytes(floats(vocab) * sizeof(float)))),
        sums(reinterpret_cast<double*>(keys + vocab)), ranges(reinterpret_cast<uint16_t*>(sums + vocab)) {}
};

// Keys of at least the first `width` ids; how many.  Each of the `width` blocks with the largest logits has one that is
// no smaller than the smallest of these largest: so many are above it, and nothing below it is among the first.
inline int64_t gather_keys(const float* logits, int64_t vocab, int64_t width, const DrawMemory& memory) {
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

// What the ids of the first `count` keys weigh beside the best logit, and the sums of this up to each, and of `before`.
inline void weigh(const float* logits, int64_t count, float best, float temperature, double before,
                  const DrawMemory& memory) {
  for (int64_t i = 0; i < (count + kLanes - 1) / kLanes * kLanes; ++i)
    memory.weights[i] = i < count ? logits[id_of(memory.keys[i])] : -std::numeric_limits<float>::infinity();
  double sum = before;
  for (int64_t first = 0; first < count; first += kLanes) {
    float* weights = memory.weights + first;
    spill(weights, exp(div(sub(load(weights), all(best)), all(temperature))));
    for (int64_t i = 0; i < std::min<int64_t>(kLanes, count - first); ++i)
      memory.sums[first + i] = sum += static_cast<double>(weights[i]);
  }
}

// The first `width` ids of a row in order, with weights and sums.
inline void find_order(const float* logits, int64_t vocab, int64_t width, float temperature, const DrawMemory& memory) {
  const int64_t count = gather_keys(logits, vocab, width, memory);
  if (width < count)
    std::nth_element(memory.keys, memory.keys + width - 1, memory.keys + count, std::greater<uint64_t>());
  std::sort(memory.keys, memory.keys + width, std::greater<uint64_t>());
  weigh(logits, width, logits[id_of(memory.keys[0])], temperature, 0.0, memory);
}

// What a row draws by.
struct Drawing {
  float temperature;
  int64_t top_k;  // as many as there are ids: all
  double top_p, min_p, uniform;
};

// How many of the first `width` sums f holds for; it holds for a beginning.
template <class F>
inline int64_t how_many(const double* sums, int64_t width, F f) {
  return std::partition_point(sums, sums + width, f) - sums;
}

// The id that is drawn, or -1 if `width` ids in order do not tell.  mass(): the weight of all ids.
template <class Mass>
inline int64_t draw_from(const DrawMemory& memory, int64_t width, int64_t vocab, const Drawing& by, Mass mass) {
  const double* sums = memory.sums;
  const auto prefix = [&](int64_t count) { return sums[std::min(count, width) - 1]; };
  const bool whole = width == vocab;
  const bool filters = by.top_k < vocab || by.top_p < 1 || by.min_p > 0;
  const auto everything = [&] { return whole ? sums[width - 1] : mass(); };
  int64_t kept = by.top_k;
  if (by.top_p < 1) {
    if (by.top_k > width && by.top_k < vocab) return -1;
    const double limit = by.top_p * (by.top_k == vocab ? everything() : prefix(by.top_k));
    kept = std::min(kept, 1 + how_many(sums, width, [&](double sum) { return sum < limit; }));
  }
  const float *const weights = memory.weights, *const end = weights + width;
  const int64_t heavy = std::partition_point(weights, end, [&](float weight) { return weight >= by.min_p; }) - weights;
  if (heavy < width) kept = std::min(kept, heavy);
  kept = std::max<int64_t>(kept, 1);
  if (filters && kept > width) return -1;
  const double target = by.uniform * (filters ? prefix(kept) : everything());
  // Less than the last sum that counts, as the number is less than 1.
  const int64_t place = how_many(sums, width, [&](double sum) { return sum <= target; });
  if (place >= width) return -1;
  return id_of(memory.keys[place]);
}

// All of a row's ids without their whole order: how many fall into each of many ranges of logits, best first, and what
// they weigh.  Of the ranges that a draw ends in the ids are put in order.
class Ranges {
 public:
  Ranges(const float* logits, int64_t vocab, float temperature, const DrawMemory& memory)
      : memory_(memory), logits_(logits), vocab_(vocab), best_(largest_of(logits, vocab)), temperature_(temperature) {
    std::fill(counts_, counts_ + kRanges + 1, 0);
    std::fill(masses_, masses_ + kRanges + 1, 0.0);
    const float low = least(), span = std::min(best_ - low, kWeightless * temperature);
    const float scale = span > 0 ? (kRanges - 1) / span : 0.0f;
    float place[kLanes], weight[kLanes], part[kLanes];
    for (int64_t first = 0; first < vocab; first += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, vocab - first);
      const float* from = logits + first;
      if (count < kLanes) {
        std::fill(std::copy(from, from + count, part), part + kLanes, low);
        from = part;
      }
      // Of what is no number and another the second.
      spill(place, min(mul(sub(all(best_), load(from)), all(scale)), all(kRanges - 1)));
      spill(weight, weights(load(from)));
      for (int64_t i = 0; i < count; ++i) {
        const auto range = static_cast<uint16_t>(place[i]);
        memory.ranges[first + i] = range;
        ++counts_[range + 1];
        masses_[range + 1] += static_cast<double>(weight[i]);
      }
    }
    for (int range = 0; range < kRanges; ++range) {
      counts_[range + 1] += counts_[range];
      masses_[range + 1] += masses_[range];
    }
  }

  double mass() const { return masses_[kRanges]; }

  // Of the first `count` ids, at least one.
  double mass_of_first(int64_t count) {
    const auto range = std::lower_bound(counts_ + 1, counts_ + kRanges, count) - counts_ - 1;
    sort(range);
    return count > counts_[range] ? sums()[count - counts_[range] - 1] : masses_[range];
  }

  // How many ids there are up to the first one at which f(sum so far) holds, and that one; all where it never does.
  template <class F>
  int64_t until(F f) {
    const auto before = [&](double mass) { return !f(mass); };
    const auto range = std::partition_point(masses_ + 1, masses_ + kRanges, before) - masses_ - 1;
    sort(range);
    const int64_t found = how_many(sums(), size_, before);
    return std::min(counts_[range] + found + 1, counts_[range + 1]);
  }

  int64_t at_least(double weight) {
    int64_t found = 0;
    float part[kLanes];
    for (int64_t first = 0; first < vocab_; first += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, vocab_ - first);
      std::copy(logits_ + first, logits_ + first + count, part);
      spill(part, weights(load(part)));
      found += std::count_if(part, part + count, [&](float one) { return one >= weight; });
    }
    return found;
  }

  // The id at a place of the order, or the last one before it that has any weight.
  int64_t id_at(int64_t place) {
    for (;;) {
      const auto range = std::upper_bound(counts_ + 1, counts_ + kRanges, place) - counts_ - 1;
      sort(range);
      for (int64_t i = std::min(place - counts_[range], size_ - 1); i >= 0; --i)
        if (memory_.weights[i] > 0) return id_of(memory_.keys[i]);
      if (range == 0) return id_of(memory_.keys[0]);
      place = counts_[range] - 1;
    }
  }

 private:
  static constexpr int kRanges = 1024;
  static constexpr float kWeightless = 88.0f;  // e to the minus this is nothing

  Vec weights(Vec logits) const { return exp(div(sub(logits, all(best_)), all(temperature_))); }

  float least() const {
    float low = best_;
    for (int64_t id = 0; id < vocab_; ++id)
      if (logits_[id] < low && logits_[id] > -std::numeric_limits<float>::infinity()) low = logits_[id];
    return low;
  }

  const double* sums() const { return memory_.sums; }

  // Keys, weights and sums of one range in order.
  void sort(int64_t range) {
    if (range == sorted_) return;
    sorted_ = range;
    size_ = 0;
    for (int64_t id = 0; id < vocab_; ++id)
      if (memory_.ranges[id] == range) memory_.keys[size_++] = order_key(logits_[id], id);
    std::sort(memory_.keys, memory_.keys + size_, std::greater<uint64_t>());
    weigh(logits_, size_, best_, temperature_, masses_[range], memory_);
  }

  const DrawMemory& memory_;
  const float* logits_;
  int64_t vocab_;
  float best_, temperature_;
  int64_t sorted_ = -1, size_ = 0;
  int64_t counts_[kRanges + 1];  // of all ranges before
  double masses_[kRanges + 1];
};

// The same from all ids.
inline int64_t draw_from_all(const float* logits, int64_t vocab, const Drawing& by, const DrawMemory& memory) {
  Ranges ranges(logits, vocab, by.temperature, memory);
  int64_t kept = by.top_k;
  if (by.top_p < 1) {
    const double limit = by.top_p * (by.top_k == vocab ? ranges.mass() : ranges.mass_of_first(by.top_k));
    kept = std::min(kept, ranges.until([&](double sum) { return sum >= limit; }));
  }
  if (by.min_p > 0) kept = std::min(kept, ranges.at_least(by.min_p));
  kept = std::max<int64_t>(kept, 1);
  const double target = by.uniform * (kept < vocab ? ranges.mass_of_first(kept) : ranges.mass());
  return ranges.id_at(std::min(ranges.until([&](double sum) { return sum > target; }), kept) - 1);
}

constexpr int64_t kFirstWidth = 256, kNarrowWidth = 64;

inline int64_t draw_row(const float* logits, int64_t vocab, const Drawing& by, const DrawMemory& memory) {
  const int64_t width = std::min(vocab, by.top_k <= kNarrowWidth ? kNarrowWidth : kFirstWidth);
  find_order(logits, vocab, width, by.temperature, memory);
  const auto mass = [&] { return mass_of(logits, vocab, logits[id_of(memory.keys[0])], by.temperature); };
  const int64_t found = draw_from(memory, width, vocab, by, mass);
  return found >= 0 ? found : draw_from_all(logits, vocab, by, memory);
}

inline void draw(const Op& op, const Context& context) {
  const auto& o = static_cast<const DrawOp&>(op);
  const DrawMemory memory(context.own, o.vocab);
  for (int64_t row; (row = context.next()) < context.rows;) {
    const int64_t top_k = o.top_k[row] < 1 ? o.vocab : std::min(o.top_k[row], o.vocab);
    const Drawing by{o.temperatures[row], top_k, o.top_p[row], o.min_p[row], o.uniform[row]};
    o.ids[row] = draw_row(o.logits + o.at[row] * o.logits_row, o.vocab, by, memory);
  }
}

inline Scratch draw_scratch(const Op& op, int64_t, int) {
  return {0, DrawMemory::size(static_cast<const DrawOp&>(op).vocab)};
}

}  // namespace GTP_ISA
}  // namespace gtp
