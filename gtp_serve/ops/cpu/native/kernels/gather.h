// Rows of a table by number: token embeddings, rotary angles of positions, rows whose logits are wanted.
#pragma once

namespace gtp {
namespace GTP_ISA {

inline void gather(const Op& op, const Context& context) {
  const auto& o = static_cast<const GatherOp&>(op);
  constexpr int64_t kPiece = 16;
  for (int64_t first; (first = context.next(kPiece)) < context.rows;) {
    const int64_t stop = std::min(first + kPiece, context.rows);
    for (int64_t row = first; row < stop; ++row) {
      uint8_t* out = o.out + row * o.out_stride_bytes;
      const int64_t id = o.ids[row];
      if (id >= 0 && id < o.table_rows)
        std::memcpy(out, o.table + id * o.table_stride_bytes, o.width_bytes);
      else
        std::memset(out, 0, o.width_bytes);
    }
  }
}

}  // namespace GTP_ISA
}  // namespace gtp
