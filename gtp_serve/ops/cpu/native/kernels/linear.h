// x @ weight.T for weights as they lie.  Each output is one dot product, its terms added in an order that in_size alone
// decides: neither the number of rows nor who computes beside it changes a bit.
#pragma once

namespace gtp {
namespace GTP_ISA {

// The order: kChains running sums, the vector of lanes i going to chain (i % kChains); chains are added in pairs.
constexpr int kChains = 4;

template <class X, class W>
inline float dot(const X* x, const W* w, int64_t size) {
  Vec chain[kChains] = {zero(), zero(), zero(), zero()};
  int64_t at = 0;
  for (; at + kChains * kLanes <= size; at += kChains * kLanes)
    for (int i = 0; i < kChains; ++i)
      chain[i] = fma(load(x + at + i * kLanes), load(w + at + i * kLanes), chain[i]);
  for (int i = 0; at < size; at += kLanes, ++i) {
    const int64_t left = size - at;
    chain[i] = left >= kLanes ? fma(load(x + at), load(w + at), chain[i])
                              : fma(load_some(x + at, left), load_some(w + at, left), chain[i]);
  }
  return sum(add(add(chain[0], chain[1]), add(chain[2], chain[3])));
}

// One output before it is rounded.
template <class T, class W>
inline float output(const LinearOp& o, int64_t row, int64_t column) {
  const T* x = static_cast<const T*>(o.x) + row * o.x_row;
  float y = dot(x, static_cast<const W*>(o.weight) + column * o.weight_row, o.in_size);
  if (o.scale) y *= o.scale[column];
  if (o.bias) y += widen(static_cast<const T*>(o.bias)[column]);
  return y;
}

inline Partial partial_of(const float* logits, int64_t count, int64_t first_id) {
  Partial found{logits[0], 0.0f, first_id};
  bool finite = true;
  for (int64_t at = 0; at < count; ++at) {
    finite &= std::isfinite(logits[at]);
    if (logits[at] > found.largest) found.largest = logits[at], found.id = first_id + at;
  }
  if (!finite) {
    found.largest = std::numeric_limits<float>::quiet_NaN();
    return found;
  }
  Vec total = zero();
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) total = add(total, exp(sub(load(logits + at), all(found.largest))));
  found.sum = sum(total);
  for (; at < count; ++at) found.sum += std::exp(logits[at] - found.largest);
  return found;
}

template <class T, class W>
inline void linear_rows(const LinearOp& o, const Context& context) {
  const int64_t blocks = (o.vocab + kHeadBlock - 1) / kHeadBlock;
  const int64_t outputs = o.swiglu ? o.out_size / 2 : o.out_size;
  for (int64_t first; (first = context.next(kHeadBlock)) < outputs;) {
    const int64_t stop = std::min(first + kHeadBlock, outputs);
    for (int64_t row = 0; row < context.rows; ++row) {
      for (int64_t column = first; column < stop; ++column) {
        const float y = output<T, W>(o, row, column);
        const int64_t at = row * o.out_row + column;
        if (o.swiglu) {
          const Vec gate = all(widen(rounded<T>(y))), up = all(widen(rounded<T>(output<T, W>(o, row, outputs + column))));
          store_some(static_cast<T*>(o.out) + at, mul(through<T>(silu(gate)), up), 1);
        } else if (o.out_dtype == kF32) {
          static_cast<float*>(o.out)[at] = y;
        } else {
          static_cast<T*>(o.out)[at] = rounded<T>(y);
        }
      }
      if (o.partials && first < o.vocab)
        static_cast<Partial*>(o.partials)[row * blocks + first / kHeadBlock] = partial_of(
            static_cast<const float*>(o.out) + row * o.out_row + first, std::min(stop, o.vocab) - first, first);
    }
  }
}

template <class T>
inline void linear_of(const LinearOp& o, const Context& context) {
  if (o.weight_dtype == kI8) return linear_rows<T, int8_t>(o, context);
  if (o.weight_dtype == kBF16) return linear_rows<T, bf16>(o, context);
  linear_rows<T, float>(o, context);
}

inline void linear(const Op& op, const Context& context) {
  const auto& o = static_cast<const LinearOp&>(op);
  o.dtype == kBF16 ? linear_of<bf16>(o, context) : linear_of<float>(o, context);
}

inline Scratch linear_scratch(const Op&, int64_t, int) { return {}; }
inline int linear_phases(const Op&, int64_t) { return 1; }

}  // namespace GTP_ISA
}  // namespace gtp
