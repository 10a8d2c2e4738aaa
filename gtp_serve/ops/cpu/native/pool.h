// Threads that carry out a step: one parallel region for all of its operations, a barrier after each phase of each.
#pragma once
#include <algorithm>
#include <atomic>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "abi.h"

namespace gtp {

constexpr int kCounters = 2;

// What a kernel is told beside its operation.  Work is taken in pieces from `next`, so that a thread whose core is
// busy elsewhere takes less of it; which thread takes a piece must not change a bit of the result.
struct Context {
  int thread, threads, phase;
  int64_t rows;     // of this operation, in this run
  uint8_t* shared;  // scratch common to the threads, as large as the kernel asked for
  uint8_t* own;     // scratch of this thread, likewise; 64-byte aligned, as `shared`
  std::atomic<int64_t>* cursor;

  // The first of `count` pieces of this phase that nobody has taken; past the end when none is left.
  int64_t next(int64_t count = 1) const { return cursor->fetch_add(count, std::memory_order_relaxed); }

  // f(row) for rows of short work, several at a time: the cursor's line of memory travels between cores as slowly as
  // some rows are done.
  template <class F>
  void each_row(F f) const {
    const int64_t count = rows / (threads * 8) + 1;
    for (int64_t first; (first = next(count)) < rows;)
      for (int64_t row = first; row < std::min(first + count, rows); ++row) f(row);
  }
};

struct Scratch {
  size_t shared = 0, own = 0;
};

struct Kernel {
  void (*run)(const Op&, const Context&);
  Scratch (*scratch)(const Op&, int64_t rows, int threads);  // null: none
  int (*phases)(const Op&, int64_t rows);                    // null: one
  bool (*small)(const Op&, int64_t rows);  // whether it is done sooner than other threads are woken; null: never
};

class Pool {
 public:
  // kernels: kKinds of them.
  Pool(int threads, const Kernel* kernels);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Runs the operations in order; calls from several threads take turns.
  // rows: null, or for each counter how many rows this run has.
  // Returns 0, or 1 when there was no memory for scratch: then nothing was run.
  int run(const Op* const* ops, int64_t count, const int64_t* rows);

 private:
  // One word that threads wait on: a few microseconds spinning, then parked, since a neighbour may need the core.
  struct alignas(64) Gate {
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};
    void open();
    void wait_past(uint32_t seen);
  };

  void end_workers();
  void work(int thread);
  void carry_out(int thread);
  void barrier();
  bool reserve(const Op* const* ops, int64_t count, const int64_t* rows);

  int threads_;
  int running_ = 1;  // of them, in this run
  const pid_t process_;
  const Kernel* const kernels_;
  std::mutex one_run_;
  std::vector<std::thread> workers_;
  Gate begin_, phase_;
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<int64_t> cursor_{0};
  std::atomic<bool> stop_{false};

  const Op* const* ops_ = nullptr;
  int64_t count_ = 0;
  const int64_t* rows_ = nullptr;
  uint8_t *shared_ = nullptr, *own_ = nullptr;
  size_t shared_size_ = 0, own_size_ = 0;
};

}  // namespace gtp
