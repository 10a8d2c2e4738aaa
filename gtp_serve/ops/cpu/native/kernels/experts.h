// Routing of tokens to experts, and the experts themselves.
#pragma once

namespace gtp {
namespace GTP_ISA {

template <class T>
inline void route_rows(const RouteOp& o, const Context& context) {
  auto* powers = reinterpret_cast<float*>(context.own);
  for (int64_t row; (row = context.next()) < context.rows;) {
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
  }
}

inline void route(const Op& op, const Context& context) {
  const auto& o = static_cast<const RouteOp&>(op);
  o.dtype == kBF16 ? route_rows<bf16>(o, context) : route_rows<float>(o, context);
}

inline Scratch route_scratch(const Op& op, int64_t, int) {
  return {0, static_cast<size_t>(static_cast<const RouteOp&>(op).num_experts) * sizeof(float)};
}

template <class T, class W>
inline void experts_rows(const ExpertsOp& o, const Context& context) {
  auto* hidden = reinterpret_cast<T*>(context.own);
  auto* total = reinterpret_cast<float*>(context.own + o.ffn * 2 * sizeof(T) + 64);
  const auto scaled = [](const float* scale, int64_t at) { return scale ? scale[at] : 1.0f; };
  for (int64_t row; (row = context.next()) < context.rows;) {
    const T* x = static_cast<const T*>(o.x) + row * o.x_row;
    std::fill(total, total + o.size, 0.0f);
    for (int64_t expert = 0; expert < o.num_experts; ++expert) {
      for (int64_t place = 0; place < o.chosen; ++place) {
        if (o.experts[row * o.chosen + place] != expert) continue;
        const W* gate_up = static_cast<const W*>(o.gate_up) + expert * 2 * o.ffn * o.size;
        const W* down = static_cast<const W*>(o.down) + expert * o.size * o.ffn;
        for (int64_t f = 0; f < 2 * o.ffn; ++f)
          hidden[f] = rounded<T>(dot(x, gate_up + f * o.size, o.size) * scaled(o.gate_up_scale, expert * 2 * o.ffn + f));
        swiglu_row(hidden, hidden + o.ffn, hidden, o.ffn);
        for (int64_t d = 0; d < o.size; ++d) {
          const float y = dot(hidden, down + d * o.ffn, o.ffn) * scaled(o.down_scale, expert * o.size + d);
          total[d] += widen(rounded<T>(y)) * o.weights[row * o.chosen + place];
        }
      }
    }
    for (int64_t d = 0; d < o.size; ++d) static_cast<T*>(o.out)[row * o.size + d] = rounded<T>(total[d]);
  }
}

template <class T>
inline void experts_of(const ExpertsOp& o, const Context& context) {
  if (o.weight_dtype == kI8) return experts_rows<T, int8_t>(o, context);
  if (o.weight_dtype == kBF16) return experts_rows<T, bf16>(o, context);
  experts_rows<T, float>(o, context);
}

inline void experts(const Op& op, const Context& context) {
  const auto& o = static_cast<const ExpertsOp&>(op);
  o.dtype == kBF16 ? experts_of<bf16>(o, context) : experts_of<float>(o, context);
}

inline Scratch experts_scratch(const Op& op, int64_t, int) {
  const auto& o = static_cast<const ExpertsOp&>(op);
  return {0, static_cast<size_t>(2 * o.ffn + o.size) * sizeof(float) + 64};
}
inline int experts_phases(const Op&, int64_t) { return 1; }

}  // namespace GTP_ISA
}  // namespace gtp
