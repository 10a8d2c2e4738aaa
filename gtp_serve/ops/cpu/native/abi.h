// The operations of a step as plain structures: what Python fills in (ops/cpu/structs.py, field for field) and
// kernels read.  Pointers and counts are 64 bits wide; strides are in elements unless a name says bytes.
#pragma once
#include <cstdint>

namespace gtp {

enum Dtype : int64_t { kF32 = 0, kBF16 = 1, kI8 = 2 };

enum Kind : int64_t {
  kGather = 0,
  kNorm,
  kLinear,
  kRope,
  kAttention,
  kSwiglu,
  kAddShared,
  kRoute,
  kExperts,
  kGreedy,
  kDraw,
  kKinds,
};

// Every operation begins so.  In a recorded step the number of rows is what the step is run with for that counter,
// at most `rows`; alone it is `rows`.
struct Op {
  int64_t kind;
  int64_t counter;
  int64_t rows;
};

// out[r] = table[ids[r]]; an id outside the table gives zeros.
struct GatherOp : Op {
  const int64_t* ids;
  const uint8_t* table;
  uint8_t* out;
  int64_t table_rows, width_bytes, table_stride_bytes, out_stride_bytes;
};

// total = x + delta, rounded; out = weight * rounded(total / rms(total)); `inner` vectors in each row.
// delta and total are null where nothing is added.
struct NormOp : Op {
  const void *x, *delta, *weight;
  void *out, *total;
  int64_t inner, size, x_row, x_inner, delta_row, total_row, out_row, out_inner, dtype;
  double eps;
};

// out = x @ weight.T (* scale per weight row) (+ bias).  With `swiglu` the weight is gate above up, out_size counts
// both, and out has silu(gate) * up.  `partials` (null or [rows, blocks of kHeadBlock] Partial) takes what greedy
// choice needs of each block of outputs.  With `before`, x is what that norm gives (one vector in each row), which is
// found here instead: x and its `out` are null.
struct LinearOp : Op {
  const void *x, *weight, *bias;
  const float* scale;
  void* out;
  void* partials;
  const NormOp* before;
  int64_t in_size, out_size, x_row, weight_row, out_row, dtype, weight_dtype, out_dtype, swiglu, vocab;
};

constexpr int64_t kHeadBlock = 64;

// Of one block of logits: the largest, the first id that has it, the sum of exp(logit - largest); largest is NaN where
// one of them is not finite.
struct Partial {
  float largest, sum;
  int64_t id;
};

// Rotates pairs (i, i + size / 2) of queries into out_q and of keys into their slots; values go to theirs unchanged.
struct RopeOp : Op {
  const void *q, *k, *v, *cos, *sin;
  void *out_q, *keys, *values;
  const int64_t* slots;
  int64_t heads, kv_heads, size, q_row, k_row, v_row, cos_row, num_slots, dtype;
};

// Of each row over the cached keys of its sequence.  Sequence s owns rows starts[s] to starts[s + 1] (starts null:
// row s), the row at position p sees positions p - window + 1 (window 0: from 0) to p.  With `before` (starts null) the
// queries are what that rotation gives, which is carried out here instead: q and its `out_q` are null, and each row's
// slot is that of its position, which no other row sees.
struct AttentionOp : Op {
  const void *q, *keys, *values;
  void* out;
  const int64_t *tables, *starts, *positions;
  const RopeOp* before;
  int64_t sequences, table_row, heads, kv_heads, size, q_row, block_size, num_blocks, window, max_context, dtype;
  double scale;
};

struct SwigluOp : Op {
  const void* x;
  void* out;
  int64_t size, x_row, out_row, dtype;
};

// out = base + y, or base + sigmoid(gate) * y with one gate a row.
struct AddSharedOp : Op {
  const void *base, *y, *gate;
  void* out;
  int64_t size, dtype;
};

// Softmax of the logits in float32, then the `chosen` largest (lowest id first among equals), summing to 1 on request.
struct RouteOp : Op {
  const void* logits;
  float* weights;
  int64_t* experts;
  int64_t num_experts, chosen, logits_row, normalise, dtype;
};

// Sum over the chosen experts, in the order of their numbers and in float32, of weight * down(swiglu(gate_up(x))).
struct ExpertsOp : Op {
  const void* x;
  const float* weights;
  const int64_t* experts;
  const void *gate_up, *down;
  const float *gate_up_scale, *down_scale;
  void* out;
  int64_t size, ffn, num_experts, chosen, x_row, dtype, weight_dtype;
};

// The first of the largest of `vocab` logits, its log-probability, and whether all are finite; from partials if given.
struct GreedyOp : Op {
  const float* logits;
  const void* partials;
  int64_t* token_ids;
  float* logprobs;
  uint8_t* finite;
  int64_t vocab, logits_row;
};

// ids[r] = what row at[r] of the logits draws with its uniform number in [0, 1); top_k below 1 keeps all.
struct DrawOp : Op {
  const float* logits;
  const int64_t* at;
  const float* temperatures;
  const int64_t* top_k;
  const double *top_p, *min_p, *uniform;
  int64_t* ids;
  int64_t vocab, logits_row;
};

}  // namespace gtp
