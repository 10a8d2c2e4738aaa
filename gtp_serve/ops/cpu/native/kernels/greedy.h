// The most probable token of each row.  Blocks of kHeadBlock logits are summed up alone, by any thread, or were by the
// head itself; then the row's blocks are joined in an order that the size of the vocabulary decides.
#pragma once

namespace gtp {
namespace GTP_ISA {

constexpr int64_t kGreedyBlocks = 32;  // that a thread takes at once

inline int64_t blocks_of(const GreedyOp& o) { return (o.vocab + kHeadBlock - 1) / kHeadBlock; }

inline void sum_blocks(const GreedyOp& o, const Context& context, Partial* partials) {
  const int64_t blocks = blocks_of(o), pieces = (blocks + kGreedyBlocks - 1) / kGreedyBlocks;
  for (int64_t piece; (piece = context.next()) < context.rows * pieces;) {
    const int64_t row = piece / pieces, start = piece % pieces * kGreedyBlocks;
    for (int64_t block = start; block < std::min(start + kGreedyBlocks, blocks); ++block) {
      const int64_t first = block * kHeadBlock;
      partials[row * blocks + block] =
          partial_of(o.logits + row * o.logits_row + first, std::min(kHeadBlock, o.vocab - first), first);
    }
  }
}

inline void join_blocks(const GreedyOp& o, int64_t row, const Partial* partials) {
  const int64_t blocks = blocks_of(o);
  bool finite = true;
  const Partial* best = partials;
  for (int64_t block = 0; block < blocks; ++block) {
    finite &= partials[block].largest == partials[block].largest;
    if (partials[block].largest > best->largest) best = partials + block;
  }
  Vec total = zero();
  for (int64_t first = 0; finite && first < blocks; first += kLanes) {
    float largest[kLanes], sums[kLanes] = {};
    std::fill(largest, largest + kLanes, best->largest);
    for (int64_t i = 0; i < std::min<int64_t>(kLanes, blocks - first); ++i)
      largest[i] = partials[first + i].largest, sums[i] = partials[first + i].sum;
    total = fma(load(sums), exp_of_small(sub(load(largest), all(best->largest))), total);
  }
  o.finite[row] = finite;
  o.token_ids[row] = finite ? best->id : 0;
  o.logprobs[row] = finite ? -std::log(sum(total)) : std::numeric_limits<float>::quiet_NaN();
}

inline void greedy(const Op& op, const Context& context) {
  const auto& o = static_cast<const GreedyOp&>(op);
  auto* mine = reinterpret_cast<Partial*>(context.shared);
  if (!o.partials && context.phase == 0) return sum_blocks(o, context, mine);
  const Partial* partials = o.partials ? static_cast<const Partial*>(o.partials) : mine;
  for (int64_t row; (row = context.next()) < context.rows;) join_blocks(o, row, partials + row * blocks_of(o));
}

inline Scratch greedy_scratch(const Op& op, int64_t rows, int) {
  const auto& o = static_cast<const GreedyOp&>(op);
  return {o.partials ? 0 : static_cast<size_t>(rows * blocks_of(o)) * sizeof(Partial), 0};
}
// A row's blocks are joined in a few microseconds.
inline bool greedy_small(const Op& op, int64_t rows) { return static_cast<const GreedyOp&>(op).partials && rows <= 8; }
inline int greedy_phases(const Op& op, int64_t) { return static_cast<const GreedyOp&>(op).partials ? 1 : 2; }

}  // namespace GTP_ISA
}  // namespace gtp
