// x @ weight.T for weights as they lie.  Each output is one dot product, its terms added in the order of linear_order.h:
// neither the number of rows nor who computes beside it changes a bit.
//
// Activations are arranged once, by each thread for itself where they are few, else in a phase of their own; not where
// they lie as they are read.  Then threads take pieces, blocks of outputs by blocks of rows; in a piece a few rows of
// weights meet all rows, one tile after the other.
#pragma once

#include "linear_order.h"
#include "linear_output.h"
#if defined(__AVX512F__)
#include "linear_wide.h"
#else
#include "linear_tile.h"
#endif

namespace gtp {
namespace GTP_ISA {

constexpr int64_t kAlone = 8192;              // activations that a thread arranges faster than it passes a barrier
constexpr int64_t kRowsBytes = 256 << 10;     // of arranged activations in a piece: stays in the second cache

// How one linear is cut up; of its shape and of the number of threads, none of which changes a result.
struct LinearPlan {
  int64_t outputs, parts;  // parts: 2 where gate and up make one output
  int64_t x_row;           // elements of an arranged row
  bool direct;             // inputs are read where they lie
  bool alone;              // each thread arranges them for itself
  int64_t columns, rows;     // of a piece
  int64_t row_blocks, pieces;
  size_t x_bytes, y_bytes, norm_bytes;
};

constexpr size_t padded_bytes(size_t bytes) { return (bytes + 63) / 64 * 64; }

template <class T, class O>
inline LinearPlan plan_linear(const LinearOp& o, int64_t rows, int64_t threads) {
  LinearPlan plan{};
  plan.parts = o.swiglu ? 2 : 1;
  plan.outputs = o.out_size / plan.parts;
  plan.x_row = arranged_size<O>(o.in_size);
  plan.direct = std::is_same_v<T, typename O::Packed> && O::kInOrder && !o.before && o.in_size % O::kStep == 0;
  plan.alone = plan.direct || rows * o.in_size <= kAlone;
  const PieceSize size = piece_size(rows);
  const int64_t wanted = threads * size.each_thread, share = (plan.outputs + wanted - 1) / wanted;
  const int64_t step = o.partials ? kHeadBlock : kPieceStep;
  plan.columns = std::clamp((share + step - 1) / step * step, step, size.most_columns / step * step);
  const int64_t fitting = kRowsBytes / std::max<int64_t>(plan.x_row * sizeof(typename O::Packed), 1);
  plan.rows = std::min(rows, std::clamp<int64_t>(fitting / kTileRows, 8, 64) * kTileRows);
  plan.row_blocks = plan.rows ? (rows + plan.rows - 1) / plan.rows : 0;
  plan.pieces = (plan.outputs + plan.columns - 1) / plan.columns * plan.row_blocks;
  plan.x_bytes = plan.direct ? 0 : padded_bytes(rows * plan.x_row * sizeof(typename O::Packed));
  plan.y_bytes = padded_bytes((plan.rows * plan.parts * plan.columns + kLanes) * sizeof(float));  // read in whole vectors
  plan.norm_bytes = o.before ? 2 * padded_bytes(o.in_size * sizeof(float)) : 0;
  return plan;
}

// The beginning of a stream of weights, on its way while there is other work.
inline void prefetch_some(const void* weights) {
  const auto address = reinterpret_cast<uintptr_t>(weights);
  for (int64_t byte = 0; byte < kLead; byte += 64) prefetch(address + byte);
}

template <class T, class W>
inline void linear_pieces(const LinearOp& o, const Context& context) {
  using O = LinearOrder<T, W>;
  using Packed = typename O::Packed;
  const LinearPlan plan = plan_linear<T, O>(o, context.rows, context.threads);
  const auto arrange = [&](int64_t row, Packed* to) {
    const T* from;
    if (o.before) {
      uint8_t* const memory = context.own + (plan.alone ? plan.x_bytes : 0) + plan.y_bytes;
      auto *normed = reinterpret_cast<T*>(memory), *sums = reinterpret_cast<T*>(memory + plan.norm_bytes / 2);
      // Where each thread finds all rows for itself, one of them leaves the sums for later operations.
      if (!plan.alone || context.thread == 0) sums = static_cast<T*>(o.before->total) + row * o.before->total_row;
      norm_row(*o.before, row, sums, normed);
      from = normed;
    } else {
      from = static_cast<const T*>(o.x) + row * o.x_row;
    }
    arrange_row<O>(from, o.in_size, to + row * plan.x_row);
  };
  auto* const arranged = reinterpret_cast<Packed*>(plan.alone ? context.own : context.shared);
  const auto* const x = plan.direct ? static_cast<const Packed*>(o.x) : arranged;
  const int64_t x_row = plan.direct ? o.x_row : plan.x_row;
  if (!plan.alone && context.phase == 0) {
    context.each_row([&](int64_t row) { arrange(row, arranged); });
    return;
  }
  auto* y = reinterpret_cast<float*>(context.own + (plan.alone ? plan.x_bytes : 0));
  const int64_t y_row = plan.parts * plan.columns;
  const auto* weights = static_cast<const W*>(o.weight);
  const auto weights_of = [&](int64_t piece) { return weights + piece / plan.row_blocks * plan.columns * o.weight_row; };
  // The piece after this one is taken beforehand, so that its weights are on their way when it begins.
  int64_t piece = context.next();
  if (piece < plan.pieces) prefetch_some(weights_of(piece));
  if (plan.alone && !plan.direct)
    for (int64_t row = 0; row < context.rows; ++row) arrange(row, arranged);
  while (piece < plan.pieces) {
    const int64_t later = context.next();
    const W* const following = weights_of(later < plan.pieces ? later : piece);
    const int64_t first = piece / plan.row_blocks * plan.columns, stop = std::min(first + plan.columns, plan.outputs);
    const int64_t row = piece % plan.row_blocks * plan.rows, rows = std::min(plan.rows, context.rows - row);
    for (int64_t part = 0; part < plan.parts; ++part) {
      const W* here = weights + (part * plan.outputs + first) * o.weight_row;
      const W* next = part + 1 < plan.parts ? here + plan.outputs * o.weight_row : following;
      float* to = y + part * plan.columns;
      multiply_rows<O>(x + row * x_row, x_row, rows, here, o.weight_row, stop - first, o.in_size, to, y_row, next);
    }
    prefetch_some(following);
    for (int64_t m = 0; m < rows; ++m)
      put_row<T>(o, row + m, first, stop, y + m * y_row, y + m * y_row + plan.columns);
    piece = later;
  }
}

// f(T(), W()) for the types of an operation.
template <class F>
inline auto with_types(const LinearOp& o, F f) {
  const auto with_weight = [&](auto x) {
    if (o.weight_dtype == kI8) return f(x, int8_t());
    if (o.weight_dtype == kBF16) return f(x, bf16());
    return f(x, float());
  };
  return o.dtype == kBF16 ? with_weight(bf16()) : with_weight(float());
}

inline void linear(const Op& op, const Context& context) {
  const auto& o = static_cast<const LinearOp&>(op);
  with_types(o, [&](auto x, auto w) { linear_pieces<decltype(x), decltype(w)>(o, context); });
}

inline LinearPlan plan_of(const LinearOp& o, int64_t rows, int64_t threads) {
  return with_types(o, [&](auto x, auto w) {
    return plan_linear<decltype(x), LinearOrder<decltype(x), decltype(w)>>(o, rows, threads);
  });
}

inline Scratch linear_scratch(const Op& op, int64_t rows, int threads) {
  const LinearPlan plan = plan_of(static_cast<const LinearOp&>(op), rows, threads);
  const size_t own = plan.y_bytes + plan.norm_bytes;
  return plan.alone ? Scratch{0, plan.x_bytes + own} : Scratch{plan.x_bytes, own};
}

inline int linear_phases(const Op& op, int64_t rows) {
  return plan_of(static_cast<const LinearOp&>(op), rows, 1).alone ? 1 : 2;
}

}  // namespace GTP_ISA
}  // namespace gtp
