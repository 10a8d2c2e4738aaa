// What becomes of products: scale, bias, SwiGLU, rounding, and what greedy choice needs.
#pragma once

namespace gtp {
namespace GTP_ISA {

// Of `count` logits, at most kHeadBlock, which are those from `first_id` on.
inline Partial partial_of(const float* logits, int64_t count, int64_t first_id) {
  const float nothing = -std::numeric_limits<float>::infinity(), most = std::numeric_limits<float>::max();
  Partial found{nothing, 0.0f, first_id};
  Vec largest = all(nothing);
  bool finite = true;
  int64_t place = 0;
  for (; place + kLanes <= count; place += kLanes) {
    const Vec some = load(logits + place);
    finite &= all_within(some, -most, most);
    largest = max(largest, some);
  }
  float lanes[kLanes];
  spill(lanes, largest);
  for (const float lane : lanes) found.largest = std::max(found.largest, lane);
  for (; place < count; ++place) {
    finite &= std::isfinite(logits[place]);
    found.largest = std::max(found.largest, logits[place]);
  }
  if (!finite) {
    found.largest = std::numeric_limits<float>::quiet_NaN();
    return found;
  }
  while (logits[found.id - first_id] != found.largest) ++found.id;
  Vec total = zero();
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) total = add(total, exp(sub(load(logits + at), all(found.largest))));
  found.sum = sum(total);
  for (; at < count; ++at) found.sum += std::exp(logits[at] - found.largest);
  return found;
}

// One row's outputs `first` to `stop`, of their products y; with SwiGLU those are gates and `up` has the others.
template <class T>
inline void put_row(const LinearOp& o, int64_t row, int64_t first, int64_t stop, const float* y, const float* up) {
  const T* bias = static_cast<const T*>(o.bias);
  T* out = static_cast<T*>(o.out) + row * o.out_row;
  float* wide_out = static_cast<float*>(o.out) + row * o.out_row;
  const int64_t half = o.out_size / 2;
  const auto finished = [&](auto read, const float* products, int64_t of) {
    Vec total = load(products);
    if (o.scale) total = mul(total, read(o.scale + of));
    if (bias) total = add(total, read(bias + of));
    return total;
  };
  const auto put = [&](int64_t column, auto read, auto write) {
    const Vec total = finished(read, y + (column - first), column);
    if (o.swiglu) {
      const Vec gate = through<T>(total);
      const Vec other = through<T>(finished(read, up + (column - first), half + column));
      write(out + column, mul(through<T>(silu(gate)), other));
    } else if (o.out_dtype == kF32) {
      write(wide_out + column, through<T>(total));
    } else {
      write(out + column, total);
    }
  };
  const auto read_all = [](const auto* p) { return load(p); };
  int64_t column = first;
  for (constexpr int kTogether = 4; o.swiglu && column + kTogether * kLanes <= stop; column += kTogether * kLanes) {
    Vec gate[kTogether];
    GTP_UNROLL
    for (int i = 0; i < kTogether; ++i)
      gate[i] = through<T>(finished(read_all, y + (column - first) + i * kLanes, column + i * kLanes));
    silu(gate);
    GTP_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      const int64_t at = column + i * kLanes;
      const Vec other = through<T>(finished(read_all, up + (at - first), half + at));
      store(out + at, mul(through<T>(gate[i]), other));
    }
  }
  for (; column + kLanes <= stop; column += kLanes)
    put(column, read_all, [](auto* p, Vec x) { store(p, x); });
  if (const int64_t left = stop - column; left > 0)
    put(column, [left](const auto* p) { return load_some(p, left); },
        [left](auto* p, Vec x) { store_some(p, x, left); });
  if (o.partials)
    for (int64_t id = first; id < std::min(stop, o.vocab); id += kHeadBlock) {
      const int64_t blocks = (o.vocab + kHeadBlock - 1) / kHeadBlock;
      static_cast<Partial*>(o.partials)[row * blocks + id / kHeadBlock] =
          partial_of(wide_out + id, std::min({id + kHeadBlock, stop, o.vocab}) - id, id);
    }
}

}  // namespace GTP_ISA
}  // namespace gtp
