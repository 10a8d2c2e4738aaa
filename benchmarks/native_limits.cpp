// What this machine gives at this moment: bytes read a second from memory, products added a second in registers.
// Compiled for it by native_linear.py.
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <time.h>

#include <atomic>

namespace {

// One thread is timed by what it used of a core, which its neighbours do not change; several by the clock on the wall.
double now(bool alone) {
  timespec t;
  clock_gettime(alone ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

std::atomic<int64_t> sink;

#if defined(__AVX512F__)
constexpr int kChains = 24;
using Vec = __m512;
Vec all(float x) { return _mm512_set1_ps(x); }
Vec multiply_add(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
float first(Vec x) { return _mm512_cvtss_f32(x); }
#else
constexpr int kChains = 12;
using Vec = __m256;
Vec all(float x) { return _mm256_set1_ps(x); }
Vec multiply_add(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
float first(Vec x) { return _mm256_cvtss_f32(x); }
#endif

void read(const uint8_t* memory, int64_t bytes) {
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  for (int64_t at = 0; at + 128 <= bytes; at += 128) {
    const auto* p = reinterpret_cast<const __m256i*>(memory + at);
    a = _mm256_add_epi64(a, _mm256_loadu_si256(p)), b = _mm256_add_epi64(b, _mm256_loadu_si256(p + 1));
    c = _mm256_add_epi64(c, _mm256_loadu_si256(p + 2)), d = _mm256_add_epi64(d, _mm256_loadu_si256(p + 3));
  }
  const __m256i e = _mm256_add_epi64(_mm256_add_epi64(a, b), _mm256_add_epi64(c, d));
  sink += _mm256_extract_epi64(e, 0) + _mm256_extract_epi64(e, 3);
}

template <class F>
void calculate(int64_t rounds, F step) {
  Vec chain[kChains];
#pragma GCC unroll 32
  for (int i = 0; i < kChains; ++i) chain[i] = all(static_cast<float>(i));
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i) chain[i] = step(chain[i]);
  }
  float total = 0;
#pragma GCC unroll 32
  for (int i = 0; i < kChains; ++i) total += first(chain[i]);
  sink += static_cast<int64_t>(total);
}

void calculate(int64_t rounds, bool pairs) {
#if defined(__AVX512BF16__)
  const auto few = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x38003800));
  if (pairs) return calculate(rounds, [few](Vec x) { return _mm512_dpbf16_ps(x, few, few); });
#endif
  const Vec a = all(0.999f), b = all(0.001f);
  calculate(rounds, [a, b](Vec x) { return multiply_add(x, a, b); });
}

struct Share {
  const uint8_t* memory;
  int64_t count;
  bool pairs;
  int threads;
  std::atomic<int>* there;
  double began, ended;
};

// Of a thread before it is timed: new threads share a core until the system has parted them.
constexpr double kPartingSeconds = 0.004;

void* work(void* p) {
  auto& share = *static_cast<Share*>(p);
  const bool alone = share.threads == 1;
  for (const double until = now(false) + kPartingSeconds; !alone && now(false) < until;) continue;
  ++*share.there;
  while (*share.there < share.threads) continue;  // who slept would be woken beside another
  share.began = now(alone);
  share.memory ? read(share.memory, share.count) : calculate(share.count, share.pairs);
  share.ended = now(alone);
  return nullptr;
}

// Seconds from the first thread's start to the last one's end.
double together(int threads, const uint8_t* memory, int64_t count, bool pairs) {
  pthread_t running[64];
  Share shares[64];
  std::atomic<int> there{0};
  for (int i = 0; i < threads; ++i) {
    const int64_t part = memory ? count / threads : count;
    shares[i] = {memory ? memory + i * part : nullptr, part, pairs, threads, &there, 0, 0};
    if (i) pthread_create(&running[i], nullptr, work, &shares[i]);
  }
  work(&shares[0]);
  double began = shares[0].began, ended = shares[0].ended;
  for (int i = 1; i < threads; ++i) {
    pthread_join(running[i], nullptr);
    if (shares[i].began < began) began = shares[i].began;
    if (shares[i].ended > ended) ended = shares[i].ended;
  }
  return ended - began;
}

}  // namespace

extern "C" {
// Bytes a second, read once through `bytes` of memory by up to 64 threads.
double read_rate(const uint8_t* memory, int64_t bytes, int threads) {
  return bytes / together(threads, memory, bytes, false);
}
// Multiply-adds a second, of float32 or, where the processor has them, of pairs of bfloat16.
double multiply_rate(int64_t rounds, int threads, int pairs) {
#if !defined(__AVX512BF16__)
  pairs = 0;
#endif
  const double products = sizeof(Vec) / sizeof(float) * (pairs ? 2 : 1);
  return threads * rounds * kChains * products / together(threads, nullptr, rounds, pairs);
}
}
