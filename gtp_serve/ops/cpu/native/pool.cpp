#include "pool.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>

#include <unistd.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gtp {
namespace {

// How long a thread spins before it parks: longer than the others need for what is left of a phase when all have a core
// of their own, much shorter than the time a neighbour holds one.
constexpr std::chrono::microseconds kSpin{40};
constexpr int kSpinsBetweenLooks = 64;  // at the clock

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void park(std::atomic<uint32_t>& word, uint32_t seen) {
#ifdef __linux__
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
  (void)word, (void)seen;
  std::this_thread::yield();
#endif
}

void unpark(std::atomic<uint32_t>& word) {
#ifdef __linux__
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

int64_t rows_of(const Op& op, const int64_t* rows) {
  return rows ? std::min(op.rows, rows[op.counter]) : op.rows;
}

uint8_t* aligned(size_t size) {
  void* memory = nullptr;
  return posix_memalign(&memory, 64, size) == 0 ? static_cast<uint8_t*>(memory) : nullptr;
}

size_t rounded(size_t size) { return (size + 63) / 64 * 64; }

}  // namespace

void Pool::Gate::open() {
  value.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst)) unpark(value);
}

void Pool::Gate::wait_past(uint32_t seen) {
  const auto parks_at = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int spin = 0; spin < kSpinsBetweenLooks; ++spin) {
      if (value.load(std::memory_order_acquire) != seen) return;
      pause();
    }
  } while (std::chrono::steady_clock::now() < parks_at);
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (value.load(std::memory_order_seq_cst) == seen) park(value, seen);
  sleepers.fetch_sub(1, std::memory_order_relaxed);
}

Pool::Pool(int threads, const Kernel* kernels) : threads_(std::max(1, threads)), process_(getpid()), kernels_(kernels) {
  try {
    for (int thread = 1; thread < threads_; ++thread) workers_.emplace_back([this, thread] { work(thread); });
  } catch (...) {
    end_workers();
    throw;
  }
}

Pool::~Pool() {
  if (getpid() == process_)
    end_workers();
  else
    for (auto& worker : workers_) worker.detach();  // they are the parent's
  std::free(shared_);
  std::free(own_);
}

void Pool::end_workers() {
  stop_ = true;
  begin_.open();
  for (auto& worker : workers_) worker.join();
}

int Pool::run(const Op* const* ops, int64_t count, const int64_t* rows) {
  if (count == 0) return 0;  // no barrier would keep a late worker from the next run
  std::lock_guard<std::mutex> turn(one_run_);
  if (getpid() != process_) threads_ = 1;  // a fork has none of its parent's threads; the results are the same
  if (!reserve(ops, count, rows)) return 1;
  const auto small = kernels_[ops[0]->kind].small;
  running_ = count == 1 && small && small(*ops[0], rows_of(*ops[0], rows)) ? 1 : threads_;
  ops_ = ops, count_ = count, rows_ = rows;
  if (running_ > 1) begin_.open();
  carry_out(0);
  return 0;
}

bool Pool::reserve(const Op* const* ops, int64_t count, const int64_t* rows) {
  size_t shared = 0, own = 0;
  for (int64_t at = 0; at < count; ++at) {
    const Kernel& kernel = kernels_[ops[at]->kind];
    if (!kernel.scratch) continue;
    const Scratch wanted = kernel.scratch(*ops[at], rows_of(*ops[at], rows), threads_);
    shared = std::max(shared, rounded(wanted.shared));
    own = std::max(own, rounded(wanted.own));
  }
  // Only ever larger: the largest step comes again.
  if (shared > shared_size_) {
    std::free(shared_);
    shared_ = aligned(shared);
    shared_size_ = shared_ ? shared : 0;
  }
  if (own > own_size_) {
    std::free(own_);
    own_ = aligned(own * threads_);
    own_size_ = own_ ? own : 0;
  }
  return shared <= shared_size_ && own <= own_size_;
}

void Pool::work(int thread) {
  uint32_t seen = 0;
  while (true) {
    begin_.wait_past(seen++);
    if (stop_) return;
    carry_out(thread);
  }
}

void Pool::carry_out(int thread) {
  Context context{thread, running_, 0, 0, shared_, own_ + own_size_ * thread, nullptr};
  // These may change as soon as the last barrier is passed.
  const Op* const* const ops = ops_;
  const int64_t count = count_;
  const int64_t* const rows = rows_;
  for (int64_t at = 0; at < count; ++at) {
    const Op& op = *ops[at];
    const Kernel& kernel = kernels_[op.kind];
    context.rows = rows_of(op, rows);
    const int phases = kernel.phases ? kernel.phases(op, context.rows) : 1;
    for (context.phase = 0; context.phase < phases; ++context.phase) {
      context.cursor = &cursor_;
      kernel.run(op, context);
      barrier();
    }
  }
}

void Pool::barrier() {
  if (running_ == 1) {
    cursor_.store(0, std::memory_order_relaxed);
    return;
  }
  const uint32_t seen = phase_.value.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(running_)) {
    arrived_.store(0, std::memory_order_relaxed);
    cursor_.store(0, std::memory_order_relaxed);  // everybody is done with it
    phase_.open();
    return;
  }
  phase_.wait_past(seen);
}

}  // namespace gtp
