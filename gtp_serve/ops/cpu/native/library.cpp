// What Python calls (ops/cpu/library.py), and the choice of instruction set.
#include <cstring>
#include <new>

#include "pool.h"

namespace gtp {

// A build for some instruction sets only says what it is without.
#if !defined(__x86_64__)
#define GTP_WITHOUT_avx2
#define GTP_WITHOUT_avx512
#define GTP_WITHOUT_avx512bf16
#endif

#define GTP_DECLARE(isa) \
  namespace isa {        \
  extern const Kernel kKernels[kKinds]; \
  }
GTP_DECLARE(generic)
GTP_DECLARE(avx2)
GTP_DECLARE(avx512)
GTP_DECLARE(avx512bf16)

struct Isa {
  const char* name;
  const Kernel* kernels;
  bool (*runs_here)();
};

// Best first.
const Isa kIsas[] = {
#if !defined(GTP_WITHOUT_avx512bf16)
    {"avx512bf16", avx512bf16::kKernels,
     [] {
       return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
              __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
     }},
#endif
#if !defined(GTP_WITHOUT_avx512)
    {"avx512", avx512::kKernels,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
     }},
#endif
#if !defined(GTP_WITHOUT_avx2)
    {"avx2", avx2::kKernels, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
#endif
    {"generic", generic::kKernels, [] { return true; }},
};

}  // namespace gtp

using namespace gtp;

#define GTP_EXPORT __attribute__((visibility("default")))

extern "C" {

// Sizes of the operations' structures, kKinds of them, by which Python checks its own.
GTP_EXPORT void gtp_op_sizes(int64_t* sizes) {
  const int64_t found[kKinds] = {sizeof(GatherOp), sizeof(NormOp),      sizeof(LinearOp), sizeof(RopeOp),
                                 sizeof(AttentionOp), sizeof(SwigluOp), sizeof(AddSharedOp), sizeof(RouteOp),
                                 sizeof(ExpertsOp), sizeof(GreedyOp), sizeof(DrawOp)};
  std::memcpy(sizes, found, sizeof found);
}

// The index-th instruction set that this machine runs, best first; null past the last.
GTP_EXPORT const char* gtp_isa(int64_t index) {
  for (const Isa& isa : kIsas)
    if (isa.runs_here() && index-- == 0) return isa.name;
  return nullptr;
}

// Threads for an instruction set by name; null when it does not run here or threads cannot be had.
GTP_EXPORT void* gtp_pool_new(int64_t threads, const char* name) {
  for (const Isa& isa : kIsas) {
    if (std::strcmp(isa.name, name) != 0 || !isa.runs_here()) continue;
    try {
      return new Pool(static_cast<int>(threads), isa.kernels);
    } catch (...) {
      return nullptr;
    }
  }
  return nullptr;
}

GTP_EXPORT void gtp_pool_delete(void* pool) { delete static_cast<Pool*>(pool); }

// 0; 1 when there was no memory for scratch.
GTP_EXPORT int64_t gtp_run(void* pool, const void* const* ops, int64_t count, const int64_t* rows) {
  return static_cast<Pool*>(pool)->run(reinterpret_cast<const Op* const*>(ops), count, rows);
}
}
