// Bytes of files to where they belong (refit/native_copy.py): read in pieces that stay in a core's cache, looked at and
// converted there, and stored past the cache.  Memory sees each byte once in and once out; reading straight into memory
// that is not in the cache would also fetch what is about to be overwritten.
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace gtp {
namespace {

enum Convert : int64_t { kAsIs = 0, kBF16ToF32, kF32ToBF16 };

// As refit.source.Rows: row i is the bytes from start + i * source_stride and goes to address + i * stride.
struct ReadRows {
  int64_t start, source_stride, size, count;
  uint8_t* address;
  int64_t stride, convert;
};

// Bytes that must be there: those of `value`, where the bits of `mask` are set.
struct ReadCheck {
  int64_t start, size;
  const uint8_t *mask, *value;
};

struct ReadJob {
  int64_t descriptor, base;  // rows count from byte `base` of the file; of memory where there is no file (below 0)
  int64_t whole;             // nonzero: bytes are read on to this one whether they are asked for or not
  const ReadRows* rows;
  int64_t row_count;
  const ReadCheck* checks;  // in order of their start, which counts from byte base + check_base
  int64_t check_count, check_base;
};

enum Status : int64_t { kDone = 0, kEndsEarly = 1, kDiffers = 2, kNoMemory = 3, kFailed = 4 };

struct ReadOutcome {
  int64_t status, job, detail, offset;  // detail: bytes that lack, or errno
};

// As the system's pread, which it is unless a test gives another.
using Pread = ssize_t (*)(int, void*, size_t, off_t);

constexpr int64_t kVersion = 2;
constexpr int64_t kPage = 4096;
constexpr int64_t kPiece = 64 << 10;
// Unwanted bytes between two rows that are read along: as dear as one more call.
constexpr int64_t kSkipped = 16 << 10;
// From so many bytes on a store goes past the cache; below, half-filled lines would cost more.
constexpr int64_t kStreamed = 1 << 10;
constexpr int64_t kLine = 64;
constexpr int64_t kConverted = 1024;  // elements at a time

void stream(uint8_t* to, const uint8_t* from, int64_t size) {
#if defined(__SSE2__)
  if (size >= kStreamed) {
    const int64_t head = -reinterpret_cast<intptr_t>(to) & (kLine - 1);
    std::memcpy(to, from, head);
    to += head, from += head, size -= head;
    for (; size >= kLine; to += kLine, from += kLine, size -= kLine) {
      const __m128i* in = reinterpret_cast<const __m128i*>(from);
      __m128i* out = reinterpret_cast<__m128i*>(to);
      const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
      const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
      _mm_stream_si128(out, a);
      _mm_stream_si128(out + 1, b);
      _mm_stream_si128(out + 2, c);
      _mm_stream_si128(out + 3, d);
    }
  }
#endif
  std::memcpy(to, from, size);
}

void finish_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

void widen(uint8_t* to, const uint8_t* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint16_t half;
    std::memcpy(&half, from + 2 * i, 2);
    const uint32_t word = static_cast<uint32_t>(half) << 16;
    std::memcpy(to + 4 * i, &word, 4);
  }
}

// To the nearest, ties to even, as torch does it; any NaN becomes the one that torch writes.
void narrow(uint8_t* to, const uint8_t* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t word;
    std::memcpy(&word, from + 4 * i, 4);
    const uint32_t rounded = (word + 0x7FFFu + ((word >> 16) & 1u)) >> 16;
    const uint16_t half = (word & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : static_cast<uint16_t>(rounded);
    std::memcpy(to + 2 * i, &half, 2);
  }
}

class Reader {
 public:
  Reader(uint8_t* buffer, Pread pread) : buffer_(buffer), pread_(pread) {}

  // Carries out `jobs[0]`; the others, up to `end`, are what comes next.
  bool run(const ReadJob* jobs, const ReadJob* end, ReadOutcome& outcome) {
    const ReadJob& job = *jobs;
    // What the buffer holds may be of use still: the items of a checkpoint lie one after another.
    const bool same = job.descriptor >= 0 && job_ && job_->descriptor == job.descriptor;
    const int64_t moved = same ? job_->base - job.base : 0;
    from_ = same ? from_ + moved : 0, to_ = same ? to_ + moved : 0;
    job_ = &job, end_ = end, outcome_ = &outcome;
    held_ = buffer_;
    if (job.descriptor < 0) {  // all of it is there
      held_ = reinterpret_cast<const uint8_t*>(job.base);
      from_ = 0, to_ = INT64_MAX;
    }
    int64_t check = 0;
    const int64_t first = job.row_count ? job.rows[0].start : INT64_MAX;
    for (; check < job.check_count && job.checks[check].start + job.check_base < first; ++check)
      if (!compare(job.checks[check])) return false;
    for (row_ = 0; row_ < job.row_count; ++row_)
      if (!put(job.rows[row_])) return false;
    for (; check < job.check_count; ++check)
      if (!compare(job.checks[check])) return false;
    return true;
  }

 private:
  bool put(const ReadRows& row) {
    const int64_t item = row.convert == kBF16ToF32 ? 2 : row.convert == kF32ToBF16 ? 4 : 1;
    for (int64_t i = 0; i < row.count; ++i) {
      int64_t at = row.start + i * row.source_stride, left = row.size;
      uint8_t* to = row.address + i * row.stride;
      while (left > 0) {
        if ((at < from_ || to_ - at < item) && !fill(at, stretch(i, at) - at)) return false;
        int64_t count = std::min(left, to_ - at);
        count -= count % item;
        to = store(to, held_ + (at - from_), count, row.convert);
        at += count, left -= count;
      }
    }
    return true;
  }

  bool compare(const ReadCheck& check) {
    for (int64_t done = 0; done < check.size;) {
      const int64_t at = check.start + job_->check_base + done;
      if ((at < from_ || at >= to_) && !fill(at, job_->whole ? job_->whole - at : check.size - done)) return false;
      const int64_t count = std::min(check.size - done, to_ - at);
      const uint8_t* found = held_ + (at - from_);
      uint8_t wrong = 0;
      for (int64_t i = 0; i < count; ++i) wrong |= (found[i] & check.mask[done + i]) ^ check.value[done + i];
      if (wrong) return fail(kDiffers, 0, at);
      done += count;
    }
    return true;
  }

  // One past the last of the bytes that are read one after another from `at`, in the i-th of the current rows.
  int64_t stretch(int64_t i, int64_t at) const {
    if (job_->whole) return job_->whole;
    const ReadRows* row = job_->rows + row_;
    int64_t end = row->start + i * row->source_stride + row->size;
    if (i + 1 < row->count) {
      const int64_t gap = row->source_stride - row->size;
      if (gap < 0 || gap > kSkipped) return end;
      end = row->start + (row->count - 1) * row->source_stride + row->size;
    }
    for (++row; row < job_->rows + job_->row_count && end - at < kPiece; ++row) {
      const int64_t gap = row->start - end;
      if (gap < 0 || gap > kSkipped) break;
      const int64_t inner = row->count > 1 ? row->source_stride - row->size : 0;
      const int64_t rows = inner < 0 || inner > kSkipped ? 1 : row->count;
      end = row->start + (rows - 1) * row->source_stride + row->size;
      if (rows != row->count) break;
    }
    return end;
  }

  // One past the last of the bytes that follow on a whole job's, in the jobs after it.
  int64_t onward(int64_t at) const {
    int64_t end = job_->base + job_->whole;
    for (const ReadJob* next = job_ + 1; next < end_ && end - job_->base - at < kPiece; ++next) {
      const int64_t gap = next->base + next->check_base - end;
      if (next->descriptor != job_->descriptor || !next->whole || gap < 0 || gap > kSkipped) break;
      end = next->base + next->whole;
    }
    return end - job_->base;
  }

  // Begins on a page of the file, as the buffer does on one of memory: the system copies such pieces fastest, and where
  // the bytes go is seldom as even.
  bool fill(int64_t at, int64_t wanted) {
    from_ = to_ = at - ((job_->base + at) & (kPage - 1));
    const int64_t limit = from_ + kPiece, needed = std::min(at + wanted, limit);
    const int64_t end = job_->whole ? std::max(needed, std::min(onward(at), limit)) : needed;
    while (to_ < end) {
      const ssize_t got = pread_(static_cast<int>(job_->descriptor), buffer_ + (to_ - from_), end - to_, job_->base + to_);
      if (got > 0) {
        to_ += got;
      } else if (got < 0 && errno == EINTR) {
        continue;
      } else if (to_ >= needed) {
        break;  // what lacks is another job's
      } else {
        return got ? fail(kFailed, errno, to_) : fail(kEndsEarly, needed - to_, to_);
      }
    }
    return true;
  }

  uint8_t* store(uint8_t* to, const uint8_t* from, int64_t size, int64_t convert) {
    if (convert == kAsIs) {
      stream(to, from, size);
      return to + size;
    }
    alignas(kLine) uint8_t made[4 * kConverted];
    const int64_t item = convert == kBF16ToF32 ? 2 : 4, result = 6 - item;
    for (int64_t done = 0, count; done < size; done += count * item) {
      count = std::min(kConverted, (size - done) / item);
      (convert == kBF16ToF32 ? widen : narrow)(made, from + done, count);
      stream(to, made, count * result);
      to += count * result;
    }
    return to;
  }

  bool fail(int64_t status, int64_t detail, int64_t at) {
    outcome_->status = status, outcome_->detail = detail, outcome_->offset = job_->base + at;
    return false;
  }

  uint8_t* const buffer_;
  const Pread pread_;
  const uint8_t* held_ = nullptr;  // the buffer, or the memory that is read from
  const ReadJob *job_ = nullptr, *end_ = nullptr;
  ReadOutcome* outcome_ = nullptr;
  int64_t row_ = 0;
  int64_t from_ = 0, to_ = 0;  // what the buffer holds
};

struct Free {
  void operator()(uint8_t* memory) const { std::free(memory); }
};

// This thread's piece, kept: fresh memory costs more than what is copied there.
uint8_t* piece() {
  thread_local std::unique_ptr<uint8_t, Free> kept;
  if (!kept) kept.reset(static_cast<uint8_t*>(std::aligned_alloc(kPage, kPiece)));
  return kept.get();
}

void run_jobs(const ReadJob* jobs, int64_t count, ReadOutcome& outcome, Pread pread) {
  outcome = {kDone, 0, 0, 0};
  uint8_t* buffer = piece();
  if (buffer == nullptr) {
    outcome.status = kNoMemory;
    return;
  }
  Reader reader(buffer, pread);
  for (; outcome.job < count; ++outcome.job)
    if (!reader.run(jobs + outcome.job, jobs + count, outcome)) break;
  finish_streams();
}

}  // namespace
}  // namespace gtp

using namespace gtp;

extern "C" {

// Sizes of the structures and the version of what they mean, by which Python checks its own.
__attribute__((visibility("default"))) void gtp_read_sizes(int64_t* sizes) {
  sizes[0] = sizeof(ReadRows), sizes[1] = sizeof(ReadCheck), sizes[2] = sizeof(ReadJob), sizes[3] = sizeof(ReadOutcome);
  sizes[4] = kVersion;
}

// Carries out jobs in order, up to the first that fails; what the rows' memory holds then is anything.
// other_pread: null but in tests.
__attribute__((visibility("default"))) void gtp_read(const ReadJob* jobs, int64_t count, ReadOutcome* outcome,
                                                     Pread other_pread) {
  run_jobs(jobs, count, *outcome, other_pread ? other_pread : pread);
}
}
