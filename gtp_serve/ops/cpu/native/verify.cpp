// What is looked at before new weights serve (refit/native_verify.py), in one pass: the xxh3-128 digest of a parameter,
// and whether every element is finite.  The digest is defined by the xxHash specification; only inputs above 240 bytes
// come here, which it calls long.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gtp {
namespace {

// Elements by their size and the bits that are all set in infinities and NaNs.
enum Elements : int64_t { kAny = 0, kHalf, kSingle, kBrain };

constexpr int64_t kStripe = 64, kStripes = 16, kSecretSize = 192;
constexpr int64_t kShortest = 241;
constexpr uint64_t kPrime32_1 = 0x9E3779B1u, kPrime32_2 = 0x85EBCA77u, kPrime32_3 = 0xC2B2AE3Du;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87u, kPrime64_2 = 0xC2B2AE3D27D4EB4Fu, kPrime64_3 = 0x165667B19E3779F9u;
constexpr uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63u, kPrime64_5 = 0x27D4EB2F165667C5u;

// The specification's secret for unseeded digests.
alignas(64) constexpr uint8_t kSecret[kSecretSize] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

inline uint64_t word(const uint8_t* from) {
  uint64_t value;
  std::memcpy(&value, from, 8);
  return value;
}

inline void stripe(uint64_t* acc, const uint8_t* data, const uint8_t* secret) {
  for (int i = 0; i < 8; ++i) {
    const uint64_t value = word(data + 8 * i), key = value ^ word(secret + 8 * i);
    acc[i ^ 1] += value;
    acc[i] += (key & 0xFFFFFFFFu) * (key >> 32);
  }
}

inline void scramble(uint64_t* acc) {
  for (int i = 0; i < 8; ++i) {
    const uint64_t value = acc[i] ^ (acc[i] >> 47) ^ word(kSecret + kSecretSize - kStripe + 8 * i);
    acc[i] = value * kPrime32_1;
  }
}

uint64_t folded(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t merged(const uint64_t* acc, const uint8_t* secret, uint64_t result) {
  for (int i = 0; i < 4; ++i)
    result += folded(acc[2 * i] ^ word(secret + 16 * i), acc[2 * i + 1] ^ word(secret + 16 * i + 8));
  result ^= result >> 37;
  result *= 0x165667919E3779F9u;
  return result ^ (result >> 32);
}

// Stripes of `count` * 64 bytes, the first of which is the at-th since the beginning.
struct Stripes {
  uint64_t acc[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  int64_t done = 0;
};

using Consume = void (*)(Stripes&, const uint8_t*, int64_t);
using Finite = bool (*)(const uint8_t*, int64_t, int64_t);

void consume_plain(Stripes& state, const uint8_t* data, int64_t count) {
  for (int64_t i = 0; i < count; ++i, data += kStripe) {
    stripe(state.acc, data, kSecret + 8 * (state.done % kStripes));
    if (++state.done % kStripes == 0) scramble(state.acc);
  }
}

// Whole elements only.
bool finite_plain(const uint8_t* data, int64_t size, int64_t kind) {
  if (kind == kSingle) {
    uint32_t bad = 0;
    for (int64_t i = 0; i < size; i += 4) {
      uint32_t value;
      std::memcpy(&value, data + i, 4);
      bad |= (value & 0x7F800000u) == 0x7F800000u;
    }
    return !bad;
  }
  const uint16_t mask = kind == kHalf ? 0x7C00 : 0x7F80;
  uint16_t bad = 0;
  for (int64_t i = 0; i < size; i += 2) {
    uint16_t value;
    std::memcpy(&value, data + i, 2);
    bad |= (value & mask) == mask;
  }
  return !bad;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) inline void add_avx2(__m256i& acc, const uint8_t* from, const uint8_t* secret) {
  const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const __m256i key = _mm256_xor_si256(value, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret)));
  const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
  acc = _mm256_add_epi64(acc, _mm256_add_epi64(product, _mm256_shuffle_epi32(value, 0x4E)));
}

__attribute__((target("avx2"))) inline void mix_avx2(__m256i& acc, const uint8_t* secret) {
  const __m256i prime = _mm256_set1_epi32(static_cast<int>(kPrime32_1));
  const __m256i key = _mm256_xor_si256(_mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47)),
                                       _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret)));
  const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(key, 32), prime);
  acc = _mm256_add_epi64(_mm256_mul_epu32(key, prime), _mm256_slli_epi64(high, 32));
}

__attribute__((target("avx2"))) void consume_avx2(Stripes& state, const uint8_t* data, int64_t count) {
  __m256i acc0 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(state.acc));
  __m256i acc1 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(state.acc + 4));
  const uint8_t* last = kSecret + kSecretSize - kStripe;
  for (int64_t i = 0; i < count; ++i, data += kStripe) {
    const uint8_t* secret = kSecret + 8 * (state.done % kStripes);
    _mm_prefetch(reinterpret_cast<const char*>(data) + 1024, _MM_HINT_T0);
    add_avx2(acc0, data, secret);
    add_avx2(acc1, data + 32, secret + 32);
    if (++state.done % kStripes == 0) mix_avx2(acc0, last), mix_avx2(acc1, last + 32);
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(state.acc), acc0);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(state.acc + 4), acc1);
}

__attribute__((target("avx2"))) bool finite_avx2(const uint8_t* data, int64_t size, int64_t kind) {
  const __m256i mask = kind == kSingle ? _mm256_set1_epi32(0x7F800000)
                                       : _mm256_set1_epi16(static_cast<short>(kind == kHalf ? 0x7C00 : 0x7F80));
  __m256i bad = _mm256_setzero_si256();
  const int64_t whole = size & ~int64_t{31};
  for (int64_t i = 0; i < whole; i += 32) {
    const __m256i bits = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + i)), mask);
    bad = _mm256_or_si256(bad, kind == kSingle ? _mm256_cmpeq_epi32(bits, mask) : _mm256_cmpeq_epi16(bits, mask));
  }
  return _mm256_testz_si256(bad, bad) && finite_plain(data + whole, size - whole, kind);
}
#endif

bool wide() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2");
#else
  return false;
#endif
}

constexpr int64_t kPiece = 16 << 10;  // looked at twice: from memory, then from the first cache

}  // namespace
}  // namespace gtp

using namespace gtp;

extern "C" {

// Digest of `head` followed by `data` as two words, high before low.  Returns 1 when an element of data is not finite,
// -1 when the whole is too short for this function, else 0.
__attribute__((visibility("default"))) int64_t gtp_verify(const uint8_t* head, int64_t head_size, const uint8_t* data,
                                                          int64_t size, int64_t elements, int64_t plain, uint64_t* digest) {
  const int64_t total = head_size + size;
  if (total < kShortest || head_size > 4096 || size < kStripe * 2) return -1;
  Consume consume = consume_plain;
  Finite finite = finite_plain;
#if defined(__x86_64__)
  if (!plain && wide()) consume = consume_avx2, finite = finite_avx2;
#else
  (void)plain, (void)wide;
#endif
  Stripes state;
  // The head with as many bytes of the data as fill its last stripe; the last stripe of all is not among these, as the
  // digest takes it from the end.
  uint8_t first[4096 + kStripe];
  int64_t left = (total - 1) / kStripe, at = 0;
  if (head_size) {
    const int64_t filled = (head_size + kStripe - 1) / kStripe * kStripe;
    at = filled - head_size;
    if (at > size) return -1;
    std::memcpy(first, head, head_size);
    std::memcpy(first + head_size, data, at);
    const int64_t count = filled / kStripe < left ? filled / kStripe : left;
    consume(state, first, count);
    left -= count;
  }
  bool all = true;
  if (elements != kAny) all = finite(data, at - at % 4, elements);
  int64_t seen = at - at % 4;
  while (left > 0) {
    const int64_t count = left < kPiece / kStripe ? left : kPiece / kStripe;
    consume(state, data + at, count);
    at += count * kStripe, left -= count;
    if (elements != kAny) {
      const int64_t until = at - at % 4;
      all &= finite(data + seen, until - seen, elements);
      seen = until;
    }
  }
  if (elements != kAny) all &= finite(data + seen, size - seen, elements);
  stripe(state.acc, data + size - kStripe, kSecret + kSecretSize - kStripe - 7);
  const uint64_t length = static_cast<uint64_t>(total);
  digest[1] = merged(state.acc, kSecret + 11, length * kPrime64_1);
  digest[0] = merged(state.acc, kSecret + kSecretSize - kStripe - 11, ~(length * kPrime64_2));
  return all ? 0 : 1;
}
}
