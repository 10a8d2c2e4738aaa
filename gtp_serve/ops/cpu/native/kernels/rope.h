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
inline void rotate_query(const RopeOp& o, int64_t row, int64_t head, T* out) {
  const auto *cos = static_cast<const T*>(o.cos), *sin = static_cast<const T*>(o.sin);
  rotate_head(static_cast<const T*>(o.q) + row * o.q_row + head * o.size, cos + row * o.cos_row, sin + row * o.cos_row,
              out, o.size / 2);
}

// A row's key and value of one KV head, to its slot; nowhere if there is no such slot.
template <class T>
inline void cache_head(const RopeOp& o, int64_t row, int64_t head) {
  const auto *cos = static_cast<const T*>(o.cos), *sin = static_cast<const T*>(o.sin);
  const int64_t slot = o.slots[row];
  if (slot < 0 || slot >= o.num_slots) return;
  const int64_t at = (slot * o.kv_heads + head) * o.size;
  rotate_head(static_cast<const T*>(o.k) + row * o.k_row + head * o.size, cos + row * o.cos_row, sin + row * o.cos_row,
              static_cast<T*>(o.keys) + at, o.size / 2);
  std::memcpy(static_cast<T*>(o.values) + at, static_cast<const T*>(o.v) + row * o.v_row + head * o.size,
              o.size * sizeof(T));
}

template <class T>
inline void rope_rows(const RopeOp& o, const Context& context) {
  context.each_row([&](int64_t row) {
    for (int64_t head = 0; head < o.heads; ++head)
      rotate_query<T>(o, row, head, static_cast<T*>(o.out_q) + (row * o.heads + head) * o.size);
    for (int64_t head = 0; head < o.kv_heads; ++head) cache_head<T>(o, row, head);
  });
}

inline void rope(const Op& op, const Context& context) {
  const auto& o = static_cast<const RopeOp&>(op);
  o.dtype == kBF16 ? rope_rows<bf16>(o, context) : rope_rows<float>(o, context);
}

}  // namespace GTP_ISA
}  // namespace gtp
