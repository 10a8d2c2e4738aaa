// The most probable token of each row.  Blocks of kHeadBlock logits are summed up alone, then joined in their order.
#pragma once

namespace gtp {
namespace GTP_ISA {

inline void greedy(const Op& op, const Context& context) {
  const auto& o = static_cast<const GreedyOp&>(op);
  const int64_t blocks = (o.vocab + kHeadBlock - 1) / kHeadBlock;
  for (int64_t row; (row = context.next()) < context.rows;) {
    const float* logits = o.logits + row * o.logits_row;
    const auto block_at = [&](int64_t block) {
      if (o.partials) return static_cast<const Partial*>(o.partials)[row * blocks + block];
      const int64_t first = block * kHeadBlock;
      return partial_of(logits + first, std::min(kHeadBlock, o.vocab - first), first);
    };
    Partial best = block_at(0);
    bool finite = best.largest == best.largest;
    for (int64_t block = 1; block < blocks; ++block) {
      const Partial next = block_at(block);
      finite &= next.largest == next.largest;
      if (next.largest > best.largest) {
        best.sum = best.sum * std::exp(best.largest - next.largest) + next.sum;
        best.largest = next.largest, best.id = next.id;
      } else {
        best.sum += next.sum * std::exp(next.largest - best.largest);
      }
    }
    o.finite[row] = finite;
    o.token_ids[row] = finite ? best.id : 0;
    o.logprobs[row] = finite ? -std::log(best.sum) : std::numeric_limits<float>::quiet_NaN();
  }
}

}  // namespace GTP_ISA
}  // namespace gtp
