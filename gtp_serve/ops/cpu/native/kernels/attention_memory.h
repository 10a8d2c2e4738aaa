// What a thread keeps while it attends: queries, a block of keys and values, scores, and sums of one tile.
#pragma once

#include "attention_sums.h"

namespace gtp {
namespace GTP_ISA {

constexpr int64_t kQueryTile = 192;  // rows, times the heads that share a KV head, that share a pass over the keys

inline int64_t group_of(const AttentionOp& o) { return std::max<int64_t>(1, o.heads / o.kv_heads); }
inline int64_t rows_of_tile(const AttentionOp& o) { return std::max<int64_t>(1, kQueryTile / group_of(o)); }

// A thread's scratch for one tile.
struct TileMemory {
  float *q, *keys, *values, *scores, *mixed, *all_mixed;
  Sums *sums, *all_sums;
  Seen *seen, *limits;
  int64_t q_row, mixed_row;

  static int64_t kept_floats(const AttentionOp& o) {
    return o.dtype == kBF16 ? mixed_floats<bf16>(o.size) : mixed_floats<float>(o.size);
  }

  static size_t size(const AttentionOp& o) {
    const int64_t rows = rows_of_tile(o) * group_of(o);
    return static_cast<size_t>(rows * (query_floats(o.size) + kKeyBlock + 2 * kept_floats(o)) +
                               (query_floats(o.size) + kept_floats(o)) * kKeyBlock) * sizeof(float) +
           rows * 2 * (sizeof(Sums) + sizeof(Seen)) + 2 * 64;
  }

  TileMemory(const AttentionOp& o, uint8_t* memory) : q_row(query_floats(o.size)), mixed_row(kept_floats(o)) {
    const int64_t rows = rows_of_tile(o) * group_of(o);
    const auto aligned = [](auto* at) { return (reinterpret_cast<uintptr_t>(at) + 63) / 64 * 64; };
    sums = reinterpret_cast<Sums*>(aligned(memory));
    all_sums = sums + rows;
    seen = reinterpret_cast<Seen*>(all_sums + rows);
    limits = seen + rows;
    keys = reinterpret_cast<float*>(aligned(limits + rows));
    values = keys + q_row * kKeyBlock;
    scores = values + mixed_row * kKeyBlock;
    mixed = scores + rows * kKeyBlock;
    all_mixed = mixed + rows * mixed_row;
    q = all_mixed + rows * mixed_row;
  }
};

}  // namespace GTP_ISA
}  // namespace gtp
