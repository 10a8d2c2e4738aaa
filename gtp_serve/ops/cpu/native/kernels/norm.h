// RMSNorm, alone or after the addition of what the layer before gave.
#pragma once

namespace gtp {
namespace GTP_ISA {

template <class T>
inline float sum_of_squares(const T* x, int64_t size) {
  Vec total[2] = {zero(), zero()};
  int64_t at = 0;
  for (; at + 2 * kLanes <= size; at += 2 * kLanes)
    for (int half = 0; half < 2; ++half) {
      const Vec part = load(x + at + half * kLanes);
      total[half] = fma(part, part, total[half]);
    }
  for (int half = 0; at < size; at += kLanes, ++half) {
    const Vec part = size - at >= kLanes ? load(x + at) : load_some(x + at, size - at);
    total[half] = fma(part, part, total[half]);
  }
  return sum(add(total[0], total[1]));
}

template <class T, class F>
inline void each_vector(int64_t size, F f) {
  int64_t at = 0;
  for (; at + kLanes <= size; at += kLanes)
    f(at, [](const T* p) { return load(p); }, [](T* p, Vec x) { store(p, x); });
  if (at < size) {
    const int64_t left = size - at;
    f(at, [left](const T* p) { return load_some(p, left); }, [left](T* p, Vec x) { store_some(p, x, left); });
  }
}

// x rounded to T, as a vector of float32.
template <class T>
inline Vec through(Vec x) { return sizeof(T) == 2 ? through_bf16(x) : x; }

template <class T>
inline void norm_one(const T* x, const T* weight, T* out, int64_t size, float eps) {
  const float scale = 1.0f / std::sqrt(sum_of_squares(x, size) / static_cast<float>(size) + eps);
  each_vector<T>(size, [&](int64_t at, auto read, auto write) {
    write(out + at, mul(read(weight + at), through<T>(mul(read(x + at), all(scale)))));
  });
}

// One row, to `out`; its sum with delta, if there is one, to `sums`.
template <class T>
inline void norm_row(const NormOp& o, int64_t row, T* sums, T* out) {
  const T* from = static_cast<const T*>(o.x) + row * o.x_row;
  if (o.delta) {
    const T* added = static_cast<const T*>(o.delta) + row * o.delta_row;
    each_vector<T>(o.size, [&](int64_t at, auto read, auto write) {
      write(sums + at, add(read(from + at), read(added + at)));
    });
    from = sums;
  }
  for (int64_t inner = 0; inner < o.inner; ++inner)
    norm_one(from + inner * o.x_inner, static_cast<const T*>(o.weight), out + inner * o.out_inner, o.size,
             static_cast<float>(o.eps));
}

template <class T>
inline void norm_rows(const NormOp& o, const Context& context) {
  context.each_row([&](int64_t row) {
    norm_row(o, row, static_cast<T*>(o.total) + row * o.total_row, static_cast<T*>(o.out) + row * o.out_row);
  });
}

inline void norm(const Op& op, const Context& context) {
  const auto& o = static_cast<const NormOp&>(op);
  o.dtype == kBF16 ? norm_rows<bf16>(o, context) : norm_rows<float>(o, context);
}

}  // namespace GTP_ISA
}  // namespace gtp
