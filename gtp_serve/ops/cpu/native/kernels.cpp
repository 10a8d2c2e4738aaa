// All kernels for one instruction set: compiled once for each, with GTP_ISA as its name.
#include <algorithm>
#include <type_traits>

#include "pool.h"
#include "simd.h"

// In this order: later ones use earlier ones.
#include "kernels/gather.h"
#include "kernels/norm.h"
#include "kernels/rope.h"
#include "kernels/swiglu.h"
#include "kernels/linear.h"
#include "kernels/attention.h"
#include "kernels/experts.h"
#include "kernels/greedy.h"
#include "kernels/draw.h"

namespace gtp {
namespace GTP_ISA {

extern const Kernel kKernels[kKinds];
const Kernel kKernels[kKinds] = {
    {gather, nullptr, nullptr, nullptr},
    {norm, nullptr, nullptr, nullptr},
    {linear, linear_scratch, linear_phases, nullptr},
    {rope, nullptr, nullptr, nullptr},
    {attention, attention_scratch, attention_phases, nullptr},
    {swiglu, nullptr, nullptr, nullptr},
    {add_shared, nullptr, nullptr, nullptr},
    {route, route_scratch, nullptr, nullptr},
    {experts, experts_scratch, experts_phases, nullptr},
    {greedy, greedy_scratch, greedy_phases, greedy_small},
    {draw, draw_scratch, nullptr, nullptr},
};

}  // namespace GTP_ISA
}  // namespace gtp
