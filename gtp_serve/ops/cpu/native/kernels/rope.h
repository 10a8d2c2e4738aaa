// Rotary embedding of queries and keys, the keys and values written to their slots of the cache.
#pragma once

namespace gtp {
namespace GTP_ISA {

template <class T>
inline void rotate_head(const T* x, const T* cos, const T* sin, T* out, int64_t half) {
  each_vector<T>(half, [&](int64_t at, auto read, auto write) {
    const Vec first = read(x + at), second = read(x + half + at), c = read(cos + at), s = read(sin + at);
    // Each product is rounded before the sum, as tensors of this type do.
    write(out + at, sub(through<T>(mul(first, c)), through<T>(mul(second, s))));
    write(out + half + at, add(through<T>(mul(second, c)), through<T>(mul(first, s))));
  });
}

template <class T>
inline void rope_rows(const RopeOp& o, const Context& context) {
  const auto *q = static_cast<const T*>(o.q), *k = static_cast<const T*>(o.k), *v = static_cast<const T*>(o.v);
  const auto *cos = static_cast<const T*>(o.cos), *sin = static_cast<const T*>(o.sin);
  auto *out = static_cast<T*>(o.out_q), *keys = static_cast<T*>(o.keys), *values = static_cast<T*>(o.values);
  const int64_t half = o.size / 2, width = o.kv_heads * o.size;
  for (int64_t row; (row = context.next()) < context.rows;) {
    const T *c = cos + row * o.cos_row, *s = sin + row * o.cos_row;
    for (int64_t head = 0; head < o.heads; ++head)
      rotate_head(q + row * o.q_row + head * o.size, c, s, out + (row * o.heads + head) * o.size, half);
    const int64_t slot = o.slots[row];
    if (slot < 0 || slot >= o.num_slots) continue;
    for (int64_t head = 0; head < o.kv_heads; ++head)
      rotate_head(k + row * o.k_row + head * o.size, c, s, keys + slot * width + head * o.size, half);
    std::memcpy(values + slot * width, v + row * o.v_row, width * sizeof(T));
  }
}

inline void rope(const Op& op, const Context& context) {
  const auto& o = static_cast<const RopeOp&>(op);
  o.dtype == kBF16 ? rope_rows<bf16>(o, context) : rope_rows<float>(o, context);
}

}  // namespace GTP_ISA
}  // namespace gtp
