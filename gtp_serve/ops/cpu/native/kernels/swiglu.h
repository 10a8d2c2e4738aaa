// silu(gate) * up, and what a mixture adds to its experts' sum.
#pragma once

namespace gtp {
namespace GTP_ISA {

template <class T>
inline void swiglu_row(const T* gate, const T* up, T* out, int64_t size) {
  each_vector<T>(size, [&](int64_t at, auto read, auto write) {
    write(out + at, mul(through<T>(silu(read(gate + at))), read(up + at)));
  });
}

template <class T>
inline void swiglu_rows(const SwigluOp& o, const Context& context) {
  const auto* x = static_cast<const T*>(o.x);
  auto* out = static_cast<T*>(o.out);
  context.each_row([&](int64_t row) {
    const T* gate = x + row * o.x_row;
    swiglu_row(gate, gate + o.size, out + row * o.out_row, o.size);
  });
}

inline void swiglu(const Op& op, const Context& context) {
  const auto& o = static_cast<const SwigluOp&>(op);
  o.dtype == kBF16 ? swiglu_rows<bf16>(o, context) : swiglu_rows<float>(o, context);
}

template <class T>
inline void add_shared_rows(const AddSharedOp& o, const Context& context) {
  const auto *base = static_cast<const T*>(o.base), *y = static_cast<const T*>(o.y);
  const auto* gate = static_cast<const T*>(o.gate);
  auto* out = static_cast<T*>(o.out);
  context.each_row([&](int64_t row) {
    const int64_t start = row * o.size;
    const Vec share = gate ? through<T>(sigmoid(all(widen(gate[row])))) : all(1.0f);
    each_vector<T>(o.size, [&](int64_t at, auto read, auto write) {
      const Vec added = through<T>(mul(share, read(y + start + at)));
      write(out + start + at, add(read(base + start + at), added));
    });
  });
}

inline void add_shared(const Op& op, const Context& context) {
  const auto& o = static_cast<const AddSharedOp&>(op);
  o.dtype == kBF16 ? add_shared_rows<bf16>(o, context) : add_shared_rows<float>(o, context);
}

}  // namespace GTP_ISA
}  // namespace gtp
