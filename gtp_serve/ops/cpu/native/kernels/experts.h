// Routing of tokens to experts, and the experts themselves.
#pragma once

namespace gtp {
namespace GTP_ISA {

template <class T>
inline void route_rows(const RouteOp& o, const Context& context) {
  auto* powers = reinterpret_cast<float*>(context.own);
  context.each_row([&](int64_t row) {
    const T* logits = static_cast<const T*>(o.logits) + row * o.logits_row;
    float *weights = o.weights + row * o.chosen, total = 0.0f, kept = 0.0f;
    int64_t* experts = o.experts + row * o.chosen;
    float largest = widen(logits[0]);
    for (int64_t x = 1; x < o.num_experts; ++x) largest = std::max(largest, widen(logits[x]));
    for (int64_t x = 0; x < o.num_experts; ++x) total += powers[x] = std::exp(widen(logits[x]) - largest);
    for (int64_t place = 0; place < o.chosen; ++place) {
      int64_t best = -1;
      for (int64_t x = 0; x < o.num_experts; ++x)
        if (powers[x] >= 0 && (best < 0 || powers[x] > powers[best])) best = x;
      // Not-a-number everywhere: any expert, its weight not a number either.
      if (best < 0) best = place;
      experts[place] = best;
      kept += weights[place] = powers[best] / total;
      powers[best] = -1.0f;
    }
    if (o.normalise)
      for (int64_t place = 0; place < o.chosen; ++place) weights[place] /= kept;
  });
}

inline void route(const Op& op, const Context& context) {
  const auto& o = static_cast<const RouteOp&>(op);
  o.dtype == kBF16 ? route_rows<bf16>(o, context) : route_rows<float>(o, context);
}

inline Scratch route_scratch(const Op& op, int64_t, int) {
  return {0, static_cast<size_t>(static_cast<const RouteOp&>(op).num_experts) * sizeof(float)};
}

// How the experts' work is cut.  Entry e is the choice e % chosen of row e / chosen; a thread lists the entries of each
// expert for itself, in the order of rows, and so needs no phase for it.
struct ExpertsPlan {
  int64_t entries, tokens;      // tokens: of an expert, that meet a piece of its weights together
  int64_t x_row, hidden_row;    // elements of an arranged row
  size_t lists, inputs, products, sums, hidden;  // bytes
  size_t own() const { return lists + inputs + products + sums; }
};

constexpr int64_t kExpertColumns = 48;            // rows of weights in a piece; of gate and of up as many
constexpr int64_t kExpertInputs = 128 << 10;      // bytes of arranged rows that meet them together

template <class T, class W>
inline ExpertsPlan plan_experts(const ExpertsOp& o, int64_t rows) {
  using O = LinearOrder<T, W>;
  ExpertsPlan plan{};
  plan.entries = rows * o.chosen;
  plan.x_row = arranged_size<O>(o.size), plan.hidden_row = arranged_size<O>(o.ffn);
  const int64_t widest = std::max(plan.x_row, plan.hidden_row), bytes = widest * sizeof(typename O::Packed);
  plan.tokens = std::clamp<int64_t>(kExpertInputs / std::max<int64_t>(bytes, 1) / kTileRows, 2, 16) * kTileRows;
  plan.tokens = std::min(plan.tokens, std::max<int64_t>(plan.entries, 1));
  plan.lists = padded_bytes((o.num_experts + 1 + plan.entries) * sizeof(int64_t));
  plan.inputs = padded_bytes(plan.tokens * bytes);
  plan.products = padded_bytes(plan.tokens * 2 * kExpertColumns * sizeof(float));
  plan.sums = padded_bytes(rows * kExpertColumns * sizeof(float));
  plan.hidden = padded_bytes(plan.entries * o.ffn * sizeof(T));
  return plan;
}

template <class T, class W>
class ExpertsPieces {
  using O = LinearOrder<T, W>;
  using Packed = typename O::Packed;

 public:
  ExpertsPieces(const ExpertsOp& op, const Context& run)
      : o(op), context(run), plan(plan_experts<T, W>(op, run.rows)), hidden(reinterpret_cast<T*>(run.shared)) {
    uint8_t* at = context.own;
    starts = reinterpret_cast<int64_t*>(at), entries = starts + o.num_experts + 1;
    at += plan.lists;
    inputs = reinterpret_cast<Packed*>(at);
    at += plan.inputs;
    products = reinterpret_cast<float*>(at);
    at += plan.products;
    sums = reinterpret_cast<float*>(at);
    if (context.phase == 0) group();  // for both phases
  }

  // Gate, up and SwiGLU: each piece is a block of an expert's hidden units.
  void gate_up() {
    const int64_t blocks = (o.ffn + kExpertColumns - 1) / kExpertColumns;
    int64_t expert = -1, passed = 0;  // experts up to this one that have tokens
    for (int64_t piece; true;) {
      piece = context.next();
      while (passed <= piece / blocks) {
        if (++expert == o.num_experts) return;
        passed += starts[expert] < starts[expert + 1];
      }
      const int64_t first = piece % blocks * kExpertColumns, count = std::min(kExpertColumns, o.ffn - first);
      const W* gate = static_cast<const W*>(o.gate_up) + (expert * 2 * o.ffn + first) * o.size;
      const W* up = gate + o.ffn * o.size;
      each_chunk(expert, [&](const int64_t* chunk, int64_t tokens) {
        for (int64_t i = 0; i < tokens; ++i)
          arrange_row<O>(static_cast<const T*>(o.x) + chunk[i] / o.chosen * o.x_row, o.size, inputs + i * plan.x_row);
        float* both[2] = {products, products + tokens * kExpertColumns};
        multiply(plan.x_row, tokens, gate, count, o.size, both[0], up);
        multiply(plan.x_row, tokens, up, count, o.size, both[1], gate + count * o.size);
        for (int64_t i = 0; i < tokens; ++i) {
          T halves[2][kExpertColumns];
          for (int half = 0; half < 2; ++half)
            round(both[half] + i * kExpertColumns, o.gate_up_scale, (expert * 2 + half) * o.ffn + first, count,
                  halves[half]);
          swiglu_row(halves[0], halves[1], hidden + chunk[i] * o.ffn + first, count);
        }
      });
    }
  }

  // Down and the sum over experts, in their order: each piece is a block of the result's columns, for all rows.
  void down() {
    const int64_t blocks = (o.size + kExpertColumns - 1) / kExpertColumns;
    for (int64_t piece; (piece = context.next()) < blocks;) {
      const int64_t first = piece * kExpertColumns, count = std::min(kExpertColumns, o.size - first);
      std::fill(sums, sums + context.rows * kExpertColumns, 0.0f);
      for (int64_t expert = 0; expert < o.num_experts; ++expert) {
        const W* weights = static_cast<const W*>(o.down) + (expert * o.size + first) * o.ffn;
        each_chunk(expert, [&](const int64_t* chunk, int64_t tokens) {
          for (int64_t i = 0; i < tokens; ++i)
            arrange_row<O>(hidden + chunk[i] * o.ffn, o.ffn, inputs + i * plan.hidden_row);
          multiply(plan.hidden_row, tokens, weights, count, o.ffn, products, weights_after(expert, first));
          for (int64_t i = 0; i < tokens; ++i) {
            T rounded_y[kExpertColumns];
            round(products + i * kExpertColumns, o.down_scale, expert * o.size + first, count, rounded_y);
            float* total = sums + chunk[i] / o.chosen * kExpertColumns;
            for (int64_t d = 0; d < count; ++d) total[d] += widen(rounded_y[d]) * o.weights[chunk[i]];
          }
        });
      }
      for (int64_t row = 0; row < context.rows; ++row)
        for (int64_t d = 0; d < count; ++d)
          static_cast<T*>(o.out)[row * o.size + first + d] = rounded<T>(sums[row * kExpertColumns + d]);
    }
  }

 private:
  // starts[x] to starts[x + 1] of `entries` are those of expert x; one that is no expert's is left out.
  void group() {
    std::fill(starts, starts + o.num_experts + 1, 0);
    const auto mine = [&](int64_t entry) {
      const int64_t expert = o.experts[entry];
      return expert >= 0 && expert < o.num_experts ? expert : -1;
    };
    for (int64_t entry = 0; entry < plan.entries; ++entry)
      if (const int64_t expert = mine(entry); expert >= 0) ++starts[expert + 1];
    for (int64_t expert = 0; expert < o.num_experts; ++expert) starts[expert + 1] += starts[expert];
    for (int64_t entry = 0; entry < plan.entries; ++entry)
      if (const int64_t expert = mine(entry); expert >= 0) entries[starts[expert]++] = entry;
    // Each start is now the next one's.
    for (int64_t expert = o.num_experts; expert > 0; --expert) starts[expert] = starts[expert - 1];
    starts[0] = 0;
  }

  template <class F>
  void each_chunk(int64_t expert, F f) const {
    for (int64_t at = starts[expert]; at < starts[expert + 1]; at += plan.tokens)
      f(entries + at, std::min(plan.tokens, starts[expert + 1] - at));
  }

  // Of the next expert that has tokens, the weights that `down` wants of it.
  const W* weights_after(int64_t expert, int64_t first) const {
    int64_t next = expert + 1;
    while (next < o.num_experts && starts[next] == starts[next + 1]) ++next;
    return static_cast<const W*>(o.down) + ((next < o.num_experts ? next : expert) * o.size + first) * o.ffn;
  }

  // y[i][n] = inputs row i times weights row n.
  void multiply(int64_t row, int64_t tokens, const W* weights, int64_t count, int64_t size, float* y,
                const W* following) {
    multiply_rows<O>(inputs, row, tokens, weights, size, count, size, y, kExpertColumns, following);
  }

  static void round(const float* y, const float* scale, int64_t scale_at, int64_t count, T* out) {
    for (int64_t i = 0; i < count; ++i) out[i] = rounded<T>(scale ? y[i] * scale[scale_at + i] : y[i]);
  }

  const ExpertsOp& o;
  const Context& context;
  const ExpertsPlan plan;
  T* const hidden;  // of all entries, shared
  int64_t *starts, *entries;
  Packed* inputs;
  float *products, *sums;
};

// f(T(), W()) for the types of an operation.
template <class F>
inline auto with_types(const ExpertsOp& o, F f) {
  const auto with_weight = [&](auto x) {
    if (o.weight_dtype == kI8) return f(x, int8_t());
    if (o.weight_dtype == kBF16) return f(x, bf16());
    return f(x, float());
  };
  return o.dtype == kBF16 ? with_weight(bf16()) : with_weight(float());
}

inline void experts(const Op& op, const Context& context) {
  const auto& o = static_cast<const ExpertsOp&>(op);
  with_types(o, [&](auto x, auto w) {
    ExpertsPieces<decltype(x), decltype(w)> pieces(o, context);
    context.phase == 0 ? pieces.gate_up() : pieces.down();
  });
}

inline Scratch experts_scratch(const Op& op, int64_t rows, int) {
  const auto& o = static_cast<const ExpertsOp&>(op);
  const auto plan = with_types(o, [&](auto x, auto w) { return plan_experts<decltype(x), decltype(w)>(o, rows); });
  return {plan.hidden, plan.own()};
}
inline int experts_phases(const Op&, int64_t) { return 2; }

}  // namespace GTP_ISA
}  // namespace gtp
